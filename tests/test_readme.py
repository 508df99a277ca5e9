"""The READMEs say what is true: commands, flags, snippets, names, links, tables.

Their wording is free, and so are the numbers in their sentences. Tables and outputs have to be
those of the tools and of the recorded runs.
"""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import assert_one_sentence
from runner import (
    CHAPTER_1,
    CHAPTER_4,
    CHAPTER_5,
    CHAPTER_7,
    CHAPTER_8,
    CHAPTER_10,
    CHAPTER_12,
    CHAPTER_13,
    CHAPTER_14,
    CHAPTER_15,
    CHAPTERS_BY_NUMBER,
    REPOSITORY,
    Run,
    load,
    outcome,
)
from test_chapters import CONTINUES, changed_code_lines, read, step_to
from test_mds import IMPORTABLE
from test_torchrun import FORKING
from torch.distributed import run as torchrun
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

README = (REPOSITORY / "README.md").read_text()
# The first page, and the pages that it leads to with commands that need no GPU
GUIDE = ["README.md", *(f"docs/{name}.md" for name in ("demos", "flags", "metrics", "tools"))]


def commands_of(files: list[str]) -> list[str]:
    text = "\n".join((REPOSITORY / file).read_text() for file in files)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for kind, block in blocks if not kind for line in block.splitlines()]


COMMANDS = commands_of(GUIDE)

CHAPTERS = [path for number, path in CHAPTERS_BY_NUMBER.items() if number != "09"]
READMES = [f"{path.parent.name}/README.md" for path in CHAPTERS]
LAUNCH = "launch/README.md"
FOLDERS = [f"{name}/README.md" for name in ("by-hand", "in-short", "broken", "exercises")]
WHICH = "docs/which-chapter.md"
RECORDS = ["benchmarks/results.md"]
RECORDS += [f"benchmarks/records/{p.name}" for p in (REPOSITORY / "benchmarks").glob("records/*")]
DOCS = [f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))]


def page(file: str) -> str:
    return (REPOSITORY / file).read_text()


