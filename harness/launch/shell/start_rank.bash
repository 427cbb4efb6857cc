# USR2 is ignored until a rank handles it: during the imports it would end the rank.
start_rank='
  trap "" USR2
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec "$@"'
