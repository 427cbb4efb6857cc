#!/usr/bin/env bash
# Build the image with docker, podman or buildah, whichever is installed.
#
#   docker/build.sh [--tag NAME] [--base IMAGE] [--sqsh FILE] [-- BUILD ARGUMENT...]
#
# --base replaces BASE_IMAGE and BASE_DIGEST of docker/versions.env; --sqsh also writes the image for Enroot and Pyxis,
# and FILE.sha256 next to it.
# ENGINE selects docker, podman or buildah if several are installed.
set -euo pipefail
from=$PWD
cd "$(dirname "$0")/.."

# shellcheck source=docker/versions.env
source docker/versions.env
tag=megatron-sft-harness:latest
sqsh=
extra=()
while (($#)); do
  case $1 in
    --tag | --base | --sqsh)
      [[ $# -ge 2 ]] || { echo "build.sh: $1 needs a value" >&2; exit 2; }
      case $1 in
        --tag) tag=$2 ;;
        --base) BASE_IMAGE=$2 BASE_DIGEST= ;;
        --sqsh) [[ $2 == /* ]] && sqsh=$2 || sqsh=$from/$2 ;;
      esac
      shift 2
      ;;
    --)
      shift
      extra=("$@")
      break
      ;;
    -h | --help)
      sed -n '2,8s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      echo "build.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done

# Engines refuse a name with a tag and a digest. A colon before a slash is that of a port.
if [[ -n $BASE_DIGEST ]]; then
  [[ $BASE_DIGEST =~ ^sha256:[0-9a-f]{64}$ ]] || { echo "build.sh: BASE_DIGEST is $BASE_DIGEST" >&2; exit 2; }
  [[ ${BASE_IMAGE##*/} != *:* ]] || BASE_IMAGE=${BASE_IMAGE%:*}
  BASE_IMAGE=$BASE_IMAGE@$BASE_DIGEST
fi

if [[ $BASE_IMAGE != *@sha256:* ]]; then
  echo "build.sh: warning: $BASE_IMAGE is not pinned, and its tag may name another image tomorrow;" \
    "BASE_DIGEST=sha256:... in docker/versions.env pins it" >&2
fi

engine=${ENGINE:-}
if [[ -z $engine ]]; then
  for name in docker podman buildah; do
    if command -v "$name" >/dev/null; then
      engine=$name
      break
    fi
  done
fi
case $engine in
  # podman and buildah write the OCI format by default, which has no health check.
  docker) build=(docker build) ;;
  podman) build=(podman build --format docker) ;;
  buildah) build=(buildah build --format docker --layers) ;;
  '')
    echo "build.sh: docker, podman and buildah are not installed; install one of them" >&2
    exit 2
    ;;
  *)
    echo "build.sh: ENGINE is $engine, expected docker, podman or buildah" >&2
    exit 2
    ;;
esac

if [[ -n $sqsh ]] && ! command -v enroot >/dev/null; then
  echo "build.sh: --sqsh needs enroot, which is not installed" >&2
  exit 2
fi
if [[ -n $sqsh && $engine == buildah ]]; then
  echo "build.sh: enroot imports from docker and podman; set ENGINE=podman" >&2
  exit 2
fi
# Refused before the build, which takes minutes.
if [[ -n $sqsh && -e $sqsh ]]; then
  echo "build.sh: $sqsh exists already, and enroot does not overwrite; remove it first" >&2
  exit 2
fi
if [[ -n $sqsh && ! -d $(dirname "$sqsh") ]]; then
  echo "build.sh: the folder of $sqsh does not exist" >&2
  exit 2
fi

"${build[@]}" --build-arg "BASE_IMAGE=$BASE_IMAGE" --tag "$tag" --file docker/Dockerfile "${extra[@]}" .
case $engine in
  buildah) size=$(buildah images --format '{{.Size}}' "$tag") ;;
  *) size=$("$engine" image inspect --format '{{.Size}}' "$tag" | numfmt --to=si --suffix=B) ;;
esac
echo "built $tag on $BASE_IMAGE, $size"

if [[ -n $sqsh ]]; then
  case $engine in
    docker) source_uri="dockerd://$tag" ;;
    podman) source_uri="podman://$tag" ;;
  esac
  enroot import --output "$sqsh" "$source_uri"
  # With it, jobs that copy the image to their nodes need not read it twice (cluster.local_dir).
  (cd "$(dirname "$sqsh")" && sha256sum "$(basename "$sqsh")" >"$(basename "$sqsh").sha256")
  echo "wrote $sqsh"
fi
