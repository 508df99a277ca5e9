"""Chapter 10: a corpus in a bucket, as rows of tokens that any number of nodes can read.

`tools/write-mds.py` tokenizes and packs a corpus once, and writes its rows into shards. Here each
rank reads rows by their number. The shards of an address are downloaded when a row needs them. Row
number n of a run is the same on any number of ranks, so nodes may come and go. Comments with MDS 1
to 9 mark the ideas.

    python ../tools/write-mds.py -o ../outputs/mds --demo     # first: writes the rows of the demo
    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    NNODES=4 MASTER_ADDR=node-0 NODE_RANK=0 ../launch/run.sh 10 -e c4-mds --save-dir /shared/runs \
        -d s3://bucket/c4 --eval-freq 0 --max-steps 10000     # on each of 4 nodes, with its number
"""

import gzip
import json
import logging
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
import uuid
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from glob import escape, glob
from pathlib import Path

# Libraries read these variables when they are imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # CPU threads that wait leave their core to others
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # this script logs the metrics itself
os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")  # one retry: 20 s if offline
import comet_ml
import datasets
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import xxhash
from filelock import FileLock
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, Path_fr, PositiveInt
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

# DDP 1: torchrun starts one process per device, and these variables tell each process who it is.
RANK = int(os.environ.get("RANK", 0))  # its number among the processes of all nodes
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # its number among those of its node
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
REPOSITORY = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOSS_CHUNK = 1024  # tokens; their logits take 0.5 GB in fp32 if the vocabulary has 128,000 tokens
received_signals = []  # the handler of signals appends to this list, and the loop reads it


