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
claim_run || exit 2
