# The agent ignores USR2, which would end it, and the signal goes to each of its ranks. Ranks are numbered by node, as
# under srun. This script starts failed ranks again, not torchrun.
start_node='
  trap "" USR2
  "$1" "$2" "$3" --rdzv-id="$SLURM_JOB_ID" --node-rank="$SLURM_NODEID" \
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:4}" &
  agent=$!
  trap "kill -USR2 \$(cat /proc/$agent/task/$agent/children)" USR2
  while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
  wait "$agent"'
