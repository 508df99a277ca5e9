"""One look before a long run: what will be trained, and what is wrong.

    python tools/preflight.py 03-fsdp -m Qwen/Qwen3-0.6B -d "books/**/*.txt" -e books
    torchrun --nnodes 2 ... tools/preflight.py 03-fsdp -e books    # also compares the nodes

Give the chapter and all flags of the run. The tool reads files, tokenizes some of the documents,
and computes with a small copy of the model. It trains nothing, and writes only into the cache of
`datasets`. The exit status is 1 after an error, and 0 otherwise. A warning names something that
trains, but perhaps not as you think. tools/prepare-data.py mends most faults of data.
"""

import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import documents
import labels
import pandas
import pyarrow
import tokenizers
import torch
import torch.distributed as dist
import transformers
from filelock import FileLock
from pyarrow import parquet
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file

from models import REPOSITORY, check_length, load_script

SAMPLE = 2000  # documents to look at, evenly over the dataset
FILES = 200  # files whose bytes are looked at, evenly over all files
BYTES = 10_000_000  # of each of these files
ROWS = 1_000_000  # of CSV files
SMALL = 300e6  # parameters of a model that this tool computes with
READ = 20e9  # bytes of weights that this tool reads, evenly over all tensors
NAMES_SHOWN = 5
H100 = 400e12  # FLOPs per second, as in tools/estimate-scaling.py


class Report:
    """Prints facts, warnings and errors in sections."""

    def __init__(self):
        self.errors = self.warnings = 0
        self.facts = {}
        self.documents = self.tokens = 0  # to train on, about; 0 if not known

    @contextmanager
    def section(self, title: str, subject: str):
        """A sentence of sys.exit, or an exception of a library, becomes an error."""
        print(f"\n{title}")
        try:
            yield
        except SystemExit as end:  # of this tool or of the chapter
            self.error(str(end.code).removeprefix("error: "))
        except Exception as error:
            if isinstance(error, datasets.exceptions.DatasetGenerationError):
                error = error.__cause__ or error  # the cause says more
            first_line = (str(error).strip() or repr(error)).splitlines()[0]
            self.error(f"{subject}: {first_line}")

    def fact(self, name: str, value) -> None:
        self.facts[name] = value
        print(f"  {name:<22}{value}")

    def warn(self, message: str) -> None:
        self.warnings += 1
        print(f"  warning: {message}")

    def error(self, message: str) -> None:
        self.errors += 1
        hidden = isinstance(sys.stdout, io.StringIO)  # of a node that prints nothing else
        print(f"  error: {message}", file=sys.stderr if hidden else None)


