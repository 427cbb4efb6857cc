# Slurm's controller may be away for minutes: ask again, at longer intervals, until it accepts or refuses the request.
no_answer='onnect|ommunication|imed out|Zero Bytes|standby mode|emporarily'
until_answered() {
  local pause=1 shown=''
  until answer=$("$@" 2>&1); do
    (($? > 128)) && continue # a signal to this script ended the command too
    [[ $answer =~ $no_answer ]] || return 1
    [[ $shown ]] || echo "$(date +%T): no answer from Slurm, $1 tries again: ${answer%%$'\n'*}"
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
}
