# --wait: a rank that outlives another by a minute waits for it in vain. --kill-on-bad-exit=1 would lose the last output
# of the other ranks, and make the exit code of srun that of the signal that ended them.
run_ranks() {
  "${@step@[@]}"@train_on@ --kill-on-bad-exit=0 --wait=60 --open-mode=append \
    --output="$logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-@what@@number@.out" bash -c "$start_@what@" @what@ "${program[@]}" &
  step=$!
  [[ ! $warned && ! $ended ]] || stop "a signal before the start"
  echo "rank 0 writes to $logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-@what@0.out"
  # A trap interrupts wait; the last one returns the exit code of the step.
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
}
