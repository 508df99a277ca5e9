"""Chapter 20: products in 8 bits, as torchao and the formula have them; scales; resumes; final/."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    AT_END,
    LLAMA,
    Trainer,
    assert_opens,
    assert_same_model,
    damaged,
    replaced,
    resume,
    save_weights,
    take_over,
    write_model,
)
from runner import CHAPTER_3, CHAPTER_20, REPOSITORY, load, python
from test_fsdp import told
from test_scaling import COUNT
from torchao import float8
from transformers import AutoConfig, AutoModelForCausalLM

FLAGS = ["--max-steps", 6, "--eval-freq", 3, "--ckpt-freq", 3, "--lr", 1e-3]
FLAGS += ["--keep-checkpoints", 9]

# Each rank tells the scales of its weights, and what they must be: 448 / the largest number.
WATCH = """
import torch

models = []

def to_empty(self, **options):
    models.append(original_to_empty(self, **options))
    return self

original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty

def tell():
    weights = [p for p in models[0].parameters() if hasattr(p.to_local(), "_precomputed_scale")]
    shards = [w._local_tensor for w in weights]
    scales = [s._precomputed_scale for s in shards]
    print("\\nscales", *("none" if s is None else f"{s.item():.9g}" for s in scales))
    print("\\nshard", *(f"{(448 / s._tensor.abs().max().double()).float():.9g}" for s in shards))
"""
WATCH += AT_END


def hand_written():
    """The functions of learn/by-hand/float8.py, for one rank."""
    text = (REPOSITORY / "learn" / "by-hand" / "float8.py").read_text()
    dist = SimpleNamespace(all_reduce=lambda *_: None, ReduceOp=SimpleNamespace(MAX=None))
    dist.all_gather_into_tensor = lambda whole, part: whole.copy_(part)
    names = {"torch": torch, "dist": dist, "world_size": 1, "sent": []}
    exec(re.search(r"^E4M3.*", text, re.MULTILINE)[0], names)
    exec(text[text.index("# Yours") : text.index("# Check")], names)
    return names["layer"]


def test_one_layer():
    """Output and gradients: torchao's and those of the formula are equal to the last bit."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 32, bias=False)
    x, output_grad = torch.randn(8, 48, requires_grad=True), torch.randn(8, 32)
    found = hand_written()(linear.weight.detach(), x.detach(), output_grad)
    weight = linear.weight
    rounded = float8.convert_to_float8_training(
        linear, config=float8.Float8LinearConfig(emulate=True)
    )
    output = rounded(x)
    output.backward(output_grad)
    for ours, torchaos in zip(found, (output, x.grad, rounded.weight.grad), strict=True):
        assert torch.equal(ours, torchaos)
    error = (output - x @ weight.T).norm() / (x @ weight.T).norm()
    assert 0.01 < error < 0.06


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory, pretrained, dataset):
    trainer = Trainer(tmp_path_factory.mktemp("float8"), pretrained, dataset)
    trainer.run = run_of(trainer, "run", 2, "-b", 4, before=WATCH)
    return trainer


def run_of(trainer, name, ranks, *flags, script=CHAPTER_20, **options):
    options |= {"script": script, "processes": ranks}
    return trainer("--no-from-scratch", *FLAGS, *flags, name=name, **options)


def assert_near(a, b, tolerance=1e-3) -> None:
    for name in ("loss", "eval/loss"):
        assert b.column(name) == pytest.approx(a.column(name), rel=tolerance), name
    assert len(a.column("loss")) == 6


def test_scales(on_two_ranks):
    """Each weight has one scale on all ranks: that of the whole weight, not that of a shard."""
    run = on_two_ranks.run
    (ours, theirs), shards = told(run, "scales "), told(run, "shard ")
    assert ours == theirs
    assert len(ours) == 2 * 7
    of_shards = [tuple(map(float, pair)) for pair in zip(*shards, strict=True)]
    assert [float(x) for x in ours] == [min(pair) for pair in of_shards]
    assert any(a != b for a, b in of_shards)


def test_a_run_and_its_resume(on_two_ranks):
    """The resume is exact. `final/` opens, and is the fp32 model that the last checkpoint has."""
    trainer, run = on_two_ranks, on_two_ranks.run
    layers = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert f"{layers:,} of {layers + 2048 * 32 + 5 * 32:,} parameters are multiplied" in run.output
    assert "torchao" not in run.output
    assert_opens(run)

    def again(name):
        return run_of(trainer, name, 2, "-b", 4)

    resume(run, trainer, 3, again=again)
    take_over(run, trainer, "on-one-rank", 3)
    on_one = run_of(trainer, "on-one-rank", 1, "-b", 8)
    assert "Continuing from" in on_one.output
    assert_near(run, on_one)
    assert_opens(on_one, reference=run)


