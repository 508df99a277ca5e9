"""What a run computes: losses, gradients, accumulation, precision, model families, metrics."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import LLAMA, assert_one_sentence, take_over, write_model
from runner import (
    CHAPTER_1,
    CHAPTER_2,
    CHAPTER_12,
    CHAPTERS_BY_NUMBER,
    REPOSITORY,
    Job,
    Run,
    load,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

METRICS = {
    "step",
    "epoch",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "tflops_per_device",
    "memory/resident_gb",
    *(f"time/{phase}_ms" for phase in ("data", "forward", "backward", "update", "total")),
}
EVAL_METRICS = {"step", "epoch", "eval/loss", "eval/perplexity"}
FLAGS = """experiment_name comet_project_name comet_workspace model_name from_scratch
dataset_name dataset_subset seq_length batch_size gradient_accumulation_steps num_epochs max_steps
lr lr_scheduler warmup_steps adam_beta2 weight_decay max_grad_norm dtype
activation_checkpointing compile eval_freq log_freq ckpt_freq keep_checkpoints save_dir seed demo
config device"""
FACTS = """global_batch world_size parameters_total parameters_trainable dataset_samples
dataset_tokens device_name device_memory_gb torch_version cuda_version transformers_version"""


def test_a_run_from_start_to_end(trainer, model):
    flags = ["-b", 8, "--eval-freq", 25, "--ckpt-freq", 20]
    result = trainer("--max-steps", 60, *flags, comet=True, env={"COMET_API_KEY": ""})
    losses = result.column("loss")
    assert math.isclose(losses[0], math.log(2048), rel_tol=0.02)  # random: all tokens alike
    assert sum(losses[-5:]) / 5 < losses[0] - 2
    assert all(time > 0 for time in result.column("time/forward_ms"))
    # 2 layers of 4 matrices for attention and 3 for the MLP, norms, and the tied head
    used = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 2048 * 32
    flops = 6 * used + 12 * 2 * 32 * 32
    expected = [speed * flops / 1e12 for speed in result.column("tokens_per_second")]
    assert result.column("tflops_per_device") == pytest.approx(expected)

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
    assert math.isclose(state["epoch"], 480 / state["train_samples"])
    assert result.checkpoints == ["step-00000040", "step-00000060"]  # --keep-checkpoints 2

    # The model of the end: fp32, no matter which tool loads it, the tokenizer beside it
    final = AutoModelForCausalLM.from_pretrained(result.folder / "final")
    assert {p.dtype for p in final.parameters()} == {torch.float32}
    tokenizer = AutoTokenizer.from_pretrained(result.folder / "final")
    assert (
        tokenizer("def x")["input_ids"] == AutoTokenizer.from_pretrained(model)("def x").input_ids
    )
    checkpoint = AutoModelForCausalLM.from_pretrained(result.folder / "step-00000060")
    for a, b in zip(final.parameters(), checkpoint.parameters(), strict=True):
        assert torch.equal(a, b)

    # Comet's archive holds the same records and all parameters
    (archive,) = (result.folder / "comet").glob("*.zip")
    assert f"`comet upload {archive.parent}/*.zip`" in result.output
    messages = zipfile.ZipFile(archive).read("messages.json").decode().splitlines()
    payloads = [json.loads(line)["payload"] for line in messages]
    parameters = {p.get("param", p.get("params", {})).get("paramName") for p in payloads}
    assert parameters >= {*FLAGS.split(), *FACTS.split()}
    logged = {
        (m["metricName"], m["step"]): m["metricValue"] for p in payloads if (m := p.get("metric"))
    }
    for record in result.records:
        for name in set(record) - {"step", "epoch"}:
            assert math.isclose(float(logged[name, record["step"]]), record[name], rel_tol=1e-6)
    assert any("LlamaForCausalLM" in str(p.get("graph")) for p in payloads)

    # The same command again: nothing left to do, nothing lost
    before = result.records
    again = trainer("--max-steps", 60, *flags)
    assert again.records == before
    # More steps: the run goes on from where it stood
    more = trainer("--max-steps", 62, *flags)
    assert more.records[: len(before)] == before
    assert [r["step"] for r in more.records[len(before) :]] == [61, 62, 62]


@pytest.fixture(scope="module")
def chapter_12():
    return load(CHAPTER_12)


# Config, and the parameters that a token uses, counted by hand
SMALL = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 100}
SMALL |= {"num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 10}
LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8  # q, k, v, o and two norms
MLP = 3 * 8 * 10
USED = {
    "llama, tied": ({"tie_word_embeddings": True}, 3 * (LAYER + MLP) + 8 + 100 * 8),
    "llama": ({"tie_word_embeddings": False}, 3 * (LAYER + MLP) + 8 + 100 * 8),
    # positions are looked up; biases; the head is tied
    "gpt2": ({}, 3 * (12 * 8 * 8 + 9 * 8 + 4 * 8) + 2 * 8 + 100 * 8),
}


@pytest.mark.parametrize("case", USED)
def test_operations_per_token(chapter_1, case):
    """Chapter 12 also counts mixtures, and has tests of them."""
    options, used = USED[case]
    family = case.split(",")[0]
    shape = SMALL
    if family == "gpt2":
        shape = {"n_embd": 8, "n_layer": 3, "n_head": 2, "vocab_size": 100}
    config = AutoConfig.for_model(family, **shape, **options)
    assert chapter_1.flops_per_token(config, 16) == 6 * used + 12 * 3 * 8 * 16


MIXTURES = {
    "mixtral": (
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        3 * (LAYER + 5 * 8 + 2 * MLP) + 8 + 100 * 8,
    ),
    "qwen3_moe": (
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
        3 * (LAYER + 2 * 4 + 6 * 8 + 2 * MLP) + 8 + 100 * 8,
    ),
}


@pytest.mark.parametrize("family", MIXTURES)
def test_operations_per_token_of_a_mixture(chapter_1, chapter_12, family):
    options, used = MIXTURES[family]
    config = AutoConfig.for_model(family, **SMALL, **options)
    assert chapter_12.flops_per_token(config, 16) == 6 * used + 12 * 3 * 8 * 16
    assert chapter_1.flops_per_token(config, 16) == 0  # unknown, so the metric is left out


@pytest.mark.rest
@pytest.mark.parametrize("number", ["02", "03", "06", "07", "08"])
def test_operations_per_device(trainer, model, chapter_1, number):
    """Of the whole model and of the whole job, divided by all devices, whatever they share."""
    (script,) = REPOSITORY.glob(f"{number}-*/train-llm.py")
    flags = ["--max-steps", 2, "--eval-freq", 0, "--gradient-accumulation-steps", 2]
    result = trainer(*flags, script=script, processes=2)
    flops = chapter_1.flops_per_token(AutoConfig.from_pretrained(model), 32)
    expected = [speed * flops / 2 / 1e12 for speed in result.column("tokens_per_second")]
    assert result.column("tflops_per_device") == pytest.approx(expected)


def test_accumulation_is_the_larger_batch(trainer):
    flags = ["--max-steps", 30, "--dtype", "fp32"]
    whole = trainer(*flags, "-b", 8, name="whole")
    for size, steps in [(4, 2), (2, 4)]:
        split = ["-b", size, "--gradient-accumulation-steps", steps]
        parts = trainer(*flags, *split, name=f"{size}x{steps}")
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
    plain = trainer("--max-steps", 10, name="plain")
    recomputed = trainer("--max-steps", 10, "--activation-checkpointing", name="recomputed")
    assert recomputed.column("loss") == pytest.approx(plain.column("loss"), rel=1e-6)
    bf16 = trainer("--max-steps", 10, "--dtype", "bf16", name="bf16")
    assert bf16.column("loss") == pytest.approx(plain.column("loss"), rel=1e-2)
    assert bf16.column("loss") != plain.column("loss")
    weights = torch.load(bf16.folder / "step-00000010" / "training_state.pt", weights_only=True)
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


SCALER = """
import torch

