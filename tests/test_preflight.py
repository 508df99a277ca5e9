"""tools/preflight.py names what public bug reports were about. Clean runs have no warning."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.data import write_documents
from helpers.models import DEMO_TEMPLATE, LLAMA, MODELS, TINY_LLAMA, save_weights, write_model
from helpers.runner import CHAPTERS_BY_NUMBER, FACTS, REPOSITORY, Job, load, patches
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# Without 9, a template with configuration files, and demos that need another command first
CHAPTERS = [name[:2] for name, facts in FACTS.items() if "needs" not in facts]
TOOL = REPOSITORY / "tools" / "preflight.py"
FROM_SCRATCH = ["--from-scratch", "--lr", 1e-3, "--warmup-steps", 5]
MANY = [f"document {number} of many about a thing" for number in range(60)]


@pytest.fixture(scope="module")
def tool():
    return load(TOOL)


@pytest.fixture
def look(tool, tmp_path, monkeypatch, capsys):
    """Calls the tool for chapter 1; returns its status and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "SAMPLE", 100)

    def look(*flags, chapter="1"):
        if "--demo" not in flags:
            flags = [*FROM_SCRATCH, "-m", TINY_LLAMA, "-s", 32, *flags]
        monkeypatch.setattr(sys, "argv", ["preflight.py", chapter, *map(str, flags)])
        with pytest.raises(SystemExit) as end:
            tool.main()
        return end.value.code, capsys.readouterr().out

    return look


def parsed(chapter: str, *flags):
    with mock.patch.object(sys, "argv", ["train-llm.py", *map(str, flags)]):
        return load(CHAPTERS_BY_NUMBER[chapter]).parse_args()


def test_a_folder_whose_name_begins_another(tool, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("joined", "joined-nodes"):
        written(f"{name}/train-llm.py", f"name = {name!r}".encode())
        assert tool.load_chapter(name).name == name
    assert tool.load_chapter(str(tmp_path / "joined")).name == "joined"


def jsonl(texts, file="data.jsonl", column="text"):
    return ["-d", str(write_documents(Path(file), texts, column))]


def written(name: str, data: bytes, flag=None):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as stream:
        stream.write(data)
    return ["-d", flag or name]


def parquet(array):
    pq.write_table(pa.table({"text": array}), "data.parquet")
    return ["-d", "data.parquet"]


def linked():
    written("a/x.txt", b"the same text")
    os.symlink("a", "b")
    return ["-d", "*/x.txt"]


def dead():
    os.symlink("nothing", "dead.txt")
    return written("x.txt", b"text", "*.txt")


def saved_to_disk():
    datasets.Dataset.from_dict({"text": MANY}).save_to_disk("saved")
    return ["-d", "saved"]


def changed_at_the_same_time():
    for number in (10, 20):
        flags = jsonl(MANY[:number])
        os.utime("data.jsonl", (1.7e9, 1.7e9))
        datasets.load_dataset("json", data_files="data.jsonl")
    return flags


def model(name="m", weights=False, **changes):
    path = write_model(Path(name).absolute(), **LLAMA | changes)
    return save_weights(path) if weights else path


def tokenizer(edit):
    """The flags for a model with this tokenizer, and some text."""
    path = model()
    backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    edit(backend, path)
    backend.save(str(path / "tokenizer.json"))
    return ["-m", path]


def with_begin(backend, path):
    edited(path, "tokenizer_config.json", bos_token="a")
    backend.post_processor = processors.TemplateProcessing(
        single="a $A", special_tokens=[("a", backend.token_to_id("a"))]
    )


def with_end(backend, path):
    end = AutoTokenizer.from_pretrained(path).eos_token
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, backend.token_to_id(end))]
    )


def edited(path, file="config.json", **values):
    config = json.loads((path / file).read_text()) | values
    (path / file).write_text(json.dumps(config))
    return path


def unlike(name, made, said):
    """Weights of a model with another value in its config."""
    path = edited(model(weights=True, **{name: made}), **{name: said})
    return ["-m", path, "--no-from-scratch"]


def stale_shards():
    path = model(weights=True)
    shutil.copy(path / "model.safetensors", path / "model-00001-of-00002.safetensors")
    return ["-m", path, "--no-from-scratch"]


