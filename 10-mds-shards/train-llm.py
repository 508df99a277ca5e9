"""Chapter 10: a corpus in a bucket, as rows of tokens that any number of nodes can read.

`tools/write-mds.py` tokenizes and packs a corpus once, and writes its rows into shards. Here each
rank reads rows by their number. The shards of an address are downloaded when a row needs them. Row
number n of a run is the same on any number of ranks, so nodes may come and go. Comments with MDS 1
to 9 mark the ideas.

    python ../tools/write-mds.py -o ../outputs/mds --demo     # first: writes the rows of the demo
    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    NNODES=4 MASTER_ADDR=node-0 NODE_RANK=0 ../launch/run.sh 10 -e c4 --save-dir /shared/runs \
        -d s3://bucket/c4 --eval-freq 0 --max-steps 10000     # on each of 4 nodes, with its number
"""

import argparse
import fcntl
import json
import logging
import math
import os
import shutil
import signal
import sys
import sysconfig
import time
import uuid
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path

# OpenMP's CPU threads wait in a busy loop. A shorter loop leaves more time to other programs.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Comet shows the metrics. Without this setting, it would change PyTorch to log more by itself.
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
# If its server does not answer, ask once (20 s) at the start, and wait 30 + 30 seconds at the end.
os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")
os.environ.setdefault("COMET_TIMEOUT_CLEANING", "30")
os.environ.setdefault("COMET_TIMEOUT_UPLOAD", "30")
import comet_ml
import datasets
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
import yaml
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter, state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

# DDP 1: torchrun starts one process per device, and these variables tell each process who it is.
RANK = int(os.environ.get("RANK", 0))  # its number among the processes of all nodes
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # its number among those of its node
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
# DDP: Only rank 0 prints, because all ranks have the same progress bar and the same log.
CONSOLE = sys.stderr if RANK == 0 else open(os.devnull, "w")
REPOSITORY = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@record  # DDP: torchrun then reports the traceback of the rank that failed first
def main():
    args = parse_args()
    # DDP 2: Each process joins the others and takes its own device, because GPU 0 is the default.
    device = join_process_group()
    if args.dtype is None:
        args.dtype = "fp32" if device.type == "cpu" else "bf16"
    if args.compile is None:
        args.compile = device.type == "cuda"
    accumulation = args.gradient_accumulation_steps
    # DDP 3: The global batch is the sum over all ranks, so steps and epochs count all devices.
    global_batch = args.batch_size * accumulation * WORLD_SIZE
    torch.manual_seed(args.seed)  # for random initial weights
    transformers.logging.disable_progress_bar()  # Transformers shows one bar per file
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    say(f"{device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    run_folder, checkpoint, state = open_run(args)  # the newest checkpoint, or None

    # Data, model, optimizer.
    config, tokenizer = load_config_and_tokenizer(args)
    # MDS: No rank waits for another rank here, because the rows are tokens already.
    train_samples, eval_samples = load_samples(args, tokenizer, config, global_batch)
    # MDS: The index of the shards has the hash of each shard, so other rows have another index.
    if checkpoint and state.index_hash != train_samples.index_hash:
        fail(f"{args.dataset_name} has changed since this run began: choose another -e name")
    state.index_hash = train_samples.index_hash
    state.train_samples = len(train_samples)
    # DDP: Other flags or data on one rank would spoil the training without any error.
    descriptions = gather(f"{vars(args)} {state.step} {state.index_hash}")
    if len(set(descriptions)) > 1:
        fail("the ranks differ in flags, data or checkpoints: start all nodes with the same ones")
    model = build_model(args, config, device, checkpoint)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args), lr=args.lr, betas=(0.9, args.adam_beta2), fused=True
    )
    # A resumed run may have another batch size, so count the steps that are left.
    steps_left = (args.num_epochs * len(train_samples) - state.samples) // global_batch
    total_steps = state.step + max(steps_left, 0)
    if args.max_steps:
        total_steps = min(total_steps, args.max_steps)
    scheduler = lr_schedule(args, optimizer, total_steps)
    # FSDP 1: No autocast, because MixedPrecisionPolicy casts the weights that FSDP gathers.
    autocast = torch.autocast(device.type, enabled=False)
    # fp16 rounds gradients below 3e-8 to zero. The scaler multiplies the loss, so that gradients
    # stay above 3e-8, and divides them before the update. With other dtypes it does nothing.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    # A checkpoint stores the states of these objects, besides the weights.
    stateful = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if checkpoint:
        load_training_state(checkpoint, stateful, model)
    elif args.resume_dir and args.skip_optimizer:
        # NODES: Take only the weights. The rest of the run begins anew.
        weights = model.state_dict()  # in the memory of the model, so reading fills the model
        read_state(of_this_rank(args.resume_dir), {"model": weights})
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save and keep run_folder; rank 0 logs
        run_log = RunLog(run_folder, checkpoint, state, args)
        parameters = describe_run(args, model, train_samples)
        parameters |= {"global_batch": global_batch, "device_name": device_name}
        run_log.log_parameters(parameters)

    # The training loop.
    loss_sum = torch.zeros((), device=device)
    logged_step = state.step
    token_counts = []  # MDS: of each step since the last logged one, without padding
    # MDS 1: A thread reads the rows of the next step, so that the devices need not wait for them.
    reader = ThreadPoolExecutor(1)
    next_rows = reader.submit(read_step, train_samples, state.samples, args)
    # DDP: The tokens of the whole job are the work of all devices.
    timer = PhaseTimer(device, flops_per_token(config, args.seq_length) / WORLD_SIZE)
    # disable=None: a progress bar in terminals only.
    progress = tqdm(total=total_steps, initial=state.step, file=CONSOLE, disable=None)
    stop_signals = catch_stop_signals()  # SIGTERM and Ctrl-C append to this list
    stop_signal = 0
    model.train()  # with dropout, if the model has any
    while state.step < total_steps and not stop_signal:
        with timer("data"):
            rows = next_rows.result()  # MDS: of this rank, for the whole step
        if state.step + 1 < total_steps:
            next_first = state.samples + global_batch
            next_rows = reader.submit(read_step, train_samples, next_first, args)
        # MDS 2: Count the labels of the whole step first, because its loss is a mean over them.
        is_token = np.array(rows) >= 0  # padding is -100
        token_count = torch.tensor(is_token.sum())
        dist.all_reduce(token_count)  # adds the counts of all ranks
        token_counts.append(token_count.item())
        # The last token of a row has no label, because nothing follows it.
        label_count = token_count.item() - global_batch
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # MDS: read_step has chosen the rows. Each micro-batch has dropout masks of its own.
            seed = args.seed + state.samples + (micro_step * WORLD_SIZE + RANK) * args.batch_size
            torch.manual_seed(seed)  # a resumed run also draws the same dropout masks
            is_last = micro_step == accumulation - 1
            # FSDP 2: Scatter in every micro-batch, because whole gradients take 4 bytes per weight.
            # --no-reshard-after-forward keeps weights and gradients whole, and scatters once.
            communicate = args.reshard_after_forward or is_last
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            # NODES 1: Only the last micro-batch averages over the copies, because links are slow.
            model.set_requires_all_reduce(is_last)
            with timer("data"):
                begin = micro_step * args.batch_size  # MDS: among the rows of the step
                indices = range(begin, begin + args.batch_size)
                input_ids = read_batch(rows, indices, device)
            with timer("forward"), autocast:
                # MDS 3: Divide by the labels per rank, because FSDP averages over the ranks.
                # A tensor, because the loss would be compiled a second time for Python numbers.
                # At least 1, because a step may consist of rows with a single token.
                labels_per_rank = torch.full((), max(label_count, 1) / WORLD_SIZE, device=device)
                # MDS 4: The label of padding is -100, and this label has no loss.
                # Padding comes last, so no other token attends to padding. So padding needs no
                # mask, and may have any token id.
                options = {"use_cache": False, "num_items_in_batch": labels_per_rank}
                loss = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options).loss
            with timer("backward"):
                scaler.scale(loss).backward()
            loss_sum += loss.detach()  # the number alone, without its graph
        with timer("update"):
            # Clip the complete gradient before the update, so that no bad batch spoils the weights.
            scaler.unscale_(optimizer)
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            # FSDP 3: The norm is over the shards of all ranks, so all ranks must compute it.
            grad_norm = grad_norm.full_tensor()
            learning_rate = scheduler.get_last_lr()[0]  # of this step, for the log
            scaler.step(optimizer)  # the same as optimizer.step(), except in fp16
            scaler.update()
            scheduler.step()  # once per optimizer step, not per micro-batch
            optimizer.zero_grad()  # because backward() adds to the gradients
        state.step += 1
        state.samples += global_batch
        state.epoch = state.samples / len(train_samples)
        progress.update()

        at_end = state.step == total_steps
        stop_signal = stop_signals[-1] if stop_signals else 0
        # DDP: A signal may reach the ranks in different steps. All must stop after the same step.
        stop = torch.tensor(stop_signal)  # on the CPU, so that no rank waits for its GPU
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        stop_signal = stop.item()
        eval_now = args.eval_freq > 0 and (state.step % args.eval_freq == 0 or at_end)
        save_now = state.step % args.ckpt_freq == 0 or at_end or stop_signal
        # MDS: The limit stays at 30 minutes, because a rank may repeat a read for some minutes.
        log_now = state.step % args.log_freq == 0 or save_now
        if log_now:
            # `.item()` waits until the GPU has computed the number. Between two logged steps,
            # training reads no number back, so Python runs ahead and queues work for the GPU.
            # DDP 9: Average the loss over ranks, because each rank has seen its own samples only.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            mean_loss = loss_sum.item() / (state.step - logged_step)
            metrics = {
                "loss": mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                # MDS: The share of padding. The speed counts tokens alone.
                "padding": 1 - np.mean(token_counts) / (global_batch * args.seq_length),
                **timer.read(tokens_per_step=np.mean(token_counts)),
                **of_all_ranks(memory_metrics(device)),  # DDP: the fullest device limits -b
            }
            if run_log:
                run_log.log_metrics(state, metrics)
            speed = f"{metrics['tokens_per_second']:,.0f} tokens/s"
            numbers = f"loss {mean_loss:.4f}  lr {learning_rate:.2e}  {speed}"
            say(f"step {state.step}/{total_steps}  {numbers}")
            # In fp16 an infinite gradient is normal: the scaler skips that step.
            gradient_is_normal = args.dtype == "fp16" or grad_norm.isfinite()
            if not math.isfinite(mean_loss) or not gradient_is_normal:
                fail("the loss or its gradient is not finite: lower --lr or raise --warmup-steps")
            loss_sum.zero_()
            token_counts.clear()  # MDS: together with loss_sum
            logged_step = state.step
        if eval_now:
            with autocast:
                eval_loss = evaluate(model, eval_samples, args, device)
            say(f"step {state.step}/{total_steps}  held-out loss {eval_loss:.4f}")
            metrics = {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)}
            if run_log:
                run_log.log_metrics(state, metrics)
        if run_folder and save_now:
            # A saved step is always a logged step, so its numbers have passed the check above.
            save_checkpoint(run_folder, model, tokenizer, stateful, state, args)

    wait_for_checkpoint()  # NODES: until the last checkpoint has its name
    if run_folder and state.step >= total_steps:
        with new_folder(run_folder / "final") as folder:
            save_weights(folder, model, args)  # FSDP: on all ranks, because each has its shards
            if RANK == 0:
                save_model(folder, model, tokenizer)
        say(f"Done: the model is in {run_folder / 'final'}")
    elif not run_folder:
        say("Nothing was saved: -e gives a run a name, and saves its model, checkpoints and logs")
    dist.destroy_process_group()  # DDP: only after success, since it may wait for other ranks
    if state.step < total_steps:
        say(f"Stopped after step {state.step}: the same command continues the run, if -e names it")
        sys.exit(128 + stop_signal)  # the exit code that a shell gives for such a signal


