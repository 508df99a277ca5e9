"""Chapter 18: Muon, an optimizer that needs whole matrices, although FSDP has cut them into shards.

Muon makes all singular values of an update about equal. A shard does not know the singular values
of its matrix. So each matrix has an owner: one rank gets all shards of the matrix, computes the
update, and sends the shards of the update back. Comments with MUON 1 to 8 mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e alpaca-muon     # all GPUs of a node
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
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
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
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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
    model = build_model(args, device, checkpoint)
    vocab_size = model.config.get_text_config().vocab_size
    if max(tokenizer.get_vocab().values()) >= vocab_size:  # harmless, unless the text has such ids
        largest = max(pyarrow.compute.max(tokens).as_py() for tokens in (train_tokens, eval_tokens))
        if largest >= vocab_size:
            sys.exit(f"error: token {largest} is outside the vocabulary of {args.model_name}")
    groups = parameter_groups(model, args)
    optimizer = Muon(groups, args, device)  # MUON: in place of AdamW
    # Gradients below 3e-8 are 0 in fp16. The scaler multiplies the loss, and so all gradients.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    saved_parts = {"optimizer": optimizer, "scaler": scaler}  # beside the model
    if checkpoint:
        # FSDP 2: Each rank reads its shards, whatever the number of ranks that saved them.
        # dcp.load() fills tensors in place. Decay and lr are no tensors, so the flags decide them.
        dcp.load(sharded_state(model, saved_parts), checkpoint_id=checkpoint)
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
            # DDP 9: Average the loss over ranks, because each rank has seen its own samples only.
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
            eval_loss = evaluate(model, eval_tokens, args, device, dp_rank, dp_size)  # DDP: shares
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if save_now and run_folder:
            save_checkpoint(args, run_folder, model, tokenizer, saved_parts, state)
        if log_now:
            logged_time = time.perf_counter()  # so evaluation and checkpoint do not count

    if run_folder and state.step >= total_steps:
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
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    # MUON 1: Muon trains the matrices of layers, and AdamW trains all other parameters.
    # A row of the embeddings or of the head belongs to one token, and trains better with AdamW.
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    in_layers = {p for layer in layers for p in layer.parameters()}
    of_muon = [p for p in matrices if p in in_layers]
    matrices = [p for p in matrices if p not in in_layers]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    muon = {"params": of_muon, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}, muon]  # MUON: the last group


# -- Muon ------------------------------------------------------------------------------------------

MOMENTUM = 0.95  # MUON: as in torch.optim.Muon


class Muon(torch.optim.AdamW):
    """Muon for the last group of parameters, and AdamW for the other groups.

    On any number of ranks, it computes what torch.optim.Muon computes on one device.
    https://kellerjordan.github.io/posts/muon, https://arxiv.org/abs/2502.16982
    """

    def __init__(self, groups, args, device):
        super().__init__(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)
        # The device that multiplies matrices. With --cpu-offload, shards are on the CPU.
        self.device = device
        # bf16 is exact enough for Newton-Schulz. fp16 is not, because its range is too small.
        self.dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
        params = groups[-1]["params"]
        self.experts = [p for p in params if p.dim() == 3]
        matrices = [p for p in params if p.dim() == 2]
        # The ranks among which FSDP cuts a matrix: all ranks here
        mesh = matrices[0].device_mesh
        self.group = mesh.get_group(mesh.ndim - 1)
        own_place = self.group.rank()
        # MUON 2: Each matrix has one owner, so that no rank repeats the work of another rank.
        by_owner = choose_owners(matrices, self.group.size())
        self.owned = by_owner[own_place]
        # MUON 3: Shards differ in size, and may be empty, so each rank tells all others its sizes.
        own_sizes = []  # for each owner, the sizes of this rank's shards
        self.matrices = []  # in the same order: those of rank 0, those of rank 1, and so on
        for owned in by_owner:
            own_sizes.append([shard_size(p) for p in owned])
            self.matrices += owned
        self.sizes = [shard_size(p) for p in self.matrices]
        self.to_owners = [sum(sizes) for sizes in own_sizes]  # numbers that go to each owner
        self.from_ranks = []  # numbers that come from each rank
        self.received_sizes = []  # of each received shard: those of rank 0, then of rank 1, ...
        sizes_by_rank = gather(own_sizes)
        for rank in dist.get_process_group_ranks(self.group):
            sizes = sizes_by_rank[rank][own_place]  # its shards of matrices that this rank owns
            self.from_ranks.append(sum(sizes))
            self.received_sizes += sizes

    @torch.no_grad()
    def step(self, closure=None):
        """Moves all parameters. Every rank has to call it, because ranks exchange shards."""
        # The scaler of fp16 sets found_inf, on all ranks alike. Then no rank changes anything.
        if getattr(self, "found_inf", 0):
            return
        # MUON 4: One message carries this rank's shards of all matrices to their owners.
        message = torch.cat([self.direction(p) for p in self.matrices])
        received = message.new_empty(sum(self.from_ranks))
        dist.all_to_all_single(received, message, self.from_ranks, self.to_owners, self.group)
        self.orthogonalize_owned(received)
        # MUON 5: The new shards go back, each to its own rank and to its old place in the message.
        dist.all_to_all_single(message, received, self.to_owners, self.from_ranks, self.group)
        shards = message.split(self.sizes)
        for p, shard in zip(self.matrices, shards, strict=True):
            self.move(p, shard)
        # MUON 6: Experts need no message, because FSDP cuts between experts, not through them.
        for p in self.experts:
            own_experts = self.direction(p)
            own_experts = own_experts.view(p.to_local().shape)
            for expert in own_experts:
                expert.copy_(orthogonalize(expert))
            self.move(p, own_experts)
        super().step()  # AdamW, for all parameters that still have a gradient

    def direction(self, p):
        """Adds the gradient to the momentum. Returns this rank's shard of the direction, flat."""
        state = self.state[p]
        if not state:
            # MUON 7: Momentum is sharded like its weight, so other numbers of ranks can resume.
            state["momentum"] = torch.zeros_like(p)
        momentum = state["momentum"]
        momentum.lerp_(p.grad, 1 - MOMENTUM)
        direction = p.grad.lerp(momentum, MOMENTUM)  # one step ahead, as Nesterov does
        p.grad = None  # AdamW skips parameters without a gradient
        shard = direction.to_local().flatten()
        return shard.to(self.device, self.dtype)  # rounded before it travels: half of the bytes

    def orthogonalize_owned(self, received):
        """Replaces the shards of this owner's matrices by shards of the orthogonal matrices."""
        # The shards of rank 0 come first, then those of rank 1, and so on. Each rank has sent one
        # shard of each matrix. So the shards of a matrix are `count` places apart.
        places = received.split(self.received_sizes)  # views: a copy into them changes `received`
        count = len(self.owned)
        for number, p in enumerate(self.owned):
            shards = places[number::count]
            whole = torch.cat(shards)
            whole = orthogonalize(whole.view(p.shape))
            sizes = [len(shard) for shard in shards]
            new_shards = whole.flatten().split(sizes)
            for shard, new_shard in zip(shards, new_shards, strict=True):
                shard.copy_(new_shard)

    def move(self, p, direction):
        """Moves this rank's shard of a weight."""
        # MUON 8: Scale the update to the size of AdamW's updates, so that one --lr suits both.
        # Numbers of AdamW's updates are about 0.2 (root mean square). Numbers of an orthogonal
        # matrix are 1 / sqrt(longer side).
        scale = 0.2 * math.sqrt(max(p.shape[-2:]))
        group = self.param_groups[-1]
        lr = group["lr"]
        weight = p.to_local()
        weight.mul_(1 - lr * group["weight_decay"])
        direction = direction.view(weight.shape)
        direction = direction.to(weight.device)
        weight.add_(direction, alpha=-lr * scale)


