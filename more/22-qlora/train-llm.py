"""Chapter 22: frozen weights in 4 bits (QLoRA), for a quarter of the memory that bf16 needs.

The matrices of the layers are stored and sent as 4-bit codes. A code names one of 16 numbers, and
each block of 64 codes has a scale. When a layer computes, it turns them into 16-bit weights again.
The adapters train as in chapter 17. Comments with QLORA 1 to 5 mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # after the demo of chapter 3
    torchrun --standalone --nproc-per-node gpu train-llm.py -e robots-qlora    # all GPUs of a node
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
from functools import lru_cache, partial
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
from jsonargparse.typing import NonNegativeInt, PositiveInt
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.utils.parametrize import register_parametrization
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import is_flash_attn_2_available

# DDP 1: torchrun starts one process per device, and these variables tell each process who it is.
RANK = int(os.environ.get("RANK", 0))  # its number among all processes
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # its number on its node (machine)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
PARENTS = Path(__file__).resolve().parents
REPOSITORY = next((p for p in PARENTS if (p / "pyproject.toml").exists()), PARENTS[0])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
received_signals = []  # the signal handler appends to this list, and the training loop reads it
training_has_begun = False  # until then, an error is one sentence, without a traceback


@record  # DDP: torchrun then reports the traceback of the rank that failed first
def main():
    global training_has_begun
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # shows each line at once
    if RANK > 0:  # DDP: the others would print the same
        sys.stdout = open(os.devnull, "w")
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
    dp_rank = RANK  # the share of the data that this rank reads. In later chapters, ranks share one
    dp_size = WORLD_SIZE  # number of shares
    global_batch = args.batch_size * accumulation * dp_size  # samples per optimizer step
    if os.path.isdir(args.model_name.split("/")[0]) and not os.path.exists(args.model_name):
        sys.exit(f"error: there is no folder {args.model_name}")
    args.base_hash = hash_of_base(args.model_name)  # LORA: a checkpoint has A and B alone
    args.base_hash += " in 4 bits"  # QLORA: chapter 17 has other weights under the same adapters
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    # CHAT: A base model has no chat template. A file gives it one, or replaces the model's own.
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text(encoding="utf-8")
    if not tokenizer.chat_template:
        sys.exit(f"error: {args.model_name} has no chat template: give --chat-template a file")
    args.template_hash = Hasher.hash(tokenizer.chat_template)
    # DDP: The first rank or job prepares these samples, and the others then find them in the cache.
    corpus = [args.dataset_name, args.dataset_subset, args.template_hash, args.model_name]
    with FileLock(f"{datasets.config.HF_DATASETS_CACHE}/{Hasher.hash(corpus)}.lock"):
        train_set, eval_set = load_samples(args, tokenizer)
    # CHAT: Views of all token ids, without a copy. They include padding.
    columns = [samples.data.column("input_ids") for samples in (train_set, eval_set)]
    train_tokens, eval_tokens = (pyarrow.compute.list_flatten(column) for column in columns)
    train_samples = len(train_tokens) // args.seq_length
    if train_samples < global_batch or len(eval_tokens) < args.seq_length:
        sys.exit("error: too few answers fit, to train on or to hold out: lower -b, or raise -s")
    say(f"Training on {train_samples:,} samples; {len(eval_tokens):,} tokens are held out")
    answer_tokens = train_set.data.column("answer_tokens").to_numpy()  # CHAT: of each sample

    # With -e, a run continues from its newest checkpoint, if its setup is still the same.
    # Above 100 million tokens, the hash has 1,000 pieces, since reading all would take minutes.
    begins = range(0, len(train_tokens), max(100_000, len(train_tokens) // 1000))
    tokens_hash = Hasher.hash_bytes(np.asarray(train_tokens.slice(n, 100_000)) for n in begins)
    setup = args.as_dict() | {"global_batch": global_batch, "tokens_hash": tokens_hash}
    run_folder, checkpoint, state = open_run(args, setup)  # without -e: None, None, step 0
    # DDP: If flags, data or checkpoints differed between ranks, training would silently go wrong.
    setups = gather(setup | {"step of the checkpoint": state.step})
    differing = [name for name in setups[0] if any(s[name] != setups[0][name] for s in setups)]
    if differing:
        sys.exit(f"error: ranks differ in {differing}: use the same flags, data and --save-dir")
    samples_left = args.num_epochs * train_samples - state.samples
    total_steps = min(state.step + samples_left // global_batch, args.max_steps or math.inf)
    if state.step >= total_steps and (run_folder / f"final/step-{state.step:08d}").exists():
        say(f"Already complete: choose another -e, or delete {run_folder}")
        return

    # Model and optimizer.
    # FSDP 1: Only rank 0 holds the whole model, in CPU memory, and sends each rank its shards.
    # LORA: A resumed run reads the frozen weights again. Its checkpoint replaces A and B alone.
    model = build_model(args, device, checkpoint=None)
    # CHAT 1: A server has to stop where the base stops, and at the tokens that end the answers.
    set_stop_tokens(model, tokenizer, train_set)
    vocab_size = model.config.get_text_config().vocab_size
    if max(tokenizer.get_vocab().values()) >= vocab_size:  # then the text must not use such tokens
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
        # sharded_state() has the live weights and moments. dcp.load() fills them, not decay or lr.
        dcp.load(sharded_state(model, saved_parts), checkpoint_id=checkpoint)
    # CHAT 2: Some families of models let a conversation see the one before it, so test the model.
    # Not before AdamW is made: a forward pass leaves some weights whole, and AdamW needs shards.
    if args.packing and mixes_conversations(model, device):
        sys.exit("error: this model mixes the conversations of a sample: give --no-packing")
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save, and rank 0 logs
        parameters = setup | describe_run(model, optimizer, device, train_samples)
        run_log = RunLog(args, run_folder, checkpoint, state, parameters)
        run_log.comet.set_model_graph(str(model))  # the architecture as text
    # Ctrl-C, `kill`, a closed terminal and Slurm's SIGUSR1 end the run after a step.
    # DDP: torchrun sends SIGUSR1 only with --signals-to-handle. It kills after --shutdown-timeout.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:  # `nohup` ignores SIGHUP
            signal.signal(number, remember_signal)

    # The training loop.
    training_has_begun = True
    gc.freeze()  # Python's garbage collector need not look at all that exists by now
    loss_sum = torch.zeros((), device=device)
    logged_step = state.step
    logged_time = time.perf_counter()
    # None: a bar only on a terminal
    progress = tqdm(total=total_steps, initial=state.step, file=sys.stdout, disable=None)
    stop_signal = 0  # none
    model.train()  # turns dropout on, if the model has any
    while state.step < total_steps and not stop_signal:
        step = state.step + 1
        at_end = step == total_steps
        eval_now = args.eval_freq > 0 and (step % args.eval_freq == 0 or at_end)
        save_now = step % args.ckpt_freq == 0 or at_end
        log_now = step % args.log_freq == 0 or eval_now or save_now  # checks for NaN before both
        times = defaultdict(float)  # milliseconds of each phase
        # Python runs ahead of the GPU. Only logged steps wait for each phase, to measure it.
        wait = log_now and device.type != "cpu"
        # CHAT 3: The loss is the mean over the N answer tokens of the whole global batch.
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
            # FSDP: Each micro-batch averages gradients and frees weights, which saves memory. With
            # --no-reshard-after-forward, only the last one does, which saves traffic.
            communicate = args.reshard_after_forward or micro_step == accumulation - 1
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            with timed("data", times, wait):
                epoch, offset = divmod(first, train_samples)
                order = sample_order(args.seed, epoch, train_samples)
                indices = order[offset : offset + args.batch_size]
                # CHAT: Besides token ids, the model gets labels and, if packed, positions.
                batch = model_inputs(train_set[indices], device)
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
            # FSDP 3: The norm is a DTensor, a part on each rank. full_tensor() joins all parts.
            grad_norm = grad_norm.full_tensor()
            rate = learning_rate(state.step, total_steps, args)
            for group in optimizer.param_groups:
                group["lr"] = rate
            scaler.step(optimizer)  # the same as optimizer.step(), except in fp16
            scaler.update()  # a lower scale after infinite gradients, and later a higher one
            optimizer.zero_grad()  # because backward() adds to the gradients
        state.step = step
        state.samples += global_batch  # over all epochs
        state.epoch = state.samples / train_samples
        progress.update()

        # DDP: A signal may reach the ranks in different steps. All must stop after the same step.
        received = torch.tensor(max(received_signals, default=0))
        dist.all_reduce(received, dist.ReduceOp.MAX)
        stop_signal = received.item()
        if stop_signal:  # a cluster waits some 30 s only, so save at once, and do not evaluate
            times = times if log_now else {}  # phases of other steps are not measured
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
            # NaN ends a run before it saves. In fp16, a step with infinite gradients is skipped.
            norm_is_wrong = args.dtype != "fp16" and not grad_norm.isfinite()
            if not math.isfinite(mean_loss) or norm_is_wrong:
                sys.exit("error: loss or gradient is not finite: lower --lr, or check the model")
            loss_sum.zero_()
            logged_step = step
        if eval_now and not stop_signal:
            eval_loss = evaluate(model, eval_set, args, device, dp_rank, dp_size)  # CHAT: answers
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
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[args.dtype], attn_implementation=args.attention
        )
        # LORA 1: Both models get the same adapters, so rank 0 also sends A and B.
        add_adapters(model, args)
    # LORA: PEFT passes over experts of families that it does not know, so say what has no A and B.
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.dim() > 1 and ".lora_" not in n}
    frozen = {name: size for name, size in sizes.items() if ".base_layer." not in name}
    names = sorted({re.sub(r"\.\d+", "", name) for name in frozen})  # equal in all layers
    say(f"No adapters: {sum(frozen.values()) / sum(sizes.values()):.0%} of the weights ({names})")
    model.parameters_total = model.num_parameters()  # QLORA: before two of them share a byte
    quantize_layers(model, args, device)  # QLORA: only the shapes, because these are meta tensors
    # QLORA: The experts of a layer are one tensor, not linear layers. So say what is not in 4 bits.
    left = {name: sizes[name] for name, _ in model.named_parameters() if name in sizes}
    share = sum(left.values()) / sum(sizes.values())
    memory = f"{sum(left.values()) * DTYPES[args.dtype].itemsize / 1e9:.1f} GB in {args.dtype}"
    names = sorted({re.sub(r"\.\d+", "", name) for name in left})
    warning = "warning: " if share > 0.5 else ""
    say(f"{warning}Not in 4 bits: {share:.0%} of the weights, {memory} in all ({names})")
    # FSDP: No autocast, as FSDP casts weights. Transformers computes norms, softmax, loss in fp32.
    shard_model(model, args, device)
    compute_buffers(model, device)
    if checkpoint:  # FSDP: dcp.load() reads its weights later
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint)
    else:
        send_weights(args, model)
        gc.collect()  # QLORA: rank 0's whole model, whose layers refer to themselves (QLORA 5)
    use_flash = device.type == "cuda" and args.dtype != "fp32" and is_flash_attn_2_available()
    if args.attention is None and use_flash and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    # Replace two functions of Transformers, which wait for the GPU to look for packed documents.
    transformers.masking_utils.find_packed_sequence_indices = lambda position_ids: None
    transformers.modeling_flash_attention_utils._is_packed_sequence = lambda *args: False
    if args.packing:
        # CHAT 4: A token attends only to its own conversation, whose tokens have the same number.
        # Packed, a sample has several, and positions restart where each begins. So count the zeros.
        transformers.masking_utils.find_packed_sequence_indices = lambda p: (p == 0).cumsum(-1)
    # All decoder layers have this class, also without activation checkpointing.
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    say(f"Attention {model.config._attn_implementation}, {args.dtype}, {len(layers)} layers")
    if args.activation_checkpointing:
        # A layer keeps only its input. The backward pass computes the rest a second time.
        model.activation_checkpointing_enable()  # its older name: gradient_checkpointing_enable
    if args.compile:
        # Layer by layer: a whole compiled model builds an attention mask, which is slower.
        for layer in layers:
            layer.compile()
        model.loss_function = torch.compile(model.loss_function)  # without an fp32 copy of logits
    return model


def shard_model(model, args, device):
    """Splits each parameter over ranks (a DTensor, still empty). Hooks gather and free layers."""
    # FSDP 6: Gather weights in --dtype: bf16 halves the traffic. Average gradients in fp32.
    policy = {"mp_policy": MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32)}
    if args.cpu_offload:
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # FSDP 7: Each layer is a unit, which hooks gather and free: one or two are whole at a time.
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
        parameter._is_hf_initialized = True  # Transformers then draws no random weights
    for module in model.modules():
        # QLORA: Only modules with buffers. Others could draw a weight, which now is a property.
        if [*module.buffers(recurse=False)]:
            model._init_weights(module)
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
    # QLORA: Here they are first read in the type of their files (QLORA 1), and cast later.
    options = {"dtype": "auto", "attn_implementation": args.attention}
    if args.from_scratch and not checkpoint:
        config = AutoConfig.from_pretrained(args.model_name)
        model = AutoModelForCausalLM.from_config(config, **options)
        # How many random numbers from_config() uses depends on the version. Seed and draw again.
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
        sys.exit(f"error: {source} has a head of its own: set tie_word_embeddings to false there")
    add_adapters(model, args)  # LORA: the same as in the sharded model
    # QLORA 1: Files that need no cast are only mapped, so each matrix is read when quantized.
    # Rank 0 never holds the 16-bit model, and sends the one in 4 bits.
    quantize_layers(model, args, device="cpu")
    return model


def learning_rate(step, total_steps, args):
    """The learning rate of a step, counted from 0: a warm-up, then a curve. Add your own."""
    if step < args.warmup_steps:
        return args.lr * (step / args.warmup_steps)
    done = (step - args.warmup_steps) / (total_steps - args.warmup_steps)  # from 0 to 1
    left = (total_steps - step) / (total_steps - args.warmup_steps)  # from 1 to 0
    curves = {
        "constant": 1,
        "linear": left,
        "cosine": 0.5 * (1 + math.cos(math.pi * (args.lr_cycles * done % 1))),
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


# QLORA 2: A code of 4 bits names one of 16 numbers, with more of them where weights are: near 0.
# They are quantiles of a normal distribution: NF4, from the QLoRA paper and as in bitsandbytes.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
BLOCK = 64  # weights that share a scale


class FourBits(torch.nn.Module):
    """QLORA: Turns a weight into codes, two in a byte, and scales, and back."""

    def __init__(self, device):
        super().__init__()
        table = torch.tensor(NF4, device="cpu")
        self.borders = (table[1:] + table[:-1]) / 2  # between a number and the next
        # The two numbers of each of the 256 bytes. No buffer, because to_empty() would empty it.
        self.pairs = torch.cartesian_prod(table, table).to(device)

    def right_inverse(self, weight):
        # QLORA 3: A block's scale is its largest weight, so --dtype stores the scale exactly.
        # Blocks lie within rows, and FSDP cuts between rows, so a rank has the scales of its codes.
        blocks = weight.float().unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1, keepdim=True)
        borders = self.borders.to(weight.device)
        codes = torch.bucketize(blocks * (1 / scales), borders)  # of the nearest number
        codes = codes.to(torch.uint8).flatten(-2)
        return codes[..., ::2] * 16 + codes[..., 1::2], scales.squeeze(-1).to(weight.dtype)

    def forward(self, codes, scales):
        blocks = self.pairs[codes.int()].flatten(-2).unflatten(-1, (-1, BLOCK))
        return (blocks * scales[..., None]).to(scales.dtype).flatten(-2)  # multiplied in fp32


def quantize_layers(model, args, device):
    """QLORA: Replaces the frozen weights of linear layers by codes and scales, one at a time."""
    four_bits = FourBits(device)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    for module in [module for layer in layers for module in layer.modules()]:
        is_linear = isinstance(module, torch.nn.Linear | Conv1D)
        if not is_linear or module.weight.requires_grad or module.weight.shape[-1] % BLOCK:
            continue  # another module, or A or B, or rows that are no whole blocks
        module.weight.data = module.weight.data.to(DTYPES[args.dtype])
        # QLORA 4: The weight becomes a property, which forward() computes from codes and scales.
        # PyTorch stores these two of right_inverse() as frozen parameters, and FSDP shards them.
        register_parametrization(module, "weight", four_bits, unsafe=True)
        # QLORA 5: Autograd would keep all 16-bit weights, so the backward pass computes them again.
        module.forward = partial(
            torch.utils.checkpoint.checkpoint,
            module.forward,
            use_reentrant=False,
            preserve_rng_state=False,  # a linear layer draws no random numbers
        )


def parameter_groups(model, args):
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


# -- Data and evaluation ---------------------------------------------------------------------------

READERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
READERS |= {".csv": "csv", ".parquet": "parquet"}
# CHAT: A text is a row of token ids. A conversation becomes one text, or several (CHAT 8), and
# samples are made of texts. All have these columns. `stop_tokens` are the last tokens of the
# answers that fit into a sample. Only the first text of a conversation has the number of all its
# `answers`, or a `refusal`, which says why there are none.
LISTS = ["input_ids", "labels", "position_ids", "stop_tokens"]
COLUMNS = dict.fromkeys(LISTS, datasets.List(datasets.Value("int32")))
COLUMNS |= dict.fromkeys(["answer_tokens", "answers"], datasets.Value("int32"))
COLUMNS |= {"refusal": datasets.Value("string")}
EVAL_SAMPLES = 1000  # held-out samples at most, because each evaluation takes time


# CHAT: Samples, and not tokens, because a conversation cannot be cut anywhere.
def load_samples(args, tokenizer):
    """The samples to train on, and the held-out ones: a split of the dataset, or its last 1 %."""
    name, train_split = os.path.expanduser(args.dataset_name), "train"
    if ":" in name and not glob(name, recursive=True):
        name, _, train_split = name.rpartition(":")  # NAME:SPLIT
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
    train_split = tokenize_split(splits.pop(train_split), tokenizer, args)
    eval_split = splits.get("validation") or splits.get("test")
    if eval_split:
        eval_split = tokenize_split(eval_split, tokenizer, args)
    else:
        # CHAT 5: Hold out whole conversations before they are packed, because packing sorts them.
        # Only conversations with an answer that fits count.
        # `answers` is above 0 in the first text of each, so this sum is the number of each text's
        # conversation.
        numbers = np.cumsum(train_split.data.column("answers").to_numpy() > 0)
        fitting = np.unique(numbers[train_split.data.column("answer_tokens").to_numpy() > 0])
        held_out = fitting[-min(max(1, len(fitting) // 100), EVAL_SAMPLES) :]
        # If no answer fits, main() ends the run.
        begin = np.searchsorted(numbers, held_out[0]) if len(held_out) else 0
        eval_split = train_split.select(range(begin, len(train_split)))
        train_split = train_split.select(range(begin))
    packing = {"size": args.seq_length, "several": args.packing}
    # Without positions, a model takes a sample as one text.
    columns = ["input_ids", "labels"] + ["position_ids"] * args.packing
    train_set, eval_set = (
        split.map(pack, batched=True, fn_kwargs=packing).with_format("torch", columns=columns)
        for split in (train_split, eval_split)
    )
    return train_set, eval_set.select(range(min(len(eval_set), EVAL_SAMPLES)))


def rows_of(batch):
    """The rows of a batch, as dictionaries. A batch has a list for each column."""
    return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def conversation_of(row):
    """The messages of a row, and its tools or None. Null stands for a key that is not there."""
    messages = [{k: v for k, v in m.items() if v is not None} for m in row["messages"] or []]
    for message in messages:
        if not isinstance(message["content"], str):  # a template would write a list as text
            raise ValueError("the content of a message is no text")
        if "tool_calls" in message:  # JSON text, as a table would give all calls the same keys
            message["tool_calls"] = json.loads(message["tool_calls"])
    return messages, json.loads(row.get("tools") or "null")


def texts_of(messages, tools, tokenizer, options, size):
    """One or more texts of a conversation, with the answers that fit into `size` tokens."""
    options = {"tokenize": False, "tools": tools, **options}
    texts = [new_text()]
    for n, message in enumerate(messages):
        has_loss = 0 not in (message.get("weight"), message.get("train"))  # False is 0, too
        if message["role"] != "assistant" or n == 0 or not has_loss:
            continue  # an answer needs a prompt
        # CHAT 6: The answer begins where the prompt ends, because a server sends this prompt.
        prompt = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(messages[: n + 1], **options)
        if not whole.startswith(prompt):
            raise ValueError(f"an answer does not begin where its prompt ends: {prompt[-60:]!r}")
        answer = whole[len(prompt) :].rstrip()  # without the line end behind it
        # CHAT 7: Each is tokenized apart. In one text, a token could have characters of both.
        # SentencePiece puts a space before a text. So tokenize the answer behind a line end, and
        # cut off the tokens of both.
        prompt_ids, line_end, answer_ids = encode([prompt, "\n", "\n" + answer], tokenizer)
        if answer_ids[: len(line_end)] == line_end:
            answer_ids = answer_ids[len(line_end) :]
        else:  # the answer begins with white space, which joins the line end
            [answer_ids] = encode([answer], tokenizer)
        texts[0]["answers"] += 1
        # Whole answers only, because a cut answer does not teach to stop.
        if len(prompt_ids) + len(answer_ids) > size:
            continue
        # CHAT 8: Usually, the tokens of the prompt continue the last text, which then grows.
        # Some templates change earlier turns, as Qwen3's removes thoughts. Then begin another text.
        if prompt_ids[: len(texts[-1]["input_ids"])] != texts[-1]["input_ids"]:
            texts.append(new_text())
        text = texts[-1]
        text["labels"] += [-100] * (len(prompt_ids) - len(text["labels"])) + answer_ids
        text["labels"][0] = -100  # nothing predicts the first token, even if the prompt is empty
        text["input_ids"] = prompt_ids + answer_ids
        text["stop_tokens"] += answer_ids[-1:]
    return texts


def new_text(refusal=""):
    """A text without tokens."""
    return {"input_ids": [], "labels": [], "stop_tokens": [], "answers": 0, "refusal": refusal}


def encode(texts, tokenizer):
    """The token ids of each text."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # which the files of a tokenizer may ask for
    backend.no_padding()
    # "Fast" does not find the place of each token in its text. The template writes the
    # begin-of-text token, so the tokenizer must not add another one.
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]