# -- Model and optimizer ---------------------------------------------------------------------------


def build_model(args, config, device, checkpoint):
    """The model on `device`, with the weights of the checkpoint, pretrained or random weights."""
    # Weights in fp32, whatever the files have. AdamW changes a weight by about the learning rate.
    # The bf16 number after 0.02 is 0.0001 larger, so changes below half of it would be lost.
    # FSDP 4: Build on the meta device, because the whole model may not fit into any memory.
    with fail_on_error(f"cannot build a causal LM from {args.model_name}"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # FSDP 5: Gather the weights in bf16, which halves the traffic. Reduce gradients in fp32.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # NODES 2: Ranks form a table: a row holds one copy of the model, a column holds equal shards.
    # All-gathers and reduce-scatters stay in a row. Columns all-reduce the gradients of a shard.
    shape = (WORLD_SIZE // args.shard_size, args.shard_size)
    policy["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    policy["shard_placement_fn"] = lambda weight: even_shards(weight.shape, args.shard_size)
    # FSDP 6: Each layer is a unit, so that only one or two layers are whole at any time.
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, reshard_after_forward=args.reshard_after_forward, **policy)
    # Embeddings and head are large, so each is a unit, too, unless they are tied (one parameter).
    if not model.all_tied_weights_keys:
        embeddings = model.get_input_embeddings()
        fully_shard(embeddings, reshard_after_forward=args.reshard_after_forward, **policy)
        embeddings.set_unshard_in_backward(False)  # their backward pass needs no weights
        # The backward pass begins with the head, so the head stays whole after the forward pass.
        fully_shard(model.get_output_embeddings(), reshard_after_forward=False, **policy)
    # The root has the rest, such as the last norm, and stays whole from forward to backward pass.
    fully_shard(model, **policy)
    # FSDP 7: Take memory only for the shards of this rank, because other ranks have the rest.
    model.to_empty(device="cpu" if args.cpu_offload else device)
    # FSDP 8: Initialise all buffers in every run, because new memory holds arbitrary numbers.
    # Files do not store buffers such as the rotary frequencies. Files do store parameters, so draw
    # random parameters only from scratch. For a large model, a CPU needs minutes to draw them.
    with fail_on_error(f"shards cannot be initialised as {config.model_type} does: use chapter 2"):
        init_weights(model, draw=args.from_scratch and not checkpoint)
    if not args.from_scratch:
        with fail_on_error(f"cannot load the weights of {args.model_name}: try --from-scratch"):
            # FSDP 9: Each rank reads its shards from the files, so that no rank holds the model.
            # NODES: The weights of --resume-dir replace the pretrained weights.
            load_weights(model, args.model_name, checkpoint or args.resume_dir)
    for buffer in model.buffers():  # FSDP: not the parameters, which may be offloaded
        buffer.data = buffer.to(device)
    gpu_has_flash = device.type == "cuda" and args.dtype != "fp32" and is_flash_attn_2_available()
    # A few models need another version of FlashAttention, and name it in the second attribute.
    model_has_flash = model._supports_flash_attn and not model._compatible_flash_implementations
    if args.attention is None and gpu_has_flash and model_has_flash:
        args.attention = "flash_attention_2"
    if args.attention:
        with fail_on_error(f"--attention {args.attention} does not work for {config.model_type}"):
            model.set_attn_implementation(args.attention)
            used = model.config._attn_implementation
            if used != args.attention:
                raise ValueError(f"the model uses {used} instead")
    # Replace a function of Transformers that makes Python wait for the GPU in each pass. It looks
    # for positions that begin at 0 again. Here positions go on from one document to the next, so it
    # would find nothing, and return None.
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    attention = model.config._attn_implementation
    say(f"Attention {attention}, compute precision {args.dtype}, {len(layers)} decoder layers")
    if args.activation_checkpointing:
        # A layer keeps only its input. The backward pass computes the rest a second time.
        model.activation_checkpointing_enable()
    if args.compile:
        # Layers of one kind share compiled code. In a model that is compiled as a whole,
        # Transformers has to build the causal mask, and the fast attention accepts no mask.
        for layer in layers:
            layer.compile()
        # The compiled loss needs no fp32 copy of the logits, the largest tensor of a step.
        model.loss_function = torch.compile(model.loss_function)
    return model


def from_files(name):
    """The model with the weights of a folder or of the Hub, in fp32 and in CPU memory."""
    # Transformers fills tensors that are missing or differ in shape with random numbers, and prints
    # a table about them. Replace the function that prints, and end the run with a sentence.
    transformers.modeling_utils.log_state_dict_report = lambda *args, **options: None
    model, report = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
    )
    unfit = report["missing_keys"] | report["mismatched_keys"]
    if unfit:
        fail(f"the files of {name} lack these tensors, or their shapes differ: {str(unfit)[:300]}")
    # If the config ties two matrices that differ in the files, Transformers silently keeps both.
    tied_by_config = model.get_expanded_tied_weights_keys(all_submodels=True)
    tied_after_loading = model.all_tied_weights_keys
    if tied_after_loading != tied_by_config:
        tied = f"the config of {name} ties lm_head to the embeddings, but its files do not"
        fail(f"{tied}: set tie_word_embeddings to false in config.json")
    return model


@lru_cache  # FSDP: so it prints its sentence once per shape
def even_shards(shape, ranks):
    """FSDP: The dimension of a weight that FSDP cuts: 0, or another one with more even shards.

    FSDP asks for each weight. By default, it would cut dimension 0. The weights of 8 experts are
    (8, ...), so 64 ranks would get 8 shards, and 56 ranks would have nothing. Other dimensions must
    divide evenly.
    """
    even_share = shape[0] / ranks
    largest_share = math.ceil(even_share)
    if largest_share <= 1.1 * even_share:
        return Shard(0)
    for dimension, size in enumerate(shape):
        if size % ranks == 0:
            return Shard(dimension)
    if len(shape) > 1:
        say(f"No dimension of {tuple(shape)} divides by {ranks} ranks, so shards differ in size")
    return Shard(0)


def parameter_groups(model, args):
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


def lr_schedule(args, optimizer, total_steps):
    """The scheduler, which sets the learning rate of each step."""
    options = {}
    if args.lr_scheduler == "warmup_stable_decay":
        options["num_decay_steps"] = total_steps // 5  # to zero in the last fifth of the steps
    return get_scheduler(args.lr_scheduler, optimizer, args.warmup_steps, total_steps, options)


# -- Data ------------------------------------------------------------------------------------------

# The endings of files, and how `datasets` calls their formats. Files may be compressed (.gz).
FORMATS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
FORMATS |= {".csv": "csv", ".parquet": "parquet"}


def load_config_and_tokenizer(args):
    name = args.model_name
    gated = "if it is gated, accept its licence at huggingface.co and run `hf auth login`"
    remedy = f"check the path, or name and network; {gated}; --demo needs no network"
    with fail_on_error(f"cannot load the model {name}: {remedy}"):
        config = AutoConfig.from_pretrained(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.eos_token_id is None:
        fail(f"the tokenizer of {name} has no end-of-text token: set its eos_token")
    if getattr(config, "quantization_config", None):
        fail(f"{name} is quantized (quantization_config in its config): give one in bf16 or fp32")
    # The model has learned no positions beyond this number. Some families have no limit, or say -1.
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest and 0 < longest < args.seq_length:
        fail(f"--seq-length {args.seq_length} is more than the {longest} positions of {name}")
    return config, tokenizer


def load_documents(name, subset):
    """The splits of a file, pattern, address, folder or Hub dataset. A text file is a document."""
    file_format = FORMATS.get(Path(name.removesuffix(".gz")).suffix)
    options = {"path": name, "name": subset}  # a dataset of the Hub, or a folder with its files
    if file_format:
        options = {"path": file_format, "data_files": name}
    elif "*" in name or os.path.isfile(name):
        fail(f"{name} must end in {', '.join(FORMATS)}: give such a file or pattern")
    if file_format == "text":
        options |= {"sample_by": "document", "encoding_errors": "replace"}
    if file_format == "json":
        # With None, a number among texts is an error. Otherwise `datasets` would turn the column
        # into JSON, and put quotation marks around each text.
        options["on_mixed_types"] = None
    remedy = "check that the files exist and have text, or Hub name, --dataset-subset and network"
    with fail_on_error(f"cannot load the dataset {name}: {remedy}"):
        # MDS: Only held-out documents are text. Open a file when one of its documents is needed.
        splits = datasets.load_dataset(**options, streaming=True)
    # `datasets` makes a document of each line of the text files in a folder.
    builder = next(iter(splits.values())).info.builder_name
    if os.path.isdir(name) and builder == "text":
        fail(f"{name} is a folder of text: give a pattern, such as '{name}/**/*.txt'")
    return splits


def tokenize(rows, tokenizer, column, vocab_size):
    """The token ids of each document that is not empty, and an end-of-text token after each."""
    texts = [text for text in rows[column] if text]
    # The tokenizer refuses an empty list.
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    documents = [[*ids, tokenizer.eos_token_id] for ids in documents if ids]
    largest = max((max(ids) for ids in documents), default=0)
    if largest >= vocab_size:
        remedy = "use the model's tokenizer, or --from-scratch and a larger vocab_size"
        fail(f"token id {largest} is outside the vocabulary of {vocab_size} tokens: {remedy}")
    return {"input_ids": documents}


def tokenize_split(documents, tokenizer, config, args):
    """The token ids of the documents of a split."""
    text_types = (datasets.Value("string"), datasets.Value("large_string"))
    columns = [name for name, kind in documents.features.items() if kind in text_types]
    if args.text_column not in columns:
        remedy = f"choose --text-column among {', '.join(columns or documents.column_names)}"
        fail(f"{args.text_column!r} is no column of text: {remedy}")
    return documents.map(
        tokenize,
        batched=True,  # 1,000 documents per call
        fn_kwargs={
            "tokenizer": tokenizer,
            "column": args.text_column,
            "vocab_size": config.get_text_config().vocab_size,
        },
        remove_columns=documents.column_names,  # keep only the token ids
        features=datasets.Features(input_ids=datasets.List(datasets.Value("int32"))),
    )


def load_samples(args, tokenizer, config, global_batch):
    """The training rows; and the first held-out documents, each in rows of its own."""
    train_samples = MdsRows(args, tokenizer, config)  # MDS: all rows are training rows
    count = len(train_samples)
    say(f"{args.dataset_name}: {count} rows to train on")
    if count < global_batch:
        fail(f"{args.dataset_name} is too small: lower --batch-size")
    if not args.eval_freq:
        return train_samples, []
    if not args.eval_dataset:
        fail("MDS shards are for training: give --eval-dataset, or --eval-freq 0")
    splits = load_documents(args.eval_dataset, args.eval_dataset_subset)
    held_out = [splits[name] for name in ("validation", "test", "train") if name in splits]
    if not held_out:
        fail(f"{args.eval_dataset} has no split named validation, test or train")
    with fail_on_error(f"cannot read the documents of {args.eval_dataset}"):
        documents = held_out[0]._resolve_features()  # the first document shows the columns
        first = list(islice(documents, args.eval_documents))  # `take` would open one more file
        # Tokenize without a cache on the disk, and without a progress bar.
        texts = datasets.Dataset.from_list(first, documents.features).to_iterable_dataset()
        token_lists = [
            document["input_ids"] for document in tokenize_split(texts, tokenizer, config, args)
        ]
    length = args.seq_length
    rows = [ids[i : i + length] for ids in token_lists for i in range(0, len(ids), length)]
    say(f"{len(token_lists)} documents held out, in {len(rows)} rows")
    if not rows:
        fail("the held-out documents are empty: give another --eval-dataset, or --eval-freq 0")
    eval_samples = [np.array(row + [-100] * (length - len(row)), np.int32) for row in rows]
    return train_samples, eval_samples


class MdsRows:
    """The rows of MDS shards: int32 of shape (seq_length,), with -100 for padding.

    The shards of a folder are read where they are. The shards of an address are downloaded when a
    row needs them.
    """

    def __init__(self, args, tokenizer, config):
        name = args.dataset_name
        self.is_remote = "://" in name
        if self.is_remote and not args.experiment_name:
            fail("shards at an address need -e: it names the folder of the run in --local-cache")
        if not self.is_remote and not Path(name, "index.json").exists():
            fail(f"there are no MDS shards in {name}: write them with tools/write-mds.py")
        with fail_on_error(f"cannot open the MDS shards of {name}: see the README of this chapter"):
            from streaming import Stream  # an optional package
            from streaming.base.format import reader_from_json
            from streaming.base.util import bytes_to_int

            folder = open_cache(args) if self.is_remote else name
            facts = json.loads(Path(folder, "rows.json").read_text())
            largest = facts["largest_token"]
            index = Path(folder, "index.json").read_bytes()
            shards = json.loads(index)["shards"]
            self.index_hash = xxhash.xxh3_64(index).hexdigest()
            check_index(name, shards, facts, self.index_hash)
            no_split = None  # the shards lie in the folder itself
            self.shards = [reader_from_json(folder, no_split, shard) for shard in shards]
            options = {"download_retry": 2, "download_timeout": 60, "keep_zip": False}
            self.stream = Stream(remote=name, local=folder, **options) if self.is_remote else None
            ranks_of_node = int(os.environ["LOCAL_WORLD_SIZE"])
            self.cache_limit = bytes_to_int(args.cache_limit) // ranks_of_node  # of this rank
        # Row n is in part n % 64 of the corpus (MDS 8). A rank reads each WORLD_SIZE-th row, so it
        # meets all parts if WORLD_SIZE is odd, and a single part if WORLD_SIZE is 64.
        parts_of_rank = PARTS // math.gcd(PARTS, WORLD_SIZE)
        # The shards of a part follow each other, and a window may lie in two of them.
        shards_of_rank = min(2 * parts_of_rank, len(self.shards))
        needed = shards_of_rank * max(shard.get_max_size() for shard in self.shards)
        if self.is_remote and self.cache_limit < needed:
            fail(f"--cache-limit must be at least {needed * ranks_of_node}b for the shards in use")
        # Only a download decompresses.
        if self.shards[0].compression and not self.is_remote:
            fail(f"{name} is compressed for an address: write a folder without --compression")
        if facts["seq_length"] != args.seq_length:
            fail(f"the rows of {name} have {facts['seq_length']} tokens: give this number to -s")
        # Another tokenizer would give other tokens for this text.
        probe = tokenizer("Probe of 1 tokenizer: naïve?")["input_ids"] + [tokenizer.eos_token_id]
        if facts["tokenizer_probe"] != probe:
            fail(f"the rows of {name} have the tokens of another tokenizer: {facts['tokenizer']}")
        vocab_size = config.get_text_config().vocab_size
        if largest >= vocab_size:
            remedy = "give a model that fits its tokenizer"
            fail(f"token id {largest} is outside the vocabulary of {vocab_size} tokens: {remedy}")
        self.order = RowOrder([shard.samples for shard in self.shards], args)
        self.cached = OrderedDict()  # shards by number; the least recently used shard comes first
        self.cache_bytes = 0

    def __len__(self):
        return self.order.count

    def read(self, n):
        """Row n of the run, counted over all epochs."""
        shard_number, row_number = self.order[n]
        shard = self.shards[shard_number]
        if shard_number not in self.cached:
            if self.is_remote:
                self.download(shard)
            check(shard)
            self.cached[shard_number] = shard
        self.cached.move_to_end(shard_number)
        return shard[row_number]["tokens"]

    def download(self, shard):
        """Downloads a shard. First removes other shards, until the cache has room for this one."""
        while self.cached and self.cache_bytes + shard.get_max_size() > self.cache_limit:
            _, least_used = self.cached.popitem(last=False)
            self.cache_bytes -= least_used.evict()  # returns how many bytes it has removed
        # Downloads and decompresses the shard, and returns how many bytes the disk now has more.
        self.cache_bytes += self.stream.prepare_shard(shard)


def check_index(name, shards, facts, index_hash):
    """Refuses an index that is not the index of tools/write-mds.py."""
    if "index_hash" not in facts:  # rows.json is of an earlier version of the tool
        say(f"warning: {name} was written without a hash of index.json, so changes go unnoticed")
    elif index_hash != facts["index_hash"]:
        # The hash of each shard is in the index, so the rows are as sure as the index.
        count = sum(shard["samples"] for shard in shards)
        numbers = f"it lists {count} rows, and {facts['rows']} rows were written"
        fail(f"index.json of {name} has changed: {numbers}: copy or write the folder again")
    if not shards:
        fail(f"index.json of {name} lists no shards: copy or write the folder again")
    encoding = f"ndarray:int32:{facts['seq_length']}"
    if any(shard["column_encodings"] != [encoding] for shard in shards):
        fail(f"the shards of {name} have other columns than the shards of tools/write-mds.py")


def check(shard):
    """Compares the file of a shard with its hash in `index.json`."""
    # MDS 5: Check a shard before its first use, because a flipped bit is another token.
    file = Path(shard.dirname, shard.raw_data.basename)
    if xxhash.xxh3_64(file.read_bytes()).hexdigest() != shard.raw_data.hashes["xxh3_64"]:
        raise ValueError(f"{file} is damaged: its hash is not the hash in index.json")


def open_cache(args):
    """An empty folder for the downloaded shards of this rank, with the index of all shards."""
    from streaming.base.storage import CloudDownloader

    # MDS 6: Each rank of each run has a cache of its own, so that nobody else removes its shards.
    run = (args.save_dir / args.experiment_name).resolve()
    path_of_run = run.relative_to("/")  # the cache has folders of the same names
    folder = args.local_cache / path_of_run / f"shards-{LOCAL_RANK}"
    # Begin with an empty folder, because a killed run may have left a half of a file.
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("rows.json", "index.json"):
        CloudDownloader.direct_download(os.path.join(args.dataset_name, name), str(folder / name))
    return str(folder)


# MDS: The order of the rows takes one row from each of so many parts of the corpus in turn.
PARTS = 64


@lru_cache(maxsize=2 * PARTS)  # the windows of all parts, and the next windows
def permutation(seed, count):
    # RandomState: NumPy promises the same numbers in every version, so old runs can resume.
    return np.random.RandomState(seed).permutation(count)


class RowOrder:
    """The shard of row n of a run, and the number of this row in the shard.

    A run counts its rows over all epochs. The order depends only on the seed, the sizes of the
    shards and the window. Each place is computed when it is needed, because a list of all rows of a
    large corpus would take gigabytes on each rank.
    """

    def __init__(self, shard_sizes, args):
        self.sizes = np.array(shard_sizes)
        self.count = sum(shard_sizes)
        self.seed = args.seed
        self.window_size = args.shuffle_window
        self.start_epoch(0)

    def start_epoch(self, epoch):
        self.epoch = epoch
        # MDS 7: Shuffle whole shards, so that the rows of a shard stay close to each other.
        # A shuffle of all rows would need almost all shards at once.
        self.shard_numbers = permutation((self.seed, epoch), len(self.sizes))
        self.ends = np.cumsum(self.sizes[self.shard_numbers])  # of each shard, in rows

    def __getitem__(self, n):
        epoch, n = divmod(n, self.count)
        if epoch != self.epoch:
            self.start_epoch(epoch)
        # MDS 8: Cut the shuffled shards into 64 parts, and take one row of each part in turn.
        turn, part = divmod(n, PARTS)
        # The first parts have one row more, if 64 does not divide the number of rows.
        rows_per_part, longer_parts = divmod(self.count, PARTS)
        longer_parts_before = min(part, longer_parts)
        part_begin = part * rows_per_part + longer_parts_before
        part_rows = rows_per_part + 1 if part < longer_parts else rows_per_part
        # The rows of a part are shuffled within windows.
        window, offset = divmod(turn, self.window_size)
        window_begin = window * self.window_size
        window_rows = min(self.window_size, part_rows - window_begin)
        shuffled = permutation((self.seed, epoch, part, window), window_rows)
        # Find the shard that has this place.
        place = part_begin + window_begin + shuffled[offset]
        i = np.searchsorted(self.ends, place, side="right")  # the first shard that ends after it
        shard_number = self.shard_numbers[i]
        shard_begin = self.ends[i] - self.sizes[shard_number]
        return int(shard_number), int(place - shard_begin)


def read_step(samples, first, args):
    """The rows of this rank in the step that begins with row `first` of the run."""
    # MDS 9: Row n of a run is the same on any number of ranks, so that ranks may come and go.
    # The ranks take rows in turn. If WORLD_SIZE is 8, 16, 32 or 64, a rank meets at most 8 parts,
    # and downloads only the shards of these parts.
    count = args.batch_size * args.gradient_accumulation_steps
    numbers = range(first + RANK, first + count * WORLD_SIZE, WORLD_SIZE)
    with fail_on_error("cannot read a shard: check data, disk and network"):
        return [samples.read(n) for n in numbers]


def read_batch(samples, indices, device):
    """The token ids of these samples: int64 of shape (len(indices), seq_length) on `device`."""
    batch = torch.from_numpy(np.stack([samples[i] for i in indices]))
    if device.type == "cuda":
        # Python need not wait for a copy from pinned memory.
        batch = batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device).long()


# -- Evaluation ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, samples, args, device):
    """The mean loss over all held-out samples, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    size = args.batch_size
    # DDP 10: Each rank evaluates its share, and a sum over ranks gives the mean over all samples.
    # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many forward passes.
    # A rank without a batch evaluates sample 0, with weight 0.
    rounds = math.ceil(len(samples) / (WORLD_SIZE * size))
    for n in range(rounds):
        begin = (n * WORLD_SIZE + RANK) * size
        indices = range(begin, min(begin + size, len(samples)))
        has_batch = len(indices) > 0
        input_ids = read_batch(samples, indices if has_batch else [0], device)
        # MDS: The sum over labels (divided by 1), because rows have different numbers of labels.
        options = {"use_cache": False, "num_items_in_batch": 1}
        loss = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options).loss
        if has_batch:
            loss_sum += loss
    model.train()  # dropout on again
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    label_count = sum(np.sum(row >= 0) - 1 for row in samples)  # MDS: of all ranks
    return loss_sum.item() / label_count


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run keeps these flags, because another value would make it another training.
LASTING = ["model_name", "from_scratch", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["text_column", "seed", "lr", "lr_scheduler", "warmup_steps"]
LASTING += ["adam_beta2", "weight_decay", "max_grad_norm"]
LASTING += ["shuffle_window"]  # MDS: it changes the order of the rows

# Eight digits, so the names sort by step. A copy such as step-00000500.bak is no checkpoint.
CHECKPOINT_NAMES = "step-" + 8 * "[0-9]"


@dataclass
class RunState:
    """The position of a run. Every checkpoint stores it as `state.json`."""

    flags: dict  # the flags that must not change
    comet_key: str  # the id of its Comet experiment
    step: int = 0  # optimizer steps done
    samples: int = 0  # samples read, over all epochs
    epoch: float = 0.0
    train_samples: int = 0  # in the dataset
    index_hash: str = ""  # MDS: of the index of the shards


# NODES: The folder of this rank's checkpoints, with --checkpoint-format local.
RANK_FOLDER = f"rank-{RANK}"


@contextmanager
def new_folder(folder):
    """Yields a temporary folder and renames it when it is complete, since runs may be killed."""
    temporary = folder.with_name("incomplete")
    # FSDP: All ranks write into the folder, but only rank 0 makes and renames it.
    # NODES: With `local`, each rank makes and renames the folders inside its own folder.
    is_owner = RANK == 0 or folder.parent.name == RANK_FOLDER
    if is_owner:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)  # NODES: also the folder of this rank
    dist.barrier(writer_group())
    free = shutil.disk_usage(folder.parent).free / 1e9
    with fail_on_error(f"cannot write {folder}; the disk had {free:.1f} GB left"):
        yield temporary
        # FSDP: The other ranks are done. Rank 0 waits for the disk, and renames the folder.
        if not is_owner:  # NODES: not RANK > 0, because of `local`
            return
        for path in [*temporary.rglob("*"), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # all is on the disk before the folder gets its name
            os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def save_model(folder, model, tokenizer):
    model.config.save_pretrained(folder)  # FSDP: the weights are saved as shards
    tokenizer.save_pretrained(folder)


def sharded_state(model, stateful):
    """The content of a checkpoint: each rank's shards, under the names of their parameters."""
    weights, moments = state_dict.get_state_dict(model, stateful["optimizer"])
    return stateful | {"model": weights, "optimizer": moments}


def to_rank_0(state):
    """The state with whole tensors, in the CPU memory of rank 0; nothing on the other ranks."""

    def whole(tensor):
        # NODES 3: Gather one tensor at a time, because no GPU has room for the whole state.
        # All ranks gather it. Only rank 0 keeps it: a tensor on the meta device takes no memory.
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.to("cpu" if RANK == 0 else "meta", copy=True)

    state = tree_map_only(torch.Tensor, whole, state)
    return state if RANK == 0 else {}


def own_shards(state):
    """The state with this rank's shards as plain tensors, in the same memory."""
    # NODES 4: DCP sees tensors of this rank alone, so it needs no files of other ranks.
    return tree_map_only(DTensor, DTensor.to_local, state)


# NODES: It copies tensors to CPU memory. Each checkpoint uses the memory of the one before again.
STAGER = DefaultStager(
    StagingOptions(
        use_pinned_memory=torch.cuda.is_available(),  # a GPU copies to pinned memory fast
        use_non_blocking_copy=torch.cuda.is_available(),
        use_shared_memory=False,  # no other process reads it
        use_async_staging=False,  # training goes on after the copy
    )
)


def take_device():
    """Gives a new thread the GPU of this rank, because its default is GPU 0."""
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)


