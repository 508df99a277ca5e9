"""Chapter 13: pipeline, data and tensor parallelism at once, for models that need many nodes.

Each stage of a pipeline is a group of devices of one node, which compute the layers of the stage
together, as in chapter 6. A group sends its activations to the group of the next stage, as in
chapter 7. With several pipelines, FSDP shards each stage between them. Comments with 3D 1 to 9 mark
the ideas. Comments with TP and PP come from chapters 6 and 7.

    torchrun --standalone --nproc-per-node 8 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e alpaca-3d     # a node is one group
    NNODES=2 MASTER_ADDR=node-0 NODE_RANK=0 ../launch/run.sh 13 -e alpaca-3d \
        --save-dir /shared/runs     # on each of 2 nodes, with its number: two stages
"""

import atexit
import copy
import gc
import json
import logging
import math
import os
import shutil
import signal
import sys
import sysconfig
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from glob import escape, glob
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: idle CPU threads sleep earlier
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # this script logs the metrics itself
os.environ.setdefault("COMET_DISPLAY_SUMMARY_LEVEL", "0")  # no long report at the end
os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")  # offline, give up in 20 s
import comet_ml
import datasets
import jsonargparse
import numpy as np
import psutil
import pyarrow.compute
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from datasets.fingerprint import Hasher
from filelock import FileLock
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_string_type
from torch.distributed import pipelining as pp
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining.schedules import FORWARD, RECV_F, RESHARD, SEND_F, UNSHARD
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

# DDP 1: torchrun starts one process per device, and these variables tell each process who it is.
RANK = int(os.environ.get("RANK", 0))  # its number among all processes
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # its number on its node (machine)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
PARENTS = Path(__file__).resolve().parents
REPOSITORY = next((p for p in PARENTS if (p / "pyproject.toml").exists()), PARENTS[0])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
received_signals = []  # the signal handler appends to this list, and the training loop reads it
training_has_begun = False  # until True, a wrong file or flag ends in one sentence


