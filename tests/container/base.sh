#!/usr/bin/env bash
# Build an image to use in place of NVIDIA's: Debian with Python, PyTorch and PIP_CONSTRAINT. Needs root, buildah,
# mmdebstrap, two minutes and 1.5 GB.
#
#   base.sh TAG TORCH_REQUIREMENT
set -euo pipefail
tag=$1
torch=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$work/base.tar"
container=$(buildah from scratch)
buildah add -q "$container" "$work/base.tar" / >/dev/null
# The certificates and settings with which this machine's pip reaches its index, mounted during the build only.
mounts=()
for path in /etc/pip.conf /etc/ssl/certs ${PIP_FIND_LINKS:-}; do
  [[ -e $path ]] && mounts+=(-v "$path:$path:ro")
done
while read -r path; do
  [[ -e $path ]] && mounts+=(-v "$path:$path:ro")
done < <(grep -oE 'file://[^ ]+' /etc/pip.conf 2>/dev/null | sed 's#^file://##' || true)
buildah run --isolation=chroot "${mounts[@]}" "$container" -- \
  env PIP_BREAK_SYSTEM_PACKAGES=1 PIP_CERT=/etc/ssl/certs/ca-certificates.crt PIP_FIND_LINKS="${PIP_FIND_LINKS:-}" \
  pip install --quiet --no-cache-dir --root-user-action=ignore "$torch" numpy psutil
buildah copy -q "$container" /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt >/dev/null
# shellcheck disable=SC2016 # expanded in the container
buildah run --isolation=chroot "$container" -- \
  sh -c 'mkdir -p /etc/pip && pip freeze | grep -iE "^(torch|numpy)==" >/etc/pip/constraint.txt'
buildah config --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
  --env PIP_BREAK_SYSTEM_PACKAGES=1 --env PIP_CONSTRAINT=/etc/pip/constraint.txt --env NVIDIA_PYTORCH_VERSION=standin \
  --workingdir /workspace --cmd /bin/bash "$container"
buildah commit -q --rm "$container" "$tag" >/dev/null
