"""Chapter 4: a corpus larger than the disk, streamed while the model trains.

No text is downloaded or tokenized beforehand. A thread reads documents from files or the Hub, and
makes rows of tokens. Meanwhile, the devices train on earlier rows. A checkpoint holds the place of
each rank in its stream. Comments with STREAM 1 to 11 mark the ideas.

    torchrun --standalone --nproc-per-node 2 train-llm.py --demo     # no GPU and no network needed
    torchrun --standalone --nproc-per-node gpu train-llm.py -e c4-stream --from-scratch \
        -d allenai/c4 --dataset-subset en --max-steps 10000     # C4 is never on the disk
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from glob import escape, glob
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: idle CPU threads sleep earlier
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")  # this script logs the metrics itself
os.environ.setdefault("COMET_DISPLAY_SUMMARY_LEVEL", "0")  # no long report at the end
os.environ.setdefault("COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL", "1")  # offline, give up in 20 s
import comet_ml
import datasets.distributed
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
    # STREAM: Each rank reads and tokenizes its own text, so no rank prepares text for others.
    documents, eval_tokens = load_documents(args, tokenizer)
    if args.eval_freq and len(eval_tokens) < args.seq_length:
        sys.exit("error: too little text to evaluate on: give --eval-dataset, or --eval-freq 0")
    say(f"Streaming {documents.num_shards:,} files; {len(eval_tokens):,} tokens are held out")
    # STREAM: Nobody knows all tokens of a stream, so those of the first document stand for them.
    first = next(iter(tokenize_split(documents, tokenizer, args.text_column)), None)
    tokens_hash = Hasher.hash(first)

    setup = args.as_dict() | {"global_batch": global_batch, "tokens_hash": tokens_hash}
    setup |= {"dp_size": dp_size, "files": documents.num_shards}  # STREAM: fixed, too
    # With -e, a run continues from its newest checkpoint. Settings in MUST_STAY may not change.
    run_folder, checkpoint, state = open_run(args, setup)  # without -e: None, None, step 0
    # DDP: If flags, data or checkpoints differed between ranks, training would silently go wrong.
    setups = gather(setup | {"step of the checkpoint": state.step})
    differing = [name for name in setups[0] if any(s[name] != setups[0][name] for s in setups)]
    if differing:
        sys.exit(f"error: ranks differ in {differing}: use the same flags, data and --save-dir")
    # STREAM 1: The length of a stream is unknown, so --max-steps gives the schedule its last step.
    if not args.max_steps:
        sys.exit("error: a stream has no known length: give --max-steps for the schedule")
    total_steps = args.max_steps
    if state.step >= total_steps and (run_folder / f"final/step-{state.step:08d}").exists():
        say(f"Already complete: choose another -e, or delete {run_folder}")
        return
    if not checkpoint:
        state.places = [START] * dp_size  # STREAM: of each rank in its stream
    stream = open_stream(args, tokenizer, documents, state, dp_rank, dp_size)

    # Model and optimizer.
    # FSDP 1: Rank 0 reads a new run's model into CPU memory, and sends each rank its shards.
    model = build_model(args, device, checkpoint)
    groups = parameter_groups(model, args)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)
    # Gradients below 3e-8 are 0 in fp16. The scaler multiplies the loss, and so all gradients.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    saved_parts = {"optimizer": optimizer, "scaler": scaler}  # beside the model
    if checkpoint:
        # FSDP 2: Each rank reads its shards, whatever the number of ranks that saved them.
        # dcp.load() fills tensors in place. Decay and lr are no tensors, so the flags decide them.
        dcp.load(sharded_state(model, saved_parts), checkpoint_id=checkpoint)
    run_log = None
    if run_folder and RANK == 0:  # FSDP: all ranks save, and rank 0 logs
        parameters = setup | describe_run(model, optimizer, device, None)  # STREAM: no number
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
    token_sum = 0  # STREAM: of all ranks since the last logged step, without padding
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
        # STREAM 2: Read the whole step first, because its loss is a mean over all of its labels.
        rows = []
        with timed("data", times, wait):
            for _ in range(args.batch_size * accumulation):
                row, place = next(stream)
                rows.append(row)
        train_tokens = pyarrow.array(np.concatenate(rows))  # of this rank in this step
        largest = pyarrow.compute.max(train_tokens).as_py()
        if largest >= model.config.vocab_size:
            sys.exit(f"error: token {largest} is outside the vocabulary of {args.model_name}")
        # Padding has no label, and the first token of a row is the label of no other token.
        labels_here = sum(np.count_nonzero(row[1:] != PADDING) for row in rows)
        # STREAM 3: Divide by the labels per rank, because FSDP averages over the ranks.
        # A Python number: FSDP rounds a tensor to bf16, and compiled losses take no NumPy number.
        labels_per_rank = float(np.mean(gather(labels_here)))
        labels_per_rank = max(labels_per_rank, 1e-9)  # rows of a single token have no label
        token_sum += labels_per_rank * dp_size + global_batch
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # STREAM: The stream has chosen the rows. This number only seeds the dropout masks.
            first = state.samples + (micro_step * dp_size + dp_rank) * args.batch_size
            torch.manual_seed(args.seed + first)  # the same dropout masks after a resume
            # FSDP: Each micro-batch averages gradients and frees weights again, to save memory.
            # --no-reshard-after-forward keeps both until the last one, to save traffic.
            communicate = args.reshard_after_forward or micro_step == accumulation - 1
            model.set_requires_gradient_sync(communicate)
            model.set_reshard_after_backward(communicate)
            with timed("data", times, wait):
                begin = micro_step * args.batch_size  # STREAM: in the rows of this step
                indices = range(begin, begin + args.batch_size)
                input_ids = read_batch(train_tokens, indices, args, device)
            with timed("forward", times, wait):
                # STREAM 4: The label of padding is -100, and this label has no loss.
                # Padding comes last, so no other token attends to padding, and it needs no mask.
                options = {"use_cache": False, "num_items_in_batch": labels_per_rank}
                outputs = model(input_ids=input_ids.clamp(min=0), labels=input_ids, **options)
                loss = outputs.loss
                # STREAM: The routers' loss of a mixture comes once per pass, so add up to its mean.
                if getattr(outputs, "aux_loss", None) is not None:
                    loss -= (1 - 1 / accumulation) * model.router_aux_loss_coef * outputs.aux_loss
                del outputs  # STREAM: frees the logits
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
        state.epoch = place["pass"]  # STREAM: whole passes; a fraction would need the length
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
            tokens = token_sum / (step - logged_step)  # STREAM: the mean of a step
            metrics = {
                "loss": mean_loss,
                "learning_rate": rate,
                "grad_norm": grad_norm.item(),
                # STREAM: The speed counts no padding. The second number is the share of padding.
                "tokens_per_second": tokens / seconds,
                "padding": 1 - tokens / (global_batch * args.seq_length),
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
            token_sum = 0  # STREAM: together with loss_sum
            logged_step = step
        if eval_now and not stop_signal:
            eval_loss = evaluate(model, eval_tokens, args, device, dp_rank, dp_size)  # DDP: shares
            say(f"step {step}/{total_steps}  held-out loss {eval_loss:.4f}")
            if run_log:
                run_log.log(state, {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)})
        if save_now and run_folder:
            # STREAM 5: A checkpoint has the places of all ranks, since ranks read other documents.
            places = dict(gather((dp_rank, place)))
            state.places = [places[share] for share in range(dp_size)]
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
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


# -- Data and evaluation ---------------------------------------------------------------------------

READERS = {".txt": "text", ".md": "text", ".py": "text", ".json": "json", ".jsonl": "json"}
READERS |= {".csv": "csv", ".parquet": "parquet"}
EVAL_SAMPLES = 1000  # held-out samples at most, because each evaluation takes time
PADDING = -100  # at the end of a row; the label of a token that has no loss
START = {"pass": 0, "position": None, "rest": [], "rows": 0}  # STREAM: place of the first row


def load_documents(args, tokenizer):
    """The documents to train on, as a stream, and the held-out tokens, as an Arrow array."""
    splits = open_splits(args.dataset_name, args.dataset_subset)
    documents = splits.pop("train")
    if args.max_documents:
        # `take` keeps the files, so each rank would take the first documents of its own files.
        # A generator counts as a single file, whose documents the ranks share.
        first = documents.take(args.max_documents)
        documents = datasets.IterableDataset.from_generator(first.__iter__, documents.features)
    # STREAM: The last 1 % cannot be held out, because the length of a stream is unknown.
    if args.eval_dataset:
        splits = open_splits(args.eval_dataset, args.eval_dataset_subset)
    eval_split = splits.get("validation") or splits.get("test") or splits.get("train")
    if not eval_split or not args.eval_freq:
        return documents, []
    held_out = tokenize_split(eval_split.take(args.eval_documents), tokenizer, args.text_column)
    ids = chain.from_iterable(document["input_ids"] for document in held_out)
    return documents, pyarrow.array(islice(ids, EVAL_SAMPLES * args.seq_length), pyarrow.int32())


def open_splits(name, subset):
    """The splits of a dataset, as streams of documents."""
    name = os.path.expanduser(name)
    reader = READERS.get(Path(name.removesuffix(".gz")).suffix)
    if os.path.isdir(name):
        if not glob(f"{escape(name)}/train-*.parquet"):
            sys.exit(f"error: tools/prepare-data.py has not written {name}: give it this folder")
        # STREAM 6: Open each file when it is needed, so that the corpus may exceed the disk.
        splits = datasets.load_dataset("parquet", data_dir=name, streaming=True)
    elif reader:
        sizes = [os.path.getsize(file) for file in glob(name, recursive=True)]
        if not any(sizes):
            sys.exit(f"error: there are no files for {name}, or they have too little text")
        if reader == "text" and max(sizes) > 20e6:
            sys.exit(f"error: {name} has a file above 20 MB: let tools/prepare-data.py read it")
        options = {"sample_by": "document"} if reader == "text" else {}  # a row is a whole file
        # STREAM: the same
        splits = datasets.load_dataset(reader, data_files=name, streaming=True, **options)
    elif os.path.isdir(name.split("/")[0]):
        sys.exit(f"error: there is no folder {name}")
    else:  # a dataset on the Hub
        splits = datasets.load_dataset(name, subset, streaming=True)  # STREAM: the same
    return splits


def tokenize_split(documents, tokenizer, column):
    """The documents of a split as token ids. They are made when they are needed."""
    # STREAM: Only the first document shows the columns of text and CSV files.
    columns = list(next(iter(documents), {column: None}))
    if column not in columns:
        sys.exit(f"error: no column {column!r}: choose --text-column of {columns}")
    options = {
        "batched": True,
        "batch_size": 8,  # STREAM: a stream does not know whether its documents are large files
        "fn_kwargs": {"tokenizer": tokenizer, "column": column},
        "remove_columns": columns,  # keep only the token ids
    }
    return documents.map(tokenize, **options)


def open_stream(args, tokenizer, documents, state, dp_rank, dp_size):
    """The rows of this rank from its place on, without end. Each row comes with its place."""
    if documents.num_shards % dp_size:
        say(f"{documents.num_shards} files for {dp_size} ranks: each rank reads all of them")
    documents = documents.shuffle(seed=args.seed, buffer_size=1)  # files, no documents
    # STREAM 7: Each rank gets other documents, because equal documents give equal gradients.
    # The ranks share out the files. If that is impossible, each rank reads all files, and keeps
    # every dp_size-th document.
    documents = datasets.distributed.split_dataset_by_node(documents, dp_rank, dp_size)
    documents = tokenize_split(documents, tokenizer, args.text_column)
    place = state.places[dp_rank]
    stream = read_ahead(read_windows(documents, place, args))
    # STREAM 8: A resumed run makes its window again, and passes over the rows that it has used.
    used = state.samples // dp_size - place["rows"]
    return islice(stream, used, None)


def read_ahead(windows):
    """Yields each row with the place before its window."""
    thread = ThreadPoolExecutor(1)
    # STREAM 9: A thread is a window ahead, so that the devices need not wait for text.
    reading = thread.submit(next, windows)
    while True:
        rows, place = reading.result()  # waits for the thread, and raises its error
        reading = thread.submit(next, windows)
        for row in rows:
            yield row, place


def read_windows(documents, place, args):
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
                document = next(opened, {"input_ids": []})
                pass_is_over = not document["input_ids"]  # all others have an end-of-text token
                more, rest = to_rows(document["input_ids"], rest, args)
                rows += more
            if pass_is_over and not (place["position"] or rows or rest):
                sys.exit(f"error: no text for rank {RANK}: give more files, or use fewer ranks")
            # STREAM 10: Shuffle within a window, and keep the place before it in checkpoints.
            # A buffer of shuffled documents would lose some of them, and read others twice.
            np.random.RandomState((args.seed, place["rows"])).shuffle(rows)
            yield rows, place
            place = {
                "pass": place["pass"] + pass_is_over,
                "position": None if pass_is_over else documents.state_dict(),
                "rest": rest,
                "rows": place["rows"] + len(rows),
            }


def to_rows(ids, rest, args):
    """A document as rows of token ids with padding, and the tokens left for the next row.

    pack: documents end to end, after `rest`. overflow: each document in rows of its own. trunc: one
    row for each document, with its beginning.
    """
    length = args.seq_length
    if args.packing == "pack":
        ids = rest + ids
    if args.packing == "trunc":
        ids = ids[:length]
    rows = [ids[i : i + length] for i in range(0, len(ids), length)]
    # STREAM 11: Packed rows are full, and the tokens that are left begin the next row.
    rest = []
    if args.packing == "pack" and rows and len(rows[-1]) < length:
        rest = rows.pop()
    return [np.array(row + [PADDING] * (length - len(row)), np.int32) for row in rows], rest


def tokenize(rows, tokenizer, column):
    """The token ids of each document that is not empty, then an end-of-text token."""
    texts = [text for text in rows[column] if text]
    # A row, such as a text file, may have several documents, each ended by this marker.
    texts = [part for text in texts for part in text.split("<|endoftext|>") if part]
    documents = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in documents]}


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
# STREAM: These decide what the rows are, too, and which rank reads them.
MUST_STAY += ["packing", "shuffle_window", "max_documents", "dp_size", "files"]


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
    "eval_dataset": f"{sysconfig.get_path('stdlib')}/_*.py",  # STREAM: files that -d leaves out
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
    # STREAM: The documents to read, and how they become rows.
    add("--packing", choices=["pack", "overflow", "trunc"], default="pack", help="text to rows")
    add("--shuffle-window", type=PositiveInt, default=1024, help="rows that are shuffled together")
    add("--max-documents", type=PositiveInt, help="read only this many, over all ranks")
    add("--eval-dataset", type=str, help="held-out documents; by default, a split of -d")
    add("--eval-dataset-subset", type=str, help="configuration name on the Hub")
    add("--eval-documents", type=PositiveInt, default=1000, help="number of held-out documents")
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
