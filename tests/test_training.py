"""What a run computes: losses, gradients, accumulation, precision, model families, metrics."""

import json
import math
import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.data import IMPORTABLE
from helpers.models import LLAMA, write_model
from helpers.runner import (
    CHAPTER_1,
    CHAPTERS_BY_NUMBER,
    REPOSITORY,
    Job,
    Run,
    load,
    outcome,
    patches,
    run_tool,
)
from helpers.trainer import resume
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler

METRICS = {
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "memory/resident_gb",
    *(f"time/{phase}_ms" for phase in ("data", "forward", "backward", "update", "total")),
}
EVAL_METRICS = {"step", "epoch", "eval/loss", "eval/perplexity"}


def test_a_run_from_start_to_end(trainer, model):
    flags = ["-b", 8, "--eval-freq", 25, "--ckpt-freq", 20]
    result = trainer("--max-steps", 60, *flags, before=patches("slow_clock"))
    losses = result.column("loss")
    assert math.isclose(losses[0], math.log(2048), rel_tol=0.02)  # random: all tokens alike
    assert sum(losses[-5:]) / 5 < losses[0] - 2
    assert all(time > 0 for time in result.column("time/forward_ms"))
    # Steps after an evaluation or a checkpoint do not count its time.
    assert max(result.column("time/total_ms")) < 500_000

    # The interface: names of the metrics, when each record is written, files
    steps = [r for r in result.records if "loss" in r]
    evals = [r for r in result.records if "loss" not in r]
    assert [r["step"] for r in steps] == list(range(1, 61))
    assert [r["step"] for r in evals] == [25, 50, 60]
    assert all(set(r) == METRICS for r in steps)
    assert all(set(r) == EVAL_METRICS for r in evals)
    assert all(math.isclose(r["eval/perplexity"], math.exp(r["eval/loss"])) for r in evals)
    assert evals[-1]["eval/loss"] < evals[0]["eval/loss"]
    state = json.loads((result.folder / "step-00000060" / "state.json").read_text())
    assert (state["step"], state["samples"]) == (60, 480)
    parameters = json.loads((result.folder / "step-00000060" / "parameters.json").read_text())
    assert math.isclose(state["epoch"], 480 / parameters["dataset_samples"])
    assert result.checkpoints == ["step-00000040", "step-00000060"]  # --keep-checkpoints 2

    # The model of the end: fp32, no matter which tool loads it, the tokenizer beside it
    final = AutoModelForCausalLM.from_pretrained(result.folder / "final")
    assert {p.dtype for p in final.parameters()} == {torch.float32}
    modes = {path.stat().st_mode for path in (result.folder / "final").iterdir()}
    assert len(modes) == 1, "who may read config.json may read the weights"
    tokenizer = AutoTokenizer.from_pretrained(result.folder / "final")
    assert (
        tokenizer("def x")["input_ids"] == AutoTokenizer.from_pretrained(model)("def x").input_ids
    )
    checkpoint = AutoModelForCausalLM.from_pretrained(result.folder / "step-00000060")
    for a, b in zip(final.parameters(), checkpoint.parameters(), strict=True):
        assert torch.equal(a, b)

    # The same command again: nothing left to do, nothing lost
    before = result.records
    again = trainer("--max-steps", 60, *flags)
    assert "Already complete: choose another -e, or delete" in again.output
    assert again.records == before
    # More steps: the run goes on from where it stood
    more = trainer("--max-steps", 62, *flags)
    assert re.findall("^note: (.*) was", more.output, re.MULTILINE) == ["max_steps"]
    assert more.records[: len(before)] == before
    assert [r["step"] for r in more.records[len(before) :]] == [61, 62, 62]


def test_a_run_without_a_name(trainer, tmp_path):
    """It warns at its start, since it saves nothing."""
    flags = trainer.defaults("run")[2:]
    status, output = outcome(tmp_path, CHAPTER_1, *flags, "--max-steps", 1)
    assert (status, output.count("warning: without -e")) == (0, 1), output
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