@record  # DDP: torchrun then reports the traceback of the rank that failed first
# TP 1: No rank has whole logits, so cross-entropy must combine parts, forward and backward.
@tp.loss_parallel()
def main():
    global training_has_begun
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # shows each line at once
    sys.stdout = sys.stdout if RANK == 0 else open(os.devnull, "w")  # DDP: rank 0 prints for all
    args = parse_args()
    # DDP 2: Each process joins the others and takes its own device, because GPU 0 is the default.
    device = join_process_group()
    args.dtype = args.dtype or ("fp32" if device.type == "cpu" else "bf16")
    torch.manual_seed(args.seed)
    transformers.logging.disable_progress_bar()
    say(f"Device {device}, torch {torch.__version__}, transformers {transformers.__version__}")

    # Data.
    check_plan(args)  # TP: before anything that takes time
    args.layers_per_stage = split_layers(args)  # PP: before anything that takes time
    accumulation = args.gradient_accumulation_steps
    # PP 1: The ranks of a pipeline train on the same samples, so a pipeline counts as one device.
    # 3D 1: A stage is now a group, and all ranks of the groups of a pipeline read the same batch.
    dp_size = WORLD_SIZE // (args.pipeline_parallel * args.tensor_parallel)
    group_number = RANK // args.tensor_parallel  # the first ranks are group 0: see 3D 7
    dp_rank = group_number % dp_size  # with 2 pipelines, the even groups belong to pipeline 0
    global_batch = args.batch_size * accumulation * dp_size  # samples per optimizer step
    if os.path.isdir(args.model_name.split("/")[0]) and not os.path.exists(args.model_name):
        sys.exit(f"error: there is no folder {args.model_name}")  # a path, not a Hub id
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    train_tokens, eval_tokens = load_tokens(args, tokenizer)  # Arrow arrays
    # All documents form one row of tokens, which is cut into samples. No sample needs padding.
    train_samples = len(train_tokens) // args.seq_length
    if train_samples < global_batch or len(eval_tokens) < args.seq_length:
        sys.exit("error: the dataset has too little text: lower --batch-size or --seq-length")
    say(f"Training on {train_samples:,} samples; {len(eval_tokens):,} tokens are held out")

    # A hash notices changed text. Above 100 million tokens, it covers 1,000 evenly spread pieces.
    begins = range(0, len(train_tokens), max(100_000, len(train_tokens) // 1000))
    tokens_hash = Hasher.hash_bytes(np.asarray(train_tokens.slice(n, 100_000)) for n in begins)
    setup = args.as_dict() | {"global_batch": global_batch, "tokens_hash": tokens_hash}
    # With -e, a run continues from its newest checkpoint. Settings in MUST_STAY may not change.
    run_folder, checkpoint, state = open_run(args, setup)  # without -e: None, None, step 0
    # DDP: If flags, data or checkpoints differed between ranks, training would silently go wrong.
    setups = gather(setup | {"step of the checkpoint": state.step})
    differing = [name for name in setups[0] if any(s[name] != setups[0][name] for s in setups)]
    if differing:
        sys.exit(f"error: ranks differ in {differing}: use the same flags, data and --save-dir")
    samples_left = args.num_epochs * train_samples - state.samples  # count samples: -b may change
    total_steps = min(state.step + samples_left // global_batch, args.max_steps or math.inf)
    if state.step >= total_steps and (run_folder / f"final/step-{state.step:08d}").exists():
        say(f"Already complete: choose another -e, or delete {run_folder}")
        return

    # Model and optimizer.
    # FSDP 1: Rank 0 reads a new run's model into CPU memory, and sends each rank its shards.
    # PP: `model` holds the weights of this rank. `stages` share the weights, and do the computing.
    model, stages, tied_head = build_model(args, device, checkpoint)
    vocab_size = model.config.get_text_config().vocab_size
    if max(tokenizer.get_vocab().values()) >= vocab_size:  # harmless, unless the text has such ids
        largest = max(pyarrow.compute.max(tokens).as_py() for tokens in (train_tokens, eval_tokens))
        if largest >= vocab_size:
            sys.exit(f"error: token {largest} is outside the vocabulary of {args.model_name}")
    groups = parameter_groups(model, args)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)
    # Gradients below 3e-8 are 0 in fp16. The scaler multiplies the loss, and so all gradients.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    saved_parts = {"optimizer": optimizer, "scaler": scaler}  # beside the model
    if checkpoint:
        # FSDP 2: Each rank reads its shards, whatever the number of ranks that saved them.
        # dcp.load() fills tensors in place. Decay and lr are no tensors, so the flags decide them.
        dcp.load(sharded_state(model, saved_parts), checkpoint_id=checkpoint)
    # PP 2: A schedule tells each rank the order of the forward and backward passes of a step.
    schedule = SCHEDULES[args.schedule](
        stages if args.schedule in SEVERAL_STAGES else stages[0],
        n_microbatches=accumulation,
        # The last stage returns the loss. The micro-batches of a step then add up to a mean.
        loss_fn=lambda loss, target: loss / accumulation,
        scale_grads=False,  # the gradients are already divided
    )
    eval_schedule = forward_only(schedule, args)
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save, and rank 0 logs
        parameters = setup | describe_run(model, optimizer, device, train_samples)
        run_log = RunLog(args, run_folder, checkpoint, state, parameters)
        run_log.comet.set_model_graph(str(model))  # the architecture as text
    # Ctrl-C, `kill`, a closed terminal and Slurm's SIGUSR1 end the run after a step.
    # DDP: torchrun sends SIGUSR1 only with --signals-to-handle, and kills after --shutdown-timeout.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, remember_signal)

    # The training loop.
    training_has_begun = True
    gc.freeze()  # Python's garbage collector then skips all objects that exist by now
    loss_sum = torch.zeros((), device=device)
    logged_step = state.step
    logged_time = time.perf_counter()
    # disable=None: a bar only on a terminal
    progress = tqdm(total=total_steps, initial=state.step, file=sys.stdout, disable=None)
    stop_signal = 0  # none
    model.train()  # turns dropout on, if the model has any
    while state.step < total_steps and not stop_signal:
        step = state.step + 1
        at_end = step == total_steps
        eval_now = args.eval_freq > 0 and (step % args.eval_freq == 0 or at_end)
        save_now = step % args.ckpt_freq == 0 or at_end
        log_now = step % args.log_freq == 0 or eval_now or save_now  # logging also checks for NaN
        times = defaultdict(float)  # milliseconds of each phase
        # Python runs ahead of the GPU. Only logged steps wait for each phase, to measure it.
        wait = log_now and device.type != "cpu"
        # PP: The schedule gets all micro-batches of a step at once, so collect them first.
        batches = []
        for micro_step in range(accumulation):
            # PP 3: All ranks of a pipeline read the same batch, as inputs or as labels.
            first = state.samples + (micro_step * dp_size + dp_rank) * args.batch_size
            with timed("data", times, wait):
                epoch, offset = divmod(first, train_samples)
                order = sample_order(args.seed, epoch, train_samples)  # of this epoch and the next
                indices = order[offset : offset + args.batch_size]
                input_ids = read_batch(train_tokens, indices, args, device)
            batches.append(input_ids)
        # 3D: Each group of a pipeline has its own seed, as it drops other activations. One seed
        # per step is enough, because the forward passes of all micro-batches come after this loop.
        place = stages[0].group_rank  # of this rank in its pipeline
        seed = args.seed + first * args.pipeline_parallel + place
        torch.manual_seed(seed)  # the same dropout masks after a resume
        # PP: Forward and backward passes take turns, so they are timed together.
        with timed("schedule", times, wait):
            tied_head.copy_weight()
            input_ids = torch.cat(batches)  # the schedule splits this batch again
            # The first stage gets `input_ids`, each stage gets `labels`, `loss_fn` gets `target`.
            # `losses` are what the last stage returns, so `loss_fn` has not divided them.
            losses = schedule.step(input_ids, labels=input_ids, target=input_ids)
        if losses is not None:  # PP: the last stage is on this rank
            # 3D: The ranks of the other stages add 0 to the average over all ranks.
            loss_sum += losses.detach().mean() * args.pipeline_parallel
        with timed("update", times, wait):
            tied_head.add_gradients()
            scaler.unscale_(optimizer)  # fp16: divide the gradients by the scale
            # Clip the gradient of the whole step, so that no bad batch spoils the weights.
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            # PP: This is the norm of the stages of this rank. Clipping comes below.
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            # 3D 2: Each rank has a part of a stage, so this is the norm over all ranks of a stage.
            # FSDP 3: Each rank has a part of the norm (a DTensor). full_tensor() combines them.
            grad_norm = grad_norm.full_tensor()
            # PP 4: The norm is over all stages, because all stages must be clipped alike.
            grad_norm.square_()
            pipeline_group = stages[0].group  # the same for all stages of this rank
            dist.all_reduce(grad_norm, group=pipeline_group)
            grad_norm.sqrt_()
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
            rate = learning_rate(state.step, total_steps, args)  # state.step: steps done so far
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.step(optimizer)  # the same as optimizer.step(), except in fp16
            scaler.update()  # a lower scale after infinite gradients, and later a higher one
            optimizer.zero_grad()  # because backward() adds to the gradients
        state.step = step
        state.samples += global_batch  # over all epochs
        state.epoch = state.samples / train_samples
        progress.update()

        # DDP: A signal may reach ranks in different steps. With the maximum, all stop together.
        received = torch.tensor(max(received_signals, default=0))
        dist.all_reduce(received, dist.ReduceOp.MAX)
        stop_signal = received.item()
        if stop_signal:  # a cluster waits some 30 s only, so save at once, and do not evaluate
            times = times if log_now else {}  # without `wait`, a GPU's times are wrong
            save_now = log_now = True
        if log_now:
            # PP: Average over all ranks. Only last stages have losses, hence the factor above.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            # `.item()` waits until the GPU has computed the number, so not every step calls it.
            mean_loss = loss_sum.item() / (step - logged_step)
            seconds = (time.perf_counter() - logged_time) / (step - logged_step)
            metrics = {
                "loss": mean_loss,
                "learning_rate": rate,
                "grad_norm": grad_norm.item(),
                "tokens_per_second": global_batch * args.seq_length / seconds,
                "time/total_ms": 1e3 * seconds,  # mean per step since the last log
                **times,  # phases of this step alone
                **of_all_ranks(memory_metrics(device)),  # DDP: the fullest GPU limits the batch
            }
            numbers = f"lr {rate:.2e}  {metrics['tokens_per_second']:,.0f} tokens/s"
            say(f"step {step}/{total_steps}  loss {mean_loss:.4f}  {numbers}")
            if run_log:
                run_log.log(state, metrics)
            # NaN ends a run before it saves. In fp16, the scaler skips steps of infinite gradients.
            norm_is_wrong = args.dtype != "fp16" and not grad_norm.isfinite()
            if not math.isfinite(mean_loss) or norm_is_wrong:
                sys.exit("error: loss or gradient is not finite: lower --lr, or check the model")
            loss_sum.zero_()
            logged_step = step
        if eval_now and not stop_signal:
            tied_head.copy_weight()  # PP: the update has changed the weight
            eval_loss = evaluate(model, eval_schedule, eval_tokens, args, device, dp_rank, dp_size)
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if save_now and run_folder:
            save_checkpoint(args, run_folder, model, tokenizer, saved_parts, state)
        if log_now:
            logged_time = time.perf_counter()  # so evaluation and checkpoint do not count

    if run_folder and state.step >= total_steps:
        # FSDP 4: Gather the model in CPU memory of rank 0, since other programs want it whole.
        # PP: They come from the checkpoint of the last step, because no rank has all stages.
        weights = whole_weights(model, run_folder / f"step-{state.step:08d}")
        with new_folder(run_folder / "final") as folder:
            if RANK == 0:
                with torch.device("meta"):  # FSDP changed `model`'s class, and so names of tensors
                    whole = AutoModelForCausalLM.from_config(model.config)
                whole.generation_config = model.generation_config
                whole.save_pretrained(folder, state_dict=weights)
                tokenizer.save_pretrained(folder)
                (folder / f"step-{state.step:08d}").touch()  # marks a complete run
        if run_log:
            run_log.comet.end()
        say(f"Done: the model is in {run_folder / 'final'}")
    wait_for_all()  # FSDP: until rank 0 has written, which may take long
    dist.destroy_process_group()  # DDP: not in a `finally`, as it may wait for a dead rank
    if state.step < total_steps:
        say(f"Stopped after step {state.step}: with -e, the same command continues the run")
        sys.exit(128 + stop_signal)  # the exit code that a shell gives for such a signal


# -- Model and optimizer ---------------------------------------------------------------------------

SCHEDULES = {
    "gpipe": pp.ScheduleGPipe,
    "1f1b": pp.Schedule1F1B,
    "interleaved": pp.ScheduleInterleaved1F1B,
    "zbv": pp.ScheduleZBVZeroBubble,
}
SEVERAL_STAGES = ["interleaved", "zbv"]  # these schedules have several stages per rank

# TP 4: Columns first, then rows, so that nothing is sent between the two matrix products.
TOKENS = Shard(1)  # of (samples, tokens, ...): each rank has a part of the tokens
WHOLE = Replicate()
PLAN = {
    # Each rank has some rows of the vocabulary, and looks up their tokens. A reduce-scatter adds up
    # the results, and splits the tokens. In the backward pass, the reduce-scatter is an all-gather.
    "model.embed_tokens": tp.RowwiseParallel(input_layouts=WHOLE, output_layouts=TOKENS),
    # TP 5: Tokens stay split between the layers, because norms and sums work on single tokens.
    "model.layers.*.*_layernorm": tp.SequenceParallel(),
    # Attention needs all tokens: an all-gather. A rank has some heads, with their columns of q, k
    # and v, and their rows of o. A reduce-scatter adds up the heads, and splits the tokens again.
    "model.layers.*.self_attn": tp.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": TOKENS},
        desired_input_kwarg_layouts={"hidden_states": WHOLE},
    ),
    "model.layers.*.self_attn.[qkv]_proj": tp.ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": tp.RowwiseParallel(output_layouts=TOKENS),
    # The MLP, too: an all-gather comes before its columns, and a reduce-scatter after its rows.
    "model.layers.*.mlp": tp.PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=WHOLE),
    "model.layers.*.mlp.gate_proj": tp.ColwiseParallel(),
    "model.layers.*.mlp.up_proj": tp.ColwiseParallel(),
    "model.layers.*.mlp.down_proj": tp.RowwiseParallel(output_layouts=TOKENS),
    "model.norm": tp.SequenceParallel(),
    # After an all-gather, each rank has the logits of all tokens for its part of the vocabulary.
    "lm_head": tp.ColwiseParallel(
        input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False
    ),
}
# Norms of q and k, which are split by heads: (samples, tokens, heads, ...).
HEAD_NORMS = tp.SequenceParallel(sequence_dim=2, use_local_output=True)
PLANS = {
    "llama": PLAN,
    "mistral": PLAN,
    "qwen2": PLAN,
    "smollm3": PLAN,
    "qwen3": PLAN | {"model.layers.*.self_attn.[qk]_norm": HEAD_NORMS},
}


