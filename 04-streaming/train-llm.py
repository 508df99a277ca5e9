"""Chapter 4: a corpus larger than the disk, streamed while the model trains.

No training text is downloaded or tokenized beforehand. A thread reads documents from files or the
Hub, tokenizes them, packs them into rows and shuffles the rows. Meanwhile, the devices train on
earlier rows. A checkpoint holds the place of each rank in its stream. Comments with STREAM 1 to 11
mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e c4-stream --from-scratch \
        -d allenai/c4 --dataset-subset en --max-steps 10000     # C4 is never on the disk
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
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from glob import escape, glob
from itertools import chain, islice
from pathlib import Path

# Libraries read these variables when they are imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # CPU threads that wait leave their core to others
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # this script logs the metrics itself
os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")  # one retry: 20 s if offline
import comet_ml
import datasets.distributed
import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from filelock import FileLock
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, Path_fr, PositiveInt
from torch.distributed.checkpoint import state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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
    run_folder, checkpoint, state = open_run(args)
    # STREAM: Each rank reads and tokenizes its own text, so no rank prepares text for others.
    stream = open_stream(args, tokenizer, state)
    eval_rows = load_eval_rows(args, tokenizer) if args.eval_freq else []
    compare_ranks(args, state)  # DDP: all ranks must train alike
    # FSDP 1: Shards stay in fp32, and FSDP gathers them in bf16. So build_model() sets no autocast.
    # Norms, softmax and the loss of Transformers convert to fp32 themselves.
    model = build_model(args, device)
    groups = parameter_groups(model, args)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)
    # STREAM 1: The length of a stream is unknown, so --max-steps gives the schedule its last step.
    total_steps = args.max_steps
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
        dcp.load(saved, checkpoint_id=checkpoint)  # loads weights, scheduler and scaler in place
        # The moments are only in `saved` so far, so hand them to the optimizer.
        state_dict.set_optimizer_state_dict(model, optimizer, saved["optimizer"])
        # The saved learning rate belongs to the old total_steps, which may have changed. So let the
        # scheduler take its last step again.
        scheduler.last_epoch -= 1  # PyTorch's name for the number of steps
        scheduler.step()
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save, and rank 0 logs
        facts = describe_run(model, device)
        facts["global_batch"] = global_batch
        # STREAM: Nobody knows the number of samples.
        run_log = RunLog(args, run_folder, checkpoint, state, facts)
        run_log.comet.set_model_graph(str(model))  # the architecture as text

    # The training loop.
    loss_sum = torch.zeros((), device=device)
    token_sum = 0  # STREAM: of all ranks since the last logged step, without padding
    rows_per_step = args.batch_size * accumulation  # STREAM: of each rank
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
        # STREAM 2: Read the whole step first, because its loss is a mean over all of its labels.
        rows = []
        with timed("data", times, wait):
            for _ in range(rows_per_step):
                row, place = next(stream)
                rows.append(row)
        if max(row.max() for row in rows) >= model.config.vocab_size:
            sys.exit(f"error: a token is outside the vocabulary of {args.model_name}")
        # Padding has no label, and the first token of a row is the label of no other token.
        labels_here = sum(np.count_nonzero(row[1:] != PADDING) for row in rows)
        label_count = sum(gather(labels_here))
        token_sum += label_count + global_batch
        # STREAM 3: Divide by the labels per rank, because FSDP averages over the ranks.
        # A Python number: FSDP rounds a tensor to bf16, and compiled losses take no NumPy number.
        # At least 1, because a step may consist of rows with a single token, whose loss is 0.
        labels_per_rank = float(max(label_count, 1) / WORLD_SIZE)
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # STREAM: The stream has chosen the rows. This number only seeds the dropout masks.
            first = state.samples + (micro_step * WORLD_SIZE + RANK) * args.batch_size
            torch.manual_seed(args.seed + first)  # the same dropout masks after a resume
            # FSDP: With --reshard-after-forward, average gradients and free whole weights after
            # each micro-batch, which takes less memory. Without it, only after the last one.
            communicate = args.reshard_after_forward or micro_step == accumulation - 1
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            with timed("data", times, wait):
                begin = micro_step * args.batch_size
                input_ids = to_device(rows[begin : begin + args.batch_size], device)
            with timed("forward", times, wait):
                # STREAM 4: The label of padding is -100, and this label has no loss.
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
        state.epoch = place["pass"]  # STREAM: whole passes; a fraction would need the length
        progress.update()

        if log_now:
            # `.item()` waits until the GPU has computed the number, so not every step calls it.
            # DDP 9: Average the loss over ranks, because each rank has seen its own samples only.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            mean_loss = loss_sum.item() / (step - logged_step)
            seconds = (time.perf_counter() - logged_time) / (step - logged_step)
            # STREAM: The speed counts tokens without padding.
            tokens_per_step = token_sum / (step - logged_step)
            tokens_per_second = tokens_per_step / seconds
            metrics = {
                "loss": mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                "tokens_per_second": tokens_per_second,
                # STREAM: the share of padding in the rows
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
            token_sum = 0  # STREAM: together with loss_sum
            logged_step = step
            logged_time = time.perf_counter()
        if eval_now:
            eval_loss = evaluate(model, eval_rows, args, device)  # STREAM: rows
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if run_folder and save_now:
            # STREAM 5: A checkpoint has the places of all ranks, since ranks read other documents.
            state.places = gather(place)
            save_checkpoint(args, run_folder, model, tokenizer, stateful, state)

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
# STREAM: The place at the beginning of a stream.
START = {"pass": 0, "position": None, "rest": [], "rows": 0}


def open_stream(args, tokenizer, state):
    """The rows of this rank from its place on, without end. Each row comes with its place."""
    documents = load_documents(args.dataset_name, args.dataset_subset)["train"]
    check_column(documents, args)
    if args.max_documents:
        # `take` keeps the files, so each rank would take the first documents of its own files.
        # A generator counts as a single file, whose documents the ranks share.
        first = documents.take(args.max_documents)
        documents = datasets.IterableDataset.from_generator(first.__iter__)
    if documents.num_shards % WORLD_SIZE:
        say(f"{documents.num_shards} files for {WORLD_SIZE} ranks: each rank reads all of them")
    documents = documents.shuffle(seed=args.seed, buffer_size=1)  # files, no documents
    # STREAM 6: Each rank gets other documents, because equal documents give equal gradients.
    # The ranks share out the files. If that is impossible, each rank reads all files, and keeps
    # every WORLD_SIZE-th document.
    documents = datasets.distributed.split_dataset_by_node(documents, RANK, WORLD_SIZE)
    place = state.places[RANK]
    stream = read_ahead(read_windows(documents, tokenizer, place, args))
    # STREAM 7: A resumed run makes its window again, and passes over the rows that it has used.
    used = state.samples // WORLD_SIZE - place["rows"]
    return islice(stream, used, None)


def read_ahead(windows):
    """Yields each row with the place before its window."""
    thread = ThreadPoolExecutor(1)
    # STREAM 8: A thread is a window ahead, so that the devices need not wait for text.
    reading = thread.submit(next, windows)
    while True:
        rows, place = reading.result()  # waits for the thread, and raises its error
        reading = thread.submit(next, windows)
        for row in rows:
            yield row, place


def read_windows(documents, tokenizer, place, args):
    """Yields windows of shuffled rows, each with the place before the window, for all passes."""
    while True:
        # Each pass has another order of the files. It begins with the first file, or at a position.
        documents.set_epoch(place["pass"])
        if place["position"]:
            documents.load_state_dict(place["position"])
        opened = iter(documents)
        pass_is_over = False
        while not pass_is_over:
            rows = []
            rest = place["rest"]
            while len(rows) < args.shuffle_window and not pass_is_over:
                texts = [document[args.text_column] for document in islice(opened, 32)]
                pass_is_over = len(texts) < 32
                more, rest = to_rows(texts, tokenizer, rest, args.packing, args.seq_length)
                rows += more
            if pass_is_over and not (place["position"] or rows or rest):
                sys.exit(f"error: no text for rank {RANK}: give more files, or use fewer ranks")
            # STREAM 9: Shuffle within a window, and keep the place before it in checkpoints.
            # A buffer of shuffled documents would lose some of them, and read others twice.
            np.random.RandomState((args.seed, place["rows"])).shuffle(rows)
            yield rows, place
            place = {
                "pass": place["pass"] + pass_is_over,
                "position": None if pass_is_over else documents.state_dict(),
                "rest": rest,
                "rows": place["rows"] + len(rows),
            }


def to_rows(texts, tokenizer, rest, packing, length):
    """Rows of `length` token ids with padding, and the tokens that are left for the next row.

    pack: documents end to end, after `rest`. overflow: each document in rows of its own. trunc: one
    row for each document, with its beginning.
    """
    documents = tokenize({"text": texts}, tokenizer, "text")["input_ids"]
    if packing == "pack":
        documents = [list(chain(rest, *documents))]  # a single long document
    if packing == "trunc":
        documents = [ids[:length] for ids in documents]
    rows = [ids[i : i + length] for ids in documents for i in range(0, len(ids), length)]
    # STREAM 10: Packed rows are full, and the tokens that are left begin the next row.
    rest = []
    if packing == "pack" and rows and len(rows[-1]) < length:
        rest = rows.pop()
    return [np.array(row + [PADDING] * (length - len(row)), np.int32) for row in rows], rest


def load_eval_rows(args, tokenizer):
    """The first documents of the held-out split, each in rows of its own."""
    # STREAM: The last 1 % cannot be held out, because the length of a stream is unknown.
    name = args.eval_dataset or args.dataset_name
    subset = args.eval_dataset_subset if args.eval_dataset else args.dataset_subset
    splits = load_documents(name, subset)
    documents = splits.get("validation") or splits.get("test")
    if args.eval_dataset and not documents:
        documents = splits["train"]
    if not documents:
        sys.exit("error: no documents to evaluate on: give --eval-dataset, or --eval-freq 0")
    check_column(documents, args)
    texts = [document[args.text_column] for document in documents.take(args.eval_documents)]
    rows, _ = to_rows(texts, tokenizer, [], "overflow", args.seq_length)
    say(f"{len(texts):,} documents held out, in {len(rows):,} rows")
    return rows


def load_documents(name, subset):
    """The splits of local files, or of a dataset on the Hub: `train`, and maybe held-out ones."""
    name = os.path.expanduser(name)
    file_format = FORMATS.get(Path(name.removesuffix(".gz")).suffix)
    is_local = file_format or "*" in name or os.path.exists(name)
    if not is_local:
        # STREAM 11: Open each file when the rank needs it, so that the corpus may exceed the disk.
        return datasets.load_dataset(name, subset, streaming=True)
    if "://" in name and file_format != "text":
        # STREAM: `datasets` reads from servers and buckets, too, and expands patterns.
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
        # STREAM: A rank reads some of the files, and no file before it needs it.
        return datasets.IterableDataset.from_generator(read_text, gen_kwargs={"files": files})
    # STREAM: `datasets` reads a name as a pattern, so escape brackets.
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
        # STREAM: Nobody counts undecoded characters, because the end of the text may be far.


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
    batch = torch.from_numpy(np.stack(rows))  # STREAM: the rows are arrays already
    if device.type == "cuda":
        batch = batch.pin_memory()  # the GPU copies from pinned memory, while Python goes on
    return batch.to(device, non_blocking=batch.is_pinned()).long()  # int64, as the loss wants it


@torch.no_grad()
def evaluate(model, rows, args, device):  # STREAM: rows with padding
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
        # STREAM: The sum over labels (divided by 1), because rows have different numbers of labels.
        options = {"use_cache": False, "num_items_in_batch": 1}
        loss = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options).loss
        loss_sum += loss if batch else 0
    model.train()  # dropout on again
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    label_count = sum(np.count_nonzero(row[1:] != PADDING) for row in rows)  # STREAM: of all ranks
    return loss_sum.item() / label_count


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these flags. Other values would make it another training.
LASTING = ["model_name", "from_scratch", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["text_column", "seed", "lr", "lr_scheduler", "lr_scheduler_options", "warmup_steps"]
LASTING += ["adam_beta2", "weight_decay", "max_grad_norm"]
LASTING += ["packing", "shuffle_window", "max_documents"]  # STREAM: they change the rows

CHECKPOINT_NAMES = "step-????????"  # eight digits, so the names sort by step


@dataclass
class RunState:
    """The position of a run. Every checkpoint stores it as `state.json`."""

    lasting: dict  # STREAM: flags, and the number of ranks, which must not change
    comet_key: str  # the id of its Comet experiment
    global_batch: int | None = None  # of the last step
    step: int = 0  # optimizer steps done
    samples: int = 0  # samples read, over all epochs
    epoch: float = 0.0
    places: tuple = (START,) * WORLD_SIZE  # STREAM: of each rank in its stream


def open_run(args):
    """The folder of the run, its newest checkpoint, and the state: new, or of the checkpoint."""
    # STREAM: The number of ranks, too, because each rank goes on from its own place.
    lasting = {name: getattr(args, name) for name in LASTING} | {"world_size": WORLD_SIZE}
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
    if not is_shared:
        sys.exit(f"error: not all nodes see {run_folder}: --save-dir must be on a shared disk")
    checkpoint = max(run_folder.glob(CHECKPOINT_NAMES), default=None)
    if checkpoint:
        say(f"Continuing from {checkpoint}")
        state = RunState(**json.loads((checkpoint / "state.json").read_text()))
    for name, before in state.lasting.items():
        now = lasting.get(name)
        if now != before:
            sys.exit(f"error: {name} was {before}, and is {now}: keep it, or choose another -e")
    return run_folder, checkpoint, state


def sharded_state(model, stateful):
    """The content of a checkpoint: each rank's shards, under the names of their parameters."""
    weights, moments = state_dict.get_state_dict(model, stateful["optimizer"])
    return stateful | {"model": weights, "optimizer": moments}


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
    if RANK == 0:
        remove(temporary)
        temporary.mkdir()
    dist.barrier()
    yield temporary
    if RANK > 0:
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


