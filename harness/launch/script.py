"""Render the batch script of a job: a pure function of the job and its cluster.

The parts of the script that are the same for every job are the texts below, with `@name@` where a job's values go;
`render` puts them together. Every line of five scripts is kept in `tests/golden/sbatch`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.launch.cluster import SBATCH_NAMES, SUCCESSORS, ClusterConfig, check_directive, check_one_line

IN_CONTAINER = """\
# --no-container-mount-home: packages in ~/.local would hide those of the image. --container-env: variables that the
# image sets too take the job's values.
container=(@container@)
# Only the image has the harness. --overlap: an earlier step may still be ending.
on_first_node=(srun --nodes=1 --ntasks=1 --relative=0 --overlap "${container[@]}")"""

EVERY_RANK_SEES_ALL_GPUS = """\
# --gpu-bind=none: a rank sees all GPUs of its node and takes the one of its local rank. With one visible GPU per rank
# (--gpus-per-task), NCCL could not open the memory of the other GPUs over NVLink."""

# The lock keeps jobs of this harness apart; the kernel releases it when this shell ends. Testing the port alone would
# leave a gap until rank 0 listens.
RENDEZVOUS = """\
# The address and port where the ranks meet. Jobs that share their first node hold the locks of different ports until
# they end, whatever their ids. Below 32768: higher ports are given to outgoing connections.
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
# Report faulty nodes before the ranks start, which would only wait for each other. A node that does not answer is
# named at the timeout, with what srun reports about it.
preflight() {
  local answers=$logs/preflight-$SLURM_JOB_ID.jsonl nodes
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  rm -f "$answers.failed"
  timeout --kill-after=5 @limit@ "${on_each_node[@]}"@all_nodes@ --label --kill-on-bad-exit=0 \\
    "${harness[@]}" preflight probe "$run_dir"@needed@ \\
    cluster.preflight.timeout_s=@timeout@ >"$answers" 2>"$answers.srun"
  judge "$answers" @expected@ || return
  timeout --kill-after=5 @limit@ "${@reduce_step@[@]}"@all_tasks@ --label --kill-on-bad-exit=0 \\
    "${harness[@]}" preflight reduce cluster.preflight.timeout_s=@timeout@ >"$answers.reduce" 2>"$answers.reduce.srun"
  judge "$answers.reduce" tasks_per_node=@tasks@ @rates@
}
preflight
case $? in
  0) ;;
  3) @failed@ ;;
  *) echo "preflight: job $SLURM_JOB_ID does not start" >&2; end_run 1 ;;
esac"""

JUDGE = """\
# Where the first node hangs too, the names of the nodes without an answer are all that can be reported.
judge() {
  local code
  cat "$1.srun" >&2
  timeout --kill-after=5 @limit@ "${on_first_node[@]}" \\
    "${harness[@]}" preflight judge "$nodes" srun="$1.srun" failed="$answers.failed" "${@:2}" <"$1"
  code=$?
  ((code == 0 || code == 1 || code == 3)) && return "$code"
  echo "preflight: $first_node: the answers of the nodes could not be judged here within @limit@ s"
  for node in ${nodes//,/ }; do
    grep -q "node.: .${node}[^-.a-z0-9]" "$1" || echo "preflight: $node: no answer from the node"
  done
  return 1
}"""

COPY_IMAGE = """\
# Once per node: a part that an earlier attempt copied is continued, and the whole must have the hash of the original.
copy_image='
  stamp=$(stat -L -c %s-%Y "$1") && mkdir -p "${2%/*}" && exec 9>"$2.lock" && flock 9 || exit 1
  [[ ! -s $2 || $(cat "$2.copied" 2>/dev/null) != "$stamp" ]] || exit 0
  rm -f "$2.copied" "$2"
  for old in "$2".*.partial; do [[ $old == "$2.$stamp.partial" ]] || rm -f "$old"; done
  for try in 1 2; do
    tail -c "+$(($(stat -c %s "$2.$stamp.partial" 2>/dev/null || echo 0) + 1))" "$1" >>"$2.$stamp.partial" || exit 1
    [[ $(sha256sum <"$2.$stamp.partial") != "$3  -" ]] || break
    rm "$2.$stamp.partial"
    [[ $try == 1 ]] || { echo "the copy of $1 has another hash than the original" >&2; exit 1; }
  done
  mv "$2.$stamp.partial" "$2" && echo "$stamp" >"$2.copied"'
# Where one node cannot have the image on its disk, all read it where it is.
image=@image@
image_hash=$(cut -d ' ' -f 1 "$image.sha256" 2>/dev/null) || image_hash=$(sha256sum <"$image" | cut -d ' ' -f 1)
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --label \\
  bash -c "$copy_image" copy "$image" "@local@$image" "$image_hash" &
copying=$!
while kill -0 "$copying" 2>/dev/null; do wait "$copying"; done
if wait "$copying"; then
  image=@local@$image
else
  echo "not every node could copy the image to @local@: it is read from $image"
fi
container+=(--container-image="$image")
on_first_node+=(--container-image="$image")
on_each_node+=(--container-image="$image")
on_each_rank+=(--container-image="$image")"""