@record  # DDP: torchrun then reports the traceback of the rank that failed first
def main():
    sys.stdout.reconfigure(line_buffering=True)  # a log file then shows each line at once
    if RANK > 0:  # DDP: the others would print the same
        sys.stdout = open(os.devnull, "w")
    args = parse_args()
    # DDP 2: Each process joins the others and takes its own device, because GPU 0 is the default.
    device = join_process_group()
    args.dtype = args.dtype or ("fp32" if device.type == "cpu" else "bf16")
    accumulation = args.gradient_accumulation_steps
    # DDP 3: The global batch is the sum over all ranks, so steps and epochs count all devices.
    global_batch = args.batch_size * accumulation * WORLD_SIZE
    torch.manual_seed(args.seed)  # for all random numbers before the loop
    transformers.logging.disable_progress_bar()  # Transformers shows one bar per file
    say(f"Device {device}, torch {torch.__version__}, transformers {transformers.__version__}")

    # Data, model, optimizer.
    check_flags(args, device)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    # MDS: No rank waits for another rank here, because the rows are tokens already.
    train_rows = MdsRows(args, tokenizer)
    train_samples = sum(train_rows.sizes)
    if train_samples < global_batch:
        sys.exit("error: the shards have too few rows: lower --batch-size")
    say(f"Training on {train_samples:,} rows in {len(train_rows.sizes):,} shards")
    eval_rows = load_eval_rows(args, tokenizer) if args.eval_freq else []
    order = sample_order(args, train_rows.sizes)
    run_folder, checkpoint, state = open_run(args, train_rows.index_hash)
    compare_ranks(args, state)  # DDP: all ranks must train alike
    # FSDP 1: Shards stay in fp32, and FSDP gathers them in bf16. So build_model() sets no autocast.
    # Norms, softmax and the loss of Transformers convert to fp32 themselves.
    model = build_model(args, device)
    # The embedding has `vocab_size` rows. A GPU would not say which token lacks a row.
    # MDS: The tool has noted the largest token.
    largest = train_rows.facts["largest_token"]
    if largest >= model.config.vocab_size:
        sys.exit(f"error: token {largest} is outside the vocabulary of {args.model_name}")
    groups = parameter_groups(model, args)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)
    if state.global_batch and state.global_batch != global_batch:
        say("warning: the global batch has changed, so steps and learning rate change, too")
    state.global_batch = global_batch
    # The samples left give the steps left, even if a resumed run has another global batch.
    samples_left = len(order) - state.samples
    total_steps = state.step + samples_left // global_batch
    if args.max_steps:
        total_steps = min(total_steps, args.max_steps)
    scheduler = get_scheduler(
        args.lr_scheduler, optimizer, args.warmup_steps, total_steps, args.lr_scheduler_options
    )
    # fp16 rounds gradients below 3e-8 to zero. The scaler multiplies the loss, and with it the
    # gradients, and divides them again before the update. With other dtypes it does nothing.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    # A checkpoint stores the states of these objects, besides the weights.
    stateful = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if checkpoint:
        # FSDP 2: Each rank reads its shards, whatever the number of ranks that saved them.
        saved = sharded_state(model, stateful)  # its weights are the tensors of the model
        read_parts(checkpoint, saved)  # NODES: of any format
        # The moments are only in `saved` so far, so hand them to the optimizer.
        state_dict.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
        # The saved learning rate belongs to the old total_steps, which may have changed. So let the
        # scheduler take its last step again.
        scheduler.last_epoch -= 1  # PyTorch's name for the number of steps
        scheduler.step()
    elif args.resume_dir:
        # NODES: With --skip-optimizer, take only the weights. The rest of the run begins anew.
        read_parts(of_this_rank(args.resume_dir), {"model": model.state_dict()})
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save, and rank 0 logs
        facts = describe_run(model, device)
        facts["global_batch"] = global_batch
        facts["dataset_samples"] = train_samples
        # MDS: Nobody counts the tokens.
        run_log = RunLog(args, run_folder, checkpoint, state, facts)
        run_log.comet.set_model_graph(str(model))  # the architecture as text

    # The training loop.
    loss_sum = torch.zeros((), device=device)
    token_sum = 0  # MDS: of all ranks since the last logged step, without padding
    # MDS 1: A thread reads the rows of the next step, so that the devices need not wait for them.
    reader = ThreadPoolExecutor(1)
    next_rows = reader.submit(read_step, train_rows, order, state.samples, args)
    logged_step = state.step
    logged_time = time.perf_counter()
    # disable=None: no bar where the output goes to a file
    progress = tqdm(total=total_steps, initial=state.step, file=sys.stdout, disable=None)
    catch_stop_signals()
    stop_signal = 0
    model.train()  # with dropout, if the model has any
    while state.step < total_steps and not stop_signal:
        step = state.step + 1
        stop_signal = max(received_signals, default=0)  # 0: none. Any signal ends the run
        # DDP: A signal may reach the ranks in different steps. All must stop after the same step.
        stop = torch.tensor(stop_signal)  # on the CPU: nobody waits for the GPU
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        stop_signal = stop.item()
        at_end = step == total_steps
        eval_now = args.eval_freq > 0 and (step % args.eval_freq == 0 or at_end)
        save_now = step % args.ckpt_freq == 0 or at_end or stop_signal
        # A step that saves also logs: `if log_now` below exits on NaN, so no checkpoint has NaN.
        log_now = step % args.log_freq == 0 or save_now
        times = defaultdict(float)  # milliseconds of each phase
        # Python runs ahead of the GPU. Only logged steps wait after each phase, to measure it.
        wait = log_now and device.type != "cpu"
        if wait:
            torch.accelerator.synchronize()  # until the GPU has done the steps before
        with timed("data", times, wait):
            rows = next_rows.result()  # MDS: of this rank, for the whole step
        if not at_end:
            next_first = state.samples + global_batch
            next_rows = reader.submit(read_step, train_rows, order, next_first, args)
        # MDS 2: Count the labels of the whole step first, because its loss is a mean over them.
        # Padding has no label, and the first token of a row is the label of no other token.
        labels_here = sum(np.count_nonzero(row[1:] != PADDING) for row in rows)
        label_count = sum(gather(labels_here))
        token_sum += label_count + global_batch
        # MDS 3: Divide by the labels per rank, because FSDP averages over the ranks.
        # A Python number: FSDP rounds a tensor to bf16, and compiled losses take no NumPy number.
        # At least 1, because a step may consist of rows with a single token, whose loss is 0.
        labels_per_rank = float(max(label_count, 1) / WORLD_SIZE)
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # MDS: read_step has chosen the rows. This number only seeds the dropout masks.
            first = state.samples + (micro_step * WORLD_SIZE + RANK) * args.batch_size
            torch.manual_seed(args.seed + first)  # the same dropout masks after a resume
            # FSDP: With --reshard-after-forward, average gradients and free whole weights after
            # each micro-batch, which takes less memory. Without it, only after the last one.
            communicate = args.reshard_after_forward or micro_step == accumulation - 1
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            # NODES 1: Only the last micro-batch averages over the copies, because links are slow.
            model.set_requires_all_reduce(micro_step == accumulation - 1)
            with timed("data", times, wait):
                begin = micro_step * args.batch_size
                input_ids = to_device(rows[begin : begin + args.batch_size], device)
            with timed("forward", times, wait):
                # MDS 4: The label of padding is -100, and this label has no loss.
                # Padding comes last, so no other token attends to padding. So padding needs no
                # mask, and may have any token id.
                options = {"use_cache": False, "num_items_in_batch": labels_per_rank}
                loss = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options).loss
            with timed("backward", times, wait):
                scaler.scale(loss).backward()
            loss_sum += loss.detach()  # the number alone, without its graph
        with timed("update", times, wait):
            # Undo the scaling of fp16. Then clip the gradient of the whole step, so that no bad
            # batch spoils the weights.
            scaler.unscale_(optimizer)
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            # FSDP 3: Each rank has the norm of its shards, and full_tensor() joins these parts.
            # So all ranks must call it.
            grad_norm = grad_norm.full_tensor()
            learning_rate = scheduler.get_last_lr()[0]  # of this step, for the log
            scaler.step(optimizer)  # the same as optimizer.step(), except in fp16
            scaler.update()  # a lower scale after infinite gradients, and later a higher one
            scheduler.step()  # once per optimizer step, not per micro-batch
            optimizer.zero_grad()  # because backward() adds to the gradients
        state.step = step
        state.samples += global_batch
        state.epoch = state.samples / train_samples
        progress.update()
        # NODES 2: If a node vanishes, the others give up after 5 minutes, and can start again.
        # The first step, which compiles, evaluations and saves may take PyTorch's 30 minutes.
        set_time_limit(timedelta(minutes=30 if eval_now or save_now else 5))

        if log_now:
            # `.item()` waits until the GPU has computed the number, so not every step calls it.
            # DDP 9: Average the loss over ranks, because each rank has seen its own samples only.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            mean_loss = loss_sum.item() / (step - logged_step)
            seconds = (time.perf_counter() - logged_time) / (step - logged_step)
            # MDS: The speed counts tokens without padding.
            tokens_per_step = token_sum / (step - logged_step)
            tokens_per_second = tokens_per_step / seconds
            metrics = {
                "loss": mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                "tokens_per_second": tokens_per_second,
                # MDS: the share of padding in the rows
                "padding": 1 - tokens_per_step / (global_batch * args.seq_length),
                "time/total_ms": 1e3 * seconds,  # mean per step since the last log
                **times,  # phases of this step alone
                **of_all_ranks(memory_metrics(device)),  # DDP: the fullest device limits -b
            }
            numbers = f"loss {mean_loss:.4f}  lr {learning_rate:.2e}"
            say(f"step {step}/{total_steps}  {numbers}  {tokens_per_second:,.0f} tokens/s")
            # In fp16 an infinite gradient is normal: the scaler skips that step.
            norm_is_wrong = args.dtype != "fp16" and not grad_norm.isfinite()
            if not math.isfinite(mean_loss) or norm_is_wrong:
                sys.exit("error: loss or gradient is not finite: lower --lr, raise --warmup-steps")
            if run_log:
                run_log.log(state, metrics)
            loss_sum.zero_()
            token_sum = 0  # MDS: together with loss_sum
            logged_step = step
            logged_time = time.perf_counter()
        if eval_now:
            eval_loss = evaluate(model, eval_rows, args, device)  # MDS: rows
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if run_folder and save_now:
            save_checkpoint(args, run_folder, model, tokenizer, stateful, state)

    wait_for_checkpoint()  # NODES: until the last checkpoint has its name
    if run_folder and not stop_signal:
        # FSDP 4: Gather the model in CPU memory of rank 0, since other programs want it whole.
        weights = whole_weights(model)
        with new_folder(run_folder / "final") as folder:
            if RANK == 0:
                model.save_pretrained(folder, state_dict=weights)
                tokenizer.save_pretrained(folder)
        say(f"Done: the model is in {run_folder / 'final'}")
    dist.destroy_process_group()  # DDP: not in a `finally`, as it may wait for a dead rank
    if stop_signal:
        say(f"Stopped after step {step}: with -e, the same command continues the run")
        sys.exit(128 + stop_signal)  # the exit code that a shell gives for such a signal


# -- Model and optimizer ---------------------------------------------------------------------------


def check_flags(args, device):
    """Finds flags that do not fit the model, before the data is read."""
    config = AutoConfig.from_pretrained(args.model_name)
    # Configs of models with images have a text config inside, those of encoder-decoders have
    # `decoder_layers`, and those of encoders a false `is_decoder`, as GPT-NeoX has, a decoder.
    may_encode = hasattr(type(config), "is_decoder") and "gpt_neox" not in config.model_type
    is_encoder = may_encode and not config.is_decoder
    if config.get_text_config() is not config or hasattr(config, "decoder_layers") or is_encoder:
        sys.exit(f"error: {args.model_name} is no plain decoder of text: choose another model")
    longest = getattr(config, "max_position_embeddings", None)
    if longest and args.seq_length > longest:
        sys.exit(f"error: --seq-length {args.seq_length}: the model has {longest} positions")
    # The attentions named paged have no causal mask. On CPUs, flex_attention has no backward pass.
    no_backward = args.attention == "flex_attention" and device.type == "cpu"
    if no_backward or "paged" in str(args.attention):
        sys.exit(f"error: --attention {args.attention} cannot train here: choose another one")
    try:
        with torch.device("meta"):  # a model without memory for its weights
            model = AutoModelForCausalLM.from_config(config, attn_implementation=args.attention)
        # Try the scheduler, with any optimizer. Some schedulers fail in their first step only.
        optimizer = torch.optim.SGD(model.parameters())
        scheduler = get_scheduler(args.lr_scheduler, optimizer, 0, 9, args.lr_scheduler_options)
        optimizer.step()  # changes nothing, but PyTorch wants it before scheduler.step()
        scheduler.step()
    except (TypeError, ValueError) as error:
        sys.exit(f"error: --attention {args.attention} --lr-scheduler {args.lr_scheduler}: {error}")


