"""Chapter 7 trains what chapter 1 trains, with the layers on different ranks."""

import json
import os
import re
import shutil
import time

import pytest
import torch
from conftest import (
    LLAMA,
    assert_one_sentence,
    assert_same_losses,
    assert_same_model,
    damaged,
    exact,
    take_over,
    write_model,
)
from filelock import FileLock
from runner import CHAPTER_1, CHAPTER_3, CHAPTER_7, CHAPTER_13, Job, Run, free_port
from safetensors.torch import load_file, save_file
from test_fsdp import (
    OFF,
    PEAK,
    assert_same_folder,
    save_weights,
    tensors_of,
    told,
    whole_state,
)
from test_tensor_parallel import FAMILIES as TP_FAMILIES
from test_tensor_parallel import SIZE, worst
from test_tensor_parallel import write_weights as write_tp_weights
from test_torchrun import ONE_NODE, Forking

pytestmark = pytest.mark.rest

PP = {"script": CHAPTER_7}

# Runs a chapter many times in the same processes, each time with other flags. In some steps each
# rank saves its gradients, before they are clipped.
MANY = """
import functools, json, os, runpy, sys
import torch

inductor = torch.compile
aot_eager = functools.partial(torch.compile, backend="aot_eager")  # in seconds, not in minutes

SAVED = (1, 2, 10)

def watch(name):
    original = getattr(torch.nn.utils, name)

    def call(parameters, *args):
        parameters = list(parameters)
        global step
        step += 1
        if step in SAVED:
            model, = models
            gradients = {n: p.grad for n, p in model.named_parameters()}
            whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
            file = f"{case['folder']}/gradients-{step}-{os.environ.get('RANK', '0')}"
            torch.save({n: g.clone() for n, g in whole.items()}, file)
        return original(parameters, *args)

    setattr(torch.nn.utils, name, call)

watch("clip_grad_norm_")  # chapter 1
watch("clip_grads_with_norm_")  # the pipelines, after the norm of all stages

def train(self, mode=True):
    if hasattr(self, "lm_head") and "forward" not in vars(self):
        models[:] = [self]
    return original_train(self, mode)

original_train = torch.nn.Module.train
torch.nn.Module.train = train
models = []
for case in json.load(open(sys.argv[1])):
    step = 0
    os.environ.update(case["env"])
    sys.argv = [case["script"], *case["flags"]]
    torch.compile = inductor if case.get("inductor") else aot_eager
    print("\\ncase", case["name"], flush=True)
    try:
        runpy.run_path(case["script"], run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
"""

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
BATCH = 16  # samples per step
CHECKPOINTING, COMPILE = ["--activation-checkpointing"], ["--compile"]
# Ranks, those of a pipeline, schedule, source and other flags
CASES = [
    (2, 2, "gpipe", "tied, pretrained", []),
    (2, 2, "1f1b", "untied, from scratch", CHECKPOINTING),
    (2, 2, "interleaved", "tied, from scratch", []),
    (2, 2, "zbv", "tied, pretrained", CHECKPOINTING),
    (2, 2, "1f1b", "tied, pretrained", COMPILE),
    (2, 2, "interleaved", "untied, pretrained", [*COMPILE, *CHECKPOINTING]),
    (2, 2, "1f1b", "tied, pretrained", ["--reshard-after-forward", "--layers-per-stage", "1,3"]),
    (2, 2, "zbv", "untied, pretrained", ["--cpu-offload"]),
    (2, 1, "1f1b", "tied, pretrained", []),
    (4, 4, "gpipe", "untied, from scratch", CHECKPOINTING),
    (4, 4, "1f1b", "tied, pretrained", []),
    (4, 4, "interleaved", "untied, pretrained", []),
    (4, 4, "zbv", "tied, from scratch", []),
    (4, 2, "gpipe", "tied, from scratch", []),
    (4, 2, "1f1b", "untied, pretrained", ["--reshard-after-forward"]),
    (4, 2, "interleaved", "tied, pretrained", CHECKPOINTING),
    (4, 2, "zbv", "tied, pretrained", ["--cpu-offload"]),
]
LOOPED = ("interleaved", "zbv")
FAMILY_CASES = [(2, 2, "1f1b", family, []) for family in FAMILIES]
FAMILY_CASES += [(2, 2, "interleaved", "gemma2", []), (2, 2, "zbv", "qwen2", [])]


