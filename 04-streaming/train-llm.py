"""Chapter 4: a corpus larger than the disk, streamed while the model trains.

No training text is downloaded or tokenized beforehand. A thread reads documents from files or the
Hub, tokenizes them, packs them into rows and shuffles the rows. Meanwhile, the devices train on
earlier rows. A checkpoint holds the place of each rank in its stream. Comments with STREAM 1 to 12
mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e c4 -m meta-llama/Llama-3.2-1B \
        --from-scratch -d allenai/c4 --dataset-subset en --max-steps 10000     # no copy of C4
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
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain, islice
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
import datasets.distributed
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from aiohttp import ClientTimeout
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter, state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
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
    # STREAM: Each rank reads and tokenizes its own text, so no rank prepares text for others.
    train_samples, eval_samples = load_samples(args, tokenizer, config, state)
    # `state.samples` is the number read so far, `state.train_samples` the size of the dataset.
    if checkpoint and state.train_samples != len(train_samples):
        fail(f"{args.dataset_name} has changed since this run began: choose another -e name")
    state.train_samples = len(train_samples)
    # DDP: Other flags or data on one rank would spoil the training without any error.
    descriptions = gather(f"{vars(args)} {state.step} {state.train_samples}")
    if len(set(descriptions)) > 1:
        fail("the ranks differ in flags, data or checkpoints: start all nodes with the same ones")
    model = build_model(args, config, device, checkpoint)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args), lr=args.lr, betas=(0.9, args.adam_beta2), fused=True
    )
    # A resumed run may have another batch size, so count the steps that are left.
    # STREAM 1: The length of a stream is unknown, so --max-steps gives the schedule its last step.
    total_steps = args.max_steps
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
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save and keep run_folder; rank 0 logs
        run_log = RunLog(run_folder, checkpoint, state, args)
        parameters = describe_run(args, model, train_samples)
        parameters |= {"global_batch": global_batch, "device_name": device_name}
        run_log.log_parameters(parameters)

    # The training loop.
    loss_sum = torch.zeros((), device=device)
    logged_step = state.step
    saved_step = state.step  # STREAM: of the newest checkpoint; 0 without one
    token_counts = []  # STREAM: of each step since the last logged one, without padding
    rows_per_step = args.batch_size * accumulation  # STREAM: of each rank
    place = state.places[RANK]  # STREAM: where this rank was in its stream after the last step
    passes_without_step = 0
    # DDP: The tokens of the whole job are the work of all devices.
    timer = PhaseTimer(device, flops_per_token(config, args.seq_length) / WORLD_SIZE)
    # disable=None: a progress bar in terminals only.
    progress = tqdm(total=total_steps, initial=state.step, file=CONSOLE, disable=None)
    stop_signals = catch_stop_signals()  # SIGTERM and Ctrl-C append to this list
    stop_signal = 0
    model.train()  # with dropout, if the model has any
    while state.step < total_steps and not stop_signal:
        # STREAM 2: Read the whole step first, because its loss is a mean over all of its labels.
        with timer("data"):
            rows = train_samples.read(rows_per_step)
        # STREAM 3: One small message tells all ranks whether all of them can make the step.
        tokens_here = sum(np.count_nonzero(row >= 0) for row in rows)  # padding is -100
        is_broken = train_samples.error is not None
        signal_here = stop_signals[-1] if stop_signals else 0
        reports = gather_numbers([len(rows), tokens_here, is_broken, signal_here])
        row_counts, rank_tokens, broken, signals = reports
        if any(broken):
            if run_folder and state.step > saved_step:
                # Not the places of the stream, which has read on since the last step.
                state.places = gather(place)
                save_checkpoint(run_folder, model, tokenizer, stateful, state, args)
            reasons = [error for error in gather(train_samples.error) if error]
            fail(f"a stream broke off after step {state.step}: {reasons[0]}")
        # STREAM 4: A pass ends for all if one rank has too few rows, since a step needs all ranks.
        if min(row_counts) < rows_per_step:
            rows_left = len(rows)
            # A rank with fewer rows has met the end of the pass. This rank has not met it yet.
            if rows_left == rows_per_step:
                rows_left += train_samples.skip_pass()
            # Passes count from 0, so the number of the next pass says how many are over.
            passes_done = train_samples.place["pass"]
            say(f"Pass {passes_done} is over: {sum(gather(rows_left))} rows are left out")
            # The next pass gives other files to each rank, so it may have enough rows.
            passes_without_step += 1
            if passes_without_step == 10:
                few = f"in each of 10 passes, a rank had less than {rows_per_step} rows for a step"
                fail(f"{args.dataset_name} is too small: {few}; lower --batch-size or the ranks")
            continue
        passes_without_step = 0
        place = train_samples.place
        stop_signal = max(signals)  # STREAM: all ranks stop after this step, whose rows are read
        tokens = sum(rank_tokens)
        token_counts.append(tokens)
        label_count = tokens - global_batch  # the last token of a row predicts nothing
        # STREAM 5: Divide by the labels per rank, because FSDP averages over the ranks.
        # A tensor, because the loss would be compiled a second time for Python numbers.
        # At least 1, because a step may consist of rows with a single token, whose loss is 0.
        labels_per_rank = torch.full((), max(label_count, 1) / WORLD_SIZE, device=device)
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # STREAM: The stream has chosen the rows. This number only seeds the dropout masks.
            first = state.samples + (micro_step * WORLD_SIZE + RANK) * args.batch_size
            torch.manual_seed(args.seed + first)  # a resumed run also draws the same dropout masks
            is_last = micro_step == accumulation - 1
            # FSDP 2: Scatter in every micro-batch, because whole gradients take 4 bytes per weight.
            # --no-reshard-after-forward keeps weights and gradients whole, and scatters once.
            communicate = args.reshard_after_forward or is_last
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            with timer("data"):
                begin = micro_step * args.batch_size
                indices = range(begin, begin + args.batch_size)
                input_ids = read_batch(rows, indices, device)
            with timer("forward"), autocast:
                # STREAM 6: The label of padding is -100, and this label has no loss.
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
        state.epoch = place["pass"]  # STREAM: whole passes; a fraction would need the length
        progress.update()

        at_end = state.step == total_steps
        eval_now = args.eval_freq > 0 and (state.step % args.eval_freq == 0 or at_end)
        save_now = state.step % args.ckpt_freq == 0 or at_end or stop_signal
        # STREAM: The limit stays at 30 minutes, because a rank may repeat a read for some minutes.
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
                # STREAM: the share of padding in the rows
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
            token_counts.clear()  # STREAM: together with loss_sum
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
            # STREAM 7: A checkpoint has the places of all ranks, since ranks read other documents.
            state.places = gather(place)
            save_checkpoint(run_folder, model, tokenizer, stateful, state, args)
            saved_step = state.step

    if run_folder and state.step >= total_steps:
        with new_folder(run_folder / "final") as folder:
            save_weights(folder, model)  # FSDP: on all ranks, because each has its shards
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
    policy["shard_placement_fn"] = lambda weight: even_shards(weight.shape, WORLD_SIZE)
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
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
            load_weights(model, args.model_name, checkpoint)
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
        # STREAM 8: Open each file when the rank needs it, so that the corpus may exceed the disk.
        splits = datasets.load_dataset(**options, streaming=True, storage_options=time_limits())
        try:
            # STREAM: The first documents of a split show its columns.
            splits = {split: documents._resolve_features() for split, documents in splits.items()}
        except StopIteration:
            fail(f"{name} has a split without documents")
    # `datasets` makes a document of each line of the text files in a folder.
    builder = next(iter(splits.values())).info.builder_name
    if os.path.isdir(name) and builder == "text":
        fail(f"{name} is a folder of text: give a pattern, such as '{name}/**/*.txt'")
    return splits


def time_limits():
    """Options of `datasets`, so that a silent server is an error after half a minute."""
    # STREAM: While one rank repeats a read, the other ranks wait, but for at most 30 minutes.
    # `text_windows` repeats a read, so `datasets` must not repeat it 20 times itself.
    datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
    datasets.config.STREAMING_READ_MAX_RETRIES = 1
    timeout = ClientTimeout(total=None, sock_connect=30, sock_read=30)  # seconds without a byte
    return {scheme: {"client_kwargs": {"timeout": timeout}} for scheme in ("http", "https")}


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


def load_samples(args, tokenizer, config, state):
    """The stream of this rank; and the first held-out documents, each in rows of its own."""
    # STREAM: The last 1 % cannot be held out, because the length of a stream is unknown.
    splits = load_documents(args.dataset_name, args.dataset_subset)
    if "train" not in splits:
        fail(f"{args.dataset_name} has no split named train, only {', '.join(splits)}")
    if len(state.places) != WORLD_SIZE:
        fail(f"this run needs {len(state.places)} ranks: each rank goes on from its own place")
    documents = splits["train"]
    if args.max_documents:
        # `take` keeps the files, so each rank would take the first documents of its own files.
        # A generator counts as a single file, whose documents the ranks share.
        first = documents.take(args.max_documents)
        features = documents.features
        documents = datasets.IterableDataset.from_generator(first.__iter__, features=features)
    # STREAM 9: Each rank gets other documents, because equal documents give equal gradients.
    # The ranks share out the files. If that is impossible, each rank reads all files, and keeps
    # every WORLD_SIZE-th document.
    shares_out_files = documents.num_shards % WORLD_SIZE == 0
    if not shares_out_files:
        say(f"{documents.num_shards} files for {WORLD_SIZE} ranks: each rank reads all of them")
    documents = documents.shuffle(seed=args.seed, buffer_size=1)  # files, no documents
    documents = datasets.distributed.split_dataset_by_node(documents, RANK, WORLD_SIZE)
    place = state.places[RANK]
    documents = tokenize_split(documents, tokenizer, config, args)
    train_samples = Stream(text_windows(documents, place, args), place)
    eval_samples = load_eval_samples(args, tokenizer, config, splits) if args.eval_freq else []
    return train_samples, eval_samples


def load_eval_samples(args, tokenizer, config, splits):
    """The first documents of the held-out split, each in rows of its own."""
    names = ["validation", "test"]
    if args.eval_dataset:
        splits = load_documents(args.eval_dataset, args.eval_dataset_subset)
        names.append("train")
    held_out = [splits[name] for name in names if name in splits]
    if not held_out:
        fail("there are no documents to evaluate on: give --eval-dataset, or --eval-freq 0")
    documents = tokenize_split(held_out[0].take(args.eval_documents), tokenizer, config, args)
    with fail_on_error("cannot read the held-out documents"):
        ids = [document["input_ids"] for document in documents]
    eval_samples, _ = to_rows(ids, [], "overflow", args.seq_length)
    say(f"{len(ids)} documents held out, in {len(eval_samples)} rows")
    if not eval_samples:
        fail("the held-out documents are empty: give another --eval-dataset, or --eval-freq 0")
    return eval_samples


def to_rows(documents, rest, packing, length):
    """Rows of `length` token ids, with -100 for padding; and the tokens that are left for later.

    pack: documents end to end, after `rest`. overflow: each document in rows of its own. trunc: one
    row for each document, with its beginning.
    """
    if packing == "pack":
        documents = [list(chain(rest, *documents))]  # a single long document
    if packing == "trunc":
        documents = [ids[:length] for ids in documents]
    rows = [ids[i : i + length] for ids in documents for i in range(0, len(ids), length)]
    # STREAM 10: Packed rows are full, and the tokens that are left begin the next row.
    rest = []
    if packing == "pack" and rows and len(rows[-1]) < length:
        rest = rows.pop()
    return [np.array(row + [-100] * (length - len(row)), np.int32) for row in rows], rest


class Stream:
    """The rows of this rank, from a place on. A thread reads one window ahead."""

    def __init__(self, windows, place):
        self.place = place  # after the last row that was read
        self.error = None  # why no more rows can be read
        self.rows = self.read_ahead(windows)

    def __len__(self):
        return 0  # unknown, so main() cannot notice that the data has changed

    def read_ahead(self, windows):
        """Yields each row, and None at the end of each pass."""
        thread = ThreadPoolExecutor(1)
        # STREAM 11: The thread is a window ahead, so that the devices need not wait for text.
        reading = thread.submit(next, windows)
        try:
            while True:
                window = reading.result()  # waits for the thread, and raises its error
                reading = thread.submit(next, windows)
                for row, place in window:
                    self.place = place
                    yield row
        except Exception as error:
            cause = error.__cause__ or error
            self.error = f"rank {RANK} cannot read on ({cause!r:.300})"

    def read(self, count):
        """The next `count` rows; fewer rows if the pass ends or the stream breaks before."""
        rows = []
        while len(rows) < count:
            row = next(self.rows, None)  # None: the pass is over, or the stream is broken
            if row is None:
                break
            rows.append(row)
        return rows

    def skip_pass(self):
        """Reads this pass to its end. Returns how many rows it still had."""
        count = 0
        while next(self.rows, None) is not None:
            count += 1
        return count


# The place before the first row of a stream.
START = {"pass": 0, "window": 0, "position": None, "rest": [], "used": 0}


def text_windows(documents, place, args):
    """Yields the windows of all passes, from a place on. Reads again what could not be read."""
    pause = 1  # seconds
    while True:  # once for each pass, and again after each failed read
        try:
            for window, next_place in windows_of_pass(documents, place, args):
                yield window
                place = next_place
                pause = 1
        except (ValueError, TypeError):  # in the text itself, so the error would come again
            raise
        except Exception as error:  # such as a server that does not answer
            # When a script ends, Python refuses new threads: "cannot schedule new futures after
            # shutdown".
            script_ends = "shutdown" in str(error)
            is_first_failure = pause == 1
            is_tenth_failure = pause == 512
            if script_ends or is_tenth_failure:
                raise
            if is_first_failure:
                cause = error.__cause__ or error
                reason = f"({cause!r:.300})"
                tqdm.write(f"warning: rank {RANK} opens its files again {reason}", sys.stderr)
            time.sleep(pause)
            pause *= 2


def windows_of_pass(documents, place, args):
    """Yields each window from `place` to the end of the pass, and the place after the window.

    A window is a list of shuffled rows, each with the place after it. None ends the last window.
    """
    # Each pass has another order of the files. It begins with the first file, or at a position.
    documents.set_epoch(place["pass"])
    if place["position"]:
        documents.load_state_dict(place["position"])
    opened = iter(documents)
    pass_is_over = False
    while not pass_is_over:
        # STREAM 12: A resumed run makes the same window again, from the place before it.
        # A buffer of shuffled documents would lose some of them, and read others twice.
        rows = []
        rest = place["rest"]
        while len(rows) < args.shuffle_window and not pass_is_over:
            batch = [document["input_ids"] for document in islice(opened, 32)]
            pass_is_over = not batch
            more, rest = to_rows(batch, rest, args.packing, args.seq_length)
            rows += more
        np.random.RandomState((args.seed, place["window"])).shuffle(rows)
        # A place inside a window: the place before the window, and the number of used rows.
        window = [(row, place | {"used": n}) for n, row in enumerate(rows, start=1)]
        window = window[place["used"] :]  # the run has read the others before it was stopped
        after = {"pass": place["pass"], "window": place["window"] + 1, "rest": rest, "used": 0}
        if pass_is_over:
            after |= {"pass": place["pass"] + 1, "position": None}
            window.append((None, after))
        else:
            after["position"] = documents.state_dict()  # how far `opened` has read
        yield window, after
        place = after


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
        # STREAM: The sum over labels (divided by 1), because rows have different numbers of labels.
        options = {"use_cache": False, "num_items_in_batch": 1}
        loss = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options).loss
        if has_batch:
            loss_sum += loss
    model.train()  # dropout on again
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    label_count = sum(np.sum(row >= 0) - 1 for row in samples)  # STREAM: of all ranks
    return loss_sum.item() / label_count


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run keeps these flags, because another value would make it another training.
LASTING = ["model_name", "from_scratch", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["text_column", "seed", "lr", "lr_scheduler", "warmup_steps"]
LASTING += ["adam_beta2", "weight_decay", "max_grad_norm"]
LASTING += ["packing", "shuffle_window", "max_documents"]  # STREAM: they change the rows

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
    places: tuple = (START,) * WORLD_SIZE  # STREAM: of each rank in its stream


@contextmanager
def new_folder(folder):
    """Yields a temporary folder and renames it when it is complete, since runs may be killed."""
    temporary = folder.with_name("incomplete")
    # FSDP: All ranks write into the folder, but only rank 0 makes and renames it.
    if RANK == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    dist.barrier()
    free = shutil.disk_usage(folder.parent).free / 1e9
    with fail_on_error(f"cannot write {folder}; the disk had {free:.1f} GB left"):
        yield temporary
        # FSDP: The other ranks are done. Rank 0 waits for the disk, and renames the folder.
        if RANK > 0:
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


def save_checkpoint(run_folder, model, tokenizer, stateful, state, args):
    """Writes all that an exact resume needs into a new folder, then removes old checkpoints."""
    with new_folder(run_folder / f"step-{state.step:08d}") as folder:
        # FSDP 11: Each rank saves its shards, because no rank has room for the whole state.
        dcp.save(sharded_state(model, stateful), checkpoint_id=folder)
        if RANK > 0:
            return  # rank 0 does the rest
        save_model(folder, model, tokenizer)
        (folder / "state.json").write_text(json.dumps(asdict(state), indent=2))
        shutil.copy(run_folder / "metrics.jsonl", folder)
    for old in sorted(run_folder.glob(CHECKPOINT_NAMES))[: -args.keep_checkpoints]:
        # Rename it first, so that no half-removed folder looks like a checkpoint.
        old.rename(run_folder / "incomplete")
        shutil.rmtree(run_folder / "incomplete")


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
    newest = max(run_folder.glob(CHECKPOINT_NAMES), default=None)
    if not newest:
        return run_folder, None, new_state
    with fail_if_damaged(newest):
        saved = json.loads((newest / "state.json").read_text())
    # Checkpoints of other chapters have unknown values, other flags with a value, or sharded files.
    unknown = saved.keys() - asdict(new_state).keys()
    unknown |= {name for name, value in saved["flags"].items() if value is not None} - flags.keys()
    is_whole = (newest / "training_state.pt").exists()  # FSDP: as in chapters 1 and 2
    if unknown or is_whole:
        fail(f"{newest} is from another chapter or version: choose another --experiment-name")
    state = RunState(**saved)
    for name, value in state.flags.items():
        if flags.get(name) != value:
            fail(f"--{name.replace('_', '-')} was {value} in this run: keep it or take another -e")
    say(f"Continuing from {newest}")
    return run_folder, newest, state


def lock(run_folder):
    """Refuses a folder in which another process trains. The lock ends with the process."""
    descriptor = os.open(run_folder / "lock", os.O_RDWR | os.O_CREAT)
    # The file is never closed, because this would end the lock.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another process trains in {run_folder}: wait for its end, or choose another -e")
    except OSError as error:
        say(f"warning: {run_folder} cannot be locked ({error}), so start no second run in it")


def load_training_state(checkpoint, stateful, model):
    """Restores optimizer, scheduler and scaler in place."""
    # FSDP: Each rank reads the parts of its shards, whatever the number of ranks that saved them.
    state = sharded_state(model, stateful)
    with fail_if_damaged(checkpoint):
        # FSDP: The index of the shards. DCP itself would print a traceback if the index is broken.
        dcp.FileSystemReader(checkpoint).read_metadata()
        dcp.load(state, checkpoint_id=checkpoint)
    state_dict.set_optimizer_state_dict(model, stateful["optimizer"], state["optimizer"])
    # The restored learning rate belongs to the old --max-steps. Compute it for the new one: step()
    # adds 1 to last_epoch, the number of steps, and then sets the rate. So subtract 1 before.
    stateful["scheduler"].last_epoch -= 1
    stateful["scheduler"].step()


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


def save_weights(folder, model):
    """Writes the whole model with the names of the Hub. The model may exceed the memory."""
    # Each rank writes a file of shards, and these files are joined on the disk.
    joined = folder / "joined"
    hub = HuggingFaceStorageWriter(joined, save_distributed=True, enable_consolidation=True)
    dcp.save(weights_of(model), storage_writer=hub)
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


def gather_numbers(numbers):
    """The integers of all ranks in one small message: for each integer, a list of all ranks."""
    # STREAM: As a tensor, because `gather` would send twice, and pickle the numbers before.
    of_this_rank = torch.tensor(numbers)
    of_ranks = [torch.empty_like(of_this_rank) for _ in range(WORLD_SIZE)]
    dist.all_gather(of_ranks, of_this_rank)
    return torch.stack(of_ranks).T.tolist()


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
                # STREAM: A stream may break off between two logged steps, or before the first one.
                if records and not records.endswith("\n"):
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
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",
    "seq_length": 256,
    "batch_size": max(1, 8 // WORLD_SIZE),  # DDP: the global batch of chapter 1
    "max_steps": 400,
    "eval_dataset": f"{sysconfig.get_path('stdlib')}/_*.py",  # STREAM: files that -d leaves out
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
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="Hub id, file or pattern")
    add("--text-column", default="text", help="the column to train on")
    add("--dataset-subset", help="configuration name on the Hub")
    add("-s", "--seq-length", type=at_least(2), default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=positive, default=8, help="samples per forward pass")
    add("--gradient-accumulation-steps", type=positive, default=1, help="passes per optimizer step")
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
    # STREAM: The documents to read, and how they become rows.
    add("--packing", choices=["pack", "overflow", "trunc"], default="pack", help="text to rows")
    add("--shuffle-window", type=positive, default=1024, help="rows that are shuffled together")
    add("--max-documents", type=positive, help="read only this many, over all ranks")
    add("--eval-dataset", help="held-out documents; without it, the validation split of -d")
    add("--eval-dataset-subset", help="configuration name on the Hub")
    add("--eval-documents", type=positive, default=1000, help="number of held-out documents")
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
    if not args.max_steps:  # STREAM: also where --num-epochs is given
        parser.error("a stream has no known length: give --max-steps for the schedule")
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
