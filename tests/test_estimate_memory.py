"""tools/estimate-memory.py foretells what the chapters allocate, on CPUs within one percent."""

import json
import re
from contextlib import nullcontext
from functools import wraps

import pytest
import torch
from helpers.models import kept_bytes, save_weights, write_model
from helpers.runner import CHAPTERS_BY_NUMBER, REPOSITORY, SCRIPTS, Job, load, run_tool
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig
from transformers.modeling_layers import GradientCheckpointingLayer

tool = load(REPOSITORY / "tools" / "estimate-memory.py")
WATCHER = SCRIPTS / "memory.py"
TRACED = ["device", "dtype", "compile", "activation_checkpointing", "seq_length", "exchange"]
TRACED += ["tensor_parallel", "context_parallel", "expert_parallel", "rank", "density"]
TRACED += ["lora_rank", "lora_targets", "chunked_loss"]


@pytest.fixture(scope="module", autouse=True)
def shared_traces():
    """Tests that need the same trace share it."""
    original, known = tool.trace, {}

    @wraps(original)
    def trace(config, flags, *others, **options):
        settings = [getattr(flags, name) for name in TRACED]
        key = str((config.to_json_string(), settings, others, options))
        if key not in known:
            known[key] = original(config, flags, *others, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "trace", trace)
        yield


def traces_of(config, options: str):
    return tool.Traces(config, tool.parse_args(options.split()))


def total(traces, method: str, devices: int, batch=None) -> float:
    batch = batch or traces.flags.batch_size
    return tool.peak(tool.step(traces, tool.METHODS[method], devices, batch)[1])


LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 161}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"vocab_size": 2048, "tie_word_embeddings": False}
ACCUMULATE, CHECKPOINT = "--gradient-accumulation-steps 2", "--activation-checkpointing"

# Chapter 6 needs columns that the ranks divide, in the other chapters they do not.
EVEN, TIED = {"intermediate_size": 162}, {"tie_word_embeddings": True}
HALF = f"--dtype bf16 {CHECKPOINT}"
CASES = [
    ("chapter 1", 1, {}, CHECKPOINT),
    ("DDP", 2, {}, ACCUMULATE),
    ("chat", 2, {}, f"{HALF} -s 256"),
    ("FSDP", 2, {}, "-s 1024 --chunked-loss"),
    ("FSDP", 2, TIED, "-s 16 -b 1"),  # at its fullest, shards and a buffer on its way
    ("no reshard", 2, {}, f"--dtype bf16 {ACCUMULATE}"),
    ("HSDP", 2, {}, ACCUMULATE),
    ("tensor parallel", 2, EVEN | TIED, HALF),
    ("pipeline", 2, {}, ""),
    ("pipeline", 2, TIED, HALF),
]
# In chapter 20, layers are the fullest moment, and 16 divides their sizes.
WIDE = {"intermediate_size": 1600, "vocab_size": 512}
# Each token uses all experts, so all ranks get equally many tokens. Rows of 16 bytes: grouped_mm.
MIXTURE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 4}
MIXTURE |= {"intermediate_size": 160}
CASES += [
    ("context parallel", 2, {}, ""),
    ("context parallel", 4, TIED, f"--exchange tokens {HALF}"),
    ("expert parallel", 4, MIXTURE, HALF),
    ("pipeline × tensor", 4, EVEN, ""),
    ("sparse low-rank", 2, {}, HALF),
    ("LoRA", 2, {}, HALF),
    ("LoRA", 2, TIED, ACCUMULATE),
    ("QLoRA", 1, TIED, f"--dtype bf16 {ACCUMULATE}"),
    ("QLoRA", 4, {}, HALF),
    ("Muon", 2, {}, f"{HALF} -s 128"),
    ("8 bits", 1, WIDE, HALF),
    ("8 bits", 2, WIDE | TIED, "--dtype bf16"),
]


