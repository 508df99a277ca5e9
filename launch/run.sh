#!/usr/bin/env bash
# Starts a chapter on the devices of this machine, or of several machines.
#
#   launch/run.sh CHAPTER [flags of the chapter]
#   launch/run.sh 02 --demo
#   NPROC_PER_NODE=2 launch/run.sh 03-fsdp --demo
#   NNODES=2 MASTER_ADDR=node-0 NODE_RANK=0 launch/run.sh 02 -e alpaca-ddp   # on node-0
#   NNODES=2 MASTER_ADDR=node-0 NODE_RANK=1 launch/run.sh 02 -e alpaca-ddp   # on node-1
#
# On several nodes, tools/preflight.py compares the nodes first; PREFLIGHT=0 leaves it out.
# HANG_DUMPS=FOLDER in front: ranks that hang leave dumps there for tools/where-it-hangs.py.
# launch/README.md says what each variable does, and where to look when a job does not start.
set -euo pipefail

fail() {
  echo "error: $1" >&2
  exit 2
}

# The flags may name files relative to the folder of the caller, so stay in this folder.
repository=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
wanted=${1-}
wanted=${wanted%/} # the shell completes the name of a folder with a slash
script=
chapters=()
for file in "$repository"/{,more/}[0-9][0-9]-*/train-llm.py; do
  chapter=$(basename "$(dirname "$file")")
  chapters+=("$chapter")
  case $wanted in "$chapter" | "${chapter%%-*}") script=$file ;; esac
done
[ -n "$wanted" ] || fail "name a chapter, launch/run.sh CHAPTER [flags]: one of ${chapters[*]}"
# Any other folder with a script, such as one that tools/combine.py has made
for file in "$repository/$wanted/train-llm.py" "$wanted/train-llm.py"; do
  [ -n "$script" ] || [ ! -f "$file" ] || script=$(readlink -f "$file")
done
[ -n "$script" ] || fail "there is no chapter $wanted: take one of ${chapters[*]}"
shift

# An active virtual environment comes first, then .venv, then the first Python on the PATH, such as
# the Python of Conda, of a module or of a container.
python=python
if [ -z "${VIRTUAL_ENV-}" ] && [ -x "$repository/.venv/bin/python" ]; then
  python=$repository/.venv/bin/python
fi
command -v "$python" > /dev/null || fail "there is no python: activate a virtual environment"

# torchrun takes options from these variables of a pod, too, and would wait for other pods.
[ -z "${!PET_*}" ] ||
  fail "torchrun reads ${!PET_*}: unset them, and set NNODES, NODE_RANK, MASTER_ADDR as you need"

nnodes=${NNODES:-1}
case $script in */01-*)
  # On several devices, each process would train the same model and write the same files.
  if [ "$nnodes" != 1 ] || [ "${NPROC_PER_NODE:-1}" != 1 ]; then
    fail "chapter $wanted trains on one device: take another chapter for several processes or nodes"
  fi
  exec "$python" "$script" "$@"
  ;;
esac

# Each restart gets a store on a new port. Otherwise, on several nodes, new workers of chapter 9
# would find the addresses of dead workers in torchrun's own store (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# With this folder on PYTHONPATH, each rank that waits leaves a dump in the folder HANG_DUMPS.
[ -z "${HANG_DUMPS-}" ] || export PYTHONPATH="$repository/tools/watch${PYTHONPATH:+:$PYTHONPATH}"

[[ $nnodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ ]] ||
  fail "NNODES=$nnodes must be a number of nodes, or the smallest and the largest number, as in 1:2"
least=${nnodes%:*}
most=${nnodes#*:}
[ "$least" -le "$most" ] || fail "NNODES=$nnodes has the larger number first: use NNODES=$most:$least"

if [ -z "${NPROC_PER_NODE-}" ]; then
  # PyTorch counts, because it respects CUDA_VISIBLE_DEVICES and knows GPUs of all makers.
  NPROC_PER_NODE=$("$python" -c "import torch; print(torch.cuda.device_count() or 1)") ||
    fail "$python cannot import torch: activate the virtual environment that has it"
fi
[[ $NPROC_PER_NODE =~ ^([1-9][0-9]*|auto|cpu|gpu|xpu)$ ]] ||
  fail "NPROC_PER_NODE=$NPROC_PER_NODE must be a number of processes, such as 8"
# As torchrun would set it for several processes, without its long message
[ "$NPROC_PER_NODE" = 1 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
options=(--nproc-per-node "$NPROC_PER_NODE" --max-restarts "${MAX_RESTARTS:-0}")

if [ "$nnodes" = 1 ]; then
  # --standalone meets on a free port, so jobs on one machine do not collide. The default address
  # is the host's name, which has no address in some containers.
  options+=(--standalone --local-addr localhost)
else
  # A default such as localhost would let each node wait for the others on a port of its own.
  [ -n "${MASTER_ADDR-}" ] ||
    fail "NNODES=$nnodes needs MASTER_ADDR: the name or address of a node that all nodes reach"
  options+=(--nnodes "$nnodes" --rdzv-backend c10d)
  options+=(--rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}")
  # A node meets only nodes with the same id. By default, each chapter is a job of its own.
  options+=(--rdzv-id "${RDZV_ID:-$(basename "$(dirname "$script")")}")
  # The c10d rendezvous numbers the nodes itself, and ignores --node-rank. NODE_RANK decides which
  # node keeps the list of all nodes. Without NODE_RANK, a node compares MASTER_ADDR with its own
  # name and address, and does not recognise an alias or a second network card.
  if [ -n "${NODE_RANK-}" ]; then
    options+=(--rdzv-conf "is_host=$([ "$NODE_RANK" = 0 ] && echo true || echo false)")
  fi
  # If rank 0 is on this node, the other ranks use this address. The default is the host's name.
  [ -z "${LOCAL_ADDR-}" ] || options+=(--local-addr "$LOCAL_ADDR")
  # One process of each node looks at the run, and all compare what they see. Not for nodes that may
  # come later, and not for chapter 9, which has no flags.
  if [ "${PREFLIGHT:-1}" = 1 ] && [ "$least" = "$most" ] && [[ $script != */09-* ]]; then
    look=("${options[@]}" --nproc-per-node 1 --max-restarts 0)
    "$python" "$repository/launch/torchrun.py" "${look[@]}" "$repository/tools/preflight.py" \
      "$(dirname "$script")" "$@" || fail "tools/preflight.py: see above, or PREFLIGHT=0"
  fi
fi

# launch/torchrun.py is torchrun, and prints the error message of the script once more at the end.
# `exec` replaces this shell by torchrun, so signals reach torchrun.
exec "$python" "$repository/launch/torchrun.py" "${options[@]}" "$script" "$@"