def build_model(args, device):
    """The model on `device`, with its attention, and compiled if asked for."""
    # FSDP 5: Only rank 0 holds the whole model, in CPU memory. Meta tensors take no memory.
    # So make the model of meta tensors, shard it, and let rank 0 send the values. A checkpoint is
    # read later, by dcp.load.
    whole = load_model(args) if RANK == 0 else None
    config = AutoConfig.from_pretrained(args.model_name)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # load_model() has converted the weights to fp32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=args.attention
        )
    shard_model(model, args, device)
    send_weights(whole, model, device)
    use_flash = device.type == "cuda" and args.dtype != "fp32" and is_flash_attn_2_available()
    if args.attention is None and use_flash and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    # In each pass, Transformers looks for the borders of texts in a sample, and this search makes
    # Python wait for the GPU. Here, attention may cross borders, so replace it: None is no border.
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    # All decoder layers have this class, also without activation checkpointing.
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    attention = model.config._attn_implementation
    say(f"Attention {attention}, compute precision {args.dtype}, {len(layers)} decoder layers")
    if args.activation_checkpointing:
        # A layer keeps only its input. The backward pass computes the rest a second time.
        model.activation_checkpointing_enable()  # its older name: gradient_checkpointing_enable
    if args.compile:
        # Compile layer by layer: attention then gets a causal flag, as its fast kernels need it. A
        # model that is compiled as a whole builds a mask. Layers of one kind also share their code.
        for layer in layers:
            layer.compile()
        # Compiled, the loss needs no fp32 copy of the logits, the largest tensor of a step.
        model.loss_function = torch.compile(model.loss_function)
    if args.chunked_loss:
        use_chunked_loss(model)  # after --compile, because it calls the compiled loss
    return model


def use_chunked_loss(model):
    """From now on, the model computes logits and loss of LOSS_CHUNK tokens at a time.

    The logits of a whole batch, often the largest tensor of a step, never exist: the head passes
    the hidden states on, and the loss function applies the head to one chunk after the other.
    """
    head = model.get_output_embeddings()
    compute_logits = head.forward
    compute_loss = model.loss_function

    def pass_on(hidden_states):  # in place of the head's forward
        # loss_of_batch() looks for this mark. If the model changes the logits, the mark is lost.
        hidden_states.from_head = True
        return hidden_states

    def sum_of_chunk(hidden_states, labels, vocab_size):
        logits = compute_logits(hidden_states)
        # compute_loss() adds up the losses, and divides by the number of items. So 1 gives the sum.
        return compute_loss(logits, None, vocab_size, num_items_in_batch=1, shift_labels=labels)

    def loss_of_batch(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **_):
        hidden_states = logits  # because pass_on() is in place of the head
        if not hasattr(hidden_states, "from_head"):
            sys.exit("error: --chunked-loss: this model changes its logits before the loss")
        if shift_labels is None:
            # Each token has the next one as its label. -100 says that the last one has no label.
            shift_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        if num_items_in_batch is None:
            num_items_in_batch = (shift_labels != -100).sum()
        hidden_chunks = hidden_states.flatten(0, 1).split(LOSS_CHUNK)
        label_chunks = shift_labels.flatten().split(LOSS_CHUNK)
        loss_sum = 0.0
        for hidden_chunk, label_chunk in zip(hidden_chunks, label_chunks, strict=True):
            # checkpoint() forgets the logits. The backward pass computes them a second time.
            loss_sum += torch.utils.checkpoint.checkpoint(
                sum_of_chunk, hidden_chunk, label_chunk, vocab_size, use_reentrant=False
            )
        return loss_sum / num_items_in_batch

    head.forward = pass_on
    model.loss_function = loss_of_batch


def load_model(args, checkpoint=None):
    """The model in CPU memory. Its weights are those of `checkpoint`, pretrained ones or random."""
    # Weights in fp32, whatever the files have. AdamW changes a weight by about --lr, such as 3e-5.
    # A usual weight is 0.02, where bf16 numbers are 1e-4 apart: bf16 would round this change away.
    options = {"dtype": torch.float32, "attn_implementation": args.attention}
    if args.from_scratch and not checkpoint:
        config = AutoConfig.from_pretrained(args.model_name)
        model = AutoModelForCausalLM.from_config(config, **options)
        # from_config() draws random numbers, and how many depends on the version of Transformers.
        # So set the seed again, and draw all weights again: one seed, one model.
        torch.manual_seed(args.seed)
        model.apply(model._init_weights)
        return model
    source = checkpoint or args.model_name
    model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    if info["missing_keys"]:  # Transformers fills these tensors with random numbers
        sys.exit(f"error: the files of {source} lack the tensors {info['missing_keys']}")
    return model


def shard_model(model, args, device):
    """Gives each rank a shard of every parameter: memory, without values yet."""
    # FSDP 6: Gather the weights in bf16, which halves the traffic. Reduce gradients in fp32.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # NODES 3: Ranks form a table: a row holds one copy of the model, a column holds equal shards.
    # All-gathers and reduce-scatters stay in a row. Columns all-reduce the gradients of a shard.
    shape = (WORLD_SIZE // args.shard_size, args.shard_size)
    policy["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    # FSDP 7: Each layer is a unit, so that only one or two layers are whole at any time.
    # FSDP gathers and frees the weights of a unit together.
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
    # FSDP 8: Take memory only for the shards of this rank, because other ranks have the rest.
    model.to_empty(device="cpu" if args.cpu_offload else device)


def send_weights(whole, model, device):
    """Fills the shards and buffers of all ranks with the values of rank 0's whole model."""
    weights = {}
    if RANK == 0:
        if whole.all_tied_weights_keys != model.all_tied_weights_keys:
            sys.exit("error: the files have an untied head: set tie_word_embeddings to false")
        weights = whole.state_dict()
        # To save final/, Transformers needs the generation settings, the names of tensors in files,
        # and the name of the class, which fully_shard has changed: copy them from `whole`.
        model.generation_config = whole.generation_config
        model._weight_conversions = getattr(whole, "_weight_conversions", None)
        type(model).__name__ = type(whole).__name__
        type(model).__module__ = type(whole).__module__
    # Wait for rank 0, which has to read the files before.
    dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(days=1)))
    # FSDP 9: Rank 0 sends one parameter at a time, and each rank keeps its shard of it.
    how = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state_dict.set_model_state_dict(model, weights, options=how)
    # `weights` does not have all buffers, such as the rotary frequencies, so send them, too.
    for name, buffer in model.named_buffers():
        source = whole.get_buffer(name) if RANK == 0 else buffer
        buffer.data = source.to(device)
        dist.broadcast(buffer, src=0)


def parameter_groups(model, args):
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


# -- Data and evaluation ---------------------------------------------------------------------------

