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
echo "attempt $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST, rank 0 at $MASTER_ADDR:$MASTER_PORT"
