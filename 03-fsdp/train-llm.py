"""Chapter 3: models larger than one device, with fully sharded data parallelism (FSDP2).

Each process keeps its shard of every weight, gradient and AdamW moment, and no more. What a layer
needs is gathered from all ranks right before it computes, and freed right after. So a model may be
as large as the devices are together. Every changed place has a comment that begins with "FSDP:".

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e alpaca     # all GPUs of one machine
    torchrun --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint node-0:29400 \
        train-llm.py -e alpaca                            # the same command on two machines
"""

import argparse
import ctypes
import glob
import json
import logging
import math
import os
import queue
import shutil
import signal
import sys
import sysconfig
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # or it patches torch and tqdm
os.environ.setdefault("COMET_TIMEOUT_CLEANING", "30")  # or the end may wait an hour for Comet
os.environ.setdefault("COMET_TIMEOUT_UPLOAD", "30")
import comet_ml
import datasets
import numpy as np
import psutil
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import snapshot_download
from torch.distributed.checkpoint import staging, state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import Subset
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

REPOSITORY = Path(__file__).resolve().parents[1]
# DDP: torchrun starts this file once per device and tells each process which of them it is.
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class RunState:
    """Where a run stands: `state.json` of every checkpoint."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # blocks consumed: with the seed, the position in the data and its randomness
    epoch: float = 0.0
    loss_sum: float = 0.0  # over the steps since the last logged one
    steps_since_log: int = 0
    train_blocks: int = 0
    eval_blocks: int = 0
    comet_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    flags: dict = field(default_factory=dict)  # those that must not change on resume


@record  # DDP: so that torchrun reports the traceback of the rank that failed first
def main(at_exit: ExitStack) -> None:
    # Set up
    args = parse_args()
    device = join_process_group()  # DDP: each process has its own device
    # DDP: the share of every rank; steps, epochs and the position in the data count all of it.
    global_batch = args.batch_size * args.gradient_accumulation_steps * WORLD_SIZE
    torch.manual_seed(args.seed)
    say(f"{device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    transformers.logging.disable_progress_bar()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    keep_freed_memory()
    run_folder = find_run_folder(args)
    checkpoint, state = find_checkpoint(run_folder, args)

    # Data, model, optimizer
    let_others_go_on = one_rank_per_cache_first()  # DDP: it downloads and tokenizes for the others
    config, tokenizer = load_config_and_tokenizer(args)
    train_blocks, eval_blocks = load_blocks(args, tokenizer, state, global_batch)
    # FSDP: the model takes all ranks at once, so it comes later
    let_others_go_on()  # DDP: they find all of it in the cache
    # DDP: ranks that differ in these would train different things, and nobody would notice.
    if len(set(gather(str((vars(args), state.step, state.train_blocks))))) > 1:
        fail("the ranks differ in flags, data or checkpoints: start all nodes with the same ones")
    model = build_model(args, config, device, checkpoint)  # FSDP: takes the place of DDP
    optimizer = torch.optim.AdamW(parameter_groups(model, args), lr=args.lr, fused=True)
    steps_left = (args.num_epochs * len(train_blocks) - state.samples) // global_batch
    total_steps = min(state.step + max(steps_left, 0), args.max_steps or sys.maxsize)
    schedule = (args.lr_scheduler, optimizer, args.warmup_steps, total_steps)
    scheduler = transformers.get_scheduler(*schedule)
    autocast = nullcontext()  # FSDP: fully_shard casts instead, what it gathers
    # fp16 rounds gradients below 6e-8 to zero: the scaler multiplies them out of that range.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    stateful = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if checkpoint:
        load_training_state(checkpoint, stateful, model)
    # FSDP: --async-checkpoint copies the shards to CPU memory (pinned, and kept for the next time,
    # on GPUs), from where a thread writes them. Its collectives must not mix with the others.
    thread, stager = ThreadPoolExecutor(1), staging.BlockingAsyncStager(device.type == "cuda")
    group, save = dist.new_group(backend="gloo"), thread.submit(lambda: None)
    run_log = RunLog(args, run_folder if RANK == 0 else None, state)  # FSDP: all save, one logs
    at_exit.callback(run_log.close)
    run_log.parameters(describe_run(args, model, train_blocks, device, global_batch), model)

    # The loop
    batches = read_batches(train_blocks, args, state.samples, device)
    loss_sum = torch.tensor(state.loss_sum, device=device)
    stop_signals = catch_stop_signals()
    # DDP: one progress bar for all ranks.
    progress = tqdm(total=total_steps, initial=state.step, unit="step", disable=RANK > 0 or None)
    timer = PhaseTimer(device)
    model.train()
    stop_signal = 0
    while state.step < total_steps and not stop_signal:
        for remaining in reversed(range(args.gradient_accumulation_steps)):
            # FSDP: each micro-batch gathers weights and scatters gradients, with no room to keep
            # all of them. With --no-reshard-after-forward there is, until the last micro-batch.
            model.set_requires_gradient_sync(not remaining or args.reshard_after_forward)
            model.set_reshard_after_backward(not remaining or args.reshard_after_forward)
            with timer("data"):
                input_ids = next(batches)
            with timer("forward"), autocast:
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                loss = loss / args.gradient_accumulation_steps
            with timer("backward"):
                scaler.scale(loss).backward()
            loss_sum += loss.detach()
        with timer("update"):
            scaler.unscale_(optimizer)
            max_norm = args.max_grad_norm or math.inf
            # FSDP: of the shards of all ranks; each rank has to ask for it
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()
            learning_rate = scheduler.get_last_lr()[0]
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()  # FSDP: there are no buckets to keep
        state.step += 1
        state.samples += global_batch
        state.epoch = state.samples / len(train_blocks)
        state.steps_since_log += 1
        progress.update()
        at_end = state.step == total_steps
        # DDP: all leave after the same step, or the others would wait for those that left.
        stop = torch.tensor(max(stop_signals, default=0))
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        stop_signal = stop.item()
        log_now = state.step % args.log_freq == 0 or at_end
        save_now = state.step % args.ckpt_freq == 0 or at_end or stop_signal
        if log_now or save_now:  # DDP: the mean over all tokens; twice, it is the same
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)

        if log_now:
            # Reading a number waits for the device. Nothing here does so between two logged steps:
            # Python runs ahead, and the device always finds its next kernel in the queue.
            mean_loss = loss_sum.item() / state.steps_since_log
            stop_unless_finite(mean_loss, grad_norm, state, args)
            metrics = {"step": state.step, "epoch": state.epoch, "loss": mean_loss}
            metrics |= {"learning_rate": learning_rate, "grad_norm": grad_norm.item()}
            metrics |= timer.read(tokens_per_step=global_batch * args.seq_length)
            metrics |= worst_of_ranks(memory_metrics(device))  # DDP: the first to run out ends all
            run_log.metrics(metrics)
            show_progress(progress, metrics)
            loss_sum.zero_()
            state.steps_since_log = 0

        if args.eval_freq and (state.step % args.eval_freq == 0 or at_end):
            with autocast:
                eval_loss = evaluate(model, eval_blocks, args, device)
            stop_unless_finite(eval_loss, grad_norm, state, args)
            metrics = {"step": state.step, "epoch": state.epoch, "eval/loss": eval_loss}
            metrics |= {"eval/perplexity": math.exp(min(eval_loss, 700))}  # e^710 overflows
            run_log.metrics(metrics)
            say(f"step {state.step}/{total_steps}  held-out loss {eval_loss:.4f}")

        if run_folder and save_now:
            state.loss_sum = loss_sum.item()
            stop_unless_finite(state.loss_sum, grad_norm, state, args)
            training_state = {name: part.state_dict() for name, part in stateful.items()}
            # FSDP: under the names of parameters, so that any number of ranks can read it
            training_state["model"] = weights_of(model)
            training_state["optimizer"] = state_dict.get_optimizer_state_dict(model, optimizer)
            save.result()  # FSDP: the checkpoint before must be complete
            snapshot = stager.stage(training_state) if args.async_checkpoint else training_state
            parts = (run_folder, model, tokenizer, snapshot, asdict(state), args, group)
            if args.async_checkpoint:
                save = thread.submit(save_checkpoint, *parts)
            else:
                save_checkpoint(*parts)
    progress.close()
    save.result()  # FSDP: the last one may still be on its way

    # Finished, or told to stop
    if run_folder and state.step >= total_steps:
        with new_folder(run_folder / "final") as folder:
            # FSDP: save_distributed=True, each rank writes its shards; they are joined on the disk.
            files = dcp.HuggingFaceStorageWriter(folder, None, 1, True, enable_consolidation=True)
            dcp.save(weights_of(model), storage_writer=files)
            if RANK == 0:
                shutil.rmtree(folder / "sharded")
                save_model(folder, model, tokenizer)
        say(f"Done: {state.step} steps; the model is in {run_folder / 'final'}")
    # FSDP: only on success, since it may wait for the other ranks
    dist.destroy_process_group()
    if state.step < total_steps:
        outcome = "saved: the same command continues" if run_folder else "not saved: it has no name"
        say(f"Stopped after step {state.step}, {outcome}")
        sys.exit(128 + stop_signal)


# -- Set up ----------------------------------------------------------------------------------------


def say(message: str) -> None:
    """Prints a line above the progress bar."""
    if RANK == 0:  # DDP: the others would say the same
        tqdm.write(message, file=sys.stderr)


def fail(message: str) -> None:
    """Leaves with one sentence for what a user can mend."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # DDP: torchrun ends its report with it
        Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
    sys.exit(f"error: {message}")


