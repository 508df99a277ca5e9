"""The READMEs say what is true: their commands run, their table of flags is that of --help."""

import itertools
import json
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import assert_one_sentence, assert_same_losses
from runner import CHAPTER_1, CHAPTER_2, CHAPTER_3, REPOSITORY, Job, Run
from test_chapters import STEPS, changed_code_lines
from torch.distributed import run as torchrun
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

README = (REPOSITORY / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines()]


READMES = [f"{path.parent.name}/README.md" for path in (CHAPTER_1, CHAPTER_2, CHAPTER_3)]


def here(command: str) -> list[str]:
    """The command with the Python that runs the tests in place of that of `.venv`."""
    folder = os.path.dirname(sys.executable)
    return [part.replace(".venv/bin", folder) for part in shlex.split(command)]


def test_install_commands():
    """`.ci/run` installs with these two; here, what can be known without installing."""
    installs = [command for command in COMMANDS if "-m venv" in command]
    demo, tests = (command.split(" && ") for command in installs)
    assert demo[0] == tests[0] == "python3 -m venv .venv"
    assert demo[1] == ".venv/bin/pip install -c constraints.txt ."
    assert tests[1] == '.venv/bin/pip install -c constraints.txt -e ".[test]"'
    assert tests[2] == ".venv/bin/python -m pytest"
    assert "README.md" in (REPOSITORY / ".ci" / "run").read_text()


def test_demo_and_the_commands_after_it(tmp_path):
    """From another folder, where the Hub cannot be reached, and not to the end."""
    demo, *others = [c.split(" && ")[-1] for c in COMMANDS if c.endswith("--demo")]
    tools = ("generate.py", "plot-runs.py", "side-by-side.py")
    generate, plot, side_by_side = (
        next(c for c in COMMANDS if tool in c).split(" && ")[-1] for tool in tools
    )
    estimate = next(c for c in COMMANDS if "estimate-memory.py" in c)
    accounted = [demo, *others, generate, plot, side_by_side, estimate, "-m pytest"]
    assert all(c.endswith(tuple(accounted)) for c in COMMANDS)
    env = os.environ | {"HF_HUB_OFFLINE": "1"}

    def run(command: str, folder=tmp_path) -> subprocess.CompletedProcess:
        options = {"env": env, "capture_output": True, "text": True, "timeout": 900}
        done = subprocess.run(here(command), cwd=folder, **options)
        assert done.returncode == 0, done.stderr
        return done

    chapters = ("01-single-gpu", "02-ddp", "03-fsdp")
    curves = []
    for chapter, command, steps in zip(chapters, (demo, *others), (100, 20, 20), strict=True):
        command = command.replace(chapter, f"{REPOSITORY}/{chapter}")
        # Not into outputs/, where somebody's demo may stand
        done = run(f"{command} --save-dir {tmp_path} --max-steps {steps}")
        assert "warning: " not in done.stderr.lower()
        name = f"demo-{chapter[3:]}"
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        curves.append([record["loss"] for record in records if "loss" in record])
        # However long a run is to be, its learning rate rises for 40 steps.
        if platform.python_version() == "3.11.7":  # the text that the recorded runs read
            expected = [r["loss"] for r in recorded(name) if r["step"] <= min(steps, 40)]
            assert curves[-1][: len(expected)] == pytest.approx(expected, rel=1e-3)
    assert curves[0][-1] < 6
    assert curves[1] == pytest.approx(curves[0][:2], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0][:2], rel=1e-4)

    done = run(generate.replace("outputs/", f"{tmp_path}/"), folder=REPOSITORY)
    assert done.stdout.startswith("def ")
    assert len(done.stdout) > 200
    assert "self" in done.stdout
    assert done.stderr == ""

    run(plot.replace("outputs/", f"{tmp_path}/"), folder=REPOSITORY)
    assert (tmp_path / "demo.png").exists()
    assert (tmp_path / "demo.svg").exists()
    # The model's config is on the Hub.
    estimate = estimate.replace("meta-llama/Llama-3.2-1B", f"{REPOSITORY}/tiny-llama")
    assert run(estimate, folder=REPOSITORY).stdout.count("| largest batch ") == 4
    run(f"{side_by_side} -o {tmp_path}/page.html", folder=REPOSITORY)
    assert "03-fsdp/train-llm.py" in (tmp_path / "page.html").read_text()


