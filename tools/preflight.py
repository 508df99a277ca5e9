"""One look before a long run: what will be trained, and what is wrong.

    python tools/preflight.py 03-fsdp -m Qwen/Qwen3-0.6B -d "books/**/*.txt" -e books
    torchrun --nnodes 2 ... tools/preflight.py 03-fsdp -e books    # also compares the nodes

Give the chapter and all flags of the run. The tool reads files, tokenizes some of the documents,
and computes with a small copy of the model. It trains nothing, and writes only into the cache of
`datasets`. The exit status is 1 after an error, and 0 otherwise. A warning names something that
trains, but perhaps not as you think.
"""

import glob
import importlib.util
import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import charset_normalizer
import datasets
import pandas
import pyarrow.parquet
import tokenizers
import torch
import torch.distributed as dist
import transformers
from filelock import FileLock
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file

REPOSITORY = Path(__file__).resolve().parents[1]
SAMPLE = 2000  # documents to look at, evenly over the dataset
FILES = 200  # files whose bytes are looked at, evenly over all files
BYTES = 10_000_000  # of each of these files
SMALL = 300e6  # parameters of a model that this tool computes with
NAMES_SHOWN = 5
LFS = b"version https://git-lfs.github.com/spec"
# What pandas reads as a missing value in a CSV file
MISSING = {"#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"}
MISSING |= {"<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"}


class Report:
    """Prints facts, warnings and errors below the title of their section."""

    def __init__(self):
        self.errors = self.warnings = 0

    def title(self, title: str) -> None:
        print(f"\n{title}")

    def fact(self, name: str, value) -> None:
        print(f"  {name:<22}{value}")

    def warn(self, message: str) -> None:
        self.warnings += 1
        print(f"  warning: {message}")

    def error(self, message: str) -> None:
        self.errors += 1
        print(f"  error: {message}")


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
    """The script of a chapter as a module: `03` or `03-fsdp`."""
    name = name.rstrip("/")
    scripts = list(REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))
    found = [path for path in scripts if name in (path.parent.name, path.parent.name[:2])]
    if not found:
        sys.exit(f"error: there is no chapter {name}: give its number, such as 03")
    if name.startswith("09"):
        sys.exit("error: chapter 9 has configuration files: give its values as flags of 03-fsdp")
    spec = importlib.util.spec_from_file_location("chapter", found[0])
    module = importlib.util.module_from_spec(spec)
    sys.modules["chapter"] = module
    spec.loader.exec_module(module)
    module.say = lambda message: None
    return module


def first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


# -- Data ------------------------------------------------------------------------------------------


def files_of(args, formats: dict, report: Report) -> list[str]:
    """The local files that the run reads, and what lies there besides. None of a Hub dataset."""
    name = os.path.expanduser(args.dataset_name)
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        advise_folder(name, formats, report)
        return []
    if not glob.has_magic(name):
        return []  # a dataset on the Hub, or a file that the chapter does not find either
    found = sorted(glob.glob(name, recursive=True))
    files = [path for path in found if os.path.exists(path)]
    dead = {*found} - {*files}
    if dead:
        report.error(f"{some(dead)}: links to files that do not exist")
    if files and Path(name.removesuffix(".gz")).suffix not in formats:
        report.error(f"no chapter reads {some(files)}: convert them to one of {', '.join(formats)}")
        return []
    real = Counter(map(os.path.realpath, files))
    if twice := [path for path, count in real.items() if count > 1]:
        report.warn(f"{some(twice)}: read more than once, because a link leads there, too")
    base = name
    while glob.has_magic(base):
        base = os.path.dirname(base)
    others = [path for path in below(base) if os.path.realpath(path) not in real]
    others = [path for path in others if path not in dead]
    hidden = [path for path in others if "/." in "/" + os.path.relpath(path, base)]
    same = [p for p in others if p not in hidden and Path(p).suffix == Path(name).suffix]
    kinds = {"hidden files": hidden, "outside the pattern": same}
    for kind, paths in kinds.items():
        if paths:
            short = some(os.path.relpath(path, base) for path in paths)
            report.fact("not read", f"{len(paths):,} {kind}: {short}")
    endings = Counter(Path(p).suffix or "without ending" for p in {*others} - {*hidden, *same})
    if endings:
        report.fact("not read", some(f"{n:,} {ending}" for ending, n in endings.items()))
    return files