# Containers mount it.
MAKE_LOCAL_DIR = (
    'srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 mkdir -p @local@'
)

COPY = """\
# Copy the data to the nodes that train, before the first step and where another node takes part.
copy_data() {
  local answers=$logs/copies-$SLURM_JOB_ID.jsonl nodes
  nodes=@nodes@
  [[ $nodes != "$copied_to" ]] || return 0
  rm -f "$answers.failed"
  "${on_each_node[@]}"@train_on@ --label --kill-on-bad-exit=0 \\
    "${harness[@]}" preflight copy @local@@needed@ cluster.preflight.timeout_s=@timeout@ \\
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
copied_to=''"""

CONTROLLER = """\
# Slurm's controller may be away for minutes: ask again, at longer intervals, until it accepts or refuses the request.
no_answer='onnect|ommunication|imed out|Zero Bytes|standby mode|emporarily'
until_answered() {
  local pause=1 shown=''
  until answer=$("$@" 2>&1); do
    (($? > 128)) && continue # a signal to this script ended the command too
    [[ $answer =~ $no_answer ]] || return 1
    [[ $shown ]] || echo "$(date +%T): no answer from Slurm, $1 tries again: ${answer%%$'\\n'*}"
    shown=yes
    sleep "$pause" &
    wait $!  # a signal interrupts it, and does not interrupt a sleep
    pause=$((pause < 8 ? 2 * pause : 15))
  done
}
# Set state, reason and restarts to those of a job, and state to nothing if Slurm knows no such job.
ask_about() {
  state='' reason='' restarts=0
  until_answered scontrol show job --oneliner "$1" || return 1
  [[ $answer =~ JobState=([A-Z_]+) ]] && state=${BASH_REMATCH[1]}
  [[ $answer =~ Reason=([A-Za-z]+) ]] && reason=${BASH_REMATCH[1]}
  [[ $answer =~ Restarts=([0-9]+) ]] && restarts=${BASH_REMATCH[1]}
  return 0
}"""

CLAIM = """\
# One job at a time has the run: the one whose id is in _job. The file is removed when the run is over.
claim_run() {
  local owner try
  for try in {1..5}; do
    (set -o noclobber && echo "$SLURM_JOB_ID" >"$run_dir/_job") 2>/dev/null && return 0
    owner=$(cat "$run_dir/_job" 2>/dev/null)
    [[ $owner == "$SLURM_JOB_ID" ]] && return 0
    [[ $owner ]] || { sleep "$try"; continue; }
    ask_about "$owner"
    case $state in
      RUNNING | COMPLETING | CONFIGURING | SUSPENDED | STOPPED | SIGNALING | RESIZING | STAGE_OUT)
        echo "job $owner is ${state,,} and has this run: job $SLURM_JOB_ID ends without touching it"
        return 1 ;;
    esac
    mv "$run_dir/_job" "$run_dir/_job.$SLURM_JOB_ID" || continue
    [[ $(cat "$run_dir/_job.$SLURM_JOB_ID") == "$owner" ]] || ln "$run_dir/_job.$SLURM_JOB_ID" "$run_dir/_job"
    rm -f "$run_dir/_job.$SLURM_JOB_ID"
  done
  echo "$run_dir/_job cannot be written: job $SLURM_JOB_ID ends"
  return 1
}
# A successor waits in the queue, and continues a run that this job could not end itself.
if [[ ${HARNESS_PREDECESSOR:-} && ${SLURM_RESTART_COUNT:-0} == 0 ]]; then
  ask_about "$HARNESS_PREDECESSOR"
  if [[ $state == CANCELLED || $(cat "$run_dir/_job" 2>/dev/null) != "$HARNESS_PREDECESSOR" ]]; then
    echo "the run ended in job $HARNESS_PREDECESSOR: nothing is left for its successor"
    exit 0
  fi
fi
claim_run || exit 2"""