# NODES: A thread writes checkpoints with --async-checkpoint. The list has the one in progress.
THREAD = ThreadPoolExecutor(1, initializer=take_device)
UNFINISHED = []


@cache  # the first call makes the group
def writer_group():
    """All ranks, for messages of the thread that writes, since training sends others meanwhile."""
    return dist.new_group(backend="gloo", group_desc="patient")


def wait_for_checkpoint():
    """Waits for the checkpoint in progress, and raises its error, if it has failed."""
    while UNFINISHED:
        UNFINISHED.pop().result()


def save_checkpoint(run_folder, model, tokenizer, stateful, state, args):
    """Writes all that an exact resume needs into a new folder, then removes old checkpoints."""
    # NODES 5: One checkpoint at a time, so a killed run loses one checkpoint at most.
    wait_for_checkpoint()
    writer_group()  # make the group here, since all ranks have to make it at the same time
    parts = {}
    # Scheduler and scaler are objects. Model and optimizer are dictionaries already.
    for name, part in sharded_state(model, stateful).items():
        parts[name] = part.state_dict() if hasattr(part, "state_dict") else part
    folder = run_folder / f"step-{state.step:08d}"
    if args.checkpoint_format == "full":
        parts = to_rank_0(parts)
    elif args.checkpoint_format == "local":
        parts = own_shards(parts)
        folder = run_folder / RANK_FOLDER / folder.name
    texts = {"state.json": json.dumps(asdict(state), indent=2)}
    if RANK == 0:
        texts["metrics.jsonl"] = (run_folder / "metrics.jsonl").read_text()
    if args.async_checkpoint:
        # NODES 6: Copy all that training changes, and train on. A thread writes the copies.
        if args.checkpoint_format != "full":  # to_rank_0 has made copies
            parts = STAGER.stage(parts)
        writing = THREAD.submit(write_checkpoint, folder, parts, texts, model, tokenizer, args)
        UNFINISHED.append(writing)
    else:
        write_checkpoint(folder, parts, texts, model, tokenizer, args)


