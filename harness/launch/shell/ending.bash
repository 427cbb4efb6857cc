# A failed run starts again here first, which costs seconds; then through Slurm, perhaps on other nodes.
restarted=0
while :; do
@copy@  run_ranks
  code=$?
  if ((code == 0)); then
    echo "finished: $run_dir"
    end_run 0
  fi
  # Close to the time limit there is little time and nothing to decide: the next attempt records how this one ended. Not
  # where Slurm has begun to end the job, as in a preemption.
  if [[ $warned && ! $ended ]] && grep -qs '"reason": "signal"' "$run_dir/_stopped.json"; then
    stopped_at=$(sed 's/.*"step": \([0-9]*\).*/\1/' "$run_dir/_stopped.json")
    echo "stopped as asked after step $stopped_at: the job resumes from its checkpoint"
    run_again
  fi
  here=false
  [[ $warned || $ended ]] || ((restarted >= @restarts@)) || here=true
  leave_out_slow
  timeout --kill-after=5 @limit@ "${on_first_node[@]}" \
    "${harness[@]}" requeue "$run_dir" exit_code="$code" restart="$here" cluster.max_same_failures=@max_same@ </dev/null
  decided=$?
  if ((decided == 124 || decided == 137)); then
    echo "$first_node did not decide within @limit@ s whether to requeue; requeued, because another node may be healthy"
    run_again
  fi
  ((decided == 0)) || end_run "$code"
  if [[ $here == false || $warned || $ended ]]; then
    # A signal came since.
    [[ $here == false ]] || sed -i '$ s/"again": "in the job"/"again": "through Slurm"/' "$run_dir/attempts.jsonl"
    run_again
  fi
@replace@  restarted=$((restarted + 1))
  echo "restart $restarted@of@ in this job at $(date +%T)"
done
