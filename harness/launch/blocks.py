"""The parts of a batch script that are the same for every job; `@name@` stands for what a job puts there."""

from __future__ import annotations


def fill(text: str, **values: object) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


IN_CONTAINER = """\
# --no-container-mount-home: packages in ~/.local would come before the image's. --container-env: variables that the
# image sets too are taken from the job.
container=(@container@)
# The harness is in the image alone. --overlap: a step before may still be ending.
on_first_node=(srun --nodes=1 --ntasks=1 --relative=0 --overlap "${container[@]}")"""

EVERY_RANK_SEES_ALL_GPUS = """\
# --gpu-bind=none: a rank sees all GPUs of its node and takes that of its local rank. Were one visible to each
# (--gpus-per-task), NCCL could not open its neighbours' memory over NVLink."""

# Jobs of this harness keep out of each other's way by the lock, which the kernel opens when this shell ends; the time
# between a look at the port and rank 0's listening would be a gap.
MEETING_POINT = """\
# Where the ranks meet. Jobs that share their first node, whatever their ids, hold the locks of different ports until
# they end. Below 32768: higher ports are given to outgoing connections.
choose_port() {
  local try lock
  for try in {0..199}; do
    MASTER_PORT=$((20000 + (SLURM_JOB_ID + 61 * try) % 12000))
    lock=/tmp/harness-port-$MASTER_PORT
    [[ -e $lock ]] || (umask 022 && : >"$lock") 2>/dev/null
    exec {port_lock}<"$lock" || continue
    if flock --nonblock "$port_lock" && ! (: <>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; then
      return 0
    fi
    exec {port_lock}<&-
  done
  echo "no free port from 20000 to 31999 on $(hostname)" >&2
  return 1
}
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR="@master_addr@"
choose_port || exit 1
export MASTER_ADDR MASTER_PORT
echo "attempt $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST, rank 0 at $MASTER_ADDR:$MASTER_PORT\""""

PREFLIGHT = """\
# What is wrong on a node is told before the ranks meet, who could only wait for each other. A node that says nothing is
# named when its time is over.
preflight() {
  local said=$logs/preflight-$SLURM_JOB_ID.jsonl nodes
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  timeout --kill-after=5 @limit@ "${on_each_node[@]}" \\
    "${harness[@]}" preflight probe --run-dir="$run_dir"@needed@ --timeout-s=@timeout@ >"$said"
  judge "$said" @expected@ || return 1
  timeout --kill-after=5 @limit@ "${@reduce_step@[@]}" \\
    "${harness[@]}" preflight reduce --timeout-s=@timeout@ >"$said.reduce"
  judge "$said.reduce"
}
# Where the first node hangs too, the names of those that have said nothing are all that can be told.
judge() {
  timeout --kill-after=5 @limit@ "${on_first_node[@]}" \\
    "${harness[@]}" preflight judge --nodes="$nodes" "${@:2}" <"$1" && return 0
  (($? == 1)) && return 1
  echo "preflight: $first_node: what the nodes said could not be read there within @limit@ s"
  for node in ${nodes//,/ }; do
    grep -q "node.: .${node}[^-.a-z0-9]" "$1" || echo "preflight: $node: the node has said nothing"
  done
  return 1
}
preflight || { echo "preflight: job $SLURM_JOB_ID does not start" >&2; exit 1; }"""

FORWARDING = """\
# The ranks checkpoint at their next step and end with code 75. TERM comes where Slurm preempts without a warning.
step='' warned='' ended=''
stop() {
  echo "$1 at $(date +%T)${step:+: the ranks checkpoint and stop}"
  [[ $step ]] || run_again
  # More than once: a rank that still imports does not see it yet.
  while kill -USR2 "$step" 2>/dev/null; do sleep 5; done &
}
# Refused where Slurm is requeueing the job already. Either way Slurm ends this script. A job that Slurm itself is
# ending, with no warning before, was cancelled by somebody: it would go back into the queue all the same.
run_again() {
  if [[ ! $warned && $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == COMPLETING ]]; then
    echo "cancelled: the job does not go on by itself"
    exit 1
  fi
  scontrol requeue "$SLURM_JOB_ID"
  sleep 120
  exit 1
}
trap 'warned=yes; stop USR2' USR2
trap 'ended=yes; stop TERM' TERM"""

SRUN_RANKS = """\
# Until a rank handles USR2 it ignores it: while it imports, the signal would end it.
start_rank='
  trap "" USR2
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec "$@"'
# --wait: a rank that outlives another by a minute waits for it in vain. With --kill-on-bad-exit=1 the others' last
# words would be lost, and srun's code would be that of the signal that ended them.
"${on_each_rank[@]}" --kill-on-bad-exit=0 --wait=60 --open-mode=append \\
  --output="$logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-rank%t.out" bash -c "$start_rank" rank "${program[@]}" &
step=$!
echo "rank 0 writes to $logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-rank0.out\""""

TORCHRUN_RANKS = """\
# The agent ignores USR2, which would end it, and its ranks are told one by one. Ranks are numbered by node, as under
# srun. A failed job is started again by Slurm, not by torchrun.
start_node='
  trap "" USR2
  "$1" "$2" "$3" --rdzv-id="$SLURM_JOB_ID" --node-rank="$SLURM_NODEID" \\
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:4}" &
  agent=$!
  trap "kill -USR2 \\$(cat /proc/$agent/task/$agent/children)" USR2
  while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
  wait "$agent"'
# --wait: a node that outlives another by a minute waits for it in vain. With --kill-on-bad-exit=1 the others' last
# words would be lost, and srun's code would be that of the signal that ended them.
"${on_each_node[@]}" --kill-on-bad-exit=0 --wait=60 --open-mode=append \\
  --output="$logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-node%n.out" bash -c "$start_node" node "${program[@]}" &
step=$!
echo "rank 0 writes to $logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-node0.out\""""

ENDING = """\
# A trap interrupts wait; the last one gives the step's own code.
while kill -0 "$step" 2>/dev/null; do wait "$step"; done
wait "$step"
code=$?
if ((code == 0)); then
  echo "finished: $run_dir"
  exit 0
fi
# Before the time limit there is little time and nothing to decide: the next attempt notes how this one ended. Not where
# Slurm has begun to end the job, as in a preemption: it would be put back into the queue twice.
if [[ $warned && ! $ended ]] && grep -qs '"reason": "signal"' "$run_dir/_stopped.json"; then
  made=$(sed 's/.*"step": \\([0-9]*\\).*/\\1/' "$run_dir/_stopped.json")
  echo "asked to stop after step $made: it goes on from its checkpoint"
  run_again
fi
timeout --kill-after=5 @limit@ "${on_first_node[@]}" \\
  "${harness[@]}" requeue "$run_dir" --exit-code "$code" --max-same @max_same@
decided=$?
if ((decided == 0)); then run_again; fi
if ((decided == 124 || decided == 137)); then
  echo "$first_node does not say within @limit@ s whether to start again: another node may"
  run_again
fi
exit "$code\""""