# The endings of local files, and their formats. Files may also be compressed (.gz).
FORMATS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
FORMATS |= {".csv": "csv", ".parquet": "parquet"}
# The names of files that are held out, such as chats_dev.csv or validation.jsonl
HELD_OUT = re.compile(r"(?<![a-z])(validation|valid|val|dev|eval|test)(?![a-z])", re.IGNORECASE)
TEXT_PIECE = 250_000  # characters of a text file that are read at once, to save memory
PADDING = -100  # at the end of a row; the label of a token that has no loss
PARTS = 64  # MDS: of the corpus, from which the order of the rows takes one row each in turn


class MdsRows:
    """The rows of MDS shards: int32 of shape (seq_length,), with -100 for padding.

    The shards of a folder are read where they are. The shards of an address are downloaded when a
    row needs them.
    """

    def __init__(self, args, tokenizer):
        from streaming import Stream  # an optional package
        from streaming.base.format import reader_from_json
        from streaming.base.util import bytes_to_int

        name = args.dataset_name
        self.is_remote = "://" in name
        try:
            folder = open_cache(args) if self.is_remote else name
            self.facts = json.loads(Path(folder, "rows.json").read_text())
        except FileNotFoundError:  # MDS: for example a folder of text
            sys.exit(f"error: {name} lacks rows.json: make rows with tools/write-mds.py")
        index = Path(folder, "index.json").read_bytes()
        # The index has the hash of each shard, so other rows have another index.
        self.index_hash = xxhash.xxh3_64(index).hexdigest()
        no_split = None  # the shards lie in the folder itself
        shards = json.loads(index)["shards"]
        self.shards = [reader_from_json(folder, no_split, shard) for shard in shards]
        self.sizes = [shard.samples for shard in self.shards]
        self.ends = np.cumsum(self.sizes)
        options = {"download_retry": 2, "download_timeout": 60, "keep_zip": False}
        self.stream = Stream(remote=name, local=folder, **options) if self.is_remote else None
        ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.cache_limit = bytes_to_int(args.cache_limit) // ranks_of_node  # of this rank
        self.cached = OrderedDict()  # shards by number; the least recently used shard comes first
        self.cache_bytes = 0
        if self.facts["seq_length"] != args.seq_length:
            sys.exit(f"error: the rows have {self.facts['seq_length']} tokens: give this to -s")
        # Another tokenizer would give other tokens for this text.
        probe = tokenizer("Probe of 1 tokenizer: naïve?")["input_ids"] + [tokenizer.eos_token_id]
        if self.facts["tokenizer_probe"] != probe:
            sys.exit(f"error: the rows are of another tokenizer: {self.facts['tokenizer']}")

    def read(self, n):
        """Row n of the corpus."""
        number = int(np.searchsorted(self.ends, n, side="right"))  # the first shard that ends later
        shard = self.shards[number]
        if number not in self.cached:
            if self.is_remote:
                self.download(shard)
            check(shard)
            self.cached[number] = shard
        self.cached.move_to_end(number)
        return shard[int(n - self.ends[number] + self.sizes[number])]["tokens"]

    def download(self, shard):
        """Downloads a shard. First removes other shards, until the cache has room for this one."""
        while self.cached and self.cache_bytes + shard.get_max_size() > self.cache_limit:
            _, least_used = self.cached.popitem(last=False)
            self.cache_bytes -= least_used.evict()  # returns how many bytes it has removed
        # Downloads and decompresses the shard, and returns how many bytes the disk now has more.
        self.cache_bytes += self.stream.prepare_shard(shard)


def check(shard):
    """Compares the file of a shard with its hash in `index.json`."""
    # MDS 5: Check a shard before its first use, because a flipped bit is another token.
    file = Path(shard.dirname, shard.raw_data.basename)
    if xxhash.xxh3_64(file.read_bytes()).hexdigest() != shard.raw_data.hashes["xxh3_64"]:
        sys.exit(f"error: {file} is damaged: its hash is not the hash in index.json")


def open_cache(args):
    """An empty folder for the downloaded shards of this rank, with the index of all shards."""
    from streaming.base.storage import CloudDownloader

    if not args.experiment_name:
        sys.exit("error: shards at an address need -e, which names their folder in --local-cache")
    # MDS 6: Each rank of each run has a cache of its own, so that nobody else removes its shards.
    run = Path(args.save_dir).expanduser().resolve() / args.experiment_name
    path_of_run = run.relative_to("/")  # the cache has folders of the same names
    folder = Path(args.local_cache).expanduser() / path_of_run / f"shards-{LOCAL_RANK}"
    # Begin with an empty folder, because a killed run may have left a half of a file.
    remove(folder)
    for name in ("rows.json", "index.json"):
        CloudDownloader.direct_download(f"{args.dataset_name}/{name}", str(folder / name))
    return str(folder)


def sample_order(args, shard_sizes):
    """The rows of all epochs, in the order in which the run reads them.

    The order depends only on the seed, the sizes of the shards and the window.
    """
    ends = np.cumsum(shard_sizes)
    epochs = []
    for epoch in range(args.num_epochs):
        # RandomState: NumPy promises the same numbers in every version, so old runs can resume.
        generator = np.random.RandomState((args.seed, epoch))
        # MDS 7: Shuffle whole shards, so that the rows of a shard stay close to each other.
        # A shuffle of all rows would need almost all shards at once.
        shards = generator.permutation(len(shard_sizes))
        rows = np.concatenate([np.arange(ends[i] - shard_sizes[i], ends[i]) for i in shards])
        # MDS 8: Cut the shuffled shards into 64 parts, and take one row of each part in turn.
        # The rows of a part are shuffled within windows.
        parts = np.array_split(rows, PARTS)  # the first parts may have one row more
        turns = np.full((len(parts[0]), PARTS), -1)  # -1: the part has no row left
        for number, part in enumerate(parts):
            for begin in range(0, len(part), args.shuffle_window):
                generator.shuffle(part[begin : begin + args.shuffle_window])
            turns[: len(part), number] = part
        epochs.append(turns[turns >= 0])
    return np.concatenate(epochs)


def read_step(train_rows, order, first, args):
    """The rows of this rank in the step that begins with row `first` of the run."""
    # MDS 9: Row n of a run is the same on any number of ranks, so that ranks may come and go.
    # The ranks take rows in turn. If WORLD_SIZE is 8, 16, 32 or 64, a rank meets at most 8 parts,
    # and downloads only the shards of these parts.
    end = first + args.batch_size * args.gradient_accumulation_steps * WORLD_SIZE
    return [train_rows.read(n) for n in order[first + RANK : end : WORLD_SIZE]]


def load_eval_rows(args, tokenizer):
    """The first documents of the held-out text, each in rows of its own."""
    if not args.eval_dataset:
        sys.exit("error: shards are for training: give --eval-dataset, or --eval-freq 0")
    splits = load_documents(args.eval_dataset, args.eval_dataset_subset)
    documents = splits.get("validation") or splits.get("test") or splits["train"]
    check_column(documents, args)
    texts = [document[args.text_column] for document in documents.take(args.eval_documents)]
    length = args.seq_length
    rows = []
    for ids in tokenize({"text": texts}, tokenizer, "text")["input_ids"]:
        for begin in range(0, len(ids), length):
            row = ids[begin : begin + length]
            rows.append(np.array(row + [PADDING] * (length - len(row)), np.int32))
    say(f"{len(texts):,} documents held out, in {len(rows):,} rows")
    return rows


