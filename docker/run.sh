#!/usr/bin/env bash
# Start a container on one node with docker or podman:
#
#   docker/run.sh [-v HOST:CONTAINER ...] [--] COMMAND...
#   docker/run.sh -v "$PWD/data:/data" -v "$PWD/runs:/runs" torchrun --nproc-per-node 8 -m harness.recipes.sft data.path=/data/mine runs=/runs
#
# Variables: IMAGE, ENGINE, SHM_SIZE (shared memory, 32g) and ULIMITS.
set -euo pipefail

image=${IMAGE:-megatron-sft-harness:latest}
engine=${ENGINE:-$(command -v docker >/dev/null && echo docker || echo podman)}
options=()
while (($#)); do
  case $1 in
    -v)
      [[ $# -ge 2 ]] || { echo "run.sh: -v needs HOST:CONTAINER" >&2; exit 2; }
      options+=(-v "$2")
      shift 2
      ;;
    -h | --help)
      sed -n '2,7s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) break ;;
  esac
done
(($#)) || { echo "run.sh: no command; see --help" >&2; exit 2; }
command -v "$engine" >/dev/null || { echo "run.sh: $engine is not installed; install docker or podman" >&2; exit 2; }
# Docker gets the GPUs from NVIDIA's runtime, podman from the device list of NVIDIA's toolkit (CDI).
if [[ $engine == docker && $(docker info 2>/dev/null) == *nvidia* ]]; then
  options+=(--gpus all)
elif [[ $engine == podman && (-e /etc/cdi/nvidia.yaml || -e /var/run/cdi/nvidia.yaml) ]]; then
  options+=(--device nvidia.com/gpu=all)
fi

# An init process reaps orphans and forwards signals, if the engine has one.
if [[ $engine == docker ]] || command -v catatonit >/dev/null || [[ -x /usr/libexec/podman/catatonit ]]; then
  options+=(--init)
fi

# --shm-size: loader workers and NCCL pass data through /dev/shm, and the default of 64 MB causes a bus error.
# memlock: RDMA pins its buffers. stack: PyTorch's threads need more than the default. ULIMITS= (empty) sets no limits,
# for an engine that may not raise them.
# --user: files that a run writes to mounted folders belong to the user who started it.
for limit in ${ULIMITS-memlock=-1 stack=67108864}; do
  options+=(--ulimit "$limit")
done
exec "$engine" run --rm --shm-size="${SHM_SIZE:-32g}" --user "$(id -u):$(id -g)" "${options[@]}" "$image" "$@"
