"""Chapter 7: the layers of a model on different devices, with pipeline parallelism.

Each device has a stage, which is some of the layers, and sends its activations to the next stage.
Several micro-batches follow each other, so that all stages have work. Activations are small, so
slow links suffice. If embeddings and head are one tensor, first and last stage also exchange it.
With several pipelines, FSDP shards each stage between them. Comments with PP 1 to 11 mark the
ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e alpaca     # all GPUs of one machine
    torchrun --nnodes 2 --nproc-per-node gpu --rdzv-id alpaca --rdzv-backend c10d \
        --rdzv-endpoint node-0:29400 train-llm.py -e alpaca     # the same command on two machines
"""

import argparse
import copy
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import pairwise
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
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch.distributed import pipelining as pp
from torch.distributed.checkpoint import HuggingFaceStorageWriter, state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import FORWARD, RECV_F, RESHARD, SEND_F, UNSHARD
from torch.distributed.tensor import Shard
from torch.utils.data import Subset
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
    check_groups(args)  # PP: before anything that takes time
    accumulation = args.gradient_accumulation_steps
    # PP 1: The ranks of a pipeline train on the same samples, so a pipeline counts as one device.
    pipelines = WORLD_SIZE // args.pipeline_parallel
    pipeline = RANK % pipelines  # with 2 pipelines, the even ranks are pipeline 0
    global_batch = args.batch_size * accumulation * pipelines
    torch.manual_seed(args.seed)  # for random initial weights
    transformers.logging.disable_progress_bar()  # Transformers shows one bar per file
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    say(f"{device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    run_folder, checkpoint, state = open_run(args)  # the newest checkpoint, or None

    # Data, model, optimizer.
    config, tokenizer = load_config_and_tokenizer(args)
    # DDP: One rank of each node tokenizes. The others wait, perhaps for hours, and read its cache.
    limit = timedelta(days=1)
    patient_group = dist.new_group(backend="gloo", timeout=limit, group_desc="patient")
    if LOCAL_RANK > 0:
        dist.barrier(patient_group)  # until the first ranks of all nodes call it below
    train_samples, eval_samples = load_samples(args, tokenizer, config, global_batch)
    if LOCAL_RANK == 0:
        dist.barrier(patient_group)
    # `state.samples` is the number read so far, `state.train_samples` the size of the dataset.
    if checkpoint and state.train_samples != len(train_samples):
        fail(f"{args.dataset_name} has changed since this run began: choose another -e name")
    state.train_samples = len(train_samples)
    # DDP: Other flags or data on one rank would spoil the training without any error.
    descriptions = gather(f"{vars(args)} {state.step} {state.train_samples}")
    if len(set(descriptions)) > 1:
        fail("the ranks differ in flags, data or checkpoints: start all nodes with the same ones")
    # PP: `model` holds the weights of this rank. `stages` share the weights, and do the computing.
    model, stages, tied_head = build_model(args, config, device, checkpoint)
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
    # PP 2: A schedule tells each rank the order of the forward and backward passes of a step.
    schedule = SCHEDULES[args.schedule](
        stages if args.schedule in SEVERAL_STAGES else stages[0],
        n_microbatches=accumulation,
        # The loss is a mean over a micro-batch. After this division, the losses (and their
        # gradients) of all micro-batches add up to the mean over the global batch.
        loss_fn=lambda loss, target: loss / accumulation,  # the last stage returns the loss itself
        scale_grads=False,  # the gradients are already divided
    )
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save and keep run_folder; rank 0 logs
        run_log = RunLog(run_folder, checkpoint, state, args)
        parameters = describe_run(args, model, train_samples)
        parameters |= {"global_batch": global_batch, "device_name": device_name}
        run_log.log_parameters(parameters)

    # The training loop.
    loss_sum = torch.zeros((), device=device)
    logged_step = state.step
    # DDP: The tokens of the whole job are the work of all devices.
    timer = PhaseTimer(device, flops_per_token(config, args.seq_length) / WORLD_SIZE)
    # disable=None: a progress bar in terminals only.
    progress = tqdm(total=total_steps, initial=state.step, file=CONSOLE, disable=None)
    stop_signals = catch_stop_signals()  # SIGTERM and Ctrl-C append to this list
    stop_signal = 0
    model.train()  # with dropout, if the model has any
    while state.step < total_steps and not stop_signal:
        # PP: The schedule gets all micro-batches of a step at once, so collect them first.
        batches = []
        for micro_step in range(accumulation):
            # Sample n is the same in each run with this seed, so a run can resume at any sample.
            # PP 3: All ranks of a pipeline read the same batch, as inputs or as labels.
            first = state.samples + (micro_step * pipelines + pipeline) * args.batch_size
            with timer("data"):
                indices = sample_order(first, args.batch_size, len(train_samples), args.seed)
                input_ids = read_batch(train_samples, indices, device)
            batches.append(input_ids)
        # PP: Each rank of a pipeline has its own seed, because it drops other activations. One seed
        # per step is enough, because the forward passes of all micro-batches come after this loop.
        seed = args.seed + first * args.pipeline_parallel + RANK // pipelines
        torch.manual_seed(seed)  # a resumed run also draws the same dropout masks
        # PP: Forward and backward passes take turns, so they are timed together.
        with timer("schedule"):
            tied_head.copy_weight()
            input_ids = torch.cat(batches)  # the schedule splits this batch again
            # The first stage gets `input_ids`, each stage gets `labels`, `loss_fn` gets `target`.
            # `losses` are what the last stage returns, so `loss_fn` has not divided them.
            losses = schedule.step(input_ids, labels=input_ids, target=input_ids)
        if losses is not None:  # PP: the last stage is on this rank
            # The other ranks of the pipeline add 0 to the average over all ranks.
            loss_sum += losses.detach().mean() * args.pipeline_parallel
        with timer("update"):
            tied_head.add_gradients()
            # Clip the complete gradient before the update, so that no bad batch spoils the weights.
            scaler.unscale_(optimizer)
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            # PP: This is the norm of the stages of this rank. Clipping comes below.
            grad_norm = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            # FSDP 3: The norm is over the shards of all ranks, so all ranks must compute it.
            grad_norm = grad_norm.full_tensor()
            # PP 4: The norm is over all stages, because all stages must be clipped alike.
            grad_norm.square_()
            pipeline_group = stages[0].group  # the same for all stages of this rank
            dist.all_reduce(grad_norm, group=pipeline_group)
            grad_norm.sqrt_()
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, grad_norm)
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
        # DDP: If a node vanishes, the other ranks give up after 5 minutes. The first step, which
        # compiles, evaluations and saves may take longer. They have PyTorch's 30 minutes.
        set_time_limit(timedelta(minutes=30 if eval_now or save_now else 5))
        log_now = state.step % args.log_freq == 0 or save_now
        if log_now:
            # `.item()` waits until the GPU has computed the number. Between two logged steps,
            # training reads no number back, so Python runs ahead and queues work for the GPU.
            # PP: Average over all ranks. Only last stages have losses, hence the factor above.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            mean_loss = loss_sum.item() / (state.step - logged_step)
            metrics = {
                "loss": mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                **timer.read(tokens_per_step=global_batch * args.seq_length),
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
            logged_step = state.step
        if eval_now:
            with autocast:
                tied_head.copy_weight()  # PP: the update has changed the weight
                eval_loss = evaluate(model, schedule, eval_samples, args, device)
            say(f"step {state.step}/{total_steps}  held-out loss {eval_loss:.4f}")
            metrics = {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)}
            if run_log:
                run_log.log_metrics(state, metrics)
        if run_folder and save_now:
            # A saved step is always a logged step, so its numbers have passed the check above.
            save_checkpoint(run_folder, model, tokenizer, stateful, state, args)

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