def write_checkpoint(folder, parts, texts, model, tokenizer, args):
    """Writes the parts of this rank and the texts into a new folder. Removes old checkpoints."""
    is_local = args.checkpoint_format == "local"
    # NODES 7: A folder gets its name after its files are on the disk, because a run may be killed.
    with new_folder(folder) as incomplete:
        # FSDP 11: Each rank saves its shards, because no rank has room for the whole state.
        if parts:  # with `full`, only rank 0 has any
            alone = args.checkpoint_format != "shard"  # without other ranks
            dcp.save(parts, checkpoint_id=incomplete, process_group=writer_group(), no_dist=alone)
        if RANK > 0 and not is_local:
            return  # rank 0 does the rest
        save_model(incomplete, model, tokenizer)  # the config and the tokenizer, no weights
        for name, text in texts.items():
            (incomplete / name).write_text(text)
    if is_local:
        dist.barrier(writer_group())  # NODES: all ranks have the new checkpoint, so old ones may go
    for old in sorted(folder.parent.glob(CHECKPOINT_NAMES))[: -args.keep_checkpoints]:
        # Rename it first, so that no half-removed folder looks like a checkpoint.
        old.rename(folder.with_name("incomplete"))
        shutil.rmtree(folder.with_name("incomplete"))


def check_shared(run_folder, args):
    """Refuses a folder that not all nodes share, unless each rank keeps its own checkpoints."""
    # NODES 8: Check now that all nodes share the folder, because at a resume it is too late.
    probe = run_folder / gather(uuid.uuid4().hex)[0]  # the name that rank 0 has chosen
    if RANK == 0:
        probe.touch()
    dist.barrier()  # until rank 0 has made the file
    is_shared = all(gather(probe.exists()))
    if RANK == 0:
        probe.unlink()
    if not is_shared and args.checkpoint_format != "local":
        fail(f"not all nodes see {run_folder}: share --save-dir, or use --checkpoint-format local")