def section(file: str, heading: str) -> str:
    """The text below a heading, up to the next one of its level or above."""
    text = page(file)
    begin = re.search(rf"^(##+) {re.escape(heading)}.*$", text, re.MULTILINE)
    assert begin, f"{file} has no section {heading!r}"
    rest = text[begin.end() :]
    end = re.search(rf"^##{{1,{len(begin[1]) - 1}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def here(command: str) -> list[str]:
    """The command with the Python that runs the tests in place of that of `.venv`."""
    folder = os.path.dirname(sys.executable)
    return [part.replace(".venv/bin", folder) for part in shlex.split(command)]


def test_install_commands():
    """`.ci/run` installs with these two; here, what can be known without installing."""
    installs = [command for command in COMMANDS if "-m venv" in command]
    assert installs == commands_of(["README.md"]), "the first page has these two only"
    demo, tests = (command.split(" && ") for command in installs)
    assert demo[0] == tests[0] == "python3 -m venv .venv"
    assert demo[1] == ".venv/bin/pip install -c constraints.txt ."
    assert tests[1] == '.venv/bin/pip install -c constraints.txt -e ".[test]"'
    assert tests[2] == ".venv/bin/pip install --no-deps mosaicml-streaming==0.13.0"
    assert tests[2] in (REPOSITORY / "10-mds-shards" / "README.md").read_text()
    assert tests[3] == ".venv/bin/python -m pytest"
    assert "README.md" in (REPOSITORY / ".ci" / "run").read_text()
    (version,) = re.findall(r"\.venv/bin/pip install\s(torch==\S+)\s--index-url \S+/cpu`", README)
    assert version in (REPOSITORY / "constraints.txt").read_text().splitlines()


def test_the_command_for_ones_own_model_and_text(monkeypatch):
    (flags,) = re.findall(r"`\.venv/bin/python 01-single-gpu/train-llm\.py ([^`]*)`", README)
    monkeypatch.setattr(sys, "argv", ["train-llm.py", *shlex.split(flags)])
    args = load(CHAPTER_1).parse_args()
    assert f"`outputs/{args.experiment_name}/final`" in README


@pytest.mark.rest
def test_demo_and_the_commands_after_it(tmp_path):
    """From another folder, where the Hub cannot be reached, and not to the end."""
    demos = [c.split(" && ")[-1] for c in COMMANDS if c.endswith("--demo")]
    demo, *others = [command for command in demos if "write-mds.py" not in command]
    (write_mds,) = {*demos} - {demo, *others}
    tools = ("generate.py", "plot-runs.py", "side-by-side.py")
    generate, plot, side_by_side = (
        next(c for c in COMMANDS if tool in c).split(" && ")[-1] for tool in tools
    )
    estimate = next(c for c in COMMANDS if "estimate-memory.py" in c)
    accounted = [write_mds, demo, *others, generate, plot, side_by_side, estimate, "-m pytest"]
    accounted += [c for c in COMMANDS if "--config" in c or "export-metrics.py" in c]
    elsewhere = ("where-it-hangs.py", "first-difference.py", "HANG_DUMPS")  # these commands
    left = [c for c in COMMANDS if not any(word in c for word in elsewhere)]
    assert all(c.endswith(tuple(accounted)) for c in left)

    def run(command: str, *flags, cwd=REPOSITORY) -> str:
        """The command without the imports, and with forks as the workers of torchrun."""
        program, *words = shlex.split(command.replace("outputs/", f"{tmp_path}/"))
        words = [f"{REPOSITORY}/{word}" if word.endswith(".py") else word for word in words]
        assert program in (".venv/bin/python", ".venv/bin/torchrun")
        script = FORKING if program.endswith("torchrun") else words.pop(0)
        options = {"cwd": cwd, "timeout": 300, "before": IMPORTABLE}
        status, output = outcome(tmp_path, script, *words, *flags, **options)
        assert status == 0, output
        return output

    curves = {}
    for command, script in zip((demo, *others), CHAPTERS, strict=True):
        processes = 4 if script == CHAPTER_13 else 2
        launch = f"torchrun --standalone --nproc-per-node {processes} {script.parent.name}/"
        assert (launch in command) == (script not in (CHAPTER_1, CHAPTER_14))
        steps = 60 if script == CHAPTER_1 else 10
        # Not into outputs/, where somebody's demo may stand
        flags = ["--save-dir", tmp_path, "--max-steps", steps]
        if script in (CHAPTER_4, CHAPTER_10):
            flags += ["--eval-documents", 9]
        if script == CHAPTER_10:
            run(write_mds, "--processes", 1)
            flags += ["-d", tmp_path / "mds"]
        output = run(command, *flags, cwd=tmp_path)
        assert "warning: " not in output.lower()
        name = f"demo-{script.parent.name[3:]}"
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()]
        losses = [record["loss"] for record in records if "loss" in record]
        # However long a run is to be, its learning rate rises for 40 steps.
        is_recorded = (RECORDED / name).exists()
        if platform.python_version() == "3.11.7" and is_recorded:  # the text of the recorded runs
            expected = [r["loss"] for r in recorded(name) if r["step"] <= min(steps, 40)]
            assert losses[: len(expected)] == pytest.approx(expected, rel=1e-3)
        curves[script] = losses
    assert curves[CHAPTER_1][-1] < 6.4
    # Other rows, rounded gradients, another model, or rounds of steps
    for script in (CHAPTER_4, CHAPTER_8, CHAPTER_10, CHAPTER_12, CHAPTER_14, CHAPTER_15):
        curves.pop(script)
    for losses in curves.values():
        assert losses[:1] == pytest.approx(curves[CHAPTER_1][:1], rel=1e-4)

    # As it is, with its imports
    command = here(generate.replace("outputs/", f"{tmp_path}/"))
    options = {"env": os.environ | {"HF_HUB_OFFLINE": "1"}, "cwd": REPOSITORY, "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.stdout.startswith("def ")
    assert len(done.stdout) > 200
    assert "self" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")

    run(plot)
    assert (tmp_path / "demo.png").exists()
    assert (tmp_path / "demo.svg").exists()
    # The model's config is on the Hub.
    estimate = estimate.replace("meta-llama/Llama-3.2-1B", f"{REPOSITORY}/tiny-llama")
    assert run(estimate).count("| largest batch ") == 4
    run(side_by_side, "-o", tmp_path / "page.html")
    assert "03-fsdp/train-llm.py" in (tmp_path / "page.html").read_text()


# The script decides when it knows the device; --help has None.
DECIDED_LATER = {
    ("--comet-workspace",): "the account's own default",
    ("--dtype",): "bf16 on GPUs, fp32 on CPU",
    ("--compile",): "on for CUDA, off elsewhere",
    ("--tensor-parallel",): "the devices of a node",
    ("--shard-size",): "the devices of a node",
    ("--context-parallel",): "the devices of a node",
    ("--expert-parallel",): "the devices of a node",
    ("--pipeline-parallel",): "all ranks",
    ("--replicas",): "the nodes",
    ("--stages-per-rank",): "2 for interleaved and zbv, else 1",
    ("--layers-per-stage",): "about equal; embeddings and head count as a layer each",
}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.parent.name)
def test_flags_are_those_of_help(tmp_path, chapter):
    # A chapter has the flags of those that it continues, and may change their defaults
    common, *rest = re.split(r"Chapter (\d+) adds", page("docs/flags.md"))
    added = dict(zip(rest[::2], rest[1::2], strict=True))
    tables, name = "", chapter.parent.name
    while name:
        tables = added.get(name[:2].lstrip("0"), "") + tables
        name = CONTINUES.get(name)
    tables = common + tables
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
        default = re.search(r"\(default: (.*)\)$", text)
        described[flags] = default.group(1) if default else None
    del described["-h", "--help"]
    if chapter in (CHAPTER_1, CHAPTER_14):
        assert described.pop(("--device",))  # below the table: no other chapter has it
    switches = {flags: flags[:1] for flags in described if f"--no-{flags[0][2:]}" in flags}
    described = {switches.get(flags, flags): default for flags, default in described.items()}
    if chapter == CHAPTER_14:
        del table["--from-scratch",]  # always
    assert set(described) == set(table)
    words = {"None": "none", "False": "off", "True": "on"}
    for flags, default in described.items():
        expected = DECIDED_LATER.get(flags) or words.get(default, default)
        if chapter in (CHAPTER_7, CHAPTER_13) and flags == ("--gradient-accumulation-steps",):
            expected = "the number of stages"
        if chapter in (CHAPTER_5, CHAPTER_10, CHAPTER_15) and flags == (
            "--gradient-accumulation-steps",
        ):
            expected = "1, without --global-batch-size"
        if flags == ("--save-dir",):
            assert default == str(REPOSITORY / "outputs")
            expected = "outputs/ of the repository"
        assert table[flags].replace("`", "") == expected, flags