def check_plan(args):
    """Refuses a model that cannot be split, or that would train wrong without an error."""
    config = AutoConfig.from_pretrained(args.model_name)
    # TP: Each family of the list is compared with one device, weight by weight, in the tests.
    if config.model_type not in PLANS:
        sys.exit(f"error: {config.model_type} is none of {', '.join(PLANS)}: use chapter 3")
    kv_heads = config.num_key_value_heads
    if kv_heads % args.tensor_parallel:
        sys.exit(f"error: --tensor-parallel must divide the {kv_heads} kv heads of the model")
    # The mask of a sliding window would fit only the tokens of one rank.
    window = getattr(config, "sliding_window", None)
    if window and args.seq_length > window:
        sys.exit(f"error: --seq-length is above the sliding window, {window}: use chapter 3")


class Elsewhere(torch.nn.Module):
    """Takes the place of a layer, the embeddings or the head of another stage. Does nothing."""

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


class NoPositions(torch.nn.Module):
    """Takes the place of GPT-2's position embeddings, which its first stage has added already."""

    def forward(self, position_ids):
        return torch.zeros((), device=position_ids.device)


def names_of_units(config):
    """The names of the embeddings, of the layers, and of the last norm and the head."""
    embeddings = ["model.embed_tokens"]
    layers = "model.layers"
    norm = "model.norm"
    if config.model_type == "gpt2":
        embeddings = ["transformer.wte", "transformer.wpe"]  # of tokens, and of positions
        layers = "transformer.h"
        norm = "transformer.ln_f"
    layer_names = [f"{layers}.{n}" for n in range(config.num_hidden_layers)]
    return embeddings, layer_names, [norm, "lm_head"]


def part_of(model, unit_names, own_names):
    """A model that shares the units in `own_names` with `model`, and has no other unit."""
    part = copy.deepcopy(model)  # on the meta device, so no numbers are copied
    # PP 5: Layers keep their numbers, because their names and the config use these numbers.
    for name in unit_names:
        unit = model.get_submodule(name) if name in own_names else Elsewhere()
        part.set_submodule(name, unit)
    # Share these with `model`. Later, `send_weights` fills the rotary frequencies of `model`, and
    # `set_attn_implementation` changes its config.
    part.config = model.config
    part.base_model.config = model.config
    if model.config.model_type != "gpt2":
        part.base_model.rotary_emb = model.base_model.rotary_emb
    elif "transformer.wpe" not in own_names:
        part.base_model.wpe = NoPositions()
        part.base_model.drop = Elsewhere()  # dropout of the embeddings
    return part


class StageModule(torch.nn.Module):
    """Turns token ids or activations into activations, or in the last stage into the loss."""

    def __init__(self, part, is_first, is_last):
        super().__init__()
        self.part = part
        self.input_name = "input_ids" if is_first else "inputs_embeds"
        self.is_last = is_last

    def forward(self, x, labels):
        # 3D 3: Attention needs the positions of all tokens. `labels` has them, `x` only some.
        positions = torch.arange(labels.shape[1], device=labels.device)[None]
        batch = {self.input_name: x, "position_ids": positions, "use_cache": False}
        # PP 6: The last stage calls the model's own forward, because some families change logits.
        if self.is_last:
            # 3D 4: A group computes one loss. The schedule needs a plain tensor, and no DTensor.
            loss = self.part(**batch, labels=labels).loss.full_tensor()
            return torch.stack([loss])  # one dimension, to join the losses of all micro-batches
        hidden_states = self.part.base_model(**batch).last_hidden_state
        # PP: GPT-2 returns a view, which zbv cannot detach from its graph. A copy is no view.
        return hidden_states.clone() if hidden_states._is_view() else hidden_states