class Scaler(torch.amp.GradScaler):
    def __init__(self, device, enabled):
        super().__init__(device, enabled=True)

torch.amp.GradScaler = Scaler
"""


@pytest.mark.rest
def test_a_gradient_scaler_changes_nothing(trainer):
    """Gradients are divided by its scale before they are clipped."""
    flags = ["--max-steps", 4, "--eval-freq", 0, "--max-grad-norm", 0.1]
    plain = trainer(*flags, name="plain")
    scaled = trainer(*flags, name="scaled", before=SCALER)
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


SCHEDULES = ["cosine", "cosine_with_restarts", "linear", "inverse_sqrt", "constant"]
SCHEDULES += ["constant_with_warmup", "warmup_stable_decay"]


@pytest.mark.rest
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_works_to_its_last_step(trainer, schedule):
    """Also where the warm-up takes all steps, and after a resume."""
    flags = ["--lr-scheduler", schedule, "--lr", 1e-3, "--warmup-steps", 2, "--eval-freq", 0]
    whole = trainer(*flags, "--max-steps", 10, "--ckpt-freq", 5, name="whole")
    rates = whole.column("learning_rate")
    assert len(rates) == 10
    assert max(rates) == pytest.approx(1e-3)
    if schedule == "warmup_stable_decay":  # the last fifth
        expected = [0, 0.5, *[1] * 7, 0.5]
        assert rates == pytest.approx([1e-3 * x for x in expected])
    take_over(whole, trainer, "resumed", 5)
    resumed = trainer(*flags, "--max-steps", 10, "--ckpt-freq", 5, name="resumed")
    assert resumed.column("learning_rate") == whole.column("learning_rate")
    all_warmup = ["--lr-scheduler", schedule, "--warmup-steps", 3, "--max-steps", 3]
    trainer(*all_warmup, "--eval-freq", 0, name="warmup")


@pytest.mark.rest
def test_compile_changes_nothing_but_speed(trainer):
    plain = trainer("--max-steps", 4, "--eval-freq", 2, name="plain")
    cases = (["--eval-freq", 0], ["--eval-freq", 2, "--activation-checkpointing"])
    for number, flags in enumerate(cases):  # evaluating compiles again: once
        compiled = trainer("--max-steps", 4, "--compile", *flags, name=f"compiled-{number}")
        assert compiled.column("loss") == pytest.approx(plain.column("loss"), rel=1e-4)
        a, b = ((r.folder / "final" / "model.safetensors").read_bytes() for r in (plain, compiled))
        assert a[:400] == b[:400]  # the header: the same names
    assert compiled.column("eval/loss") == pytest.approx(plain.column("eval/loss"), rel=1e-4)


FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "gpt_neox": {},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "num_key_value_heads": 1, "sliding_window": 16},
}


@pytest.mark.rest
@pytest.mark.parametrize("family", FAMILIES)
def test_model_families_train_from_scratch_and_reload(trainer, family):
    shape = {k: v for k, v in LLAMA.items() if k not in ("architectures", "tie_word_embeddings")}
    config = FAMILIES[family] if family == "gpt2" else shape | FAMILIES[family]
    folder = write_model(trainer.folder / family, **config | {"model_type": family})
    result = trainer("-m", folder, "--max-steps", 25)
    assert result.column("loss")[-1] < result.column("loss")[0] - 1
    # Fine-tuning goes on from the loss that the model was left with.
    tuned = trainer(
        "-m", result.folder / "final", "--max-steps", 1, "--no-from-scratch", name="tuned"
    )
    assert tuned.column("loss")[0] < result.column("loss")[0] - 1


@pytest.mark.rest
@pytest.mark.parametrize("chapter", [CHAPTER_1, CHAPTER_2], ids=lambda path: path.parent.name)
def test_a_head_of_its_own_under_a_tied_config(trainer, model, chapter):
    """Refused where the two matrices differ, and trained as tied where they are equal."""
    folder = trainer.folder / "own-head"
    shutil.copytree(model, folder)
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    weights = {name: x.clone() for name, x in whole.state_dict().items()}
    assert "lm_head.weight" in weights
    flags = ["-m", folder, "--no-from-scratch", "--max-steps", 1]
    options = {"script": chapter, "processes": int(chapter == CHAPTER_2)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tied = trainer(*flags, **options)
    final = load_file(tied.folder / "final" / "model.safetensors")
    assert "lm_head.weight" not in final
    weights["lm_head.weight"][5] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    result = trainer(*flags, **options, name="own", status=1)
    assert_one_sentence(result.output, "set tie_word_embeddings to false in config.json")
    assert_one_sentence(result.output, f"{folder} ties lm_head to the embeddings, but its files")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    untied = trainer(*flags, **options, name="untied")
    assert "lm_head.weight" in load_file(untied.folder / "final" / "model.safetensors")


SPIN = """
import os, runpy, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print("spins", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.rest
def test_threads_do_not_spin(tmp_path):
    """Processes of their own: one that has imported torch keeps the setting it began with."""
    script = tmp_path / "watch.py"
    script.write_text(SPIN)
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    for value, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        command = [sys.executable, script, CHAPTER_1, "--help"]
        done = subprocess.run(command, env=environment | value, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"spins {expected}\n"


# -- Waits for the device --------------------------------------------------------------------------

# Prints how often Python has read a number from a tensor since the last optimizer step.
COUNT_READS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class CountReads(TorchDispatchMode):
    reads = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.reads += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))

