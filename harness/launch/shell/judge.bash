# Where the first node hangs too, the names of the nodes without an answer are all that can be reported.
judge() {
  local code
  cat "$1.srun" >&2
  timeout --kill-after=5 @limit@ "${on_first_node[@]}" \
    "${harness[@]}" preflight judge "$nodes" srun="$1.srun" failed="$answers.failed" "${@:2}" <"$1"
  code=$?
  ((code == 0 || code == 1 || code == 3)) && return "$code"
  echo "preflight: $first_node: the answers of the nodes could not be judged here within @limit@ s"
  for node in ${nodes//,/ }; do
    grep -q "node.: .${node}[^-.a-z0-9]" "$1" || echo "preflight: $node: no answer from the node"
  done
  return 1
}