def below(folder: str) -> list[str]:
    """The files in a folder and in folders below it, also behind links; at most 100,000."""
    walk = os.walk(folder or ".", followlinks=True)
    paths = (os.path.join(top, name) for top, _, names in walk for name in names)
    return list(itertools.islice(paths, 100_000))


def advise_folder(name: str, formats: dict, report: Report) -> None:
    """A folder is no dataset of a chapter: which pattern reads its files?"""
    paths = below(name)
    if any(os.path.basename(path) == "dataset_info.json" for path in paths):
        code = f"datasets.load_from_disk({name!r}).to_parquet('data.parquet')"
        report.error(f"-d {name} is a folder of save_to_disk, so write a file for -d: {code}")
        return
    endings = Counter(Path(path.removesuffix(".gz")).suffix for path in paths)
    known = {ending: number for ending, number in endings.items() if ending in formats}
    patterns = [f"-d '{name}/**/*{ending}' ({n:,} files)" for ending, n in known.items()]
    remedy = " or ".join(patterns) or f"none of its files ends in {', '.join(formats)}"
    report.error(f"-d {name} is a folder, and a chapter reads files: {remedy}")


def check_bytes(files: list[str], report: Report) -> None:
    """Pointers of git-lfs, and bytes that are not UTF-8."""
    wrong, damaged = defaultdict(list), []
    is_text = Path(files[0].removesuffix(".gz")).suffix in (".txt", ".md", ".py")
    for path in evenly(files, FILES):
        with open(path, "rb") as stream:
            data = stream.read(BYTES)
        if data.startswith(LFS):
            wrong["pointers of git-lfs and not the text, so run `git lfs pull`"].append(path)
        if path.endswith((".gz", ".parquet")) or not data:
            continue
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            if not is_text:
                wrong["UTF-16, which this format cannot be, so run iconv"].append(path)
            continue
        text = data.decode("utf-8", errors="replace")
        bad = text.rstrip("\ufffd").count("\ufffd") if len(data) == BYTES else text.count("\ufffd")
        bad -= data.count("\ufffd".encode())  # the file itself has this character
        if bad > 0:
            guess = charset_normalizer.from_bytes(data[:100_000]).best()
            damaged.append(f"{path} ({bad:,} places, perhaps {guess and guess.encoding})")
        if "\0" in text[:10_000]:
            wrong["zero bytes, so no text, or UTF-16 without its mark"].append(path)
    for problem, paths in wrong.items():
        report.error(f"{some(paths)}: {problem}")
    if damaged:
        message = f"{some(damaged)}: not UTF-8, so run iconv"
        report.warn(message) if is_text else report.error(message)


def check_stale(files: list[str], documents, report: Report) -> None:
    """`datasets` knows a file by its name and time of change. Has its content changed since?"""
    rows = 0
    for path in files:
        if path.endswith(".jsonl"):
            with open(path, "rb") as stream:
                rows += sum(1 for line in stream if line.strip())
        elif path.endswith(".parquet"):
            rows += pyarrow.parquet.ParquetFile(path).metadata.num_rows
        else:
            return
    if files and rows != len(documents):
        cached = f"the cache of `datasets` has {len(documents):,}"
        report.error(f"{some(files)}: {rows:,} rows, and {cached} of before: `touch` the files")


