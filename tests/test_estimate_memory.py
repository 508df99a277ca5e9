"""tools/estimate-memory.py foretells what the chapters allocate, on CPUs within one percent."""

import importlib.util
import json
import re
import sys
from contextlib import nullcontext
from functools import wraps
from pathlib import Path

import pytest
import torch
import transformers
from conftest import assert_one_sentence
from runner import REPOSITORY, Job
from test_readme import MODELS
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

TOOL = REPOSITORY / "tools" / "estimate-memory.py"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tool, benchmark = load(TOOL), load(REPOSITORY / "benchmarks" / "memory.py")


@pytest.fixture(scope="module", autouse=True)
def shared_traces():
    """Tests that need the same trace share it."""
    original, known = tool.trace, {}

    @wraps(original)
    def trace(config, flags, batch, autocast, layers=None, ranks=1):
        settings = {name: value for name, value in vars(flags).items() if name in TRACED}
        key = (config.to_json_string(), str(settings), batch, autocast, str(layers), ranks)
        if key not in known:
            known[key] = original(config, flags, batch, autocast, layers, ranks)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "trace", trace)
        yield


TRACED = ["device", "dtype", "compile", "activation_checkpointing", "seq_length"]


def config_file(folder: Path, **config) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def flags_of(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["estimate-memory.py", *map(str, flags)])
    return tool.parse_args()


def total(traces, method: str, devices: int, flags, batch=None) -> float:
    moments = tool.course(traces, tool.METHODS[method], devices, batch or flags.batch_size, flags)
    return max(moment.total for moment in moments)


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 161}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"vocab_size": 2048, "tie_word_embeddings": False}
ACCUMULATE, CHECKPOINT = "--gradient-accumulation-steps 2", "--activation-checkpointing"

# Chapter 6 needs columns that the ranks divide, in the other chapters they do not.
EVEN, TIED = {"intermediate_size": 162}, {"tie_word_embeddings": True}
SMALL, HALF = "-s 64 -b 2", f"-s 64 -b 2 --dtype bf16 {CHECKPOINT}"
CASES = [
    ("chapter 1", 1, {}, f"{SMALL} {CHECKPOINT}"),
    ("DDP", 2, {}, f"{SMALL} {ACCUMULATE}"),
    ("FSDP", 1, {}, "-s 16 -b 1"),  # at its fullest, shards and a buffer on its way
    ("no reshard", 2, {}, f"{SMALL} --dtype bf16 {ACCUMULATE}"),
    ("FSDP", 2, {}, f"{SMALL} --dtype bf16 {CHECKPOINT}"),
    ("HSDP", 2, {}, f"{SMALL} --shard-size 1 {ACCUMULATE}"),
    ("tensor parallel", 2, EVEN, f"{SMALL} --tensor-parallel 2"),
    ("tensor parallel", 2, EVEN | TIED, f"{HALF} --tensor-parallel 2"),
    ("pipeline", 2, {}, f"{SMALL} --pipeline-parallel 2"),
    ("pipeline", 2, TIED, f"{HALF} --pipeline-parallel 2"),
]


@pytest.mark.parametrize(("method", "devices", "config", "options"), CASES)
def test_what_the_chapters_allocate(tmp_path, monkeypatch, method, devices, config, options):
    """States exactly, on 1 and 2 ranks and with rows that these do not divide; and the total."""
    folder = benchmark.model_folder(tmp_path / "model", LLAMA | config)
    options = ["-m", folder, *options.split()]
    text = REPOSITORY / "0*" / "*.py"
    arguments = benchmark.arguments(method, [*options, "-d", text])
    job = Job(Path(benchmark.__file__), arguments, tmp_path / "output.txt", devices)
    flags = flags_of(monkeypatch, *options, "--device", "cpu")
    traces = tool.Traces(tool.describe(tool.load_config(str(folder))), flags)
    expected = tool.states(traces, tool.METHODS[method], devices, flags)
    guess = total(traces, method, devices, flags)
    assert job.wait() == 0, job.output
    peak, states = benchmark.fullest_rank(job.output, devices)
    assert states == [*expected.values()]
    assert guess == pytest.approx(peak, rel=0.005)