def name_of(case) -> str:
    return "-".join(str(part) for part in (*case[:4], *case[4])).replace(", ", "-")


def steps_of(case) -> int:
    """Compiled ones and families take fewer."""
    return 10 if case[3] in SOURCES and "--compile" not in case[4] else 4


def layers_of(case) -> int:
    """Eight stages need eight, and the families have eight."""
    return 8 if case[3] in FAMILIES or (case[1] == 4 and case[2] in LOOPED) else 4


def single_of(case) -> str:
    """The name of the same in chapter 1."""
    return f"{case[3]}, {layers_of(case)} layers, {steps_of(case)} steps"


@pytest.fixture(scope="session")
def runs(tmp_path_factory, dataset):
    """All of CASES, and chapter 1 for each source: their folders by name.

    Workers of pytest-xdist share them: the first one makes them, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pipelines"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            folder.mkdir()
            make_runs(folder, dataset)
            (folder / "complete").touch()
    return folder


def make_runs(folder, dataset):
    script = folder / "many.py"
    script.write_text(MANY)
    flags = ["--save-dir", folder, "-d", dataset, "-s", 32, "--lr", 1e-4, "--log-freq", 1]
    flags += ["--ckpt-freq", 99]
    alone = {single_of(case): case for case in CASES + FAMILY_CASES}
    models = {}
    for source, layers in {(case[3], layers_of(case)) for case in alone.values()}:
        config = SOURCES[source][0] | {"num_hidden_layers": layers} if source in SOURCES else {}
        family, path = "llama" if config else source, folder / f"model-{source}-{layers}"
        models[source, layers] = write_weights(path, family, **config)

    def described(name, chapter, case, more):
        source, steps = case[3], steps_of(case)
        origin = SOURCES[source][1] if source in SOURCES else ["--no-from-scratch"]
        steps = ["--max-steps", steps, "--eval-freq", steps // 2]
        own = ["-e", name, "-m", models[source, layers_of(case)], *origin, *flags, *steps, *more]
        env = {"MASTER_PORT": str(free_port()), "COMET_AUTO_LOG_DISABLE": "true"}
        (folder / name).mkdir()
        case = {"name": name, "script": str(chapter), "env": env, "folder": str(folder / name)}
        return case | {"flags": [str(flag) for flag in own], "inductor": more[-1:] == COMPILE}

    def start(name, cases, processes=0):
        file = folder / f"{name}.json"
        file.write_text(json.dumps(cases))
        output = folder / f"{name}.txt"
        return Job(script, [file], output, processes) if processes else Run(script, [file], output)

    single = [described(name, CHAPTER_1, case, ["-b", BATCH]) for name, case in alone.items()]
    jobs = [start("single", single)]
    for processes in (2, 4):
        cases = []
        for case in CASES + FAMILY_CASES:
            ranks, size, schedule, _, more = case
            if ranks == processes:
                count = size * (1 + (schedule in LOOPED))
                own = ["-b", BATCH // count // (ranks // size), "--schedule", schedule]
                own += ["--pipeline-parallel", size, *more]
                cases.append(described(name_of(case), CHAPTER_7, case, own))
        jobs[-1].wait(500)
        jobs.append(start(f"on-{processes}", cases, processes))
    for job in jobs:
        assert job.wait(500) == 0, job.output[-5000:]


def gradients(folder, step: int) -> dict:
    """Of all ranks; those of a stage are equal on all of its ranks."""
    files = sorted(folder.glob(f"gradients-{step}-*"))
    return {name: g for file in files for name, g in torch.load(file).items()}


class Folder:
    def __init__(self, folder):
        self.folder = folder

    def column(self, name: str) -> list[float]:
        records = map(json.loads, (self.folder / "metrics.jsonl").open())
        return [record[name] for record in records if name in record]


@pytest.mark.parametrize("case", CASES + FAMILY_CASES, ids=name_of)
def test_trains_what_chapter_1_trains(runs, case):
    """Losses, norms, held-out losses, every gradient, and the model in the end."""
    steps = steps_of(case)
    single, run = (Folder(runs / name) for name in (single_of(case), name_of(case)))
    assert_same_losses(single, run, steps, **OFF)
    assert len(run.column("eval/loss")) == 2
    assert min(run.column("time/schedule_ms")) > 0
    for step in (1, 2, 10) if steps == 10 else (1, 2):
        expected, found = gradients(single.folder, step), gradients(run.folder, step)
        print(f"step {step}: {worst(expected, found)}")
        assert worst(expected, found)[0] < 1e-4, step
    a, b = (tensors_of(x.folder / "final") for x in (single, run))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)


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


def test_resume_on_other_stages(trainer, tied):
    """Saved by four stages; bit for bit on as many. Two, zbv, and chapter 3 go on, and back."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 4, "--eval-freq", 4]
    flags += ["--ckpt-freq", 2, "--lr", 1e-3]
    four = {"name": "origin", "processes": 4} | PP
    origin = trainer(*flags, "-b", 2, **four)
    take_over(origin, trainer, "same", 2)
    same = trainer(*flags, "-b", 2, **four | {"name": "same"})
    assert exact(same.records) == exact(origin.records)
    a, b = (whole_state(run.folder / "step-00000004") for run in (origin, same))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    others = [
        ("two", 2, ["-b", 4], PP),
        ("chapter-3", 2, ["-b", 4], {"script": CHAPTER_3}),
        ("zbv", 4, ["-b", 1, "--schedule", "zbv", "--pipeline-parallel", 2], PP),
    ]
    for name, processes, split, script in others:
        take_over(origin, trainer, name, 2)
        resumed = trainer(*flags, *split, name=name, processes=processes, **script)
        assert "Continuing from" in resumed.output
        assert_same_losses(origin, resumed, 4, **OFF)
        a, b = (whole_state(run.folder / "step-00000004") for run in (origin, resumed))
        assert a.keys() == b.keys()
        if script != PP:  # and back
            take_over(resumed, trainer, "back", 2)
            back = trainer(*flags, "-b", 4, name="back", processes=2, **PP)
            assert_same_losses(origin, back, 4, **OFF)


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