CHAPTERS = [CHAPTER_1, CHAPTER_2, CHAPTER_3]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.parent.name)
def test_flags_are_those_of_help(tmp_path, chapter):
    tables = README if chapter == CHAPTER_3 else README.partition("Chapter 3 adds")[0]
    rows = re.findall(r"^\| ((?:`-[^|]+)) \| ([^|]+) \| [^|]+ \|$", tables, re.MULTILINE)
    table = {tuple(re.findall("`(.*?)`", flags)): default.strip("`") for flags, default in rows}
    run = Run(chapter, ["--help"], tmp_path / "help", env={"COLUMNS": "200"})
    assert run.wait() == 0
    assert "%(" not in run.output
    options = re.sub(r"\s*\n {10,}", "  ", run.output)  # one option a line
    described = {}
    for line in re.findall("^  (-.*)", options, re.MULTILINE):
        names, _, text = line.partition("  ")
        flags = tuple(name.split()[0] for name in names.split(", "))
        default = re.search(r"\[(.*)\]$", text)
        described[flags] = default.group(1) if default else None
    del described["-h", "--help"]
    if chapter == CHAPTER_1:
        assert described.pop(("--device",))  # below the table: no other chapter has it
    switches = {flags: flags[:1] for flags in described if f"--no-{flags[0][2:]}" in flags}
    described = {switches.get(flags, flags): default for flags, default in described.items()}
    assert set(described) == set(table)
    for flags, default in described.items():
        said = table[flags]
        if default is None:
            assert said in ("none", "off"), flags
        elif flags == ("--save-dir",):
            assert default == str(REPOSITORY / "outputs")
        else:
            assert default.strip("`") == said.replace("`", ""), flags


def anchors(markdown: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub("```.*?```", "", markdown, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", ["README.md", *READMES, "outputs/README.md"])
def test_links_lead_somewhere(file):
    path = REPOSITORY / file
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize(("readme", "count"), [*zip(READMES, (4, 5, 3), strict=True)])
def test_chapter_readme_commands(tmp_path, readme, count):
    """Every flag and value is understood: all that is wrong is a flag added here."""
    text = (REPOSITORY / readme).read_text()
    script = (REPOSITORY / readme).with_name("train-llm.py")
    pattern = r"^(?:\w+=\S+ )?(python|torchrun .*?) ?train-llm.py (.*?)(?:  +#.*)?$"
    commands = re.findall(pattern, text, re.MULTILINE)
    assert len(commands) == count
    inline = re.findall(r"`(python |torchrun [^`]*)train-llm\.py\s([^`]*)`", text)
    commands += [(launch.strip(), flags) for launch, flags in inline]
    for number, (launch, flags) in enumerate(commands):
        run = Run(script, [*shlex.split(flags), "--log-freq", "none"], tmp_path / str(number))
        assert run.wait() == 2
        assert_one_sentence(run.output, "--log-freq")
        if launch.startswith("torchrun"):
            torchrun.get_args_parser().parse_args([*shlex.split(launch)[1:], "train-llm.py"])


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.after)
def test_readme_walks_through_every_place(step):
    text = (REPOSITORY / step.after / "README.md").read_text().partition("## The diff")[2]
    table = text.partition("\n## ")[0]
    places = {*step.may_differ, *step.added} - {"docstring", "imports", "gather"}
    assert {place for place in places if f"`{place}`" not in table} == set()


def test_changed_lines_in_the_readme():
    said = [int(number) for number in re.findall(r"(\d+) changed lines of code", README)]
    texts = [chapter.read_text() for chapter in CHAPTERS]
    assert said == [changed_code_lines(*pair) for pair in itertools.pairwise(texts)]


# -- Figures ---------------------------------------------------------------------------------------


def llama(hidden: int, intermediate: int, layers: int, heads: int, **others):
    return AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **{"num_key_value_heads": 8, "vocab_size": 128256} | others,
    )


LLAMA_1B = llama(2048, 8192, 16, 32, head_dim=64, tie_word_embeddings=True)
MODELS = {
    "Llama-3.2-1B": LLAMA_1B,
    "Llama-3.2-3B": llama(3072, 8192, 28, 24, head_dim=128, tie_word_embeddings=True),
    "Llama-2-7B": llama(4096, 11008, 32, 32, num_key_value_heads=32, vocab_size=32000),
    "Llama-3.1-8B": llama(4096, 14336, 32, 32),
    "Llama-3.1-70B": llama(8192, 28672, 80, 64),
}