def load_documents(name, subset):
    """The splits of local files, or of a dataset on the Hub: `train`, and maybe held-out ones."""
    name = os.path.expanduser(name)
    file_format = FORMATS.get(Path(name.removesuffix(".gz")).suffix)
    is_local = file_format or "*" in name or os.path.exists(name)
    if not is_local:
        # MDS: Only held-out documents are text. Open a file when one of its documents is needed.
        return datasets.load_dataset(name, subset, streaming=True)
    if "://" in name and file_format != "text":
        # MDS: `datasets` reads from servers and buckets, too, and expands patterns.
        return datasets.load_dataset(file_format, data_files=name, streaming=True)
    files = [name] if os.path.isfile(name) else sorted(glob(name, recursive=True))
    if not files or not file_format:
        sys.exit(f"error: no files for {name}: give existing ones that end in {', '.join(FORMATS)}")
    folder = os.path.commonpath(files)  # its name may have the word "test" without meaning it
    held_out = [file for file in files if HELD_OUT.search(file.removeprefix(folder))]
    train = [file for file in files if file not in held_out]
    splits = {"train": files}
    if train and held_out and not name.endswith(".py"):  # test_io.py is code to train on
        splits = {"train": train, "validation": held_out}
    for split, names in splits.items():
        say(f"{name}: {len(names):,} files for {split}")
    return {split: read_files(file_format, names) for split, names in splits.items()}


def read_files(file_format, files):
    """The documents of local files."""
    if file_format == "text":
        # MDS: A rank reads some of the files, and no file before it needs it.
        return datasets.IterableDataset.from_generator(read_text, gen_kwargs={"files": files})
    # MDS: `datasets` reads a name as a pattern, so escape brackets.
    files = [escape(file) for file in files]
    return datasets.load_dataset(file_format, data_files=files, split="train", streaming=True)


def read_text(files):
    """The documents of text files: what is between <|endoftext|>, long documents in pieces."""
    for file in files:
        open_file = gzip.open if file.endswith(".gz") else open
        unfinished = ""  # a document that may go on in the next piece of the file
        try:
            with open_file(file, "rt", encoding="utf-8-sig", errors="replace") as stream:
                while piece := stream.read(TEXT_PIECE):
                    if piece.startswith("\ufffd\ufffd") or "\0" in piece[:2]:  # UTF-16
                        raise ValueError("convert it to UTF-8")
                    documents = (unfinished + piece).split("<|endoftext|>")
                    unfinished = documents.pop()
                    if len(unfinished) >= TEXT_PIECE:
                        documents.append(unfinished)
                        unfinished = ""
                    for document in documents:
                        yield {"text": document}
        except Exception as error:
            raise OSError(f"{file}: {error}") from error
        yield {"text": unfinished}
        # MDS: Nobody counts undecoded characters, because the end of the text may be far.


def check_column(documents, args):
    """Refuses a column that is not there. The first document shows the columns."""
    first = next(iter(documents), {})
    columns = [name for name, value in first.items() if isinstance(value, str)]
    if args.text_column not in columns:
        sys.exit(f"error: no text in {args.text_column!r}: choose --text-column among {columns}")


def tokenize(rows, tokenizer, column):
    """The token ids of each document that is not empty, with one end-of-text token at its end."""
    texts = [text for text in rows[column] if text]
    if not texts:  # the tokenizer refuses an empty list
        return {"input_ids": []}
    documents = [ids for ids in tokenizer(texts, verbose=False)["input_ids"] if ids]
    for ids in documents:
        if ids[-1] != tokenizer.eos_token_id:  # some tokenizers add it themselves
            ids.append(tokenizer.eos_token_id)
    return {"input_ids": documents}


def to_device(rows, device):
    """The rows as int64 of shape (len(rows), seq_length) on `device`."""
    batch = torch.from_numpy(np.stack(rows))  # MDS: the rows are arrays already
    if device.type == "cuda":
        batch = batch.pin_memory()  # the GPU copies from pinned memory, while Python goes on
    return batch.to(device, non_blocking=batch.is_pinned()).long()  # int64, as the loss wants it


@torch.no_grad()
def evaluate(model, rows, args, device):  # MDS: rows with padding
    """The mean loss over all held-out rows, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    # DDP 10: Each rank evaluates its share, and a sum over ranks gives the mean over all samples.
    for begin in range(0, len(rows), WORLD_SIZE * args.batch_size):
        first = begin + RANK * args.batch_size
        batch = rows[first : first + args.batch_size]
        # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many passes. A rank
        # without a batch evaluates row 0, with weight 0.
        input_ids = to_device(batch or rows[:1], device)
        # MDS: The sum over labels (divided by 1), because rows have different numbers of labels.
        options = {"use_cache": False, "num_items_in_batch": 1}
        loss = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options).loss
        loss_sum += loss if batch else 0
    model.train()  # dropout on again
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    label_count = sum(np.count_nonzero(row[1:] != PADDING) for row in rows)  # MDS: of all ranks
    return loss_sum.item() / label_count


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these flags. Other values would make it another training.
LASTING = ["model_name", "from_scratch", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["text_column", "seed", "lr", "lr_scheduler", "lr_scheduler_options", "warmup_steps"]
LASTING += ["adam_beta2", "weight_decay", "max_grad_norm"]
LASTING += ["shuffle_window"]  # MDS: it changes the order of the rows

CHECKPOINT_NAMES = "step-????????"  # eight digits, so the names sort by step
RANK_FOLDER = f"rank-{RANK}"  # NODES: this rank's checkpoints, with --checkpoint-format local


@dataclass
class RunState:
    """The position of a run. Every checkpoint stores it as `state.json`."""

    lasting: dict  # MDS: flags, and the hash of the index, which must not change
    comet_key: str  # the id of its Comet experiment
    global_batch: int | None = None  # of the last step
    step: int = 0  # optimizer steps done
    samples: int = 0  # samples read, over all epochs
    epoch: float = 0.0


def open_run(args, index_hash):  # MDS: of the shards
    """The folder of the run, its newest checkpoint, and the state: new, or of the checkpoint."""
    lasting = {name: getattr(args, name) for name in LASTING} | {"index_hash": index_hash}
    state = RunState(lasting, comet_key=uuid.uuid4().hex)
    if not args.experiment_name:
        say("Without -e, this run saves no model, no checkpoints and no logs")
        return None, None, state
    run_folder = Path(args.save_dir).expanduser() / args.experiment_name
    run_folder.mkdir(parents=True, exist_ok=True)
    # FSDP: All ranks write into this folder, so all nodes have to see a file that rank 0 makes.
    probe = run_folder / gather(uuid.uuid4().hex)[0]  # a name that rank 0 has chosen
    if RANK == 0:
        probe.touch()
    dist.barrier()
    is_shared = all(gather(probe.exists()))
    probe.unlink(missing_ok=True)
    # NODES 4: With `local`, each node writes to its own disk, and nodes need no shared folder.
    if not is_shared and args.checkpoint_format != "local":
        sys.exit(f"error: not all nodes see {run_folder}: share it, or --checkpoint-format local")
    checkpoint = newest_checkpoint(run_folder)
    new_key = state.comet_key
    # NODES: A new run begins with --resume-dir. Later it resumes from its own checkpoints.
    begins_elsewhere = not checkpoint and args.resume_dir and not args.skip_optimizer
    if begins_elsewhere:
        checkpoint = of_this_rank(args.resume_dir)
    if checkpoint:
        say(f"Continuing from {checkpoint}")
        state = RunState(**json.loads((checkpoint / "state.json").read_text()))
    if begins_elsewhere:
        state.comet_key = new_key  # NODES: a new run is a new experiment
    for name, before in state.lasting.items():
        now = lasting.get(name)
        if now != before:
            sys.exit(f"error: {name} was {before}, and is {now}: keep it, or choose another -e")
    return run_folder, checkpoint, state


def newest_checkpoint(run_folder):
    """The newest checkpoint that all ranks have, or None."""
    # NODES 5: A step counts if all ranks have it, since a node may have died before it saved.
    folders = [*run_folder.glob(CHECKPOINT_NAMES)]
    folders += run_folder.glob(f"{RANK_FOLDER}/{CHECKPOINT_NAMES}")
    found = {folder.name: folder for folder in folders}
    names_by_rank = gather(set(found))
    common = set.intersection(*names_by_rank)
    # A run that was killed in its first save begins anew. An empty disk ends the run.
    disk_is_empty = not found and not (run_folder / RANK_FOLDER).exists()
    if any(names_by_rank) and any(gather(disk_is_empty)):
        sys.exit(f"error: the ranks share no checkpoint in {run_folder}: take the same nodes")
    return found[max(common)] if common else None


def of_this_rank(checkpoint):
    """The folder in which this rank finds its part of a checkpoint of any format."""
    checkpoint = Path(checkpoint)
    own = checkpoint.parent / RANK_FOLDER / checkpoint.name
    return own if own.exists() else checkpoint


def sharded_state(model, stateful, full=False):
    """The content of a checkpoint: each rank's shards, under the names of their parameters."""
    # NODES 6: Gather one tensor at a time in rank 0's CPU memory, since no GPU has room for all.
    # The other ranks get no tensors.
    options = state_dict.StateDictOptions(full_state_dict=full, cpu_offload=full)
    weights, moments = state_dict.get_state_dict(model, stateful["optimizer"], options=options)
    return stateful | {"model": weights, "optimizer": moments}


