"""Chapter 22 trains what chapter 17 trains on a base whose weights were rounded to 4 bits."""

import gc
import json
import re
import shutil
import sys

import pytest
import torch
import torch.distributed as dist
from helpers.assertions import assert_same_model, exact, worst
from helpers.models import BIASES, MIXED, TIED, UNTIED, kept_bytes, save_uneven_weights, write_model
from helpers.models import SIZE as SMALL
from helpers.plain_loops import BATCH, flags_for
from helpers.runner import (
    CHAPTER_17,
    CHAPTER_22,
    REPOSITORY,
    SCRIPTS,
    Job,
    free_port,
    load,
    patches,
)
from helpers.trainings import AGAIN, OFFLOAD, WHOLE, Case, described, run_cases
from safetensors.torch import load_file
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

# All rows have whole blocks of 64, but for "odd": there, those of down_proj have 160 numbers.
SHAPE = SMALL | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
GPT2 |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0) | {"bos_token_id": 0}
MODELS = {
    "llama": SHAPE | BIASES | TIED,
    "llama untied": SHAPE | UNTIED,
    "llama of 1": SHAPE | UNTIED | {"num_hidden_layers": 1},  # compiles in half the time
    "llama odd": SHAPE | UNTIED | {"intermediate_size": 160},
    "qwen3": SHAPE | UNTIED | {"attention_bias": True},
    "gemma3_text": SHAPE | {"layer_types": MIXED["layer_types"][:2], "sliding_window": 8},
    "mistral": SHAPE | UNTIED | {"sliding_window": 32},
    "gpt2": GPT2,
    "phi3": SHAPE | UNTIED | {"sliding_window": None},
    "mixtral": SHAPE | TIED | {"num_local_experts": 4},
    "qwen3_moe": SHAPE | UNTIED | EXPERTS,
}
# By the job, whose name begins with the number of ranks: the model, the samples of a rank at a
# time, and other flags
CASES = {
    "1": [("llama", 12, []), ("mixtral", 12, []), ("qwen3_moe", 6, [AGAIN])],
    "2, settings": [
        ("llama", 3, []),
        ("llama", 6, [AGAIN]),
        ("llama untied", 6, [OFFLOAD]),
        ("llama untied", 2, [WHOLE]),
        ("llama untied", 6, [AGAIN, "--dtype", "bf16"]),
    ],
    "2, families": [
        ("qwen3", 6, []),
        ("gemma3_text", 6, []),
        ("mistral", 6, []),
        ("gpt2", 6, [AGAIN]),
        ("phi3", 6, []),
    ],
    "2, compiled": [("llama of 1", 6, ["--compile"])],
    "3": [("llama", 4, []), ("gpt2", 2, []), ("llama odd", 4, [OFFLOAD])],
    "4": [("llama", 3, [AGAIN]), ("llama untied", 3, [WHOLE]), ("gemma3_text", 1, [])],
}
# The table as QLoRA's authors published it, and chapter 22 must have the same numbers in fp32
NUMBERS = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
NUMBERS += [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
NUMBERS += [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
NUMBERS += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]


@pytest.fixture(scope="module")
def qlora():
    return load(CHAPTER_22)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Each number becomes the nearest of the table, times the largest number of its block."""
    blocks = weight.double().reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NUMBERS, dtype=torch.float64)
    nearest = (blocks[..., None] / scales[..., None] - table).abs().argmin(-1)
    products = torch.tensor(NUMBERS)[nearest] * scales.float()  # in fp32, as the chapter does
    return products.to(weight.dtype).reshape(weight.shape)


def linear_layers(model) -> dict:
    """Those whose weights are in 4 bits: in decoder layers, with rows of whole blocks."""
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
    in_layers = {n: m for n, m in modules.items() if re.search(r"\.\d+\.", n)}
    return {n: m for n, m in in_layers.items() if m.weight.shape[-1] % 64 == 0}


def write_bases(base, name: str, dtype=torch.float32) -> None:
    """A model, and beside it the same model with rounded weights."""
    for folder in (base, base.with_name(f"{base.name} rounded")):
        write_model(folder, model_type=name.split(" ")[0], **MODELS[name])
        save_uneven_weights(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        if folder != base:
            layers = linear_layers(model)
            assert layers
            for module in layers.values():
                module.weight.data = rounded(module.weight.data)
        model.save_pretrained(folder)


def pair_of_cases(folder, data, ranks, model, batch, more) -> list[dict]:
    """A run of chapter 22, and one of chapter 17 on the rounded base."""
    kind = f"{model} in bf16" if "bf16" in more else model
    if not (folder / kind).exists():
        write_bases(folder / kind, model, torch.bfloat16 if "bf16" in more else torch.float32)
    cases = []
    for number, base in (("22", kind), ("17", f"{kind} rounded")):
        flags = [*flags_for(folder / base, data), "-b", batch, "--lr", 1e-3, *more]
        flags += ["--gradient-accumulation-steps", BATCH // ranks // batch]
        if number == "17" and "--compile" in flags:
            flags.remove("--compile")
        name = f"{number} {kind} {batch} {' '.join(map(str, more))}"
        cases.append(described(folder, name, number, flags))
    return cases


def adapters(case: Case) -> dict:
    return load_file(case.folder / "final" / "adapter_model.safetensors")


def assert_equal(expected: Case, found: Case, near: float, gradients: float) -> None:
    name = found.folder.name
    for column in ("loss", "grad_norm", "eval/loss"):
        assert found.column(column) == pytest.approx(expected.column(column), rel=near, abs=0), name
        assert len(found.column(column)) == 2, name
    for step in (1, 2):
        error, parameter = worst(expected.gradients(step), found.gradients(step))
        print(f"{name}: step {step}, {error:.1e} ({parameter})")
        assert error <= gradients, (name, step, parameter, error)
    if not near:
        assert all(torch.equal(x, adapters(found)[n]) for n, x in adapters(expected).items())


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory, rows_of_conversations):
    """Chapter 17 on rounded bases, on one rank."""
    folder = tmp_path_factory.mktemp("one-rank")
    names = dict.fromkeys(model for job in ("3", "4") for model, *_ in CASES[job])
    rows = rows_of_conversations()
    cases = [pair_of_cases(folder, rows, 1, name, BATCH, [])[1] for name in names]
    run_cases(folder, "job", cases, 1)
    return {name: Case(folder / case["name"]) for name, case in zip(names, cases, strict=True)}


@pytest.mark.rest
@pytest.mark.parametrize("job", CASES)
def test_equal_to_chapter_17(tmp_path, request, rows_of_conversations, job):
    """To the last bit on as many ranks, if not compiled; else but for the order of sums."""
    ranks = int(job[0])
    rows = rows_of_conversations()
    pairs = [(pair_of_cases(tmp_path, rows, ranks, *case), case) for case in CASES[job]]
    if ranks > 2:  # compared with one rank
        alone, kept = request.getfixturevalue("on_one_rank"), 1
    else:
        kept = 2
    done = run_cases(tmp_path, "job", [case for pair, _ in pairs for case in pair[:kept]], ranks)
    for (found, expected), (model, _, more) in pairs:
        expected = alone[model] if ranks > 2 else Case(tmp_path / expected["name"])
        exact = ranks < 3 and "--compile" not in more
        tolerances = (0, 0) if exact else (1e-6, 1e-4)
        assert_equal(expected, Case(tmp_path / found["name"]), *tolerances)
    lines = re.findall(r"^.*Not in 4 bits: .*$", done.ranks[0].output, re.MULTILINE)
    if job == "3":  # rows without whole blocks are named
        assert ["mlp.down_proj" in line for line in lines] == [False, False, True]
    if job == "1":  # experts are named, and most of a mixture
        assert [line.startswith("warning: Not in 4 bits: 9") for line in lines] == [
            False,
            True,
            True,
        ]
        assert re.search(r"experts\S*gate_up_proj", lines[1])
        assert "GB in fp32" in lines[1]


def assert_bytes(output: str, weights: int, adapters: int, others: int) -> None:
    """What a layer of `weights` sends in bf16. `others` are its norms."""
    runs = [json.loads(line) for line in re.findall(r"^bytes (.*)$", output, re.MULTILINE)][:2]
    gathered, of_17 = ({int(n): x for n, x in r["all_gather_single"].items()} for r in runs)
    codes = weights / 2 + 2 * weights / 64
    rest = 2 * adapters + 2 * others
    times = gathered.pop(codes + rest)
    assert of_17.pop(2 * weights + rest) == times
    assert of_17 == gathered  # embeddings, head and the last norm
    # Each of two layers is gathered twice and scattered once in a step. The run has two steps, two
    # evaluations, and a test of the model.
    assert times == 2 * (2 * 2 + 2 + 1)
    for each in runs:
        assert each["reduce_scatter_single"] == {str(4 * adapters): 2 * 2}


def test_one_job(tmp_path, rows_of_conversations):
    """On two ranks: bits and bytes, losses of chapter 17, a resume, and files of another type."""
    more = ["--dtype", "bf16"]
    rows = rows_of_conversations()
    original, of_17 = pair_of_cases(tmp_path, rows, 2, "llama untied", 6, more)
    original["facts"] = True
    base, checkpoint = tmp_path / "llama untied in bf16", "step-00000001"
    model = AutoModelForCausalLM.from_pretrained(base)
    shutil.copytree(base, tmp_path / "in fp32")
    model.float().save_pretrained(tmp_path / "in fp32")

    def changed(name, *flags):
        case = {
            "name": name,
            "folder": str(tmp_path / name),
            "env": {"MASTER_PORT": str(free_port())},
        }
        return original | case | {"facts": False, "flags": [*original["flags"], "-e", name, *flags]}

    resumed = changed("resumed")
    resumed["continues"] = [
        f"{original['folder']}/{checkpoint}",
        f"{resumed['folder']}/{checkpoint}",
    ]
    other = changed("other", "-m", f"{tmp_path}/in fp32", "--max-steps", "1")
    (tmp_path / "other").mkdir()
    cases = [original, of_17, resumed, other]
    job = run_cases(tmp_path, "job", cases, 2, before=patches("bytes_of_collectives"))
    found, expected, again, other = (Case(tmp_path / case["name"]) for case in cases)
    assert_equal(expected, found, 0, 0)
    # A begins with other numbers, as PEFT rounds it to the type of the files. But B is still 0.
    assert other.column("loss") == found.column("loss")[:1]

    # A resume repeats the run. Its first step is the second one.
    assert exact(again.records) == exact(found.records)
    assert_same_model(again, found)
    assert all(torch.equal(g, again.gradients(1)[n]) for n, g in found.gradients(2).items())

    # Each rank stores half of the codes, of the scales, and of all else.
    weights = load_file(base / "model.safetensors")
    linear = {n: x.numel() for n, x in weights.items() if re.search(r"\.\d+\..*_proj\.weight$", n)}
    in_4_bits = sum(linear.values())
    rest = sum(x.numel() for n, x in weights.items() if n not in linear)
    count = sum(x.numel() for x in adapters(found).values())
    for rank in (0, 1):
        facts = torch.load(found.folder / f"facts-{rank}")
        sizes = {name: size for name, (size, _) in facts["local"].items()}
        codes = sum(size for name, size in sizes.items() if name.endswith(".original0"))
        scales = sum(size for name, size in sizes.items() if name.endswith(".original1"))
        assert (codes, scales) == (in_4_bits / 2 / 2, in_4_bits / 64 / 2)
        assert sum(sizes.values()) - codes - scales == (rest + count) / 2
        assert len(facts["trains"]) == len(adapters(found))
    # And it sends them: of two layers, with two norms each.
    assert_bytes(job.ranks[0].output, in_4_bits // 2, count // 2, 2 * SHAPE["hidden_size"])

    parameters, others = (
        json.loads((c.folder / "parameters.json").read_text()) for c in (found, expected)
    )
    assert parameters["parameters_total"] == others["parameters_total"] == in_4_bits + rest + count
    # So chapter 17 does not continue this run, or the reverse.
    assert parameters["base_hash"].endswith(" in 4 bits")
    assert not others["base_hash"].endswith(" in 4 bits")


# -- The numbers -----------------------------------------------------------------------------------


def weights_to_try() -> dict:
    """By name: normal numbers, a block of zeros, and blocks of one sign."""
    torch.manual_seed(0)
    normal = 0.02 * torch.randn(96, 256)
    zeros = normal.clone()
    zeros[:, 64:128] = 0
    return {"normal": normal, "zeros": zeros, "one sign": -normal.abs(), "bf16": normal.bfloat16()}


def test_codes_and_scales(qlora):
    """Nearest numbers, two codes in a byte with the first in the upper half, exact bf16 scales."""
    assert qlora.NF4 == NUMBERS
    four_bits = qlora.FourBits("cpu")
    for name, weight in weights_to_try().items():
        codes, scales = four_bits.right_inverse(weight)
        assert (codes.dtype, scales.dtype) == (torch.uint8, weight.dtype)
        assert codes.shape == (96, 128)
        assert scales.shape == (96, 4)
        largest = weight.double().reshape(96, 4, 64).abs().amax(-1)
        assert torch.equal(scales.double(), largest), name  # also in bf16
        found = four_bits(codes, scales)
        assert found.dtype == weight.dtype
        if name == "zeros":
            assert (found[:, 64:128] == 0).all()
            weight, found = weight[:, :64], found[:, :64]
        assert torch.equal(found, rounded(weight)), name
    block = torch.zeros(1, 64)
    block[0, :3] = torch.tensor([1.0, -1.0, 0.44])
    codes, _ = four_bits.right_inverse(block)
    assert codes[0, :2].tolist() == [15 * 16 + 0, 12 * 16 + 7]


def test_the_table_by_hand_is_the_same(qlora):
    """learn/by-hand/nf4.py computes the numbers from quantiles."""
    text = (REPOSITORY / "learn" / "by-hand" / "nf4.py").read_text()
    names = {"torch": torch}
    exec(text[text.index("def make_table") : text.index("table = make_table")], names)
    table = names["make_table"]()
    assert torch.equal(table, torch.tensor(NUMBERS))
    weight = weights_to_try()["bf16"]
    expected = qlora.FourBits("cpu").right_inverse(weight)
    codes, scales = names["quantize"](weight, table)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scales, expected[1])
    assert torch.equal(names["dequantize"](codes, scales, table), rounded(weight))


def test_bits_are_those_of_bitsandbytes(qlora):
    functional = pytest.importorskip("bitsandbytes.functional")
    four_bits = qlora.FourBits("cpu")
    for name, weight in weights_to_try().items():
        expected, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        codes, scales = four_bits.right_inverse(weight)
        if name != "zeros":  # 0 / 0 may have any code: its scale is 0
            assert torch.equal(codes.flatten(), expected.flatten())
        assert torch.equal(scales.float().flatten(), state.absmax.flatten()), name
        assert torch.equal(torch.tensor(qlora.NF4), state.code)
        found = functional.dequantize_4bit(expected, state)
        assert torch.equal(four_bits(codes, scales), found), name


# -- What is stored and kept -----------------------------------------------------------------------


def flags_of(chapter, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["train-llm.py", *map(str, flags)])
    args = chapter.parse_args()
    args.packed = True  # as load_rows() finds out
    return args


def loaded(chapter, monkeypatch, base, dtype="fp32"):
    """As rank 0 loads it."""
    args = flags_of(chapter, monkeypatch, "-m", base, "--dtype", dtype)
    return chapter.load_model(args, checkpoint=None)


def test_what_is_in_4_bits(qlora, monkeypatch, tmp_path):
    """Files of each type give the codes of the weights in --dtype."""
    for name in ("llama", "gpt2", "llama odd"):
        write_bases(tmp_path / name, name)
    for name, left in (("llama", 0), ("gpt2", 0), ("llama odd", 2)):
        model = loaded(qlora, monkeypatch, tmp_path / name)
        codes = {n: p for n, p in model.named_parameters() if p.dtype == torch.uint8}
        layers = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert len(codes) == len(linear_layers(layers))
        matrices = [
            n for n, p in model.named_parameters() if ".base_layer.weight" in n and p.dim() > 1
        ]
        assert len(matrices) == left
        assert all("down_proj" in n for n in matrices)
        assert not any(p.requires_grad for p in codes.values())
    for stored in (torch.bfloat16, torch.float16, torch.float32):
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=stored)
        plain.save_pretrained(tmp_path / str(stored))
        for kind in ("bf16", "fp32"):
            model = loaded(qlora, monkeypatch, tmp_path / str(stored), kind)
            found = dict(model.named_modules())
            for layer, module in linear_layers(plain).items():
                expected = rounded(module.weight.data.to(qlora.DTYPES[kind]))
                weight = found[f"{layer}.base_layer"].weight
                assert weight.dtype == expected.dtype
                assert torch.equal(weight, expected), (stored, kind, layer)


def test_no_16_bit_weights_are_kept(qlora, monkeypatch, tmp_path):
    """From forward to backward pass, autograd keeps no more than with plain frozen weights."""
    write_bases(tmp_path / "base", "llama untied")
    ids = torch.arange(8)[None]
    plain = loaded(load(CHAPTER_17), monkeypatch, tmp_path / "base")
    model = loaded(qlora, monkeypatch, tmp_path / "base")
    weights = sum(4 * module.weight.numel() for module in linear_layers(plain).values())
    assert weights > 1e5
    assert kept_bytes(model.train(), ids) < kept_bytes(plain.train(), ids) + weights / 10


def tables_of_codes(qlora) -> list:
    """Each model in 4 bits has one."""
    return [x for x in gc.get_objects() if type(x) is qlora.FourBits]


def test_rank_0_frees_its_whole_model(qlora, monkeypatch, tmp_path):
    """Its layers refer to themselves. And files in fp32 give shards in --dtype."""
    write_bases(tmp_path / "base", "llama untied")
    args = flags_of(qlora, monkeypatch, "-m", tmp_path / "base", "--dtype", "bf16")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = tables_of_codes(qlora)
    gc.disable()
    try:
        model = qlora.build_model(args, torch.device("cpu"), checkpoint=None)
        new = [x for x in tables_of_codes(qlora) if x not in before]
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert new == [next(x for x in model.modules() if isinstance(x, qlora.FourBits))]
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {torch.uint8, torch.bfloat16}


@pytest.mark.rest
def test_rank_0_never_has_the_16_bit_model(tmp_path):
    """With files in each type. It has the model in 4 bits, its shards, and a matrix in fp32."""
    script = SCRIPTS / "loading_memory.py"
    job = Job(script, ["--in-4-bits", "--vocabulary", 4000], tmp_path / "memory.txt", 2)
    assert job.wait() == 0, job.output
    lines = [json.loads(x) for x in job.ranks[0].output.splitlines() if x.startswith("{")]
    assert [line["what"] for line in lines] == ["bf16", "fp16", "fp32"]
    for line in lines:
        assert line["gb"][0] < 0.8 * line["16 bits gb"], line


def test_older_torch_is_refused(qlora, monkeypatch):
    """FSDP of torch 2.11 raises: `only Tensors of floating point dtype can require gradients`."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(SystemExit, match=r"^error: .* need torch 2\.12 or newer$"):
        flags_of(qlora, monkeypatch)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.0"))
    flags_of(qlora, monkeypatch)