def tokenize_split(documents, tokenizer, args):
    """The texts of all conversations of a split."""
    size = args.seq_length
    if "messages" not in documents.column_names:
        sys.exit(f"error: {args.dataset_name} has no messages: let tools/prepare-data.py make them")
    find_stop_token(tokenizer, args, documents[:100])  # ends the run if no answer is good
    tokenized = documents.map(
        tokenize,
        batched=True,
        batch_size=32,
        fn_kwargs={"tokenizer": tokenizer, "options": args.template_options, "size": size},
        remove_columns=documents.column_names,  # CHAT: COLUMNS take their place
        features=datasets.Features(COLUMNS),
    )
    answers = pyarrow.compute.sum(tokenized.data.column("answers")).as_py()
    fitting = len(pyarrow.compute.list_flatten(tokenized.data.column("stop_tokens")))
    say(f"{len(documents):,} conversations, {answers:,} answers: {fitting:,} fit into -s {size}")
    refused = [reason for reason in tokenized.data.column("refusal").to_pylist() if reason]
    if refused:
        say(f"warning: the template refuses {len(refused):,} conversations, as with: {refused[0]}")
        if len(refused) > len(documents) / 20:
            sys.exit("error: more than 5 % of the conversations are refused, too many to leave out")
    return tokenized.with_format("numpy")  # `pack` gets arrays