def own_shards(parts):
    """The same, with this rank's shards as plain tensors, which share the memory of the shards."""
    # NODES 7: DCP sees tensors of this rank alone, so it needs no files of other ranks.
    return tree_map_only(DTensor, DTensor.to_local, parts)


def read_parts(checkpoint, parts):
    """Fills the tensors and objects of `parts` from a checkpoint of any format."""
    if checkpoint.parent.name == RANK_FOLDER:
        dcp.load(own_shards(parts), checkpoint_id=checkpoint, no_dist=True)
    else:
        # NODES: DCP reads a rank's shards from whole tensors, too.
        dcp.load(parts, checkpoint_id=checkpoint)


def whole_weights(model):
    """The whole model on rank 0, and nothing on other ranks. All ranks have to call it."""
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = state_dict.get_model_state_dict(model, options=options)
    # FSDP: A tied weight has two names. Transformers saves one of them.
    return {n: x for n, x in weights.items() if n not in model.all_tied_weights_keys}


@contextmanager
def new_folder(folder):
    """Yields a temporary folder, and renames it when it is complete, since runs may be killed."""
    temporary = folder.with_name("incomplete")
    # FSDP: All ranks write into the folder, but only rank 0 makes and renames it.
    # NODES: With `local`, each rank makes and renames the folders inside its own folder.
    is_owner = RANK == 0 or folder.parent.name == RANK_FOLDER
    if is_owner:
        remove(temporary)
        temporary.mkdir(parents=True)  # NODES: also the folder of this rank
    dist.barrier(writer_group())
    yield temporary
    if not is_owner:  # NODES: not RANK > 0, because of `local`
        return
    # safetensors lets only the owner read its files. Give them the permissions of another file.
    for file in temporary.glob("*.safetensors"):
        shutil.copymode(temporary / "tokenizer_config.json", file)
    os.sync()  # all files are on the disk before the folder gets its name
    remove(folder)
    temporary.rename(folder)


