"""tools/first-difference.py: right ports, damaged chapters, and scripts of other people."""

import re
import subprocess
import sys

import pytest
from conftest import LLAMA, assert_one_sentence, damaged, write_model
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, Job, Run, load, outcome
from test_expert_parallel import folder_of
from test_fsdp import save_weights
from test_hangs import WATCH
from test_tensor_parallel import UNTIED

TOOL = REPOSITORY / "tools" / "first-difference.py"


@pytest.fixture(scope="module")
def tool():
    return load(TOOL)


def record(folder, script, *flags, processes=0, steps=2, before="", **env):
    """Runs the first steps of a script, and returns the folder of the recording."""
    env |= {"FIRST_DIFFERENCE": str(folder), "FIRST_DIFFERENCE_STEPS": str(steps)}
    env |= {"COMET_AUTO_LOG_DISABLE": "true"}
    options = {"env": env, "before": WATCH + before}
    output = folder.with_suffix(".txt")
    if processes:
        run = Job(script, flags, output, processes, **options)
    else:
        run = Run(script, flags, output, **options)
    assert run.wait(100) == 0, run.output
    return folder


def answer(tool, capsys, reference, port, joins=()):
    """What the tool prints."""
    capsys.readouterr()
    status = tool.compare(tool.Recording(reference), tool.Recording(port), joins)
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
# The damaged lines, and what the tool says
DAMAGES = {
    "model in place of the wrapper": (
        "02",
        {"loss = ddp_model(": "loss = model("},
        "The ranks do not average this gradient",
    ),
    "the samples of rank 0": (
        "02",
        {"(micro_step * WORLD_SIZE + RANK) * args": "(micro_step * WORLD_SIZE) * args"},
        "The ranks have read the same samples",
    ),
    "micro-batches are summed": (
        "02",
        {"loss = loss / accumulation\n": "pass\n"},
        "All gradients are 2 times too large.* Clipping hides this",
    ),
    "gradients are not zeroed": (
        "03",
        {"            optimizer.zero_grad()": "            pass"},
        "gradients are not zeroed",
    ),
    "decay of all parameters": (
        "03",
        {'{"params": vectors, "weight_decay": 0.0}': '{"params": vectors, "weight_decay": 0.01}'},
        "weight_decay of .*norm.*: 0 in the reference, 0.01 in the port",
    ),
    "embeddings are not tied": (
        "06",
        UNTIED,
        "Only tied or embedding weights differ",
    ),
    "each rank divides by its own labels": (
        "11",
        {"(args.seq_length - 1) / args.context_parallel": "(args.seq_length - 1)"},
        "All gradients are 2 times too small: they are divided twice",
    ),
    "experts are not divided": (
        "12",
        {"        experts.set_gradient_divide_factor(WORLD_SIZE)\n": ""},
        "experts.*Only these gradients are 2 times too large",
    ),
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
                models[family] = folder_of(folder, family)
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

MLP = """
import os
import torch
import torch.distributed as dist

world_size = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
)
net = model
if world_size > 1:
    dist.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
inputs = torch.randn(5, 12, 8)
for x in inputs:
    x = x.chunk(world_size)[rank]
    loss = torch.nn.functional.cross_entropy(net(x), x[:, :4].argmax(1))
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""
# Damages, and the sentences
MLP_DAMAGES = {
    "nothing": ({}, "No difference: 6 parameters, 2 steps"),
    "other weights": ({"manual_seed(0)": "manual_seed(world_size)"}, "begin with other weights"),
    "learning rate": ({"lr=0.1": "lr=0.1 * world_size"}, r"lr of 0.weight: 0.1 .* 0.2 in the port"),
    "schedule": (
        {"schedule.step()": "schedule.step() if world_size == 1 else None"},
        "Step 2 .*: check schedule",
    ),
    "state": (
        {
            "    optimizer.zero_grad()\n": "    optimizer.zero_grad()\n    if world_size > 1:\n"
            "        optimizer.state.clear()\n"
        },
        "Step 2 .* compare the optimizers",
    ),
    "changed weights": (
        {
            "    schedule.step()\n": "    schedule.step()\n    if world_size > 1:\n"
            "        model[0].weight.data *= 1.01\n"
        },
        "Step 2 .* changed the weights between the steps",
    ),
    "own norm": (
        {
            "    optimizer.step()\n": "    part = list(model.parameters())[rank::world_size]\n"
            "    norm = torch.nn.utils.get_total_norm([p.grad for p in part])\n"
            "    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)\n"
            "    optimizer.step()\n"
        },
        "equal before clipping only",
    ),
    "a bias that DDP leaves out": (
        {"net = torch": "model._ddp_params_and_buffers_to_ignore = ['0.bias']\n    net = torch"},
        r"gradient of 0.bias on ranks 0 and 1 .*, ratio rank 1 / rank 0 -?[\d.]+ .*Only norms or ",
    ),
    "other samples": (
        {"randn(5, 12, 8)": "randn(5, 12, 8).roll(world_size - 1, 0)"},
        "Step 1 .* The runs have read other samples",
    ),
    "other samples later": (
        {"randn(5, 12, 8)": "randn(5, 12, 8)[[0, world_size, 3, 4]]"},
        "Step 2 .* The runs have read other samples",
    ),
    "half a loss": (
        {"    loss.backward()": "    (loss + (world_size - 1) * net(x).mean()).backward()"},
        "No known pattern",
    ),
}


@pytest.mark.parametrize(
    "damage",
    [n if n == "nothing" else pytest.param(n, marks=pytest.mark.rest) for n in MLP_DAMAGES],
)
def test_raw_ddp(tool, tmp_path, capsys, damage):
    text = MLP
    for line, instead in MLP_DAMAGES[damage][0].items():
        assert text.count(line) == 1
        text = text.replace(line, instead)
    script = tmp_path / "mlp.py"
    script.write_text(text)
    reference = record(tmp_path / "reference", script)
    port = record(tmp_path / "port", script, processes=2)
    output = answer(tool, capsys, reference, port)
    assert re.search(MLP_DAMAGES[damage][1], output.replace("\n", " ")), output
    clips = "clip" in text
    assert ("clipping was not seen" in output) == (not clips)


# Three kinds of random numbers in the forward pass
DROPOUTS = {
    "module": "torch.nn.Dropout(0.5)(x)",
    "function": "torch.nn.functional.dropout(x)",
    "attention": "torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)",
    "none": "torch.nn.functional.dropout(x, training=False)",
}


@pytest.mark.rest
@pytest.mark.parametrize("kind", DROPOUTS)
def test_random_numbers_of_a_forward_pass_get_a_warning(tool, tmp_path, capsys, kind):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n        x = super().forward(x)\n"
        f"        return {DROPOUTS[kind]}\n"
        "model = Model(8, 8)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.randn(2, 4, 8)).sum().backward()\n    optimizer.step()\n"
    )
    recording = record(tmp_path / "recording", script)
    output = answer(tool, capsys, recording, recording)
    assert ("Warning: the forward pass draws random numbers" in output) == (kind != "none")


@pytest.mark.rest
def test_projections_of_a_large_model(tool, tmp_path, capsys):
    """They show the same difference and norm, and cannot be compared with whole tensors."""
    script, wrong = tmp_path / "mlp.py", tmp_path / "wrong.py"
    wide = MLP.replace("16", "1024")
    script.write_text(wide)
    wrong.write_text(wide.replace("loss.backward()", "(2 * loss).backward()"))
    folders = [
        record(tmp_path / f"{file.stem}-{whole}", file, FIRST_DIFFERENCE_WHOLE=whole)
        for file in (script, wrong)
        for whole in "01"
    ]
    for reference, port in (folders[0::2], folders[1::2]):
        output = answer(tool, capsys, reference, port)
        assert "ratio port / reference 2\n" in output
        assert "All gradients are 2 times too large" in output
    projected, whole = (tool.Recording(folder).steps[1][0] for folder in folders[:2])
    for one, other in zip(whole, projected, strict=True):
        assert other["gradient"].numel() == 4096
        norms = [entry["gradient"].norm().item() for entry in (one, other)]
        assert norms[1] == pytest.approx(norms[0], rel=0.1)
    with pytest.raises(SystemExit):
        answer(tool, capsys, folders[0], folders[3])
    assert_one_sentence(capsys.readouterr().err, "record both by one command")


PIPELINE = """
import os
import torch
import torch.distributed as dist

world_size = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
layers = [torch.nn.Linear(8, width) for width in (8, 8, 8, WIDTH)]
model = torch.nn.Sequential(*layers[rank * 4 // world_size : (rank + 1) * 4 // world_size])
if world_size > 1:
    dist.init_process_group("gloo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(6, 8)
for _ in range(3):
    if world_size == 1:
        model(x).square().mean().backward()
    elif rank == 0:
        y = model(x)
        dist.send(y.detach(), 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        received = torch.empty(6, 8)
        dist.recv(received, 0)
        received.requires_grad_()
        model(received).square().mean().backward()
        dist.send(received.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.rest
def test_stages_with_numbers_of_their_own(tool, tmp_path, capsys):
    """Matched by order and shape, or refused."""
    scripts = {}
    for width in (3, 4):
        scripts[width] = tmp_path / f"pipeline-{width}.py"
        scripts[width].write_text(PIPELINE.replace("WIDTH", str(width)))
    reference = record(tmp_path / "reference", scripts[4])
    output = answer(tool, capsys, reference, record(tmp_path / "a", scripts[4], processes=2))
    assert "matched by order and shape" in output
    assert "No difference: 8 parameters" in output
    with pytest.raises(SystemExit):
        answer(tool, capsys, reference, record(tmp_path / "b", scripts[3], processes=2))
    assert_one_sentence(capsys.readouterr().err, "give them the same names")


# -- broken/, and the command ----------------------------------------------------------------------


@pytest.mark.rest
def test_the_command(tmp_path):
    """With a real start of Python and torchrun. Other programs of torchrun record nothing."""
    script = tmp_path / "mlp.py"
    script.write_text(MLP)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    command = [sys.executable, TOOL, "--reference", f"{sys.executable} {script}"]
    command += ["--port", f"{torchrun} {script}", "--keep", tmp_path / "kept", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No difference: 6 parameters, 1 step." in done.stdout
    assert len([*(tmp_path / "kept" / "port").glob("step*.pt")]) == 2


@pytest.mark.rest
def test_what_cannot_be_compared_is_refused(tmp_path):
    def refused(sentence, *flags):
        status, output = outcome(tmp_path, TOOL, *flags)
        assert status == 2
        assert_one_sentence(output, sentence)

    nothing = f"{sys.executable} -c pass"
    both = ["--reference", nothing, "--port", nothing]
    refused("no optimizer step was recorded", *both)
    refused("status 3", "--reference", f"{sys.executable} -c exit(3)", "--port", nothing)
    refused("--join is NAME=DIM", *both, "--join", "q.weight")
    refused("--steps must be 1 or more", *both, "--steps", "0")