FAMILIES = {
    "llama": LLAMA | {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "gpt_neox": {"intermediate_size": 128},
}
FAMILIES["qwen3_moe"] |= {"head_dim": 16}
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}


def family(name: str):
    return transformers.AutoConfig.for_model(**({"model_type": name} | SIZE | FAMILIES[name]))


def kept_by_autograd(config, flags, compiled: bool) -> int:
    """Bytes that a real forward pass on the CPU leaves for the backward pass."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if flags.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if compiled:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile()
        model.loss_function = torch.compile(model.loss_function)
    own = [*model.parameters(), *model.buffers()]
    own = {tensor.untyped_storage()._cdata for tensor in own}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = tensor
        return tensor

    ids = torch.zeros(flags.batch_size, flags.seq_length, dtype=torch.int64)
    own.add(ids.untyped_storage()._cdata)
    half = torch.autocast("cpu", torch.bfloat16) if flags.dtype == "bf16" else nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), half:
        # The result holds the graph; with checkpointing, also what is to be computed again
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def kept_in_the_trace(config, flags) -> float:
    tables = tool.trace(config, flags, flags.batch_size, autocast=True)
    forward = [rows for (direction, _), rows in tables.items() if direction == "forward"]
    return sum(rows[:, : tool.GRADIENTS].sum() for rows in forward)


@pytest.mark.parametrize(("dtype", "checkpointing"), [("fp32", True), ("bf16", False)])
@pytest.mark.parametrize("name", FAMILIES)
def test_activations_are_those_that_autograd_keeps(monkeypatch, name, dtype, checkpointing):
    options = ["--device", "cpu", "--dtype", dtype, "-b", 2, "-s", 64]
    flags = flags_of(monkeypatch, *options, *[CHECKPOINT] * checkpointing)
    real = kept_by_autograd(family(name), flags, compiled=False)
    assert kept_in_the_trace(family(name), flags) == pytest.approx(real, rel=0.05)


def test_compiled_code_keeps_what_is_foretold(monkeypatch):
    """With the loss compiled, as on GPUs."""
    options = ["--dtype", "bf16", "-b", 2, "-s", 64]
    eager = flags_of(monkeypatch, *options, "--no-compile")
    flags = flags_of(monkeypatch, *options)
    assert flags.compile
    real = kept_by_autograd(family("llama"), flags, compiled=True)
    assert kept_in_the_trace(family("llama"), flags) == pytest.approx(real, rel=0.05)
    assert kept_in_the_trace(family("llama"), eager) > 1.1 * real


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2"])
def test_one_layer_stands_for_all_of_its_kind(monkeypatch, name):
    """And a batch is foretold from two smaller ones."""
    config = family(name)
    setattr(config, "n_layer" if name == "gpt2" else "num_hidden_layers", 7)
    flags = flags_of(monkeypatch, "--no-compile", "-s", 64, "-b", 2)
    short = tool.Traces(tool.describe(config), flags)
    assert short.kept == [0, 1, 6]
    others = flags_of(monkeypatch, "--no-compile", "-s", 64, "-b", 9, "--all-layers")
    long = tool.Traces(tool.describe(config), others)
    for method in (method.name for method in tool.methods(2, others)):
        expected = pytest.approx(total(long, method, 2, others), rel=0.002)
        assert total(short, method, 2, flags, batch=9) == expected


def test_rules_of_gpus(monkeypatch):
    """Where a GPU would not keep what the CPU keeps, or the other way round."""

    def kept(name, *options):
        flags = flags_of(monkeypatch, "--no-compile", "-b", 2, "-s", 64, *options)
        return kept_in_the_trace(family(name), flags)

    matrix = 4 * 64 * 64 * 2 * 4  # heads × seq-length² × batch × bytes
    # GPT-2 drops out within attention: FlashAttention keeps no matrix for that.
    assert kept("gpt2", "--dtype", "fp32", "--device", "cpu") - kept("gpt2", "--dtype", "fp32") > (
        3 * matrix
    )
    # Grouped queries in fp32 have no kernel but the one with the whole matrix.
    assert kept("llama", "--dtype", "fp32") - kept(
        "llama", "--dtype", "fp32", "--device", "cpu"
    ) > (3 * matrix)


def estimate(monkeypatch, capsys, *flags):
    """Exit status and output of the tool, in this process."""
    monkeypatch.setattr(sys, "argv", ["estimate-memory.py", *map(str, flags)])
    try:
        tool.main()
    except SystemExit as end:
        if isinstance(end.code, str):  # as Python does it
            print(end.code, file=sys.stderr)
        return (1 if isinstance(end.code, str) else end.code), "".join(capsys.readouterr())
    return 0, "".join(capsys.readouterr())


def test_output(tmp_path, monkeypatch, capsys):
    path = config_file(tmp_path, **LLAMA)
    options = ["-m", path, "-s", 64, "-b", 4, "--no-compile", "--gpu-memory", 0.015]
    status, text = estimate(monkeypatch, capsys, *options, "--devices", 1, 4, "--explain")
    assert status == 0, text
    status, output = estimate(monkeypatch, capsys, *options, "--devices", 1, 4, "--json")
    assert status == 0, output
    result = json.loads(output)
    model = AutoModelForCausalLM.from_config(tool.load_config(str(path)))
    count = model.num_parameters()
    assert result["parameters"] == count
    assert f"{count:,} parameters" in text
    assert len(result["estimates"]) == 10
    for one in result["estimates"]:
        assert sum(one["parts"].values()) == one["total"] == max(one["moments"].values())
        assert one["fits"] == (one["total"] <= 0.9 * 0.015e9) == (one["largest_batch"] >= 4)
    assert {one["fits"] for one in result["estimates"]} == {True, False}
    chapter_1 = result["estimates"][0]
    assert chapter_1["states"]["weights"] == 4 * count
    assert chapter_1["states"]["moments"] == 8 * count + 4 * len([*model.parameters()])
    # The arithmetic leads to the figures in the tables.
    pattern = r"Parameters: 3 × ([\d,]+) in layers \+ ([\d,]+) in the root.* = ([\d,]+), in"
    layer, root, together = (
        int(number.replace(",", "")) for number in re.search(pattern, text).groups()
    )
    assert 3 * layer + root == together == count
    for row in ("weights, fp32", "gradients", "AdamW's moments", "together", "largest batch"):
        assert len(re.findall(rf"^\| {row} .*", text, re.MULTILINE)) == 2  # one table per number
    # The largest batch fits, and one more does not.
    for one in (chapter_1, result["estimates"][2]):  # and FSDP
        fits = []
        for batch in (one["largest_batch"], one["largest_batch"] + 1):
            flags = [*options, "-b", batch, "--devices", 1, "--json"]
            others = json.loads(estimate(monkeypatch, capsys, *flags)[1])["estimates"]
            fits += [other["fits"] for other in others if other["method"] == one["method"]]
        assert fits == [True, False], one["method"]


BAD = [
    (["-m", "nobody/nothing"], "nobody/nothing", 1),
    (["--devices", "0"], "--devices", 2),
    (["--gpu-memory", "0"], "--gpu-memory", 2),
    (["-m", "t5.json"], "t5.json", 1),
    (["-m", "none.json"], "none.json", 1),
    (["-m", "broken.json"], "broken.json", 1),
    (["-m", "llama.json", "-b", "0"], "--batch-size", 2),
    (["-m", "llama.json", "-s", "9999"], "--seq-length 9999", 1),
    (["-m", "llama.json", "--shard-size", "3"], "--shard-size 3", 1),
    (["-m", "llama.json", "--tensor-parallel", "2", "-s", "63"], "63 tokens", 1),
    (["-m", "gpt2.json", "--tensor-parallel", "2"], "gpt2", 1),
    (["-m", "gpt2.json", "--pipeline-parallel", "2"], "gpt2", 1),
    (["-m", "llama.json", "--pipeline-parallel", "64", "--devices", "64"], "64 stages", 1),
]


@pytest.mark.parametrize(("flags", "part", "status"), BAD)
def test_bad_input(tmp_path, monkeypatch, capsys, flags, part, status):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no second attempts
    (tmp_path / "t5.json").write_text('{"model_type": "t5"}')
    (tmp_path / "none.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "gpt2.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "llama.json").write_text('{"model_type": "llama"}')
    flags = [str(tmp_path / flag) if flag.endswith(".json") else flag for flag in flags]
    done, output = estimate(monkeypatch, capsys, *flags)
    assert done == status, output
    assert_one_sentence(output, part)


READMES = [REPOSITORY / name / "README.md" for name in ("01-single-gpu", "02-ddp", "03-fsdp")]
COMMAND = r"^(?:\.venv/bin/)?python tools/estimate-memory.py -m meta-llama/(\S+) (.*)$"


def known_model(folder: Path, name: str) -> Path:
    """The config that the Hub has under this name; of its shape."""
    path = folder / f"{name}.json"
    path.write_text(MODELS[name].to_json_string(use_diff=False))
    return path


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_tables_in_the_readmes(tmp_path, monkeypatch, capsys, readme):
    text = readme.read_text()
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    tables = [table for table in tables if re.match(r"\| (?:GB per device|moment) ", table)]
    ((name, flags),) = re.findall(COMMAND, text, re.MULTILINE)
    path = known_model(tmp_path, name)
    status, output = estimate(monkeypatch, capsys, "-m", path, *flags.split())
    assert status == 0
    assert len(tables) == (2 if readme.parent.name == "03-fsdp" else 1)
    for table in tables:
        assert table in output


def test_what_helps_in_chapter_1(tmp_path, monkeypatch):
    """The rows of its table, and the figure in the text."""
    text = READMES[0].read_text()
    path = known_model(tmp_path, "Llama-3.2-1B")
    rows = {
        "--no-compile": r"at the loss, with ([\d.]+) GB",
        "--no-compile -b 4 --gradient-accumulation-steps 2": r"^\| `-b 4`.*? \| ([\d.]+) \|",
        "--no-compile --activation-checkpointing": r"^\| `--activation-[a-z]+` \| ([\d.]+) \|",
        "--compile": r"^\| `--compile`.*? \| ([\d.]+) \|",
        "--compile --activation-checkpointing": r"^\| `--activation.*? and .*? \| ([\d.]+) \|",
        "--no-compile ": r"^\| shards on 8 devices.*? \| ([\d.]+) \|",
    }
    for options, pattern in rows.items():
        flags = flags_of(monkeypatch, "-m", path, *options.split())
        traces = tool.Traces(tool.describe(tool.load_config(str(path))), flags)
        method, devices = ("FSDP", 8) if "shards" in pattern else ("chapter 1", 1)
        (said,) = re.findall(pattern, text, re.MULTILINE)
        assert said == f"{total(traces, method, devices, flags) / 1e9:.1f}", options


@pytest.mark.parametrize("method", ["HSDP", "tensor parallel", "pipeline"])
def test_figures_of_chapters_5_to_7(tmp_path, monkeypatch, method):
    """Of the command in the README, for the chapter and for FSDP."""
    folder = benchmark.CHAPTERS[method]
    text = (REPOSITORY / folder / "README.md").read_text()
    ((name, options),) = re.findall(COMMAND, text, re.MULTILINE)
    flags = flags_of(monkeypatch, "-m", known_model(tmp_path, name), *options.split())
    traces = tool.Traces(tool.describe(tool.load_config(flags.model_name)), flags)
    (devices,) = flags.devices
    for which in (method, "FSDP"):
        said = f"{total(traces, which, devices, flags) / 1e9:.1f} GB"
        assert re.search(rf"(?<!\d){re.escape(said)}", text), f"{folder}: {which} takes {said}"
