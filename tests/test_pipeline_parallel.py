"""Chapter 7 trains what chapter 1 trains, with the layers on different ranks."""

import json
import re
import shutil
import time

import pytest
import torch
from conftest import (
    LLAMA,
    assert_one_sentence,
    assert_same_model,
    damaged,
    exact,
    take_over,
    write_model,
)
from runner import CHAPTER_7, CHAPTER_13
from safetensors.torch import load_file, save_file
from test_fsdp import (
    PEAK,
    assert_same_folder,
    save_weights,
    tensors_of,
    told,
)
from test_tensor_parallel import FAMILIES as TP_FAMILIES
from test_tensor_parallel import SIZE
from test_tensor_parallel import write_weights as write_tp_weights
from test_torchrun import ONE_NODE, Forking

pytestmark = pytest.mark.rest

PP = {"script": CHAPTER_7}


SHAPE = SIZE | {"num_hidden_layers": 8, "pad_token_id": None}
MIXED = ["sliding_attention", "full_attention"] * 4
FAMILIES = {name: TP_FAMILIES[name] for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")}
# Samples of 32 tokens, so the windows matter
FAMILIES["mistral"] = FAMILIES["mistral"] | {"sliding_window": 8}
FAMILIES["qwen2"] = FAMILIES["qwen2"] | {"use_sliding_window": True, "sliding_window": 8}
FAMILIES["qwen2"] = FAMILIES["qwen2"] | {"layer_types": MIXED[::-1]}
FAMILIES["smollm3"] = FAMILIES["smollm3"] | {"no_rope_layers": [1, 0] * 4}
FAMILIES["gemma2"] = {"layer_types": MIXED, "sliding_window": 8, "query_pre_attn_scalar": 10}
FAMILIES["gemma2"] |= SIZE | {"final_logit_softcapping": 1.0, "attn_logit_softcapping": 5.0}
FAMILIES["gemma3_text"] = SIZE | {"layer_types": MIXED, "sliding_window": 8}
FAMILIES = {name: config | SHAPE for name, config in FAMILIES.items()}
FAMILIES["qwen2"]["hidden_size"] = 40


def write_weights(folder, family: str, **config):
    return write_tp_weights(folder, family, FAMILIES, **config)


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SOURCES = {
    "tied, pretrained": (TIED, ["--no-from-scratch"]),
    "untied, pretrained": (UNTIED, ["--no-from-scratch"]),
    "tied, from scratch": (TIED, ["--from-scratch"]),
    "untied, from scratch": (UNTIED, ["--from-scratch"]),
}
CHECKPOINTING, COMPILE = ["--activation-checkpointing"], ["--compile"]


# Each rank tells at its end which modules have weights on it, and how many numbers.
WATCH = """
import torch
import torch.distributed as dist

def step(self, *args, **options):
    held.append(sum(p.to_local().numel() for g in self.param_groups for p in g["params"]))
    return original_step(self, *args, **options)

held = []
original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step

def tell():
    print("\\nheld", held[-1])
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
"""


def test_each_rank_has_its_stage_and_reads_no_more(trainer, tmp_path):
    """And of its stage a half, on two pipelines. Layers 5, 7, 7 and 5, if nothing else is said."""
    shape = LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24}
    shape |= {"num_attention_heads": 4, "tie_word_embeddings": False}
    folder = write_model(tmp_path / "large", **shape)
    save_weights(folder, torch.bfloat16, max_shard_size="10MB")
    sizes = {name: x.numel() for name, x in tensors_of(folder).items()}
    layer = sum(n for name, n in sizes.items() if ".layers.0." in name)
    ends = sizes["model.embed_tokens.weight"]
    flags = ["-m", folder, "-b", 1, "--no-from-scratch", "--max-steps", 1, "--eval-freq", 0]
    result = trainer(*flags, "-s", 8, "--pipeline-parallel", 2, processes=4, before=WATCH, **PP)
    first, last = 12 * layer + ends, 12 * layer + ends + sizes["model.norm.weight"]
    assert told(result, "held ") == [[str(n // 2)] for n in (first, first, last, last)]
    result = trainer(*flags, "-s", 8, name="four", processes=4, before=WATCH, **PP)
    first, last = 5 * layer + ends, 5 * layer + ends + sizes["model.norm.weight"]
    assert told(result, "held ") == [[str(n)] for n in (first, 7 * layer, 7 * layer, last)]
    whole = 4 * sum(sizes.values())
    result = trainer(*flags, processes=4, before=PEAK, name="peak", **PP)
    for (taken,) in told(result, "loading took"):
        print(f"{int(taken) / whole:.2f} of the model")
        assert int(taken) < 0.6 * whole


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    config = {"num_hidden_layers": 4} | TIED
    return write_weights(tmp_path_factory.mktemp("models") / "tied", "llama", **config)


def test_final_is_the_folder_of_chapter_1(trainer, tied, tmp_path):
    """To the last bit: a learning rate of 0 leaves the weights that were read."""
    flags = ["--no-from-scratch", "--max-steps", 1, "--lr", 0, "--eval-freq", 0]
    single = trainer(*flags, "-m", tied, "-b", 4, name="single")
    run = trainer(*flags, "-m", tied, "-b", 1, name="split", processes=4, **PP)
    assert_same_folder(single.folder / "final", run.folder / "final")
    # Files with other names: rank 0 reads them all, and each stage gets its own
    shutil.copytree(tied, tmp_path / "other")
    tensors = load_file(tied / "model.safetensors")
    tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    run = trainer(*flags, "-m", tmp_path / "other", "-b", 2, name="other", processes=2, **PP)
    assert_same_folder(single.folder / "final", run.folder / "final")


def test_compute_precision_and_signals(trainer, tied):
    """In bf16 nearly the same losses. One rank is told to stop, all ranks save and stop."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 3]
    single = trainer(*flags, "-b", 4, "--dtype", "bf16", name="single")
    run = trainer(*flags, "-b", 2, "--dtype", "bf16", name="bf16", processes=2, **PP)
    assert run.column("loss") == pytest.approx(single.column("loss"), rel=2e-3)
    assert run.column("eval/loss") == pytest.approx(single.column("eval/loss"), rel=2e-3)
    job = trainer.start("--max-steps", 200, "--eval-freq", 0, processes=2, **PP)
    job.wait_for("step 5/200")
    job.ranks[1].signal(15)
    assert job.wait() == 128 + 15
    (step,) = re.findall(r"Stopped after step (\d+): the same command", job.output)
    newest = max((trainer.folder / "run").glob("step-*"))
    assert json.loads((newest / "state.json").read_text())["step"] == int(step)


# Prints what the first stage sends to a tied head.
SENT = """
import torch.distributed as dist

def broadcast(tensor, **options):
    if "group_src" in options and dist.get_rank() == 0:
        print("\\nsent", tensor.dtype, tensor.nbytes)
    return original(tensor, **options)

original = dist.broadcast
dist.broadcast = broadcast
"""


@pytest.mark.parametrize(("schedule", "processes"), [("1f1b", 2), ("1f1b", 4), ("zbv", 2)])
def test_a_tied_head_gets_its_weight_in_the_compute_precision(
    trainer, tied, tmp_path, schedule, processes
):
    """Half of the bytes, and to the last bit the losses of an fp32 weight, which FSDP casts."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 3, "-b", 1]
    flags += ["--dtype", "bf16", "--pipeline-parallel", 2, "--schedule", schedule]
    fp32 = damaged(CHAPTER_7, tmp_path, {"weight.to_local().to(self.dtype)": "weight.to_local()"})
    options = {"processes": processes, "before": SENT}
    bf16_run = trainer(*flags, name="bf16", **options, **PP)
    fp32_run = trainer(*flags, name="fp32", **options, script=fp32)
    assert exact(bf16_run.records) == exact(fp32_run.records)
    assert_same_model(bf16_run, fp32_run)
    numbers = tensors_of(tied)["model.embed_tokens.weight"].numel() * 2 // processes
    calls = 3 + 1  # before each step and each evaluation
    for run, dtype, size in ((bf16_run, "bfloat16", 2), (fp32_run, "float32", 4)):
        found = re.findall(r"^sent (.*)", run.output, re.MULTILINE)
        assert found == [f"torch.{dtype} {size * numbers}"] * calls


# -- What would happen -----------------------------------------------------------------------------


# A stage that raises, or that is killed, in its third forward pass
RAISES = 'raise ValueError("a stage has failed")'
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("end", [RAISES, KILLED])
def test_a_stage_that_fails_ends_the_job(trainer, tied, tmp_path, end):
    """Within 30 seconds, with torchrun; the output says why."""
    line = "        batch = {self.input_name: x"
    trap = f"""        global calls
        calls += 1
        if calls > 30 and self.is_last:
            {end}
"""
    damages = {line: trap + line, "SCHEDULES = {": "calls = 0\nSCHEDULES = {"}
    command = [*ONE_NODE, damaged(CHAPTER_7, tmp_path, damages)]
    launch = Forking(trainer, "output", command, "-m", tied, "-b", 1, "--eval-freq", 0)
    launch.wait_for("step 7/")
    begin = time.monotonic()
    assert launch.wait(30) != 0
    print(f"ended after {time.monotonic() - begin:.1f} s")
    # If the other rank notices the closed connection first, torchrun reports its error.
    sentences = ["a stage has failed"] if end == RAISES else ["SIGKILL", "remote worker"]
    assert any(sentence in launch.output for sentence in sentences)


# -- Wrong flags -----------------------------------------------------------------------------------

SMALL = {"model_type": "llama"} | SHAPE | {"num_hidden_layers": 4}
ACCUMULATE = "--gradient-accumulation-steps"
ZBV = ["--schedule", "zbv"]
TOO_FEW = "3 layers are too few for 4 stages: "
# Ranks, flags, the model, and a part of the sentence
REFUSED = {
    "ranks": (3, ["--pipeline-parallel", 2], SMALL, "2 does not divide the 3 ranks"),
    "1f1b": (2, [ACCUMULATE, 1], SMALL, "--schedule 1f1b cannot run 1 micro-batches: "),
    "interleaved": (2, ["--schedule", "interleaved", ACCUMULATE, 5], SMALL, "multiple"),
    "zbv": (2, ["--schedule", "zbv", ACCUMULATE, 3], SMALL, "needs 4 micro-batches"),
    "zbv, compiled": (2, ["--schedule", "zbv", "--compile"], SMALL, "--no-compile"),
    "stages": (
        2,
        ["--stages-per-rank", 2],
        SMALL,
        "1f1b has one stage per rank: choose --schedule",
    ),
    "one stage": (2, [*ZBV, "--stages-per-rank", 1], SMALL, "zbv has several stages per rank"),
    "three stages": (2, [*ZBV, "--stages-per-rank", 3], SMALL, "zbv has two stages per rank"),
    "layers": (2, ["--layers-per-stage", "1,4"], SMALL, "must have 2 numbers with the sum 4, not"),
    "two numbers": (1, ["--layers-per-stage", "2,2"], SMALL, "must have 1 numbers with the sum 4"),
    "few layers": (2, [ACCUMULATE, 4, *ZBV], SMALL | {"num_hidden_layers": 3}, TOO_FEW),
    "a family": (1, [], {"model_type": "gpt2", "n_positions": 64, "eos_token_id": 0}, "gpt2"),
    "granite": (1, [], SMALL | {"model_type": "granite"}, "granite is not among"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(trainer, tmp_path, case):
    processes, flags, config, part = REFUSED[case]
    folder = write_model(tmp_path / "m", **config)
    result = trainer("-m", folder, *flags, "--max-steps", 1, processes=processes, status=1, **PP)
    assert_one_sentence(result.output, part)


def test_a_tensor_that_a_stage_lacks_is_named(trainer, tied, tmp_path):
    """Whichever rank has that stage."""
    source = tmp_path / "damaged"
    shutil.copytree(tied, source)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    tensors.pop(name)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    flags = ["-m", source, "--max-steps", 1, "--no-from-scratch"]
    result = trainer(*flags, status=1, processes=2, **PP)
    assert_one_sentence(result.run.ranks[0].output, name)


# Prints the seed of each step.
SEEDS = """
import torch

def manual_seed(seed):
    print("\\nseed", seed)
    return original(seed)

original = torch.manual_seed
torch.manual_seed = manual_seed
"""


@pytest.mark.parametrize("script", [CHAPTER_7, CHAPTER_13], ids=lambda path: path.parent.name)
def test_dropout(trainer, tmp_path, script):
    """Each rank draws masks of its own in each step, and a resumed run draws them again."""
    dropout = LLAMA | {"attention_dropout": 0.3, "tie_word_embeddings": False}
    flags = ["-m", write_model(tmp_path / "dropout", **dropout), "--max-steps", 4, "--ckpt-freq", 2]
    flags += ["--eval-freq", 0, "--keep-checkpoints", 9]
    flags += ["--pipeline-parallel", 2] * (script == CHAPTER_7)
    flags += ["--pipeline-parallel", 2, "--tensor-parallel", 1] * (script == CHAPTER_13)
    options = {"script": script, "processes": 2}
    run = trainer(*flags, name="run", before=SEEDS, **options)
    seeds = [re.findall(r"^seed (\d+)", rank.output, re.MULTILINE)[1:] for rank in run.run.ranks]
    assert len({*seeds[0], *seeds[1]}) == 8  # of four steps on two ranks
    take_over(run, trainer, "resumed", 2)
    resumed = trainer(*flags, name="resumed", **options)
    assert exact(resumed.records) == exact(run.records)
    plain = write_model(tmp_path / "plain", **dropout | {"attention_dropout": 0.0})
    without = trainer(*flags, "-m", plain, name="without", **options)
    assert without.column("loss")[1:] != run.column("loss")[1:]
