"""tools/first-difference.py: right ports, damaged chapters, and scripts of other people."""

import re
import sys

import pytest
from helpers.chapters import damaged, replaced
from helpers.models import LLAMA, MIXTURES, save_weights, write_model, write_weights
from helpers.runner import CHAPTERS_BY_NUMBER, REPOSITORY, SCRIPTS, Job, Run, load, patches, python

TOOL = REPOSITORY / "tools" / "first-difference.py"
# A script that does not tie them; both get the same first values
UNTIED = {"    model.tie_weights()\n": "    model.tie_weights = lambda **options: None\n"}


@pytest.fixture(scope="module")
def tool():
    return load(TOOL)


def record(folder, script, *flags, processes=0, steps=2, before="", **env):
    """Runs the first steps of a script, and returns the folder of the recording."""
    env |= {"FIRST_DIFFERENCE": str(folder), "FIRST_DIFFERENCE_STEPS": str(steps)}
    options = {"env": env, "before": patches("watch") + before}
    output = folder.with_suffix(".txt")
    if processes:
        run = Job(script, flags, output, processes, **options)
    else:
        run = Run(script, flags, output, **options)
    assert run.wait(100) == 0, run.output
    return folder


def answer(tool, capsys, reference, port):
    """What the tool prints."""
    capsys.readouterr()
    status = tool.compare(tool.Recording(reference), tool.Recording(port))
    output = capsys.readouterr().out
    assert status == (0 if "No difference" in output else 1)
    return output


# -- The chapters ----------------------------------------------------------------------------------

# Of two ranks with a global batch of 8 samples
SPLITS = {
    "02": ["-b", 2, "--gradient-accumulation-steps", 2],
    "03": ["-b", 2, "--gradient-accumulation-steps", 2],
    "06": ["-b", 8, "--tensor-parallel", 2],
    "07": ["-b", 2, "--gradient-accumulation-steps", 4, "--pipeline-parallel", 2],
    "11": ["-b", 8, "--context-parallel", 2],
    "12": ["-b", 4],
}
DIVIDE = "        experts.set_gradient_divide_factor(WORLD_SIZE)\n"
# The damaged lines, and what the tool says
DAMAGES = {
    "no wrapper": ("02", {"loss = ddp_model(": "loss = model("}, "do not average this gradient"),
    "the samples of rank 0": ("02", {"* dp_size + dp_rank)": "* dp_size)"}, "the same samples"),
    "a sum": ("02", {"loss = loss / accumulation": "pass"}, "2 times too large.*Clipping hides"),
    "no zeros": ("03", {"            optimizer.zero_grad()": "            pass"}, "are not zeroed"),
    "not tied": ("06", UNTIED, "Only tied or embedding weights differ"),
    "experts": ("12", {DIVIDE: ""}, "experts.*Only these gradients are 2 times too large"),
}


@pytest.fixture(scope="module")
def start(tmp_path_factory, dataset):
    """Records a chapter: chapter 1 once for each model, and others with one process for a rank."""
    folder = tmp_path_factory.mktemp("recordings")
    models = {}
    references = {}

    def model_of(number):
        family = "mixtral" if number == "12" else "llama"
        if family not in models:
            if family == "llama":
                models[family] = save_weights(write_model(folder / family, **LLAMA))
            else:
                models[family] = write_weights(folder / family, family, MIXTURES)
        return family, ["-m", models[family], "-d", dataset, "-s", 32, "--max-steps", 4]

    def call(number, damages=None, more=()):
        family, flags = model_of(number)
        if family not in references:
            script, batch = CHAPTERS_BY_NUMBER["01"], ["-b", 8]
            references[family] = record(folder / f"of-{family}", script, *flags, *batch)
        name = f"{number}-{len([*folder.iterdir()])}"
        script = CHAPTERS_BY_NUMBER[number]
        if damages:
            script = damaged(script, folder / f"scripts-{name}", damages)
        flags += [*SPLITS[number], *more]
        return references[family], record(folder / name, script, *flags, processes=2)

    return call


@pytest.mark.parametrize(
    "number", [n if n == "02" else pytest.param(n, marks=pytest.mark.rest) for n in SPLITS]
)
def test_a_right_chapter_has_no_difference(start, tool, capsys, number):
    output = answer(tool, capsys, *start(number))
    assert re.search(r"No difference: \d\d parameters, 2 steps\.", output), output
    assert "Warning" not in output
    assert "Note" not in output


@pytest.mark.rest
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chapter_gets_its_sentence(start, tool, capsys, damage):
    number, lines, sentence = DAMAGES[damage]
    output = answer(tool, capsys, *start(number, lines))
    assert re.search(sentence, output.replace("\n", " ")), output


@pytest.mark.rest
def test_bf16_has_its_own_tolerance_and_a_warning(start, tool, capsys):
    reference, port = start("02")
    _, rounded = start("02", more=["--dtype", "bf16"])
    output = answer(tool, capsys, reference, rounded)
    assert "Warning: not in fp32 (autocast" in output
    assert "No difference" in output
    assert "Warning" not in answer(tool, capsys, reference, port)


# -- Scripts of other people -----------------------------------------------------------------------

MLP = (SCRIPTS / "mlp.py").read_text()
LOG_NORM = "    torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n"
CLIP = LOG_NORM.replace("'inf'", "'0.01'")
STEP = "    optimizer.step()"
BIAS = "    model[3].bias.grad *= {}\n" + STEP
AVERAGE = """    for p in model.parameters() if world_size > 1 else ():
        dist.all_reduce(p.grad.div_(world_size))
    optimizer.step()"""