@contextmanager
def explain(message: str):
    """Fails with `message` and the cause in place of the traceback of what happens inside."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except dcp.CheckpointException as error:  # FSDP: on all ranks, with the errors of some
        fail(f"{message} ({first_line(next(iter(error.failures.values()))[0])})")
    except Exception as error:
        fail(f"{message} ({first_line(error)})")


def first_line(error) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def join_process_group() -> torch.device:
    """Meets the other ranks; returns the device of this one."""
    gpus = torch.cuda.is_available() and torch.cuda.device_count()
    if not 1 <= int(os.environ.get("LOCAL_WORLD_SIZE", 0)) <= (gpus or math.inf):
        fail(f"start it as torchrun --standalone --nproc-per-node {gpus or 2} {' '.join(sys.argv)}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # DDP: first of all, or every rank takes memory of GPU 0
    # DDP: NCCL moves GPU tensors. Gloo moves CPU tensors: whether some rank was told to stop can
    # be asked without waiting for what is queued on the GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    return device


def gather(value) -> list:
    """What each rank passes, in the order of the ranks, on every rank. Waits for all of them."""
    # DDP: for a few small objects; tensors that matter for the speed go through all_reduce.
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def one_rank_per_cache_first():
    """Lets one rank per datasets cache go on; the others when it calls what this returns.

    Nodes may share a cache or have one each: ranks that read the same link share theirs. They wait
    until it is gone; a collective would give up after 30 minutes.
    """
    link = Path(datasets.config.HF_DATASETS_CACHE, os.path.expandvars("$MASTER_ADDR-$MASTER_PORT"))
    link.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # DDP: the first rank to get here has made it
        link.symlink_to(uuid.uuid4().hex)
    caches = gather(os.readlink(link))
    while caches.index(caches[RANK]) < RANK and link.is_symlink():
        time.sleep(0.1)
    return lambda: link.unlink(missing_ok=True)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def keep_freed_memory() -> None:
    """Lets glibc reuse freed CPU tensors. It would give them back to the system, and a step would
    lose 5 to 10 % of its time to page faults."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD, at its limit