# PP 7: The first stage updates tied embeddings with both gradients. The last stage gets a copy.
class TiedHead:
    """Tied embeddings of the first stage, and the head of the last stage, which is their copy.

    `embeddings` and `head` are None on ranks that lack them, and in models that are not tied.
    """

    def __init__(self, embeddings, head, group, dtype):
        self.embeddings = embeddings
        self.head = head
        self.modules = [module for module in (embeddings, head) if module is not None]
        self.group = group  # the ranks of the first and of the last stage
        self.dtype = dtype

    @torch.no_grad()
    def copy_weight(self):
        """Copies the weight of the embeddings to the head."""
        if not self.modules:
            return
        # FSDP casts the head to the compute precision anyway, so more bytes would be useless.
        # On the rank of the embeddings, `weight` is sent. On the rank of the head, it is replaced.
        module = self.head if self.embeddings is None else self.embeddings
        weight = module.weight.to_local().to(self.dtype)
        dist.broadcast(weight, group=self.group, group_src=0)
        if self.head is not None:
            self.head.weight.to_local().copy_(weight)

    def add_gradients(self):
        """Adds the gradient of the head to the gradient of the embeddings."""
        if not self.modules:
            return
        total = sum(module.weight.grad.to_local() for module in self.modules)
        dist.reduce(total, group=self.group, group_dst=0)
        if self.embeddings is not None:
            self.embeddings.weight.grad.to_local().copy_(total)
        if self.head is not None:
            self.head.weight.grad = None  # a copy, so the optimizer does not have this weight


def make_stages(model, unit_names, args, device, mesh):
    """The stages of this rank, the modules that they run, and what keeps a tied head up to date."""
    rank = mesh.get_local_rank("pp")
    sizes = args.layers_per_stage
    count = len(sizes)
    if args.schedule == "zbv":  # the stages go down the ranks and up again
        stage_numbers = [rank, count - 1 - rank]
    else:
        stage_numbers = range(rank, count, args.pipeline_parallel)
    # The shape of the activations. Without it, PyTorch infers the shape in an extra pass.
    # 3D 5: Each rank sends its part of the tokens to the rank with the same part in the next group.
    own_tokens = args.seq_length // args.tensor_parallel
    shape = (args.batch_size, own_tokens, model.config.hidden_size)
    activations = torch.empty(shape, dtype=DTYPES[args.dtype], device="meta", requires_grad=True)
    example_loss = torch.empty(1)
    # A single stage has embeddings and head, so they can stay one tensor.
    is_tied = bool(model.all_tied_weights_keys) and count > 1
    embedding_names, layer_names, end_names = names_of_units(model.config)
    embeddings = None
    head = None
    group = None
    stages = []
    stage_modules = torch.nn.ModuleList()
    for n in stage_numbers:
        is_first = n == 0
        is_last = n == count - 1
        begin = sum(sizes[:n])
        own_names = layer_names[begin : begin + sizes[n]]
        if is_first:
            own_names += embedding_names
        if is_last:
            own_names += end_names
        part = part_of(model, unit_names, own_names)
        if is_tied and is_first:
            embeddings = part.get_input_embeddings()
        if is_tied and is_last:
            part.lm_head = copy.deepcopy(model.lm_head)
            head = part.lm_head
        module = StageModule(part, is_first, is_last)
        stage_modules.append(module)
        output = example_loss if is_last else activations
        stage = pp.PipelineStage(
            module,
            stage_index=n,
            num_stages=count,
            device=device,
            input_args=activations,  # the first stage receives none, so it does not use them
            output_args=output,
            group=mesh.get_group("pp"),
        )
        stages.append(stage)
    if is_tied:
        # All ranks make the groups of all pipelines. With zbv, one rank has both stages, so it is
        # alone in its group.
        # 3D 6: Each rank of the first stage has a partner, which has the same part of the head.
        first_ranks = mesh.mesh[0].flatten().tolist()
        last_ranks = first_ranks if args.schedule == "zbv" else mesh.mesh[-1].flatten().tolist()
        ends = [sorted({first, last}) for first, last in zip(first_ranks, last_ranks, strict=True)]
        group, _ = dist.new_subgroups_by_enumeration(ends)
    return stages, stage_modules, TiedHead(embeddings, head, group, DTYPES[args.dtype])