FORWARDING = """\
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
  left=$(sinfo --noheader --Node --partition="${SLURM_JOB_PARTITION:-}" --states=idle,alloc,mix,comp,resv \\
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
  if ! until_answered sbatch --parsable --dependency="@dependency@" ${nodes:+"--exclude=$nodes"} \\
    --export="ALL,HARNESS_PREDECESSOR=$SLURM_JOB_ID" "$run_dir/job.sbatch"; then
    echo "sbatch refuses a successor of job $SLURM_JOB_ID: $answer"
    return 1
  fi
  answer=${answer##*$'\\n'}
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
      printf 'requeued at %(%T)T\\n'
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
trap 'ended=yes; before_the_kill & stop TERM' TERM"""

_RUN = """\
# --wait: a rank that outlives another by a minute waits for it in vain. --kill-on-bad-exit=1 would lose the last output
# of the other ranks, and make the exit code of srun that of the signal that ended them.
run_ranks() {
  "${@step@[@]}"@train_on@ --kill-on-bad-exit=0 --wait=60 --open-mode=append \\
    --output="$logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-@what@@number@.out" bash -c "$start_@what@" @what@ "${program[@]}" &
  step=$!
  [[ ! $warned && ! $ended ]] || stop "a signal before the start"
  echo "rank 0 writes to $logs/$SLURM_JOB_NAME-$SLURM_JOB_ID-@what@0.out"
  # A trap interrupts wait; the last one returns the exit code of the step.
  while kill -0 "$step" 2>/dev/null; do wait "$step"; done
  wait "$step"
}"""

SRUN_RANKS = """\
# USR2 is ignored until a rank handles it: during the imports it would end the rank.
start_rank='
  trap "" USR2
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec "$@"'
""" + _RUN.replace("@step@", "on_each_rank").replace("@what@", "rank").replace("@number@", "%t")

TORCHRUN_RANKS = """\
# The agent ignores USR2, which would end it, and the signal goes to each of its ranks. Ranks are numbered by node, as
# under srun. This script starts failed ranks again, not torchrun.
start_node='
  trap "" USR2
  "$1" "$2" "$3" --rdzv-id="$SLURM_JOB_ID" --node-rank="$SLURM_NODEID" \\
    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "${@:4}" &
  agent=$!
  trap "kill -USR2 \\$(cat /proc/$agent/task/$agent/children)" USR2
  while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done
  wait "$agent"'
""" + _RUN.replace("@step@", "on_each_node").replace("@what@", "node").replace("@number@", "%n")

SPARES = """\
# The nodes that train: the first @nodes@ that have not failed and that Slurm does not call down; the others are spares.
# With a file of failed nodes, these are left out from now on, unless too few would be left.
choose_nodes() {
  local out healthy
  out=$({ excluded; [[ ! ${1:-} ]] || cut -d ' ' -f 1 "$1"; sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" \\
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
}"""

ENDING = """\
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
    stopped_at=$(sed 's/.*"step": \\([0-9]*\\).*/\\1/' "$run_dir/_stopped.json")
    echo "stopped as asked after step $stopped_at: the job resumes from its checkpoint"
    run_again
  fi
  here=false
  [[ $warned || $ended ]] || ((restarted >= @restarts@)) || here=true
  leave_out_slow
  timeout --kill-after=5 @limit@ "${on_first_node[@]}" \\
    "${harness[@]}" requeue "$run_dir" exit_code="$code" restart="$here" cluster.max_same_failures=@max_same@
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
done"""