# -- Losses and updates ----------------------------------------------------------------------------


def test_accumulation_is_the_larger_batch(trainer):
    whole = trainer("--max-steps", 8, "-b", 8, name="whole")
    split = ["-b", 2, "--gradient-accumulation-steps", 4]
    parts = trainer("--max-steps", 8, *split, name="parts")
    assert parts.column("loss") == pytest.approx(whole.column("loss"), rel=1e-5)
    assert parts.column("grad_norm") == pytest.approx(whole.column("grad_norm"), rel=1e-4)
    assert parts.column("eval/loss") == pytest.approx(whole.column("eval/loss"), rel=1e-5)


@pytest.mark.rest
def test_logged_loss_is_the_mean_since_the_last_log(trainer):
    each = trainer("--max-steps", 9, name="each")
    some = trainer("--max-steps", 9, "--log-freq", 4, name="some")
    losses = each.column("loss")
    means = [sum(losses[:4]) / 4, sum(losses[4:8]) / 4, losses[8]]
    assert some.column("loss") == pytest.approx(means, rel=1e-6)


@pytest.mark.rest
def test_activation_checkpointing_and_bf16(trainer):
    plain = trainer("--max-steps", 4, name="plain")
    recomputed = trainer("--max-steps", 4, "--activation-checkpointing", name="recomputed")
    assert recomputed.column("loss") == pytest.approx(plain.column("loss"), rel=1e-6)
    bf16 = trainer("--max-steps", 4, "--dtype", "bf16", name="bf16")
    assert bf16.column("loss") == pytest.approx(plain.column("loss"), rel=1e-2)
    assert bf16.column("loss") != plain.column("loss")
    weights = torch.load(bf16.folder / "step-00000004" / "training_state.pt", weights_only=True)
    moments = weights["optimizer"]["state"].values()
    assert {m["exp_avg"].dtype for m in moments} == {torch.float32}