@pytest.mark.rest
def test_ranks_and_chapter_3(on_two_ranks):
    """On 1, 2 and 4 ranks, losses differ by the scales of inputs and gradients alone."""
    trainer, run = on_two_ranks, on_two_ranks.run
    for ranks in (1, 4):
        other = run_of(trainer, f"on-{ranks}", ranks, "-b", 8 // ranks)
        assert_near(run, other)
    # Without the line, each gather finds the same scales by itself.
    line = "float8.precompute_float8_dynamic_scale_for_fsdp(model)"
    script = damaged(CHAPTER_20, trainer.folder, {line: "pass"})
    alone = run_of(trainer, "alone", 2, "-b", 4, script=script)
    assert alone.column("loss") == run.column("loss")
    assert_same_model(alone, run)
    in_fp32 = run_of(trainer, "in-fp32", 2, "-b", 4, script=CHAPTER_3)
    assert_near(in_fp32, run, 3e-3)
    assert run.column("loss") != in_fp32.column("loss")


# DTensor's own all-reduce, too
WITH_SCALES = replaced(COUNT, {'"allreduce_": ': '"all_reduce": "all-reduce", "allreduce_": '})


@pytest.mark.rest
def test_bytes(on_two_ranks):
    """A layer is gathered in 8 bits, its norms in bf16, and one all-reduce finds all scales."""
    matrices, norms = 4 * 32 * 32 + 3 * 32 * 64, 2 * 32
    flags = ["-b", 4, "--dtype", "bf16", "--max-steps", 2, "--eval-freq", 0]
    seen = []
    for script in (CHAPTER_3, CHAPTER_20):
        run = run_of(on_two_ranks, "bytes", 2, *flags, script=script, before=WITH_SCALES)
        seen.append(json.loads(re.search("^seen (.*)", run.run.ranks[0].output, re.M)[1]))
        shutil.rmtree(run.folder)
    in_bf16, in_8_bits = (f"all-gather {n * matrices + 2 * norms}" for n in (2, 1))
    assert (in_bf16 in seen[0], in_8_bits in seen[0]) == (True, False)
    assert (in_bf16 in seen[1], in_8_bits in seen[1]) == (False, True)
    assert seen[1][in_8_bits] == seen[0][in_bf16]
    scales = f"all-reduce {2 * 7 * 4}"
    assert seen[1][scales] == seen[0].get(scales, 0) + 1


@pytest.mark.rest
def test_less_memory(on_two_ranks):
    """Accumulation, checkpointing and shards on the CPU change nothing but rounding."""
    trainer, run = on_two_ranks, on_two_ranks.run
    flags = ["-b", 2, "--gradient-accumulation-steps", 2]
    flags += ["--cpu-offload", "--activation-checkpointing"]
    saving = run_of(trainer, "less-memory", 2, *flags)
    assert_near(run, saving)
    assert_opens(saving)


MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
MIXTURE |= {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
MIXTURE |= {"num_key_value_heads": 1}


@pytest.mark.rest
def test_mixture(on_two_ranks, tmp_path):
    """Of a mixture, attention alone multiplies in 8 bits. Embeddings and head are not tied here."""
    trainer = on_two_ranks
    folder = save_weights(write_model(tmp_path / "mixture", **LLAMA | MIXTURE))
    runs = [
        run_of(trainer, f"mixture-{n}", n, "-m", folder, "-b", 8 // n, "--max-steps", 3)
        for n in (1, 2)
    ]
    attention = 2 * (2 * 32 * 32 + 2 * 16 * 32)
    assert f"{attention:,} of " in runs[0].output
    for name in ("loss", "eval/loss"):
        assert runs[1].column(name) == pytest.approx(runs[0].column(name), rel=1e-3)
        assert len(runs[0].column(name)) in (1, 3)
    assert_opens(runs[1])


def test_which_layers(tmp_path, dropout_model, monkeypatch):
    """Not the head, no size that 16 does not divide, no model without such layers, no old GPU."""
    chapter = load(CHAPTER_20)
    config = LLAMA | {"tie_word_embeddings": False, "intermediate_size": 56}
    folder = write_model(tmp_path / "odd", **config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    chapter.use_float8(model, torch.device("cpu"))
    kinds = {name: type(layer).__name__ for name, layer in model.named_modules()}
    in_8_bits = {name.rpartition(".")[2] for name, kind in kinds.items() if kind == "Float8Linear"}
    assert in_8_bits == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert kinds["lm_head"] == "Linear"
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(dropout_model))
    with pytest.raises(SystemExit, match="no layer that can multiply in 8 bits: use chapter 3"):
        chapter.use_float8(gpt2, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(SystemExit, match="this GPU cannot multiply in 8 bits"):
        chapter.use_float8(model, torch.device("cuda"))


@pytest.mark.rest
def test_a_real_start_is_silent():
    """Nothing of torchao reaches the reader: it names kernels that a CPU cannot load."""
    done = python(CHAPTER_20, "--help")
    assert done.stderr == ""
    assert "--cpu-offload" in done.stdout
