#!/bin/bash
# Train a recipe with DeepSpeed's launcher, on this machine or, over ssh, on the hosts of a hostfile (`host slots=8`):
#   PROCESSES_PER_NODE=8 launch/deepspeed.sh RECIPE [key.path=value...]
#   HOSTFILE=hosts launch/deepspeed.sh RECIPE [key.path=value...]
# (`mezzotint-launch deepspeed RECIPE ...` prints these lines from a recipe and checks them first.)
#
# SIGTERM, SIGINT or SIGUSR1 to this script, or the file RUN/STOP, end the run at the end of a step, saved. A signal to
# DeepSpeed's own launcher does as well, but it kills after 30 seconds, whether the checkpoint is written or not. The exit
# code is the trainer's: 0 done, 2 bad input, 85 stopped and saved, 86 diverged, 87 hung, 1 crashed.

PYTHON="${PYTHON:-python}"
options=()
if [ -n "${HOSTFILE:-}" ]; then
    options+=("--hostfile=$HOSTFILE")
    threads=1
else
    options+=("--hostfile=/dev/null" "--num_gpus=${PROCESSES_PER_NODE:-1}")
    threads=$(($(nproc) / ${PROCESSES_PER_NODE:-1}))
fi
if [ -n "${HOSTFILE:-}" ] && [ -n "${PROCESSES_PER_NODE:-}" ]; then
    options+=("--num_gpus=$PROCESSES_PER_NODE")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"

asked=
trap 'asked=1' USR1 USR2 TERM INT

run=$("$PYTHON" -m mezzotint.launch.cluster begin "$@") || exit
port="${PORT:-$("$PYTHON" -m mezzotint.launch.cluster port)}" || exit

LAUNCHED_BY=$$ "$PYTHON" -m mezzotint.launch.runner "${options[@]}" --master_port="$port" \
    --module mezzotint.launch.rank "$@" &
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