def of_the_tool(pattern="", text="text"):
    """A folder of tools/prepare-data.py, with copies, or a pattern in it."""
    with open("x_dev.jsonl", "w") as file:
        file.write(json.dumps({"text": MANY[0]}))
    flags = [*jsonl([*MANY, *MANY[:9]], "x.jsonl")[1:], "x_dev.jsonl", "-o", "p"]
    subprocess.run([sys.executable, TOOL.with_name("prepare-data.py"), *flags], check=True)
    return ["-d", f"p{pattern}"]


def prepared(split=""):
    os.mkdir("p")
    pq.write_table(pa.table({"text": MANY}), "p/train-00000.parquet")
    return ["-d", f"p{split}"]


def begun(**changes):
    """A run whose checkpoint has other parameters, or none."""
    folder = Path("runs", "run", "step-00000001")
    folder.mkdir(parents=True)
    flags = ["-m", TINY_LLAMA, "--from-scratch", "-s", 32, "-e", "run", "--save-dir", "runs"]
    flags += jsonl(MANY)
    if changes:
        parameters = parsed("01", *flags).as_dict()
        (folder / "parameters.json").write_text(json.dumps(parameters | changes))
    return flags


def spoiled(value: float, ending="safetensors"):
    """A base with this number in one place of one tensor."""

    def make():
        path = model(weights=True)
        weights = load_file(path / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = value
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        if ending == "bin":
            torch.save(weights, path / "pytorch_model.bin")
            (path / "model.safetensors").unlink()
        return ["-m", path, "--no-from-scratch"]

    return make


def unfit(**changes):
    return lambda: ["-m", edited(model(), **changes)]


# What somebody has, and what the tool says of it
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}
OPT = {"model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32}
XLM = {"model_type": "xlm", "emb_dim": 32, "n_layers": 2, "n_heads": 4}
FEW_POSITIONS = {"max_position_embeddings": 16}
IMAGES = {"model_type": "gemma3", "text_config": {}, "vision_config": {}}
ERRORS = {
    "pointers": (lambda: written("x.txt", b"version https://git-lfs.github.com/spec/v1\n"), "lfs"),
    "latin-1 text": (lambda: written("x.txt", b"caf\xe9 ol\xe9 " * 30), "not UTF-8"),
    "latin-1 rows": (lambda: written("x.jsonl", b'{"text": "caf\xe9"}'), "not UTF-8"),
    "large text": (lambda: written("x.txt", b"a text " * 3_000_000), "prepare-data.py 'x.txt' -o"),
    "held-out files": (lambda: of_the_tool("/*.parquet"), "give the folder, -d p"),
    "no such split": (lambda: prepared(":sft"), "choose one of ['train']"),
    "utf-16 rows": (lambda: written("x.csv", "text\na\n".encode("utf-16")), "UTF-16"),
    "binary": (lambda: written("x.txt", b"a\0b" * 99), "zero bytes"),
    "a dead link": (dead, "links to files that do not exist"),
    "pages": (lambda: written("x.html", b"<p>text", "*.html"), "no chapter reads x.html"),
    "semicolons": (lambda: written("x.csv", b"id;text\n1;a\n"), "--delimiter"),
    "save_to_disk": (saved_to_disk, "tools/prepare-data.py saved -o"),
    "a folder": (lambda: written("a/x.txt", b"text", "a"), "tools/prepare-data.py a -o"),
    "stale cache": (changed_at_the_same_time, "`touch` the files"),
    "bytes": (lambda: parquet(pa.array([b"text"])), "but a bytes"),
    "lists": (lambda: parquet(pa.array([["a", "b"]])), "but a list"),
    "fields": (lambda: parquet(pa.array([{"role": "user"}])), "but a dict"),
    "numbers": (lambda: parquet(pa.array([1, 2])), "but a int"),
    "another column": (lambda: jsonl(MANY, column="story"), "choose --text-column"),
    "outside": (unfit(vocab_size=100), "outside the embeddings"),
    "other shapes": (lambda: unlike("intermediate_size", 64, 48), "tensors of another shape"),
    "an untied head": (lambda: unlike("tie_word_embeddings", False, True), "embeddings to false"),
    "quantized": (unfit(quantization_config={"quant_method": "fp8"}), "is quantized"),
    "positions": (lambda: ["-s", 4096], "positions"),
    "positions of GPT-2": (lambda: ["-m", model(**GPT2, **FEW_POSITIONS)], "16 positions"),
    "positions of OPT": (lambda: ["-m", model(**OPT, **FEW_POSITIONS)], "16 positions"),
    "one token": (lambda: ["-s", 1], "--seq-length 1 leaves no token"),
    "NaN": (spoiled(float("nan")), "the loss is NaN: model.layers.1.mlp"),
    "infinity": (spoiled(-float("inf")), "the loss is NaN: model.layers.1.mlp"),
    "NaN in .bin": (spoiled(float("nan"), "bin"), "the loss is NaN: model.layers.1.mlp"),
    "attention of servers": (lambda: ["--attention", "paged|eager"], "cannot train"),
    "half of a model": (lambda: ["-m", model(model_type="bart")], "no plain decoder of text"),
    "an encoder": (lambda: ["-m", model(**XLM)], "choose a decoder"),
    "images": (lambda: ["-m", model(**IMAGES)], "no plain decoder of text"),
    "a home in quotes": (lambda: ["-m", "~/model"], "write the whole path"),
    "a variable in quotes": (lambda: ["-d", "$DATA/x.txt"], "write the whole path"),
    "no folder": (lambda: ["-e", "run", "--save-dir", "/proc/x"], "cannot"),
    "a bucket": (lambda: ["-e", "run", "--save-dir", "s3://bucket/x"], "s3://bucket/x"),
    "a wrong file": (lambda: ["-d", "none.txt"], "none.txt"),
    "a run of other flags": (lambda: begun(seed=1), "seed was 1, and is 0 now"),
    "an old run": (begun, "has no parameters.json"),
}
WARNINGS = {
    "a byte order mark": (lambda: written("x.txt", b"\xef\xbb\xbftext" * 30), "becomes a token"),
    "held out by name": (
        lambda: [*jsonl(MANY, "test.jsonl"), *jsonl(MANY), "-d", "*.jsonl"],
        "test.jsonl: trained on",
    ),
    "of another writer": (prepared, "has not written p"),
    "a prepared folder": (of_the_tool, "10 documents are copies"),
    "linked twice": (linked, "a link leads there"),
    "missing cells": (lambda: written("x.csv", b"text,n\nNone,1\nNA,2\nwords,3\n"), "2 cells"),
    "zeros in front": (
        lambda: written("x.csv", b"text\na\n" + b"0000123\n" * 20_000),
        "10,001 cells, such as 0000123",
    ),
    "empty documents": (lambda: jsonl(["", *MANY]), "2% of the documents are empty"),
    "copies": (lambda: jsonl(["a", "a", "b"]), "copies"),
    "special tokens": (lambda: [*tokenizer(with_begin), *jsonl(["b a b"])], "special tokens"),
    "twice begun": (lambda: [*tokenizer(with_begin), *jsonl(["a"])], "twice"),
    "twice ended": (lambda: tokenizer(with_end), "documents end with two"),
    "another class": (
        lambda: ["-m", model(model_type="qwen2", num_key_value_heads=2), *jsonl(["In 1984"])],
        "other tokens than tokenizer.json",
    ),
    "another end": (unfit(eos_token_id=5), "does not stop there"),
    "biases": (lambda: unlike("attention_bias", True, False), "tensors that the model does not"),
    "stale shards": (stale_shards, "model-00001-of-00002.safetensors in"),
    "no backward pass": (lambda: ["--attention", "flex_attention"], "no backward pass on CPUs"),
    "no layers": (lambda: ["-m", model(model_type="openai-gpt", n_embd=32)], "in no layer, so"),
    "a run of another rate": (lambda: begun(lr=1), "lr was 1, and is 0.001 now"),
    "a rate of fine-tuning": (lambda: ["--lr", 3e-5], "are for fine-tuning"),
}


@pytest.mark.parametrize("case", [*ERRORS, *WARNINGS])
def test_named(look, case):
    make, part = (ERRORS | WARNINGS)[case]
    flags = make()
    flags = flags if "-d" in flags else [*jsonl(MANY), *flags]
    status, output = look(*flags)
    (line,) = [line for line in output.splitlines() if part in line]
    assert line.startswith("  warning: ") == (case in WARNINGS)
    assert status == (case in ERRORS), output


def test_hidden_files_are_counted(look):
    written("a/.cache/x.txt", b"hidden")
    status, output = look(*written("a/y.txt", b"seen", "a/**/*.txt"))
    assert (status, "1 hidden files: .cache/x.txt" in output) == (0, True), output


def by_the_tool(monkeypatch, *flags):
    """A folder of tools/prepare-data.py with many groups of rows."""
    prepare = load(TOOL.with_name("prepare-data.py"))
    monkeypatch.setattr(prepare, "GROUP", 300)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["prepare-data.py", *map(str, flags), "-o", "p"])
    prepare.main()
    return ["-d", "p"]


