"""Chapter 13 trains what chapter 1 trains, on grids of stages, pipelines and groups."""

import json
import os
import re

import pytest
import torch
from conftest import (
    assert_one_sentence,
    assert_opens,
    assert_same_losses,
    damaged,
    exact,
    take_over,
    write_model,
)
from filelock import FileLock
from runner import (
    CHAPTER_1,
    CHAPTER_3,
    CHAPTER_6,
    CHAPTER_7,
    CHAPTER_13,
    REPOSITORY,
    Job,
    Run,
    free_port,
    load,
)
from test_fsdp import OFF, tensors_of, told, whole_state
from test_pipeline_parallel import (
    CHECKPOINTING,
    COMPILE,
    LOOPED,
    MANY,
    SOURCES,
    Folder,
    gradients,
)
from test_quick import WATCH_SAVES
from test_resume import assert_synced
from test_tensor_parallel import FAMILIES as TP_FAMILIES
from test_tensor_parallel import SIZE, worst
from test_tensor_parallel import write_weights as write_tp_weights

GRID = {"script": CHAPTER_13}

# Four layers, because two stages per rank need four stages
FAMILIES = {
    name: config | {"num_hidden_layers": 4, "pad_token_id": None}
    for name, config in TP_FAMILIES.items()
}
FAMILIES["smollm3"]["no_rope_layers"] = [1, 0, 1, 0]
BATCH = 16  # samples per step
UNEVEN = ["--layers-per-stage", "1,3", "--reshard-after-forward"]
# Ranks, groups of a pipeline, ranks of a group, schedule, source, other flags
CASES = [
    (8, 2, 2, "1f1b", "tied, pretrained", []),
    (8, 2, 2, "interleaved", "untied, from scratch", CHECKPOINTING),
    (4, 2, 2, "gpipe", "tied, from scratch", []),
    (4, 2, 2, "1f1b", "untied, pretrained", UNEVEN),
    (4, 2, 2, "1f1b", "tied, pretrained", ["--gradient-accumulation-steps", 8]),
    (4, 2, 2, "interleaved", "tied, pretrained", CHECKPOINTING),
    (4, 2, 2, "zbv", "tied, from scratch", []),
    (4, 2, 2, "zbv", "untied, pretrained", ["--cpu-offload"]),
    (4, 1, 2, "1f1b", "tied, pretrained", []),
    (4, 2, 2, "1f1b", "tied, pretrained", [*COMPILE, *CHECKPOINTING]),
]
CASES += [(4, 2, 2, "1f1b", family, []) for family in FAMILIES]


def name_of(case) -> str:
    return "-".join(str(part) for part in (*case[:5], *case[5])).replace(", ", "-")


def steps_of(case) -> int:
    """Families, and cases with other flags, take fewer."""
    return 10 if case[4] in SOURCES and not case[5] else 4


def single_of(case) -> str:
    """The name of the same in chapter 1."""
    return f"{case[4]}, {steps_of(case)} steps"


def write_weights(folder, source: str):
    if source in SOURCES:
        return write_tp_weights(folder, "llama", FAMILIES, **SOURCES[source][0])
    return write_tp_weights(folder, source, FAMILIES)


def split_of(case) -> list:
    """The flags of chapter 13."""
    ranks, stages, size, schedule, _, more = case
    count = stages * (1 + (schedule in LOOPED))
    if more[:1] == ["--gradient-accumulation-steps"]:
        count = more[1]
    flags = ["-b", BATCH // count // (ranks // stages // size), "--schedule", schedule, *more]
    return [*flags, "--pipeline-parallel", stages, "--tensor-parallel", size]


class Runner:
    """Runs chapters many times in the same processes: imports take longer than these trainings."""

    def __init__(self, folder, dataset):
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.script = folder / "many.py"
        self.script.write_text(MANY)
        self.flags = ["--save-dir", folder, "-d", dataset, "-s", 32, "--lr", 1e-4, "--log-freq", 1]

    def case(self, name, chapter, *flags):
        (self.folder / name).mkdir(exist_ok=True)
        flags = [str(flag) for flag in ("-e", name, *self.flags, *flags)]
        env = {"MASTER_PORT": str(free_port()), "COMET_AUTO_LOG_DISABLE": "true"}
        case = {"name": name, "script": str(chapter), "folder": str(self.folder / name)}
        return case | {"env": env, "flags": flags}

    def start(self, name, cases, processes=0):
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(cases))
        output = self.folder / f"{name}.txt"
        if processes:
            return Job(self.script, [file], output, processes)
        return Run(self.script, [file], output)