def build_model(args, device, checkpoint):
    """The model on `device`, with its attention, and compiled if asked for."""
    # FSDP 5: Make and shard a model of meta tensors, which have shapes and take no memory.
    config = AutoConfig.from_pretrained(checkpoint or args.model_name)
    options = {"dtype": torch.float32, "attn_implementation": args.attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    # PP: The log reports the whole model. This rank soon has some of its stages only.
    total_parameters = model.num_parameters()
    model.num_parameters = lambda **options: total_parameters
    # 3D 7: Each stage is a table of ranks. A row is a group of neighbours, so it is on one node.
    pipelines = WORLD_SIZE // (args.pipeline_parallel * args.tensor_parallel)
    shape = (args.pipeline_parallel, pipelines, args.tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
    # No warning that the norm of a stage is added up in two steps, one for each dimension.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # 3D 8: Split the layers before the stages are cut, because the plan has the model's names.
    # TP 8: Split each layer within the rows, before anything else sees its parameters.
    tp.parallelize_module(model, mesh["tp"], PLANS[model.config.model_type])
    # There is no error for a parameter that the plan misses, and its gradient is wrong.
    missed = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if missed:
        sys.exit(f"error: not in the plan: {missed}")
    # TP 9: Tie the embeddings again, because the plan has made two parameters of one.
    model.tie_weights()
    unit_names = [name for names in names_of_units(config) for name in names]
    stages, stage_modules, tied_head = make_stages(model, unit_names, args, device, mesh)
    # FSDP: No autocast, as FSDP casts weights. Transformers computes norms, softmax, loss in fp32.
    shard_model(stage_modules, mesh, args, device)
    model.tie_weights()  # fully_shard has given the embeddings another weight than the head
    # PP: The weights of other ranks have never left the meta device. Here the model forgets them.
    for name in unit_names:
        first_weight = next(model.get_submodule(name).parameters())
        if first_weight.is_meta:  # another rank has this unit
            model.set_submodule(name, Elsewhere())
    compute_buffers(model, device)
    if checkpoint:  # FSDP: dcp.load() reads its weights later
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint)
    else:
        send_weights(args, model)
    use_flash = device.type == "cuda" and args.dtype != "fp32" and is_flash_attn_2_available()
    if args.attention is None and use_flash and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    # A sample is one sequence here. Skip two checks for packed sequences, which wait for the GPU.
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    transformers.modeling_flash_attention_utils._is_packed_sequence = lambda *args: False
    # All decoder layers have this class, also without activation checkpointing.
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    say(f"Attention {model.config._attn_implementation}, {args.dtype}, {len(layers)} layers")
    if args.activation_checkpointing:
        # A layer keeps only its input. The backward pass computes the rest a second time.
        model.activation_checkpointing_enable()  # its older name: gradient_checkpointing_enable
    if args.compile:
        # TP 6: Compile attention and MLP. A whole compiled layer may fail in the backward pass.
        # Layers of one kind share compiled code.
        for layer in layers:
            layer.self_attn.compile()
            layer.mlp.compile()
        # In a second run, a cache would give wrong gradients without an error.
        torch._functorch.config.enable_autograd_cache = False
        # Compiled, the loss needs no fp32 copy of the logits, the largest tensor of a step.
        # PP: The last stage computes the loss, and is the last module of its rank.
        stage_modules[-1].part.loss_function = torch.compile(model.loss_function)
    return model, stages, tied_head


def split_layers(args):
    """The number of layers of each stage."""
    config = AutoConfig.from_pretrained(args.model_name)
    layers = config.num_hidden_layers
    count = args.pipeline_parallel * args.stages_per_rank
    if args.layers_per_stage:
        sizes = [int(number) for number in args.layers_per_stage.split(",")]
    else:
        # PP 9: Embeddings and head count as a layer each, so the stages at the ends have fewer.
        cuts = [round(n * (layers + 2) / count) for n in range(count + 1)]
        sizes = [end - begin for begin, end in pairwise(cuts)]
        sizes[0] -= 1  # the embeddings
        sizes[-1] -= 1  # the head
    if len(sizes) != count or sum(sizes) != layers:
        sys.exit(f"error: {count} stages cannot share {layers} layers as {sizes}")
    return sizes


def shard_model(stage_modules, mesh, args, device):  # PP: the stages of this rank
    """Splits each parameter over ranks (a DTensor, still empty). Hooks gather and free layers."""
    # FSDP 6: Gather weights in --dtype: bf16 halves the traffic. Average gradients in fp32.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # TP 10: FSDP works along the columns: it shards the parts again, and averages gradients there.
    policy["mesh"] = mesh["dp"]
    # PP 10: Weights stay whole in a step, unless a flag lets each micro-batch gather layers again.
    for layer in [m for m in stage_modules.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, reshard_after_forward=args.reshard_after_forward, **policy)
    # Each stage is a root. It has the rest, such as the embeddings or the head, which stays whole.
    for stage in stage_modules:
        fully_shard(stage, **policy)
    # FSDP 8: Take memory only for the shards of this rank, because other ranks have the rest.
    stage_modules.to_empty(device="cpu" if args.cpu_offload else device)


def compute_buffers(model, device):
    """Fills the buffers that state dicts lack, such as the rotary frequencies, on each rank."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # so _init_weights() fills only buffers
    model.apply(model._init_weights)
    for buffer in model.buffers():
        buffer.data = buffer.to(device)


def send_weights(args, model):
    """Fills the shards of all ranks with the values of rank 0's whole model."""
    whole = load_model(args, checkpoint=None) if RANK == 0 else None
    wait_for_all()  # until rank 0 has read its files
    # FSDP 9: Rank 0 sends one parameter at a time, and each rank keeps its shard of it.
    # PP: Not strict, because the whole model has the parameters of other stages, too.
    options = dcp_state.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, strict=False
    )
    weights = whole.state_dict() if RANK == 0 else {}
    dcp_state.set_model_state_dict(model, weights, options=options)
    if RANK == 0:
        model.generation_config = whole.generation_config  # rank 0 saves it


def load_model(args, checkpoint):
    """The model in CPU memory. Its weights are those of `checkpoint`, pretrained ones or random."""
    # fp32, because bf16 numbers near 0.02 are 1e-4 apart: an update by --lr, 3e-5, would be lost.
    options = {"dtype": torch.float32, "attn_implementation": args.attention}
    if args.from_scratch and not checkpoint:
        config = AutoConfig.from_pretrained(args.model_name)
        model = AutoModelForCausalLM.from_config(config, **options)
        # The random numbers that from_config() uses differ by version. So seed and draw again.
        torch.manual_seed(args.seed)
        model.apply(model._init_weights)
        return model
    source = checkpoint or args.model_name
    options["output_loading_info"] = True
    try:
        model, info = AutoModelForCausalLM.from_pretrained(source, **options)
    except Exception as error:  # each format of files has its own errors
        sys.exit(f"error: the model {source} cannot be loaded: {error}")
    if info["missing_keys"]:  # Transformers fills these tensors with random numbers
        sys.exit(f"error: the files of {source} lack the tensors {info['missing_keys']}")
    if model.all_tied_weights_keys != model.get_expanded_tied_weights_keys(all_submodels=True):
        sys.exit(f"error: {source} has its own output layer: set tie_word_embeddings to false")
    return model