def rows_by_the_tool(monkeypatch, *flags):
    """80 conversations, of which several share a row of 32 tokens."""
    messages = [{"role": role, "content": "a b"} for role in ("user", "assistant")]
    file = jsonl([messages] * 80, "chats.jsonl", "messages")[1]
    more = ["-m", TINY_LLAMA, "-s", 32, "--chat-template", DEMO_TEMPLATE, "--overwrite"]
    return by_the_tool(monkeypatch, file, "--as", "messages", "--rows", *more, *flags)


def test_rows_of_conversations(look, monkeypatch):
    """What is in them, how long a run is, and what chapter 16 would say of rows and models."""
    data = rows_by_the_tool(monkeypatch)
    status, output = look(*data, "-b", 1, chapter="16")
    assert status == 0, output
    count = int(re.search(r"rows +(\d+) of 32 tokens: several texts; 1 held out", output)[1])
    for part in (
        "a server stops at",
        "'User: a b\\nAssistant:« a b<|endoftext|>»│User: a b\\n",
        f"{3 * count // 8} of 8 samples of 32 tokens on 8 devices",
    ):
        assert part in output, (part, output)
    mixing = ["-m", model(**OPT)]
    for flags, part in (
        (["-d", "chats.jsonl"], "chats.jsonl has no rows: first run `python tools/prepare-data.py"),
        ([*data, "-s", 64], "p has another length: run `python tools/prepare-data.py"),
        ([*data, *mixing], "prepare the rows with --no-packing"),
    ):
        status, output = look(*flags, chapter="16")
        assert (status, part in output) == (1, True), output
    status, output = look(*rows_by_the_tool(monkeypatch, "--no-packing"), *mixing, chapter="16")
    assert (status, "79 of 32 tokens: one text and padding" in output) == (0, True), output


