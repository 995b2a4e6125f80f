# One node of a Slurm job, started by scripts/slurm.sbatch: Ray, and where it is told so the judge. Ends with the job; Ray's logs
# are kept beside the job's.
. scripts/install/gpu_environment.sh "$venv"
export RLINF_NODE_RANK=$SLURM_NODEID RAY_USAGE_STATS_ENABLED=0
temporary=/tmp/ray-$SLURM_JOB_ID # the same on every node: Ray takes the head's. Short: its sockets lie below it
trap 'kill $(jobs -p); cp -r "$temporary/session_latest/logs" "$logs/$SLURMD_NODENAME.ray"; rm -rf "$temporary"' EXIT
trap exit TERM
mkdir -p "$temporary"
export REDIS_URI=redis://:$JUDGE_TOKEN@$head:$((port + 1))/0 # ps shows arguments to every account
judge() { "$venv/bin/python" -m rstar2_megatron.judge "$@"; }

if [ "$RSTAR2_JUDGE" = all ]; then
  if [ "$SLURM_NODEID" = 0 ]; then
    PATH=$PATH:$venv/bin redis-server - --bind "$head" --port $((port + 1)) --dir "$temporary" --appendonly yes --save "" \
      <<<"requirepass $JUDGE_TOKEN" &
    until judge serve --host "$head" --port $((port + 2)); do sleep 1; done &
  fi
  until judge worker; do sleep 1; done &
fi
# Again on a machine that was too busy, and until the head is there.
words=("--address=$head:$port")
[ "$SLURM_NODEID" != 0 ] || words=(--head "--port=$port" "--node-ip-address=$head" "--temp-dir=$temporary" --include-dashboard=false)
until "$venv/bin/ray" start --block "${words[@]}"; do sleep 1; done &
wait