def anchors(markdown: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub("```.*?```", "", markdown, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "file",
    [
        *("README.md", *READMES, "09-hf-trainer/README.md", LAUNCH, *DOCS),
        *("CONTRIBUTING.md", "outputs/README.md", *FOLDERS, *RECORDS),
    ],
)
def test_links_lead_somewhere(file):
    path = REPOSITORY / file
    text = re.sub("```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_the_first_page_leads_all_chapters():
    """It has the tree of the diffs, and a table of all chapters."""
    folders = {path.parent.name for path in REPOSITORY.glob("[0-9][0-9]-*/train-llm.py")}
    folders |= {"09-hf-trainer"}
    (tree,) = re.findall("```text\n(.*?)```", README, re.DOTALL)
    continues, above = {}, []  # above: the folder at the left of a branch, and its column
    for line in tree.splitlines():
        before = None
        for part in re.finditer(r"\d\d-[\w-]+\w|[┬├└]", line):
            if part[0] in "├└":
                before = dict(above)[part.start()]
            elif part[0] == "┬":
                above.append((part.start(), before))
            else:
                continues[part[0]] = before
                before = part[0]
    assert continues == CONTINUES | {"01-single-gpu": None, "09-hf-trainer": None}
    tables = {"The chapters": "README.md"}
    tables |= dict.fromkeys(("Which chapter", "What each chapter costs"), WHICH)
    for heading, file in tables.items():
        pattern = r"^\|.*?\[`(\d\d-[\w-]+)`\]\((?:\.\./)?\1/README\.md\)"
        linked = re.findall(pattern, section(file, heading), re.MULTILINE)
        assert sorted(linked) == sorted(folders), heading


def links(file: str) -> set:
    """The files of the repository that a page links to."""
    text = re.sub("```.*?```", "", page(file), flags=re.DOTALL)
    names = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    return {(REPOSITORY / file).parent.joinpath(name).resolve() for name in names}


@pytest.mark.parametrize("readme", READMES)
def test_chapter_readme_commands(tmp_path, readme):
    """Every flag and value is understood: all that is wrong is a flag added here."""
    text = (REPOSITORY / readme).read_text()
    script = (REPOSITORY / readme).with_name("train-llm.py")
    pattern = r"^(?:\w+=\S+ )?(python|torchrun .*?) ?train-llm.py (.*?)(?:  +#.*)?$"
    commands = re.findall(pattern, text, re.MULTILINE)
    assert len(commands) >= 2
    inline = re.findall(r"`(python |torchrun [^`]*)train-llm\.py\s([^`]*)`", text)
    commands += [(launch.strip(), flags) for launch, flags in inline]
    for number, (launch, flags) in enumerate(commands):
        run = Run(script, [*shlex.split(flags), "--log-freq", "none"], tmp_path / str(number))
        assert run.wait() == 2
        assert_one_sentence(run.output, "--log-freq")
        if launch.startswith("torchrun"):
            torchrun.get_args_parser().parse_args([*shlex.split(launch)[1:], "train-llm.py"])


def test_launch_readme_commands(tmp_path):
    """As above. What run.sh makes of the variables is in tests/test_launch.py."""
    pattern = r"^.*launch/(?:run|slurm)\.sh (\d\d\S*) (.*)$"
    commands = re.findall(pattern, page(LAUNCH), re.MULTILINE)
    assert len(commands) == 12
    for number, (chapter, flags) in enumerate(commands):
        (script,) = REPOSITORY.glob(f"{chapter}*/train-llm.py")
        run = Run(script, [*shlex.split(flags), "--log-freq", "none"], tmp_path / str(number))
        assert run.wait() == 2
        assert_one_sentence(run.output, "--log-freq")


every_step = pytest.mark.parametrize("name", CONTINUES)


def without_comments(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("# ")]


@every_step
def test_each_idea_is_explained_with_its_code(name):
    """In their order; a snippet begins with the first line of code below the marker."""
    file, script, marker = f"{name}/README.md", read(name), step_to(name).marker
    code = without_comments(script)
    headings = re.findall(r"^### (\d+)\. ", section(file, "The ideas"), re.MULTILINE)
    assert headings == re.findall(rf"# {marker} (\d+): ", script)
    for number in headings:
        explanation = section(file, f"{number}. ")
        begin, snippet, text = re.split("```python\n(.*?)```", explanation, flags=re.DOTALL)
        assert not begin.strip(), "the snippet stands above its explanation"
        without = r"^(?:> \*\*Silently wrong\.\*\* )?\*(?:With|On )"
        assert re.search(without, text, re.MULTILINE), "what would happen without it"
        stretches = [without_comments(part) for part in snippet.split("...\n")]
        (below,) = re.findall(rf"# {marker} {number}: .*\n((?s:.*))", script)
        assert stretches[0][0] == without_comments(below)[0], number
        for stretch in stretches:
            starts = range(len(code) - len(stretch) + 1)
            assert any(code[i : i + len(stretch)] == stretch for i in starts), stretch


def test_names_in_the_texts_are_those_of_the_scripts():
    scripts = "".join(chapter.read_text() for chapter in CHAPTERS)
    tables = [section("docs/porting.md", "The order of work")]
    tables += [section("docs/porting.md", "FSDP, with a model of your own").partition("```")[0]]
    tables += [section(READMES[0], "The file from top to bottom")]
    tables += [section(f, "The other places") for f in READMES if "## The other places" in page(f)]
    names = set(re.findall(r"`(\w*(?:_\w+|[a-z][A-Z]\w+)|[A-Z]{3,})`", "".join(tables)))
    assert len(names) > 30
    missing = {name for name in names if not re.search(rf"\b{name}\b", scripts)}
    assert missing == set()


def test_changed_lines_in_the_readme():
    said = re.findall(r"\[(\d+)\]\((.*)/changes.diff\)", README)
    counts = {n: str(changed_code_lines(read(CONTINUES[n]), read(n))) for n in CONTINUES}
    assert {name: number for number, name in said} == counts


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


def parameters(config) -> tuple[int, int, int]:
    """Of the model, of its root (what belongs to no layer) and of a layer."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [
        sum(p.numel() for p in module.parameters())
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    return model.num_parameters(), model.num_parameters() - sum(sizes), sizes[0]


class Estimator:
    """GB per device at the fullest moment, by tools/estimate-memory.py."""

    def __init__(self):
        self.tool = load(REPOSITORY / "tools" / "estimate-memory.py")

    def trace(self, config, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["estimate-memory.py", *flags])
            args = self.tool.parse_args()
        traces = self.tool.Traces(config, args)

        def total(method: str, devices: int = 1) -> float:
            method = self.tool.METHODS[method]
            _, moments = self.tool.step(traces, method, devices, args.batch_size)
            return self.tool.peak(moments) / 1e9

        return total


@pytest.fixture(scope="module")
def estimator():
    return Estimator()


TIGHT = ["-b", "1", "--activation-checkpointing"]
DEVICES = [(1, 24), (8, 24), (1, 80), (8, 80), (32, 80)]


@pytest.mark.rest
@pytest.mark.parametrize("name", MODELS)
def test_which_chapter(estimator, name):
    """By the rule below the table: the first chapter that uses all devices and fits."""
    total = estimator.trace(MODELS[name], *TIGHT)
    cells = []
    for devices, memory in DEVICES:
        room = memory * (1 - estimator.tool.SPARE)
        whole = total("chapter 1" if devices == 1 else "DDP", devices) <= room
        sharded = total("FSDP", devices) <= room
        assert whole or sharded or total("offload", devices) <= room
        data_parallel = "1" if devices == 1 else "2"
        cells.append(data_parallel if whole else "3" if sharded else "3, offload")
    size = f"{parameters(MODELS[name])[0] / 1e9:.3g}e9"
    header = [f"{devices} × {memory} GB" for devices, memory in DEVICES]
    for row in (["model", "parameters", *header], [name, size, *cells]):
        row = f"| {' | '.join(row)} |"
        assert row in section(WHICH, "Which chapter"), f"{WHICH} needs the row\n{row}"


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


def test_figures_of_the_recorded_demos():
    rows = measured_demos()
    assert rows in section("docs/demos.md", "Measured"), f"paste these rows there:\n{rows}"
    others = (
        "multi-node",
        "tensor-parallel",
        "pipeline-parallel",
        "context-parallel",
        "3d-parallel",
    )
    for pair in (RUNS[:2], RUNS[1:], *(("demo-fsdp", f"demo-{name}") for name in others)):
        for name in ("loss", "eval/loss"):  # the curves coincide
            curves = [[r[name] for r in recorded(run) if name in r] for run in pair]
            assert len(curves[0]) == (40 if name == "loss" else 4)
            assert curves[1] == pytest.approx(curves[0], rel=1e-4)


ALL_RUNS = {readme: f"demo-{readme.partition('/')[0][3:]}" for readme in READMES}
SAMPLES = [
    (readme, run)
    for readme, run in ALL_RUNS.items()
    if "\n## What the output looks like\n" in page(readme)
]


@pytest.mark.parametrize(("readme", "run"), SAMPLES)
def test_output_in_the_readme_is_that_of_the_recorded_demo(readme, run):
    """Up to step 20, and from the last step on; the recording has `...` for the folders."""
    output = (RECORDED / run / "output.txt").read_text()
    begin, end = output.index("cpu, torch "), output.index("step 30/400 ")
    sample = output[begin:end] + "...\n" + output[output.index("step 400/400  loss") :]
    sample = sample.replace("Tokenizing column 'text'\n", "")  # older scripts said this
    text = section(readme, "What the output looks like")
    assert f"```\n{sample}```" in text, f"paste this sample into {readme}:\n{sample}"


def test_symptoms_are_what_the_scripts_say():
    text = page("docs/troubleshooting.md")
    symptoms = [row.split("|")[1] for row in text.splitlines() if row.startswith("| ")]
    quoted = {quote for symptom in symptoms for quote in re.findall("`(.*?)`", symptom)}
    # Of the system and of PyTorch; a metric
    quoted -= {"EADDRINUSE", "Connection refused", "No space left on device", "time/data_ms"}
    quoted -= {"invalid device ordinal", "torch.compile", "ValueError: Cuda is not available."}
    assert len(quoted) > 7
    source = "".join(chapter.read_text() for chapter in CHAPTERS)
    sentences = re.sub(r"{.*?}", "{}", " ".join(re.findall(r'f?"([^"]*)"', source)))
    for quote in quoted:
        pattern = re.escape(quote.replace("meta-llama/Llama-3.2-1B", "{}").replace("...", "{}"))
        assert re.search(pattern, sentences), quote


def test_scripts_and_flags_in_the_texts_exist():
    files = [*READMES, LAUNCH, *DOCS, *RECORDS, "README.md", "outputs/README.md"]
    mentions = 0
    for file in files:
        text = re.sub(r"https?://\S+", "", (REPOSITORY / file).read_text())
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