def test_only_matrices_decay(chapter_1):
    """Without gradients, only the decay changes weights."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    torch.nn.init.ones_(model[0].bias)
    groups = chapter_1.parameter_groups(model, SimpleNamespace(weight_decay=0.5))
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if name == "0.weight" else 1)
        torch.testing.assert_close(parameter.data, expected)


def test_clipping_decay_and_schedule(trainer):
    flags = ["--max-steps", 8, "--warmup-steps", 4, "--lr-scheduler", "linear", "--lr", 1e-3]
    result = trainer(*flags, "--max-grad-norm", 0)
    rates = [1e-3 * x for x in (0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25)]
    assert result.column("learning_rate") == pytest.approx(rates)
    assert min(result.column("grad_norm")) > 0  # logged, though nothing is clipped
    clipped = trainer(*flags, "--max-grad-norm", 1e-3, name="clipped")
    assert clipped.column("loss")[-1] != result.column("loss")[-1]


@pytest.mark.rest
def test_a_gradient_scaler_changes_nothing(trainer):
    """Gradients are divided by its scale before they are clipped."""
    flags = ["--max-steps", 4, "--eval-freq", 0, "--max-grad-norm", 0.1]
    plain = trainer(*flags, name="plain")
    scaled = trainer(*flags, name="scaled", before=patches("scaler"))
    assert min(plain.column("grad_norm")) > 0.1
    for name in ("loss", "grad_norm"):
        assert scaled.column(name) == pytest.approx(plain.column(name), rel=1e-5)


@pytest.mark.rest
def test_second_beta_of_adam(trainer):
    """The second update differs, and the optimizer has the value."""
    flags = ["--max-steps", 3, "--eval-freq", 0]
    default = trainer(*flags, name="default")
    other = trainer(*flags, "--adam-beta2", 0.5, name="other")
    assert other.column("loss")[:2] == default.column("loss")[:2]
    assert other.column("loss")[2] != default.column("loss")[2]
    for result, beta in ((default, 0.999), (other, 0.5)):
        state = torch.load(result.folder / "step-00000003" / "training_state.pt")
        assert {group["betas"] for group in state["optimizer"]["param_groups"]} == {(0.9, beta)}


# The rates of 12 steps after 2 of warm-up, as parts of --lr
SCHEDULES = {
    "cosine": (2, [1, 0.9045, 0.6545, 0.3455, 0.0955] * 2),
    "constant": (1, [1] * 10),
    "wsd": (1, [1] * 10),
}


def test_rates_are_those_of_transformers():
    """To the last bit, where both have the same curve."""
    chapter = load(CHAPTER_1)
    weight = torch.nn.Parameter(torch.zeros(1))
    for name, warmup in {"cosine": 0, "linear": 3, "constant": 0}.items():
        args = SimpleNamespace(lr=3e-5, warmup_steps=warmup, lr_scheduler=name, lr_cycles=1)
        scheduler = get_scheduler(name, torch.optim.SGD([weight], lr=1.0), warmup, 40)
        expected = [args.lr * scheduler.lr_lambdas[0](step) for step in range(40)]
        assert [chapter.learning_rate(step, 40, args) for step in range(40)] == expected
    wsd = SimpleNamespace(lr=1.0, warmup_steps=10, lr_scheduler="wsd", lr_cycles=1)
    rates = [chapter.learning_rate(step, 110, wsd) for step in range(110)]
    assert rates[:10] == [step / 10 for step in range(10)]
    assert rates[10:101] == [1.0] * 91
    assert rates[101:] == pytest.approx([left / 10 for left in range(9, 0, -1)])
    restarts = SimpleNamespace(lr=1.0, warmup_steps=0, lr_scheduler="cosine", lr_cycles=49)
    assert [chapter.learning_rate(step, 147, restarts) for step in range(0, 147, 3)] == [1.0] * 49


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_with_options(trainer, schedule):
    cycles, rates = SCHEDULES[schedule]
    flags = ["--lr-scheduler", schedule, "--lr-cycles", cycles, "--lr", 1e-3]
    flags += ["--warmup-steps", 2, "--eval-freq", 0, "--max-steps", 12, "--ckpt-freq", 6]
    whole = trainer(*flags, name="whole")
    expected = [1e-3 * rate for rate in [0, 0.5, *rates]]
    assert whole.column("learning_rate") == pytest.approx(expected, abs=1e-7)
    resume(whole, trainer, 6, *flags)


@pytest.mark.rest
def test_compile_changes_nothing_but_speed(trainer):
    """With checkpointing: test_matrix.py"""
    plain = trainer("--max-steps", 4, "--eval-freq", 2, name="plain")
    compiled = trainer("--max-steps", 4, "--eval-freq", 2, "--compile", name="compiled")
    assert compiled.column("loss") == pytest.approx(plain.column("loss"), rel=1e-4)
    a, b = ((r.folder / "final" / "model.safetensors").read_bytes() for r in (plain, compiled))
    assert a[:400] == b[:400]  # the header: the same names
    assert compiled.column("eval/loss") == pytest.approx(plain.column("eval/loss"), rel=1e-4)


# apertus and openai-gpt make some of their parameters themselves
FAMILIES = {
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "apertus": {"num_key_value_heads": 1},
}


@pytest.mark.rest
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_from_scratch_and_reload(trainer, family):
    shape = {k: v for k, v in LLAMA.items() if k not in ("architectures", "tie_word_embeddings")}
    config = FAMILIES[family] if "gpt" in family else shape | FAMILIES[family]
    folder = write_model(trainer.folder / family, **config | {"model_type": family})
    torch.manual_seed(0)
    usual = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    started = trainer("-m", folder, "--max-steps", 1, "--lr", 0, name="started")
    first = AutoModelForCausalLM.from_pretrained(started.folder / "final")
    for (name, a), b in zip(first.named_parameters(), usual.parameters(), strict=True):
        # Other random numbers of the same distribution
        torch.testing.assert_close(a.mean(), b.mean(), rtol=0.1, atol=0.01, msg=name)
        torch.testing.assert_close(a.norm(), b.norm(), rtol=0.2, atol=0.01, msg=name)
    result = trainer("-m", folder, "--max-steps", 25)
    assert result.column("loss")[-1] < result.column("loss")[0] - 0.7
    # Fine-tuning goes on from the loss that the model was left with.
    final = ["-m", result.folder / "final", "--no-from-scratch"]
    tuned = trainer(*final, "--max-steps", 1, name="tuned")
    assert tuned.column("loss")[0] < result.column("loss")[0] - 0.7


# -- Waits for the device --------------------------------------------------------------------------

# From chapter 2 on, `all_reduce` exchanges a stop signal on the CPU, so no rank waits for a GPU.
READS = dict.fromkeys(["02", "03", "05", "06", "07", "08", "11", "13", "14", "18"], 1)
READS |= {"01": 0, "15": 0, "16": 1, "17": 1, "19": 1, "20": 1, "21": 1, "22": 1}
READS |= {"04": 5, "10": 5}  # and the number of labels of all ranks
READS["12"] = 1 + 4 * 2  # and the sizes of each exchange: four layers, two micro-batches
MODELS = REPOSITORY / "models"
CHATS = ["-d", MODELS / "tiny-chat" / "rows", "-b", 2, "-s", 256]
READS_FLAGS = {"07": ["-b", 2], "13": ["--pipeline-parallel", 1, "-b", 2], "14": ["--rank", 4]}
READS_FLAGS["12"] = ["-m", MODELS / "tiny-mixtral", "--gradient-accumulation-steps", 2]
READS_FLAGS |= {"16": CHATS, "17": CHATS, "22": CHATS}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.rest] * (n > "02")) for n in sorted(READS)]
)
def test_no_number_is_read_between_logged_steps(trainer, pretrained, tmp_path, request, number):
    flags = [*trainer.defaults("run"), "--max-steps", 5, "--log-freq", 100, "--eval-freq", 0]
    flags += READS_FLAGS.get(number, [])
    if number == "14":
        flags.remove("--from-scratch")
    if number in ("17", "22"):
        flags += ["-m", pretrained, "--no-from-scratch"]
    if number == "10":
        rows = [trainer.dataset, "-o", tmp_path / "rows", "--mds", "-m", pretrained, "-s", 32]
        run_tool(tmp_path, "prepare-data.py", *rows, before=IMPORTABLE)
        flags += ["-d", tmp_path / "rows"]
    if number == "20":
        request.getfixturevalue("torchao")
    output = trainer.folder / "output.txt"
    options = {"before": IMPORTABLE + patches("reads")}
    kind = Run if number == "01" else partial(Job, processes=2)
    run = kind(CHAPTERS_BY_NUMBER[number], flags, output, **options)
    assert run.wait() == 0, run.output
    first = run if number == "01" else run.ranks[0]
    reads = [int(count) for count in re.findall(r"^reads (\d+)", first.output, re.MULTILINE)]
    assert reads[1:] == [READS[number]] * 4


def test_flash_attention_reads_no_number_either(trainer):
    """With one sample, Transformers looks for packed texts in each layer."""
    flags = ["--max-steps", 3, "--eval-freq", 0, "-b", 1, "--log-freq", 100]
    usual = trainer(*flags, name="usual")
    flash = trainer(
        *flags, "--attention", "flash_stand_in", before=patches("flash_stand_in", "reads")
    )
    assert flash.column("loss") == pytest.approx(usual.column("loss"), rel=1e-5)
    reads = [int(count) for count in re.findall(r"^reads (\d+)", flash.output, re.MULTILINE)]
    assert reads == [0, 0, 0]


# -- Attention -------------------------------------------------------------------------------------


def test_attention(trainer):
    flags = ["--max-steps", 2, "--eval-freq", 0]
    eager = trainer(*flags, "--attention", "eager", name="eager")
    assert "Attention eager, fp32" in eager.output
    sdpa = trainer(*flags, "--attention", "sdpa", name="sdpa")
    assert sdpa.column("loss") == pytest.approx(eager.column("loss"), rel=1e-5)