def newest_checkpoint(run_folder):
    """The newest checkpoint that all ranks have, or None."""
    # NODES 9: A step counts if all ranks have it, since a node may have died before it saved.
    folders = [
        *run_folder.glob(CHECKPOINT_NAMES),
        *run_folder.glob(f"{RANK_FOLDER}/{CHECKPOINT_NAMES}"),
    ]
    found = {folder.name: folder for folder in folders}
    names_by_rank = gather(set(found))
    common = set.intersection(*names_by_rank)
    # NODES: A run that is killed in its first save may leave some ranks with a checkpoint, and the
    # others with `incomplete`, which each rank makes before any rank renames its own. Such a run
    # begins anew. A rank with neither has a new disk, so this is an error.
    has_begun = (run_folder / RANK_FOLDER / "incomplete").exists()
    knows_the_run = all(gather(bool(found) or has_begun))
    in_first_save = knows_the_run and not all(names_by_rank)
    some_rank_has_one = any(names_by_rank)
    if some_rank_has_one and not common and not in_first_save:
        fail(f"the ranks share no checkpoint in {run_folder}: take the same nodes or another -e")
    return found[max(common)] if common else None


def of_this_rank(checkpoint):
    """The folder in which this rank finds its part of a checkpoint of any format."""
    own = checkpoint.parent / RANK_FOLDER / checkpoint.name
    return own if own.exists() else checkpoint