@pytest.fixture(scope="session")
def runs(tmp_path_factory, dataset):
    """All of CASES, and chapter 1 for each source: their folders by name.

    Workers of pytest-xdist share them: the first one makes them, the others wait.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "grids"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            make_runs(Runner(folder, dataset))
            (folder / "complete").touch()
    return folder


def make_runs(runner):
    sources = {case[4] for case in CASES}
    models = {s: write_weights(runner.folder / f"model-{s}", s) for s in sources}

    def described(name, chapter, case, more):
        origin = SOURCES.get(case[4], (None, ["--no-from-scratch"]))[1]
        steps = steps_of(case)
        own = ["-m", models[case[4]], *origin, "--max-steps", steps, "--eval-freq", steps // 2]
        return runner.case(name, chapter, *own, "--ckpt-freq", 99, *more)

    alone = {single_of(case): case for case in CASES}
    single = [described(name, CHAPTER_1, case, ["-b", BATCH]) for name, case in alone.items()]
    job = runner.start("single", single)
    assert job.wait(500) == 0, job.output[-5000:]
    for processes in (4, 8):
        cases = [case for case in CASES if case[0] == processes]
        cases = [described(name_of(case), CHAPTER_13, case, split_of(case)) for case in cases]
        job = runner.start(f"on-{processes}", cases, processes)
        assert job.wait(500) == 0, job.output[-5000:]


@pytest.mark.rest
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_trains_what_chapter_1_trains(runs, case):
    """Losses, norms, held-out losses, every gradient, and the model in the end."""
    steps = steps_of(case)
    single, run = (Folder(runs / name) for name in (single_of(case), name_of(case)))
    assert_same_losses(single, run, steps, **OFF)
    assert len(run.column("eval/loss")) == 2
    for step in (1, 2, 10) if steps == 10 else (1, 2):
        expected, found = gradients(single.folder, step), gradients(run.folder, step)
        print(f"step {step}: {worst(expected, found)}")
        assert worst(expected, found)[0] < 1e-4, step
    a, b = (tensors_of(x.folder / "final") for x in (single, run))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)


# -- Checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("models") / "tied", "tied, pretrained")


def test_one_pipeline_of_groups(trainer, tied):
    """Losses, norms and held-out loss are those of chapter 1, and a resume repeats every bit."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 4, "--eval-freq", 2, "--ckpt-freq", 2]
    single = trainer(*flags, "-b", 8, name="single")
    grid = ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2]
    run = trainer(*flags, *grid, name="grid", processes=4, before=WATCH_SAVES, **GRID)
    assert_same_losses(single, run, 4, **OFF)
    assert_opens(run, reference=single)
    assert_synced(run.run.ranks[0].output, run.folder, ["step-00000002", "step-00000004", "final"])
    take_over(run, trainer, "resumed", 2)
    resumed = trainer(*flags, *grid, name="resumed", processes=4, **GRID)
    assert "Continuing from" in resumed.output
    assert exact(resumed.records) == exact(run.records)
    a, b = (whole_state(x.folder / "step-00000004") for x in (run, resumed))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


