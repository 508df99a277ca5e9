"""Chapter 17: low-rank adapters (LoRA), so that a large model can be fine-tuned on small devices.

The weights of the model are frozen: they stay in bf16, without gradients and AdamW moments. Beside
each matrix of a layer, two narrow matrices train. FSDP shards both. The rest is chapter 16.
Comments with LORA 1 to 6 mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # after the demo of chapter 3
    torchrun --standalone --nproc-per-node gpu train-llm.py -e robots-lora     # all GPUs of a node
"""

import atexit
import gc
import json
import math
import os
import re
import shutil
import signal
import sys
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
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
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
    args.base_hash = hash_of_base(args.model_name)  # LORA: a checkpoint has A and B alone
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    # CHAT 1: In a row, only the tokens of the answers have labels, so the others have no loss.
    train_rows, eval_rows, answer_tokens, stop_tokens = load_rows(args, tokenizer)
    # CHAT: All token ids, also those of the padding
    train_tokens, eval_tokens = (rows["input_ids"] for rows in (train_rows, eval_rows))
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
    # LORA: A resumed run reads the frozen weights again. Its checkpoint replaces A and B alone.
    model = build_model(args, device, checkpoint=None)
    # CHAT 2: A server has to stop where the base stops, and at the tokens that end the answers.
    add_stop_tokens(model, stop_tokens)
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
    # CHAT 3: Some families of models let a conversation see the one before it, so test the model.
    # Not before AdamW is made: a forward pass leaves some weights whole, and AdamW needs shards.
    if args.packed and mixes_conversations(model, device):
        sys.exit("error: this model mixes conversations: prepare the rows with --no-packing")
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
        # CHAT 4: The loss is the mean over the N answer tokens of the whole global batch.
        # Each rank knows the samples of all ranks, so it counts N without a message. FSDP averages
        # the gradients over the ranks, so each rank divides its sum of losses by N / dp_size.
        epoch, at = divmod(state.samples, train_samples)
        indices = sample_order(args.seed, epoch, train_samples)[at : at + global_batch]
        # A Python number: FSDP rounds a tensor to bf16, and compiled losses take no NumPy number.
        tokens_per_rank = float(answer_tokens[indices].sum() / dp_size)
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
                # CHAT: Besides token ids, the model gets labels and, if packed, positions.
                batch = model_inputs(train_rows, indices, args, device)
            with timed("forward", times, wait):
                # The model shifts the labels itself, so that each token predicts the next one.
                # use_cache would keep keys and values, which only generation needs.
                # CHAT: The sum over the answers of this micro-batch, divided by `tokens_per_rank`.
                # So each answer token of the global batch counts the same.
                outputs = model(**batch, num_items_in_batch=tokens_per_rank, use_cache=False)
                loss = outputs.loss
                # CHAT: The routers' loss of a mixture comes once per pass, so add up to its mean.
                if getattr(outputs, "aux_loss", None) is not None:
                    loss -= (1 - 1 / accumulation) * model.router_aux_loss_coef * outputs.aux_loss
                del outputs  # CHAT: frees the logits
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
            eval_loss = evaluate(model, eval_rows, args, device, dp_rank, dp_size)  # CHAT: answers
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if save_now and run_folder:
            save_checkpoint(args, run_folder, model, tokenizer, saved_parts, state)
        if log_now:
            logged_time = time.perf_counter()  # so evaluation and checkpoint do not count

    if run_folder and state.step >= total_steps:
        # LORA: Gather the adapters alone, because other programs read the base itself.
        weights = whole_weights(model)
        with new_folder(run_folder / "final") as folder:
            if RANK == 0:
                # LORA: PEFT's files are the adapters, and a config that names the base.
                save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
                model.peft_config["default"].save_pretrained(folder)
                model.generation_config.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                (folder / f"step-{state.step:08d}").touch()  # marks a complete run
        if run_log:
            run_log.comet.end()
        say(f"Done: the adapters are in {run_folder / 'final'}")  # LORA: not the model
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
    options = {"dtype": DTYPES[args.dtype], "attn_implementation": args.attention}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
        # LORA 1: Both models get the same adapters, so rank 0 also sends A and B.
        add_adapters(model, args)
    # LORA: PEFT passes over experts of families that it does not know, so say what has no A and B.
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.dim() > 1 and ".lora_" not in n}
    frozen = {name: size for name, size in sizes.items() if ".base_layer." not in name}
    names = sorted({re.sub(r"\.\d+", "", name) for name in frozen})  # equal in all layers
    say(f"No adapters: {sum(frozen.values()) / sum(sizes.values()):.0%} of the weights ({names})")
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
    if args.packed:
        # CHAT 5: A token attends only to its own conversation, whose tokens have the same number.
        # Packed, a sample has several, and positions restart where each begins. So count the zeros.
        transformers.masking_utils.find_packed_sequence_indices = lambda p: (p == 0).cumsum(-1)
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
    # LORA 2: Frozen weights never change, so they are stored in the compute precision.
    # FSDP would cast them to it anyway, so the results are the same, with half of the memory.
    options = {"dtype": DTYPES[args.dtype], "attn_implementation": args.attention}
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
    add_adapters(model, args)  # LORA: the same as in the sharded model
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