def open_run(args):
    """Makes the folder of a run with a name. Returns the folder, the newest checkpoint, the state.

    The folder is None without a name, and the checkpoint is None in a new run.
    """
    flags = {name: getattr(args, name) for name in LASTING}
    new_state = RunState(flags, comet_key=uuid.uuid4().hex)
    if not args.experiment_name:
        say("Without -e, this run saves no model, no checkpoints and no logs")
        return None, None, new_state
    run_folder = args.save_dir / args.experiment_name
    with fail_on_error(f"cannot write to {args.save_dir}: choose another --save-dir"):
        run_folder.mkdir(parents=True, exist_ok=True)
    if RANK == 0:  # DDP: one lock for the whole job
        lock(run_folder)
    check_shared(run_folder, args)
    newest = newest_checkpoint(run_folder)
    # NODES: A new run begins with --resume-dir. Later it resumes from its own checkpoints.
    begins_elsewhere = not newest and args.resume_dir and not args.skip_optimizer
    if begins_elsewhere:
        newest = of_this_rank(args.resume_dir)
    if not newest:
        return run_folder, None, new_state
    # NODES: DCP writes .metadata in each format, and in chapter 3, whose checkpoints can be read.
    if begins_elsewhere and not all(gather((newest / ".metadata").exists())):
        fail(f"{newest} is no checkpoint of this chapter: see tools/convert-checkpoint.py")
    with all_fail_if_damaged(newest):
        saved = json.loads((newest / "state.json").read_text())
    # Checkpoints of other chapters have unknown values, other flags with a value, or sharded files.
    unknown = saved.keys() - asdict(new_state).keys()
    unknown |= {name for name, value in saved["flags"].items() if value is not None} - flags.keys()
    is_whole = (newest / "training_state.pt").exists()  # FSDP: as in chapters 1 and 2
    if unknown or is_whole:
        fail(f"{newest} is from another chapter or version: choose another --experiment-name")
    state = RunState(**saved)
    if begins_elsewhere:
        state.comet_key = new_state.comet_key  # NODES: a new run is a new experiment
    for name, value in state.flags.items():
        if flags.get(name) != value:
            fail(f"--{name.replace('_', '-')} was {value} in this run: keep it or take another -e")
    say(f"Continuing from {newest}")
    return run_folder, newest, state


def lock(run_folder):
    """Refuses a folder in which another process trains. The lock ends with the process."""
    descriptor = os.open(run_folder / "lock", os.O_RDWR | os.O_CREAT)
    # The file is never closed, because this would end the lock.
    # NODES: If a node has died, the server of a shared disk frees its lock later: NFS after 90 s.
    for seconds_to_wait in [10] * 12 + [0]:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            say(f"another process has locked {run_folder}")
            time.sleep(seconds_to_wait)
        except OSError as error:
            say(f"warning: {run_folder} cannot be locked ({error}), so start no second run in it")
            return
    fail(f"another process trains in {run_folder}: wait for its end, or choose another -e")


def load_training_state(checkpoint, stateful, model):
    """Restores optimizer, scheduler and scaler in place."""
    # FSDP: Each rank reads the parts of its shards, whatever the number of ranks that saved them.
    state = sharded_state(model, stateful)
    read_state(checkpoint, state)  # NODES: of any format
    state_dict.set_optimizer_state_dict(model, stateful["optimizer"], state["optimizer"])
    # The restored learning rate belongs to the old --max-steps. Compute it for the new one: step()
    # adds 1 to last_epoch, the number of steps, and then sets the rate. So subtract 1 before.
    stateful["scheduler"].last_epoch -= 1
    stateful["scheduler"].step()


def read_state(checkpoint, state):
    """Fills the tensors and objects of `state` from a checkpoint of any format."""
    # NODES: DCP reads the whole tensors of `full` in the same way as the shards of `shard`.
    # A rank may lack its own folder. It must not wait for the others, which read alone.
    is_local = any(gather(checkpoint.parent.name == RANK_FOLDER))
    # Each of the own shards shares its memory with `state`, so reading fills `state`.
    parts = own_shards(state) if is_local else state
    reader = dcp.FileSystemReader(checkpoint)
    with all_fail_if_damaged(checkpoint):
        reader.read_metadata()  # DCP itself would print a traceback if this index is broken
    with all_fail_if_damaged(checkpoint):
        dcp.load(parts, storage_reader=reader, no_dist=is_local)


@contextmanager
def all_fail_if_damaged(checkpoint):
    """Ends all ranks with a sentence if one of them cannot read its files of a checkpoint."""
    error = ""
    try:
        yield
    except (Exception, dcp.CheckpointException) as failure:
        error = f"{checkpoint}: {failure!r:.300}"
    # NODES: With `local`, each rank reads its own files, so the others must hear of its error.
    errors = [error for error in gather(error) if error]
    if errors and "Size mismatch" in errors[0]:  # the files are whole
        advice = "take the same ranks and script as before, or tools/convert-checkpoint.py"
        fail(f"{checkpoint} has other shards than this run: {advice}")
    if errors:
        remedy = "then remove it, and its run continues from the one before"
        reason = f"of another model or other ranks, or damaged ({remedy})"
        fail(f"a checkpoint is {reason}: {errors[0]}")


# -- Adapting Transformers -------------------------------------------------------------------------
# FSDP: Transformers initialises, loads and saves whole models. These functions do so with shards.
# Models of other libraries would need other functions, so a first reading can skip these.


def init_weights(model, draw):
    """Initialises all buffers, and draws random numbers for all parameters if `draw` is true."""
    # fully_shard has put "FSDP" before the name of the model's class. Transformers needs the old
    # name to initialise the model, and to name its tensors.
    type(model).__name__ = type(model).__name__.removeprefix("FSDP")
    # In a class that is not its own, Transformers would skip modules that have buffers only.
    model.is_custom_code = lambda: False
    for parameter in model.parameters():
        parameter._is_hf_initialized = not draw  # Transformers leaves such parameters as they are
    with AsOnOneDevice():
        model.init_weights()


class AsOnOneDevice(torch.utils._python_dispatch.TorchDispatchMode):
    """Gives a sharded tensor the initial values that the whole tensor would get on one device.

    Without this class, all ranks on CPUs would draw the same numbers, and GPUs would draw other
    numbers than a single device. The class takes memory for one whole parameter at a time.
    """

    def __torch_dispatch__(self, op, types, args, kwargs):
        # A DTensor is the whole tensor for the model, and one shard of it in memory.
        fills = op.name() in ("aten::normal_", "aten::uniform_", "aten::copy_")
        if not fills or dist.tensor.DTensor not in types:
            return op(*args, **kwargs)
        target, *numbers = args
        whole = op(torch.empty(target.shape, device=target.device), *numbers, **kwargs)
        return target.copy_(dist.tensor.DTensor.from_local(whole, target.device_mesh))


def weights_of(model):
    """The state dict without the second names of tied weights."""
    return {n: x for n, x in model.state_dict().items() if n not in model.all_tied_weights_keys}


def load_weights(model, name, checkpoint):
    """Fills the shards of this rank with the weights of a folder or of the Hub, as from_pretrained.

    With a checkpoint, which replaces the weights, only their names in the files matter, for final/.
    """
    with suppress(OSError):  # many models lack this file
        model.generation_config = transformers.GenerationConfig.from_pretrained(name)
    folder = name if os.path.isdir(name) else snapshot_download(name, allow_patterns="model*")
    files = dcp.HuggingFaceStorageReader(folder)
    saved = files.read_metadata().state_dict_metadata
    shards = weights_of(model)
    if set(shards) <= set(saved):
        if checkpoint is not None:
            return
        # A tied weight has two names. If the files have both, the two tensors must be equal.
        second_tensors = {}
        for second_name, first_name in model.all_tied_weights_keys.items():
            if second_name in saved:
                second_tensors[second_name] = torch.empty_like(shards[first_name])
        dcp.load(shards | second_tensors, storage_reader=files)
        for second_name, second in second_tensors.items():
            first = shards[model.all_tied_weights_keys[second_name]]
            if not torch.equal(second.to_local(), first.to_local()):
                tied = f"the config of {name} ties {second_name} to the embeddings"
                remedy = "set tie_word_embeddings to false in config.json"
                fail(f"{tied}, but its files do not: {remedy}")
        return
    # Some families have other names in the files, or merge tensors (the experts of a layer).
    # Transformers converts them in the memory of rank 0. Other ranks get their shards from rank 0.
    whole = from_files(name) if RANK == 0 else model
    model._weight_conversions = getattr(whole, "_weight_conversions", None)  # for save_pretrained
    how = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    state_dict.set_model_state_dict(model, whole.state_dict(), options=how)


def save_weights(folder, model, args):  # NODES: the format decides who writes
    """Writes the whole model with the names of the Hub. The model may exceed the memory."""
    # Each rank writes a file of shards, and these files are joined on the disk.
    joined = folder / "joined"
    hub = HuggingFaceStorageWriter(joined, save_distributed=True, enable_consolidation=True)
    weights = weights_of(model)
    if args.checkpoint_format == "local":
        weights = to_rank_0(weights)  # NODES: files on several disks cannot be joined
    dcp.save(weights, storage_writer=hub)
    if RANK == 0:
        # Rewrite the tensors with the names of the Hub. `load_file` maps the file into memory.
        [file] = joined.glob("*.safetensors")
        model.save_pretrained(folder, state_dict=load_file(file))
        shutil.rmtree(joined)