def learning_rate(step, total_steps, args):
    """The rate for a step (the first is 0): a warm-up, then a curve named in parse_args()."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    cycles_done = args.lr_cycles * (step - args.warmup_steps) / (total_steps - args.warmup_steps)
    left = (total_steps - step) / (total_steps - args.warmup_steps)  # from 1 towards 0
    curves = {
        "constant": 1,
        "linear": left,
        "cosine": 0.5 * (1 + math.cos(math.pi * (cycles_done % 1))),  # % 1: restarts at the peak
        "wsd": min(1, 10 * left),  # warm-up, stable, decay over the last tenth
    }
    return args.lr * curves[args.lr_scheduler]


def parameter_groups(model, args):
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


# -- Data and evaluation ---------------------------------------------------------------------------

READERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
READERS |= {".csv": "csv", ".parquet": "parquet"}
EVAL_SAMPLES = 1000  # held-out samples at most, because each evaluation takes time


def load_tokens(args, tokenizer):
    """The tokens to train on, and the held-out ones: a split of the dataset, or its last 1 %."""
    name, train_split = os.path.expanduser(args.dataset_name), "train"
    if ":" in name and not glob(name, recursive=True):
        name, _, train_split = name.rpartition(":")  # NAME:SPLIT, not a file with a colon
    reader = READERS.get(Path(name.removesuffix(".gz")).suffix)
    if os.path.isdir(name):
        if not glob(f"{escape(name)}/train-*.parquet"):
            sys.exit(f"error: tools/prepare-data.py has not written {name}: give it this folder")
        splits = datasets.load_dataset("parquet", data_dir=name)
    elif reader:
        sizes = [os.path.getsize(file) for file in glob(name, recursive=True)]
        if not any(sizes):
            sys.exit(f"error: there are no files for {name}, or they have too little text")
        if reader == "text" and max(sizes) > 20e6:
            sys.exit(f"error: {name} has a file above 20 MB: let tools/prepare-data.py read it")
        options = {"sample_by": "document"} if reader == "text" else {}  # a row is a whole file
        splits = datasets.load_dataset(reader, data_files=name, **options)
    elif os.path.isdir(name.split("/")[0]):
        sys.exit(f"error: there is no folder {name}")
    else:  # a dataset on the Hub
        splits = datasets.load_dataset(name, args.dataset_subset)
    if train_split not in splits:
        sys.exit(f"error: choose a split of {name}, such as {name}:{next(iter(splits))}")
    train_tokens = tokenize_split(splits.pop(train_split), tokenizer, args.text_column)
    eval_split = splits.get("validation") or splits.get("test")
    if eval_split:
        eval_tokens = tokenize_split(eval_split, tokenizer, args.text_column)
        return train_tokens, eval_tokens.slice(length=EVAL_SAMPLES * args.seq_length)
    samples = len(train_tokens) // args.seq_length
    held_out = min(max(1, samples // 100), EVAL_SAMPLES)
    end = max(0, samples - held_out) * args.seq_length
    return train_tokens.slice(length=end), train_tokens.slice(offset=end)


def tokenize_split(documents, tokenizer, column):
    """All documents of a split as one array of token ids."""
    if column not in documents.column_names:
        sys.exit(f"error: no column {column!r}: choose --text-column of {documents.column_names}")
    options = {
        "batched": True,
        "batch_size": 1 if documents.info.builder_name == "text" else 32,  # 1: files are large
        "fn_kwargs": {"tokenizer": tokenizer, "column": column},
        "remove_columns": documents.column_names,  # keep only the token ids
        "features": datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}),
    }
    # DDP: The first rank or job tokenizes this corpus, and the others then find it in the cache.
    corpus = Hasher.hash([documents._fingerprint, tokenizer.name_or_path, column])
    with FileLock(f"{datasets.config.HF_DATASETS_CACHE}/{corpus}.lock"):
        tokenized = documents.map(tokenize, **options)
    # A view of the memory-mapped Arrow file that `datasets` has cached, so this copies nothing.
    tokens = pyarrow.compute.list_flatten(tokenized.data.column("input_ids"))
    say(f"{len(tokenized):,} documents: {len(tokens):,} tokens")
    return tokens


def tokenize(rows, tokenizer, column):
    """The token ids of each document that is not empty, then an end-of-text token."""
    texts = [text for text in rows[column] if text]
    # A row, such as a text file, may have several documents, each ended by this marker.
    texts = [part for text in texts for part in text.split("<|endoftext|>") if part]
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in documents]}


@lru_cache(maxsize=1)  # computed once per epoch, not per batch
def sample_order(seed, epoch, train_samples):
    """The shuffled sample numbers of this epoch and the next: a batch may cross the border."""
    this_epoch = np.random.RandomState((seed, epoch)).permutation(train_samples)
    next_epoch = np.random.RandomState((seed, epoch + 1)).permutation(train_samples)
    return np.concatenate([this_epoch, next_epoch])


def read_batch(tokens, indices, args, device):
    """The samples with these indices: int64 of shape (len(indices), seq_length) on `device`."""
    samples = [tokens.slice(i * args.seq_length, args.seq_length).to_numpy() for i in indices]
    batch = torch.from_numpy(np.stack(samples))
    if device.type == "cuda":
        batch = batch.pin_memory()  # the GPU copies from pinned memory, while Python goes on
    return batch.to(device, non_blocking=batch.is_pinned()).long()  # int64, as the loss wants it


def forward_only(schedule, args):
    """PP: A schedule for evaluations. With one for both, each change would prepare the stages."""
    forward_schedule = copy.copy(schedule)
    if args.schedule in SEVERAL_STAGES:
        # These schedules are lists of actions. Drop backward passes: `eval` fails on those of zbv.
        # The copy is shallow, so training keeps its own list.
        kept = {FORWARD, SEND_F, RECV_F, UNSHARD, RESHARD}
        actions = schedule.pipeline_order_with_comms[schedule.rank]
        actions = [action for action in actions if action.computation_type in kept]
        forward_schedule.pipeline_order_with_comms = {schedule.rank: actions}
    return forward_schedule


@torch.no_grad()
def evaluate(model, schedule, tokens, args, device, dp_rank, dp_size):  # PP: runs the schedule
    """The mean loss over all held-out samples, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    samples = len(tokens) // args.seq_length
    # PP: Each pipeline evaluates its share. A sum over ranks gives the mean over all samples.
    size = args.batch_size * args.gradient_accumulation_steps
    for begin in range(0, samples, dp_size * size):
        first = begin + dp_rank * size
        indices = range(first, min(first + size, samples))
        # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many passes.
        # A rank without a batch (no indices) evaluates sample 0, with weight 0.
        # PP 11: A pipeline always computes all its micro-batches. Sample 0 fills up the last ones.
        padding = [0] * (size - len(indices))
        input_ids = read_batch(tokens, [*indices, *padding], args, device)
        labels = input_ids.clone()
        labels[len(indices) :] = -100  # no loss for the padding
        losses = schedule.eval(input_ids, labels=labels, target=labels)
        if losses is not None:  # the last stage is on this rank
            for n, loss in enumerate(losses):
                start = n * args.batch_size
                counted = indices[start : start + args.batch_size]
                if counted:  # the mean loss of padding alone is NaN
                    loss_sum += loss * len(counted)
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    model.train()  # dropout on again
    # TP: All N ranks of a group have added the same losses.
    return loss_sum.item() / samples / args.tensor_parallel


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these: they decide the model, samples, their order and precision.
MUST_STAY = ["model_name", "tokens_hash", "seq_length", "seed", "dtype"]


def open_run(args, setup):
    """The folder of the run, its newest checkpoint, and the state: new, or of the checkpoint."""
    state = SimpleNamespace(step=0, samples=0, epoch=0.0, comet_key=os.urandom(16).hex())
    if not args.experiment_name:
        say("warning: without -e, this run saves no model, no checkpoints and no logs")
        return None, None, state
    run_folder = Path(os.path.expandvars(args.save_dir)).expanduser() / args.experiment_name
    run_folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_folder / "lock")
    if RANK == 0:  # DDP: one lock for all ranks
        lock.acquire(timeout=0)  # fails if another process trains in this folder
    atexit.register(lock.release)  # the reference also keeps the lock: a deleted one unlocks
    checkpoint = max(run_folder.glob("step-????????"), default=None)  # the highest number
    if checkpoint:
        say(f"Continuing from {checkpoint}")
        state = SimpleNamespace(**json.loads((checkpoint / "state.json").read_text()))
        before = json.loads((checkpoint / "parameters.json").read_text())
        for name, now in setup.items():
            change = f"{name} was {before.get(name)}, and is {now} now"
            if name == "tokens_hash":
                change = "the text or the tokenizer has changed"
            if now != before.get(name) and name in MUST_STAY:
                sys.exit(f"error: {change}: undo this, or choose another -e")
            if now != before.get(name):
                say(f"note: {change}")
    return run_folder, checkpoint, state