def parameters(config) -> tuple[int, int]:
    """Of the model, and of what FSDP gathers at a time: the root and two layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    return model.num_parameters(), model.num_parameters() - sum(sizes) + 2 * sizes[0]


def chapter_for(whole: int, gathered: int, devices: int, memory_gb: float) -> str:
    """The rule that the README states below its table."""
    room = memory_gb * 1e9 * 2 / 3
    if 16 * whole <= room:
        return "1" if devices == 1 else "2"
    return "3" if 16 * whole / devices + 2 * gathered <= room else "3, offload"


def which_chapter() -> str:
    devices = [(1, 24), (8, 24), (1, 80), (8, 80), (32, 80)]
    rows = []
    for name, config in MODELS.items():
        sizes = parameters(config)
        cells = [chapter_for(*sizes, *of) for of in devices]
        rows.append(f"| {name} | {sizes[0] / 1e9:.3g}e9 | {' | '.join(cells)} |")
    return "\n".join(rows)


def test_which_chapter():
    assert which_chapter() in README
    header = "| model | parameters | 1 × 24 GB | 8 × 24 GB | 1 × 80 GB | 8 × 80 GB | 32 × 80 GB |"
    assert header in README


def arithmetic() -> list[tuple[str, str]]:
    """What the texts work out in passing, and where."""
    one, two, three = READMES
    seven_billion, gathered = parameters(MODELS["Llama-2-7B"])
    states, root = 16 * seven_billion / 1e9, 2 * gathered / 1e9
    traffic = 2 * 4 * 1e9  # bytes per billion parameters
    weight = torch.tensor(0.02, dtype=torch.bfloat16)
    gap = torch.nextafter(weight, torch.tensor(1.0, dtype=torch.bfloat16)) - weight
    info = torch.finfo(torch.float16)
    tiny = info.tiny * info.eps  # the smallest number that is not zero
    medium = 16 * 355e6 / 1e9
    return [
        (one, f"ln 2048 = {math.log(2048):.1f}"),
        (one, f"the next one is {gap.item():.4f} away"),
        (one, f"gradients below {tiny:.0e}".replace("e-0", "e-")),
        (one, f"16 × 8e9 = {16 * 8e9 / 1e9:.0f} GB"),
        (two, f"for a model of a billion parameters {16 * 1e9 / 1e9:.0f} GB"),
        (two, f"{traffic / 1e9:.0f} GB would take {traffic / 400e9 * 1e3:.0f} ms at 400 GB/s"),
        (two, f"between GPUs of one node, and {traffic * 8 / 100e9:.1f} s at 100 Gbit/s"),
        (three, f"{states:.1f} GB on each under DDP"),
        (three, f"under FSDP {states / 8:.1f} GB and the gathered {root:.1f}"),
        (three, f"with 24 GB some {24 - states / 8 - root:.0f} GB"),
        (three, f"16 × 355e6 / 2 = {medium / 2:.1f} GB, and {medium:.1f} GB under DDP"),
    ]


def test_arithmetic_in_the_texts():
    for file, sentence in arithmetic():
        text = " ".join((REPOSITORY / file).read_text().split())
        assert sentence in text


RECORDED = REPOSITORY / "benchmarks" / "demo-runs"
RUNS = ("demo-single-gpu", "demo-ddp", "demo-fsdp")


def recorded(run: str) -> list[dict]:
    return [json.loads(line) for line in (RECORDED / run / "metrics.jsonl").open()]


def median(records: list[dict], name: str) -> float:
    """Without the first logged step, as tools/plot-runs.py has it."""
    return statistics.median([record[name] for record in records if name in record][1:])


def measured_demos() -> str:
    rows = []
    for run in RUNS:
        records = recorded(run)
        speed, step = median(records, "tokens_per_second"), median(records, "time/total_ms")
        losses = [[r[name] for r in records if name in r][-1] for name in ("loss", "eval/loss")]
        cells = [f"`{run}`", f"{speed:,.0f}", f"{step:.0f}", *(f"{loss:.4f}" for loss in losses)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def phases_of_the_demo() -> str:
    records = recorded("demo-single-gpu")
    phases = [median(records, f"time/{name}_ms") for name in ("data", "forward", "backward")]
    return (
        "In the demo on two CPU cores these are {:.1f}, {:.0f}, {:.0f} and {:.0f} ms, of {:.0f} "
        "together".format(
            *phases, median(records, "time/update_ms"), median(records, "time/total_ms")
        )
    )


def test_figures_of_the_recorded_demos():
    assert measured_demos() in README
    assert phases_of_the_demo() in (REPOSITORY / READMES[0]).read_text()
    one, *others = (recorded(run) for run in RUNS)
    for other in others:  # the curves coincide
        for name in ("loss", "eval/loss"):
            curves = [[r[name] for r in records if name in r] for records in (one, other)]
            assert len(curves[0]) == (40 if name == "loss" else 4)
            assert curves[1] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.parametrize(("readme", "run"), [*zip(READMES, RUNS, strict=True)])
def test_output_in_the_readme_is_that_of_the_recorded_demo(readme, run):
    text = (REPOSITORY / readme).read_text()
    (sample,) = re.findall("```\n(cpu, torch .*?)```", text, re.DOTALL)
    output = (RECORDED / run / "output.txt").read_text()
    for stretch in sample.split("...\n"):
        assert stretch in output


RESULTS = (REPOSITORY / "benchmarks" / "results.md").read_text()


def measured_ratios(devices: int) -> dict[str, str]:
    """To chapter 1's tokens per second, by method, from the last table with so many devices."""
    pattern = rf"^\| {devices} \| ([^|]+) \|(?:[^|]*\|){{5}} ([\d.]+) \| ([\d.]+) to ([\d.]+) \|$"
    rows = re.findall(pattern, RESULTS, re.MULTILINE)
    return {name: "{:.2f} ({:.2f} to {:.2f})".format(*map(float, x)) for name, *x in rows}