@dataclass(frozen=True)
class Job:
    """One run of a recipe on a number of nodes.

    Attributes:
        name: name of the job and of its logs.
        nodes: number of nodes.
        module: module that every rank runs, such as `recipes.sft`.
        overrides: settings of the recipe as on its command line, without the run's folder and `resume`.
        run_dir: absolute path of the run's folder, which the job keeps over requeues.
        workdir: absolute path of the folder to run in.
        python: interpreter of the job.
        data: datasets that every node must be able to read; empty checks none.
        copied: those of them that each node copies to its own disk where `cluster.local_dir` is set.
        weights: folder of the initial weights, if any.
        live: folders of live chunks.
        code: digest that the code on the nodes must have; empty for any that is the same on all.
    """

    name: str
    nodes: int
    module: str
    overrides: tuple[str, ...]
    run_dir: str
    workdir: str
    python: str
    data: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    weights: str | None = None
    live: tuple[str, ...] = ()
    code: str = ""

    def __post_init__(self) -> None:
        for text, where in ((self.name, "name"), (self.run_dir, "runs"), (self.workdir, "cluster.workdir")):
            check_directive(text, where)
        for setting in (*self.overrides, *self.data, self.weights, *self.live, self.python):
            check_one_line(setting or "", "settings")

    @property
    def logs(self) -> str:
        return f"{self.run_dir}/logs"

    @property
    def script(self) -> str:
        return f"{self.run_dir}/job.sbatch"


def render(job: Job, cluster: ClusterConfig) -> str:
    """Return the script that `sbatch` takes, complete with everything that the job needs."""
    harness = [job.python, "-m", "harness"]
    limit = f"{max(60.0, cluster.preflight.timeout_s):g}"
    address = cluster.master_addr.replace("%N", "$first_node")
    own = {"nodes": job.nodes, "ranks": cluster.ranks_per_node}
    train_on, replace = (' "${train_on[@]}"', "  replace_failed\n") if cluster.spares else ("", "")
    restarts = max(cluster.restarts, cluster.spares)
    copied = cluster.local_dir and (job.copied or job.weights)
    copy = "  copy_to_nodes\n" if copied else ""
    of = f" of {restarts}" if restarts else ""  # a run that leaves a slow node starts again anyway
    sections = [
        [
            "#!/bin/bash",
            # Texts for the shells of other nodes, lists with commas, and a function that a trap calls.
            "# shellcheck disable=SC2016,SC2054,SC2329",
            f"# {job.module} on {job.nodes} nodes, rendered by `harness submit`. To submit it by hand:",
            f"#   mkdir -p {job.logs} && sbatch FILE",
            *_directives(job, cluster),
        ],
        [
            "set -uo pipefail",
            *cluster.setup,
            *(f"export {name}={_quote(value)}" for name, value in cluster.env.items()),
            f"run_dir={shlex.quote(job.run_dir)}",
            f"logs={shlex.quote(job.logs)}",
            f"harness=({shlex.join(harness)})",
            "# resume=auto: the first attempt finds no checkpoint; later ones resume from the newest complete one.",
            f"program=({shlex.join(_program(job, cluster))})",
            *([f"export HARNESS_LOCAL_DIR={cluster.local_dir}"] if cluster.local_dir else []),
            # srun binds the ranks that it starts.
            *(["export HARNESS_BIND_RANKS=1"] if cluster.launcher == "torchrun" and _binds(cluster) else []),
        ],
        _steps(job, cluster),
        [CONTROLLER],
        [CLAIM],
        [_fill(RENDEZVOUS, master_addr=address)],
        [forwarding(cluster)],
        [_fill(SPARES, **own, master_addr=address)] if cluster.spares else [],
        [_fill(COPY_IMAGE if copies_image(cluster) else MAKE_LOCAL_DIR, image=cluster.image, local=cluster.local_dir)]
        if cluster.local_dir and cluster.image
        else [],
        [] if cluster.successor == "none" else ["submit_successor &"],
        [_fill(JUDGE, limit=f"{cluster.preflight.timeout_s + 5:g}")] if cluster.preflight.enabled or copied else [],
        [_preflight(job, cluster)] if cluster.preflight.enabled else [],
        ["[[ ${train_on[*]:-} ]] || choose_nodes || run_again"] if cluster.spares else [],
        [_copies(job, cluster, train_on)] if copied else [],
        [_fill(SRUN_RANKS if cluster.launcher == "srun" else TORCHRUN_RANKS, train_on=train_on)],
        [
            _fill(
                ENDING,
                max_same=cluster.max_same_failures,
                restarts=restarts,
                limit=limit,
                replace=replace,
                of=of,
                copy=copy,
            )
        ],
    ]
    return "\n\n".join(text for lines in sections if (text := "\n".join(lines))) + "\n"