def some(names) -> str:
    """The first names, and how many more there are."""
    names = sorted(map(str, names))
    more = f" and {len(names) - NAMES_SHOWN:,} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def evenly(items, count: int) -> list:
    """At most `count` of the items, from the first to the last."""
    step = max(1, -(-len(items) // count))
    return list(items[::step])


def load_chapter(name: str):
    """The script of a chapter as a module: `3`, `03`, `03-fsdp`, or any folder with a script."""
    folders = [place / name for place in (REPOSITORY, REPOSITORY / "more", Path())]
    if name.isdigit():
        folders = [*REPOSITORY.glob(f"{name:0>2}-*"), *REPOSITORY.glob(f"more/{name:0>2}-*")]
    found = [folder / "train-llm.py" for folder in folders if (folder / "train-llm.py").exists()]
    if not found or "09-hf-trainer" in found[0].parts:
        sys.exit(f"error: {name} is no chapter with flags: give one such as 03 (and not 09)")
    module = load_script(found[0])
    module.say = lambda message: None
    return module


# -- Data ------------------------------------------------------------------------------------------


def find_files(args, formats: dict, report: Report) -> list[str]:
    """The local files that the run reads, and what lies there besides. None of a Hub dataset."""
    name = os.path.expanduser(args.dataset_name)
    prepared = f"{glob.escape(name)}/*-[0-9]*.parquet"
    if os.path.isdir(name) and not glob.glob(prepared):
        # Ends with a sentence if there are no files that any tool reads.
        documents.find_files([name], documents.reading())
        remedy = f"python tools/prepare-data.py {shlex.quote(name)} -o FOLDER"
        sys.exit(f"error: tools/prepare-data.py has not written the folder {name}: {remedy}")
    if os.path.isdir(name):
        report.warn(f"tools/prepare-data.py has not written {name}: is all of it text?")
        name = prepared
    files = [name] if os.path.isfile(name) else sorted(glob.glob(name, recursive=True))
    if files and Path(name.removesuffix(".gz")).suffix not in formats:
        report.error(f"no chapter reads {some(files)}: convert them to one of {', '.join(formats)}")
    if dead := [path for path in files if not os.path.exists(path)]:
        report.error(f"{some(dead)}: links to files that do not exist, so remove these links")
    real = Counter(map(os.path.realpath, files))
    if twice := [path for path, count in real.items() if count > 1]:
        report.warn(f"{some(twice)}: read more than once, because a link leads there, too")
    base = name
    while glob.has_magic(base):
        base = os.path.dirname(base)
    below = glob.iglob("**", root_dir=base, recursive=True, include_hidden=True)
    others, endings = defaultdict(list), Counter()
    for path in itertools.islice(below, 100_000):
        real_path = os.path.realpath(os.path.join(base, path))
        if os.path.isdir(real_path) or real_path in real:
            continue
        real[real_path] = 1  # name a file once, even if several links lead to it
        if "/." in f"/{path}":
            others["hidden files"].append(path)
        elif Path(path).suffix == Path(name).suffix:
            others["outside the pattern"].append(path)
        else:
            endings[Path(path).suffix or "without ending"] += 1
    for kind, paths in others.items():
        report.fact("not read", f"{len(paths):,} {kind}: {some(paths)}")
    if endings:
        report.fact("not read", some(f"{n:,} {ending}" for ending, n in endings.items()))
    return files


def check_rows(files: list[str], args, report: Report) -> None:
    """What tools/prepare-data.py would say of the first megabytes of some files."""
    is_text = hasattr(args, "text_column")
    flags = documents.reading(skip_bad=True, text_column=getattr(args, "text_column", "text"))
    found = documents.Found()
    marked, wide, characters = [], [], 0
    for file in evenly([documents.File(path) for path in files], FILES):
        if file.kind not in documents.TABLES:
            with suppress(documents.Rejected, *documents.DAMAGED):  # which documents_of names
                encoding = documents.open_text(file, flags, "replace", newline=None).encoding
                if encoding != "utf-8":
                    (marked if encoding == "utf-8-sig" else wide).append(file.name)
        size = 0
        for _, _, count in documents.documents_of(file, flags, found) if is_text else ():
            size += count
            if size > BYTES:
                break
        characters += size
    for path, reason in found.damaged.items():
        report.error(f"{path}: {reason}")
    if wide:
        report.error(f"{some(wide)}: UTF-16, which tools/prepare-data.py reads")
    for path, count in found.undecoded.most_common(NAMES_SHOWN):
        guess = documents.guess_encoding(documents.File(path), flags)
        what = f"{path}: not UTF-8 ({count:,} places, perhaps {guess})"
        report.error(f"{what}: let tools/prepare-data.py read it with --encoding")
    for reason, count in found.rejected.items():
        report.error(f"{count:,} rows: {reason}: {some(found.places[reason])}")
    if marked:
        mark = "a byte order mark, which becomes a token"
        report.warn(f"{some(marked)}: {mark}: tools/prepare-data.py leaves it out")


def check_names(files: list[str], args, report: Report) -> None:
    """Large texts, and names that say "held out": the chapters leave both to prepare-data."""
    remedy = f"python tools/prepare-data.py '{args.dataset_name}' -o FOLDER"
    is_text = Path(files[0].removesuffix(".gz")).suffix in (".txt", ".md", ".py")
    if large := [file for file in files if is_text and os.path.getsize(file) > 20e6]:
        report.error(f"{some(large)}: above 20 MB, and a chapter reads a file at once: {remedy}")
    folder = os.path.commonpath(files)
    held_out = [file for file in files if documents.held_out_by_name(file.removeprefix(folder))]
    if held_out and len(held_out) < len(files) and glob.has_magic(args.dataset_name):
        report.warn(f"{some(held_out)}: trained on, like all files of a pattern: {remedy}")


def check_csv(files: list[str], documents, column: str, report: Report) -> None:
    """Cells that `datasets` (by pandas) reads as missing, such as NA, or as numbers: 0000123."""
    rows = 0
    for path in [path for path in files if ".csv" in path]:
        cells = pandas.read_csv(path, dtype=str, keep_default_na=False, nrows=ROWS)[column]
        texts = documents[column][rows : rows + len(cells)]
        lost = Counter(c for c, text in zip(cells, texts, strict=True) if c not in ("", text))
        if lost:
            cells = f"{lost.total():,} cells, such as {some(lost)}"
            report.warn(
                f"{path}: {cells}: read as missing or as numbers: use tools/prepare-data.py"
            )
        rows += len(cells)
        if rows >= ROWS:
            return


def check_column(documents, column: str) -> None:
    """Exits if the column holds no text."""
    kind = documents.features.get(column)
    if kind not in (datasets.Value("string"), datasets.Value("large_string")):
        names = f"choose --text-column among {some(documents.features)}"
        sys.exit(f"error: no text in {column!r}, but {kind or 'no such column'}: {names}")


def check_documents(splits, args, report: Report) -> list[str]:
    """Counts documents. Returns some of their texts."""
    documents, column = splits["train"], args.text_column
    check_column(documents, column)
    chosen = documents.select(evenly(range(len(documents)), SAMPLE))[column]
    texts = [text for text in chosen if text]
    report.fact("documents", f"{len(documents):,}; looked at {len(chosen):,}")
    if empty := len(chosen) - len(texts):
        report.warn(f"{empty / len(chosen):.0%} of the documents are empty, and left out")
    if not texts:
        sys.exit(f"error: no document has text in {column!r}: choose another --text-column")
    report.documents = len(documents) * len(texts) / len(chosen)
    copies = len(texts) - len(set(texts))
    if copies > len(texts) / 100:
        report.warn(f"{copies / len(texts):.0%} of the documents are copies: remove all but one")
    if any(name in splits and not len(splits[name]) for name in ("validation", "test")):
        report.warn("the held-out split is empty, so the run holds out other documents")
    held_out = splits.get("validation") or splits.get("test")
    if not held_out:
        report.fact("held out", "the last 1% of the samples")
    else:
        check_column(held_out, column)
        report.fact("held out", f"{len(held_out):,} documents of a split of its own")
        others = held_out.select(evenly(range(len(held_out)), SAMPLE))[column]
        if same := {*texts} & {*others} - {None, ""}:
            found = f"{len(same):,} held-out documents are trained on, too: {some(same)[:60]}"
            report.warn(f"{found}: remove them from one split")
    return texts


# -- Tokens ----------------------------------------------------------------------------------------


def check_tokens(texts: list[str], args, chapter, report: Report) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    config = AutoConfig.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: {args.model_name} has no end-of-text token: give its tokenizer one")
    report.fact("tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens")
    adds_end = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
    if adds_end:
        report.warn(f"the tokenizer writes {tokenizer.eos_token} itself, so documents end with two")
    documents = chapter.tokenize({"text": texts}, tokenizer, "text")["input_ids"]
    tokens = list(itertools.chain.from_iterable(documents))
    size = sum(len(text.encode()) for text in texts)
    per = f"{len(tokens) / len(texts):,.0f} per document, {len(tokens) / size:.2f} per byte"
    report.fact("tokens", per)
    count = min(report.documents, getattr(args, "max_documents", None) or report.documents)
    report.tokens = count * len(tokens) / len(texts)
    start = tokenizer.decode(tokens[: args.seq_length])
    report.fact("the first sample", repr(start[:200] + ("..." if len(start) > 200 else "")))

    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is not None and any(ids[:2] == [begin, begin] for ids in documents):
        report.warn(f"documents begin with {tokenizer.bos_token} twice: remove it from the text")
    if not adds_end and any(ids[-2:] == [end, end] for ids in documents):
        report.warn(f"documents end with {tokenizer.eos_token} twice: remove it from the text")
    if inside := labels.special_tokens([ids[1:-1] for ids in documents], tokenizer):
        report.warn(f"texts contain special tokens: {some(inside)}: remove those not meant")
    unknown = tokens.count(tokenizer.unk_token_id)
    if unknown and tokenizer.unk_token_id != end:
        share = f"{unknown / len(tokens):.1%} of the tokens are {tokenizer.unk_token}, unknown"
        report.warn(f"{share}: choose a model whose tokenizer knows this text")
    vocabulary = config.get_text_config().vocab_size
    both = f"the tokenizer has {len(tokenizer):,} tokens, and the model {vocabulary:,}"
    if max(tokens) >= vocabulary:
        report.error(f"token {max(tokens)} is outside the embeddings: {both}: choose a model's own")
    elif len(tokenizer) > vocabulary:
        report.warn(f"{both}: a text with one of the others ends the run")
    check_ends(tokenizer, config, args, report)
    check_class(texts, tokenizer, args, report)


def check_class(texts: list[str], tokenizer, args, report: Report) -> None:
    """For some families, Transformers replaces parts of tokenizer.json by those of a class."""
    with suppress(OSError):  # without this file, there is nothing to compare
        backend = tokenizers.Tokenizer.from_file(cached_file(args.model_name, "tokenizer.json"))
        backend.no_truncation()
        for text in texts:
            expected = backend.encode(text[:1000], add_special_tokens=False)
            found = tokenizer.encode(text[:1000], add_special_tokens=False)
            if found != expected.ids:
                pairs = zip(tokenizer.convert_ids_to_tokens(found), expected.tokens, strict=False)
                both = next((f"{one}, not {other}" for one, other in pairs if one != other), "ids")
                name = type(tokenizer).__name__
                report.warn(f"{name} makes other tokens than tokenizer.json ({both}): choose one")
                return


def check_ends(tokenizer, config, args, report: Report) -> None:
    """Where a server stops must be what the run puts after each document."""
    ends = {"config.json": config.get_text_config().eos_token_id}
    with suppress(OSError):
        generation = GenerationConfig.from_pretrained(args.model_name)
        ends["generation_config.json"] = generation.eos_token_id
    end = f"{tokenizer.eos_token} ({tokenizer.eos_token_id})"
    for file, ids in ends.items():
        if tokenizer.eos_token_id not in (ids if isinstance(ids, list) else [ids]):
            says = f"eos_token_id is {ids} in {file}, and documents end with {end}"
            report.warn(f"{says}: correct the file, or the model does not stop there")


# -- Model -----------------------------------------------------------------------------------------


def check_model(args, chapter, report: Report) -> int:
    """Flags, files, family, and a small copy. Returns the number of parameters."""
    config = AutoConfig.from_pretrained(args.model_name)
    check_decoder(args, config, report)
    if getattr(config, "quantization_config", None):
        sys.exit(f"error: {args.model_name} is quantized: choose the files that it was made from")
    options = {"dtype": torch.float32, "attn_implementation": args.attention}
    with torch.device("meta"):  # a model without memory for its weights
        model = AutoModelForCausalLM.from_config(config, **options)
    check_parameters(model, args, report)
    parameters = model.num_parameters()
    from_scratch = getattr(args, "from_scratch", True)  # chapter 14 always does
    source = "random weights" if from_scratch else "the weights of its files"
    report.fact("model", f"{config.model_type}, {parameters:,} parameters, {source}")
    if not from_scratch:
        check_files(args, report)
    if hasattr(chapter, "add_adapters"):
        chapter.add_adapters(model, args)  # on the meta device; raises if no layer has this name
    if hasattr(chapter, "quantize_layers"):
        check_four_bits(model, args, chapter, report)
    if not dist.is_initialized() or dist.get_rank() == 0:  # only rank 0 can save a model
        check_small(args, chapter, report)
    for name in ("check_plan", "check_model", "split_layers"):
        if hasattr(chapter, name):
            getattr(chapter, name)(args)  # ends with a sentence if the chapter refuses the model
    return parameters


def check_four_bits(model, args, chapter, report: Report) -> None:
    """Which weights does chapter 22 leave in 16 bits?"""
    weights = {n: p for n, p in model.named_parameters() if p.dim() > 1 and ".lora_" not in n}
    sizes = {name: weight.numel() for name, weight in weights.items()}
    dtype = args.dtype or "bf16"
    chapter.quantize_layers(model, SimpleNamespace(dtype=dtype), device="cpu")
    left = {name: sizes[name] for name, _ in model.named_parameters() if name in sizes}
    share = sum(left.values()) / sum(sizes.values())
    gb = sum(left.values()) * chapter.DTYPES[dtype].itemsize / 1e9
    kinds = {re.sub(r"\.\d+", "", name): 0 for name in left}  # equal in all layers
    said = f"{some(kinds)}: {share:.0%} of the weights stay in {dtype}, {gb:.2f} GB in all"
    report.fact("not in 4 bits", said)
    if share > 0.5:
        report.warn(f"{said}: chapter 22 saves little here, so use chapter 17")


def check_decoder(args, config, report: Report) -> None:
    """Is the model a decoder, and does it take these samples and this attention?"""
    # Configs of models with images have a text config inside, those of encoder-decoders have
    # `decoder_layers`, and those of encoders a false `is_decoder`, as GPT-NeoX has, a decoder.
    may_encode = hasattr(type(config), "is_decoder") and "gpt_neox" not in config.model_type
    is_encoder = may_encode and not config.is_decoder
    if config.get_text_config() is not config or hasattr(config, "decoder_layers") or is_encoder:
        sys.exit(f"error: {args.model_name} is no plain decoder of text: choose another model")
    check_length(config, args.seq_length)
    if "paged" in str(args.attention):  # these have no causal mask
        sys.exit(f"error: --attention {args.attention} cannot train: choose another one")
    if args.attention == "flex_attention" and not torch.cuda.is_available():
        report.warn("--attention flex_attention has no backward pass on CPUs: train on a GPU")


def check_parameters(model, args, report: Report) -> None:
    """What do the layers hold, and does weight decay take matrices alone?"""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    parts = [*layers, *tables, model.get_output_embeddings()]
    known = {p for part in parts for p in part.parameters()}
    outside = {n: p.numel() for n, p in model.named_parameters() if p not in known}
    share = sum(outside.values()) / model.num_parameters()
    report.fact("layers", f"{len(layers)}; {share:.1%} of the weights are in no layer")
    if share > 0.01:
        what = "--compile, --activation-checkpointing and the units of FSDP leave them out"
        report.warn(f"{some(outside)}: in no layer, so {what}")
    if args.weight_decay and (wrong := [*other_tensors(model)]):
        what = "no matrices, but of two dimensions, so they get weight decay"
        report.warn(f"{some(wrong)}: {what}: perhaps give --weight-decay 0")


def other_tensors(model):
    """Names of biases, norms, decays and the like that have two dimensions, as matrices have."""
    for name, parameter in model.named_parameters():
        path, _, own_name = name.rpartition(".")
        is_norm = "Norm" in type(model.get_submodule(path)).__name__
        of_expert = "expert" in path and "bias" not in own_name
        is_matrix = (own_name.endswith("weight") and not is_norm) or of_expert
        if parameter.requires_grad and parameter.dim() > 1 and not is_matrix:
            yield re.sub(r"\.\d+\.", ".*.", name)


def check_head(model, folder: Path, report: Report) -> None:
    """Is a head that config.json ties to the embeddings equal to them in the files?"""
    for pair in model.all_tied_weights_keys.items():
        rows = {}
        for path in folder.glob("*.safetensors"):
            with safe_open(path, "pt") as file:
                for name in {*pair} & {*file.keys()}:
                    rows[name] = file.get_slice(name)[:1000]  # training changes all of them
        if len(rows) == 2 and not torch.equal(*rows.values()):
            differ = f"{' and '.join(pair)} differ in the files, and config.json ties them"
            report.error(f"{differ}: set tie_word_embeddings to false")


def check_files(args, report: Report) -> None:
    """Tensors of the files and of the model, by name and shape. The meta device reads no values."""
    options = {"output_loading_info": True, "device_map": "meta", "ignore_mismatched_sizes": True}
    model, found = AutoModelForCausalLM.from_pretrained(args.model_name, **options)
    whose = "is config.json the one of these files?"
    if found["missing_keys"]:
        report.error(f"the files lack tensors: {some(found['missing_keys'])}: {whose}")
    if found["unexpected_keys"]:
        unused = some(found["unexpected_keys"])
        report.warn(f"the files have tensors that the model does not use: {unused}: {whose}")
    if found["mismatched_keys"]:
        shapes = [f"{n} {tuple(a)}, not {tuple(b)}" for n, a, b in found["mismatched_keys"]]
        report.error(f"tensors of another shape than config.json says: {some(shapes)}: {whose}")
    folder = Path(cached_file(args.model_name, "config.json")).parent
    check_head(model, folder, report)
    used = {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / "model.safetensors").exists():
        used = {*json.loads(index.read_text())["weight_map"].values()}
    paths = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    names = {path.name for path in paths}
    if names & used and names - used:
        read = f"not read, because {some(used)} is there: are they older?"
        report.warn(f"{some(names - used)} in {folder}: {read}")
    check_values([path for path in paths if path.name in used] or paths, report)


def check_values(paths: list[Path], report: Report) -> None:
    """Is every number of the weights finite? A sum with NaN or infinity in it is not."""
    step = math.ceil(sum(path.stat().st_size for path in paths) / READ)
    wrong = []
    for path in paths:
        with tensors_in(path) as (names, tensor_of):
            for name in list(names)[::step]:
                tensor = tensor_of(name)
                if tensor.is_floating_point() and not tensor.sum(dtype=torch.float32).isfinite():
                    wrong.append(name)
    if step > 1:
        report.fact("read", f"the numbers of one tensor in {step}")
    if wrong:
        what = "NaN or infinity, so that the loss is NaN"
        report.error(f"the files have {what}: {some(wrong)}: choose another -m")


@contextmanager
def tensors_in(path: Path):
    """The names of the tensors of a file, and what reads one of them."""
    if path.suffix == ".bin":
        tensors = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        yield tensors, tensors.get
    else:
        with safe_open(path, "pt") as file:
            yield file.keys(), file.get_tensor


def check_small(args, chapter, report: Report) -> None:
    """A small copy of the model: does a token see later ones, and does a saved copy open again?"""
    config = AutoConfig.from_pretrained(args.model_name)
    with suppress(Exception):  # some configs derive these values
        config.num_hidden_layers = min(2, config.num_hidden_layers)
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        size = AutoModelForCausalLM.from_config(config).num_parameters()
    if size > SMALL:
        report.fact("small copy", f"skipped, because two layers have {size:,} parameters")
        return
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(3, config.vocab_size - 1, (1, 16))
    changed = ids.clone()
    changed[0, -1] = (ids[0, -1] + 1) % config.vocab_size
    with torch.no_grad():
        first, second = (model(input_ids=x, use_cache=False).logits for x in (ids, changed))
        if not torch.allclose(first[:, :-1], second[:, :-1], atol=1e-5):
            report.error("a token sees those after it, and would copy them: choose a decoder")
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            third = again(input_ids=ids, use_cache=False).logits
    if getattr(args, "packed", False):  # as chapter 16 asks when it has loaded the model
        name = "transformers.masking_utils.find_packed_sequence_indices"
        with mock.patch(name, lambda positions: (positions == 0).cumsum(-1)):
            if chapter.mixes_conversations(again, torch.device("cpu")):
                report.error("it mixes the texts of a row: prepare the rows with --no-packing")
    if torch.allclose(first, third, atol=1e-5):
        report.fact("small copy", "saved and opened again with equal logits")
    else:
        report.error("a saved copy computes something else, so choose another family of models")


# -- Machine and run -------------------------------------------------------------------------------


def check_resume(args, checkpoint: Path, chapter, report: Report) -> None:
    """Does the run go on with the flags of its checkpoint?"""
    report.fact("goes on from", checkpoint)
    file = checkpoint / "parameters.json"
    if not file.exists():
        report.error(f"{checkpoint} has no {file.name}, so it is too old: choose another -e")
        return
    before = json.loads(file.read_text())
    flags = args.as_dict()
    flags["dtype"] = args.dtype or before["dtype"]  # by default, the device decides
    for name in [name for name in flags if flags[name] != before.get(name)]:
        change = f"{name} was {before.get(name)}, and is {flags[name]} now"
        if name in chapter.MUST_STAY:
            report.error(f"{change}: undo this, or choose another -e")
        else:
            report.warn(change)


def devices_of_node() -> int:
    return torch.cuda.device_count() or 8


def all_devices() -> int:
    """The devices of all nodes. Each node has as many as this one, or 8."""
    nodes = int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return nodes * devices_of_node()


def devices_of(args) -> int:
    return 1 if hasattr(args, "device") else all_devices()  # chapter 1 has this flag


def parse_flags(chapter):
    """As in the run, which has a process for each device. This tool has one on each node."""
    chapter.WORLD_SIZE = all_devices()
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(devices_of_node())):
        return chapter.parse_args()


def check_length_of_run(args, parameters: int, report: Report) -> float:
    """Tokens, steps, learning rate, time and checkpoints. Returns the GB that the run writes."""
    devices = devices_of(args)
    together = [getattr(args, f"{kind}_parallel", 1) for kind in ("tensor", "pipeline", "context")]
    if args.seq_length % together[0]:
        report.error(f"--tensor-parallel {together[0]} must divide -s {args.seq_length}")
    shares = max(1, devices // math.prod(together))
    global_batch = shares * args.batch_size * args.gradient_accumulation_steps
    global_batch = getattr(args, "global_batch_size", None) or global_batch
    per_epoch = report.tokens / args.seq_length
    steps = args.max_steps
    if report.tokens:
        all_steps = int(args.num_epochs * per_epoch) // global_batch
        steps = min(all_steps, args.max_steps or all_steps)
        about = f"about {report.tokens:,.0f} tokens, {per_epoch:,.0f} samples"
        epochs = f"{steps * global_batch / max(1, per_epoch):.2f} epochs"
        report.fact("dataset", f"{about}; the run reads {epochs}")
    tokens = (steps or 0) * global_batch * args.seq_length
    batch = f"{global_batch:,} samples of {args.seq_length:,} tokens on {devices} devices"
    known = f"{steps:,} of {batch}: {tokens:,} tokens" if steps is not None else f"? of {batch}"
    report.fact("steps", known)
    report.fact(
        "learning rate", f"{args.lr:g}, {args.lr_scheduler}, {args.warmup_steps} to warm up"
    )
    from_scratch = getattr(args, "from_scratch", True)  # chapter 14 always does
    if from_scratch and (args.lr <= 3e-5 or not args.warmup_steps):
        rates = "from scratch, GPT-3 had a warm-up, and 6e-4 for 125M parameters, 2e-4 for 1.3B"
        report.warn(f"the default --lr and --warmup-steps are for fine-tuning: {rates}")
    speed, source = speed_of_run(args, parameters, devices)
    if speed and steps is not None:
        hours = f"{tokens / speed / 3600:,.1f} h at {speed:,.0f} tokens/s"
        report.fact("time", f"{hours}, {source}")
    checkpoint = 0.0 if hasattr(args, "lora_rank") else 12e-9 * parameters  # adapters are small
    # One more while it is written, and then `final/`
    peak = (args.keep_checkpoints + 1) * checkpoint + checkpoint / 3
    if checkpoint:
        kept = f"{args.keep_checkpoints} of {checkpoint:,.1f} GB are kept"
        report.fact("checkpoints", f"{kept}; at most {peak:,.1f} GB are on the disk")
    return peak


def speed_of_run(args, parameters: int, devices: int) -> tuple[float, str]:
    """Tokens per second: those of the log of the run, or an estimate for a model of some size."""
    file = Path(args.save_dir).expanduser() / str(args.experiment_name) / "metrics.jsonl"
    if file.exists():
        speeds = [json.loads(line).get("tokens_per_second") for line in file.open()]
        if speeds := [speed for speed in speeds if speed]:
            return statistics.median(speeds), f"as measured in {file}"
    config = AutoConfig.from_pretrained(args.model_name).get_text_config()
    attention = 6 * config.num_hidden_layers * config.hidden_size * args.seq_length
    passes = 8 / 6 if args.activation_checkpointing else 1
    flops_per_token = passes * (6 * parameters + attention)
    speed = devices * H100 / flops_per_token if parameters > SMALL / 3 else 0
    return speed, "estimated for H100s that never wait; mixtures of experts are faster"


def check_machine(args, parameters: int, chapter, report: Report) -> None:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, datasets)}
    report.fact("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if args.model_name.startswith(("~", "$")):
        report.error(f"-m {args.model_name}: only a shell knows ~ and $, so write the whole path")
    if "$" in args.dataset_name:
        report.error(f"-d {args.dataset_name}: only a shell knows $, so write the whole path")
    if "://" in args.save_dir:
        report.error(f"--save-dir {args.save_dir}: must be a path, so copy folders into the bucket")
    folders = {"HF_HOME": Path(datasets.config.HF_CACHE_HOME)}
    folders["HF_DATASETS_CACHE"] = Path(datasets.config.HF_DATASETS_CACHE)
    if args.experiment_name:
        folders["--save-dir"] = Path(args.save_dir).expanduser() / args.experiment_name
        if steps := sorted(folders["--save-dir"].glob("step-*")):
            check_resume(args, steps[-1], chapter, report)
    needed = {"--save-dir": check_length_of_run(args, parameters, report)}
    for name, folder in folders.items():
        place = next(path for path in [folder, *folder.parents] if path.exists())
        try:  # some file systems do not lock, and two runs could then write into one folder
            with tempfile.TemporaryDirectory(dir=place) as probe, FileLock(f"{probe}/lock"):
                pass
        except OSError as error:
            report.error(f"{place} cannot be written or locked: choose another {name} ({error})")
            continue
        free, need = shutil.disk_usage(place).free / 1e9, needed.get(name, 1)
        report.fact(name, f"{folder}, {free:,.1f} GB free")
        if free < need:
            report.warn(f"{folder} needs {need:,.1f} GB, so make room, or choose another {name}")
    if parameters > SMALL / 3:
        check_memory(args, report)


def check_memory(args, report: Report) -> None:
    """By tools/estimate-memory.py."""
    gb = torch.cuda.mem_get_info()[1] / 1e9 if torch.cuda.is_available() else 80
    command = [sys.executable, REPOSITORY / "tools" / "estimate-memory.py", "--no-compile"]
    command += ["-m", args.model_name, "--gpu-memory", f"{gb:.0f}", "--devices", devices_of(args)]
    command += ["-s", args.seq_length, "-b", args.batch_size, "--dtype", args.dtype or "bf16"]
    command += ["--activation-checkpointing"] if args.activation_checkpointing else []
    names = ["shard_size", "tensor_parallel", "pipeline_parallel", "context_parallel", "lora_rank"]
    for name in names:
        if getattr(args, name, 1) > 1:
            command += [f"--{name.replace('_', '-')}", getattr(args, name)]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    report.fact("memory of a GPU", (done.stdout or done.stderr).strip().replace("\n", "\n  "))


# Facts that must be equal on all nodes
COMPARED = ["script", "versions", "files", "documents", "held out", "texts", "tokens", "model"]
COMPARED += ["the first sample", "rows", "the first row", "«...» has a loss"]


def check_nodes(args, report: Report) -> None:
    """With torchrun: have all ranks the same folder, time, flags, versions and data?"""
    save_dir = Path(args.save_dir).expanduser()
    save_dir.mkdir(parents=True, exist_ok=True)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f".preflight-{time.time_ns()}")
    probe = save_dir / names[0]
    if dist.get_rank() == 0:
        probe.touch()
    dist.barrier()
    mine = {"sees": probe.exists(), "time": time.time(), "host": os.uname().nodename}
    mine["setup"] = args.as_dict() | {name: report.facts.get(name) for name in COMPARED}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    probe.unlink(missing_ok=True)
    report.fact("ranks", f"{len(ranks)} on {some({rank['host'] for rank in ranks})}")
    if not all(rank["sees"] for rank in ranks):
        report.error(f"not all nodes see {save_dir}: --save-dir must be on a shared disk")
    setups = [rank["setup"] for rank in ranks]
    differing = [name for name in setups[0] if any(s[name] != setups[0][name] for s in setups)]
    if differing:
        report.error(f"nodes differ in {some(differing)}: start all alike, with the same files")
    times = [rank["time"] for rank in ranks]
    if max(times) - min(times) > 10:
        report.warn(f"the clocks of the nodes differ by {max(times) - min(times):.0f} s: use NTP")