def tokenize(batch, tokenizer, options, size):
    """Conversations: token ids, and labels, which are -100 except for the tokens of answers."""
    texts = []
    for row in rows_of(batch):
        try:
            texts += texts_of(*conversation_of(row), tokenizer, options, size)
        except Exception as error:  # from a template, it may be any
            texts.append(new_text(refusal=str(error) or repr(error)))
    for text in texts:
        labels = text["labels"]
        text["position_ids"] = np.arange(len(labels))
        text["answer_tokens"] = len(labels) - labels.count(-100)
    return {name: [text[name] for text in texts] for name in COLUMNS}


def find_stop_token(tokenizer, args, batch):
    """The token that ends the first good answer of a batch of rows."""
    found = tokenize(batch, tokenizer, args.template_options, size=math.inf)
    problem = "no conversation has an answer, of the role 'assistant' and behind a question"
    for text in rows_of(found):
        answer_ids = [token for token in text["labels"] if token >= 0]
        if text["refusal"]:
            problem = f"a conversation is refused (docs/data.md says why): {text['refusal']}"
        elif answer_ids and answer_ids == text["stop_tokens"]:  # one token each
            problem = "the chat template leaves out the answers"
        elif answer_ids and answer_ids[-1] not in tokenizer.added_tokens_decoder:
            problem = f"an answer ends with {tokenizer.decode(answer_ids[-9:])!r}, no special token"
        elif answer_ids:
            return answer_ids[-1]
    sys.exit(f"error: {problem}")