# Chapters that continue one run, one after the other: processes, flags, the last step
ZBV = ["--schedule", "zbv"]
CHAIN = [
    (CHAPTER_13, 4, ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2], 1),
    (CHAPTER_6, 2, ["-b", 8, "--tensor-parallel", 2], 2),
    (CHAPTER_13, 4, ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 2, *ZBV], 3),
    (CHAPTER_7, 2, ["-b", 4, "--pipeline-parallel", 2], 4),
    (CHAPTER_13, 4, ["-b", 4, "--pipeline-parallel", 1, "--tensor-parallel", 2], 5),
    (CHAPTER_3, 2, ["-b", 4], 6),
    (CHAPTER_13, 8, ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 2], 7),
]


@pytest.mark.rest
def test_a_run_goes_on_in_other_layouts_and_chapters(trainer, tied):
    """Losses within 1e-6 of a run in chapter 1, and the same AdamW state as in chapter 3."""
    flags = ["-m", tied, "--no-from-scratch", "--eval-freq", 7, "--ckpt-freq", 1, "--lr", 1e-3]
    flags += ["--lr-scheduler", "constant"]  # does not depend on the number of steps
    single = trainer(*flags, "-b", 8, "--max-steps", 7, name="single")
    sharded = {"processes": 1, "script": CHAPTER_3}
    sharded = trainer(*flags, "-b", 8, "--max-steps", 7, name="sharded", **sharded)
    for chapter, processes, split, last in CHAIN:
        options = {"processes": processes, "script": chapter, "name": "chain"}
        run = trainer(*flags, *split, "--max-steps", last, **options)
        assert ("Continuing from" in run.output) == (last > 1)
    losses = single.column("loss")
    print([a / b - 1 for a, b in zip(run.column("loss"), losses, strict=True)])
    assert run.column("loss") == pytest.approx(losses, rel=1e-6)
    assert run.column("eval/loss")[-1] == pytest.approx(single.column("eval/loss")[-1], rel=1e-6)
    a, b = (whole_state(x.folder / "step-00000007") for x in (sharded, run))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)


# -- Who has what ----------------------------------------------------------------------------------

# Each rank tells at its end which samples and seeds it used, and how many numbers AdamW updates.
WATCH = """
import hashlib
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules

def wrap(owner, name):
    original = getattr(owner, name)
    def step(self, x, **options):
        samples.extend(hashlib.sha256(row.numpy()).hexdigest()[:16] for row in x)
        seeds.append(torch.initial_seed())
        return original(self, x, **options)
    setattr(owner, name, step)

samples, seeds, held = [], [], []
wrap(schedules.PipelineScheduleSingle, "step")

def step(self, *args, **options):
    held.append(sum(p.to_local().numel() for g in self.param_groups for p in g["params"]))
    return original_step(self, *args, **options)

original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step

def tell():
    print("\\nsamples", *samples)
    print("seeds", *seeds)
    print("held", held[-1])
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
"""