@pytest.mark.rest
@pytest.mark.parametrize(("method", "devices", "config", "flags"), CASES)
def test_what_the_chapters_allocate(tmp_path, request, method, devices, config, flags):
    """States exactly, with rows that 2 ranks do not divide; and the total of the fullest rank."""
    if method == "8 bits":
        request.getfixturevalue("torchao")
    folder = write_model(tmp_path / "model", bos_token_id=0, eos_token_id=0, **LLAMA | config)
    known = tool.METHODS[method]
    number = 19 if "--chunked-loss" in flags else known.chapter
    chapter = CHAPTERS_BY_NUMBER[f"{number:02}"]
    size = {"HSDP": 1, "sparse low-rank": 8, "LoRA": 8, "QLoRA": 8}.get(method, 2)
    has_size = known.chapter > 3 and method not in ("Muon", "chat", "8 bits")
    group = [part for flag in known.flags for part in (flag, size)] if has_size else []
    options = [*map(str, ["-m", folder, "-b", 2, "-s", 64, *flags.split(), *group])]

    own = {"Muon": ["--muon"], "chat": ["--rows"], "8 bits": ["--float8"]}.get(method, [])
    args = tool.parse_args([*options, *own, "--device", "cpu"])
    traces = tool.Traces(AutoConfig.from_pretrained(folder), args)
    foretold, moments = tool.step(traces, known, devices, args.batch_size)

    text = ["-d", REPOSITORY / "0*" / "*.py"]
    if method in ("chat", "LoRA", "QLoRA"):
        chat = REPOSITORY / "models" / "tiny-chat"
        length = [64, *re.findall(r"-s (\d+)", flags)][-1]
        text = ["-d", tmp_path / "rows"]
        rows = [chat / "stdlib.jsonl", "--as", "messages", "--rows", "-m", folder, "-s", length]
        rows += ["--chat-template", chat / "template.jinja", "-o", tmp_path / "rows"]
        run_tool(tmp_path, "prepare-data.py", *rows)
    options += ["--max-steps", 6, "--eval-freq", 0]
    options += known.flags if method == "no reshard" else []
    if method in ("LoRA", "QLoRA"):
        save_weights(folder)
    elif method != "sparse low-rank":
        options += ["--from-scratch"]
    job = Job(WATCHER, [chapter, *options, *text], tmp_path / "output.txt", devices)
    assert job.wait() == 0, job.output
    ranks = re.findall(r"allocated (\d+) \[(.*?)\]", job.output)
    assert len(ranks) == devices, job.output
    states = [[int(size) for size in sizes.split(", ")] for _, sizes in ranks]
    assert [max(sizes) for sizes in zip(*states, strict=True)] == [*foretold.values()]
    real = max(int(peak) for peak, _ in ranks)
    assert tool.peak(moments) == pytest.approx(real, rel=0.006 if number == 19 else 0.005)


SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES = {
    "llama": LLAMA | {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
}


def family(name: str):
    return AutoConfig.for_model(**({"model_type": name} | SIZE | FAMILIES[name]))


def kept_by_autograd(name: str, flags, compiled: bool = False) -> int:
    """Bytes that a real forward pass on the CPU leaves for the backward pass."""
    model = AutoModelForCausalLM.from_config(family(name), dtype=torch.float32).train()
    if flags.activation_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if compiled:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.compile()
        model.loss_function = torch.compile(model.loss_function)
    ids = torch.zeros(flags.batch_size, flags.seq_length, dtype=torch.int64)
    half = torch.autocast("cpu", torch.bfloat16) if flags.dtype == "bf16" else nullcontext()
    with half:
        return kept_bytes(model, ids)


def kept(name: str, options: str) -> tuple[float, object]:
    """Bytes that a traced forward pass leaves for the backward pass, and the flags."""
    traces = traces_of(family(name), f"-b 2 -s 64 {options}")
    tables = traces(2, autocast=True)
    forward = [rows for (direction, _), rows in tables.items() if direction == "forward"]
    return sum(rows[:, : tool.GRADIENTS].sum() for rows in forward), traces.flags


@pytest.mark.parametrize("options", [f"--dtype fp32 {CHECKPOINT}", "--dtype bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_activations_are_those_that_autograd_keeps(name, options):
    traced, flags = kept(name, f"--device cpu {options}")
    assert traced == pytest.approx(kept_by_autograd(name, flags), rel=0.05)


@pytest.mark.rest
def test_compiled_code_keeps_what_is_foretold():
    """Layers and loss."""
    traced, flags = kept("llama", "--dtype bf16")
    assert flags.compile
    real = kept_by_autograd("llama", flags, compiled=True)
    assert traced == pytest.approx(real, rel=0.05)
    assert kept("llama", "--dtype bf16 --no-compile")[0] > 1.1 * real


@pytest.mark.rest
def test_one_layer_stands_for_all_of_its_kind():
    """And a batch is foretold from two smaller ones."""
    config = family("qwen3_moe")
    config.num_hidden_layers = 7
    # With checkpoints, autocast's copies of all layers are released behind the last layer.
    short = traces_of(config, f"--no-compile -s 64 -b 2 {CHECKPOINT}")
    assert short.examples == [0, 1, 1, 1, 1, 1, 6]
    long = traces_of(config, f"--no-compile -s 64 -b 9 {CHECKPOINT}")
    long.examples = [*range(7)]
    for method in ("chapter 1", "DDP", "FSDP", "no reshard", "offload"):
        expected = pytest.approx(total(long, method, 2), rel=0.002)
        assert total(short, method, 2, batch=9) == expected


def test_rules_of_gpus():
    """Where a GPU would not keep what the CPU keeps, or the other way round."""
    options, names = "--no-compile --dtype fp32 --device", ("gpt2", "llama")
    cpu = {name: kept(name, f"{options} cpu")[0] for name in names}
    gpu = {name: kept(name, f"{options} cuda")[0] for name in names}
    matrix = 4 * 64 * 64 * 2 * 4  # heads × seq-length² × batch × bytes
    # GPT-2 drops out within attention: FlashAttention keeps no matrix for that.
    assert cpu["gpt2"] - gpu["gpt2"] > 3 * matrix
    # Grouped queries in fp32 have no kernel but the one with the whole matrix.
    assert gpu["llama"] - cpu["llama"] > 3 * matrix


@pytest.fixture
def estimate(capsys):
    def run(*flags) -> tuple[int, str]:
        """Exit status and output of the tool, in this process."""
        status = 0
        try:
            tool.main([*map(str, flags)])
        except SystemExit as end:
            status = end.code
        output = "".join(capsys.readouterr())
        return (1, output + status) if isinstance(status, str) else (status, output)

    return run


def test_output(tmp_path, estimate):
    """One table per number of devices; the largest batch fits, and one more does not."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    count = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).num_parameters()
    options = f"-m {path} -s 64 -b 4 --no-compile --gpu-memory 0.015 --devices 1 4"
    status, text = estimate(*options.split(), "--sharded-loading")
    assert status == 0, text
    loading = re.findall(r"^\| (start|end), .* \| +(\S+) \| +(\S+) \|$", text, re.MULTILINE)
    embeddings = 4e-9 * 2048 * 64
    sizes = [1, 1, 2, 0.25, 1, 1.25]  # rows of a tensor, a unit, a unit and the shard of a rank
    for (_, in_3, in_21), size in zip(loading, sizes, strict=True):
        assert (float(in_3), float(in_21)) == (round(4e-9 * count, 4), round(size * embeddings, 4))
    text = re.sub(r"\n\| (CPU memory, GB|start|end).*", "", text)
    assert "--no-compile is faster" not in text
    assert f"{count:,} parameters" in text
    rows = [re.split(r" +\| +", row) for row in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)]
    on_one, on_four = ({name: cells for name, *cells in rows[i : i + 13]} for i in (0, 13))
    assert float(on_one["weights, fp32"][0]) == round(4e-9 * count, 4)
    for table in (on_one, on_four):
        parts = [map(float, table[part]) for part in tool.PARTS]
        sums = [sum(column) for column in zip(*parts, strict=True)]
        assert [*map(float, table["total"])] == pytest.approx(sums, abs=0.0004)
        fits = ["yes" if int(batch) >= 4 else "no" for batch in table["largest batch"]]
        assert table["fits 0.015 GB"] == fits
    traces = traces_of(AutoConfig.from_pretrained(path), options)
    for method, largest in zip(("chapter 1", "DDP", "FSDP"), on_one["largest batch"], strict=False):
        fits = [total(traces, method, 1, int(largest) + more) <= 0.0135e9 for more in (0, 1)]
        assert fits == [True, False], method
    both = "--chunked-loss --context-parallel 2"
    for wrong, said in {both: "does not go with", "--gpu-memory 0": "0 is not above 0"}.items():
        status, text = estimate(*wrong.split())
        assert (status, said in text) == (2, True), text


def test_a_model_with_parts_for_images(tmp_path, estimate):
    """Only the text model inside is counted. Some families have none that is a causal LM."""
    text_config = LLAMA | {"model_type": "gemma3_text", "head_dim": 16}
    for name, config in (
        ("text", text_config),
        ("whole", {"model_type": "gemma3", "text_config": text_config, "vision_config": {}}),
        ("bert", {"model_type": "t5"}),
        ("qwen", {"model_type": "qwen2_5_vl", "text_config": {"vocab_size": 2048}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    flags = ["-s", "64", "-b", "1", "--no-compile", "--devices", "1"]
    tables = []
    for name in ("text", "whole", "whole/config.json"):
        status, text = estimate("-m", str(tmp_path / name), *flags)
        assert status == 0, text
        tables.append(text.partition(":")[2])
    assert len({*tables}) == 1
    for name in ("bert", "qwen"):
        status, text = estimate("-m", str(tmp_path / name), *flags)
        assert status == 1
        assert f"{name} is no plain decoder of text: choose another model" in text


def test_loading_of_a_mixture(tmp_path, estimate):
    """Joined tensors of experts are there twice, as in benchmarks/records/sharded-loading.md."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 32, "vocab_size": 2000}
    MixtralConfig(**sizes).save_pretrained(tmp_path)
    options = f"-m {tmp_path} -s 64 --devices 4 --no-compile --sharded-loading"
    status, text = estimate(*options.split())
    assert status == 0, text
    sizes = re.findall(r"^\| (?:start|end), .* (\S+) \|$", text, re.MULTILINE)
    assert sizes == ["0.0336", "0.1133", "0.1342"]


# -- Figures in the READMEs ------------------------------------------------------------------------

# The record has the tables of chapters 1 to 3.
README_1, RECORD = "01-single-gpu/README.md", "benchmarks/records/memory.md"
COMMAND = r"^(?:\.venv/bin/)?python tools/estimate-memory.py -m (\S+) (.*)$"


@pytest.mark.parametrize("method", ["HSDP", "tensor parallel", "pipeline", "LoRA"])
def test_figures_of_chapters_5_to_7_and_17(method):
    """Of the command in the README, for the chapter and for FSDP."""
    chapter = CHAPTERS_BY_NUMBER[f"{tool.METHODS[method].chapter:02}"]
    readme = chapter.with_name("README.md")
    text = readme.read_text()
    ((name, options),) = re.findall(COMMAND, text, re.MULTILINE)
    traces = traces_of(tool.load_config(name), options)
    (devices,) = traces.flags.devices
    for which in (method, "FSDP"):
        said = f"{total(traces, which, devices) / 1e9:.1f} GB"
        assert re.search(rf"(?<!\d){re.escape(said)}", text), f"{readme}: {which} takes {said}"