SCHEDULES = {
    "gpipe": pp.ScheduleGPipe,
    "1f1b": pp.Schedule1F1B,
    "interleaved": pp.ScheduleInterleaved1F1B,
    "zbv": pp.ScheduleZBVZeroBubble,
}
SEVERAL_STAGES = ["interleaved", "zbv"]  # these schedules have several stages per rank
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text"]


class Elsewhere(torch.nn.Module):
    """Takes the place of a layer, the embeddings or the head of another stage. Does nothing."""

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


def part_of(model, unit_names, own_names):
    """A model that shares the units in `own_names` with `model`, and has no other unit."""
    part = copy.deepcopy(model)  # on the meta device, so no numbers are copied
    # PP 5: Layers keep their numbers, because their names and the config use these numbers.
    for name in unit_names:
        unit = model.get_submodule(name) if name in own_names else Elsewhere()
        part.set_submodule(name, unit)
    # Share these with `model`. Later, `init_weights` fills the rotary frequencies of `model`, and
    # `set_attn_implementation` changes its config.
    part.config = model.config
    part.base_model.config = model.config
    part.base_model.rotary_emb = model.base_model.rotary_emb
    return part


class StageModule(torch.nn.Module):
    """Turns token ids or activations into activations, or in the last stage into the loss."""

    def __init__(self, part, is_first, is_last):
        super().__init__()
        self.part = part
        self.input_name = "input_ids" if is_first else "inputs_embeds"
        self.is_last = is_last

    def forward(self, x, labels):
        batch = {self.input_name: x, "use_cache": False}
        # PP 6: The last stage calls the model's own forward, because some families change logits.
        if self.is_last:
            loss = self.part(**batch, labels=labels).loss
            return torch.stack([loss])  # one dimension, to join the losses of all micro-batches
        return self.part.base_model(**batch).last_hidden_state


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
    shape = (args.batch_size, args.seq_length, model.config.hidden_size)
    activations = torch.empty(shape, dtype=DTYPES[args.dtype], device="meta", requires_grad=True)
    example_loss = torch.empty(1)
    # A single stage has embeddings and head, so they can stay one tensor.
    is_tied = bool(model.all_tied_weights_keys) and count > 1
    embeddings = None
    head = None
    group = None
    stages = []
    stage_modules = torch.nn.ModuleList()
    for n in stage_numbers:
        is_first = n == 0
        is_last = n == count - 1
        begin = 1 + sum(sizes[:n])  # unit 0 is the embeddings
        own_names = unit_names[begin : begin + sizes[n]]
        if is_first:
            own_names += ["model.embed_tokens"]
        if is_last:
            own_names += ["model.norm", "lm_head"]
        part = part_of(model, unit_names, own_names)
        if is_tied and is_first:
            embeddings = part.base_model.embed_tokens
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
        first_ranks = mesh.mesh[0].tolist()
        last_ranks = first_ranks if args.schedule == "zbv" else mesh.mesh[-1].tolist()
        ends = [sorted({first, last}) for first, last in zip(first_ranks, last_ranks, strict=True)]
        group, _ = dist.new_subgroups_by_enumeration(ends)
    return stages, stage_modules, TiedHead(embeddings, head, group, DTYPES[args.dtype])