@pytest.mark.rest
def test_who_has_what(trainer, tmp_path):
    """On 2 x 2 x 2 ranks: the samples of each pipeline, and an eighth of the model per rank."""
    config = FAMILIES["llama"] | {"tie_word_embeddings": False}
    config |= {"attention_bias": False, "mlp_bias": False, "intermediate_size": 64}
    folder = write_model(tmp_path / "m", model_type="llama", **config)
    flags = ["-m", folder, "-b", 2, "--max-steps", 2, "--eval-freq", 0]
    flags += ["--pipeline-parallel", 2, "--tensor-parallel", 2]
    run = trainer(*flags, processes=8, before=WATCH, **GRID)
    # Ranks 0, 1, 4 and 5 are one pipeline; 2, 3, 6 and 7 are the other
    samples = told(run, "samples ")
    one, other = samples[0], samples[2]
    assert samples == [one, one, other, other] * 2
    assert not {*one} & {*other}
    assert len({*one}) == 2 * 2 * 2  # steps, micro-batches, samples
    # Tensor-parallel ranks drop the same activations, and all others drop other ones.
    seeds = told(run, "seeds ")
    assert seeds[0::2] == seeds[1::2]
    assert len({seed for rank in seeds[0::2] for seed in rank}) == sum(map(len, seeds[0::2]))
    sizes = {name: x.numel() for name, x in tensors_of(run.folder / "final").items()}
    stages = [0, 0]
    for name, size in sizes.items():
        is_second = name.startswith(("model.layers.2", "model.layers.3", "lm_head", "model.norm"))
        # Norms are whole in a group
        stages[is_second] += size // 2 if "norm" in name else size // 4
    assert told(run, "held ") == [[str(stages[rank // 4])] for rank in range(8)]


# -- What would happen -----------------------------------------------------------------------------

OWN = "(micro_step * pipelines + pipeline) * args.batch_size"
WHOLE_STAGE = "            dist.all_reduce(grad_norm, group=pipeline_group)\n"
NUMBER = "pipeline = group % pipelines  # with 2"
LAST = "last_ranks = mesh.mesh[-1].flatten().tolist()"
BLOCKS = "pipeline = group // args.pipeline_parallel  # with 2"
# Stages of 4 ranks, a line, what takes its place, where this shows, and by how much at least.
# A group has 2 ranks. With 2 stages and 2 pipelines, it has 1.
TRAPS = {
    "the pipelines of chapter 7": (
        1,
        NUMBER,
        "pipeline = RANK % pipelines  # with 2",
        "gradient",
        0.2,
    ),
    "own samples on each rank": (2, OWN, OWN.replace("+ pipeline", "+ RANK"), "gradient", 0.2),
    "the gradient of the head is left out": (2, "tied_head.add_gradients()", "", "gradient", 0.01),
    "partners with other parts": (2, LAST, f"{LAST}[::-1]", "gradient", 0.2),
    "partners of another pipeline": ("2 × 2", LAST, f"{LAST}[::-1]", "gradient", 0.2),
    "pipelines numbered by blocks": ("2 × 2", NUMBER, BLOCKS, "gradient", 0.2),
    "the norm of a stage": (2, WHOLE_STAGE, "", "grad_norm", 0.005),
    "the losses of all ranks": (2, " / args.tensor_parallel\n", "\n", "eval/loss", 0.9),
}


@pytest.fixture(scope="module")
def trapped(tmp_path_factory, dataset, tied):
    """One step of chapter 1, of chapter 13, and of each damaged script on four ranks."""
    runner = Runner(tmp_path_factory.mktemp("traps"), dataset)
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 1]
    single = runner.case("chapter 1", CHAPTER_1, *flags, "-b", 8)
    job = runner.start("single", [single])
    assert job.wait() == 0, job.output
    grid = ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2]
    pipelines = ["-b", 2, "--pipeline-parallel", 2, "--tensor-parallel", 1]
    cases = [runner.case("undamaged", CHAPTER_13, *flags, *grid)]
    cases.append(runner.case("undamaged, 2 × 2", CHAPTER_13, *flags, *pipelines))
    for name, (stages, line, instead, _, _) in TRAPS.items():
        script = damaged(CHAPTER_13, runner.folder / f"script of {name}", {line: instead})
        if stages != "2 × 2":
            grid[3] = stages
        split = pipelines if stages == "2 × 2" else grid
        cases.append(runner.case(name, script, *flags, *split))
    job = runner.start("on-4", cases, 4)
    assert job.wait(300) == 0, job.output
    return runner.folder


@pytest.mark.rest
@pytest.mark.parametrize("trap", ["undamaged", "undamaged, 2 × 2", *TRAPS])
def test_wrong_training_is_noticed(trapped, trap):
    """So the tests above can fail."""
    single, run = Folder(trapped / "chapter 1"), Folder(trapped / trap)
    expected, found = gradients(single.folder, 1), gradients(run.folder, 1)
    errors = {"gradient": worst(expected, found)[0]}
    for name in ("loss", "grad_norm", "eval/loss"):
        errors[name] = abs(run.column(name)[0] / single.column(name)[0] - 1)
    print(trap, errors, worst(expected, found)[1])
    if trap.startswith("undamaged"):
        assert max(errors.values()) < 1e-4
    else:
        where, least = TRAPS[trap][3:]
        assert errors[where] > least


PARTS = "            layer.self_attn.compile()\n            layer.mlp.compile()\n"


@pytest.mark.rest
def test_whole_layers_must_not_be_compiled(trapped, tied, dataset, tmp_path):
    """The backward pass fails, or its gradients are wrong."""
    runner = Runner(tmp_path / "runs", dataset)
    script = damaged(CHAPTER_13, tmp_path / "script", {PARTS: "            layer.compile()\n"})
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 1, "--eval-freq", 0, "--compile"]
    flags += ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2]
    job = runner.start("on-4", [runner.case("whole", script, *flags)], 4)
    if job.wait(200) == 0:
        error, name = worst(
            gradients(trapped / "chapter 1", 1), gradients(tmp_path / "runs/whole", 1)
        )
        print(f"gradients {error:.2f} off ({name})")
        assert error > 0.01
    else:
        print(re.findall(r"^\w*Error.*", job.output, re.MULTILINE))