# -- Processes -------------------------------------------------------------------------------------


def join_process_group():
    """Meets the other ranks, and returns the device of this rank."""
    gpus = torch.cuda.device_count()
    if "LOCAL_RANK" not in os.environ:
        fail(f"start it as torchrun --standalone --nproc-per-node {gpus or 2} {' '.join(sys.argv)}")
    device = torch.device(f"cuda:{LOCAL_RANK}" if gpus else "cpu")
    if gpus:
        torch.cuda.set_device(device)  # DDP: first, because otherwise each rank uses GPU 0 too
    # DDP: The ranks meet in torchrun's store. After a restart, the store has keys of dead ranks, so
    # each attempt gets a prefix, but not on several nodes: they may count attempts differently.
    # `rendezvous` yields the store, the rank and the number of ranks.
    store, _, _ = next(dist.rendezvous("env://"))
    if os.environ["GROUP_WORLD_SIZE"] == "1":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # DDP: NCCL moves tensors between GPUs. Gloo moves CPU tensors, without waiting for the GPU.
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    return device


def gather(value):
    """The values of all ranks, in the order of the ranks. Every rank gets all values."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def of_all_ranks(metrics):
    """Includes each rank's metrics as `memory/rank0/...`. The plain name gets the largest value."""
    by_rank = gather(metrics)
    result = {name: max(of_rank[name] for of_rank in by_rank) for name in metrics}
    for rank, of_rank in enumerate(by_rank):
        for name, value in of_rank.items():
            result[name.replace("/", f"/rank{rank}/")] = value
    return result


# -- Timer, metrics, logs, small helpers -----------------------------------------------------------


