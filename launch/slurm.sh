#!/usr/bin/env bash
# Trains a chapter under Slurm: one launch/run.sh on each node of the job.
#
#   sbatch --nodes 2 --gpus-per-node 8 --time 12:00:00 launch/slurm.sh 02 -e alpaca-ddp
#
# Flags of sbatch stand before the script and override the lines below. Ask for GPUs per node, not
# per task: a process that sees only its own GPU does not find the GPU of its local rank.
#SBATCH --job-name=train-llm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=slurm-%j.log
# A job that is queued again keeps its number, and goes on in the same logs.
#SBATCH --open-mode=append
#SBATCH --requeue
# Only this script (B:) gets the signal, 120 s before the time limit or up to 60 s earlier.
#SBATCH --signal=B:USR1@120
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

[ -n "${SLURM_JOB_ID-}" ] || fail "start it with sbatch: sbatch launch/slurm.sh CHAPTER [flags]"

# Slurm runs a copy of this script, and its record of the job has the path of the original.
command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=//p')
run=${command%%/launch/slurm.sh*}/launch/run.sh
[ -x "$run" ] || fail "there is no $run: submit launch/slurm.sh of a repository that all nodes see"

# The number of an array stands for all its tasks, so name this task.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# A run without a name saves nothing. If it were queued again, it would begin at the first step.
named=
for flag in "$@"; do
  case $flag in -e* | --experiment-name*) named=1 ;; esac
done

# The first node of the job keeps the list of the nodes. A name that cannot be resolved ends the
# job here. A fallback such as localhost would let every node wait for the others.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_ADDR=${hosts%%$'\n'*}
getent ahosts "$MASTER_ADDR" > /dev/null || fail "the first node, '$MASTER_ADDR', has no address"
# Jobs on one node need different ports. These are below the ports of outgoing connections.
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
# If the job is queued again, its nodes do not meet workers of the previous attempt.
RDZV_ID=slurm-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
NNODES=$SLURM_JOB_NUM_NODES
# torchrun kills its workers 30 s after SIGTERM. A large checkpoint takes longer to write.
: "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:=100}"
export MASTER_ADDR MASTER_PORT RDZV_ID NNODES TORCH_ELASTIC_SHUTDOWN_TIMEOUT

# On each node. Slurm sends signals to every process of the step: to torchrun, and to this shell,
# which waits for torchrun. A node that was told to stop ends with status 0. Otherwise the first
# node to stop would count as failed, and srun would kill the node that is still saving.
# shellcheck disable=SC2016  # the variables are those of the nodes
on_each_node='
  trap "stopped=1" TERM
  export NODE_RANK=$SLURM_NODEID LOCAL_ADDR=$SLURMD_NODENAME
  "$0" "$@"
  status=$?
  exit $((${stopped:-0} ? 0 : status))'

logs=slurm-$SLURM_JOB_ID
echo "Nodes: ${hosts//$'\n'/ }; endpoint $MASTER_ADDR:$MASTER_PORT; logs: $logs-*.log"
# If one node fails, the other nodes end (--kill-on-bad-exit). torchrun and its workers use all
# cores of the job (--cpu-bind). srun runs in the background, because bash handles a signal during
# `wait`, and not while another command runs.
near_limit=
trap near_limit=1 USR1
srun --kill-on-bad-exit=1 --cpu-bind=none --open-mode=append --output="$logs-%t-%N.log" \
  bash -c "$on_each_node" "$run" "$@" &
step=$!
status=0
wait "$step" || status=$?
if [ -n "$near_limit" ]; then
  if [ -n "$named" ]; then
    echo "The time limit is near: the run saves"
    # The nodes get the signal, and not srun: a SIGTERM to srun kills the step at once. If the step
    # has just ended by itself, scancel fails.
    scancel --signal=TERM "$job.0" || true
  else
    echo "warning: the time limit is near, and a run without -e NAME saves nothing"
  fi
  status=0
  wait "$step" || status=$?
fi

if [ "$status" -ne 0 ]; then
  echo "error: the run ended with status $status: $logs-*.log say why" >&2
elif [ -n "$near_limit" ] && [ -n "$named" ]; then
  # The signal may arrive during the last step. Then the run completes the training, and says so.
  if grep -qs "^Done: the " "$logs"-*.log; then
    echo "The training is complete"
  else
    echo "The job is queued again"
    scontrol requeue "$job"
  fi
fi
exit "$status"
