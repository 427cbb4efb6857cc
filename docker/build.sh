#!/usr/bin/env bash
# Build the image with docker, podman or buildah, whichever is here.
#
#   docker/build.sh [--tag NAME] [--base IMAGE] [--sqsh FILE] [-- BUILD ARGUMENT...]
#
# --base takes the place of BASE_IMAGE of docker/versions.env; --sqsh also writes the image for Enroot and Pyxis.
# ENGINE names one of docker, podman, buildah where several are here.
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
        --base) BASE_IMAGE=$2 ;;
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
      sed -n '2,7s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    *)
      echo "build.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done

engine=${ENGINE:-}
if [[ -z $engine ]]; then
  for one in docker podman buildah; do
    if command -v "$one" >/dev/null; then
      engine=$one
      break
    fi
  done
fi
case $engine in
  # The health check is no part of the OCI format, which podman and buildah write unless told otherwise.
  docker) build=(docker build) ;;
  podman) build=(podman build --format docker) ;;
  buildah) build=(buildah build --format docker --layers) ;;
  '')
    echo "build.sh: none of docker, podman and buildah is here; install one" >&2
    exit 2
    ;;
  *)
    echo "build.sh: ENGINE is $engine, expected docker, podman or buildah" >&2
    exit 2
    ;;
esac

if [[ -n $sqsh ]] && ! command -v enroot >/dev/null; then
  echo "build.sh: --sqsh needs enroot, which is not here" >&2
  exit 2
fi
if [[ -n $sqsh && $engine == buildah ]]; then
  echo "build.sh: enroot imports from docker and podman; set ENGINE=podman" >&2
  exit 2
fi
# Told before the minutes of a build.
if [[ -n $sqsh && -e $sqsh ]]; then
  echo "build.sh: $sqsh is there already, and enroot writes over nothing; remove it first" >&2
  exit 2
fi
if [[ -n $sqsh && ! -d $(dirname "$sqsh") ]]; then
  echo "build.sh: there is no folder for $sqsh" >&2
  exit 2
fi

"${build[@]}" --build-arg "BASE_IMAGE=$BASE_IMAGE" --tag "$tag" --file docker/Dockerfile "${extra[@]}" .
echo "built $tag on $BASE_IMAGE"

if [[ -n $sqsh ]]; then
  case $engine in
    docker) source_uri="dockerd://$tag" ;;
    podman) source_uri="podman://$tag" ;;
  esac
  enroot import --output "$sqsh" "$source_uri"
  echo "wrote $sqsh"
fi