SHARD = "from torch.distributed.fsdp import fully_shard\nfully_shard(model[0])\n"
NO_DDP = {"net = torch.nn.parallel.DistributedDataParallel(model)": "pass"}
LAST = "    schedule.step()"
DDP = "net = torch"
LEFT_OUT = f"model._ddp_params_and_buffers_to_ignore = ['0.bias']\n    {DDP}"
PARAMETERS = "SGD(model.parameters()"
NEW_PARAMETER = "SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))]"
LOST = {"(net(x), x[:, :4]": "(net(x)[1:], x[1:, :4]", "loss.backward()": "(2 * loss).backward()"}
# Damages of the runs with several ranks, and the sentences
MLP_DAMAGES = {
    "nothing": ({}, "No difference: 6 parameters, 2 steps"),
    "weights": ({"manual_seed(0)": "manual_seed(world_size)"}, "begin with other weights"),
    "learning rate": ({"lr=0.1": "lr=0.1 * world_size"}, r"lr of 0.weight: 0.1 .* 0.2 in the port"),
    "state": ({LAST: f"{LAST}\n    optimizer.state.clear()"}, "Step 2 .* compare the optimizers"),
    "changed weights": (
        {LAST: f"{LAST}\n    model[0].weight.data *= 1.01"},
        "Step 2 .* changed the weights between the steps",
    ),
    "a bias that DDP leaves out": (
        {DDP: LEFT_OUT},
        r"gradient of 0.bias on ranks 0 and 1 .*, ratio rank 1 / rank 0 -?[\d.]+ .*Only norms or ",
    ),
    "another number on each rank": (
        {STEP: BIAS.format("1 + rank")},
        "3.bias on ranks 0 and 1 .* The ranks have the same gradient, times other numbers",
    ),
    "a bias is summed": ({STEP: BIAS.format(2)}, "Only these gradients are 2 times too large"),
    "other samples later": (
        {"randn(5, 12, 8)": "randn(5, 12, 8)[[0, world_size, 3, 4]]"},
        "Step 2 .* The runs have read other samples",
    ),
    "a norm for the log": ({STEP: LOG_NORM + AVERAGE} | NO_DDP, "No difference: 6 parameters"),
    "clip before average": ({STEP: CLIP + AVERAGE} | NO_DDP, "Each rank clips its own gradient"),
    "an unused parameter": ({PARAMETERS: NEW_PARAMETER}, "No difference: 6 parameters, 2 steps"),
    "sharded after the optimizer": (
        {"schedule = ": SHARD + "schedule = "} | NO_DDP,
        "^error: 0.bias has a gradient in the reference.* made before fully_shard",
    ),
    "uneven": ({"x.chunk(world_size)[rank]": "x[4 * rank : 4 + 8 * rank]"}, "from 4 to 8 labels"),
    "labels are lost": (LOST, "have 10 labels, those of the reference 12"),
    "half a loss": ({"loss.backward()": "(loss + net(x).mean()).backward()"}, "No known pattern"),
    "dropout": ({"nn.Tanh()": "nn.Dropout(0.1)"}, "Warning: the forward pass draws random numbers"),
}


@pytest.fixture(scope="module")
def mlp_of_one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    (folder / "mlp.py").write_text(MLP)
    return record(folder / "reference", folder / "mlp.py")


@pytest.mark.parametrize(
    "damage",
    [n if n == "nothing" else pytest.param(n, marks=pytest.mark.rest) for n in MLP_DAMAGES],
)
def test_raw_ddp(tool, tmp_path, capsys, mlp_of_one_process, damage):
    script = tmp_path / "mlp.py"
    script.write_text(replaced(MLP, MLP_DAMAGES[damage][0]))
    port = record(tmp_path / "port", script, processes=2)
    try:
        output = answer(tool, capsys, mlp_of_one_process, port)
    except SystemExit:
        output = capsys.readouterr().err
    assert re.search(MLP_DAMAGES[damage][1], output.replace("\n", " ")), output
    assert "clipping was not seen" in output or "clip" in damage or "sharded" in damage


CLIP_A_PART = """    part = list(model.parameters())[rank::world_size]
    norm = torch.nn.utils.get_total_norm([p.grad for p in part])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
"""
ZERO = "ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)"
IMPORT = "if world_size > 1:\n    from torch.distributed.optim import ZeroRedundancyOptimizer\n"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("clip", "optimizer", "sentence"),
    [
        (CLIP_A_PART, "optimizer", "equal before clipping only"),
        (CLIP, ZERO, "No difference: 6 parameters, 2 steps"),
    ],
    ids=["a part", "ZeRO"],
)
def test_clipping(tool, tmp_path, capsys, clip, optimizer, sentence):
    script = tmp_path / "mlp.py"
    text = MLP.replace(STEP, clip + STEP)
    lines = f"{IMPORT}    optimizer = {optimizer}\nschedule = "
    script.write_text(text.replace("schedule = ", lines))
    recordings = [record(tmp_path / str(n), script, processes=n) for n in (0, 2)]
    output = answer(tool, capsys, *recordings)
    assert sentence in output.replace("\n", " ")
    assert "clipping was not seen" not in output


@pytest.mark.rest
def test_the_command(tmp_path):
    """With a real start of Python and torchrun. Other programs of torchrun record nothing."""
    script = tmp_path / "mlp.py"
    script.write_text(MLP)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    flags = ["--port", f"{torchrun} {script}", "--keep", tmp_path / "kept", "--steps", "1"]
    done = python(TOOL, "--reference", f"{sys.executable} {script}", *flags)
    assert "No difference: 6 parameters, 1 step." in done.stdout
    assert len([*(tmp_path / "kept" / "port").glob("step*.pt")]) == 2