POSITIONS = "positions = torch.arange(labels.shape[1], device=labels.device)[None]"
CUT = "    stages, stage_modules, tied_head = make_stages(model, unit_names, args, device, mesh)\n"
SPLIT = '    tp.parallelize_module(model, mesh["tp"], PLANS[config.model_type])\n'
ONE_COLUMN = {
    "first_ranks = mesh.mesh[0].flatten().tolist()": "first_ranks = mesh.mesh[0, :, 0].tolist()",
    LAST: "last_ranks = mesh.mesh[-1, :, 0].tolist()",
}
OTHER_SIZE = "must match the size of tensor"
# What is damaged, and a part of the error
RAISES = {
    "no positions": ({'"position_ids": positions, ': ""}, OTHER_SIZE),
    "positions of a part": ({POSITIONS: POSITIONS.replace("labels.shape", "x.shape")}, OTHER_SIZE),
    "messages of all tokens": (
        {"args.seq_length // args.tensor_parallel": "args.seq_length"},
        OTHER_SIZE,
    ),
    "the plan after the cut": ({SPLIT: "", CUT: CUT + SPLIT}, "not in the plan"),
    "FSDP over groups, too": (
        {'policy["mesh"] = mesh["dp"]': 'policy["mesh"] = mesh["dp_tp"]'},
        "overlapping meshes",
    ),
    "partners in one column": (ONE_COLUMN, "this rank has no partner for the tied head"),
}


@pytest.mark.rest
@pytest.mark.parametrize("trap", RAISES)
def test_mistakes_that_end_with_an_error(trainer, tied, tmp_path, trap):
    """None of them waits for ever."""
    damages, part = RAISES[trap]
    script = damaged(CHAPTER_13, tmp_path, damages)
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 1, "-b", 2]
    flags += ["--pipeline-parallel", 2, "--tensor-parallel", 2]
    result = trainer(*flags, processes=4, script=script, status=None)
    print(trap, re.findall(r"^\w*Error.*", result.output, re.MULTILINE))
    assert result.status != 0
    assert part in result.output


# -- Wrong flags -----------------------------------------------------------------------------------