def find_run_folder(args) -> Path | None:
    """The folder of a named run, which may not exist yet but can be written."""
    if args.experiment_name is None:
        return None
    run_folder = args.save_dir / args.experiment_name
    existing = next(path for path in [run_folder, *run_folder.parents] if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        fail(f"cannot write to {existing}: choose another --save-dir")
    return run_folder


def catch_stop_signals() -> list[int]:
    """A list that SIGTERM and Ctrl-C fill; the loop looks at it after every step."""
    received = []

    def remember(signum, frame):
        received.append(signum)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        # DDP: no message, torchrun prints one. SIGTERM also comes when another rank has failed.

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return received


# -- Data ------------------------------------------------------------------------------------------

FORMATS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
FORMATS |= {".csv": "csv", ".parquet": "parquet"}


def load_config_and_tokenizer(args):
    name = args.model_name
    help_gated = f"accept its licence at https://huggingface.co/{name} and run `hf auth login`"
    help_all = f"check name and network; if it is gated, {help_gated}; --demo needs neither"
    with explain(f"cannot load the model {name}: {help_all}"):
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and args.seq_length > positions:
        fail(f"--seq-length {args.seq_length} is beyond the {positions} positions of {name}")
    if tokenizer.eos_token_id is None:
        fail(f"the tokenizer of {name} has no end-of-text (eos) token")
    return config, tokenizer


def load_documents(args) -> datasets.DatasetDict:
    """The splits of `--dataset-name`: local files (a text file is one document) or the Hub's."""
    name = os.path.expanduser(args.dataset_name)
    is_folder = os.path.isdir(name)
    pattern = os.path.join(glob.escape(name), "**", "*") if is_folder else name
    found = sorted(glob.glob(pattern, recursive=True))
    files = [file for file in found if Path(file).suffix in FORMATS]
    kinds = {FORMATS[Path(file).suffix] for file in files}
    is_path = is_folder or name.startswith(("/", ".")) or "*" in name
    if not files and (is_path or Path(name).suffix in FORMATS):
        fail(f"{name} matches no file with one of the endings {' '.join(FORMATS)}")
    if len(kinds) > 1 and not is_folder:
        fail(f"{name} matches files of several kinds: choose one of {', '.join(sorted(kinds))}")
    remedy = "check name, --dataset-subset and network; it takes data files, not a loading script"
    with explain(f"cannot load the dataset {name}: {remedy}"):
        if kinds == {"text"}:
            options = {"sample_by": "document", "encoding_errors": "replace"}
            return datasets.load_dataset("text", data_files=files, **options)
        if files and not is_folder:
            return datasets.load_dataset(kinds.pop(), data_files=files)
        return datasets.load_dataset(name, args.dataset_subset)


def tokenize(rows: dict, tokenizer, column: str) -> dict:
    """The token ids of each document and an end-of-text token; empty documents are left out."""
    texts = [text for text in rows[column] if text]
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    end = tokenizer.eos_token_id
    return {"input_ids": [ids if ids[-1] == end else [*ids, end] for ids in documents if ids]}


class PackedBlocks:
    """All documents end to end, cut into blocks of `seq_length` tokens; less than one is dropped.

    `blocks[i]` is an int32 array of shape (seq_length,). Nothing else copies tokens: `tokens` is a
    view of the memory-mapped Arrow cache, which all processes of a machine share.
    """

    def __init__(self, tokenized: datasets.Dataset, seq_length: int):
        chunks = tokenized.data.column("input_ids").chunks
        self.tokens = pa.chunked_array([chunk.flatten() for chunk in chunks], pa.int32())
        self.seq_length = seq_length

    def __len__(self) -> int:
        return len(self.tokens) // self.seq_length

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens.slice(index * self.seq_length, self.seq_length).to_numpy()


def load_blocks(args, tokenizer, state: RunState, global_batch: int):
    """The blocks to train on and those held out: a split of their own, else the last 1 %."""
    name, splits = args.dataset_name, load_documents(args)
    if "train" not in splits:
        fail(f"{name} has no train split, only {', '.join(splits)}")
    features = splits["train"].features
    columns = [column for column in features if "string" in getattr(features[column], "dtype", "")]
    if not columns:
        fail(f"{name} has no text column, only {', '.join(features)}")
    column = "text" if "text" in columns else columns[0]

    def pack(split: str) -> PackedBlocks:
        tokenized = splits[split].map(
            tokenize,
            batched=True,
            fn_kwargs={"tokenizer": tokenizer, "column": column},
            remove_columns=splits[split].column_names,
            features=datasets.Features(input_ids=datasets.List(datasets.Value("int32"))),
            desc=f"Tokenizing {split}",
        )
        return PackedBlocks(tokenized, args.seq_length)

    blocks = pack("train")
    held_out = next((split for split in ("validation", "test") if split in splits), None)
    eval_blocks = pack(held_out) if held_out else ()
    count = len(blocks)
    if not len(eval_blocks):  # a resumed run goes on with what it held out at first
        count -= state.eval_blocks or max(count // 100, global_batch)
        eval_blocks = Subset(blocks, range(max(count, 0), len(blocks)))
    if count < global_batch:
        sizes = f"{len(blocks)} blocks for global batches of {global_batch} and the held-out ones"
        fail(f"{name} is too small, {sizes}: lower --batch-size or --seq-length")
    if state.step and count != state.train_blocks:
        fail(f"{name} has changed since this run began: choose another --experiment-name")
    state.train_blocks, state.eval_blocks = count, len(eval_blocks)
    say(f"{name}, column {column!r}: {count} blocks to train on, {len(eval_blocks)} held out")
    say(f"Global batch of {global_batch} blocks of {args.seq_length} tokens")
    return Subset(blocks, range(count)), eval_blocks


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    # RandomState: NumPy promises the same numbers in every version, so old runs can resume.
    return np.random.RandomState((seed, epoch)).permutation(count)


def sample_order(positions: range, count: int, seed: int) -> list[int]:
    """Which of `count` blocks stand at these positions of the endless order of samples.

    One permutation of all blocks follows another, each a pure function of seed and epoch: a run
    resumes at its next position, and nothing is read, skipped or repeated on the way there.
    """
    return [int(permutation(seed, p // count, count)[p % count]) for p in positions]


def read_batches(blocks: Subset, args, samples: int, device: torch.device):
    """Micro-batches without end, from position `samples` of the order on."""
    samples += RANK * args.batch_size  # DDP: the lower ranks take those before
    while True:
        positions = range(samples, samples + args.batch_size)
        # Dropout, too, depends on the position alone: a run resumes with the same masks.
        torch.manual_seed(args.seed + samples)
        yield read_batch(blocks, sample_order(positions, len(blocks), args.seed), device)
        samples += WORLD_SIZE * args.batch_size  # DDP: and the other ranks those between


def read_batch(blocks, indices, device: torch.device) -> torch.Tensor:
    """The token ids of these blocks: int64 of shape (len(indices), seq_length) on `device`."""
    batch = torch.from_numpy(np.stack([blocks[i] for i in indices]))
    if device.type == "cuda":
        batch = batch.pin_memory()  # only from here can a copy be queued without waiting for it
    return batch.to(device, non_blocking=batch.is_pinned()).long()


# -- Model and optimizer ---------------------------------------------------------------------------


def build_model(args, config, device: torch.device, checkpoint: Path | None):
    """The model on `device`, its weights in fp32: of the checkpoint, pretrained, or random."""
    # In bf16, the dtype of many checkpoints, most AdamW updates are too small to move a weight.
    options = {"dtype": torch.float32}
    with explain(f"cannot build a causal LM from {args.model_name}"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)  # shapes without values
    # FSDP: 1) so far: on the meta device, where a model of any size fits. Its class is noted for
    # config.json before fully_shard gives it another one.
    model.config.architectures = [type(model).__name__]
    # FSDP: 2) each rank is to keep some rows of each parameter, in fp32. A layer is gathered for
    # its own computation, in the compute precision; the root has the rest, such as embeddings, tied
    # or not, and is gathered for the whole forward and backward pass.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, reshard_after_forward=args.reshard_after_forward, **policy)
    fully_shard(model, **policy)
    # FSDP: 3) memory for the shards of this rank, holding whatever was there before
    model.to_empty(device="cpu" if args.cpu_offload else device)
    # FSDP: 4) gives all of it a value, buffers too, which files do not have. fully_shard has given
    # the layers other classes, which Transformers would take for somebody's own code and skip.
    model.is_custom_code = lambda: False
    with AsOnOneDevice():
        model.init_weights()
    if not (checkpoint or args.from_scratch):
        remedy = "--from-scratch starts from random weights, --demo needs no download"
        message = f"cannot load the weights of {args.model_name}: {remedy}"
        with explain(message):
            load_weights(model, args.model_name)  # FSDP: 5) each rank reads its shards
    for buffer in model.buffers():  # FSDP: but not parameters, which may be offloaded
        buffer.data = buffer.to(device)
    ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if ampere and args.dtype != "fp32" and is_flash_attn_2_available():
        with suppress(ValueError):  # a family without it keeps its default, SDPA for most
            model.set_attn_implementation("flash_attention_2")
    say(f"Attention {model.config._attn_implementation}, compute precision {args.dtype}")

    if args.activation_checkpointing:
        with explain(f"{args.model_name} has no --activation-checkpointing"):
            enable = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.18
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if args.compile:
        # Layer by layer and in place: layers of a kind share one compilation, the state dict keeps
        # its names, and attention stays causal without a mask.
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):  # Transformers' decoder layers
                module.compile()
    if args.compile and device.type == "cuda":
        # Spares the fp32 copy of the logits, the largest tensor of a step. No gain on a CPU.
        model.loss_function = torch.compile(model.loss_function)
    # Transformers looks in every forward pass whether position ids restart within a row. Ours never
    # do, and a look at a tensor waits for the GPU.
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    transformers.modeling_flash_attention_utils._is_packed_sequence = lambda *_, **__: False
    return model


class AsOnOneDevice(torch.utils._python_dispatch.TorchDispatchMode):
    """Gives a sharded tensor the initial values that the whole one would get on one device.

    Else every rank would draw the same numbers for its shards on CPUs, and others than a single
    device on GPUs. Takes memory for one whole parameter at a time.
    """

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        fills = op.overloadpacket.__name__ in ("normal_", "uniform_", "copy_")
        # FSDP: only the tensor to fill is sharded, not what may be copied into it.
        if fills and [isinstance(arg, dist.tensor.DTensor) for arg in args].count(True) == 1:
            whole = op(torch.empty(args[0].shape, device=args[0].device), *args[1:], **kwargs or {})
            layout = (args[0].device_mesh, args[0].placements)
            return args[0].copy_(dist.tensor.distribute_tensor(whole, *layout, src_data_rank=None))
        return op(*args, **kwargs or {})


def weights_of(model) -> dict:
    """The state dict without the second names of tied weights."""
    return {n: x for n, x in model.state_dict().items() if n not in model.all_tied_weights_keys}


def load_weights(model, name: str) -> None:
    """Fills the shards of this rank from safetensors in a folder or on the Hub, in any dtype."""
    shards, prefix = weights_of(model), f"{model.base_model_prefix}."
    folder = name if os.path.isdir(name) else snapshot_download(name, allow_patterns="model*")
    # FSDP: some files have the names of the model without its head.
    reader = dcp.HuggingFaceStorageReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    shards = {n if n in saved else n.removeprefix(prefix): x for n, x in shards.items()}
    dcp.load(shards, storage_reader=reader)


def parameter_groups(model, args) -> list[dict]:
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run keeps these: with another value it would train something else.
LASTING_FLAGS = "model_name from_scratch dataset_name dataset_subset seq_length dtype seed lr"
LASTING_FLAGS += " lr_scheduler warmup_steps weight_decay max_grad_norm"
DAMAGED = "{} is damaged: remove it, and the run continues from the one before"


def list_checkpoints(run_folder: Path) -> list[Path]:
    """The complete ones, oldest first."""
    return sorted(path for path in run_folder.glob("step-*") if path.name[5:].isdecimal())


def find_checkpoint(run_folder: Path | None, args) -> tuple[Path | None, RunState]:
    """The newest complete checkpoint and its state; None and a new state where there is none."""
    flags = {name: getattr(args, name) for name in LASTING_FLAGS.split()}
    checkpoints = list_checkpoints(run_folder) if run_folder else []
    if not checkpoints:
        return None, RunState(flags=flags)
    # FSDP: chapters 1 and 2 save all of it in one file
    if (checkpoints[-1] / "training_state.pt").exists():
        fail(f"{checkpoints[-1]} is from another chapter: choose another --experiment-name")
    with explain(DAMAGED.format(checkpoints[-1])):
        state = RunState(**json.loads((checkpoints[-1] / "state.json").read_text()))
    for name, value in flags.items():
        if (before := state.flags.get(name, value)) != value:
            flag = f"--{name.replace('_', '-')}"
            fail(f"{flag} was {before} in this run, not {value}: choose another --experiment-name")
    say(f"Continuing from {checkpoints[-1]}")
    return checkpoints[-1], state


@contextmanager
def new_folder(folder: Path):
    """Yields a temporary folder, which takes its real name once all of it is on the disk."""
    temporary = folder.with_name(folder.name + ".tmp")
    with explain(f"cannot save {folder}, what was saved before is intact"):
        if RANK > 0:  # FSDP: the others write into it; rank 0 alone renames and removes
            return (yield temporary)
        try:
            temporary.mkdir(exist_ok=True)
            yield temporary
            for file in filter(Path.is_file, temporary.rglob("*")):
                with open(file, "rb+") as opened:
                    os.fsync(opened.fileno())
            if folder.exists():
                remove_folder(folder)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Takes its name away first: no half-removed folder passes for a complete one."""
    shutil.rmtree(folder.rename(folder.with_name(folder.name + ".old.tmp")))


def save_model(folder: Path, model, tokenizer) -> None:
    model.config.save_pretrained(folder)  # FSDP: the weights are sharded
    tokenizer.save_pretrained(folder)


def save_checkpoint(run_folder, model, tokenizer, training_state, state: dict, args, group):
    """All that an exact resume needs, in a folder of its own; removes the oldest checkpoints."""
    with new_folder(run_folder / f"step-{state['step']:08d}") as folder:
        dcp.save(training_state, checkpoint_id=folder, process_group=group)  # FSDP: all ranks
        if RANK > 0:
            return
        save_model(folder, model, tokenizer)
        (folder / "state.json").write_text(json.dumps(state, indent=2))
    for checkpoint in list_checkpoints(run_folder)[: -args.keep_checkpoints]:
        remove_folder(checkpoint)


def load_training_state(checkpoint: Path, stateful: dict, model) -> None:
    """Restores each of `stateful` in place."""
    with explain(DAMAGED.format(checkpoint)):
        # FSDP: fills the shards of weights and moments; scheduler and scaler load themselves
        shards = state_dict.get_optimizer_state_dict(model, stateful["optimizer"])
        parts = stateful | {"optimizer": shards, "model": weights_of(model)}
        dcp.load(parts, checkpoint_id=checkpoint)
        state_dict.set_optimizer_state_dict(model, stateful["optimizer"], shards)
    # If the number of steps has changed, so has the learning rate of the next one.
    stateful["scheduler"].last_epoch -= 1
    stateful["scheduler"].step()


# -- Evaluation, metrics, timing -------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, blocks, args, device: torch.device) -> float:
    """The mean loss over all held-out blocks, in nats per token."""
    model.eval()
    size = args.batch_size
    loss_sum = torch.zeros((), device=device)
    # DDP: each rank takes every WORLD_SIZE-th batch.
    # FSDP: all make as many forward passes, since it takes everybody to gather a layer. Who has no
    # batch left takes any block, with weight 0.
    for begin in range(RANK * size, len(blocks) + RANK * size, WORLD_SIZE * size):
        indices = range(begin, min(begin + size, len(blocks)))
        input_ids = read_batch(blocks, indices or range(1), device)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss_sum += loss * len(indices)
    model.train()
    dist.all_reduce(loss_sum)  # DDP: a sum of sums, so that uneven shares do no harm
    return loss_sum.item() / len(blocks)


def stop_unless_finite(loss: float, grad_norm: torch.Tensor, state: RunState, args) -> None:
    # In fp16 an infinite gradient is nothing unusual: the scaler skips that step.
    if not math.isfinite(loss) or (args.dtype != "fp16" and not grad_norm.isfinite()):
        where = f"at step {state.step}, which is not saved"
        fail(f"the loss or its gradient is not finite {where}: lower --lr or raise --warmup-steps")


class PhaseTimer:
    """Times the phases of a step: `with timer("forward"): ...`.

    Python only queues work for a GPU, so its clock would time the queueing. CUDA events are queued
    with the work, and are read when the GPU has passed them.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.spans = {phase: [] for phase in ("data", "forward", "backward", "update")}
        self.last_read = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str):
        begin = self.now()
        yield
        self.spans[phase].append((begin, self.now()))

    def now(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, tokens_per_step: int) -> dict[str, float]:
        """Milliseconds per optimizer step and tokens per second, since the last read."""
        if self.on_gpu:
            torch.cuda.synchronize()
        now, steps, metrics = time.perf_counter(), len(self.spans["update"]), {}
        for phase, spans in self.spans.items():
            times = (a.elapsed_time(b) if self.on_gpu else 1e3 * (b - a) for a, b in spans)
            metrics[f"time/{phase}_ms"] = sum(times) / steps
            spans.clear()
        seconds = (now - self.last_read) / steps
        self.last_read = now
        metrics["time/total_ms"] = 1e3 * seconds
        return metrics | {"tokens_per_second": tokens_per_step / seconds}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """GB (1e9 bytes) that PyTorch has handed out and has reserved on the GPU.

    Elsewhere: the resident memory of this process, now; no peak is kept.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        stats = torch.cuda.memory_stats(device)
    else:
        total, resident = psutil.virtual_memory().total, psutil.Process().memory_info().rss
        stats = defaultdict(lambda: resident)
    metrics = {"memory/total_gb": total / 1e9}
    for kind in ("allocated", "reserved"):
        for when in ("current", "peak"):
            metrics[f"memory/{when}_{kind}_gb"] = stats[f"{kind}_bytes.all.{when}"] / 1e9
    return metrics


def worst_of_ranks(metrics: dict[str, float]) -> dict[str, float]:
    """The largest over the ranks; with several of them, what each has, too."""
    ranks = gather(metrics)  # DDP: every rank has to be here, or the others wait for it
    for rank, other in enumerate(ranks if WORLD_SIZE > 1 else ()):
        metrics |= {name.replace("/", f"/rank{rank}/"): value for name, value in other.items()}
    return metrics | {name: max(other[name] for other in ranks) for name in ranks[0]}


# -- Logging ---------------------------------------------------------------------------------------


def describe_run(args, model, train_blocks, device: torch.device, global_batch: int) -> dict:
    """What is logged once: every flag, and what follows from them."""
    return vars(args) | {
        "global_batch": global_batch,
        "world_size": WORLD_SIZE,  # DDP: the number of devices
        "parameters_total": sum(p.numel() for p in model.parameters()),
        "parameters_trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "dataset_blocks": len(train_blocks),
        "dataset_tokens": len(train_blocks) * args.seq_length,
        "device_name": device_name(device),
        "device_memory_gb": memory_metrics(device)["memory/total_gb"],
        "torch_version": torch.__version__,
        "cuda_version": str(torch.version.cuda),
        "transformers_version": transformers.__version__,
    }


def show_progress(progress: tqdm, metrics: dict) -> None:
    """On the bar in a terminal, else as a line."""
    text = "loss {loss:.4f}  lr {learning_rate:.2e}  {tokens_per_second:,.0f} tokens/s"
    if progress.disable:
        say(f"step {metrics['step']}/{progress.total}  {text.format(**metrics)}")
    else:
        progress.set_postfix_str(text.format(**metrics))


class RunLog:
    """The records of a named run, the same ones in `metrics.jsonl` and in Comet; else does nothing.

    A thread of its own talks to Comet: however slow or unwilling that is, training goes on.
    """

    def __init__(self, args, run_folder: Path | None, state: RunState):
        self.file, self.calls, self.warned = None, queue.SimpleQueue(), False
        if run_folder is None:
            return
        path = run_folder / "metrics.jsonl"
        with explain(f"cannot write {path}"):
            run_folder.mkdir(parents=True, exist_ok=True)
            for leftover in run_folder.glob("*.tmp"):  # of a save that was cut off
                shutil.rmtree(leftover)
            # Drops what came after the checkpoint, and a last line that was only half written.
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            kept = [line for line in whole if json.loads(line)["step"] <= state.step]
            path.with_suffix(".new").write_text("".join(kept))
            path.with_suffix(".new").replace(path)
            self.file = path.open("a")
        comet = (args, run_folder / "comet", state.comet_key)
        self.comet = threading.Thread(target=self.talk_to_comet, args=comet, daemon=True)
        self.comet.start()

    def parameters(self, parameters: dict, model) -> None:
        if self.file:
            self.calls.put(("log_parameters", (parameters,), {}))
            self.calls.put(("set_model_graph", (str(model),), {}))

    def metrics(self, record: dict) -> None:
        if self.file:
            # JSON has no infinity, which the gradient norm of a step that fp16 skips may be.
            record = {name: x if math.isfinite(x) else None for name, x in record.items()}
            with explain(f"cannot write {self.file.name}; the last checkpoint is intact"):
                print(json.dumps(record), file=self.file, flush=True)
            position = {"step": record["step"], "epoch": record["epoch"]}
            self.calls.put(("log_metrics", (record,), position))

    def close(self) -> None:
        if self.file:
            self.calls.put(None)
            self.comet.join(timeout=60)
            if self.comet.is_alive():
                self.warn_once("no answer")

    def warn_once(self, reason) -> None:
        if not self.warned:
            self.warned = True
            say(f"warning: Comet fails, training goes on: {first_line(reason)}")

    def talk_to_comet(self, args, folder: Path, comet_key: str) -> None:
        has_key = bool(comet_ml.get_config("comet.api_key"))
        complaints = logging.Handler(logging.ERROR if has_key else logging.CRITICAL)
        complaints.emit = lambda record: self.warn_once(record.getMessage())
        logging.getLogger("comet_ml").handlers = [complaints]
        off = dict.fromkeys(["auto_output_logging", "log_graph", "parse_args"], False)
        names = {"name": args.experiment_name, "offline_directory": str(folder)}
        try:
            for online in (True, False) if has_key else (False,):
                with suppress(Exception):
                    experiment = comet_ml.start(
                        online=online,
                        workspace=args.comet_workspace,
                        project_name=args.comet_project_name,
                        experiment_key=comet_key,
                        mode="get_or_create",  # a resumed run goes on with the one it began
                        experiment_config=comet_ml.ExperimentConfig(
                            display_summary_level=0, **names, **off
                        ),
                    )
                    if experiment.alive:
                        break
            for method, values, options in iter(self.calls.get, None):
                getattr(experiment, method)(*values, **options)
            experiment.end()
        except Exception as error:
            return self.warn_once(error)
        if any(folder.glob("*.zip")):  # what could not be sent ends there, too
            say(f"Comet: to upload this run: comet upload {folder}/*.zip")
        elif has_key:
            say(f"Comet: {experiment.url}")


# -- Flags -----------------------------------------------------------------------------------------

# Two minutes on a laptop, with a text that every Python brings along.
DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # as the chapter
    "model_name": str(REPOSITORY / "tiny-llama"),
    "from_scratch": True,
    "dataset_name": os.path.join(sysconfig.get_path("stdlib"), "[a-z]*.py"),
    "seq_length": 256,
    "batch_size": max(1, 8 // WORLD_SIZE),  # DDP: chapter 1's global batch, so also its losses
    "max_steps": 400,
    "lr": 2e-3,
    "warmup_steps": 40,
    "eval_freq": 100,
    "ckpt_freq": 200,
}


# Those of transformers.get_scheduler that need nothing but a number of steps.
SCHEDULERS = ["cosine", "cosine_with_restarts", "linear", "polynomial", "inverse_sqrt"]
SCHEDULERS += ["constant", "constant_with_warmup"]


def at_least(minimum, kind=int, below=math.inf):
    """An argparse type: a number of this kind in this range."""

    def number(text: str):
        value = kind(text)
        if not minimum <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not at least {minimum} and below {below}")
        return value

    return number


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags], see --help",
        description="The default is in brackets.",
        allow_abbrev=False,
    )

    def add(*names, help: str, default=None, **options):
        suffix = "" if default is None or default is False else f" [{default}]"
        help = (help + suffix).replace("%", "%%")
        parser.add_argument(*names, help=help, default=default, **options)

    count, positive, real = at_least(0), at_least(1), at_least(0, float)
    add("-e", "--experiment-name", help="names the run: turns on checkpoints, resume and logs")
    add("--comet-project-name", default="distributed-training-demo", help="project at Comet")
    add("--comet-workspace", help="workspace at Comet [the account's own default]")
    add("-m", "--model-name", default="meta-llama/Llama-3.2-1B", help="Hub id or local folder")
    switch = argparse.BooleanOptionalAction
    add("--from-scratch", action=switch, default=False, help="random weights, not pretrained ones")
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="Hub id, file, folder or glob")
    add("--dataset-subset", help="configuration name on the Hub")
    add("-s", "--seq-length", type=at_least(2), default=1024, help="tokens per packed block")
    add("-b", "--batch-size", type=positive, default=8, help="blocks per device and forward pass")
    add("--gradient-accumulation-steps", type=positive, default=1, help="passes per optimizer step")
    add("--num-epochs", type=positive, default=3, help="passes over the dataset")
    add("--max-steps", type=positive, help="stop after this many optimizer steps")
    add("--lr", type=real, default=3e-5, help="peak learning rate")
    add("--lr-scheduler", choices=SCHEDULERS, default="cosine", help="course of the learning rate")
    add("--warmup-steps", type=count, default=0, help="steps until the peak learning rate")
    add("--weight-decay", type=real, default=0.01, help="AdamW's, on matrices only")
    add("--max-grad-norm", type=real, default=1.0, help="clips gradients; 0: no clipping")
    add("--dtype", choices=DTYPES, help="compute precision [bf16 on GPUs, fp32 on CPU]")
    add("--activation-checkpointing", action="store_true", help="less memory, more compute")
    add("--compile", action=switch, help="[on for CUDA, off elsewhere]")
    add("--eval-freq", type=count, default=500, help="steps between evaluations; 0: none")
    add("--log-freq", type=positive, default=10, help="steps between logged metrics")
    add("--ckpt-freq", type=positive, default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=positive, default=2, help="older ones are removed")
    add("--save-dir", type=Path, default=REPOSITORY / "outputs", help="the folder of all runs")
    add(
        "--seed",
        type=at_least(0, below=2**32),
        default=0,
        help="of random weights and the order of samples",
    )
    # DDP: no --device, torchrun hands the devices out.
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    # FSDP: what to give up for memory, or for speed
    add("--cpu-offload", action="store_true", help="shards and AdamW in CPU memory: less on GPUs")
    add("--reshard-after-forward", action=switch, default=True, help="less memory, more traffic")
    add("--async-checkpoint", action="store_true", help="train on while a checkpoint is written")
    add("--demo", action="store_true", help="a small preset; other flags override it")
    if "--demo" in sys.argv:
        parser.set_defaults(**DEMO)
    args = parser.parse_args()

    args.dtype = args.dtype or ("fp32" if args.device == "cpu" else "bf16")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    if args.dtype == "fp16" and args.device != "cuda":
        parser.error("--dtype fp16 needs a CUDA GPU: choose bf16 or fp32")
    name = args.experiment_name
    if name is not None and (name in ("", "..") or Path(name).name != name):
        parser.error("--experiment-name must be a plain folder name, without slashes")
    return args


if __name__ == "__main__":
    try:
        with ExitStack() as at_exit:  # so that Comet gets the records of a run that fails, too
            main(at_exit)
    except torch.OutOfMemoryError:
        remedy = "lower --batch-size and raise --gradient-accumulation-steps as much, then try"
        fail(f"out of GPU memory: {remedy} --activation-checkpointing, then a lower --seq-length")
    except KeyboardInterrupt:
        fail("interrupted before the first step")
    except torch._dynamo.exc.BackendCompilerFailed as error:
        fail(f"torch.compile failed, try --no-compile ({first_line(error)})")
