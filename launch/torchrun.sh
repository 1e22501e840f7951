#!/bin/bash
# Train a recipe with torchrun, on this machine or, started on each of them, on several:
#   PROCESSES_PER_NODE=8 launch/torchrun.sh RECIPE [key.path=value...]
#   NODES=2 HEAD=node1 PORT=29400 PROCESSES_PER_NODE=8 launch/torchrun.sh RECIPE [key.path=value...]
# (`mezzotint-launch torchrun RECIPE ...` prints these lines from a recipe and checks them first.)
#
# SIGTERM, SIGINT or SIGUSR1 to this script, or the file RUN/STOP, end the run at the end of a step, saved. The exit code
# is the trainer's: 0 done, 2 bad input, 85 stopped and saved, 86 diverged, 87 hung, 1 crashed.

PYTHON="${PYTHON:-python}"
NODES="${NODES:-1}"
PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-1}"
if [ "$NODES" -gt 1 ] && [ -z "${HEAD:-}" ]; then
    echo "error: NODES is $NODES but HEAD is not set: name the node that the others can reach, the same on all" >&2
    exit 2
fi
threads=$(($(nproc) / PROCESSES_PER_NODE))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

asked=
trap 'asked=1' USR1 USR2 TERM INT

run=$("$PYTHON" -m mezzotint.launch.cluster begin "$@") || exit
if [ "$NODES" -gt 1 ]; then
    endpoint="$HEAD:${PORT:-$("$PYTHON" -m mezzotint.launch.cluster port "$run")}" # the same on every node
else
    endpoint="localhost:${PORT:-0}" # 0: one that is free
fi

LAUNCHED_BY=$$ "$PYTHON" -m mezzotint.launch.agent \
    --nnodes="$NODES" --nproc-per-node="$PROCESSES_PER_NODE" --max-restarts=0 \
    --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="${run//\//.}" \
    -m mezzotint.launch.rank "$@" &
trainer=$!
while kill -0 "$trainer" 2>/dev/null; do
    if [ -z "$asked" ]; then
        wait "$trainer" # until it ends or a signal comes
    else
        touch "$run/STOP" # again and again: a trainer that is only starting takes it for an old one
        sleep 2
    fi
done

exec "$PYTHON" -m mezzotint.launch.cluster next "$run" ${asked:+--asked}
