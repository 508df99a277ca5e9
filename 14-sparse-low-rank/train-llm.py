"""Chapter 14: pretrain with half of the parameters, as sparse plus low-rank weights (SLTrain).

Each matrix W of a decoder layer becomes (alpha / rank) B A + S. B and A are narrow, and S has
numbers at a few random places. The places never change. Weights, gradients and AdamW's moments
exist for B, A and S only. Comments with SL 1 to SL 9 mark the ideas; SL: marks other changes.

    python train-llm.py --demo                   # a few minutes on two CPU cores, no network
    python train-llm.py -e books -d "books/*.txt" --rank 512 --alpha 8 --lr 3e-3 --warmup-steps 1000
"""

import argparse
import fcntl
import hashlib
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
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
import transformers
import yaml
from torch.utils.data import Subset
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

CONSOLE = sys.stderr  # for log lines and the progress bar
REPOSITORY = Path(__file__).resolve().parents[1]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main():
    args = parse_args()
    device = torch.device(args.device)
    if args.dtype is None:
        args.dtype = "fp32" if device.type == "cpu" else "bf16"
    if args.compile is None:
        args.compile = device.type == "cuda"
    accumulation = args.gradient_accumulation_steps
    global_batch = args.batch_size * accumulation  # samples per optimizer step
    torch.manual_seed(args.seed)  # for random initial weights
    transformers.logging.disable_progress_bar()  # Transformers shows one bar per file
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    say(f"{device_name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    run_folder, checkpoint, state = open_run(args)  # the newest checkpoint, or None

    # Data, model, optimizer.
    config, tokenizer = load_config_and_tokenizer(args)
    train_samples, eval_samples = load_samples(args, tokenizer, config, global_batch)
    # `state.samples` is the number read so far, `state.train_samples` the size of the dataset.
    if checkpoint and state.train_samples != len(train_samples):
        fail(f"{args.dataset_name} has changed since this run began: choose another -e name")
    state.train_samples = len(train_samples)
    model = build_model(args, config, device, checkpoint)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, args), lr=args.lr, betas=(0.9, args.adam_beta2), fused=True
    )
    # A resumed run may have another batch size, so count the steps that are left.
    steps_left = (args.num_epochs * len(train_samples) - state.samples) // global_batch
    total_steps = state.step + max(steps_left, 0)
    if args.max_steps:
        total_steps = min(total_steps, args.max_steps)
    scheduler = lr_schedule(args, optimizer, total_steps)
    # Weights stay in fp32. Autocast computes matrix products in bf16, which is faster, and keeps
    # sums that need more precision (norms, softmax, the loss) in fp32.
    autocast = torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "fp32")
    # fp16 rounds gradients below 3e-8 to zero. The scaler multiplies the loss, so that gradients
    # stay above 3e-8, and divides them before the update. With other dtypes it does nothing.
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "fp16")
    # A checkpoint stores the states of these objects, besides the weights.
    stateful = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if checkpoint:
        load_training_state(checkpoint, stateful)
    run_log = None
    if run_folder:
        run_log = RunLog(run_folder, checkpoint, state, args)
        parameters = describe_run(args, model, train_samples)
        parameters |= {"global_batch": global_batch, "device_name": device_name}
        run_log.log_parameters(parameters)

    # The training loop.
    loss_sum = torch.zeros((), device=device)
    logged_step = state.step
    timer = PhaseTimer(device, flops_per_token(config, args.seq_length))
    # disable=None: a progress bar in terminals only.
    progress = tqdm(total=total_steps, initial=state.step, file=CONSOLE, disable=None)
    stop_signals = catch_stop_signals()  # SIGTERM and Ctrl-C append to this list
    stop_signal = 0
    model.train()  # with dropout, if the model has any
    while state.step < total_steps and not stop_signal:
        # Several small passes need less memory than one large pass, and their gradients add up.
        for micro_step in range(accumulation):
            # Sample n is the same in each run with this seed, so a run can resume at any sample.
            first = state.samples + micro_step * args.batch_size
            torch.manual_seed(args.seed + first)  # a resumed run also draws the same dropout masks
            with timer("data"):
                indices = sample_order(first, args.batch_size, len(train_samples), args.seed)
                input_ids = read_batch(train_samples, indices, device)
            with timer("forward"), autocast:
                # Transformers shifts the labels by one token itself, so they equal the input.
                # A cache of keys and values serves generation. In training it only takes memory.
                loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
                # The loss is a mean over a micro-batch. After this division, the losses (and their
                # gradients) of all micro-batches add up to the mean over the global batch.
                loss = loss / accumulation
            with timer("backward"):
                scaler.scale(loss).backward()
            loss_sum += loss.detach()  # the number alone, without its graph
        with timer("update"):
            # Clip the complete gradient before the update, so that no bad batch spoils the weights.
            scaler.unscale_(optimizer)
            max_norm = args.max_grad_norm or math.inf  # inf: measure the norm, do not clip
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
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
        eval_now = args.eval_freq > 0 and (state.step % args.eval_freq == 0 or at_end)
        save_now = state.step % args.ckpt_freq == 0 or at_end or stop_signal
        log_now = state.step % args.log_freq == 0 or save_now
        if log_now:
            # `.item()` waits until the GPU has computed the number. Between two logged steps,
            # training reads no number back, so Python runs ahead and queues work for the GPU.
            mean_loss = loss_sum.item() / (state.step - logged_step)
            metrics = {
                "loss": mean_loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm.item(),
                **timer.read(tokens_per_step=global_batch * args.seq_length),
                **memory_metrics(device),
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
                eval_loss = evaluate(model, eval_samples, args, device)
            say(f"step {state.step}/{total_steps}  held-out loss {eval_loss:.4f}")
            metrics = {"eval/loss": eval_loss, "eval/perplexity": np.exp(eval_loss)}
            if run_log:
                run_log.log_metrics(state, metrics)
        if run_folder and save_now:
            # A saved step is always a logged step, so its numbers have passed the check above.
            # SL: A checkpoint is no model folder here, so it needs no tokenizer.
            save_checkpoint(run_folder, model, stateful, state, args)

    if run_folder and state.step >= total_steps:
        with new_folder(run_folder / "final") as folder:
            save_model(folder, model, tokenizer)
        say(f"Done: the model is in {run_folder / 'final'}")
    elif not run_folder:
        say("Nothing was saved: -e gives a run a name, and saves its model, checkpoints and logs")
    if state.step < total_steps:
        say(f"Stopped after step {state.step}: the same command continues the run, if -e names it")
        sys.exit(128 + stop_signal)  # the exit code that a shell gives for such a signal


# -- Model and optimizer ---------------------------------------------------------------------------


def build_model(args, config, device, checkpoint):
    """The model on `device`, with the weights of the checkpoint, or random weights."""
    # SL: No pretrained weights, because B A + S cannot represent an arbitrary dense matrix.
    # Weights in fp32, whatever the files have. AdamW changes a weight by about the learning rate.
    # The bf16 number after 0.02 is 0.0001 larger, so changes below half of it would be lost.
    # SL: Shapes, without memory, in every run. This also refuses a config of no causal LM.
    with fail_on_error(f"cannot build a causal LM from {args.model_name}"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # SL 1: Replace layers while no layer has memory, because the dense model may not fit.
        replace_layers(model, args)
    model.to_empty(device=device).tie_weights()  # to_empty separates shared weights
    model.init_weights()  # as Transformers does, but directly on the device
    set_weights(model, args, checkpoint)
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
        model.loss_function = torch.compile(model.loss_function)
    return model


def parameter_groups(model, args):
    """Weight decay for matrices; none for biases and norms, which have one dimension."""
    # SL 2: No weight decay for B, A and S. If B and A both decay, B A decays twice as fast.
    parts = {p for layer in sparse_layers(model).values() for p in layer.parameters()}
    matrices = [p for p in model.parameters() if p.dim() > 1 and p not in parts]
    vectors = [p for p in model.parameters() if p.dim() <= 1 or p in parts]  # SL: also B and A
    decay = {"params": matrices, "weight_decay": args.weight_decay}
    return [decay, {"params": vectors, "weight_decay": 0.0}]


def lr_schedule(args, optimizer, total_steps):
    """The scheduler, which sets the learning rate of each step."""
    options = {}
    if args.lr_scheduler == "warmup_stable_decay":
        options["num_decay_steps"] = total_steps // 5  # to zero in the last fifth of the steps
    return get_scheduler(args.lr_scheduler, optimizer, args.warmup_steps, total_steps, options)


# -- Sparse plus low-rank weights ------------------------------------------------------------------

# SL: Tests compare the gradients and the merged weights of each family with dense matrices.
FAMILIES = ["llama", "qwen2", "qwen3", "gpt_neox", "olmo2", "gemma2", "bloom"]


def replace_layers(model, args):
    """Replaces the matrices of the decoder layers. Embeddings and head stay dense."""
    family = model.config.model_type
    if family not in FAMILIES:
        fail(f"{family} is not among {', '.join(FAMILIES)}: use chapter 1")
    before = model.num_parameters()
    dense_count = 0
    for layer in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        linears = {name: m for name, m in layer.named_modules() if type(m) is torch.nn.Linear}
        for name, linear in linears.items():
            sparse = SparseLinear(linear, args)
            # SL: With a high rank, B and A of a small matrix are larger than the matrix itself.
            if number_of_parameters(sparse) < number_of_parameters(linear):
                layer.set_submodule(name, sparse)
            else:
                dense_count += 1
    # SL: With no layer replaced, this would be chapter 1 without any message.
    sparse_count = len(sparse_layers(model))
    if sparse_count == 0:
        fail(f"no nn.Linear of {args.model_name} would become smaller: lower --rank or --density")
    say(f"{sparse_count} matrices are now sparse plus low-rank, {dense_count} stay dense")
    say(f"{before:,} parameters of the dense model are now {model.num_parameters():,}")


def set_weights(model, args, checkpoint):
    """Draws B, A and S of each layer. If there is a checkpoint, loads all weights of the model."""
    # SL: A resumed run draws the places of S again, because a checkpoint does not have them. The
    # seed has the number of the layer, so each layer has other places.
    for number, layer in enumerate(sparse_layers(model).values()):
        layer.initialize(seed=(args.seed, number))
    if not checkpoint:
        return
    with fail_on_error(f"{checkpoint} is damaged, or has another model than {args.model_name}"):
        weights = torch.load(checkpoint / "weights.pt", map_location="cpu", mmap=True)
        model.load_state_dict(weights)


def number_of_parameters(module):
    return sum(p.numel() for p in module.parameters())


def sparse_layers(model):
    """The replaced layers by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}


class SparseLinear(torch.nn.Module):
    """Takes the place of nn.Linear. Its weight is W = (alpha / rank) B A + S.

    SLTrain: https://arxiv.org/abs/2406.02214
    """

    def __init__(self, linear, args):
        super().__init__()
        rows, columns = linear.weight.shape
        count = math.ceil(args.density * rows * columns)
        self.B = torch.nn.Parameter(torch.empty(rows, args.rank))
        self.A = torch.nn.Parameter(torch.empty(args.rank, columns))
        self.values = torch.nn.Parameter(torch.empty(count))
        # SL 3: S has values at fixed places of W. `support` has the places, and is never saved.
        places = torch.empty(count, dtype=torch.int32)
        self.register_buffer("support", places, persistent=False)
        self.scale = args.alpha / args.rank
        self.bias = linear.bias

    def initialize(self, seed):
        rows = self.B.shape[0]
        columns = self.A.shape[1]
        bound = 1 / math.sqrt(columns)
        # SL 4: B starts with zeros, so W = S at first. If S were zero, too, nothing would learn.
        torch.nn.init.zeros_(self.B)
        torch.nn.init.uniform_(self.A, -bound, bound)
        torch.nn.init.uniform_(self.values, -bound, bound)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)  # Transformers initialises only layers that it knows
        places = random_places(rows * columns, len(self.values), seed)
        self.support.copy_(torch.from_numpy(places))

    def get_extra_state(self):
        """PyTorch saves this text with the parameters. It differs if any place differs."""
        return hashlib.sha256(self.support.cpu().numpy()).hexdigest()

    def set_extra_state(self, saved):
        # SL 5: Values at other places are another model, and nothing else would raise an error.
        if saved != self.get_extra_state():
            fail("S has other places than in the checkpoint: resume with the same model and script")

    def forward(self, x):
        # SL: Autocast casts the inputs of PyTorch's own functions, not those of our function.
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = SparsePlusLowRank.apply(x, self.B, self.A, self.values, self.support, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def random_places(limit, count, seed):
    """`count` different numbers below `limit`, sorted. All sets of numbers are equally likely."""
    # SL 6: The places follow from the seed, so the generator must be the same in every version.
    # NumPy promises this of RandomState. A permutation of all places would take seconds.
    generator = np.random.RandomState(seed)
    chosen = np.zeros(limit, dtype=bool)
    missing = count
    while missing > 0:  # some places are drawn twice, so draw again until there are enough
        places = generator.randint(limit, size=missing, dtype=np.int64)
        chosen[places] = True
        missing = count - np.count_nonzero(chosen)
    return np.flatnonzero(chosen)


class SparsePlusLowRank(torch.autograd.Function):
    """x times the transpose of W. W and its gradient exist for one matrix at a time."""

    @staticmethod
    def forward(ctx, x, B, A, values, support, scale):
        # SL 7: Keep the parts for the backward pass. W itself is as large as a dense weight.
        ctx.save_for_backward(x, B, A, values, support)
        ctx.scale = scale
        return torch.nn.functional.linear(x, dense_weight(x.dtype, B, A, values, support, scale))

    @staticmethod
    def backward(ctx, grad):
        x, B, A, values, support = ctx.saved_tensors
        # SL 8: Build W again, and compute the gradients of B, A and S from the gradient of W.
        grad_x = grad @ dense_weight(x.dtype, B, A, values, support, ctx.scale)
        # The gradient of W is a sum over all tokens of all samples.
        grad_w = grad.flatten(0, -2).T @ x.flatten(0, -2)
        grad_B = ctx.scale * (grad_w @ A.T.to(x.dtype))
        grad_A = ctx.scale * (B.T.to(x.dtype) @ grad_w)
        grad_values = grad_w.flatten().index_select(0, support)
        return grad_x, grad_B, grad_A, grad_values, None, None  # none for support and scale


def dense_weight(dtype, B, A, values, support, scale):
    """W = scale B A + S, of shape (rows, columns)."""
    weight = (scale * B.to(dtype)) @ A.to(dtype)
    weight.view(-1).index_add_(0, support, values.to(dtype))  # places count row by row
    return weight


@torch.no_grad()
def merged_weights(model):
    """The weights of the dense model, by the names that Transformers knows."""
    weights = model.state_dict()
    for name, layer in sparse_layers(model).items():
        for part in ("B", "A", "values", "_extra_state"):
            del weights[f"{name}.{part}"]
        parts = (layer.B, layer.A, layer.values, layer.support, layer.scale)
        # SL 9: Merge one matrix at a time into CPU memory, since a GPU may have no room for all.
        weights[f"{name}.weight"] = dense_weight(torch.float32, *parts).cpu()
    return weights


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
def evaluate(model, samples, args, device):
    """The mean loss over all held-out samples, in nats per token."""
    model.eval()  # no dropout
    loss_sum = torch.zeros((), device=device)
    size = args.batch_size
    for begin in range(0, len(samples), size):
        indices = range(begin, min(begin + size, len(samples)))
        input_ids = read_batch(samples, indices, device)
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss_sum += loss * len(indices)  # the last batch may be smaller
    model.train()  # dropout on again
    return loss_sum.item() / len(samples)


# -- Checkpoints -----------------------------------------------------------------------------------

# A resumed run keeps these flags, because another value would make it another training.
LASTING = ["model_name", "dataset_name", "dataset_subset", "seq_length", "dtype"]
LASTING += ["rank", "density", "alpha"]  # SL: other values would give another W
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
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    free = shutil.disk_usage(folder.parent).free / 1e9
    with fail_on_error(f"cannot write {folder}; the disk had {free:.1f} GB left"):
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # all is on the disk before the folder gets its name
            os.close(descriptor)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)


def save_model(folder, model, tokenizer):
    # SL: final/ has dense weights, because no other program knows B, A and S.
    model.save_pretrained(folder, state_dict=merged_weights(model))
    tokenizer.save_pretrained(folder)


def save_checkpoint(run_folder, model, stateful, state, args):
    """Writes all that an exact resume needs into a new folder, then removes old checkpoints."""
    with new_folder(run_folder / f"step-{state.step:08d}") as folder:
        # SL: A run goes on with B, A and S as they are. Merged weights could not be split again.
        torch.save(model.state_dict(), folder / "weights.pt")
        training_state = {name: part.state_dict() for name, part in stateful.items()}
        torch.save(training_state, folder / "training_state.pt")
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
    lock(run_folder)
    newest = max(run_folder.glob(CHECKPOINT_NAMES), default=None)
    if not newest:
        return run_folder, None, new_state
    with fail_if_damaged(newest):
        saved = json.loads((newest / "state.json").read_text())
    # Checkpoints of other chapters have unknown values, other flags with a value, or sharded files.
    unknown = saved.keys() - asdict(new_state).keys()
    # SL: Checkpoints of the other chapters have the config of their model.
    has_config = (newest / "config.json").exists()
    if unknown or has_config:
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


def load_training_state(checkpoint, stateful):
    """Restores optimizer, scheduler and scaler in place."""
    file = checkpoint / "training_state.pt"
    with fail_if_damaged(checkpoint):
        training_state = torch.load(file, map_location="cpu", mmap=True)
    for name, part in stateful.items():
        part.load_state_dict(training_state[name])
    # The restored learning rate belongs to the old --max-steps. Compute it for the new one: step()
    # adds 1 to last_epoch, the number of steps, and then sets the rate. So subtract 1 before.
    stateful["scheduler"].last_epoch -= 1
    stateful["scheduler"].step()


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
        "world_size": 1,
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
    sys.exit(f"error: {message}")


@contextmanager
def fail_on_error(message):
    """Replaces the traceback of an error by this message and a short form of the error."""
    try:
        yield
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
    "rank": 32,  # SL: for matrices of 128 columns
    "dataset_name": f"{sysconfig.get_path('stdlib')}/[a-z]*.py",
    "seq_length": 256,
    "batch_size": 8,
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
    # SL: No --from-scratch, because there is no other way to start.
    add("--rank", type=positive, default=128, help="columns of B, and rows of A")
    # SL: Without S, nothing would learn. With S at half of the places, little would be saved.
    density = at_least(0.001, float, below=0.5)
    add("--density", type=density, default=0.03, help="the share of places where S has values")
    alpha = at_least(0.001, float)
    add("--alpha", type=alpha, default=32, help="B A is multiplied by alpha / rank")
    add("-d", "--dataset-name", default="tatsu-lab/alpaca", help="Hub id, file or pattern")
    add("--text-column", default="text", help="the column to train on")
    add("--dataset-subset", help="configuration name on the Hub")
    add("-s", "--seq-length", type=at_least(2), default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=positive, default=8, help="samples per forward pass")
    add("--gradient-accumulation-steps", type=positive, default=1, help="passes per optimizer step")
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
    devices = [name for name in ("cuda", "mps", "cpu") if getattr(torch, name).is_available()]
    add("--device", choices=devices, default=devices[0], help="where to train")
    add("--demo", action=switch, default=False, help="a small preset; other flags override it")
    add("--config", type=Path, help="a YAML file of flags; flags of the command line override it")
    # Find --config first. Its flags stand before those of the command line, which therefore win.
    known, _ = parser.parse_known_args()
    given = read_config(known.config) if known.config else []
    flags = given + sys.argv[1:]
    if "--demo" in flags:
        parser.set_defaults(**DEMO)  # defaults, so that every given flag overrides them
    args = parser.parse_args(flags)
    name = args.experiment_name
    if name is not None and ("/" in name or name in ("", ".", "..")):
        parser.error("--experiment-name must be a folder name, not empty and without slashes")
    return args


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError:
        remedy = "try --activation-checkpointing, a lower --batch-size with more"
        fail(f"out of GPU memory: {remedy} --gradient-accumulation-steps, a lower --seq-length")