SMALL = {"model_type": "llama"} | SIZE | {"num_hidden_layers": 4, "tie_word_embeddings": True}
GROUP = ["--pipeline-parallel", 1, "--tensor-parallel", 2]
WINDOW = {"model_type": "mistral", "sliding_window": 31}
GPT2 = {"model_type": "gpt2", "n_positions": 64, "eos_token_id": 0}
# Ranks, flags, the model, and a part of the sentence
REFUSED = {
    "kv heads": (2, GROUP, SMALL | {"num_key_value_heads": 1}, "2 does not divide 1 kv heads"),
    "ranks": (
        3,
        ["--tensor-parallel", 2],
        SMALL,
        "times --tensor-parallel 2 does not divide the 3",
    ),
    "tokens": (2, [*GROUP, "-s", 33], SMALL, "2 does not divide 33 tokens of a sample"),
    "a window": (2, GROUP, SMALL | WINDOW, "above the sliding window, 31"),
    "a family": (1, [], GPT2, "gpt2 has no plan here"),
    "layers": (4, ["--tensor-parallel", 1], SMALL | {"num_hidden_layers": 3}, "are too few for 4"),
    "zbv": (2, [*ZBV, "--tensor-parallel", 1, "--compile"], SMALL, "zbv needs 4 micro-batches"),
}


@pytest.mark.parametrize(
    "case",
    [
        name if name == "kv heads" else pytest.param(name, marks=pytest.mark.rest)
        for name in REFUSED
    ],
)
def test_refused_in_one_sentence(trainer, tmp_path, case):
    processes, flags, config, part = REFUSED[case]
    folder = write_model(tmp_path / "m", **config)
    result = trainer("-m", folder, *flags, "--max-steps", 1, processes=processes, status=1, **GRID)
    assert result.run.ranks[0].process.exitcode == 1
    assert_one_sentence(result.output, part)


@pytest.mark.rest
def test_default_layout(trainer, tied):
    """The groups are the nodes, and all of them are one pipeline. Other groups get a warning."""
    node = "import os; os.environ['LOCAL_WORLD_SIZE'] = '{}'"
    flags = ["-m", tied, "--max-steps", 1, "--eval-freq", 0]
    for ranks, more, layout in ((1, [], (4, 1)), (2, [], (2, 2)), (1, GROUP[2:], (2, 2))):
        name = f"layout-{ranks}-{len(more)}"
        options = {"name": name, "processes": 4, "before": node.format(ranks)} | GRID
        run = trainer(*flags, *more, **options)
        flags_of_run = json.loads((run.folder / "parameters.json").read_text())
        assert (flags_of_run["pipeline_parallel"], flags_of_run["tensor_parallel"]) == layout
        assert ("warning: groups of 2 span nodes" in run.output) == bool(more)


@pytest.mark.rest
def test_bf16(trainer, tied):
    """Nearly the losses of chapter 1: a step sends activations and losses of parts in bf16."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 3, "--dtype", "bf16"]
    single = trainer(*flags, "-b", 8, name="single")
    grid = ["-b", 4, "--pipeline-parallel", 2, "--tensor-parallel", 2]
    run = trainer(*flags, *grid, name="grid", processes=4, **GRID)
    assert run.column("loss") == pytest.approx(single.column("loss"), rel=5e-3)
    assert "compute precision bf16" in run.output


@pytest.mark.rest
def test_benchmark(tmp_path, monkeypatch, capsys):
    """It ends with an error where it counts something else than it computes."""
    script = REPOSITORY / "benchmarks" / "3d-parallel.py"
    tool = load(script)

    def launch(processes, *arguments):  # without torchrun, and without its imports
        output = tmp_path / f"output-{len([*tmp_path.iterdir()])}.txt"
        job = Job(script, arguments, output, processes, env={"COMET_AUTO_LOG_DISABLE": "true"})
        assert job.wait() == 0, job.output
        return job.output

    tool.launch = launch
    monkeypatch.setattr("sys.argv", [str(script), "--layout", "2", "1", "2"])
    tool.main()
    assert "| 3 | pipeline: send | 2 | 2 | 0.262 | 0.262 |" in capsys.readouterr().out
    tool.BYTES = 2
    with pytest.raises(SystemExit, match="not what the shape of the model gives"):
        tool.main()