def test_figures_of_each_form_of_data(look, monkeypatch):
    """Samples, steps and tokens of a run are those of the same documents, wherever they are."""
    rows = datasets.Dataset.from_dict({"text": MANY})
    splits = {"train": rows, "train_sft": rows.select(range(30))}
    hub = mock.Mock(side_effect=lambda *names, **_: datasets.DatasetDict(splits))
    rows.to_parquet("x.parquet")
    rows.to_csv("x.csv")
    for begin in (0, 30):
        write_documents(Path(f"part-{begin}.jsonl"), MANY[begin : begin + 30])
    forms = {
        "folder": by_the_tool(monkeypatch, "x.parquet"),
        "file": jsonl(MANY),
        "pattern": ["-d", "part-*.jsonl"],
        "text": written("x.txt", "<|endoftext|>".join(MANY).encode()),
        "parquet": ["-d", "x.parquet"],
        "csv": ["-d", "x.csv"],
        "name": ["-d", "somebody/some"],
        "split": ["-d", "somebody/some:train_sft"],
    }
    tiny = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokens = sum(len(ids) + 1 for ids in tiny(MANY)["input_ids"])
    tokens_of_half = sum(len(ids) + 1 for ids in tiny(MANY[:30])["input_ids"])
    for form, flags in forms.items():
        with monkeypatch.context() as patch:
            if form in ("name", "split"):
                patch.setattr(datasets, "load_dataset", hub)
            _, output = look(*flags, "-b", 2)
        count = tokens_of_half if form == "split" else tokens
        steps = int(3 * count / 32) // 2
        assert steps > 10
        assert f"about {count:,} tokens, {count / 32:,.0f} samples" in output, (form, output)
        line = f"{steps} of 2 samples of 32 tokens on 1 devices: {steps * 64:,} tokens\n"
        assert line in output, (form, output)