def remove(folder):
    """Removes a folder, or a link to a folder on another disk, if it exists."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


# NODES: It copies tensors to CPU memory. Each checkpoint uses the memory of the one before again.
STAGER = DefaultStager(
    StagingOptions(
        use_pinned_memory=torch.cuda.is_available(),  # a GPU copies to pinned memory fast
        use_non_blocking_copy=torch.cuda.is_available(),
        use_shared_memory=False,  # no other process reads it
        use_async_staging=False,  # training goes on after the copy
    )
)
# NODES: A thread writes checkpoints with --async-checkpoint. The list has the one in progress.
THREAD = ThreadPoolExecutor(max_workers=1)
unfinished = []


@cache  # the first call makes the group
def writer_group():
    """All ranks, for messages of the thread that writes, since training sends others meanwhile."""
    return dist.new_group(backend="gloo")


def wait_for_checkpoint():
    """Waits for the checkpoint in progress, and raises its error, if it has failed."""
    while unfinished:
        unfinished.pop().result()


def save_checkpoint(args, run_folder, model, tokenizer, stateful, state):
    """Collects all that an exact resume needs, and writes it, here or in a thread."""
    # NODES 8: One checkpoint at a time, so a killed run loses one checkpoint at most.
    wait_for_checkpoint()
    folder = run_folder / f"step-{state.step:08d}"
    parts = sharded_state(model, stateful, full=args.checkpoint_format == "full")
    for name, part in parts.items():
        if hasattr(part, "state_dict"):  # scheduler and scaler: their numbers, not the objects
            parts[name] = part.state_dict()
    if args.checkpoint_format == "local":
        parts = own_shards(parts)
        folder = run_folder / RANK_FOLDER / folder.name
    texts = {"state.json": json.dumps(asdict(state), indent=2)}
    if RANK == 0:
        texts["metrics.jsonl"] = (run_folder / "metrics.jsonl").read_text()
    if args.async_checkpoint:
        # NODES 9: Copy all that training changes, and train on. A thread writes the copies.
        parts = STAGER.stage(parts)
        writing = THREAD.submit(write_checkpoint, args, folder, parts, texts, model, tokenizer)
        unfinished.append(writing)
    else:
        write_checkpoint(args, folder, parts, texts, model, tokenizer)


def write_checkpoint(args, folder, parts, texts, model, tokenizer):
    """Writes a checkpoint, then removes old checkpoints."""
    if torch.cuda.is_available():
        torch.cuda.set_device(LOCAL_RANK)  # NODES: a new thread begins with GPU 0
    is_local = args.checkpoint_format == "local"
    with new_folder(folder) as incomplete:
        if args.checkpoint_format == "shard":
            # FSDP 11: Each rank saves its shards, because none has room for all shards.
            # dcp.save() returns when all ranks have written.
            dcp.save(parts, checkpoint_id=incomplete, process_group=writer_group())
        elif RANK == 0 or is_local:
            dcp.save(parts, checkpoint_id=incomplete, no_dist=True)  # NODES: without other ranks
        if RANK > 0 and not is_local:
            return  # rank 0 does the rest
        model.config.save_pretrained(incomplete)
        model.generation_config.save_pretrained(incomplete)
        tokenizer.save_pretrained(incomplete)
        for name, text in texts.items():
            (incomplete / name).write_text(text)
    if is_local:
        dist.barrier(writer_group())  # NODES: all ranks have the new checkpoint, so old ones may go
    for old in sorted(folder.parent.glob(CHECKPOINT_NAMES))[: -args.keep_checkpoints]:
        remove(old)


# -- Processes -------------------------------------------------------------------------------------


def join_process_group():
    """Meets the other ranks, and returns the device of this rank."""
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        sys.exit(f"error: start it as torchrun --standalone --nproc-per-node 2 {sys.argv[0]}")
    # DDP: A shell may still have RANK and WORLD_SIZE of an earlier job. Nobody else would come.
    hint = f"RANK is {RANK} of WORLD_SIZE {WORLD_SIZE}, and others are missing. Alone? Unset both."
    waiting = threading.Timer(60, print, [hint], {"file": sys.stderr})
    waiting.daemon = True  # it does not keep a process alive
    waiting.start()
    # DDP: After a restart, torchrun's store still has the keys of dead ranks. So rank 0 draws a new
    # prefix for all keys of this attempt. The others cannot trust an old key to get it, so each
    # writes a random key under "rank N", and rank 0 writes the prefix under this key.
    store, _, _ = next(dist.rendezvous("env://"))
    if RANK == 0:
        prefix = uuid.uuid4().hex
        others = [f"rank {rank}" for rank in range(1, WORLD_SIZE)]
        for other in others:
            store.delete_key(other)  # a dead rank may have asked
        for other in others:
            answer_key = store.get(other).decode()  # waits until the rank has written
            store.set(answer_key, prefix)
    else:
        answer_key = uuid.uuid4().hex
        while not store.check([answer_key]):  # until rank 0 has answered
            store.set(f"rank {RANK}", answer_key)  # again, as rank 0 may delete an early one
            time.sleep(0.1)
        prefix = store.get(answer_key).decode()
    store = dist.PrefixStore(prefix, store)
    # DDP: NCCL moves tensors between GPUs. Gloo moves CPU tensors, without waiting for the GPU.
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(LOCAL_RANK)  # DDP: before the next line, which else uses GPU 0
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    waiting.cancel()
    return torch.device("cuda", LOCAL_RANK) if on_gpu else torch.device("cpu")


def set_time_limit(limit):
    """How long a rank waits for the others, in all process groups but one."""
    patient_group = writer_group()  # NODES: of the thread, in which a rank may write for long
    for group in dist.distributed_c10d._world.pg_map:
        if group is not patient_group:
            dist.distributed_c10d._set_pg_timeout(limit, group)


def gather(value):
    """The values of all ranks, in the order of the ranks. Every rank gets all values."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def compare_ranks(args, state):  # MDS: `state.lasting` has a hash of the index of the shards
    """Another flag, script or text on one node would train wrong silently, so it ends the run."""
    setup = args.as_dict() | state.lasting | {"step of the checkpoint": state.step}
    setup |= {"torch": torch.__version__, "transformers": transformers.__version__}
    setup["script"] = Path(__file__).read_text()
    setup["config"] = AutoConfig.from_pretrained(args.model_name).to_json_string()
    setups = gather(setup)
    differing = [name for name in setup if any(other[name] != setup[name] for other in setups)]
    if differing:
        sys.exit(f"error: nodes differ in {differing}: start all alike, with a shared --save-dir")


def of_all_ranks(metrics):
    """Includes each rank's metrics as `memory/rank0/...`. The plain name gets the largest value."""
    by_rank = gather(metrics)
    result = {name: max(of_rank[name] for of_rank in by_rank) for name in metrics}
    for rank, of_rank in enumerate(by_rank):
        for name, value in of_rank.items():
            result[name.replace("/", f"/rank{rank}/")] = value
    return result


# -- Timer, metrics, logs, small helpers -----------------------------------------------------------


@contextmanager
def timed(phase, times, wait):
    """Adds the milliseconds of a block to `times`. With `wait`, they include the GPU's work."""
    begin = time.perf_counter()
    yield
    if wait:
        torch.accelerator.synchronize()
    times[f"time/{phase}_ms"] += 1e3 * (time.perf_counter() - begin)


