# Copy the data to the nodes that train, before the first step and where another node takes part.
copy_data() {
  local answers=$logs/copies-$SLURM_JOB_ID.jsonl nodes
  nodes=@nodes@
  [[ $nodes != "$copied_to" ]] || return 0
  rm -f "$answers.failed"
  "${on_each_node[@]}"@train_on@ --label --kill-on-bad-exit=0 \
    "${harness[@]}" preflight copy @local@@needed@ cluster.preflight.timeout_s=@timeout@ \
    >"$answers" 2>"$answers.srun" &
  copying=$!
  while kill -0 "$copying" 2>/dev/null; do wait "$copying"; done
  judge "$answers" && copied_to=$nodes
}
copy_to_nodes() {
  while :; do
    copy_data
    case $? in
      0) return ;;
      3) @failed@ ;;
      *) echo "copies: job $SLURM_JOB_ID does not start" >&2; end_run 1 ;;
    esac
  done
}
copied_to=''