def forwarding(cluster: ClusterConfig) -> str:
    """Return the functions that pass signals on to the ranks, requeue the job, and submit its successor."""
    dependency = SUCCESSORS[cluster.successor] or SUCCESSORS["afterany"]  # of one that a refused requeue needs
    spare = 'choose_nodes "$slow"; then\n    here=true\n  elif ' if cluster.spares else ""
    return _fill(FORWARDING, exclude=shlex.quote(cluster.exclude), dependency=dependency, spare=spare)


def _binds(cluster: ClusterConfig) -> bool:
    return cluster.cpu_bind not in ("", "no", "none")


def copies_image(cluster: ClusterConfig) -> bool:
    """Return whether nodes copy the image: not one of a registry, which Enroot keeps itself."""
    return bool(cluster.local_dir) and cluster.image.startswith("/")


def _fill(text: str, **values: object) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def _quote(value: str) -> str:
    """Put a value in quotes even where no character needs them: `NAME==mlx5_0` looks like a comparison."""
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _directives(job: Job, cluster: ClusterConfig) -> Iterator[str]:
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes + cluster.spares),
        "ntasks-per-node": str(cluster.ranks_per_node),
        "cpus-per-task": str(cluster.cpus_per_rank),
        "gpus-per-node": str(cluster.gpus_per_node or ""),
        "mem": cluster.memory,
        "time": cluster.time,
        **{name: getattr(cluster, name) for name in SBATCH_NAMES},
        # The folder inside a container is an option of the container.
        "chdir": "" if cluster.image else job.workdir,
        "output": f"{job.logs}/%x-%j.out",
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in options.items() if value)
    if cluster.exclusive:
        yield "#SBATCH --exclusive"
    yield from (f"#SBATCH {option}" for option in cluster.sbatch)
    yield "# A node failure or a preemption requeues the job, which appends to the same logs."
    yield "#SBATCH --requeue"
    yield "#SBATCH --open-mode=append"
    if cluster.spares:
        yield "# The job outlives a node that fails: a spare one takes its place."
        yield "#SBATCH --no-kill"
    yield "# B: only this script gets the signal and passes it on to the ranks. Not USR1, which NCCL may catch."
    yield f"#SBATCH --signal=B:USR2@{cluster.signal_lead_s}"


def _program(job: Job, cluster: ClusterConfig) -> list[str]:
    """Return the command of every rank under srun, or of every node's agent under torchrun."""
    recipe = ["-m", job.module, *job.overrides, f"run_dir={job.run_dir}", "resume=auto"]
    if cluster.launcher == "srun":
        return [job.python, *recipe]
    agent = [f"--nnodes={job.nodes}", f"--nproc-per-node={cluster.ranks_per_node}", "--max-restarts=0", "--tee=3"]
    return [job.python, "-m", "torch.distributed.run", *agent, f"--log-dir={job.logs}/ranks", *recipe]


def _steps(job: Job, cluster: ClusterConfig) -> Iterable[str]:
    """Yield the arrays that prefix a command: once on the first node, once on every node, once per rank."""
    ranks, cpus = cluster.ranks_per_node, cluster.cpus_per_rank
    container = ""
    if cluster.image:
        options = [] if copies_image(cluster) else [f"--container-image={cluster.image}"]
        options += [f"--container-workdir={job.workdir}"]
        local = [f"{cluster.local_dir}:{cluster.local_dir}"] if cluster.local_dir else []
        options += [f"--container-mounts={','.join([*cluster.mounts, *local])}"] if cluster.mounts or local else []
        names = ",".join(["MASTER_ADDR", "MASTER_PORT", *cluster.env])
        options += ["--no-container-mount-home", f"--container-env={names}"]
        options += ["--container-writable"] if cluster.container_writable else []
        # All steps of the job, and of its restarts on the node, share the one of this name.
        name = ' --container-name="harness-$SLURM_JOB_ID"' if cluster.container_name else ""
        yield _fill(IN_CONTAINER, container=shlex.join(options) + name)
        container = ' "${container[@]}"'
    else:
        yield "# This script runs on the first node."
        yield "on_first_node=()"
    if cluster.mpi:
        yield f"export SLURM_MPI_TYPE={cluster.mpi}"
    yield "# Since Slurm 22.05, srun does not inherit --cpus-per-task from its job."
    yield f"on_each_node=(srun --nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1"
    yield f"  --cpus-per-task={ranks * cpus}{container})"
    if cluster.launcher == "torchrun" and not cluster.gpus_per_node:
        return
    bind = f" --cpu-bind={cluster.cpu_bind}" if cluster.cpu_bind else ""
    if cluster.gpus_per_node:
        yield EVERY_RANK_SEES_ALL_GPUS
        bind += " --gpu-bind=none"
    yield f"on_each_rank=(srun --nodes={job.nodes} --ntasks={job.nodes * ranks} --ntasks-per-node={ranks}"
    yield f"  --cpus-per-task={cpus}{bind}{container})"