def hash_of_base(name):
    """LORA: Changes with the files of the base, of which 1,000 pieces each are read."""
    if not os.path.isdir(name):
        return AutoConfig.from_pretrained(name)._commit_hash  # the version on the Hub
    files = [file for file in Path(name).iterdir() if file.suffix in (".safetensors", ".bin")]
    pieces = []
    for file in [Path(name, "config.json"), *sorted(files)]:
        content = np.memmap(file, mode="r")
        pieces += [content[n : n + 4096] for n in range(0, len(content), len(content) // 1000 + 1)]
    return Hasher.hash_bytes(pieces)


def add_adapters(model, args):
    """LORA: Freezes the model, and adds two narrow matrices A and B to linear layers."""
    is_local = os.path.isdir(args.model_name)
    config = LoraConfig(
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        target_modules=args.lora_targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=os.path.abspath(args.model_name) if is_local else args.model_name,
    )
    torch.manual_seed(args.seed)  # for A, as versions differ in the numbers drawn before
    # LORA 3: A layer with the weights W now computes W x + alpha / rank × B A x.
    # A is random, and B is 0, so training begins with the model as it was. PEFT freezes W.
    try:
        inject_adapter_in_model(config, model)
    except Exception as error:  # no layer has such a name, or it is no pattern
        sys.exit(f"error: --lora-targets {args.lora_targets}: {error}")
    # FSDP does not gather embeddings for the backward pass, and a tied head has their weights.
    fixed = [model.get_input_embeddings()]
    if model.all_tied_weights_keys:
        fixed.append(model.get_output_embeddings())
    if any(parameter.requires_grad for module in fixed for parameter in module.parameters()):
        sys.exit("error: --lora-targets: embeddings, and a head tied to them, cannot have adapters")
    # LORA 4: A and B train, so they are in fp32, because bf16 would round small changes away.
    # FSDP can gather both types together, because only weights that train must have one type.
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def parameter_groups(model, args):
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


# -- Data and evaluation ---------------------------------------------------------------------------


def add_stop_tokens(model, tokens):
    """Adds these tokens to those at which the base stops."""
    settings = model.generation_config  # of the files generation_config.json
    stops = np.atleast_1d(settings.eos_token_id).tolist() + tokens  # of a number, a list or None
    settings.eos_token_id = [token for token in dict.fromkeys(stops) if token is not None]
    # Transformers refuses to save changed settings that it doubts, such as those of some bases. By
    # this hash it sees a change.
    settings._original_object_hash = hash(settings)


# CHAT: Rows of whole conversations, because a conversation cannot be cut anywhere.
def load_rows(args, tokenizer):
    """Rows to train on, held-out rows, the answer tokens of each of the first, and stop tokens."""
    name = os.path.expanduser(args.dataset_name)
    flags = f"-m {args.model_name} -s {args.seq_length}"
    if not os.path.exists(f"{name}/rows.json"):
        prepare = f'python tools/prepare-data.py "{name}" --as messages --rows {flags} -o data/rows'
        train = f"{Path(__file__).name} {flags} -d data/rows"
        sys.exit(f"error: {name} has no rows: first run `{prepare}`, and then `{train}`")
    facts = json.loads(Path(name, "rows.json").read_text())
    # A base model has no chat template, so its rows have one. Servers need it beside the model.
    tokenizer.chat_template = facts["chat_template"] or tokenizer.chat_template
    vocabulary = sorted(tokenizer.get_vocab().items())
    now = {"length": args.seq_length, "tokenizer": Hasher.hash(json.dumps(vocabulary))}
    if facts["template"]:  # documents have none
        now["template"] = Hasher.hash(tokenizer.chat_template)
    changed = [fact for fact in now if facts[fact] != now[fact]]
    if changed or not glob(f"{escape(name)}/validation-*.parquet"):
        what = f"another {changed[0]}" if changed else "no held-out rows"
        sys.exit(f"error: {name} has {what}: run `{facts['command']} {flags} --overwrite`")
    args.rows_hash = facts["rows_hash"]
    args.packed = facts["packed"]
    splits = datasets.load_dataset("parquet", data_dir=name)
    # Without positions, a model takes a row as one text.
    columns = ["input_ids", "labels"] + ["position_ids"] * args.packed
    # Views of the memory-mapped Arrow file that `datasets` has cached, so this copies nothing.
    train_rows, eval_rows = (
        {name: pyarrow.compute.list_flatten(splits[split].data.column(name)) for name in columns}
        for split in ("train", "validation")
    )
    answer_tokens = splits["train"].data.column("answer_tokens").to_numpy()
    return train_rows, eval_rows, answer_tokens, facts["stop_tokens"]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # CHAT: one pass is not worth compiling
def mixes_conversations(model, device):
    """Whether the first conversation of a sample changes the logits of the second one."""
    ids = np.arange(2, 18)
    ids = np.append(ids, ids + (np.arange(16) < 8))  # the second sample begins with other tokens
    rows = {"input_ids": pyarrow.array(ids), "position_ids": pyarrow.array(np.arange(32) % 8)}
    batch = model_inputs(rows, [0, 1], SimpleNamespace(seq_length=16), device)
    model.eval()
    try:
        logits = model(**batch, use_cache=False).logits
    except ValueError:  # a model with linear attention refuses several conversations in a sample
        return True
    difference = logits[0, 8:] - logits[1, 8:]
    limit = max(1e-3, 4 * torch.finfo(logits.dtype).eps)  # bf16 rounds to 2 or 3 digits
    return difference.abs().max() > limit * logits.abs().max()


def model_inputs(rows, indices, args, device):
    """The samples with these indices on `device`, and what FlashAttention needs."""
    batch = {name: read_batch(rows[name], indices, args, device) for name in rows}
    if "position_ids" in rows:
        # CHAT: FlashAttention joins all samples, and needs the places where conversations begin.
        # They are counted on the CPU, so that Python need not wait for the GPU.
        positions = read_batch(rows["position_ids"], indices, args, torch.device("cpu")).numpy()
        places = np.append(np.flatnonzero(positions == 0), positions.size)
        places = torch.from_numpy(places).int().to(device, non_blocking=True)
        batch |= {"cu_seq_lens_q": places, "cu_seq_lens_k": places}
        batch |= {"max_length_q": args.seq_length, "max_length_k": args.seq_length}
    return batch


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
def evaluate(model, rows, args, device, dp_rank, dp_size):  # DDP: each rank has a share
    """The mean loss over all held-out answers, in nats per token."""
    # CHAT: Each answer token counts the same here, too.
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    samples = len(rows["labels"]) // args.seq_length
    # DDP 10: Each rank evaluates its share, and a sum over ranks gives the mean over all samples.
    for begin in range(0, samples, dp_size * args.batch_size):
        first = begin + dp_rank * args.batch_size
        indices = range(first, min(first + args.batch_size, samples))
        # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many passes.
        # A rank without a batch (no indices) evaluates sample 0, with weight 0.
        batch = model_inputs(rows, indices or [0], args, device)
        # CHAT 6: Multiply the mean of a batch by its answer tokens, because batches differ in them.
        loss = model(**batch, use_cache=False).loss
        loss_sum += loss * (batch["labels"] >= 0).sum() * bool(indices)
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    model.train()  # dropout on again
    return loss_sum.item() / (rows["labels"].to_numpy() >= 0).sum()


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these: they decide the model, samples, their order and precision.
MUST_STAY = ["model_name", "tokens_hash", "seq_length", "seed", "dtype"]
MUST_STAY += ["base_hash", "lora_rank", "lora_alpha", "lora_targets"]  # LORA: A and B fit to them
MUST_STAY += ["rows_hash"]  # CHAT: of ids and labels, and of the chat template


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
    # LORA 5: Frozen weights never change, so a checkpoint has only A and B, and their moments.
    adapters = {n: x for n, x in weights.items() if ".lora_" in n}
    return saved_parts | {"model": adapters, "optimizer": moments}


def whole_weights(model):
    """LORA: The whole adapters on rank 0, and nothing on other ranks. All ranks have to call it."""
    options = dcp_state.StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
    )
    weights = dcp_state.get_model_state_dict(model, options=options)
    # LORA 6: PEFT, Transformers and servers can read final/, because its names are those of PEFT.
    # A tied head has a second name, which `ignore_frozen_params` keeps. So choose by name, too.
    weights = {n.replace(".default", ""): x for n, x in weights.items() if ".lora_" in n}
    return {f"base_model.model.{n}": x for n, x in weights.items()}


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

# CHAT: Rows of conversations about Python's own library
# LORA: Frozen weights must have been trained before, here by the demo of chapter 3.
DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/outputs/demo-fsdp/final",
    "dataset_name": f"{REPOSITORY}/models/tiny-chat/rows",
    "num_epochs": 9,  # CHAT: the conversations fill few samples
    "seq_length": 256,
    "batch_size": max(1, 8 // WORLD_SIZE),  # DDP: the global batch of chapter 1, or about that
    "max_steps": 400,
    "lr": 5e-3,  # LORA: higher, as for --lr
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
    # CHAT: A chat model, which has a chat template.
    add("-m", "--model-name", type=str, default="meta-llama/Llama-3.2-1B-Instruct", help="or path")
    add("--from-scratch", action=switch, default=False, help="random weights, not pretrained ones")
    # CHAT: Conversations of this dataset, once they are rows
    add("-d", "--dataset-name", type=str, default="HuggingFaceH4/no_robots", help="folder of rows")
    add("-s", "--seq-length", type=PositiveInt, default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=PositiveInt, default=8, help="samples per forward pass")
    add("--gradient-accumulation-steps", type=PositiveInt, default=1, help="passes per step")
    add("--num-epochs", type=PositiveInt, default=3, help="passes over the dataset")
    add("--max-steps", type=PositiveInt, help="stop after this many optimizer steps")
    # LORA: B begins at 0, so adapters need about ten times the learning rate of a whole model.
    add("--lr", type=float, default=3e-4, help="peak learning rate")
    add("--lora-rank", type=PositiveInt, default=16, help="rows of A, and columns of B")
    add("--lora-alpha", type=PositiveInt, default=32, help="B A is multiplied by alpha / rank")
    add("--lora-targets", type=str, default="all-linear", help="or a pattern: '.*(q|v)_proj'")
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
    # LORA: This demo begins where another demo has ended.
    if args.model_name == DEMO["model_name"] and not os.path.exists(args.model_name):
        sys.exit("error: first run the demo of chapter 3, whose model this demo continues")
    if args.from_scratch:  # LORA: nothing would save the random weights
        sys.exit("error: adapters need pretrained weights, so --from-scratch is of no use here")
    if os.path.exists(f"{args.model_name}/adapter_config.json"):  # LORA: PEFT would stack them
        sys.exit(f"error: {args.model_name} has adapters: first merge them with their base")
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