def shard_size(p):
    """How many numbers of a parameter this rank has."""
    return p.to_local().numel()


def choose_owners(matrices, ranks):
    """For each rank, the matrices that it owns. All ranks compute the same lists."""
    by_owner = [[] for _ in range(ranks)]
    work = [0] * ranks
    # The matrix with the most work comes first. It goes to the rank with the least work so far.
    for matrix in sorted(matrices, key=work_of, reverse=True):
        owner = work.index(min(work))
        by_owner[owner].append(matrix)
        work[owner] += work_of(matrix)
    return by_owner


def work_of(matrix):
    """The multiplications of `orthogonalize`, per iteration."""
    short, long = sorted(matrix.shape)
    return short * short * (2 * long + short)


def orthogonalize(matrix):
    """The matrix with the same singular vectors, and with all singular values near 1."""
    # MUON: Newton-Schulz. Each iteration turns a singular value s into a s + b s^3 + c s^5.
    # It multiplies the whole matrix by itself, so that some rows of it are not enough.
    a, b, c = 3.4445, -4.7750, 2.0315  # as in torch.optim.Muon
    rows, columns = matrix.shape
    is_tall = rows > columns
    x = matrix.T if is_tall else matrix  # x @ x.T is then small
    x = x / x.norm().clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(5):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram @ gram
        x = torch.addmm(x, polynomial, x, beta=a)  # a x + polynomial @ x
    return x.T if is_tall else x


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
    return saved_parts | {"model": weights, "optimizer": moments}


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

DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/models/tiny-llama",
    "from_scratch": True,
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",  # the source of Python's library
    "seq_length": 256,
    "batch_size": max(1, 8 // WORLD_SIZE),  # DDP: the global batch of chapter 1, or about that
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
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    if parser.parse_args().demo:
        parser.set_defaults(DEMO)
    args = parser.parse_args()  # again, with these defaults
    if min(args.lr, args.weight_decay, args.max_grad_norm) < 0 or not 0 <= args.adam_beta2 < 1:
        parser.error("--lr, --weight-decay, --max-grad-norm: from 0 on; --adam-beta2: 0 to below 1")
    args.pop("config")  # a file name; its flags are in `args` already
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