def memory_metrics(device):
    """Memory of PyTorch on the GPU in GB (1e9 bytes). Without CUDA, memory of the process."""
    if device.type != "cuda":
        return {"memory/resident_gb": psutil.Process().memory_info().rss / 1e9}
    return {
        "memory/current_allocated_gb": torch.cuda.memory_allocated() / 1e9,
        "memory/peak_allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "memory/current_reserved_gb": torch.cuda.memory_reserved() / 1e9,
        "memory/peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


def describe_run(model, device):
    """Facts about model and machine, which are logged once besides the flags."""
    on_gpu = device.type == "cuda"
    return {
        "world_size": WORLD_SIZE,  # DDP: torchrun decides it, so no flag has it
        "parameters_total": model.num_parameters(),
        "parameters_trainable": model.num_parameters(only_trainable=True),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "device_memory_gb": torch.cuda.mem_get_info(device)[1] / 1e9 if on_gpu else None,
        "torch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "transformers_version": transformers.__version__,
    }


class RunLog:
    """Writes metrics and parameters into the folder of the run, and sends the same to Comet."""

    def __init__(self, args, run_folder, checkpoint, state, facts):
        self.lock = FileLock(run_folder / "lock")
        # NODES: The server of a shared disk frees the lock of a dead node later: NFS after 90 s.
        self.lock.acquire(timeout=120)  # fails if another process trains in this folder
        if checkpoint:
            # A killed run may have left later records. The checkpoint has a copy without them.
            shutil.copy(checkpoint / "metrics.jsonl", run_folder)
        self.file = (run_folder / "metrics.jsonl").open("a" if checkpoint else "w")
        self.comet = start_comet(args, run_folder, state)
        parameters = args.as_dict() | facts
        self.comet.log_parameters(parameters)
        (run_folder / "parameters.json").write_text(json.dumps(parameters, indent=2, default=str))

    def log(self, state, metrics):
        # JSON has no infinity, which the gradient norm may be in fp16.
        metrics = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        record = {"step": state.step, "epoch": state.epoch} | metrics
        print(json.dumps(record), file=self.file, flush=True)
        self.comet.log_metrics(metrics, step=state.step, epoch=state.epoch)


def start_comet(args, run_folder, state):
    """A Comet experiment, which ends with the script. Without key or network, it writes a file."""
    folder = str(run_folder / "comet")
    config = comet_ml.ExperimentConfig(name=args.experiment_name, offline_directory=folder)
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
    logging.getLogger("comet_ml").setLevel(logging.ERROR)  # no long report about the file
    say(f"Comet: offline, `comet upload {folder}/*.zip` sends this run")
    return comet_ml.start(online=False, **options)


def catch_stop_signals():
    """Lets Ctrl-C, `kill`, a closed terminal and Slurm's SIGUSR1 end the run after a step."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` has set SIGHUP to be ignored
            signal.signal(number, remember_signal)


def remember_signal(number, frame):
    received_signals.append(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C stops at once


def say(message):
    """Prints a line above the progress bar."""
    # Ctrl-C also ends `| tee log`. Printing then fails, and must not prevent the last checkpoint.
    with suppress(OSError):
        tqdm.write(message)


# -- Flags -----------------------------------------------------------------------------------------

# Files such as _sysconfigdata.py differ between machines, so the pattern [a-z]* leaves them out.
DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/models/tiny-llama",
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


def parse_args():
    parser = ArgumentParser(exit_on_error=False, usage="%(prog)s [flags], which --help lists")
    add = parser.add_argument
    switch = ActionYesNo(no_prefix="no-")  # --demo and --no-demo
    add("--config", type=Path_fr, help="a YAML file of flags; flags of the command line win")
    add("-e", "--experiment-name", type=str, help="names the run: saves, resumes and logs it")
    add("--comet-project-name", default="distributed-training-demo", help="project at Comet")
    add("--comet-workspace", help="workspace at Comet; by default, the account's own")
    add("-m", "--model-name", default="meta-llama/Llama-3.2-1B", help="Hub id or local folder")
    add("--from-scratch", action=switch, default=False, help="random weights, not pretrained ones")
    # MDS: The rows of a corpus in place of its text.
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="folder or address of MDS shards")
    add("--text-column", default="text", help="the column to train on")
    add("--dataset-subset", help="configuration name on the Hub")
    add("-s", "--seq-length", type=PositiveInt, default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=PositiveInt, default=8, help="samples per forward pass")
    add("--gradient-accumulation-steps", type=PositiveInt, default=1, help="passes per step")
    add("--num-epochs", type=PositiveInt, default=3, help="passes over the dataset")
    add("--max-steps", type=PositiveInt, help="stop after this many optimizer steps")
    add("--lr", type=float, default=3e-5, help="peak learning rate")
    add("--lr-scheduler", default="cosine", help="a name of transformers.get_scheduler")
    add("--lr-scheduler-options", type=dict, help="such as '{num_cycles: 4}'")
    add("--warmup-steps", type=NonNegativeInt, default=0, help="steps until the peak learning rate")
    add("--adam-beta2", type=float, default=0.999, help="from scratch: often 0.95")
    add("--weight-decay", type=float, default=0.01, help="for matrices only")
    add("--max-grad-norm", type=NonNegativeFloat, default=1.0, help="clips gradients; 0: not")
    add("--dtype", choices=list(DTYPES), help="compute precision; bf16 on GPUs, fp32 on CPUs")
    add("--activation-checkpointing", action=switch, default=False, help="less memory, slower")
    add("--chunked-loss", action=switch, default=False, help="less memory for large vocabularies")
    add("--attention", help="sdpa, flash_attention_2 or another name of Transformers")
    add("--compile", action=switch, default=torch.cuda.is_available(), help="layers; on for CUDA")
    add("--eval-freq", type=NonNegativeInt, default=500, help="steps between evaluations; 0: none")
    add("--log-freq", type=PositiveInt, default=10, help="steps between logged metrics")
    add("--ckpt-freq", type=PositiveInt, default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=PositiveInt, default=2, help="older ones are removed")
    add("--save-dir", default=f"{REPOSITORY}/outputs", help="the folder of all runs")
    add("--seed", type=NonNegativeInt, default=0, help="seed of random weights and sample order")
    # DDP: No --device, because torchrun assigns the devices.
    # MDS: The order of the rows, the cache of an address, and the held-out text.
    add("--shuffle-window", type=PositiveInt, default=1024, help="rows that are shuffled together")
    add("--local-cache", type=str, default="/tmp/mds", help="folder for downloaded shards")
    add("--cache-limit", type=str, default="100gb", help="disk space of each node for the shards")
    add("--eval-dataset", help="held-out documents")
    add("--eval-dataset-subset", help="configuration name on the Hub")
    add("--eval-documents", type=PositiveInt, default=1000, help="number of held-out documents")
    # FSDP: These two flags choose between speed and memory.
    add("--cpu-offload", action=switch, default=False, help="shards and AdamW state on the CPU")
    add("--reshard-after-forward", action=switch, default=True, help="less memory, more traffic")
    # NODES: The number of ranks per copy, the global batch, checkpoints, and the start of a run.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of a node
    add("--shard-size", type=PositiveInt, default=ranks, help="ranks that share a model")
    add("--global-batch-size", type=PositiveInt, help="in place of --gradient-accumulation-steps")
    formats = ["shard", "full", "local"]
    add("--checkpoint-format", choices=formats, default="shard", help="who writes which files")
    add("--async-checkpoint", action=switch, default=False, help="train on while files are written")
    add("--resume-dir", type=str, help="checkpoint of any run, where this run begins")
    add("--skip-optimizer", action=switch, default=False, help="only weights from --resume-dir")
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    # Flags win over the file of --config, this file over --demo, and --demo over the defaults.
    # Both --config and --demo change defaults of the parser, so parse again after each.
    if config := parser.parse_args().config:
        parser.default_config_files = [escape(str(config))]  # the parser reads names as patterns
    if parser.parse_args().demo:
        parser.set_defaults(DEMO)
    args = parser.parse_args().clone(with_meta=False)  # the flags alone
    name = args.experiment_name
    if name is not None and (name in ("", ".", "..") or "/" in name):
        parser.error("--experiment-name must be the name of a folder, without slashes")
    if WORLD_SIZE % args.shard_size:
        parser.error(f"--shard-size {args.shard_size} does not divide the {WORLD_SIZE} ranks")
    if args.resume_dir and not args.skip_optimizer and not name:
        parser.error("--resume-dir continues a run: name it with -e, or give --skip-optimizer")
    if args.global_batch_size:
        # NODES 10: Fewer ranks make more passes, so the global batch does not depend on the nodes.
        size = args.batch_size * WORLD_SIZE  # samples per pass, of all ranks
        if args.global_batch_size % size:
            parser.error(f"--global-batch-size must be a multiple of ranks × -b: {size}")
        args.gradient_accumulation_steps = args.global_batch_size // size
    return args


if __name__ == "__main__":
    try:
        main()
    except (OSError, ImportError, ArgumentError) as error:  # a missing file or package, or a flag
        sys.exit(f"error: {error}")
    except datasets.exceptions.DatasetGenerationError as error:  # the cause names the file
        sys.exit(f"error: {error.__cause__}")
    except torch.OutOfMemoryError:
        sys.exit("error: out of GPU memory: try --activation-checkpointing, then a lower -b")
    finally:
        # DDP: Print an error once per node. sys.exit() prints after this block, so the other ranks
        # sleep first. Local rank 0 prints and ends, and then torchrun ends those that sleep.
        if LOCAL_RANK > 0 and sys.exc_info()[0] and not received_signals:
            time.sleep(5)
