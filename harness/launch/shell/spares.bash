# The nodes that train: the first @nodes@ that have not failed and that Slurm does not call down; the others are spares.
# With a file of failed nodes, these are left out from now on, unless too few would be left.
choose_nodes() {
  local out healthy
  out=$({ excluded; [[ ! ${1:-} ]] || cut -d ' ' -f 1 "$1"; sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" \
    --states=down,fail,no_respond --format=%N | tr -d ' '; } | grep . | paste -sd,)
  [[ ! $out ]] || out=$(scontrol show hostnames "$out")
  mapfile -t healthy < <(scontrol show hostnames "$SLURM_JOB_NODELIST" | grep -vxF -f <(echo "${out:-/}"))
  ((${#healthy[@]} >= @nodes@)) || return 1
  [[ ! ${1:-} ]] || cat "$1" >>"$run_dir/excluded_nodes"
  train_nodes=("${healthy[@]:0:@nodes@}")
  train_on=(--nodelist="$(IFS=, && echo "${train_nodes[*]}")")
  first_node=${train_nodes[0]}
  MASTER_ADDR="@master_addr@"
  ((${#on_first_node[@]} == 0)) ||
    on_first_node=(srun --nodes=1 --ntasks=1 --nodelist="$first_node" --overlap "${container[@]}")
  echo "training on ${train_nodes[*]}, spare: ${healthy[*]:@nodes@}"
}
# The node of a rank that died or hung gives way to a spare one.
replace_failed() {
  local last rank failed=$logs/replaced-$SLURM_JOB_ID
  last=$(tail -n 1 "$run_dir/attempts.jsonl")
  local reason='"reason": "(hang|lost|LostRankError)"' number='"rank": ([0-9]+)'
  if [[ $last =~ $reason && $last =~ $number ]]; then
    rank=${BASH_REMATCH[1]}
    echo "${train_nodes[rank / @ranks@]} rank $rank failed there in job $SLURM_JOB_ID" >"$failed"
    choose_nodes "$failed" && return 0
  fi
  choose_nodes || echo "fewer than @nodes@ nodes are left: the ranks start on the same ones"
}