def test_figures_that_chapters_change(look):
    """Chapter 4 may read a part of the documents. Nothing is known of an address."""
    tiny = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokens = round(sum(len(ids) + 1 for ids in tiny(MANY)["input_ids"]) / 2)
    flags = ["-b", 1, "--eval-freq", 0]
    _, output = look(*jsonl(MANY), *flags, "--max-documents", 30, chapter="04")
    assert f"about {tokens:,} tokens, " in output
    _, output = look("-d", "s3://bucket/rows", *flags, chapter="10")
    assert re.search(r"steps +\? of 8 samples of 32 tokens on 8 devices\n", output), output
    assert "0 tokens" not in output
    _, output = look("-d", "s3://bucket/rows", *flags, "--max-steps", 5, chapter="10")
    assert "5 of 8 samples of 32 tokens on 8 devices: 1,280 tokens\n" in output


@pytest.mark.parametrize(
    ("chapter", "flags"),
    [
        ("05", ["--shard-size", 8]),
        ("06", ["--tensor-parallel", 2]),
        ("07", ["--pipeline-parallel", 2]),
        ("11", ["--context-parallel", 2]),
    ],
)
def test_groups_are_of_all_devices(look, chapter, flags):
    """Although the tool itself has one process."""
    model_flags = ["-m", TINY_LLAMA, "--from-scratch", *jsonl(MANY)]
    status, output = look(*model_flags, "-s", 32, *flags, chapter=chapter)
    assert status == 0, output
    status, output = look(*model_flags, "-s", 33, *flags, chapter=chapter)
    assert (status == 1) == (chapter in ("06", "11")), output