def step(self, *args, **options):
    print("\\nreads", counter.reads)
    counter.reads = 0
    return original(self, *args, **options)

original = torch.optim.AdamW.step
torch.optim.AdamW.step = step
counter = CountReads()
counter.__enter__()
"""
# From chapter 2 on, the ranks exchange a stop flag. It is on the CPU, so no rank waits for a GPU.
READS = {"01": 0, "14": 0} | dict.fromkeys(["02", "03", "05", "06", "07", "08", "11", "13"], 1)
READS_FLAGS = {"07": ["-b", 2], "13": ["--pipeline-parallel", 1, "-b", 2]}


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.rest] * (n > "02")) for n in sorted(READS)]
)
def test_no_number_is_read_between_logged_steps(trainer, number):
    flags = [*trainer.defaults("run"), "--max-steps", 5, "--log-freq", 100, "--eval-freq", 0]
    flags += READS_FLAGS.get(number, [])
    if number == "14":
        flags.remove("--from-scratch")
        flags += ["--rank", 4]
    output = trainer.folder / "output.txt"
    options = {"before": COUNT_READS, "env": {"COMET_AUTO_LOG_DISABLE": "true"}}
    processes = 2 if READS[number] else 1
    kind = partial(Job, processes=2) if processes == 2 else Run
    run = kind(CHAPTERS_BY_NUMBER[number], flags, output, **options)
    assert run.wait() == 0, run.output
    first = run.ranks[0] if processes == 2 else run
    reads = [int(count) for count in re.findall(r"^reads (\d+)", first.output, re.MULTILINE)]
    assert reads[1:] == [READS[number]] * 4


# -- Attention -------------------------------------------------------------------------------------


def test_attention(trainer):
    """A named implementation is used, or refused in a sentence."""
    flags = ["--max-steps", 2, "--eval-freq", 0]
    eager = trainer(*flags, "--attention", "eager", name="eager")
    assert "Attention eager, compute precision fp32" in eager.output
    sdpa = trainer(*flags, "--attention", "sdpa", name="sdpa")
    assert sdpa.column("loss") == pytest.approx(eager.column("loss"), rel=1e-5)
    for name in ("flash_attention_2", "quadratic", "paged|sdpa"):  # the last one becomes sdpa
        result = trainer(*flags, "--attention", name, name="refused", status=1)
        assert_one_sentence(result.output, f"--attention {name} does not work for llama")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("supports", "others"), [(True, None), (False, None), (True, ["kernels-community/flash-attn3"])]
)
def test_default_attention_on_a_gpu_with_flash_attention(chapter_1, monkeypatch, supports, others):
    """The default asks the model, which is built on the meta device in place of a GPU."""
    config = AutoConfig.for_model(**LLAMA)
    chosen = []

    def set_attn_implementation(model, name):
        chosen.append(name)
        model.config._attn_implementation_internal = name

    monkeypatch.setattr(chapter_1, "is_flash_attn_2_available", lambda: True)
    model_class = type(AutoModelForCausalLM.from_config(config))
    monkeypatch.setattr(model_class, "_supports_flash_attn", supports)
    monkeypatch.setattr(model_class, "_compatible_flash_implementations", others)
    monkeypatch.setattr(model_class, "set_attn_implementation", set_attn_implementation)
    monkeypatch.setattr(model_class, "to_empty", lambda self, device: self)
    monkeypatch.setattr(model_class, "to", lambda self, device: self)
    monkeypatch.setattr(model_class, "init_weights", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["train-llm.py", "--from-scratch", "--dtype", "bf16"])
    args = chapter_1.parse_args()
    args.compile = False
    model = chapter_1.build_model(args, config, torch.device("cuda"), None)
    expected = "flash_attention_2" if supports and not others else "sdpa"
    assert chosen == [expected] * (expected != "sdpa")
    assert model.config._attn_implementation == expected


def test_what_a_run_without_a_name_says(trainer):
    run = trainer.start("--max-steps", 1, "--eval-freq", 0)
    assert run.wait() == 0
    flags = [*trainer.defaults("x")[2:], "--max-steps", 1, "--eval-freq", 0]
    unnamed = Run(CHAPTER_1, flags, trainer.folder / "unnamed")
    assert unnamed.wait() == 0
    for sentence in ("Without -e, this run saves no model", "Nothing was saved: -e gives"):
        assert sentence in unnamed.output
        assert sentence not in run.output
