# Nodes that jobs of this run leave out: those of cluster.exclude, and those that failed.
excluded() {
  { echo @exclude@; cut -s -d ' ' -f 1 "$run_dir/excluded_nodes" 2>/dev/null | sort -u; } | grep . | paste -sd,
}
# Leave out the nodes of a file, if the partition has enough others to wait for.
leave_out() {
  local names left
  [[ -s $1 ]] || return 1
  names=$(excluded)
  names=$(scontrol show hostnames "${names:+$names,}$(cut -d ' ' -f 1 "$1" | paste -sd,)")
  left=$(sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION:-}" --states=idle,alloc,mix,comp,resv \
    --format=%N | tr -d ' ' | sort -u | grep -cvxF -f <(echo "$names"))
  if ((left < SLURM_JOB_NUM_NODES)); then
    echo "without these nodes the partition has $left, and the job needs $SLURM_JOB_NUM_NODES"
    return 1
  fi
  cat "$1" >>"$run_dir/excluded_nodes"
}
# Ranks that are slower than the others have saved and ended: their node is left out, or kept where others are too few.
leave_out_slow() {
  local slow=$logs/straggler-$SLURM_JOB_ID.failed
  [[ -s $slow ]] || return 0
  sed 's/^[^ ]* /too slow: /' "$slow"
  if @spare@leave_out "$slow"; then
    here=false
  else
    here=true
    cat "$slow" >>"$run_dir/kept_nodes"
    echo "kept: $(cut -d ' ' -f 1 "$slow" | paste -sd,)"
  fi
  rm "$slow"
}
# The run is over: nothing is left for a successor.
forget_run() {
  [[ $(cat "$run_dir/_job" 2>/dev/null) == "$SLURM_JOB_ID" ]] && rm -f "$run_dir/_job"
  if [[ -s $logs/successor-$SLURM_JOB_ID ]]; then
    until_answered scancel "$(cat "$logs/successor-$SLURM_JOB_ID")" || echo "$answer"
  fi
}
end_run() {
  forget_run
  exit "$1"
}
# One successor per job, however often the job restarts.
submit_successor() {
  local nodes
  [[ -s $logs/successor-$SLURM_JOB_ID ]] && return 0
  [[ -e $run_dir/job.sbatch ]] || cp "$0" "$run_dir/job.sbatch"
  nodes=$(excluded)
  if ! until_answered sbatch --parsable --dependency="@dependency@" ${nodes:+"--exclude=$nodes"} \
    --export="ALL,HARNESS_PREDECESSOR=$SLURM_JOB_ID" "$run_dir/job.sbatch"; then
    echo "sbatch refuses a successor of job $SLURM_JOB_ID: $answer"
    return 1
  fi
  answer=${answer##*$'\n'}
  echo "${answer%%;*}" >"$logs/successor-$SLURM_JOB_ID"
  echo "job ${answer%%;*} continues the run if this job cannot be requeued"
}
leave_out_nodes() {
  local nodes
  nodes=$(excluded)
  [[ ! $nodes || $left_out == "$nodes" ]] && return 0
  if until_answered scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$nodes"; then
    left_out=$nodes
    echo "left out from now on: $nodes"
  else
    echo "the nodes $nodes cannot be left out: $answer"
  fi
}
# Requeue the job, which ends this script. A controller that dies in that moment may not remember it, so ask again. A
# requeue would start a cancelled job again, and one that Slurm has requeued itself a second time.
run_again() {
  trap '' USR2
  trap 'ended=yes' TERM
  while ask_about "$SLURM_JOB_ID"; do
    if ((restarts > ${SLURM_RESTART_COUNT:-0})); then
      leave_out_nodes
      [[ $ended ]] && exit 1
      sleep 60 &
      wait $!
    elif [[ $state == COMPLETING && $reason != TimeLimit ]]; then
      echo "cancelled: the job is not requeued"
      end_run 1
    elif answer=$(scontrol requeue "$SLURM_JOB_ID" 2>&1); then
      printf 'requeued at %(%T)T\n'
      leave_out_nodes # at once: the job may start again within seconds
      sleep 5 &
      wait $!
    elif [[ ! $answer || $answer =~ $no_answer|pending|ompleting|transition ]]; then
      sleep 1
    else
      break
    fi
  done
  echo "Slurm does not requeue job $SLURM_JOB_ID: $answer"
  submit_successor && exit 1
  end_run 1
}
# Slurm kills this script some seconds (KillWait) after TERM, perhaps before the ranks have saved and it gets to
# run_again. Where Slurm preempts, or lost a node, it requeues the job itself.
before_the_kill() {
  ask_about "$SLURM_JOB_ID" || return
  ((restarts > ${SLURM_RESTART_COUNT:-0})) && return
  [[ $state == COMPLETING ]] || return
  if [[ $reason == TimeLimit ]]; then
    scontrol requeue "$SLURM_JOB_ID" && echo "at the time limit: requeued at $(date +%T)" && leave_out_nodes
  else
    forget_run
  fi
}
# The ranks checkpoint at their next step and end with code 75. TERM comes where Slurm ends the job, or preempts it
# without a warning.
step='' warned='' ended='' left_out=''
stop() {
  echo "$1 at $(date +%T)${step:+: the ranks checkpoint and stop}"
  [[ $step ]] || run_again
  # Repeated: a rank that is still importing ignores it.
  while kill -USR2 "$step" 2>/dev/null; do sleep 5; done &
}
trap 'warned=yes; stop USR2' USR2
trap 'ended=yes; before_the_kill & stop TERM' TERM
