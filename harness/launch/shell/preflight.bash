# Report faulty nodes before the ranks start, which would only wait for each other. A node that does not answer is
# named at the timeout, with what srun reports about it.
preflight() {
  local answers=$logs/preflight-$SLURM_JOB_ID.jsonl nodes
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  rm -f "$answers.failed"
  timeout --kill-after=5 @limit@ "${on_each_node[@]}"@all_nodes@ --label --kill-on-bad-exit=0 \
    "${harness[@]}" preflight probe "$run_dir"@needed@ \
    cluster.preflight.timeout_s=@timeout@ >"$answers" 2>"$answers.srun"
  judge "$answers" @expected@ || return
  timeout --kill-after=5 @limit@ "${@reduce_step@[@]}"@all_tasks@ --label --kill-on-bad-exit=0 \
    "${harness[@]}" preflight reduce cluster.preflight.timeout_s=@timeout@ >"$answers.reduce" 2>"$answers.reduce.srun"
  judge "$answers.reduce" tasks_per_node=@tasks@ @rates@
}
preflight
case $? in
  0) ;;
  3) @failed@ ;;
  *) echo "preflight: job $SLURM_JOB_ID does not start" >&2; end_run 1 ;;
esac