def build_model(args, config, device, checkpoint):
    """The model on `device`, with the weights of the checkpoint, pretrained or random weights."""
    # Weights in fp32, whatever the files have. AdamW changes a weight by about the learning rate.
    # The bf16 number after 0.02 is 0.0001 larger, so changes below half of it would be lost.
    # FSDP 4: Build on the meta device, because the whole model may not fit into any memory.
    with fail_on_error(f"cannot build a causal LM from {args.model_name}"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # PP: The log reports the whole model. This rank soon has some of its stages only.
    total_parameters = model.num_parameters()
    model.num_parameters = lambda **options: total_parameters
    # PP 8: Ranks form a table: a column is a pipeline, and the ranks of a row have the same stages.
    shape = (args.pipeline_parallel, WORLD_SIZE // args.pipeline_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    layer_names = [f"model.layers.{n}" for n in range(config.num_hidden_layers)]
    unit_names = ["model.embed_tokens", *layer_names, "model.norm", "lm_head"]
    stages, stage_modules, tied_head = make_stages(model, unit_names, args, device, mesh)
    # FSDP 5: Gather the weights in bf16, which halves the traffic. Reduce gradients in fp32.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    policy["mesh"] = mesh["dp"]
    policy["shard_placement_fn"] = lambda weight: even_shards(weight.shape, mesh["dp"].size())
    # PP 9: Weights stay gathered in a step, unless a flag lets each micro-batch gather them again.
    # The embeddings or the head belong to the root of their stage.
    policy["reshard_after_forward"] = args.reshard_after_forward
    for layer in [m for m in stage_modules.modules() if isinstance(m, GradientCheckpointingLayer)]:
        fully_shard(layer, **policy)
    for module in stage_modules:
        fully_shard(module, **policy)
    # FSDP 7: Take memory only for the shards of this rank, because other ranks have the rest.
    weight_device = "cpu" if args.cpu_offload else device
    stage_modules.to_empty(device=weight_device)
    AsOnOneDevice.device = weight_device  # PP: where init_weights draws other ranks' weights
    # PP: Tie the head of `model` again, because fully_shard has given the embeddings a new weight.
    model.tie_weights()
    # FSDP 8: Initialise all buffers in every run, because new memory holds arbitrary numbers.
    # Files do not store buffers such as the rotary frequencies. Files do store parameters, so draw
    # random parameters only from scratch. For a large model, a CPU needs minutes to draw them.
    with fail_on_error(f"shards cannot be initialised as {config.model_type} does: use chapter 2"):
        init_weights(model, draw=args.from_scratch and not checkpoint)
    # PP: The weights of other ranks have never left the meta device. Here the model forgets them.
    for name in unit_names:
        first_weight = next(model.get_submodule(name).parameters())
        if first_weight.is_meta:  # another rank has this unit
            model.set_submodule(name, Elsewhere())
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
        # PP: The last stage computes the loss, and is the last module of its rank.
        stage_modules[-1].part.loss_function = torch.compile(model.loss_function)
    return model, stages, tied_head


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
    # PP: Tests compare each family of the list with one device, weight by weight.
    if config.model_type not in FAMILIES:
        fail(f"{config.model_type} is not among {', '.join(FAMILIES)}: use chapter 3")
    # PP 10: Embeddings and head count as a layer each, so first and last stage have fewer layers.
    layers = config.num_hidden_layers
    count = args.pipeline_parallel * args.stages_per_rank
    if layers < count:
        fail(f"{layers} layers are too few for {count} stages: lower --pipeline-parallel")
    if args.layers_per_stage is None:
        cuts = [round(n * (layers + 2) / count) for n in range(count + 1)]
        args.layers_per_stage = [end - begin for begin, end in pairwise(cuts)]
        args.layers_per_stage[0] -= 1  # the embeddings
        args.layers_per_stage[-1] -= 1  # the head
    sizes = args.layers_per_stage
    if len(sizes) != count or sum(sizes) != layers:
        fail(f"--layers-per-stage must have {count} numbers with the sum {layers}, not {sizes}")
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
        splits = datasets.load_dataset(**options)
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


class PackedSamples:
    """All documents, joined and cut into samples of `seq_length` tokens. A short rest is left out.

    Without padding, no computation is wasted. `tokens` is a view of the memory-mapped Arrow file
    that `datasets` has cached. So packing copies nothing, and all processes share the file.
    """

    def __init__(self, documents, seq_length):
        # An Arrow column has chunks of many documents. `flatten` joins the documents of a chunk.
        chunks = documents.data.column("input_ids").chunks
        self.tokens = pa.chunked_array([chunk.flatten() for chunk in chunks], pa.int32())
        self.seq_length = seq_length

    def __len__(self):
        return len(self.tokens) // self.seq_length

    def __getitem__(self, index):
        return self.tokens.slice(index * self.seq_length, self.seq_length).to_numpy()


def load_samples(args, tokenizer, config, global_batch):
    """The training samples and the held-out samples: a split of the dataset, or the last 1 %."""
    splits = load_documents(args.dataset_name, args.dataset_subset)
    if "train" not in splits:
        fail(f"{args.dataset_name} has no split named train, only {', '.join(splits)}")
    documents = tokenize_split(splits["train"], tokenizer, config, args)
    train_samples = PackedSamples(documents, args.seq_length)
    count = len(train_samples)
    held_out = splits.get("validation", splits.get("test"))
    if held_out:
        documents = tokenize_split(held_out, tokenizer, config, args)
        eval_samples = PackedSamples(documents, args.seq_length)
    else:
        count -= max(1, count // 100)  # hold out the last samples of the dataset
        eval_samples = Subset(train_samples, range(count, len(train_samples)))
        train_samples = Subset(train_samples, range(count))
    if count < global_batch or not eval_samples:
        fail(f"{args.dataset_name} is empty or too small: lower --batch-size or --seq-length")
    say(f"{args.dataset_name}: {count} samples to train on, {len(eval_samples)} held out")
    return train_samples, eval_samples


@lru_cache(maxsize=2)  # a batch may have samples of two epochs
def permutation(seed, epoch, count):
    # RandomState: NumPy promises the same numbers in every version, so old runs can resume.
    return np.random.RandomState((seed, epoch)).permutation(count)


def sample_order(first, count, dataset_size, seed):
    """The indices in the dataset of the samples from `first` to `first + count - 1` of a run.

    A run numbers its samples across epochs. Each epoch is another permutation of the dataset, which
    depends only on seed and epoch. To resume, a run needs only the number of samples it has read.
    """
    indices = []
    for number in range(first, first + count):
        epoch, place = divmod(number, dataset_size)
        indices.append(int(permutation(seed, epoch, dataset_size)[place]))
    return indices


def read_batch(samples, indices, device):
    """The token ids of these samples: int64 of shape (len(indices), seq_length) on `device`."""
    batch = torch.from_numpy(np.stack([samples[i] for i in indices]))
    if device.type == "cuda":
        # Python need not wait for a copy from pinned memory.
        batch = batch.pin_memory().to(device, non_blocking=True)
    return batch.to(device).long()


# -- Evaluation ------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, schedule, samples, args, device):  # PP: the schedule runs the stages
    """The mean loss over all held-out samples, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    # PP 11: A pipeline always computes all its micro-batches. Empty ones have weight 0.
    size = args.batch_size * args.gradient_accumulation_steps
    pipelines = WORLD_SIZE // args.pipeline_parallel
    pipeline = RANK % pipelines
    forward_schedule = copy.copy(schedule)
    if args.schedule in SEVERAL_STAGES:
        # These schedules are lists of actions. Drop backward passes: `eval` fails on those of zbv.
        # The copy is shallow, so training keeps its own list.
        kept = {FORWARD, SEND_F, RECV_F, UNSHARD, RESHARD}
        actions = schedule.pipeline_order_with_comms[schedule.rank]
        actions = [action for action in actions if action.computation_type in kept]
        forward_schedule.pipeline_order_with_comms = {schedule.rank: actions}
    # PP: Each pipeline evaluates its share. A sum over ranks gives the mean over all samples.
    # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many forward passes.
    rounds = math.ceil(len(samples) / (pipelines * size))
    for round_number in range(rounds):
        begin = (round_number * pipelines + pipeline) * size
        indices = range(begin, min(begin + size, len(samples)))
        # PP: Fill up the last batch with samples that do not count.
        padding = [0] * (size - len(indices))
        input_ids = read_batch(samples, [*indices, *padding], device)
        labels = input_ids.clone()
        labels[len(indices) :] = -100  # no loss for the padding
        losses = forward_schedule.eval(input_ids, labels=labels, target=labels)
        if losses is not None:  # the last stage is on this rank
            for n, loss in enumerate(losses):
                first = n * args.batch_size
                without_padding = indices[first : first + args.batch_size]
                if without_padding:  # the mean loss of padding alone is NaN
                    loss_sum += loss * len(without_padding)
    model.train()  # dropout on again
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    return loss_sum.item() / len(samples)


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run keeps these flags, because another value would make it another training.
LASTING = ["model_name", "from_scratch", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["text_column", "seed", "lr", "lr_scheduler", "warmup_steps"]
LASTING += ["adam_beta2", "weight_decay", "max_grad_norm"]

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
    # PP: Rank 0 saves its lists of names, so they must have the names of all stages.
    for group in moments["param_groups"]:
        names = gather(group["params"])
        group["params"] = sorted(set().union(*names))
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
        # PP: Also draw the weights of other ranks, into a tensor that nobody keeps. The generator
        # then is in the same state before each weight as on one device.
        if fills and args[0].is_meta:
            on_device = torch.empty_like(args[0], device=self.device)
            args = (on_device, *args[1:])
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
    files_have_all = set(shards) <= set(saved)
    if all(gather(files_have_all)):  # PP: the same choice on all ranks
        if checkpoint is not None:
            return
        # A tied weight has two names. If the files have both, the two tensors must be equal.
        second_tensors = {}
        for second_name, first_name in model.all_tied_weights_keys.items():
            # PP: The rank with the first stage has the embeddings, and compares.
            if second_name in saved and first_name in shards:
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
    # PP: Not strict, because the whole model has the tensors of the other stages, too.
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


def check_groups(args):
    """Refuses flags that do not fit together."""
    ranks = args.pipeline_parallel
    count = args.gradient_accumulation_steps
    per_rank = args.stages_per_rank
    if WORLD_SIZE % ranks:
        fail(f"--pipeline-parallel {ranks} does not divide the {WORLD_SIZE} ranks: use a divisor")
    if per_rank > 1 and args.schedule not in SEVERAL_STAGES:
        fail(f"--schedule {args.schedule} has one stage per rank: choose --schedule interleaved")
    if per_rank == 1 and args.schedule in SEVERAL_STAGES:
        fail(f"--schedule {args.schedule} has several stages per rank: use --stages-per-rank 2")
    if per_rank > 2 and args.schedule == "zbv":
        fail("--schedule zbv has two stages per rank: use --stages-per-rank 2")
    # PP: PyTorch builds the schedule, computes nothing, and refuses an impossible schedule.
    need = "set --gradient-accumulation-steps to a multiple of --pipeline-parallel"
    try:
        get_schedule_ops(SCHEDULES[args.schedule], ranks, count, per_rank)
    except ValueError:
        fail(f"--schedule {args.schedule} cannot run {count} micro-batches: {need}")
    if args.schedule == "zbv":
        fits = count >= 2 * ranks and not args.compile and not args.reshard_after_forward
        if not fits:
            needs = f"{2 * ranks} micro-batches, --no-compile and --no-reshard-after-forward"
            fail(f"--schedule zbv needs {needs}")
    if args.dtype == "fp16":
        fail("--dtype fp16 would have to skip a step on all stages at once: choose bf16 or fp32")


def set_time_limit(limit):
    """How long a rank waits for the others, in all process groups but the patient ones."""
    for group in dist.distributed_c10d._world.pg_map:
        if group.group_desc != "patient":
            dist.distributed_c10d._set_pg_timeout(limit, group)


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
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",
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


def numbers(text):
    """An argparse type: whole numbers with commas between them."""
    # PP: One flag has the layers of all stages, because a config file has one value per flag.
    number = at_least(1)
    try:
        return [number(part) for part in text.strip("[]").split(",")]  # a YAML list has brackets
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers as in 3,5,5,3, not {text}") from None


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
    # PP: The default is the number of stages.
    add("--gradient-accumulation-steps", type=positive, help="passes per optimizer step")
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
    # FSDP: These two flags choose between speed and memory.
    add("--cpu-offload", action=switch, default=False, help="shards and AdamW state on the CPU")
    add("--reshard-after-forward", action=switch, default=False, help="less memory, more traffic")
    # PP: The layers of each stage, and the order in which stages compute.
    add("--pipeline-parallel", type=positive, default=WORLD_SIZE, help="ranks of a pipeline")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="order of the passes of a step")
    add("--stages-per-rank", type=positive, help="default: 2 for interleaved and zbv, otherwise 1")
    add("--layers-per-stage", type=numbers, help="layers of each stage, such as 3,5,5,3")
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
    # PP: The defaults that follow from other flags.
    if args.stages_per_rank is None:
        args.stages_per_rank = 2 if args.schedule in SEVERAL_STAGES else 1
    if args.gradient_accumulation_steps is None:
        args.gradient_accumulation_steps = args.pipeline_parallel * args.stages_per_rank
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