class PhaseTimer:
    """Times the phases of a step: `with timer("forward"): ...`.

    Python only queues work for a GPU, so its clock would time the queueing. CUDA events are queued
    with the work. Their times are read at logged steps, when the GPU has passed them.
    """

    def __init__(self, device, flops_per_token):
        self.on_gpu = device.type == "cuda"
        self.flops_per_token = flops_per_token
        self.spans = defaultdict(list)  # (begin, end) of each measurement, by phase
        self.last_read = time.perf_counter()

    @contextmanager
    def __call__(self, phase):
        begin = self.now()
        yield
        self.spans[phase].append((begin, self.now()))

    def now(self):
        """Seconds, or on a GPU an event that gets its time when the GPU reaches it in its queue."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, tokens_per_step):
        """Milliseconds per optimizer step, tokens per second and TFLOP/s, since the last read."""
        steps = len(self.spans["update"])  # a step has one update
        metrics = {}
        for phase, spans in self.spans.items():
            if self.on_gpu:
                # The loop has called .item(), so the GPU has passed all events.
                times = [begin.elapsed_time(end) for begin, end in spans]
            else:
                times = [1e3 * (end - begin) for begin, end in spans]
            metrics[f"time/{phase}_ms"] = sum(times) / steps
        self.spans.clear()
        now = time.perf_counter()
        seconds = (now - self.last_read) / steps
        self.last_read = now
        metrics["time/total_ms"] = 1e3 * seconds
        metrics["tokens_per_second"] = tokens_per_step / seconds
        if self.flops_per_token:
            metrics["tflops_per_device"] = self.flops_per_token * tokens_per_step / seconds / 1e12
        return metrics


def flops_per_token(config, seq_length):
    """Operations of both passes for a token: 6 per weight, and attention (see docs/metrics.md)."""
    # Built again, without memory, because from chapter 3 on, a process has a part of the model.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if any(".experts." in name for name in model.state_dict()):
        return 0  # unknown: only chapter 12 counts the experts that a token uses
    config = config.get_text_config()
    used = model.num_parameters(exclude_embeddings=True)  # looking up an embedding computes nothing
    if config.tie_word_embeddings:
        used += config.vocab_size * config.hidden_size  # the head computes with the same table
    return 6 * used + 12 * config.num_hidden_layers * config.hidden_size * seq_length


def memory_metrics(device):
    """Memory of PyTorch on the GPU in GB (1e9 bytes). Without a GPU, memory of the process."""
    if device.type != "cuda":
        return {"memory/resident_gb": psutil.Process().memory_info().rss / 1e9}
    return {
        "memory/current_allocated_gb": torch.cuda.memory_allocated() / 1e9,
        "memory/peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "memory/current_reserved_gb": torch.cuda.memory_reserved() / 1e9,
        "memory/peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


def describe_run(args, model, train_samples):
    """Values that are logged once: every flag, and facts about model, data and machine."""
    device_memory = None
    if torch.cuda.is_available():
        device_memory = torch.cuda.mem_get_info()[1] / 1e9
    return vars(args) | {
        "world_size": WORLD_SIZE,  # DDP: torchrun decides it, so no flag has it
        "parameters_total": model.num_parameters(),
        "parameters_trainable": model.num_parameters(only_trainable=True),
        "dataset_samples": len(train_samples),
        "dataset_tokens": len(train_samples) * args.seq_length,
        "device_memory_gb": device_memory,
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "transformers_version": transformers.__version__,
    }


class RunLog:
    """Writes metrics and parameters into the folder of the run, and sends the same to Comet."""

    def __init__(self, run_folder, checkpoint, state, args):
        if checkpoint:
            # A killed run may have left later records. The checkpoint has a copy without them.
            with fail_if_damaged(checkpoint):
                records = (checkpoint / "metrics.jsonl").read_text()
                newest = json.loads(records.splitlines()[-1])
                if newest["step"] != state.step or not records.endswith("\n"):
                    raise ValueError("metrics.jsonl was cut")
            (run_folder / "metrics.jsonl").write_text(records)
        self.file = (run_folder / "metrics.jsonl").open("a" if checkpoint else "w")
        self.parameters_file = run_folder / "parameters.json"
        self.comet = start_comet(run_folder / "comet", state, args)

    def log_parameters(self, parameters):
        # JSON has no paths, so `default` turns them into text.
        self.parameters_file.write_text(json.dumps(parameters, indent=2, default=str))
        self.comet.log_parameters(parameters)

    def log_metrics(self, state, metrics):
        # JSON has no infinity. The gradient norm may be infinite in a step that fp16 skips.
        finite = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        record = {"step": state.step, "epoch": state.epoch} | finite
        print(json.dumps(record), file=self.file, flush=True)
        self.comet.log_metrics(finite, step=state.step, epoch=state.epoch)


def start_comet(folder, state, args):
    """A Comet experiment, which ends with the script. Without key or network, it writes a file."""
    config = comet_ml.ExperimentConfig(
        name=args.experiment_name, offline_directory=str(folder), auto_output_logging=False
    )
    options = {
        "workspace": args.comet_workspace,
        "project_name": args.comet_project_name,
        "experiment_key": state.comet_key,  # a resumed run continues its experiment
        "experiment_config": config,
    }
    if comet_ml.get_config("comet.api_key"):
        try:
            return comet_ml.start(online=True, **options)
        except Exception as error:
            say(f"warning: Comet cannot be reached ({error!r:.300})")
    logging.getLogger("comet_ml").setLevel(logging.ERROR)  # no long report about the archive
    say(f"Comet: offline, `comet upload {folder}/*.zip` sends this run")
    return comet_ml.start(online=False, **options)


def say(message):
    """Prints a line above the progress bar."""
    tqdm.write(message, file=CONSOLE)


def fail(message):
    """Exits with a one-line message about a mistake that the user can fix."""
    # DDP: If all ranks find the same mistake, the first rank of a node says so, and torchrun ends
    # the other ranks by SIGTERM while they wait here.
    if LOCAL_RANK > 0:
        with suppress(ValueError):  # raised in a thread, where signals stay as they are
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
    sys.exit(f"error: {message}")


@contextmanager
def fail_on_error(message):
    """Replaces the traceback of an error by this message and a short form of the error."""
    try:
        yield
    except dcp.CheckpointException as error:  # FSDP: it has an error and its stack for each rank
        cause, _ = next(iter(error.failures.values()))
        fail(f"{message} ({cause!r:.300})")
    except Exception as error:
        cause = error.__cause__ or error  # some libraries raise a general error from the true one
        fail(f"{message} ({cause!r:.300})")  # at most 300 characters of it


def fail_if_damaged(checkpoint):
    """As `fail_on_error`, around lines that read a checkpoint."""
    remedy = "remove this folder, and the run continues from the checkpoint before"
    return fail_on_error(f"the checkpoint {checkpoint} is damaged: {remedy}")


def catch_stop_signals():
    """A list that SIGTERM and Ctrl-C append to. The loop looks at it after every step."""
    received = []

    def remember(signum, frame):
        received.append(signum)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C stops at once

    signal.signal(signal.SIGTERM, remember)
    signal.signal(signal.SIGINT, remember)
    return received


# -- Flags -----------------------------------------------------------------------------------------

# --demo takes two minutes on two CPU cores. Its text is the source of Python's own library, without
# files such as _sysconfigdata.py, which differ between machines.
DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/tiny-llama",
    "from_scratch": True,
    "dataset_name": f"{REPOSITORY}/outputs/mds",  # MDS: tools/write-mds.py writes it
    "eval_dataset": f"{sysconfig.get_path('stdlib')}/_*.py",  # MDS: files that the rows lack
    "seq_length": 256,
    "batch_size": max(1, 8 // WORLD_SIZE),  # DDP: the global batch of chapter 1
    "max_steps": 400,
    "lr": 2e-3,
    "warmup_steps": 40,
    "eval_freq": 100,
    "ckpt_freq": 200,
}


def at_least(minimum, kind=int, below=math.inf):
    """An argparse type: a number of this kind, at least `minimum` and below the other limit."""

    def number(text):
        value = kind(text)
        if not minimum <= value < below:
            limits = f"{minimum} or larger"
            if below < math.inf:
                limits += f" and below {below}"
            raise argparse.ArgumentTypeError(f"must be a number, {limits}, not {text}")
        return value

    return number


def read_config(path):
    """The flags of a YAML file, in the form of the command line."""
    with fail_on_error(f"cannot read {path}: each line must be as in batch-size: 8"):
        text = path.read_text()
        values = yaml.safe_load(text)  # keeps only the last value of a repeated flag
        names = [flag.value for flag, _ in yaml.compose(text).value]  # compose keeps repeated flags
    if len(names) > len(values) or "config" in names or None in values.values():
        fail(f"{path} must have each flag once, with a value, and no flag named config")
    flags = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        else:
            flags.append(f"--{name}={value}")
    return flags


def parse_args():
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    switch = argparse.BooleanOptionalAction
    count = at_least(0)
    positive = at_least(1)
    real = at_least(0, float)
    add("-e", "--experiment-name", help="names the run: turns on checkpoints, resume and logs")
    add("--comet-project-name", default="distributed-training-demo", help="project at Comet")
    add("--comet-workspace", help="workspace at Comet; by default, the account's own")
    add("-m", "--model-name", default="meta-llama/Llama-3.2-1B", help="Hub id or local folder")
    add("--from-scratch", action=switch, default=False, help="random weights, not pretrained ones")
    # MDS: The rows of a corpus in place of its text.
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="folder or address of MDS shards")
    add("--text-column", default="text", help="the column to train on")
    add("--dataset-subset", help="configuration name on the Hub")
    add("-s", "--seq-length", type=at_least(2), default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=positive, default=8, help="samples per forward pass")
    # NODES: Two ways to set the global batch. Without either flag, a step has one pass.
    either = parser.add_mutually_exclusive_group().add_argument
    either("--gradient-accumulation-steps", type=positive, help="passes per step; without it, 1")
    either("--global-batch-size", type=positive, help="samples per optimizer step, of all ranks")
    add("--num-epochs", type=positive, default=3, help="passes over the dataset")
    add("--max-steps", type=positive, help="stop after this many optimizer steps")
    add("--lr", type=real, default=3e-5, help="peak learning rate")
    schedules = ["cosine", "cosine_with_restarts", "linear", "inverse_sqrt", "constant"]
    schedules += ["constant_with_warmup", "warmup_stable_decay"]
    add("--lr-scheduler", choices=schedules, default="cosine", help="learning rate schedule")
    add("--warmup-steps", type=count, default=0, help="steps until the peak learning rate")
    beta = at_least(0, float, below=1)
    add("--adam-beta2", type=beta, default=0.999, help="of AdamW; from scratch, 0.95 is common")
    add("--weight-decay", type=real, default=0.01, help="of AdamW, for matrices only")
    add("--max-grad-norm", type=real, default=1.0, help="clips gradients; 0: no clipping")
    add("--dtype", choices=DTYPES, help="compute precision; bf16 on GPUs, fp32 on CPUs")
    add("--activation-checkpointing", action=switch, default=False, help="less memory, slower")
    add("--attention", help="sdpa, flash_attention_2 or another name of Transformers")
    add("--compile", action=switch, help="compile layers; on for CUDA, otherwise off")
    add("--eval-freq", type=count, default=500, help="steps between evaluations; 0: none")
    add("--log-freq", type=positive, default=10, help="steps between logged metrics")
    add("--ckpt-freq", type=positive, default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=positive, default=2, help="older ones are removed")
    add("--save-dir", type=Path, default=f"{REPOSITORY}/outputs", help="the folder of all runs")
    seed = at_least(0, below=2**32)  # the limit of NumPy
    add("--seed", type=seed, default=0, help="seed of random weights and sample order")
    # Calls torch.cuda.is_available() and so on
    # DDP: No --device, because torchrun assigns the devices.
    # MDS: The order of the rows, the cache of an address, and the held-out text.
    add("--shuffle-window", type=positive, default=1024, help="rows that are shuffled together")
    add("--local-cache", type=Path, default="/tmp/mds", help="folder for downloaded shards")
    add("--cache-limit", default="100gb", help="disk space of each node for downloaded shards")
    add("--eval-dataset", help="held-out documents")
    add("--eval-dataset-subset", help="configuration name on the Hub")
    add("--eval-documents", type=positive, default=1000, help="number of held-out documents")
    # NODES: The number of ranks per copy, the format of checkpoints, and the start of a run.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of a node
    add("--shard-size", type=positive, default=ranks, help="ranks that share a copy of the model")
    formats = ["shard", "full", "local"]
    add("--checkpoint-format", choices=formats, default="shard", help="who writes which files")
    add("--async-checkpoint", action=switch, default=False, help="train on while files are written")
    add("--resume-dir", type=Path, help="checkpoint of any run, where this run begins")
    add("--skip-optimizer", action=switch, default=False, help="only weights from --resume-dir")
    # FSDP: These two flags choose between speed and memory.
    add("--cpu-offload", action=switch, default=False, help="shards and AdamW state on the CPU")
    add("--reshard-after-forward", action=switch, default=True, help="less memory, more traffic")
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    add("--config", type=Path, help="a YAML file of flags; flags of the command line override it")
    if LOCAL_RANK > 0:
        parser.error = fail  # DDP: only the first rank of a node reports a wrong flag
    # Find --config first. Its flags stand before those of the command line, which therefore win.
    known, _ = parser.parse_known_args()
    given = read_config(known.config) if known.config else []
    flags = given + sys.argv[1:]
    if "--demo" in flags:
        parser.set_defaults(**DEMO)  # defaults, so that every given flag overrides them
    args = parser.parse_args(flags)
    # NODES 10: Fewer ranks make more passes, so the global batch does not depend on the nodes.
    size = args.batch_size * WORLD_SIZE  # samples per pass, of all ranks
    passes = args.gradient_accumulation_steps or 1
    if args.global_batch_size:
        passes, rest = divmod(args.global_batch_size, size)
        if rest:
            low = max(passes, 1) * size  # the next smaller multiple, if there is one
            nearest = f"{low} or {low + size}"
            parser.error(f"--global-batch-size must be a multiple of ranks × -b: {nearest}")
    args.gradient_accumulation_steps = passes
    if WORLD_SIZE % args.shard_size:
        parser.error(f"--shard-size {args.shard_size} does not divide the {WORLD_SIZE} ranks")
    if args.skip_optimizer and not args.resume_dir:
        parser.error("--skip-optimizer needs --resume-dir: the checkpoint with the weights")
    continues_run = args.resume_dir and not args.skip_optimizer
    if continues_run and not args.experiment_name:
        parser.error("--resume-dir continues a run: name it with -e, or give --skip-optimizer")
    if args.resume_dir:
        if args.resume_dir.parent.name.startswith("rank-"):
            parser.error("--resume-dir: leave rank-… out of the path, as each rank puts in its own")
        inside = [path.name for path in args.resume_dir.glob(f"**/{CHECKPOINT_NAMES}")]
        if inside:  # a checkpoint has no checkpoints inside
            example = f"RUN/{max(inside)}"
            parser.error(f"--resume-dir is a whole run: name a checkpoint, such as {example}")
    if (args.experiment_name or "").startswith("rank-"):
        parser.error("--experiment-name must not begin with rank-, as folders of ranks do")
    name = args.experiment_name
    if name is not None and ("/" in name or name in ("", ".", "..")):
        parser.error("--experiment-name must be a folder name, not empty and without slashes")
    return args


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError:
        remedy = "try --activation-checkpointing, a lower --batch-size with more"
        # FSDP: more devices help, too, because each device then has a smaller shard.
        fail(f"out of GPU memory: {remedy} --gradient-accumulation-steps, more GPUs, --cpu-offload")