# What is damaged; the gradient that is worst, and how wrong at least
TRAPS = {
    "the gradient of the head is left out": ("tied_head.add_gradients()", "", "embed_tokens", 0.01),
    "each micro-batch is divided twice": ("scale_grads=False", "scale_grads=True", "", 0.4),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_wrong_gradients_are_noticed(trainer, tied, tmp_path, trap):
    """So the tests above can fail."""
    line, instead, name, error = TRAPS[trap]
    script = damaged(CHAPTER_7, tmp_path, {line: instead})
    for folder, chapter, processes in (("one", CHAPTER_1, 0), ("two", script, 2)):
        (tmp_path / folder).mkdir()
        flags = [*trainer.defaults(folder), "-m", tied, "--no-from-scratch", "--max-steps", "1"]
        flags += ["-b", 4 // (processes or 1)]
        case = {"name": folder, "script": str(chapter), "folder": str(tmp_path / folder)}
        env = {"MASTER_PORT": str(free_port()), "COMET_AUTO_LOG_DISABLE": "true"}
        file = tmp_path / f"{folder}.json"
        file.write_text(json.dumps([case | {"env": env, "flags": [str(f) for f in flags]}]))
        tool, output = tmp_path / "many.py", tmp_path / f"{folder}.txt"
        tool.write_text(MANY)
        job = Job(tool, [file], output, processes) if processes else Run(tool, [file], output)
        assert job.wait() == 0, job.output
    expected, found = (gradients(tmp_path / folder, 1) for folder in ("one", "two"))
    print(trap, worst(expected, found))
    assert worst(expected, found)[0] > error
    assert name in worst(expected, found)[1]


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
