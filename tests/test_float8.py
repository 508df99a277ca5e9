"""Chapter 20: products in 8 bits, as torchao and the formula have them; scales; resumes; files."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.assertions import assert_opens, assert_same_model, exact
from helpers.chapters import damaged
from helpers.models import LLAMA, save_weights, write_model
from helpers.runner import CHAPTER_3, CHAPTER_20, REPOSITORY, load, patches
from helpers.trainer import Folder, Trainer, take_over
from helpers.trainings import described, run_cases
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = [pytest.mark.rest, pytest.mark.usefixtures("torchao")]

FLAGS = ["--no-from-scratch", "--max-steps", 6, "--eval-freq", 3, "--ckpt-freq", 3, "--lr", 1e-3]
SAVING = ["--gradient-accumulation-steps", 2, "--cpu-offload", "--activation-checkpointing"]
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
MIXTURE |= {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
MIXTURE |= {"num_key_value_heads": 1}


def train(trainer, processes, cases, before=""):
    """All cases in the processes of one job, and its output on each rank."""
    runs = [
        described(trainer.folder, name, script, [*trainer.defaults(name), *FLAGS, *flags])
        for name, (script, *flags) in cases.items()
    ]
    job = run_cases(trainer.folder, "-".join(cases), runs, processes, before)
    for output in job.ranks[0].output.split("\ncase ")[1:]:
        name, _, output = output.partition("\n")
        trainer.runs[name] = Folder(trainer.folder / name, output)
    return [rank.output for rank in job.ranks]


@pytest.fixture(scope="module")
def job(torchao, tmp_path_factory, pretrained, dataset):
    trainer = Trainer(tmp_path_factory.mktemp("float8"), pretrained, dataset)
    trainer.runs = {}
    mixture = ["-m", save_weights(write_model(trainer.folder / "model", **LLAMA | MIXTURE))]
    line = "float8.precompute_float8_dynamic_scale_for_fsdp(model)"
    without_line = damaged(CHAPTER_20, trainer.folder, {line: "pass"})
    cases = {"run": [CHAPTER_20, "-b", 4], "in fp32": [CHAPTER_3, "-b", 4]}
    cases |= {"without line": [without_line, "-b", 4], "saving": [CHAPTER_20, "-b", 2, *SAVING]}
    trainer.outputs = train(
        trainer, 2, cases | {"mixture": [CHAPTER_20, "-b", 4, *mixture]}, patches("scales")
    )
    train(trainer, 4, {"4": [CHAPTER_20, "-b", 2]})
    trainer.on_one_rank = {"resumed on 1": [CHAPTER_20, "-b", 8], "1": [CHAPTER_20, "-b", 8]}
    trainer.on_one_rank["mixture of 1"] = [CHAPTER_20, "-b", 8, *mixture]
    return trainer


def near(run, reference, tolerance=1e-3) -> bool:
    pairs = [(run.column(name), reference.column(name)) for name in ("loss", "eval/loss")]
    assert [len(losses) for losses, _ in pairs] == [6, 2]
    return all(losses == pytest.approx(expected, rel=tolerance) for losses, expected in pairs)


def test_scales(job):
    """Each weight has one scale on all ranks: that of the whole weight, not that of a shard."""
    found = [re.search("^scales (.+)\n\nshards (.+)$", text, re.M) for text in job.outputs]
    (ours, theirs), shards = zip(*(each.groups() for each in found), strict=True)
    assert ours == theirs
    of_shards = [*zip(*([float(x) for x in text.split()] for text in shards), strict=True)]
    assert len(of_shards) == 2 * 7
    assert [float(x) for x in ours.split()] == [min(pair) for pair in of_shards]
    assert any(a != b for a, b in of_shards)


def test_losses(job):
    """On 2 and 4 ranks, they differ by the scales of inputs and gradients alone."""
    runs = job.runs
    assert near(runs["4"], runs["run"])
    assert near(runs["saving"], runs["run"])
    assert near(runs["run"], runs["in fp32"], 3e-3)
    assert not near(runs["run"], runs["in fp32"], 1e-6)
    # Without the line, each gather finds the same scales by itself.
    assert runs["without line"].column("loss") == runs["run"].column("loss")
    assert_same_model(runs["without line"], runs["run"])


def test_one_rank(job):
    """It begins, or resumes a run of two. It gathers nothing for `final/`."""
    run, runs = job.runs["run"], job.runs
    take_over(run, job, "resumed on 1", 3)
    train(job, 1, job.on_one_rank)
    assert "Continuing from" in runs["resumed on 1"].output
    assert near(runs["resumed on 1"], run)
    assert near(runs["1"], run)
    assert near(runs["mixture of 1"], runs["mixture"])
    assert_opens(runs["1"])


def test_resumes(job):
    """Exact. Chapter 3 reads the checkpoint, too: its tensors are not torchao's."""
    run, runs = job.runs["run"], job.runs
    for name in ("resumed", "in chapter 3"):
        take_over(run, job, name, 3)
    train(job, 2, {"resumed": [CHAPTER_20, "-b", 4], "in chapter 3": [CHAPTER_3, "-b", 4]})
    assert "Continuing from" in runs["resumed"].output
    assert exact(runs["resumed"].records) == exact(run.records)
    assert_same_model(runs["resumed"], run)
    assert "Continuing from" in runs["in chapter 3"].output
    assert near(runs["in chapter 3"], run, 3e-3)
    files = [*run.folder.glob("step-*/*.distcp")]
    assert len(files) == 2 * 2
    assert not any(b"torchao" in file.read_bytes() for file in files)