def check_csv(files: list[str], column: str, report: Report) -> None:
    """Cells that pandas reads as missing, or as numbers."""
    for path in [path for path in files if ".csv" in path][:FILES]:
        cells = pandas.read_csv(path, dtype=str, keep_default_na=False, nrows=1_000_000)
        if column not in cells:
            continue
        lost = Counter(cells[column][cells[column].isin(MISSING)])
        if lost:
            cells = f"{lost.total():,} cells, such as {some(lost)}"
            report.warn(f"{path}: {cells}: read as missing, so write the data as JSONL")


REMEDIES = {
    "List": "join its parts: dataset.map(lambda row: {{'text': ' '.join(row[{column!r}])}})",
    "dict": "it holds fields, as conversations do: chapter 16 trains on them, or name one field",
    "binary": "decode it: dataset.map(lambda row: {{'text': row[{column!r}].decode()}})",
    "int": "these are numbers: if they are ids of tokens, chapter 10 reads them",
    "string_view": "write the file again with large_string",
}


def check_column(documents, column: str, report: Report) -> bool:
    """Whether the column holds text. Otherwise, what to do about its type."""
    kind = documents.features.get(column)
    if kind in (datasets.Value("string"), datasets.Value("large_string")):
        return True
    if kind is None:
        names = some(documents.features)
        remedy = f"choose --text-column among {names}"
        if len(documents.features) == 1 and (";" in names or "\t" in names):
            remedy = f"the line {names!r} has no commas, so write the table again with commas"
        report.error(f"there is no column {column!r}: {remedy}")
        return False
    type_name = getattr(kind, "dtype", None) or type(kind).__name__
    remedies = [remedy for part, remedy in REMEDIES.items() if part in type_name]
    remedy = remedies[0] if remedies else "convert it to text"
    report.error(f"column {column!r} is of type {type_name}: {remedy.format(column=column)}")
    return False