def set_stop_tokens(model, tokenizer, train_set):
    """Adds the last tokens of the answers to those at which the base stops."""
    ends = pyarrow.compute.list_flatten(train_set.data.column("stop_tokens")).unique().to_pylist()
    settings = model.generation_config  # of the files generation_config.json
    stops = np.atleast_1d(settings.eos_token_id).tolist()  # of a number, a list or None
    stops = stops + [token for token in ends if token in tokenizer.added_tokens_decoder]
    settings.eos_token_id = [token for token in dict.fromkeys(stops) if token is not None]
    # Transformers refuses to save changed settings that it doubts, such as those of some bases. By
    # this hash it sees a change.
    settings._original_object_hash = hash(settings)


def pack(batch, size, several):
    """Samples of `size` tokens. Each has one or several whole texts, then padding."""
    samples = []
    # CHAT 9: The longest texts come first, each into the fullest sample that has room.
    for text in sorted(rows_of(batch), key=lambda row: -len(row["labels"])):
        most = size - len(text["labels"])  # tokens of a sample that has room
        with_room = [sample for sample in samples if len(sample["labels"]) <= most]
        if several and with_room:
            fullest = max(with_room, key=lambda sample: len(sample["labels"]))
            fullest["answer_tokens"] += text["answer_tokens"]
            for name in LISTS:
                fullest[name] = np.append(fullest[name], text[name])
        elif len(text["labels"]):  # one or more of its answers fit
            samples.append(text)
    for sample in samples:
        padding = size - len(sample["labels"])
        sample["input_ids"] = np.pad(sample["input_ids"], (0, padding))  # any token
        sample["labels"] = np.pad(sample["labels"], (0, padding), constant_values=-100)
        sample["position_ids"] = np.append(sample["position_ids"], np.arange(padding))
    return {name: [sample[name] for sample in samples] for name in COLUMNS}