def test_final(job):
    """Transformers opens it. The log says what is multiplied in 8 bits, and has no warnings."""
    for name in ("run", "saving", "mixture"):
        assert_opens(job.runs[name])
        assert "torchao" not in job.runs[name].output
    layers, attention = 2 * (4 * 32 * 32 + 3 * 32 * 64), 2 * (2 * 32 * 32 + 2 * 16 * 32)
    whole = f"{layers:,} of {layers + 2048 * 32 + 5 * 32:,} parameters are multiplied in 8 bits"
    assert whole in job.runs["run"].output
    assert f"\n{attention:,} of " in job.runs["mixture"].output


def test_bytes(job):
    """A layer is gathered in 8 bits, its norms in bf16, and one all-reduce finds all scales."""
    # DTensor's own all-reduce, too, and the second step of both runs
    more = "counted = helpers.patches.collectives; counted.PRINTED = (2, 4)\n"
    more += "counted.KINDS['all_reduce'] = 'all-reduce'"
    flags = ["-b", 4, "--dtype", "bf16", "--max-steps", 2, "--eval-freq", 0]
    cases = {"bytes in bf16": [CHAPTER_3, *flags], "bytes in 8 bits": [CHAPTER_20, *flags]}
    output = train(job, 2, cases, patches("collectives") + more)[0]
    in_3, in_20 = (json.loads(text) for text in re.findall("^seen (.*)", output, re.M))
    matrices, norms = 4 * 32 * 32 + 3 * 32 * 64, 2 * 32
    in_bf16, in_8_bits = (f"all-gather {n * matrices + 2 * norms}" for n in (2, 1))
    assert in_3[in_bf16] == in_20[in_8_bits] > 0
    assert in_8_bits not in in_3
    assert in_bf16 not in in_20
    scales = f"all-reduce {2 * 7 * 4}"
    assert in_20[scales] == in_3.get(scales, 0) + 1


def test_one_layer():
    """The output and gradients of torchao and of learn/by-hand/ are equal to the last bit."""
    from torchao import float8

    text = (REPOSITORY / "learn" / "by-hand" / "float8.py").read_text()
    dist = SimpleNamespace(all_reduce=lambda *_: None, ReduceOp=SimpleNamespace(MAX=None))
    dist.all_gather_into_tensor = lambda whole, part: whole.copy_(part)
    names = {"torch": torch, "dist": dist, "world_size": 1, "sent": []}
    exec(text[text.index("E4M3, E5M2 =") : text.index("# Check")], names)
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 32, bias=False)
    x, output_grad = torch.randn(8, 48, requires_grad=True), torch.randn(8, 32)
    found = names["layer"](linear.weight.detach(), x.detach(), output_grad)
    config = float8.Float8LinearConfig(emulate=True)
    rounded = float8.convert_to_float8_training(linear, config=config)
    output = rounded(x)
    output.backward(output_grad)
    for ours, torchaos in zip(found, (output, x.grad, rounded.weight.grad), strict=True):
        assert torch.equal(ours, torchaos)


def test_which_layers(tmp_path, dropout_model, monkeypatch):
    """Not the head, no size that 16 does not divide, no model without such layers, no old GPU."""
    chapter, cpu = load(CHAPTER_20), torch.device("cpu")
    odd = LLAMA | {"tie_word_embeddings": False, "intermediate_size": 56}
    odd = AutoConfig.from_pretrained(write_model(tmp_path / "odd", **odd))
    model = AutoModelForCausalLM.from_config(odd)
    chapter.use_float8(model, cpu)
    modules = model.named_modules()
    names = {name.rpartition(".")[2] for name, m in modules if type(m).__name__ == "Float8Linear"}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(dropout_model))
    with pytest.raises(SystemExit, match="no layer that can multiply in 8 bits: use chapter 3"):
        chapter.use_float8(gpt2, cpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(SystemExit, match="this GPU cannot multiply in 8 bits"):
        chapter.use_float8(model, torch.device("cuda"))
