# --gpu-bind=none: a rank sees all GPUs of its node and takes the one of its local rank. With one visible GPU per rank
# (--gpus-per-task), NCCL could not open the memory of the other GPUs over NVLink.