def check_documents(splits, args, report: Report) -> list[str] | None:
    """Counts documents. Returns some of their texts."""
    documents, column = splits["train"], args.text_column
    if not check_column(documents, column, report):
        return None
    chosen = documents.select(evenly(range(len(documents)), SAMPLE))[column]
    texts = [text for text in chosen if text]
    report.fact("documents", f"{len(documents):,}; looked at {len(chosen):,}")
    if empty := len(chosen) - len(texts):
        report.warn(f"{empty / len(chosen):.0%} of the documents are empty, or have no {column}")
    if not texts:
        report.error("no document has text")
        return None
    lengths = sorted(map(len, texts))
    median = lengths[len(lengths) // 2]
    report.fact("characters each", f"{lengths[0]:,} to {lengths[-1]:,}, half below {median:,}")
    report.fact("the first one begins", repr(texts[0][:70]))
    copies = len(texts) - len(set(texts))
    if copies > len(texts) / 100:
        report.warn(f"{copies / len(texts):.0%} of the documents are copies of others")
    if any(name in splits and not len(splits[name]) for name in ("validation", "test")):
        report.warn("the held-out split is empty")
    held_out = splits.get("validation") or splits.get("test")
    if not held_out:
        report.fact("held out", "the last 1 % of the samples, since there is no validation split")
    elif check_column(held_out, column, report):
        report.fact("held out", f"{len(held_out):,} documents of a split of its own")
        others = held_out.select(evenly(range(len(held_out)), SAMPLE))[column]
        if same := {*texts} & {*others} - {None, ""}:
            report.warn(f"{len(same):,} held-out documents are trained on, too: {some(same)[:60]}")
    return texts


def check_conversations(documents, args, chapter, report: Report) -> None:
    """Of chapters 16 and 17: how many answers fit, and which tokens of a sample have a loss."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    if args.chat_template:
        tokenizer.chat_template = Path(args.chat_template).read_text()
    if not tokenizer.chat_template:
        report.error(f"{args.model_name} has no chat template: give --chat-template a file")
        return
    stop_token = chapter.find_stop_token(tokenizer, args)
    chosen = documents.select(evenly(range(len(documents)), SAMPLE))
    found = chapter.tokenize(chosen[:], tokenizer, args.template_options, args.seq_length)
    answers = f"with {sum(found['answers']):,} answers"
    report.fact("conversations", f"{len(documents):,}; looked at {len(chosen):,}, {answers}")
    if "tools" in documents.features:
        report.warn("the column tools is not read: write the tools into a message of the system")
    report.fact("answers end with", tokenizer.convert_ids_to_tokens(stop_token))
    texts = [pair for pair in zip(found["input_ids"], found["labels"], strict=True) if len(pair[0])]
    if left_out := sum(found["left_out"]):
        report.warn(f"{left_out:,} answers do not fit into {args.seq_length} tokens")
    if not texts:
        report.error("no answer fits, or no message has the role 'assistant'")
        return
    tokens = zip(*texts[0], strict=True)
    marked = ""
    for is_answer, part in itertools.groupby(tokens, key=lambda pair: pair[1] >= 0):
        text = tokenizer.decode([token for token, _ in part])
        marked += f"«{text}»" if is_answer else text
    report.fact("«...» has a loss", repr(marked))


# -- Tokens ----------------------------------------------------------------------------------------


def check_tokens(texts: list[str], args, chapter, report: Report) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model_name)
    config = AutoConfig.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        report.error(f"the tokenizer of {args.model_name} has no end-of-text token")
        return
    report.fact("tokenizer", f"{type(tokenizer).__name__}, {len(tokenizer):,} tokens")
    documents = chapter.tokenize({"text": texts}, tokenizer, "text")["input_ids"]
    tokens = list(itertools.chain.from_iterable(documents))
    size = sum(len(text.encode()) for text in texts)
    per = f"{len(tokens) / len(texts):,.0f} per document, {len(tokens) / size:.2f} per byte"
    report.fact("tokens", per)
    start = tokenizer.decode(tokens[: args.seq_length])
    report.fact("the first sample", repr(start[:200] + ("..." if len(start) > 200 else "")))

    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if begin is not None and any(ids[:2] == [begin, begin] for ids in documents):
        report.warn(f"documents begin with {tokenizer.bos_token} twice: remove it from the text")
    if any(ids[-2:] == [end, end] for ids in documents):
        report.warn(f"documents end with {tokenizer.eos_token} twice: remove it from the text")
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    inside = Counter(t for ids in documents for t in ids[1:-1] if t in special)
    if inside:
        names = [f"{tokenizer.convert_ids_to_tokens(t)} ({n:,} times)" for t, n in inside.items()]
        report.warn(f"texts contain special tokens, which are read as such: {some(names)}")
    unknown = tokens.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    if unknown and tokenizer.unk_token_id != end:
        report.warn(f"{unknown / len(tokens):.1%} of the tokens are {tokenizer.unk_token}: unknown")
    vocabulary = config.get_text_config().vocab_size
    if max(tokens) >= vocabulary:
        report.error(f"token {max(tokens)} is outside the embeddings of the model, {vocabulary:,}")
    elif len(tokenizer) > vocabulary:
        report.warn(f"the tokenizer has {len(tokenizer):,} tokens, and the model {vocabulary:,}")
    check_ends(tokenizer, config, args, report)
    check_class(texts, tokenizer, args, report)


def check_class(texts: list[str], tokenizer, args, report: Report) -> None:
    """For some families, Transformers replaces parts of tokenizer.json by those of a class."""
    with suppress(OSError):  # without this file, there is nothing to compare
        backend = tokenizers.Tokenizer.from_file(cached_file(args.model_name, "tokenizer.json"))
        backend.no_truncation()
        for text in [text[:1000] for text in texts]:
            expected = backend.encode(text, add_special_tokens=False).ids
            found = tokenizer(text, add_special_tokens=False)["input_ids"]
            if found != expected:
                pairs = enumerate(zip(found, expected, strict=False))
                begin = next((n for n, (one, other) in pairs if one != other), 0)
                parts = (ids[begin : begin + 5] for ids in (found, expected))
                both = ", not ".join(str(tokenizer.convert_ids_to_tokens(part)) for part in parts)
                name = type(tokenizer).__name__
                report.warn(f"{name} makes other tokens than tokenizer.json: {both}")
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
            report.warn(f"{says}: the model would not stop there")


# -- Model -----------------------------------------------------------------------------------------


def check_model(args, chapter, report: Report) -> int:
    """Files, family, and a small copy. Returns the number of parameters."""
    config = AutoConfig.from_pretrained(args.model_name)
    if config.get_text_config() is not config:
        report.error(f"{args.model_name} reads more than text: choose a model of text alone")
        return 0
    if getattr(config, "quantization_config", None):
        report.error(f"{args.model_name} is quantized: choose the files that it was made from")
        return 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parameters = model.num_parameters()
    from_scratch = getattr(args, "from_scratch", True)  # chapter 14 always does
    source = "random weights" if from_scratch else "the weights of its files"
    report.fact("model", f"{config.model_type}, {parameters:,} parameters, {source}")
    longest = getattr(config, "max_position_embeddings", None)
    if longest and args.seq_length > longest:
        report.error(f"--seq-length {args.seq_length}: the model has {longest} positions")
    if not from_scratch:
        check_files(args, report)
    check_family(args, chapter, report)
    if hasattr(chapter, "add_adapters"):
        chapter.add_adapters(model, args)  # on the meta device; raises if no layer has this name
    check_small(config, args, chapter, report)
    return parameters


def check_files(args, report: Report) -> None:
    """Tensors of the files and of the model, by name and shape. The meta device reads no values."""
    options = {"output_loading_info": True, "device_map": "meta", "ignore_mismatched_sizes": True}
    try:
        _, found = AutoModelForCausalLM.from_pretrained(args.model_name, **options)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        report.error(f"the files of {args.model_name} cannot be read: {first_line(error)}")
        return
    if found["missing_keys"]:
        report.error(f"tensors that the files lack: {some(found['missing_keys'])}")
    if found["unexpected_keys"]:
        report.warn(f"tensors that the model does not use: {some(found['unexpected_keys'])}")
    if found["mismatched_keys"]:
        shapes = [f"{n} {tuple(a)}, not {tuple(b)}" for n, a, b in found["mismatched_keys"]]
        report.error(f"tensors of another shape than config.json says: {some(shapes)}")
    folder = Path(args.model_name)
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    used = {single.name} if single.exists() else set()
    if index.exists() and not used:
        used = {*json.loads(index.read_text())["weight_map"].values()}
    more = {path.name for path in folder.glob("*.safetensors")} - used
    more |= {path.name for path in folder.glob("pytorch_model*.bin")} if used else set()
    if used and more:
        report.warn(f"{some(more)} in {folder}: not read, because {some(used)} is there")


def check_family(args, chapter, report: Report) -> None:
    """What the chapter itself refuses before it trains."""
    for name in ("check_plan", "check_model", "split_layers"):
        if not hasattr(chapter, name):
            continue
        try:
            getattr(chapter, name)(args)
        except SystemExit as end:
            report.error(str(end.code).removeprefix("error: "))


def check_small(config, args, chapter, report: Report) -> None:
    """A small copy of the model: does a token see later ones, and does a saved copy open again?"""
    config = AutoConfig.for_model(**config.to_dict())
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if getattr(config, name, 0) > 2:
            with suppress(Exception):  # some configs derive this number
                setattr(config, name, 2)
    if getattr(config, "layer_types", None):
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
    if torch.allclose(first, third, atol=1e-5):
        report.fact("small copy", "saved and opened again with equal logits")
    else:
        report.error("a saved copy of this family computes something else, so `final/` would, too")
    probe = getattr(chapter, "mixes_conversations", None)
    if probe and args.packing and probe(model, torch.device("cpu")):
        report.error("this model mixes the conversations of a sample: give --no-packing")


# -- Machine and run -------------------------------------------------------------------------------


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return folder if folder.exists() else existing(folder.parent)


def check_machine(args, parameters: int, report: Report) -> None:
    versions = {module.__name__: module.__version__ for module in (torch, transformers, datasets)}
    report.fact("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    if args.model_name.startswith("~"):
        report.error(f"-m {args.model_name}: Transformers does not know ~, so write the whole path")
    folders = {"HF_HOME": Path(datasets.config.HF_CACHE_HOME)}
    folders["the cache of datasets"] = Path(datasets.config.HF_DATASETS_CACHE)
    if args.experiment_name:
        folders["--save-dir"] = Path(args.save_dir).expanduser() / args.experiment_name
    # In GB: weights and two moments in fp32 per checkpoint, one more while it is written, `final/`
    needed = {"--save-dir": (12 * (args.keep_checkpoints + 1) + 4) * parameters / 1e9}
    if hasattr(args, "lora_rank"):  # adapters are small
        needed = {}
    for name, folder in folders.items():
        place = existing(folder)
        try:  # some file systems do not lock, and two runs could then write into one folder
            with tempfile.TemporaryDirectory(dir=place) as probe, FileLock(f"{probe}/lock"):
                pass
        except OSError as error:
            report.error(f"{place} cannot be written or locked, and {name} is {folder} ({error})")
            continue
        free, need = shutil.disk_usage(place).free / 1e9, needed.get(name, 1)
        report.fact(name, f"{folder}, {free:,.1f} GB free")
        if free < need:
            report.warn(f"{folder} needs {need:,.1f} GB, and {free:,.1f} GB are free")
    run = folders.get("--save-dir")
    if run and run.exists():
        check_run(run, report)
    if parameters > SMALL / 3:
        check_memory(args, report)


def check_run(run: Path, report: Report) -> None:
    """What an earlier run of this name has left."""
    steps = sorted(run.glob("step-*"))
    if steps:
        report.fact("goes on from", steps[-1])
    for path in run.rglob("*"):
        if not os.access(path, os.W_OK):
            report.error(f"{path} cannot be written: it belongs to another user")
            return


def check_memory(args, report: Report) -> None:
    """By tools/estimate-memory.py."""
    gb = torch.cuda.mem_get_info()[1] / 1e9 if torch.cuda.is_available() else 80
    devices = dist.get_world_size() if dist.is_initialized() else torch.cuda.device_count() or 8
    options = ["-m", args.model_name, "--gpu-memory", f"{gb:.0f}", "--devices", devices]
    options += ["-s", args.seq_length, "-b", args.batch_size, "--dtype", args.dtype or "bf16"]
    options += ["--activation-checkpointing"] if args.activation_checkpointing else []
    names = ["shard_size", "tensor_parallel", "pipeline_parallel", "context_parallel", "lora_rank"]
    for name in names:
        if getattr(args, name, 1) > 1:
            options += [f"--{name.replace('_', '-')}", getattr(args, name)]
    tool = REPOSITORY / "tools" / "estimate-memory.py"
    command = [sys.executable, tool, *options, "--no-compile"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    report.fact("memory of a GPU", (done.stdout or done.stderr).strip().replace("\n", "\n  "))


def check_nodes(args, report: Report) -> None:
    """With torchrun: do all ranks have the same flags, versions, clock and folder?"""
    save_dir = Path(args.save_dir).expanduser()
    save_dir.mkdir(parents=True, exist_ok=True)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, f".preflight-{time.time_ns()}")
    probe = save_dir / names[0]
    if dist.get_rank() == 0:
        probe.touch()
    dist.barrier()
    mine = {"flags": str(args), "versions": f"{torch.__version__}, {transformers.__version__}"}
    mine |= {"sees": probe.exists(), "time": time.time(), "host": os.uname().nodename}
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    probe.unlink(missing_ok=True)
    report.fact("ranks", f"{len(ranks)} on {some({rank['host'] for rank in ranks})}")
    for name in ("flags", "versions"):
        if len({rank[name] for rank in ranks}) > 1:
            report.error(f"nodes differ in {name}: {some({rank[name][:60] for rank in ranks})}")
    if not all(rank["sees"] for rank in ranks):
        report.error(f"not all nodes see {save_dir}: --save-dir must be on a shared disk")
    times = [rank["time"] for rank in ranks]
    if max(times) - min(times) > 10:
        report.warn(f"the clocks of the nodes differ by {max(times) - min(times):.0f} s: use NTP")


# -- All together ----------------------------------------------------------------------------------


def look_at_data(args, chapter, report: Report) -> None:
    report.title("Data")
    first = chapter if hasattr(chapter, "tokenize_split") else load_chapter("01")
    try:
        files = files_of(args, first.FORMATS, report)
        if files:
            size = sum(map(os.path.getsize, files))
            names = some(map(os.path.basename, files))
            report.fact("files", f"{len(files):,}, {size / 1e6:,.1f} MB: {names}")
            check_bytes(files, report)
            check_csv(files, getattr(args, "text_column", ""), report)
        if report.errors:
            return
        splits = first.load_documents(args)
        check_stale(files, splits["train"], report)
        if hasattr(chapter, "texts_of"):
            check_conversations(splits["train"], args, chapter, report)
            return
        texts = check_documents(splits, args, report)
    except SystemExit as end:
        report.error(str(end.code).removeprefix("error: "))
        return
    except Exception as error:
        report.error(f"-d {args.dataset_name} cannot be read: {first_line(error)}")
        return
    if texts:
        report.title("Tokens")
        try:
            check_tokens(texts, args, first, report)
        except Exception as error:
            report.error(f"the tokenizer of {args.model_name}: {first_line(error)}")


def look_at_rows(args, chapter, report: Report) -> None:
    """The rows of chapter 10, which tools/write-mds.py has made."""
    report.title("Rows")
    if "://" in args.dataset_name:
        report.fact("rows", f"{args.dataset_name}: nothing is downloaded, so not looked at")
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name)
        rows = chapter.MdsRows(args, tokenizer)
        tokens = rows.read(0)
        count, shards = sum(rows.sizes), len(rows.sizes)
        report.fact("rows", f"{count:,} of {args.seq_length} tokens, in {shards:,} shards")
        report.fact("the first row", repr(tokenizer.decode(tokens[tokens >= 0])[:200]))
        if args.eval_freq:
            chapter.load_eval_rows(args, tokenizer)
    except SystemExit as end:
        report.error(str(end.code).removeprefix("error: "))
    except Exception as error:
        remedy = "are these rows of tools/write-mds.py?"
        report.error(f"-d {args.dataset_name} cannot be read: {first_line(error)}: {remedy}")


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
        args = chapter.parse_args()
    except Exception as error:
        sys.exit(f"error: {error}")
    report = Report()
    if hasattr(chapter, "MdsRows"):
        look_at_rows(args, chapter, report)
    else:
        look_at_data(args, chapter, report)
    report.title("Model")
    parameters = 0
    try:
        parameters = check_model(args, chapter, report)
    except Exception as error:
        report.error(f"{args.model_name}: {first_line(error)}")
    report.title("Machine and run")
    check_machine(args, parameters, report)
    if several:
        check_nodes(args, report)
        dist.destroy_process_group()
    print(f"\n{report.errors} errors, {report.warnings} warnings")
    sys.exit(1 if report.errors else 0)


if __name__ == "__main__":
    main()
