"""Chapter 15: local steps between two data centres with a slow link (DiLoCo).

A replica is one or more copies of the model, as in chapter 5. Replicas train alone, with AdamW, for
a round of --inner-steps steps. At the end of a round, they average how far their weights have
moved. An outer optimizer then moves the weights that all replicas share. So the slow link carries
one message per round instead of one per step. Comments with LOCAL 1 to 12 mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    NNODES=2 MASTER_ADDR=node-0 NODE_RANK=0 ../launch/run.sh 15 -e alpaca-local --inner-steps 100 \
        --log-freq 100 --checkpoint-format local     # on each of 2 nodes, with its number
"""

import atexit
import gc
import json
import math
import os
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache, lru_cache
from glob import escape, glob
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
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
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
    accumulation = args.gradient_accumulation_steps
    # DDP 3: The global batch is the sum over all ranks, so steps and epochs count all devices.
    # A rank reads share dp_rank of dp_size. In later chapters, several ranks read the same share.
    dp_rank, dp_size = RANK, WORLD_SIZE
    if args.global_batch_size:  # NODES: each share of the data makes so many passes
        accumulation, rest = divmod(args.global_batch_size, args.batch_size * dp_size)
        if rest:
            sys.exit(f"error: --global-batch-size must be a multiple of -b × {dp_size} shares")
        args.gradient_accumulation_steps = accumulation
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
    files = {  # NODES: on the disk of this node
        "script": Path(__file__).read_text(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "config": AutoConfig.from_pretrained(args.model_name).to_json_string(),
    }
    setups = gather(setup | files | {"step of the checkpoint": state.step})
    differing = [name for name in setups[0] if any(s[name] != setups[0][name] for s in setups)]
    if differing:
        sys.exit(f"error: ranks differ in {differing}: use the same flags, data and --save-dir")
    samples_left = args.num_epochs * train_samples - state.samples  # count samples: -b may change
    total_steps = min(state.step + samples_left // global_batch, args.max_steps or math.inf)
    # NODES: With `local`, final/ is on the disk of rank 0 only.
    has_final = gather(run_folder and (run_folder / f"final/step-{state.step:08d}").exists())[0]
    if state.step >= total_steps and has_final:
        say(f"Already complete: choose another -e, or delete {run_folder}")
        return

    # Model and optimizer.
    # FSDP 1: Rank 0 reads a new run's model into CPU memory, and sends each rank its shards.
    # NODES: A run that starts with --resume-dir needs no pretrained weights, either.
    start = checkpoint or (args.resume_dir and of_this_rank(args.resume_dir))
    model = build_model(args, device, start)
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
    outer = OuterOptimizer(model, args)  # LOCAL: starts with the weights of the model
    if checkpoint:
        # FSDP 2: Each rank reads its shards, whatever the number of ranks that saved them.
        # dcp.load() fills tensors in place. Decay and lr are no tensors, so the flags decide them.
        # LOCAL 1: With another number of replicas, each one starts as a copy of an old one.
        # With fewer replicas, the steps of some old ones since the last round are lost.
        replica = outer.replica % state.replicas
        read_parts(checkpoint, sharded_state(model, saved_parts, outer, replica))
    elif args.resume_dir:
        # NODES: With --skip-optimizer, take only the weights. The rest of the run begins anew.
        read_parts(start, {"model": model.state_dict()})
        outer = OuterOptimizer(model, args)  # LOCAL: starts with these weights
    state.replicas = args.replicas  # LOCAL: for a later resume, which may have another number
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
        # LOCAL 2: A round ends after --inner-steps steps. The last round may be shorter.
        # Until --outer-start, each step is a round.
        averages_only = step <= args.outer_start
        round_ends = averages_only or step % args.inner_steps == 0 or at_end
        eval_now = args.eval_freq > 0 and (step % args.eval_freq == 0 or at_end)
        save_now = step % args.ckpt_freq == 0 or at_end
        log_now = step % args.log_freq == 0 or eval_now or save_now  # logging also checks for NaN
        times = defaultdict(float)  # milliseconds of each phase
        # Python runs ahead of the GPU. Only logged steps wait for each phase, to measure it.
        wait = log_now and device.type != "cpu"
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # DDP 6: The ranks read batches in turn. The same batch on all would be wasted work.
            first = state.samples + (micro_step * dp_size + dp_rank) * args.batch_size
            torch.manual_seed(args.seed + first)  # the same dropout masks after a resume
            # FSDP: Each micro-batch averages gradients and frees weights again, to save memory.
            # --no-reshard-after-forward keeps both until the last one, to save traffic.
            communicate = args.reshard_after_forward or micro_step == accumulation - 1
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            # NODES 1: Only the last micro-batch averages over the copies, because links are slow.
            model.set_requires_all_reduce(micro_step == accumulation - 1)
            with timed("data", times, wait):
                epoch, offset = divmod(first, train_samples)
                order = sample_order(args.seed, epoch, train_samples)  # of this epoch and the next
                indices = order[offset : offset + args.batch_size]
                input_ids = read_batch(train_tokens, indices, args, device)
            with timed("forward", times, wait):
                # The model shifts the labels itself, so that each token predicts the next one.
                # use_cache would keep keys and values, which only generation needs.
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                loss = loss / accumulation  # the micro-batches of a step then add up to a mean
            with timed("backward", times, wait):
                scaler.scale(loss).backward()
            loss_sum += loss.detach()  # the number alone, without its graph
        with timed("update", times, wait):
            scaler.unscale_(optimizer)  # fp16: divide the gradients by the scale
            # Clip the gradient of the whole step, so that no bad batch spoils the weights.
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            # FSDP 3: Each rank has a part of the norm (a DTensor). full_tensor() combines them.
            grad_norm = grad_norm.full_tensor()
            rate = learning_rate(state.step, total_steps, args)  # state.step: steps done so far
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.step(optimizer)  # the same as optimizer.step(), except in fp16
            scaler.update()  # a lower scale after infinite gradients, and later a higher one
            optimizer.zero_grad()  # because backward() adds to the gradients
        if round_ends:  # LOCAL: until then, each replica trains alone
            with timed("outer", times, wait):
                outer.step(averages_only)
        state.step = step
        state.samples += global_batch  # over all epochs
        state.epoch = state.samples / train_samples
        progress.update()

        # DDP: A signal may reach ranks in different steps. With the maximum, all stop together.
        # LOCAL 3: Exchange stop signals only when other messages cross the slow link anyway.
        if round_ends or log_now:
            received = torch.tensor(max(received_signals, default=0))
            dist.all_reduce(received, dist.ReduceOp.MAX)
            stop_signal = received.item()
        if stop_signal:  # a cluster waits some 30 s only, so save at once, and do not evaluate
            times = times if log_now else {}  # without `wait`, a GPU's times are wrong
            save_now = log_now = True
        # LOCAL: Fast replicas wait for slow ones, so each message keeps PyTorch's 30 minutes.
        if log_now:
            # DDP 9: Average the loss over ranks, because each rank has seen its own samples only.
            dist.all_reduce(loss_sum, dist.ReduceOp.AVG)
            # LOCAL: Each replica has its own norm. With the mean, all ranks pass or fail the check.
            dist.all_reduce(grad_norm, dist.ReduceOp.AVG)
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
                **outer.read(step - logged_step),  # LOCAL: of the rounds since the last log
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
            # LOCAL 4: Evaluate the shared weights, because each replica has moved away from them.
            outer.swap(model)
            eval_loss = evaluate(model, eval_tokens, args, device, dp_rank, dp_size)  # DDP: shares
            outer.swap(model)  # LOCAL: each replica continues from its own weights
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if save_now and run_folder:
            # LOCAL: `outer` has the shared weights and their momentum.
            save_checkpoint(args, run_folder, model, tokenizer, saved_parts, state, outer)
        if log_now:
            logged_time = time.perf_counter()  # so evaluation and checkpoint do not count

    wait_for_checkpoint()  # NODES: until the last checkpoint has its name
    if run_folder and state.step >= total_steps:
        outer.swap(model)  # LOCAL: `final` has the shared weights
        # FSDP 4: Gather the model in CPU memory of rank 0, since other programs want it whole.
        weights = whole_weights(model)
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


def build_model(args, device, checkpoint):
    """The model on `device`, with its attention, and compiled if asked for."""
    # FSDP 5: Make and shard a model of meta tensors, which have shapes and take no memory.
    config = AutoConfig.from_pretrained(checkpoint or args.model_name)
    options = {"dtype": torch.float32, "attn_implementation": args.attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    # FSDP: No autocast, as FSDP casts weights. Transformers computes norms, softmax, loss in fp32.
    shard_model(model, args, device)
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
        # Layers only: in a compiled model, Transformers builds an attention mask, which is slower.
        for layer in layers:
            layer.compile()
        model.loss_function = torch.compile(model.loss_function)  # fused: no fp32 copy of logits
    return model


def shard_model(model, args, device):
    """Splits each parameter over ranks (a DTensor, still empty). Hooks gather and free layers."""
    # FSDP 6: Gather weights in --dtype: bf16 halves the traffic. Average gradients in fp32.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # NODES 3: Ranks form a table: a row holds one copy of the model, a column holds equal shards.
    # All-gathers and reduce-scatters stay in a row. Columns all-reduce the gradients of a shard.
    # LOCAL 5: Each replica has a table of its own. FSDP does not see the other replicas.
    copies = WORLD_SIZE // (args.replicas * args.shard_size)
    shape = (args.replicas, copies, args.shard_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "replicate", "shard"))
    policy["mesh"] = mesh["replicate", "shard"]
    model.replica_mesh = mesh["replica"]  # LOCAL: for OuterOptimizer
    # FSDP 7: Each layer is a unit. Hooks gather and free it, so one or two are whole at a time.
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
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
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


# -- Replicas --------------------------------------------------------------------------------------


class OuterOptimizer:
    """The weights that all replicas share, and the update of them at the end of a round.

    The update is torch.optim.SGD with Nesterov momentum. https://arxiv.org/abs/2311.08105
    """

    def __init__(self, model, args):
        self.args = args
        self.replica = model.replica_mesh.get_local_rank()
        self.group = model.replica_mesh.get_group()  # the ranks that hold the same shards
        # LOCAL 6: Shared weights and momentum are shards, too: 8 more bytes per parameter, in fp32.
        self.weights = {p: p.detach().clone() for p in model.parameters()}
        self.momentum = {p: torch.zeros_like(w) for p, w in self.weights.items()}
        # Tied weights are one parameter with two names.
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.own_norm = None
        self.mean_norm = None  # of the last round, until `read`
        self.sent_bytes = 0

    @torch.no_grad()
    def step(self, averages_only):
        """Moves the shared weights, and starts the next round with them on all replicas."""
        # LOCAL 7: A gradient points uphill, so it is the start of the round minus its end.
        gradients = {p: shared - p for p, shared in self.weights.items()}
        self.own_norm = total_norm(gradients)  # of this replica; it stays on the device
        # LOCAL 8: Join all tensors to one message, because each message waits for the slow link.
        shards = [gradient.to_local() for gradient in gradients.values()]
        message = torch.cat([shard.flatten() for shard in shards]).to(DTYPES[self.args.outer_dtype])
        dist.all_reduce(message, dist.ReduceOp.AVG, self.group)
        means = message.split([shard.numel() for shard in shards])
        for shard, mean in zip(shards, means, strict=True):
            shard.copy_(mean.view_as(shard))  # `gradients` are now the means over the replicas
        self.mean_norm = total_norm(gradients)
        # In an all-reduce, a rank sends the sums of its part, and then the means of its part.
        self.sent_bytes += 2 * message.nbytes * (self.args.replicas - 1) / self.args.replicas
        beta = self.args.outer_momentum
        for p, gradient in gradients.items():
            update = gradient
            if not averages_only:
                # LOCAL 9: The momentum remembers earlier rounds. Nesterov looks one round ahead.
                momentum = self.momentum[p]
                momentum.mul_(beta).add_(gradient)
                update = self.args.outer_lr * (gradient + beta * momentum)
            self.weights[p].sub_(update)
            # LOCAL 10: All replicas continue from the shared weights. AdamW keeps its own moments.
            p.copy_(self.weights[p])

    def read(self, steps):
        """Numbers of the last round, and bytes per step, since the last read. All ranks call it."""
        metrics = {"communication/bytes_per_step": self.sent_bytes / steps}
        self.sent_bytes = 0
        if self.mean_norm is not None:
            # The mean square distance of the replicas from their mean, by the formula of a
            # variance. Rounding may make it negative.
            mean_square = self.own_norm.square()
            dist.all_reduce(mean_square, dist.ReduceOp.AVG, self.group)
            variance = (mean_square - self.mean_norm.square()).clamp(min=0)
            metrics["outer/grad_norm"] = self.mean_norm.item()
            metrics["outer/drift"] = variance.sqrt().item()
            self.mean_norm = None
        return metrics

    @torch.no_grad()
    def swap(self, model):
        """Exchanges the weights of this replica and the shared weights, one tensor at a time."""
        for module in model.modules():
            # LOCAL 11: Free the units that FSDP has kept whole, because they have the old weights.
            if isinstance(module, FSDPModule):
                module.reshard()
        for p, shared in self.weights.items():
            own = p.clone()
            p.copy_(shared)
            shared.copy_(own)

    def state(self):
        """The shared weights and their momentum under the names of the model, for checkpoints."""
        weights = {name: self.weights[p] for name, p in self.parameters.items()}
        momentum = {name: self.momentum[p] for name, p in self.parameters.items()}
        return weights, momentum


def total_norm(tensors):
    """The norm over the shards of all ranks of this replica."""
    return torch.nn.utils.get_total_norm(tensors.values()).full_tensor()


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


@torch.no_grad()
def evaluate(model, tokens, args, device, dp_rank, dp_size):  # DDP: each rank has a share
    """The mean loss over all held-out samples, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    samples = len(tokens) // args.seq_length
    # DDP 10: Each rank evaluates its share, and a sum over ranks gives the mean over all samples.
    for begin in range(0, samples, dp_size * args.batch_size):
        first = begin + dp_rank * args.batch_size
        indices = range(first, min(first + args.batch_size, samples))
        # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many passes.
        # A rank without a batch (no indices) evaluates sample 0, with weight 0.
        input_ids = read_batch(tokens, indices or [0], args, device)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss_sum += loss * len(indices)  # the last batch may be smaller
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    model.train()  # dropout on again
    return loss_sum.item() / samples


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these: they decide the model, samples, their order and precision.
MUST_STAY = ["model_name", "tokens_hash", "seq_length", "seed", "dtype"]

RANK_FOLDER = f"rank-{RANK}"  # NODES: this rank's checkpoints, with --checkpoint-format local


def open_run(args, setup):
    """The folder of the run, its newest checkpoint, and the state: new, or of the checkpoint."""
    state = SimpleNamespace(step=0, samples=0, epoch=0.0, comet_key=os.urandom(16).hex())
    # NODES: Without a name on one node, its ranks would not take part in what follows.
    if len(set(gather(args.experiment_name))) > 1:
        sys.exit("error: ranks differ in ['experiment_name']: give all nodes the same -e")
    if not args.experiment_name:
        say("warning: without -e, this run saves no model, no checkpoints and no logs")
        return None, None, state
    run_folder = Path(os.path.expandvars(args.save_dir)).expanduser() / args.experiment_name
    run_folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_folder / "lock")
    if RANK == 0:  # DDP: one lock for all ranks
        # NODES: The server of a shared disk frees the lock of a dead node later: NFS after 90 s.
        lock.acquire(timeout=120)  # fails if another process trains in this folder
    atexit.register(lock.release)  # the reference also keeps the lock: a deleted one unlocks
    # NODES: All ranks write into this folder, so all nodes have to see a file that rank 0 makes.
    probe = run_folder / gather(os.urandom(16).hex())[0]  # a name that rank 0 has chosen
    if RANK == 0:
        probe.touch()
    dist.barrier()
    is_shared = all(gather(probe.exists()))
    probe.unlink(missing_ok=True)
    # NODES 4: With `local`, each node writes to its own disk, and nodes need no shared folder.
    if not is_shared and args.checkpoint_format != "local":
        sys.exit(f"error: not all nodes see {run_folder}: share it, or --checkpoint-format local")
    checkpoint = newest_checkpoint(run_folder)
    # NODES: A new run begins with --resume-dir. Later it resumes from its own checkpoints.
    begins_elsewhere = not checkpoint and args.resume_dir and not args.skip_optimizer
    if begins_elsewhere:
        checkpoint = of_this_rank(args.resume_dir)
    if checkpoint:
        say(f"Continuing from {checkpoint}")
        state = SimpleNamespace(**json.loads((checkpoint / "state.json").read_text()))
        if begins_elsewhere:
            state.comet_key = os.urandom(16).hex()  # NODES: a new run is a new experiment
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


def newest_checkpoint(run_folder):
    """The newest checkpoint that all ranks have, or None."""
    # NODES 5: A step counts if all ranks have it, since a node may have died before it saved.
    folders = [*run_folder.glob("step-????????")]
    folders += run_folder.glob(f"{RANK_FOLDER}/step-????????")
    found = {folder.name: folder for folder in folders}
    names_by_rank = gather(set(found))
    common = set.intersection(*names_by_rank)
    # A run that was killed in its first save begins anew. An empty disk ends the run.
    disk_is_empty = not found and not (run_folder / RANK_FOLDER).exists()
    if any(names_by_rank) and any(gather(disk_is_empty)):
        sys.exit(f"error: the ranks share no checkpoint in {run_folder}: take the same nodes")
    return found[max(common)] if common else None


def of_this_rank(checkpoint):
    """The folder with this rank's part of a checkpoint: of `local` (rank-0/step-...), its own."""
    folder = Path(checkpoint)
    is_local = folder.parent.name == "rank-0"
    return folder.parent.with_name(RANK_FOLDER) / folder.name if is_local else folder


def sharded_state(model, saved_parts, outer, replica):  # LOCAL: with the state of this replica
    """Sharded weights and optimizer state by name. dcp calls the scaler's state_dict() itself."""
    weights, moments = dcp_state.get_state_dict(model, saved_parts["optimizer"])
    # LOCAL 12: Name the replica, because DCP saves only one of several tensors with one name.
    # Moments differ between replicas, and within a round weights do, too.
    own = {"weights": weights, "optimizer": moments, "scaler": saved_parts["scaler"]}
    parts = {f"{name} of replica {replica}": part for name, part in own.items()}
    # `model`, which other chapters and tools read, is the shared weights.
    shared, momentum = outer.state()
    return parts | {"model": weights | shared, "outer momentum": momentum}


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
    options = dcp_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = dcp_state.get_model_state_dict(model, options=options)
    # FSDP: A tied weight has two names. Transformers saves one of them.
    return {n: x for n, x in weights.items() if n not in model.all_tied_weights_keys}


@contextmanager
def new_folder(folder):
    """Yields a temporary folder, and renames it once every file is on the disk."""
    # FSDP: All ranks write into the folder, but only rank 0 makes and renames it. Each save uses a
    # new name, because on a shared disk, another node may still see the folder of the last save.
    temporary = folder.with_name(f"incomplete-{os.urandom(4).hex()}")
    # NODES: With `local`, each rank makes and renames the folders inside its own folder.
    is_owner = RANK == 0 or folder.parent.name == RANK_FOLDER
    if is_owner:
        for leftover in folder.parent.glob("incomplete-*"):  # of killed runs
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)  # NODES: also the folder of this rank
    names = gather(temporary)
    temporary = temporary if is_owner else names[0]
    yield temporary
    if not is_owner:  # NODES: not RANK > 0, because of `local`
        return
    for file in temporary.glob("*.safetensors"):  # saved with mode 0600: give them the usual mode
        shutil.copymode(temporary / "tokenizer_config.json", file)
    for path in [*temporary.rglob("*"), temporary]:
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes into a temporary folder, which gets its name as soon as all files are in it."""

    def __init__(self, args, path):
        self.args = args
        self.naming = ExitStack()  # NODES: leaves new_folder() later, perhaps in a thread
        super().__init__(self.naming.enter_context(new_folder(path)))

    def finish(self, metadata, results):  # NODES: DCP calls it when all files are written
        super().finish(metadata, results)
        self.naming.close()
        if self.args.checkpoint_format == "local":
            dist.barrier(writer_group())  # NODES: old ones may go when all ranks have the new one
        for old in sorted(self.path.parent.glob("step-????????"))[: -self.args.keep_checkpoints]:
            shutil.rmtree(old, ignore_errors=True)


unfinished = []  # NODES: the checkpoint that a thread is writing, with --async-checkpoint


@cache  # the first call makes the group
def writer_group():
    """All ranks, for messages of the thread that writes, since training sends others meanwhile."""
    return dist.new_group(backend="gloo")


def wait_for_checkpoint():
    """Waits for the checkpoint in progress, and raises its error, if it has failed."""
    while unfinished:
        unfinished.pop().result()


# LOCAL: `outer` has what the replicas share.
def save_checkpoint(args, run_folder, model, tokenizer, saved_parts, state, outer):
    """Writes all that an exact resume needs, then removes old checkpoints."""
    # NODES 8: One checkpoint at a time, so a killed run loses one checkpoint at most.
    wait_for_checkpoint()
    path = run_folder / f"step-{state.step:08d}"  # names that sort by step
    # LOCAL: Each replica saves its own state.
    parts = sharded_state(model, saved_parts, outer, outer.replica)
    parameters = gather((run_folder / "parameters.json").read_text() if RANK == 0 else None)[0]
    is_local = args.checkpoint_format == "local"
    if is_local:
        path = run_folder / RANK_FOLDER / path.name
        parts = own_shards(parts)
    writer = CheckpointWriter(args, path)
    folder = writer.path
    if RANK == 0:
        shutil.copy(run_folder / "metrics.jsonl", folder)
    if RANK == 0 or is_local:  # NODES: with `local`, all ranks have all other files
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "state.json").write_text(json.dumps(vars(state), indent=2))
        (folder / "parameters.json").write_text(parameters)
    # FSDP 11: Each rank saves its shards: none has room for all. dcp waits for all ranks.
    options = {"storage_writer": writer, "process_group": writer_group()}
    options["no_dist"] = args.checkpoint_format != "shard"  # NODES: without other ranks
    if args.checkpoint_format == "full" and RANK > 0:
        return
    if args.async_checkpoint:
        # NODES 9: Copy all that training changes, and train on. A thread writes the copies.
        unfinished.append(dcp.async_save(parts, **options))
    else:
        dcp.save(parts, **options)


# -- Timer, metrics, logs, small helpers -----------------------------------------------------------


def join_process_group():
    """Meets the other ranks, and returns the device of this rank."""
    # NODES: A shell may still have RANK and WORLD_SIZE of an earlier job. Nobody else would come.
    hint = f"RANK is {RANK} of WORLD_SIZE {WORLD_SIZE}, and others are missing. Alone? Unset both."
    waiting = threading.Timer(60, print, [hint], {"file": sys.stderr})
    waiting.daemon = True  # it does not keep a process alive
    waiting.start()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(LOCAL_RANK)  # DDP: else all ranks of a node use GPU 0
    store, _, _ = next(dist.rendezvous("env://"))
    # DDP: torchrun's key-value store outlives a restart, so a prefix hides keys of the last one.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        # NODES: Each torchrun counts its own restarts, so the ranks would use different prefixes.
        may_restart = int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0
        if may_restart and int(os.environ["GROUP_WORLD_SIZE"]) > 1:  # several torchruns
            remedy = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d"
            sys.exit(f"error: restarts on several nodes need {remedy}")
    # DDP: NCCL moves tensors between GPUs. Gloo moves CPU tensors, without waiting for the GPU.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    waiting.cancel()  # NODES: all ranks are there
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

DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/models/tiny-llama",
    "from_scratch": True,
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",  # the source of Python's library
    "seq_length": 256,
    "batch_size": max(1, 8 // WORLD_SIZE),  # DDP: the global batch of chapter 1, or about that
    # LOCAL: Each process is a replica.
    "replicas": WORLD_SIZE,
    "shard_size": 1,
    "inner_steps": 20,
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
    add("--gradient-accumulation-steps", type=PositiveInt, default=1, help="passes per step")
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
    add("--reshard-after-forward", action=switch, default=True, help="less memory, more traffic")
    # NODES: The number of ranks per copy, the global batch, checkpoints, and the start of a run.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # of a node
    add("--shard-size", type=PositiveInt, default=ranks, help="ranks that share a model")
    # NODES 10: Fewer ranks make more passes, so the global batch does not depend on the nodes.
    add("--global-batch-size", type=PositiveInt, help="in place of --gradient-accumulation-steps")
    formats = ["shard", "local"]  # LOCAL: no `full`, because no rank has the state of all replicas
    add("--checkpoint-format", choices=formats, default="shard", help="who writes which files")
    add("--async-checkpoint", action=switch, default=False, help="train on while files are written")
    add("--resume-dir", type=str, help="checkpoint of any run, where this run begins")
    add("--skip-optimizer", action=switch, default=False, help="only weights from --resume-dir")
    # LOCAL: The replicas, the length of a round, and the optimizer of the shared weights.
    add("--replicas", type=PositiveInt, default=WORLD_SIZE // ranks, help="they train alone")
    add("--inner-steps", type=PositiveInt, default=100, help="optimizer steps of a round")
    add("--outer-lr", type=float, default=1.0, help="1: the mean of the replicas")
    add("--outer-momentum", type=float, default=0.0, help="Nesterov's, over rounds")
    add("--outer-start", type=NonNegativeInt, default=0, help="until then, average each step")
    add("--outer-dtype", choices=["fp32", "bf16"], default="fp32", help="of messages of a round")
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    if parser.parse_args().demo:
        parser.set_defaults(DEMO)
    args = parser.parse_args()  # again, with these defaults
    if min(args.lr, args.weight_decay, args.max_grad_norm) < 0 or not 0 <= args.adam_beta2 < 1:
        parser.error("--lr, --weight-decay, --max-grad-norm: from 0 on; --adam-beta2: 0 to below 1")
    args.pop("config")  # a file name; its flags are in `args` already
    args.pop("config")  # its flags are in `args`
    # LOCAL: A replica has one or more copies of the model.
    if WORLD_SIZE % (args.replicas * args.shard_size):
        product = f"--replicas {args.replicas} × --shard-size {args.shard_size}"
        parser.error(f"{product} does not divide the {WORLD_SIZE} ranks")
    if args.resume_dir and not args.skip_optimizer and not args.experiment_name:
        parser.error("--resume-dir continues a run: name it with -e, or give --skip-optimizer")
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