def test_devices_of_nodes(tool, monkeypatch, tmp_path):
    """Two nodes of 8 devices: one count for the steps and for the memory."""
    args = parsed("03", "-m", TINY_LLAMA, "-s", 32)
    run = mock.Mock(return_value=mock.Mock(stdout="table"))
    monkeypatch.setattr(tool.subprocess, "run", run)
    for world, local, devices in ((2, 1, 16), (16, 8, 16), (1, 1, 8), (8, 8, 8)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        report = tool.Report()
        report.tokens = 10**6
        tool.check_length_of_run(args, 10**9, report)
        assert f"on {devices} devices" in report.facts["steps"]
        tool.check_memory(args, report)
        command = run.call_args.args[0]
        assert command[command.index("--devices") + 1] == str(devices)


def test_targets_that_no_layer_has(look, pretrained, monkeypatch):
    flags = rows_by_the_tool(monkeypatch)
    targets = ["--no-from-scratch", "-m", pretrained, "--lora-targets", "q_proj,v_proj"]
    status, output = look(*flags, *targets, chapter="17")
    assert (status, "q_proj,v_proj not found" in output) == (1, True), output


def four_bits(tool, family: str):
    """What the tool says of a model of two layers, and the number of warnings."""
    chapter = load(CHAPTERS_BY_NUMBER["22"])
    args = SimpleNamespace(lora_rank=8, lora_alpha=8, lora_targets="all-linear", seed=0, dtype=None)
    args.model_name = "a model"
    sizes = {"hidden_size": 64, "intermediate_size": 66, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model(family, **sizes, num_attention_heads=4, num_key_value_heads=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    chapter.add_adapters(model, args)
    report = tool.Report()
    tool.check_four_bits(model, args, chapter, report)
    return report.facts["not in 4 bits"], report.warnings


def test_what_stays_in_16_bits(tool):
    """Rows of 66 numbers, and embeddings."""
    said, warnings = four_bits(tool, "llama")
    whole = 2 * (4 * 64 * 64 + 3 * 64 * 66) + 2 * 64 * 64
    share = 2 * 64 * 66 + 2 * 64 * 64
    assert f"{share / whole:.0%} of the weights stay in bf16" in said
    assert "model.layers.mlp.down_proj" in said
    assert "gate_proj" not in said
    assert warnings == 0


def test_most_of_a_mixture_stays_in_16_bits(tool):
    said, warnings = four_bits(tool, "mixtral")
    assert "experts" in said
    assert warnings == 1


# By hand: what weight decay takes, since it has two dimensions, and what is no matrix
TIME_MIX = [f"attention.time_mix_{name}" for name in ("key", "receptance", "value")]
TIME_MIX += [f"feed_forward.time_mix_{name}" for name in ("key", "receptance")]
NO_MATRICES = {
    "gpt_oss": [f"model.layers.*.mlp.experts.{name}_proj_bias" for name in ("down", "gate_up")],
    "mamba": ["backbone.layers.*.mixer.A_log"],
    "rwkv": [f"rwkv.blocks.*.{name}" for name in TIME_MIX],
    "ernie4_5_moe": [],  # its correction bias is frozen
}


@pytest.mark.parametrize("family", sorted({name.split()[0] for name in MODELS} | {*NO_MATRICES}))
def test_weight_decay_of_what_is_no_matrix(tool, family):
    config = AutoConfig.for_model(family, **MODELS.get(family, {"num_hidden_layers": 2}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sorted({*tool.other_tensors(model)}) == NO_MATRICES.get(family, [])


def test_held_out_documents_of_the_training(tool, capsys):
    splits = {"train": MANY, "validation": MANY[:5], "test": []}
    splits = {name: datasets.Dataset.from_dict({"text": x}) for name, x in splits.items()}
    features = datasets.Features(text=datasets.Value("string"))
    splits["test"] = datasets.Dataset.from_dict({"text": []}, features=features)
    args = type("Args", (), {"text_column": "text"})
    tool.check_documents(splits, args, tool.Report())
    output = capsys.readouterr().out
    assert "5 held-out documents are trained on" in output
    assert "held-out split is empty" in output


@pytest.mark.rest
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_demos_are_clean(look, tmp_path, chapter):
    """The text is the same in all chapters but the last, so most look at little of it."""
    little = [] if chapter in ("01", "16") else ["-d", REPOSITORY / "tools" / "*.py"]
    status, output = look("--demo", *little, "--save-dir", tmp_path, chapter=chapter)
    assert (status, output.splitlines()[-1]) == (0, "0 errors, 0 warnings"), output
    if chapter == "01":
        assert " 400 of 8 samples of 256 tokens on 1 devices: 819,200 tokens\n" in output


def test_length_of_a_run(tool, tmp_path, capsys):
    """Of a billion parameters: first with an estimate of its speed, then with its log."""
    flags = ["-m", TINY_LLAMA, "-e", "run", "--save-dir", tmp_path, "--max-steps", 100_000]
    args = parsed("03", *flags)
    report = tool.Report()
    assert tool.check_length_of_run(args, 10**9, report) == pytest.approx(40)
    log = tmp_path / "run" / "metrics.jsonl"
    log.parent.mkdir()
    log.write_text('{"tokens_per_second": 65536}\n{"eval/loss": 1}\n')
    report.tokens = 1_024_000
    tool.check_length_of_run(args, 10**9, report)
    output = capsys.readouterr().out
    assert " about 1,024,000 tokens, 1,000 samples; the run reads 2.94 epochs\n" in output
    assert " 46 of 64 samples of 1,024 tokens on 8 devices: 3,014,656 tokens\n" in output
    assert " 100,000 of 64 samples of 1,024 tokens on 8 devices: 6,553,600,000 tokens\n" in output
    assert " 2 of 12.0 GB are kept; at most 40.0 GB are on the disk\n" in output
    assert " 3.4 h at 533,054 tokens/s, estimated" in output
    assert f" 0.0 h at 65,536 tokens/s, as measured in {log}\n" in output


CLEAN = {
    "llama": LLAMA,
    "qwen3": {"model_type": "qwen3"},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}


@pytest.mark.rest
@pytest.mark.parametrize("family", CLEAN)
def test_families_are_clean(look, family):
    config = LLAMA | {"num_key_value_heads": 2}
    path = save_weights(write_model(Path("m").absolute(), **config | CLEAN[family]))
    flags = ["-m", path, "--no-from-scratch", *jsonl(MANY), "-e", "run", "--save-dir", "."]
    status, output = look(*flags, chapter="03")
    assert (status, output.splitlines()[-1]) == (0, "0 errors, 0 warnings"), output


@pytest.mark.rest
def test_nodes_are_compared(tmp_path):
    """By torchrun; rank 1 has another clock and no shared folder."""
    flags = ["-m", TINY_LLAMA, "--from-scratch", "-s", 32, "--save-dir", "runs"]
    (tmp_path / "data.txt").write_text("text " * 99)
    flags += ["-d", tmp_path / "data.txt"]
    alike = Job(TOOL, ["02", *flags], tmp_path / "alike", 2, cwd=tmp_path)
    assert alike.wait() == 0, alike.output
    other = patches("other_node")
    job = Job(TOOL, ["02", *flags], tmp_path / "output", 2, before=other, cwd=tmp_path)
    assert job.wait() == 1
    assert "not all nodes see" in job.ranks[0].output
    assert "error: nodes differ in seed: " in job.ranks[0].output
    assert "the clocks of the nodes differ by 1" in job.ranks[0].output