@lru_cache(maxsize=1)  # computed once per epoch, not per batch
def sample_order(seed, epoch, train_samples):
    """The shuffled sample numbers of this epoch and the next: a batch may cross the border."""
    this_epoch = np.random.RandomState((seed, epoch)).permutation(train_samples)
    next_epoch = np.random.RandomState((seed, epoch + 1)).permutation(train_samples)
    return np.concatenate([this_epoch, next_epoch])


def model_inputs(batch, device):
    """The tensors of a batch on `device`, and those that FlashAttention needs."""
    if "position_ids" in batch:
        # CHAT: FlashAttention joins all samples, and needs the places where conversations begin.
        begins = torch.nonzero(batch["position_ids"].flatten() == 0).flatten()
        places = torch.cat([begins, torch.tensor([batch["input_ids"].numel()])]).int()
        batch = batch | {"cu_seq_lens_q": places, "cu_seq_lens_k": places}
    if device.type == "cuda":
        # Python goes on while the GPU copies from pinned memory.
        batch = {k: v.pin_memory().to(device, non_blocking=True) for k, v in batch.items()}
    longest = batch["input_ids"].shape[1]
    return batch | {"max_length_q": longest, "max_length_k": longest}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # CHAT: one pass is not worth compiling
def mixes_conversations(model, device):
    """Whether the first conversation of a sample changes the logits of the second one."""
    ids = torch.arange(2, 18).repeat(2, 1)
    ids[1, :8] += 1  # the second sample has another first conversation
    batch = {"input_ids": ids, "position_ids": torch.arange(16).repeat(2, 1) % 8}
    model.eval()
    try:
        logits = model(**model_inputs(batch, device), use_cache=False).logits
    except ValueError:  # a model with linear attention refuses several conversations in a sample
        return True
    difference = logits[0, 8:] - logits[1, 8:]
    limit = max(1e-3, 4 * torch.finfo(logits.dtype).eps)  # bf16 rounds to 2 or 3 digits
    return difference.abs().max() > limit * logits.abs().max()


