"""Chapter 12: mixtures of experts, with the experts on different devices (expert parallelism).

The devices of a group share the experts of each layer. Tokens travel to their experts, and the
results travel back, so no device gathers all experts of a layer. All other weights are sharded over
all devices, as in chapter 3. Comments with EP 1 to 10 mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e olmoe -m allenai/OLMoE-1B-7B-0924
    torchrun --nnodes 2 --nproc-per-node gpu --rdzv-id olmoe --rdzv-backend c10d \
        --rdzv-endpoint node-0:29400 train-llm.py -e olmoe -m allenai/OLMoE-1B-7B-0924
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from glob import escape, glob
from itertools import pairwise
from pathlib import Path

# Libraries read these variables when they are imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # CPU threads that wait leave their core to others
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # this script logs the metrics itself
os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")  # one retry: 20 s if offline
import comet_ml
import datasets
import numpy as np
import psutil
import pyarrow.compute
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from filelock import FileLock
from jsonargparse import ActionYesNo, ArgumentError, ArgumentParser
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, Path_fr, PositiveInt
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
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
    # DDP: One rank of each node tokenizes. The others wait, and then read its cache. The usual
    # group of all ranks waits for 10 to 30 minutes only, so make one that waits for a day.
    patient_group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    if LOCAL_RANK > 0:
        dist.barrier(patient_group)  # until local rank 0 of each node calls it, below
    train_tokens, eval_tokens = load_tokens(args, tokenizer)  # Arrow arrays
    if LOCAL_RANK == 0:
        dist.barrier(patient_group)  # the same barrier: now the others go on
    train_samples = len(train_tokens) // args.seq_length
    if train_samples < global_batch or len(eval_tokens) < args.seq_length:
        sys.exit("error: the dataset has too little text: lower --batch-size or --seq-length")
    say(f"Training on {train_samples:,} samples; {len(eval_tokens):,} tokens are held out")
    order = sample_order(args, train_samples)  # of all epochs
    run_folder, checkpoint, state = open_run(args, train_samples)
    compare_ranks(args, state, train_tokens)  # DDP: all ranks must train alike
    # FSDP 1: Shards stay in fp32, and FSDP gathers them in bf16. So build_model() sets no autocast.
    # Norms, softmax and the loss of Transformers convert to fp32 themselves.
    model = build_model(args, device)
    # The embedding has `vocab_size` rows. A GPU would not say which token lacks a row.
    largest = max(pyarrow.compute.max(tokens).as_py() for tokens in (train_tokens, eval_tokens))
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
        facts["dataset_samples"] = train_samples
        facts["dataset_tokens"] = len(train_tokens)
        run_log = RunLog(args, run_folder, checkpoint, state, facts)
        run_log.comet.set_model_graph(str(model))  # the architecture as text

    # The training loop.
    loss_sum = torch.zeros((), device=device)
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
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # DDP 6: The ranks read batches in turn. The same batch on all would be wasted work.
            first = state.samples + (micro_step * WORLD_SIZE + RANK) * args.batch_size
            torch.manual_seed(args.seed + first)  # the same dropout masks after a resume
            # FSDP: With --reshard-after-forward, average gradients and free whole weights after
            # each micro-batch, which takes less memory. Without it, only after the last one.
            communicate = args.reshard_after_forward or micro_step == accumulation - 1
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            with timed("data", times, wait):
                indices = order[first : first + args.batch_size]
                input_ids = read_batch(train_tokens, indices, args, device)
            with timed("forward", times, wait):
                # The model shifts the labels itself, so that each token predicts the next one.
                # A cache of keys and values serves generation. In training it only takes memory.
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                # After this division, the losses (and their gradients) of all micro-batches add up
                # to the mean over the global batch.
                loss = loss / accumulation
            with timed("backward", times, wait):
                scaler.scale(loss).backward()
            loss_sum += loss.detach()  # the number alone, without its graph
        with timed("update", times, wait):
            # Undo the scaling of fp16. Then clip the gradient of the whole step, so that no bad
            # batch spoils the weights.
            scaler.unscale_(optimizer)
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            # FSDP 3: Each rank has the norm of its shards, and full_tensor() joins these parts.
            # So all ranks must call it.
            # EP: Experts are on another mesh than other weights. All need one common norm.
            grad_norm = clip_gradients(model, max_norm)
            learning_rate = scheduler.get_last_lr()[0]  # of this step, for the log
            scaler.step(optimizer)  # the same as optimizer.step(), except in fp16
            scaler.update()  # a lower scale after infinite gradients, and later a higher one
            scheduler.step()  # once per optimizer step, not per micro-batch
            optimizer.zero_grad()  # because backward() adds to the gradients
        state.step = step
        state.samples += global_batch
        state.epoch = state.samples / train_samples
        progress.update()

        if log_now:
            # `.item()` waits until the GPU has computed the number, so not every step calls it.
            # DDP 9: Average the loss over ranks, because each rank has seen its own samples only.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            mean_loss = loss_sum.item() / (step - logged_step)
            seconds = (time.perf_counter() - logged_time) / (step - logged_step)
            tokens_per_second = global_batch * args.seq_length / seconds
            metrics = {
                "loss": mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                "tokens_per_second": tokens_per_second,
                "time/total_ms": 1e3 * seconds,  # mean per step since the last log
                **times,  # phases of this step alone
                **of_all_ranks(memory_metrics(device)),  # DDP: the fullest device limits -b
                **load_metrics(model),  # EP: the busiest expert and the busiest rank
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
            logged_step = step
            logged_time = time.perf_counter()
        if eval_now:
            eval_loss = evaluate(model, eval_tokens, args, device)
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if run_folder and save_now:
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


def expert_parallel(experts, tokens, chosen, shares):
    """Sends tokens to the ranks of their experts, and adds up the results that come back.

    `tokens` is (tokens, hidden size). For each token, `chosen` has the numbers of its experts, and
    `shares` has their weights in the sum: both are (tokens, experts per token).
    """
    ranks = experts.group.size()
    per_token = chosen.shape[1]
    # EP 1: Sort copies of the tokens by expert. Then the copies for each rank lie side by side.
    # Before the sort, copy number i is a copy of token i // per_token.
    chosen = chosen.flatten()
    order = chosen.argsort(stable=True)
    copies = tokens[order // per_token]
    # EP 2: First tell each rank how many copies will come for each of its experts.
    # EP: Count how often each expert was chosen.
    counts = chosen.new_zeros(experts.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    arriving_counts = torch.empty_like(counts)
    dist.all_to_all_single(arriving_counts, counts, group=experts.group)
    # Python needs the sizes of the messages, so here Python waits until the GPU has counted.
    # `counts` has a row for each rank that receives, `arriving_counts` for each rank that sends.
    both = torch.stack([counts, arriving_counts]).view(2, ranks, -1)
    send_counts, receive_counts = both.sum(2).tolist()
    if experts.training:  # for the log
        experts.sent_tokens += counts
        experts.received_tokens += arriving_counts.sum()
    # EP 3: Send the copies. Autograd sends their gradients the other way in the backward pass.
    # This function takes the sizes of what arrives first, and then the sizes of what leaves.
    arrived = all_to_all_single_autograd(copies, receive_counts, send_counts, experts.group)
    # The expert of each copy. The copies of each sender are sorted by expert, so the list of this
    # rank's experts is repeated for each sender, and each expert as often as its count says.
    experts_per_rank = experts.num_experts // ranks
    numbers = torch.arange(experts_per_rank, device=tokens.device).repeat(ranks)
    # With output_size, Python need not wait for the sum of the counts.
    numbers = numbers.repeat_interleave(arriving_counts, output_size=len(arrived))
    # The shares stay on the rank of the token, so here each result gets the share 1.
    ones = arrived.new_ones(len(arrived), 1)
    compute = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    results = compute(ExpertsOfRank(experts), arrived, numbers.unsqueeze(1), ones)
    # EP 4: Send the results back, put them into the old order, and add them up for each token.
    # Result i belongs to place order[i], so order.argsort() lists the results of place 0, 1, 2, ...
    returned = all_to_all_single_autograd(results, send_counts, receive_counts, experts.group)
    results = returned[order.argsort()].view(-1, per_token, tokens.shape[1])
    results = results * shares[..., None]
    return results.sum(1).to(tokens.dtype)


class ExpertsOfRank:
    """Gives Transformers the experts of this rank, with plain tensors in place of DTensors."""

    def __init__(self, experts):
        self.experts = experts
        self.num_experts = experts.num_experts // experts.group.size()

    def __getattr__(self, name):
        value = getattr(self.experts, name)
        return value.to_local() if isinstance(value, DTensor) else value


def experts_of(module):
    """The experts of each layer in this module, such as `model.layers.0.mlp.experts`."""
    return [m for name, m in module.named_modules() if name.split(".")[-1] == "experts"]


def load_metrics(model):
    """The tokens of the busiest expert and rank since the last call, divided by the mean.

    Each layer has such a ratio. The metric is the largest ratio.
    """
    layers = experts_of(model)
    of_experts = torch.stack([experts.sent_tokens for experts in layers])  # (layers, experts)
    dist.all_reduce(of_experts)
    of_this_rank = torch.stack([experts.received_tokens for experts in layers])
    of_ranks = torch.tensor(gather(of_this_rank.tolist())).T  # (layers, ranks)
    for experts in layers:
        experts.sent_tokens.zero_()
        experts.received_tokens.zero_()
    metrics = {}
    for name, load in {"expert": of_experts.float(), "rank": of_ranks.float()}.items():
        of_layers = load.amax(1) / load.mean(1)
        metrics[f"load/{name}"] = of_layers.max().item()
    return metrics


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
    # EP: Transformers calls the registered function for each layer, in place of its own.
    ALL_EXPERTS_FUNCTIONS.register("expert_parallel", expert_parallel)
    model.set_experts_implementation("expert_parallel")
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
    # EP 5: Gather the next layer early, because Python waits for sizes in each layer.
    # By default, FSDP begins to gather a layer when Python calls the layer, after that wait.
    # When Python calls a layer, gather its experts, the next layer and the experts of that layer.
    for layer, following in pairwise(layers):
        units = [*experts_of(layer), following, *experts_of(following)]
        layer.set_modules_to_forward_prefetch(units)
    attention = model.config._attn_implementation
    say(f"Attention {attention}, compute precision {args.dtype}, {len(layers)} decoder layers")
    if args.activation_checkpointing:
        # A layer keeps only its input. The backward pass computes the rest a second time.
        model.activation_checkpointing_enable()  # its older name: gradient_checkpointing_enable
    if args.compile:
        # EP: Compile the parts of each layer, except experts: their messages differ in size in each
        # pass. Layers of one kind share compiled code.
        for layer in layers:
            for part in layer.children():
                has_experts = len(experts_of(part)) > 0
                if not has_experts:
                    part.compile()
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
    shard_experts(model, args, device, policy)  # EP: before the layers that contain them
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


def shard_experts(model, args, device, policy):
    """Gives each rank of a group its own experts of each layer."""
    layers = experts_of(model)
    size = args.expert_parallel
    uneven = [e.num_experts for e in layers if e.num_experts % size] or WORLD_SIZE % size
    if not layers or uneven:
        sys.exit(f"error: --expert-parallel {size} must divide the ranks and experts of the model")
    # EP 6: Ranks form a table. The ranks of a row share the experts of each layer.
    groups = WORLD_SIZE // size
    mesh = init_device_mesh(device.type, (groups, size), mesh_dim_names=("groups", "experts"))
    # By default, FSDP casts all inputs of a unit. The shares of some families stay in fp32.
    mixed_precision = MixedPrecisionPolicy(
        DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    policy = policy | {"mp_policy": mixed_precision, "mesh": mesh["groups"]}
    policy["shard_placement_fn"] = lambda part: even_shards(part.to_local().shape, groups)
    for experts in layers:
        experts.group = mesh.get_group("experts")
        experts.sent_tokens = torch.zeros(experts.num_experts, dtype=torch.long, device=device)
        experts.received_tokens = torch.zeros((), dtype=torch.long, device=device)
        # EP 7: Each weight is (experts, ...), so each rank keeps the part that is for its experts.
        # src_data_rank=None: send nothing, because meta tensors have no numbers.
        for name, weight in list(experts.named_parameters()):
            part = distribute_tensor(weight, mesh["experts"], [Shard(0)], src_data_rank=None)
            setattr(experts, name, torch.nn.Parameter(part))
        # EP 8: The ranks of a column have the same experts, and FSDP shards them in the column.
        fully_shard(experts, reshard_after_forward=args.reshard_after_forward, **policy)
        # EP 9: Divide by all ranks, because an expert adds up gradients for all ranks of its row.
        experts.set_gradient_divide_factor(WORLD_SIZE)
        # With several groups, first add and then divide, because gloo cannot do both at once. With
        # one group, there is nothing to add, and PyTorch 2.13 would divide twice.
        experts.set_force_sum_reduction_for_comms(groups > 1)


def even_shards(shape, ranks):
    """The dimension that FSDP cuts: the first one that gives all ranks equal parts.

    By default, FSDP cuts dimension 0, the experts. With fewer experts than ranks, some ranks would
    have nothing.
    """
    for dimension, size in enumerate(shape):
        if size % ranks == 0:
            return Shard(dimension)
    return Shard(0)  # the only dimension that FSDP cuts into uneven parts


def clip_gradients(model, max_norm):
    """Scales all gradients down if their common norm is above `max_norm`. Returns the norm."""
    # EP 10: Compute a norm per mesh, then join the norms: no operation takes two meshes at once.
    parameters_of_mesh = defaultdict(list)
    for parameter in model.parameters():
        parameters_of_mesh[parameter.device_mesh].append(parameter)
    norms = []
    for parameters in parameters_of_mesh.values():
        gradients = [parameter.grad for parameter in parameters]
        norms.append(torch.nn.utils.get_total_norm(gradients).full_tensor())
    norm = torch.stack(norms).norm()
    for parameters in parameters_of_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


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
TEXT_TYPES = (datasets.Value("string"), datasets.Value("large_string"))
# The names of files that are held out, such as chats_dev.csv or validation.jsonl
HELD_OUT = re.compile(r"(?<![a-z])(validation|valid|val|dev|eval|test)(?![a-z])", re.IGNORECASE)
TEXT_PIECE = 250_000  # characters of a text file that are read at once, to save memory


def load_tokens(args, tokenizer):
    """The tokens to train on, and the held-out ones: a split of the dataset, or its last 1 %.

    All documents are joined, and cut into samples of `seq_length` tokens. So nothing is padding.
    """
    splits = load_documents(args)
    train_tokens = tokenize_split(splits["train"], tokenizer, args.text_column)
    eval_split = splits.get("validation") or splits.get("test")
    if eval_split:
        return train_tokens, tokenize_split(eval_split, tokenizer, args.text_column)
    samples = len(train_tokens) // args.seq_length
    held_out = max(1, samples // 100)
    end = max(0, samples - held_out) * args.seq_length
    return train_tokens.slice(length=end), train_tokens.slice(offset=end)


def load_documents(args):
    """The splits of local files, or of a dataset on the Hub: `train`, and maybe held-out ones."""
    name = os.path.expanduser(args.dataset_name)
    file_format = FORMATS.get(Path(name.removesuffix(".gz")).suffix)
    is_local = file_format or "*" in name or os.path.exists(name)
    if not is_local:
        name, _, split = name.partition(":")  # a name on the Hub: NAME, or NAME:SPLIT
        split = split or "train"
        splits = datasets.load_dataset(name, args.dataset_subset)
        if split not in splits:
            sys.exit(f"error: choose one of the splits {[*splits]} with -d {name}:SPLIT")
        splits["train"] = splits.pop(split)  # call the chosen split "train"
        return splits
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
    return {split: read_files(file_format, names, args) for split, names in splits.items()}


def read_files(file_format, files, args):
    """The documents of local files."""
    if file_format == "text":
        # `datasets` caches by the arguments. With `versions`, it reads a changed file again.
        versions = [(os.stat(file).st_mtime, os.stat(file).st_size) for file in files]
        arguments = {"files": files, "versions": versions}
        return datasets.Dataset.from_generator(read_text, gen_kwargs=arguments)
    # Without this option, `datasets` replaces the columns of files that look like logs of agents.
    options = {"parse_agent_traces": False} if file_format == "json" else {}

    def read(names):
        names = [escape(name) for name in names]  # `datasets` takes names as patterns
        return datasets.load_dataset(file_format, data_files=names, split="train", **options)

    with suppress(Exception):
        return read(files)  # fast, if all files are whole and have the same columns
    parts = []
    for file in files:  # slow, but an error names its file, and other columns do not matter
        try:
            parts.append(read([file]).select_columns(args.text_column))
        except Exception as error:
            sys.exit(f"error: {file}: {error.__cause__ or error}")
    return datasets.concatenate_datasets(parts)


def read_text(files, versions):
    """The documents of text files: what is between <|endoftext|>, long documents in pieces."""
    for file in files:
        open_file = gzip.open if file.endswith(".gz") else open
        undecoded = 0
        unfinished = ""  # a document that may go on in the next piece of the file
        try:
            with open_file(file, "rt", encoding="utf-8-sig", errors="replace") as stream:
                while piece := stream.read(TEXT_PIECE):
                    if piece.startswith("\ufffd\ufffd") or "\0" in piece[:2]:  # UTF-16
                        raise ValueError("convert it to UTF-8")
                    undecoded += piece.count("\ufffd")  # in place of what cannot be decoded
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
        if undecoded:
            say(f"warning: {file}: {undecoded:,} characters cannot be decoded: is it UTF-8?")


def tokenize_split(documents, tokenizer, column):
    """All documents of a split as one array of token ids."""
    columns = [name for name, kind in documents.features.items() if kind in TEXT_TYPES]
    if column not in columns:
        sys.exit(f"error: no text in column {column!r}: choose --text-column among {columns}")
    tokenized = documents.map(
        tokenize,
        batched=True,
        batch_size=32,  # documents; those of text files need 1 GB of memory at most
        fn_kwargs={"tokenizer": tokenizer, "column": column},
        remove_columns=documents.column_names,  # keep only the token ids
        features=datasets.Features(input_ids=datasets.List(datasets.Value("int32"))),
    )
    # A view of the memory-mapped Arrow file that `datasets` has cached, so this copies nothing.
    tokens = pyarrow.compute.list_flatten(tokenized.data.column("input_ids"))
    empty = len(documents) - len(tokenized)
    say(f"{len(documents):,} documents, of which {empty:,} are empty: {len(tokens):,} tokens")
    return tokens


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


def sample_order(args, train_samples):
    """The samples of all epochs in their order. The seed decides it, so a resume repeats it."""
    permutations = []
    for epoch in range(args.num_epochs):
        # RandomState: NumPy promises the same numbers in every version, so old runs can resume.
        generator = np.random.RandomState((args.seed, epoch))
        permutations.append(generator.permutation(train_samples))
    return np.concatenate(permutations)


def read_batch(tokens, indices, args, device):
    """The samples with these indices: int64 of shape (len(indices), seq_length) on `device`."""
    size = args.seq_length
    samples = [tokens.slice(offset=i * size, length=size).to_numpy() for i in indices]
    batch = torch.from_numpy(np.stack(samples))
    if device.type == "cuda":
        batch = batch.pin_memory()  # the GPU copies from pinned memory, while Python goes on
    return batch.to(device, non_blocking=batch.is_pinned()).long()  # int64, as the loss wants it


@torch.no_grad()
def evaluate(model, tokens, args, device):
    """The mean loss over all held-out samples, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    samples = len(tokens) // args.seq_length
    # DDP 10: Each rank evaluates its share, and a sum over ranks gives the mean over all samples.
    for begin in range(0, samples, WORLD_SIZE * args.batch_size):
        first = begin + RANK * args.batch_size
        indices = range(first, min(first + args.batch_size, samples))
        # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many passes.
        # A rank without a batch evaluates sample 0, with weight 0.
        input_ids = read_batch(tokens, indices or [0], args, device)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss_sum += loss * len(indices)  # the last batch may be smaller
    model.train()  # dropout on again
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    return loss_sum.item() / samples


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these flags. Other values would make it another training.
LASTING = ["model_name", "from_scratch", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["text_column", "seed", "lr", "lr_scheduler", "lr_scheduler_options", "warmup_steps"]
LASTING += ["adam_beta2", "weight_decay", "max_grad_norm"]

CHECKPOINT_NAMES = "step-????????"  # eight digits, so the names sort by step


@dataclass
class RunState:
    """The position of a run. Every checkpoint stores it as `state.json`."""

    lasting: dict  # flags, and the size of the dataset, which must not change
    comet_key: str  # the id of its Comet experiment
    global_batch: int | None = None  # of the last step
    step: int = 0  # optimizer steps done
    samples: int = 0  # samples read, over all epochs
    epoch: float = 0.0


def open_run(args, train_samples):
    """The folder of the run, its newest checkpoint, and the state: new, or of the checkpoint."""
    lasting = {name: getattr(args, name) for name in LASTING} | {"train_samples": train_samples}
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


def compare_ranks(args, state, train_tokens):
    """Another flag, script or text on one node would train wrong silently, so it ends the run."""
    setup = args.as_dict() | state.lasting | {"step of the checkpoint": state.step}
    setup |= {"torch": torch.__version__, "transformers": transformers.__version__}
    setup["script"] = Path(__file__).read_text()
    setup["config"] = AutoConfig.from_pretrained(args.model_name).to_json_string()
    # DDP: The data: the sum of all tokens, and some of them, which would show another order.
    places = np.linspace(0, len(train_tokens) - 1, num=1000, dtype=int).tolist()
    some_tokens = [train_tokens[place].as_py() for place in places]
    setup["tokens"] = pyarrow.compute.sum(train_tokens).as_py(), some_tokens
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
    "model_name": f"{REPOSITORY}/models/tiny-mixtral",
    "expert_parallel": math.gcd(8, WORLD_SIZE),  # EP: it divides 8 experts and the ranks
    "from_scratch": True,
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",
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
    # FSDP: These two flags choose between speed and memory.
    add("--cpu-offload", action=switch, default=False, help="shards and AdamW state on the CPU")
    add("--reshard-after-forward", action=switch, default=True, help="less memory, more traffic")
    # EP: By default, a group is a node, because its links are fast.
    node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    add("--expert-parallel", type=PositiveInt, default=node, help="ranks that share the experts")
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