@pytest.mark.parametrize("number", [2, 3])
def test_speeds_are_those_measured(number):
    text = (REPOSITORY / READMES[number - 1]).read_text().partition("## How fast")[2]
    text = " ".join(text.partition("\n## ")[0].split())
    for devices in (1, 2):
        ratio = measured_ratios(devices)[f"chapter {number}"]
        assert f"{ratio} on {'one process' if devices == 1 else 'two'}" in text
    if number == 3:
        rows = re.findall(r"^\| chapter 3, 2 processes, ([^|]+) \| ([\d.]+) \|", RESULTS, re.M)
        stalls = {name: f"{float(stall):.1f} s" for name, stall in rows}
        assert f"{stalls['--async-checkpoint']} for each, against {stalls['DCP']} without" in text


def test_symptoms_are_what_the_scripts_say():
    text = README.partition("## When something is wrong")[2].partition("\n## ")[0]
    symptoms = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    quoted = {quote for symptom in symptoms for quote in re.findall("`(.*?)`", symptom)}
    # Of the system and of PyTorch; a metric
    quoted -= {"EADDRINUSE", "Connection refused", "time/data_ms"}
    assert len(quoted) > 7
    source = "".join(chapter.read_text() for chapter in CHAPTERS)
    sentences = re.sub(r"{.*?}", "{}", " ".join(re.findall(r'f?"([^"]*)"', source)))
    for quote in quoted:
        pattern = re.escape(quote.replace("meta-llama/Llama-3.2-1B", "{}").replace("...", "{}"))
        assert re.search(pattern, sentences), quote


def test_scripts_and_flags_in_the_texts_exist():
    files = [*READMES, "README.md", "outputs/README.md", "benchmarks/results.md"]
    mentions = 0
    for file in files:
        text = (REPOSITORY / file).read_text()
        pattern = r"((?:benchmarks|tools|tests)/[\w-]+\.(?:py|md))((?: --?[\w-]+[^`\n]*)?)"
        for script, flags in re.findall(pattern, text):
            assert (REPOSITORY / script).exists(), (file, script)
            source = (REPOSITORY / script).read_text()
            if flags and script.startswith(("benchmarks", "tools")):
                for flag in re.findall(r"(?<= )--[\w-]+", flags.partition("#")[0].split('"')[0]):
                    names = (f'"{flag}"', f'"{flag.replace("--no-", "--")}"')
                    assert any(name in source for name in names), (file, script, flag)
                    mentions += 1
    assert mentions > 10


def test_the_loop_to_port_gives_the_same_losses_on_any_number_of_processes(tmp_path):
    (code,) = (block for kind, block in BLOCKS if kind == "python")
    script = tmp_path / "mine.py"
    script.write_text(
        code
        + """
torch.manual_seed(0)
inputs = torch.randn(70, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
losses = train(model, dataset, global_batch=12, epochs=4, lr=0.02)
if os.environ["RANK"] == "0":
    print(*losses)
"""
    )
    curves = []
    for processes in (1, 2, 3):
        folder = tmp_path / str(processes)
        folder.mkdir()
        job = Job(script, [], folder / "output.txt", processes, cwd=folder)
        assert job.wait() == 0, job.output
        curves.append([float(loss) for loss in job.ranks[0].output.split()[-20:]])
        assert (folder / "model.pt").exists()
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


def test_hsdp_as_the_readme_has_it(trainer, tmp_path):
    """Two replicas of two shards each, with the same losses as chapter 1."""
    text = (REPOSITORY / "03-fsdp" / "README.md").read_text()
    (lines,) = re.findall("```python\n(.*?)```", text, re.DOTALL)
    script = tmp_path / "03-fsdp" / "train-llm.py"
    script.parent.mkdir()
    place = "    for layer in [m for m in model.modules()"
    original = CHAPTER_3.read_text()
    assert original.count(place) == 1
    script.write_text(original.replace(place, lines + place))
    flags = ["--max-steps", 5]
    single = trainer(*flags, "-b", 4, name="single")
    node = "import os; os.environ['LOCAL_WORLD_SIZE'] = '2'"
    options = {"name": "hsdp", "processes": 4, "script": script, "before": node}
    hsdp = trainer(*flags, "-b", 1, **options)
    assert_same_losses(single, hsdp, 5, grad_norm=3e-5)