@torch.no_grad()
def evaluate(model, eval_set, args, device, dp_rank, dp_size):  # DDP: each rank has a share
    """The mean loss over all held-out answers, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    samples = len(eval_set)
    # DDP 10: Each rank evaluates its share, and a sum over ranks gives the mean over all samples.
    for begin in range(0, samples, dp_size * args.batch_size):
        first = begin + dp_rank * args.batch_size
        indices = range(first, min(first + args.batch_size, samples))
        # FSDP 10: Gathering a layer needs every rank, so all ranks make equally many passes.
        # A rank without a batch evaluates sample 0, with weight 0.
        batch = model_inputs(eval_set[indices or [0]], device)
        # CHAT 10: Divided by 1, the loss is a sum, because batches differ in their answer tokens.
        loss = model(**batch, num_items_in_batch=1, use_cache=False).loss
        loss_sum += loss * bool(indices)
    dist.all_reduce(loss_sum)  # DDP: adds the sums, because shares may differ in size
    model.train()  # dropout on again
    return loss_sum.item() / pyarrow.compute.sum(eval_set.data.column("answer_tokens")).as_py()


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run must keep these: they decide the model, samples, their order and precision.
MUST_STAY = ["model_name", "tokens_hash", "seq_length", "seed", "dtype"]
MUST_STAY += ["base_hash", "lora_rank", "lora_alpha", "lora_targets"]  # LORA: A and B fit to them
MUST_STAY += ["template_hash", "template_options", "packing"]  # CHAT: samples depend on them


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
    atexit.register(lock.release)  # atexit keeps `lock` alive: a deleted FileLock unlocks
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
                sys.exit(f"error: {change}: keep it, or choose another -e")
            if now != before.get(name):
                say(f"note: {change}")
    return run_folder, checkpoint, state


def sharded_state(model, saved_parts):
    """The content of a checkpoint: shards by name, and the scaler (dcp calls its state_dict())."""
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
    if RANK > 0:  # rank 0 does the rest, without a message to the others
        return
    for file in temporary.glob("*.safetensors"):  # safetensors lets only the owner read them
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
        if RANK > 0:  # rank 0 does the rest, without a message to the others
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
    # DDP: Ranks meet in torchrun's store. It keeps old keys over a restart, so add a prefix.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    # DDP: NCCL moves tensors between GPUs. Gloo moves CPU tensors, without waiting for the GPU.
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=RANK, world_size=WORLD_SIZE)
    return torch.device("cuda", LOCAL_RANK) if on_gpu else torch.device("cpu")


def wait_for_all():  # FSDP: in place of gather(None), which waits half an hour
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
        for name, value in of_rank.items():
            result[name.replace("/", f"/rank{rank}/")] = value
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
        "parameters_total": model.parameters_total,  # QLORA: a byte of codes is two
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
            shutil.copy(checkpoint / "metrics.jsonl", run_folder)  # drops lines after its step
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

# CHAT: Conversations about Python's own library. The tiny model has no template of its own.
# LORA: Frozen weights must have been trained before, here by the demo of chapter 3.
DEMO = {
    "experiment_name": f"demo-{Path(__file__).resolve().parent.name[3:]}",  # without "01-"
    "model_name": f"{REPOSITORY}/outputs/demo-fsdp/final",
    "dataset_name": f"{REPOSITORY}/models/tiny-chat/*.jsonl",
    "chat_template": f"{REPOSITORY}/models/tiny-chat/template.jinja",
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
    folder_name = jsonargparse.typing.restricted_string_type("folder_name", r"[^/.][^/]*$")
    add = parser.add_argument
    switch = jsonargparse.ActionYesNo(no_prefix="no-")  # --demo and --no-demo
    add("--config", action="config", help="a YAML file of flags; later flags win")
    add("-e", "--experiment-name", type=folder_name, help="names the run: saves, resumes, logs it")
    add("--comet-project-name", type=str, default="distributed-training-demo", help="at Comet")
    add("--comet-workspace", type=str, help="workspace at Comet; by default, the account's own")
    # CHAT: A chat model, which has a chat template.
    add("-m", "--model-name", type=str, default="meta-llama/Llama-3.2-1B-Instruct", help="or path")
    add("--from-scratch", action=switch, default=False, help="random weights, not pretrained ones")
    # CHAT: Rows of this dataset have messages.
    add("-d", "--dataset-name", type=str, default="HuggingFaceH4/no_robots", help="Hub id, folder")
    add("--chat-template", type=str, help="a Jinja file, in place of the model's own template")
    add("--template-options", type=dict, default={}, help="such as '{enable_thinking: false}'")
    add("--packing", action=switch, default=True, help="several conversations in a sample")
    add("--dataset-subset", type=str, help="configuration name on the Hub")
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
    curves = ["cosine", "linear", "constant", "wsd"]
    add("--lr-scheduler", choices=curves, default="cosine", help="a curve of learning_rate()")
    add("--lr-cycles", type=PositiveInt, default=1, help="how often cosine falls from the peak")
    add("--warmup-steps", type=NonNegativeInt, default=0, help="steps until the peak learning rate")
    add("--adam-beta2", type=float, default=0.999, help="from scratch: often 0.95")
    add("--weight-decay", type=float, default=0.01, help="for matrices only")
    add("--max-grad-norm", type=float, default=1.0, help="clips gradients; 0: not")
    add("--dtype", choices=list(DTYPES), help="compute precision; bf16 on GPUs, fp32 on CPUs")
    add("--activation-checkpointing", action=switch, default=False, help="less memory, slower")
    add("--attention", type=str, help="sdpa, flash_attention_2 or another name of Transformers")
    add("--compile", action=switch, default=torch.cuda.is_available(), help="layers; on for CUDA")
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
    args = parser.parse_args()
    if min(args.lr, args.weight_decay, args.max_grad_norm) < 0 or not 0 <= args.adam_beta2 < 1:
        parser.error("--lr, --weight-decay, --max-grad-norm: from 0 on; --adam-beta2: from 0 to 1")
    args.pop("config")  # its flags are in `args`
    # LORA: This demo begins where another demo has ended.
    if args.model_name == DEMO["model_name"] and not os.path.exists(args.model_name):
        sys.exit("error: first run the demo of chapter 3, whose model this demo continues")
    if args.from_scratch:  # LORA: nothing would save the random weights
        sys.exit("error: adapters need pretrained weights, so --from-scratch is of no use here")
    if os.path.exists(f"{args.model_name}/adapter_config.json"):  # LORA: PEFT would stack them
        sys.exit(f"error: {args.model_name} has adapters: first merge them with their base")
    if torch.__version__ < "2.12":  # QLORA: FSDP shards integers from 2.12 on
        sys.exit("error: frozen weights in 4 bits need torch 2.12 or newer")
    return args


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError:
        sys.exit("error: out of GPU memory: try --activation-checkpointing, then a lower -b")
    except datasets.exceptions.DatasetGenerationError as error:  # a file that cannot be read
        sys.exit(f"error: {error.__cause__}: let tools/prepare-data.py read the files")
    # DDP: RuntimeError: another rank has failed, and this one has waited for it
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        if training_has_begun:
            raise
        sys.exit(f"error: {error}")
    finally:
        if LOCAL_RANK > 0 and isinstance(sys.exc_info()[1], SystemExit) and not received_signals:
            time.sleep(5)  # DDP: until torchrun ends it, so only local rank 0 prints its sentence