def sharded_state(model, saved_parts):
    """Sharded weights and optimizer state by name. dcp calls the scaler's state_dict() itself."""
    weights, moments = dcp_state.get_state_dict(model, saved_parts["optimizer"])
    # PP: Rank 0 saves its lists of names, so they must have the names of all stages.
    for group in moments["param_groups"]:
        names = gather(group["params"])
        group["params"] = sorted(set().union(*names))
    return saved_parts | {"model": weights, "optimizer": moments}


def whole_weights(model, checkpoint):
    """The whole model on rank 0, and nothing on other ranks. All ranks have to call it."""
    rank_0 = dist.new_group([0])
    if RANK > 0:
        return None
    # PP: No rank has all stages, but the newest checkpoint has them. Read it into CPU memory.
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(model.config)
    weights = {n: torch.empty_like(x, device="cpu") for n, x in whole.state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id=checkpoint, process_group=rank_0)
    # FSDP: A tied weight has two names. Transformers saves one of them.
    return {n: x for n, x in weights.items() if n not in whole.all_tied_weights_keys}


@contextmanager
def new_folder(folder):
    """Yields a temporary folder, and renames it once every file is on the disk."""
    # FSDP: All ranks write into the folder, but only rank 0 makes and renames it. Each save uses a
    # new name, because on a shared disk, another node may still see the folder of the last save.
    temporary = folder.with_name(f"incomplete-{os.urandom(4).hex()}")
    if RANK == 0:
        for leftover in folder.parent.glob("incomplete-*"):  # of killed runs
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
    temporary = gather(temporary)[0]
    if not all(gather(temporary.exists())):
        sys.exit(f"error: not all ranks see {temporary}: put --save-dir on a shared disk")
    yield temporary
    if RANK > 0:  # rank 0 does the rest, and needs no other rank for it
        return
    for file in temporary.glob("*.safetensors"):  # saved with mode 0600: give them the usual mode
        shutil.copymode(temporary / "tokenizer_config.json", file)
    for path in [*temporary.rglob("*"), temporary]:
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def save_checkpoint(args, run_folder, model, tokenizer, saved_parts, state):
    """Writes all that an exact resume needs, then removes old checkpoints."""
    with new_folder(run_folder / f"step-{state.step:08d}") as folder:  # names that sort by step
        # 3D 9: A shard has its name and place in the whole model, so any layout can load it.
        # FSDP 11: Each rank saves its shards: none has room for all. dcp waits for all ranks.
        dcp.save(sharded_state(model, saved_parts), checkpoint_id=folder)
        if RANK > 0:  # leaving the `with` block still runs the rest of new_folder()
            return
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "state.json").write_text(json.dumps(vars(state), indent=2))
        shutil.copy(run_folder / "metrics.jsonl", folder)
        shutil.copy(run_folder / "parameters.json", folder)
    for old in sorted(run_folder.glob("step-????????"))[: -args.keep_checkpoints]:
        shutil.rmtree(old, ignore_errors=True)


# -- Timer, metrics, logs, small helpers -----------------------------------------------------------


def join_process_group():
    """Meets the other ranks, and returns the device of this rank."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(LOCAL_RANK)  # DDP: else all ranks of a node use GPU 0
    store, _, _ = next(dist.rendezvous("env://"))
    # DDP: torchrun's key-value store outlives a restart, so a prefix hides keys of the last one.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # DDP: NCCL moves tensors between GPUs. Gloo moves CPU tensors, without waiting for the GPU.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    return torch.device("cuda", LOCAL_RANK) if on_gpu else torch.device("cpu")


def wait_for_all():  # FSDP: gather(None) would fail after half an hour
    """A barrier that waits up to a day, because rank 0 may read or write a large model."""
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    dist.barrier(group)
    dist.destroy_process_group(group)  # closes its connections to the other ranks


def gather(value):
    """Every rank gets the values of all, in order of rank. Gloo does it, so no GPU has to wait."""
    values = [None] * WORLD_SIZE
    dist.all_gather_object(values, value)
    return values


def of_all_ranks(metrics):
    """Includes each rank's metrics as `memory/rank0/...`. The plain name gets the largest value."""
    by_rank = gather(metrics)
    result = {name: max(of_rank[name] for of_rank in by_rank) for name in metrics}
    for rank, of_rank in enumerate(by_rank):
        result |= {name.replace("/", f"/rank{rank}/"): x for name, x in of_rank.items()}
    return result


@contextmanager
def timed(phase, times, wait):
    """Adds the milliseconds of a block to `times`. With `wait`, they include the GPU's work."""
    if wait:
        torch.accelerator.synchronize()  # until the GPU has done all work before the block
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