def _list(paths: Sequence[str]) -> str:
    """Write paths as a list on a command line; quotes keep a comma in a path."""
    return "[" + ",".join(f'"{path}"' if "," in path else path for path in paths) + "]"


def _preflight(job: Job, cluster: ClusterConfig) -> str:
    limits = cluster.preflight
    needed = _needed(job.data, job.weights)
    needed += [f"data.live.path={_list(job.live)}"] if job.live else []
    of_hosts = ("min_shm_mib", "min_disk_gib", "max_clock_offset_s", "min_inodes", "min_read_mib_s")
    of_links = ("min_node_gb_s", "min_pair_gb_s", "min_all_gb_s", "min_gemm_tflops")
    expected = [
        f"cluster.gpus_per_node={cluster.gpus_per_node}",
        *(f"cluster.preflight.{name}={getattr(limits, name)}" for name in of_hosts),
        *([f"code={job.code}"] if job.code else []),
    ]
    rates = [f"cluster.preflight.{name}={getattr(limits, name)}" for name in of_links]
    tasks = cluster.ranks_per_node if cluster.gpus_per_node else 1
    every, spares = job.nodes + cluster.spares, bool(cluster.spares)
    return _fill(
        PREFLIGHT,
        failed=_without_failed(cluster, "preflight"),
        # Spare nodes too; srun takes the last of two equal options.
        all_nodes=f" --nodes={every} --ntasks={every}" if spares else "",
        all_tasks=f" --nodes={every} --ntasks={every * tasks}" if spares else "",
        rates=shlex.join(rates),
        tasks=tasks,
        needed="".join(f" {shlex.quote(setting)}" for setting in needed),
        timeout=f"{limits.timeout_s:g}",
        # srun itself is ended a little later, so that the nodes can report their own timeouts.
        limit=f"{limits.timeout_s + 5:g}",
        expected=shlex.join(expected),
        # With GPUs, every GPU takes part, over the links that training uses.
        reduce_step="on_each_rank" if cluster.gpus_per_node else "on_each_node",
    )


def _needed(data: Sequence[str], weights: str | None) -> list[str]:
    return ([f"data.path={_list(data)}"] if data else []) + ([f"model.init_from={weights}"] if weights else [])


def _without_failed(cluster: ClusterConfig, step: str) -> str:
    """Return what the script does where nodes that it can do without have failed in a step before the first one."""
    file = f'"$logs/{step}-$SLURM_JOB_ID.jsonl.failed"'
    requeue = f"leave_out {file} && run_again; " if cluster.preflight.exclude_failed else ""
    otherwise = f'{requeue}echo "{step}: job $SLURM_JOB_ID does not start" >&2; end_run 1'
    return f"choose_nodes {file} || {{ {otherwise}; }}" if cluster.spares else otherwise


def _copies(job: Job, cluster: ClusterConfig, train_on: str) -> str:
    names = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)'
    return _fill(
        COPY,
        nodes='$(IFS=, && echo "${train_nodes[*]}")' if cluster.spares else names,
        train_on=train_on,
        local=cluster.local_dir,
        needed="".join(f" {shlex.quote(setting)}" for setting in _needed(job.copied, job.weights)),
        timeout=f"{cluster.preflight.timeout_s:g}",
        failed=_without_failed(cluster, "copies"),
    )