# -- All together ----------------------------------------------------------------------------------


def load_splits(args, chapter) -> dict:
    """The splits that the chapter loads, before it makes tokens of them."""
    splits, train = {}, []
    load = datasets.load_dataset

    def load_dataset(*names, **options):
        splits.update(load(*names, **options))
        return splits  # load_tokens() takes the documents to train on out of it

    def tokenize_split(documents, *_):
        train.append(documents)
        sys.exit()  # the documents are enough

    with (
        mock.patch.object(datasets, "load_dataset", load_dataset),
        mock.patch.object(chapter, "tokenize_split", tokenize_split),
    ):
        try:
            chapter.load_tokens(args, tokenizer=None)
        except SystemExit:
            if not train and splits:
                sys.exit(f"error: no such split: choose one of {[*splits]} with NAME:SPLIT")
            if not train:
                raise
    return {**splits, "train": train[0]}


def look_at_folder(report_file: Path, args, report: Report):
    """A folder of tools/prepare-data.py, whose report has all counts. Returns some documents."""
    facts = json.loads(report_file.read_text())
    folder = report_file.parent
    if folder != Path(args.dataset_name).expanduser():
        sys.exit(f"error: a pattern trains on held-out files, too: give the folder, -d {folder}")
    for entry in facts["facts"]["sources"][:NAMES_SHOWN]:
        size = f"{entry['files']:,} files, {entry['bytes'] / 1e6:,.1f} MB"
        report.fact("source", f"{entry['source']}: {size}")
    counts, rows = facts["counts"], facts["rows"]
    report.fact("documents", ", ".join(f"{count:,} in {split}" for split, count in rows.items()))
    report.fact("read", ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if "validation" not in rows:
        report.fact("held out", "the last 1% of the samples")
    if counts["copies"] > counts["documents"] / 100:
        report.warn(f"{counts['copies']:,} documents are copies: prepare them with --dedupe")
    elif counts["in both splits"]:
        both = f"{counts['in both splits']:,} held-out documents are trained on, too"
        report.warn(f"{both}: prepare them with --dedupe")
    rejected = sum(entry["rows"] for entry in facts["rejected"].values())
    if rejected or facts["damaged"] or facts["undecoded"]:
        what = [*facts["rejected"], *facts["damaged"], *facts["undecoded"]]
        report.warn(f"left out, or not decoded: {rejected:,} rows: {some(what)}: see {report_file}")
    report.documents = rows["train"]
    files = [parquet.ParquetFile(file) for file in sorted(folder.glob("train-*.parquet"))]
    row_groups = [(file, n) for file in files for n in range(file.num_row_groups)]
    found = pyarrow.concat_tables(file.read_row_group(n) for file, n in evenly(row_groups, 10))
    return evenly(found["text"].to_pylist(), SAMPLE)


def look_at_data(args, chapter, report: Report) -> list[str] | None:
    """Returns some texts, for the section about tokens."""
    name = Path(args.dataset_name).expanduser()
    for report_file in (name / "report.json", name.parent / "report.json"):
        if report_file.exists():
            return look_at_folder(report_file, args, report)
    files = find_files(args, chapter.READERS, report)
    if files and not report.errors:
        size = sum(map(os.path.getsize, files))
        names = some(map(os.path.basename, files))
        report.fact("files", f"{len(files):,}, {size / 1e6:,.1f} MB: {names}")
        check_rows(files, args, report)
        check_names(files, args, report)
    if report.errors:
        return None
    splits = load_splits(args, chapter)
    # `datasets` knows a file by its name and time of change. Has its size changed since?
    sizes = [documents.info.download_size for documents in splits.values()]
    real_size = sum(map(os.path.getsize, {*map(os.path.realpath, files)}))
    if files and all(sizes) and not {size, real_size} & {sum(sizes), *sizes}:
        sys.exit(f"error: `datasets` has cached an older content: `touch` the files: {some(files)}")
    texts = check_documents(splits, args, report)
    check_csv(files, splits["train"], args.text_column, report)
    return texts


def look_at_rows(args, chapter, report: Report) -> None:
    """The rows of chapter 10, which tools/prepare-data.py has made."""
    if "://" in args.dataset_name:
        report.fact("rows", f"{args.dataset_name}: nothing is downloaded, so not looked at")
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    rows = chapter.MdsRows(args, tokenizer)
    files = [Path(shard.dirname, shard.raw_data.basename) for shard in rows.shards]
    if any(shard.zip_data for shard in rows.shards) and not all(map(Path.exists, files)):
        remedy = "upload it and give its address, or write rows without --compression"
        sys.exit(f"error: {args.dataset_name} has compressed rows, not for a folder: {remedy}")
    tokens = rows.read(0)
    count, shards = sum(rows.sizes), len(rows.sizes)
    report.fact("rows", f"{count:,} of {args.seq_length} tokens, in {shards:,} shards")
    report.tokens = count * args.seq_length
    report.fact("the first row", repr(tokenizer.decode(tokens[tokens >= 0])[:200]))
    if args.eval_freq:
        chapter.load_eval_tokens(args, tokenizer)


def look_at_labels(args, chapter, report: Report) -> None:
    """The rows of chapters 16 and 17, which tools/prepare-data.py has made."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    train_rows, eval_rows, answer_tokens, stop_tokens = chapter.load_rows(args, tokenizer)
    count, held_out = (len(rows["labels"]) // args.seq_length for rows in (train_rows, eval_rows))
    kind = "several texts" if args.packed else "one text and padding"
    report.fact("rows", f"{count:,} of {args.seq_length} tokens: {kind}; {held_out:,} held out")
    report.tokens = len(train_rows["labels"])
    report.fact("with a loss", f"{answer_tokens.sum() / report.tokens:.1%} of the tokens")
    report.fact("a server stops at", some(tokenizer.convert_ids_to_tokens(stop_tokens)))
    first = {name: rows.slice(0, args.seq_length).to_pylist() for name, rows in train_rows.items()}
    positions = first.get("position_ids", [0])
    begins = [n for n, position in enumerate(positions) if position == 0]
    text = labels.marked(first["input_ids"], first["labels"], begins, tokenizer)
    report.fact("«...» has a loss", repr(text[:1000] + ("..." if len(text) > 1000 else "")))


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    transformers.logging.disable_progress_bar()
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if several:
        dist.init_process_group("gloo")
        if dist.get_rank() > 0:
            sys.stdout = io.StringIO()
    chapter = load_chapter(sys.argv.pop(1))
    try:
        args = parse_flags(chapter)
    except Exception as error:
        sys.exit(f"error: {error}")
    report = Report()
    report.facts["script"] = Path(chapter.__file__).read_text()
    data = f"-d {args.dataset_name}"
    if hasattr(chapter, "MdsRows"):
        with report.section("Rows", f"{data}, which must be rows of tools/prepare-data.py --mds"):
            look_at_rows(args, chapter, report)
    elif hasattr(chapter, "load_rows"):
        with report.section("Rows", f"{data}, which must be rows of tools/prepare-data.py --rows"):
            look_at_labels(args, chapter, report)
    else:
        # Chapter 4 reads while it trains, so look at its documents as chapter 1 does.
        first = chapter if hasattr(chapter, "load_tokens") else load_chapter("01")
        texts = None
        with report.section("Data", data):
            texts = look_at_data(args, first, report)
        report.facts["texts"] = hashlib.sha256(repr(texts).encode()).hexdigest()
        if texts:
            with report.section("Tokens", f"the tokenizer of {args.model_name}"):
                check_tokens(texts, args, first, report)
    parameters = 0
    with report.section("Model", args.model_name):
        parameters = check_model(args, chapter, report)
    with report.section("Machine and run", "this machine"):
        check_machine(args, parameters, chapter, report)
    if several:
        check_nodes(args, report)
    print(f"\n{report.errors} errors, {report.warnings} warnings", flush=True)
    if several:
        dist.barrier()  # rank 0 has printed: torchrun ends it as soon as another rank has failed
        dist.destroy_process_group()
    sys.exit(1 if report.errors else 0)


if __name__ == "__main__":
    main()