def describe_run(model, optimizer, device, train_samples):
    """Facts about model and machine, which are logged once besides the flags."""
    on_gpu = device.type == "cuda"
    return {
        "world_size": WORLD_SIZE,  # DDP: torchrun decides it, so no flag has it
        "optimizer": type(optimizer).__name__,
        "dataset_samples": train_samples,
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

    def __init__(self, args, run_folder, checkpoint, state, parameters):
        (run_folder / "parameters.json").write_text(json.dumps(parameters, indent=2, default=str))
        if checkpoint:
            shutil.copy(checkpoint / "metrics.jsonl", run_folder)  # as of its step
        self.file = (run_folder / "metrics.jsonl").open("a" if checkpoint else "w")
        archive = f"{run_folder}/comet"  # where Comet writes offline
        config = comet_ml.ExperimentConfig(name=args.experiment_name, offline_directory=archive)
        options = {"workspace": args.comet_workspace, "project_name": args.comet_project_name}
        options["experiment_key"] = state.comet_key  # a resumed run continues its experiment
        try:
            has_key = bool(comet_ml.get_config("comet.api_key"))
            self.comet = comet_ml.start(online=has_key, experiment_config=config, **options)
        except Exception as error:  # no network
            say(f"warning: Comet cannot be reached, so it writes a file ({error!r:.300})")
            self.comet = comet_ml.start(online=False, experiment_config=config, **options)
        self.comet.log_parameters(parameters)

    def log(self, state, metrics):
        # JSON has no infinity, which the gradient norm may be in fp16.
        metrics = {name: x if math.isfinite(x) else None for name, x in metrics.items()}
        entry = {"step": state.step, "epoch": state.epoch} | metrics
        print(json.dumps(entry), file=self.file, flush=True)
        self.comet.log_metrics(metrics, step=state.step, epoch=state.epoch)


def remember_signal(number, frame):
    received_signals.append(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next Ctrl-C stops at once


def say(message):
    """Prints a line above the progress bar."""
    # Ctrl-C also ends `| tee log`. Printing then fails, and must not prevent the last checkpoint.
    with suppress(OSError):
        tqdm.write(message)


# -- Flags -----------------------------------------------------------------------------------------

DEMO_GROUP = 2 if WORLD_SIZE % 4 == 0 else 1  # 3D: of a group, if there are two stages, too
DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/models/tiny-llama",
    "from_scratch": True,
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",  # the source of Python's library
    "seq_length": 256,
    # 3D: 8 processes are 2 stages x 2 pipelines x 2 ranks, 4 are 2 x 1 x 2, and 2 are 2 x 1 x 1.
    "pipeline_parallel": 2 if WORLD_SIZE % 2 == 0 else 1,
    "tensor_parallel": DEMO_GROUP,
    "batch_size": max(1, 8 * DEMO_GROUP // WORLD_SIZE),  # 3D: about the global batch of chapter 1
    "max_steps": 400,
    "lr": 2e-3,
    "warmup_steps": 40,
    "eval_freq": 100,
    "ckpt_freq": 200,
}


def parse_args():
    parser = jsonargparse.ArgumentParser(usage="%(prog)s [flags, see --help]", print_config=None)
    folder_name = restricted_string_type("folder_name", r"[^/.][^/]*$")  # no /, no . at its start
    add = parser.add_argument
    switch = jsonargparse.ActionYesNo(no_prefix="no-")  # --demo and --no-demo
    add("--config", action="config", help="a YAML file of flags; later flags win")
    add("-e", "--experiment-name", type=folder_name, help="names the run: saves, resumes, logs it")
    add("--comet-project-name", type=str, default="distributed-training-demo", help="at Comet")
    add("--comet-workspace", type=str, help="workspace at Comet; by default, the account's own")
    add("-m", "--model-name", type=str, default="meta-llama/Llama-3.2-1B", help="Hub id or folder")
    add("--from-scratch", action=switch, default=False, help="random weights, not pretrained ones")
    add("-d", "--dataset-name", type=str, default="tatsu-lab/alpaca", help="Hub id, files, folder")
    add("--text-column", type=str, default="text", help="the column to train on")
    add("--dataset-subset", type=str, help="configuration name on the Hub")
    add("-s", "--seq-length", type=PositiveInt, default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=PositiveInt, default=8, help="samples per forward pass")
    # PP: The default is the number of stages.
    add("--gradient-accumulation-steps", type=PositiveInt, help="passes per step")
    add("--num-epochs", type=PositiveInt, default=3, help="passes over the dataset")
    add("--max-steps", type=PositiveInt, help="stop after this many optimizer steps")
    add("--lr", type=float, default=3e-5, help="peak learning rate")
    curves = ["cosine", "linear", "constant", "wsd"]  # also in learning_rate(): add yours to both
    add("--lr-scheduler", choices=curves, default="cosine", help="the curve after the warm-up")
    add("--lr-cycles", type=PositiveInt, default=1, help="how many times cosine falls from peak")
    add("--warmup-steps", type=NonNegativeInt, default=0, help="steps until the peak learning rate")
    add("--adam-beta2", type=float, default=0.999, help="from scratch: often 0.95")
    add("--weight-decay", type=float, default=0.01, help="for matrices only")
    add("--max-grad-norm", type=float, default=1.0, help="clips gradients; 0: not")
    add("--dtype", choices=list(DTYPES), help="compute precision; bf16 on GPUs, fp32 on CPUs")
    add("--activation-checkpointing", action=switch, default=False, help="less memory, slower")
    add("--attention", type=str, help="sdpa, flash_attention_2 or another name of Transformers")
    add("--compile", action=switch, default=torch.cuda.is_available(), help="default: on for CUDA")
    add("--eval-freq", type=NonNegativeInt, default=500, help="steps between evaluations; 0: none")
    add("--log-freq", type=PositiveInt, default=10, help="steps between logged metrics")
    add("--ckpt-freq", type=PositiveInt, default=500, help="steps between checkpoints")
    add("--keep-checkpoints", type=PositiveInt, default=2, help="older ones are removed")
    add("--save-dir", type=str, default=f"{REPOSITORY}/outputs", help="the folder of all runs")
    add("--seed", type=NonNegativeInt, default=0, help="seed of random weights and sample order")
    # DDP: No --device, because torchrun assigns the devices.
    # FSDP: These two flags choose between speed and memory.
    add("--cpu-offload", action=switch, default=False, help="shards and AdamW state on the CPU")
    add("--reshard-after-forward", action=switch, default=False, help="less memory, more traffic")
    # PP: The layers of each stage, and the order in which stages compute.
    # 3D: By default, all groups form one pipeline, and each node is a stage.
    add("--pipeline-parallel", type=PositiveInt, help="groups of a pipeline; default: all groups")
    add("--schedule", choices=list(SCHEDULES), default="1f1b", help="order of the passes of a step")
    add("--stages-per-rank", type=PositiveInt, default=2, help="of the interleaved schedule alone")
    add("--layers-per-stage", type=str, help="layers of each stage, such as 3,5,5,3")
    # TP: More ranks per group for large samples and layers, fewer for less traffic.
    node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    add("--tensor-parallel", type=PositiveInt, default=node, help="ranks that share each layer")
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    if parser.parse_args().demo:
        parser.set_defaults(DEMO)
    args = parser.parse_args()  # again, with these defaults
    if min(args.lr, args.weight_decay, args.max_grad_norm) < 0 or not 0 <= args.adam_beta2 < 1:
        parser.error("--lr, --weight-decay, --max-grad-norm: from 0 on; --adam-beta2: 0 to below 1")
    args.pop("config")  # a file name; its flags are in `args` already
    # PP: These flags follow from the schedule and from the number of stages.
    if args.schedule != "interleaved":
        args.stages_per_rank = 2 if args.schedule == "zbv" else 1
    if args.pipeline_parallel is None:  # 3D: all groups, and at least one
        args.pipeline_parallel = max(1, WORLD_SIZE // args.tensor_parallel)
    if args.gradient_accumulation_steps is None:
        args.gradient_accumulation_steps = args.pipeline_parallel * args.stages_per_rank
    # 3D: Data parallelism gets ranks / (pipeline x tensor), which must be a whole number.
    if WORLD_SIZE % (args.pipeline_parallel * args.tensor_parallel):
        both = "--pipeline-parallel times --tensor-parallel"
        parser.error(f"{both} must divide the number of ranks, {WORLD_SIZE}")
    if args.dtype == "fp16":
        parser.error("--dtype fp16 would skip a step on one stage alone: choose bf16 or fp32")
    return args


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError:
        sys.exit("error: out of GPU memory: try --activation-checkpointing, then a lower -b")
    except datasets.exceptions.DatasetGenerationError as error:  # a file that cannot be read
        sys.exit(f"error: {error.__cause__}: let tools/prepare-data.py read the files")
    # DDP: RuntimeError: most likely, another rank has failed, and this one waited for it
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        if training_has_begun:
            raise
        sys.exit(f"error: {error}")
    finally:
        if LOCAL_RANK > 0 and isinstance(sys.exc_info()[1], SystemExit) and not received_signals:
            time.sleep(5)  # DDP: torchrun kills all when one fails, so let local rank 0 print first