def save_checkpoint(args, run_folder, model, tokenizer, stateful, state):
    """Writes all that an exact resume needs, then removes old checkpoints."""
    with new_folder(run_folder / f"step-{state.step:08d}") as folder:
        # FSDP 11: Each rank saves its shards, because none has room for all shards.
        # dcp.save() returns when all ranks have written.
        dcp.save(sharded_state(model, stateful), checkpoint_id=folder)
        if RANK > 0:
            return  # rank 0 does the rest
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "state.json").write_text(json.dumps(asdict(state), indent=2))
        shutil.copy(run_folder / "metrics.jsonl", folder)
    for old in sorted(run_folder.glob(CHECKPOINT_NAMES))[: -args.keep_checkpoints]:
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


def gather(value):
    """The values of all ranks, in the order of the ranks. Every rank gets all values."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def compare_ranks(args, state):  # STREAM: each rank has its own tokens
    """Another flag, script or text on one node would train wrong silently, so it ends the run."""
    setup = args.as_dict() | state.lasting | {"step of the checkpoint": state.step}
    setup |= {"torch": torch.__version__, "transformers": transformers.__version__}
    setup["script"] = Path(__file__).read_text()
    setup["config"] = AutoConfig.from_pretrained(args.model_name).to_json_string()
    # STREAM: The first document shows whether the nodes have the same files.
    documents = load_documents(args.dataset_name, args.dataset_subset)["train"]
    setup["first document"] = next(iter(documents), None)
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
        self.lock.acquire(timeout=0)  # fails if another process trains in this folder
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
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="Hub id, file or pattern")
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
    # STREAM: The documents to read, and how they become rows.
    add("--packing", choices=["pack", "overflow", "trunc"], default="pack", help="text to rows")
    add("--shuffle-window", type=PositiveInt, default=1024, help="rows that are shuffled together")
    add("--max-documents", type=PositiveInt, help="read only this many, over all ranks")
    add("--eval-dataset", help="held-out documents; without it, the validation split of -d")
    add("--eval-dataset-subset", help="configuration name on the Hub")
    add("--eval-documents", type=PositiveInt, default=1000, help="number of held-out documents")
    # FSDP: These two flags choose between speed and memory.
    add("--cpu-offload", action=switch, default=False, help="shards and AdamW state on the CPU")
    add("--reshard-after-forward", action=switch, default=True, help="less memory, more traffic")
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    # Flags win over the file of --config, this file over --demo, and --demo over the defaults.
    # Both --config and --demo change defaults of the parser, so parse again after each.
    if config := parser.parse_args().config:
        parser.default_config_files = [escape(str(config))]  # the parser reads names as patterns
    if parser.parse_args().demo:
        parser.set_defaults(DEMO)
    args = parser.parse_args().clone(with_meta=False)  # the flags alone
    if not args.max_steps:  # STREAM: --num-epochs cannot end the run
        parser.error("a stream has no known length: give --max-steps for the schedule")
    name = args.experiment_name
    if name is not None and (name in ("", ".", "..") or "/" in name):
        parser.error("--experiment-name must be the name of a folder, without slashes")
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
