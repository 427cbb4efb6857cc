#!/usr/bin/env bash
# Build an image to use in place of NVIDIA's: Debian with Python 3.12, PyTorch for CUDA, Transformer Engine without kernels,
# other versions of some packages than this project pins, and PIP_CONSTRAINT. Needs root, buildah and mmdebstrap; a minute.
#
#   base.sh TAG PYTHON
#
# PYTHON is of an environment with PyTorch (.ci/versions makes one). Its folder of packages is not copied, which would take
# 4 GB: whoever builds on the base, or runs it, mounts it at /opt/standin/packages.
set -euo pipefail
tag=$1
python=$2
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

mmdebstrap --quiet --variant=minbase \
  --include=ca-certificates,libssl3,libffi8,libsqlite3-0,libbz2-1.0,liblzma5,libreadline8,zlib1g,libexpat1 \
  bookworm "$work/base.tar"
container=$(buildah from scratch)
buildah add -q "$container" "$work/base.tar" / >/dev/null
# The interpreter, without its tests and packages: at its own path, because it was built for that.
tar -C / --exclude='*/test' --exclude='*/site-packages/*' --exclude='*/__pycache__' --exclude='*.a' -cf "$work/python.tar" \
  "${prefix#/}"
buildah add -q "$container" "$work/python.tar" / >/dev/null
site=${prefix#/}/lib/python3.12/site-packages
mkdir -p "$work/site/$site" "$work/site/opt/standin/packages" "$work/site/etc/pip"
# As NVIDIA's images have them: older than those that this project pins, and held by a constraint.
printf '%s\n' click==8.1.8 regex==2024.11.6 huggingface-hub==0.36.0 numpy==2.1.0 >"$work/site/etc/pip/constraint.txt"
"$python" -m pip install --quiet --no-cache-dir --target "$work/site/$site" --requirement "$work/site/etc/pip/constraint.txt" \
  'pip>=25'
# PyTorch and what it needs are links into the mounted folder.
for name in torch torchgen functorch triton nvidia cuda sympy networkx jinja2 markupsafe mpmath setuptools _distutils_hack \
  filelock fsspec typing_extensions.py psutil; do
  [[ ! -e $packages/$name || -e $work/site/$site/$name ]] ||
    ln -s "/opt/standin/packages/$name" "$work/site/$site/$name"
done
for info in "$packages"/{torch,triton,nvidia_*,cuda_*,sympy,networkx,jinja2,markupsafe,mpmath,setuptools,filelock,fsspec}-*.dist-info \
  "$packages"/{typing_extensions,psutil}-*.dist-info; do
  [[ ! -e $info || -e $work/site/$site/$(basename "$info") ]] ||
    ln -s "/opt/standin/packages/$(basename "$info")" "$work/site/$site/"
done
cp -r "$here/../engine_stub/transformer_engine" "$work/site/$site/"
mkdir "$work/site/$site/transformer_engine-2.14.0.dist-info"
printf 'Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.14.0\n' \
  >"$work/site/$site/transformer_engine-2.14.0.dist-info/METADATA"
printf '#!/bin/sh\nexec python3 -m torch.distributed.run "$@"\n' >"$work/torchrun"
buildah add -q "$container" "$work/site" / >/dev/null
buildah copy -q "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt >/dev/null
buildah copy -q --chmod 755 "$container" "$work/torchrun" /usr/local/bin/torchrun >/dev/null
buildah run --isolation=chroot "$container" -- sh -c "chmod 755 /root; ln -s $prefix/bin/python3.12 /usr/local/bin/python3"
buildah config --env "PATH=$prefix/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
  --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
  --env PIP_CONSTRAINT=/etc/pip/constraint.txt --env NVIDIA_PYTORCH_VERSION=standin \
  --workingdir /workspace --cmd /bin/bash "$container"
buildah commit -q --rm "$container" "$tag" >/dev/null
