"""The READMEs say what is true: commands, flags, snippets, links. Their wording is free."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.chapters import CONTINUES, SCRIPTS, read, step_to
from helpers.data import IMPORTABLE
from helpers.models import TINY_LLAMA, save_weights
from helpers.pages import WHICH, assert_flags_are_understood, page, section
from helpers.runner import (
    CHAPTER_1,
    CHAPTER_10,
    CHAPTER_14,
    CHAPTER_17,
    CHAPTER_22,
    CHAPTERS_BY_NUMBER,
    FACTS,
    REPOSITORY,
    Job,
    Run,
    load,
    outcome,
    python,
    run_tool,
)
from torch.distributed import run as torchrun

README = (REPOSITORY / "README.md").read_text()
# The first page, and the pages that it leads to with commands that need no GPU
GUIDE = ["README.md", *(f"docs/{name}.md" for name in ("demos", "flags", "metrics", "tools"))]


def commands_of(files: list[str]) -> list[str]:
    text = "\n".join((REPOSITORY / file).read_text() for file in files)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for kind, block in blocks if not kind for line in block.splitlines()]


COMMANDS = commands_of(GUIDE)


def shown(path) -> str:
    return str(path.relative_to(REPOSITORY))


CHAPTERS = [path for number, path in CHAPTERS_BY_NUMBER.items() if number != "09"]
READMES = [shown(path.with_name("README.md")) for path in CHAPTERS]
LAUNCH = "launch/README.md"
FOLDERS = [f"learn/{name}/README.md" for name in ("by-hand", "in-short", "broken", "exercises")]
DEMO_RUNS = REPOSITORY / "benchmarks" / "demo-runs"
RECORDS = ["benchmarks/results.md"]
RECORDS += [f"benchmarks/records/{p.name}" for p in (REPOSITORY / "benchmarks").glob("records/*")]
DOCS = [f"docs/{path.name}" for path in sorted((REPOSITORY / "docs").glob("*.md"))]


def test_commands_that_train(monkeypatch):
    """They need no files of the reader's: all flags but the name are the defaults."""
    commands = re.findall(r"^(?:python|torchrun .*) ([01]\S+) (-e .*)$", README, re.MULTILINE)
    names = []
    for script, flags in commands:
        parsed = []
        for given in (shlex.split(flags), []):
            monkeypatch.setattr("sys.argv", ["train-llm.py", *given])
            parsed.append(load(REPOSITORY / script).parse_args())
        names.append(parsed[0].experiment_name)
        parsed[0].experiment_name = None
        assert parsed[0] == parsed[1]
    assert [script[:2] for script, _ in commands] == ["01", "02", "03"]
    assert len(set(names)) == 3
    assert f"`outputs/{names[0]}/final`" in README


# The last lines of the demo
(PRINTED,) = re.findall(r"^```text\n(.*?)```$", section("README.md", "Try it"), re.M | re.S)


def without_numbers(lines: list[str]) -> list[str]:
    return [re.sub(r"\d[\d,]*(\.\d+)?|in /.*(?=/)|in \.\.\..*(?=/)", "#", line) for line in lines]


def test_the_output_and_the_curves_of_the_first_page_are_recorded():
    recorded = DEMO_RUNS / "demo-single-gpu" / "output.txt"
    assert recorded.read_text().endswith(PRINTED)
    curves = load(REPOSITORY / "maintain" / "draw-losses.py").picture()
    assert curves == page("docs/losses.svg"), "python maintain/draw-losses.py"


def test_versions_on_the_first_page():
    pinned = dict(re.findall("^(.*)==(.*)$", page("constraints.txt"), re.MULTILINE))
    for name, package in {"PyTorch": "torch", "Transformers": "transformers"}.items():
        assert f"{name} {pinned[package].rpartition('.')[0]}" in README
    (oldest,) = re.findall(r"Python (\S+) or newer", README)
    assert f'requires-python = ">={oldest}"' in page("pyproject.toml")


def demo_of(script) -> list[str]:
    """The first commands of the docstring, as one gives them in the top folder."""
    docstring = script.read_text().split('"""')[1].replace("../../", "")
    commands = re.findall(r"^    (\S.*? --demo.*?)(?: +#.*)?$", docstring, re.MULTILINE)
    last = next(n for n, command in enumerate(commands) if " train-llm.py " in command)
    return [c.replace(" train-llm.py ", f" {shown(script)} ") for c in commands[: last + 1]]


@pytest.mark.parametrize("script", CHAPTERS, ids=lambda path: path.parent.name)
def test_the_page_begins_with_the_demo_of_the_script(script):
    commands = [c for c in commands_of([shown(script.with_name("README.md"))]) if "--demo" in c]
    demo = demo_of(script)
    assert [re.sub(" +#.*", "", command) for command in commands[: len(demo)]] == demo


def words_of(command: str, folder) -> list[str]:
    """Without the program. Not into outputs/, where somebody's demo may stand."""
    return shlex.split(command.split(" && ")[-1].replace("outputs/", f"{folder}/"))[1:]


# Without that of chapter 1, which is below, and that of chapter 20, whose package is apart
DEMOS = [s for s in CHAPTERS[1:] if FACTS[s.parent.name].get("needs") != ["torchao"]]


@pytest.fixture(scope="module")
def demo_of_chapter_3(tmp_path_factory):
    """Weights of its model, which are not trained."""
    folder = tmp_path_factory.mktemp("demo-fsdp") / "final"
    return save_weights(Path(shutil.copytree(TINY_LLAMA, folder)))


@pytest.mark.rest
@pytest.mark.parametrize("script", DEMOS, ids=lambda path: path.parent.name)
def test_the_demo_trains(tmp_path, demo_of_chapter_3, script):
    """From another folder, where the Hub cannot be reached, and not to the end."""
    *before, command = demo_of(script)
    options = torchrun.get_args_parser().parse_args(words_of(command, tmp_path))
    flags = [*options.training_script_args, "--save-dir", tmp_path, "--max-steps", 1]
    flags += ["--log-freq", 1, "--eval-freq", 0]
    more = {"cwd": tmp_path, "before": IMPORTABLE}
    if script == CHAPTER_10:
        run_tool(tmp_path, "prepare-data.py", *words_of(before[0], tmp_path)[1:], **more)
        flags += ["-d", tmp_path / "mds"]
    if script in (CHAPTER_17, CHAPTER_22):
        flags += ["-m", demo_of_chapter_3]
    job = Job(script, flags, tmp_path / "output", int(options.nproc_per_node), **more)
    assert job.wait() == 0, job.output
    assert "warning: " not in job.output.lower()
    folder = tmp_path / f"demo-{script.parent.name[3:]}"
    assert (folder / "final").exists()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert ["loss" in record for record in records] == [True]


@pytest.mark.rest
def test_demo_and_the_commands_after_it(tmp_path):
    (demo,) = demo_of(CHAPTER_1)
    flags = ["--save-dir", tmp_path, "--max-steps", 2, "--log-freq", 1]
    status, output = outcome(tmp_path, CHAPTER_1, *words_of(demo, tmp_path)[1:], *flags)
    assert status == 0, output
    assert "warning: " not in output.lower()
    assert without_numbers(output.splitlines()[-3:]) == without_numbers(PRINTED.splitlines())

    # With the imports
    generate = next(command for command in COMMANDS if "generate.py" in command)
    offline = {"env": os.environ | {"HF_HUB_OFFLINE": "1"}, "cwd": REPOSITORY}
    done = python(*words_of(generate, tmp_path), **offline)
    assert done.stderr == ""
    assert done.stdout.startswith("def ")


def test_lines_that_draw_the_losses(tmp_path, monkeypatch):
    (lines,) = re.findall(r"```python\n(.*?)```", page("docs/demos.md"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").symlink_to(shutil.copytree(DEMO_RUNS, tmp_path / "recorded"))
    exec(lines, {})
    assert (tmp_path / "outputs" / "demo.png").exists()


@pytest.fixture
def packages(request):
    """torchao stays out of the way of chapters that do not need it."""
    if any(name in request.node.name for name in FACTS if FACTS[name].get("needs") == ["torchao"]):
        request.getfixturevalue("torchao")


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.parent.name)
def test_flags_are_those_of_help(tmp_path, chapter):
    """A chapter has the flags of those that it continues, and may change their defaults.

    Its table is on the page of flags, or on its own.
    """
    common, *rest = re.split(r"Chapter (\d+) adds", page("docs/flags.md"))
    added = dict(zip(rest[::2], rest[1::2], strict=True))
    tables, name = "", chapter.parent.name
    while name:
        own = page(shown(SCRIPTS[name].with_name("README.md"))).partition(" adds flags")[2]
        tables = added.get(name[:2].lstrip("0"), own) + tables
        name = CONTINUES.get(name)
    rows = re.findall(r"^\| (`-[^|]+) \| ([^|]+) \| [^|]+ \|$", common + tables, re.M)
    table = {re.findall("`(--.*?)`", flags)[0]: default.strip("`") for flags, default in rows}
    run = Run(chapter, ["--help"], tmp_path / "help", env={"COLUMNS": "200"})
    assert run.wait() == 0
    options = re.sub(r"\s*\n {10,}", "  ", run.output)  # one option a line
    described = {}
    for line in re.findall("^  (-.*)", options, re.MULTILINE):
        flag = re.search(r"--[\w-]+", line)[0]
        default = re.search(r"\(default: (.*)\)$", line)
        described[flag] = default and default[1]
    del described["--help"]
    described.pop("--device", None)  # below the table: no other chapter has it
    if chapter == CHAPTER_14:
        del table["--from-scratch"]  # always
    if "def load_rows(" in chapter.read_text():  # no longer texts
        del table["--text-column"], table["--dataset-subset"]
    assert described.keys() == table.keys()
    for flag, default in described.items():
        # Some defaults depend on the devices: the page has words for them.
        if default and all(re.fullmatch(r"[\d.e-]+", text) for text in (default, table[flag])):
            assert table[flag] == default, flag


def anchors(markdown: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub("```.*?```", "", markdown, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "file",
    [
        *("README.md", *READMES, "more/09-hf-trainer/README.md", LAUNCH, *DOCS),
        *("CONTRIBUTING.md", "outputs/README.md", *FOLDERS, *RECORDS),
    ],
)
def test_links_lead_somewhere(file):
    """Also tables are whole: after a blank line, the second row is the line below the header."""
    path = REPOSITORY / file
    text = re.sub("```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert not re.search(r"\n\n\|.*\n(?!\| *:?-)", text)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if anchor and target.suffix == ".md":  # test_site.py opens the other ones
            assert anchor in anchors(target.read_text()), link


def test_which_chapter_has_a_row_for_each_chapter():
    pattern = r"^\| \[`(\d\d-[\w-]+)`\]\(\.\./(?:more/)?\1/README\.md\)"
    linked = re.findall(pattern, section(WHICH, "Which chapter"), re.MULTILINE)
    assert sorted(linked) == [*SCRIPTS]


def test_figures_lead_to_each_record():
    linked = re.findall(r"\]\((records/[\w-]+\.md)", page("benchmarks/results.md"))
    assert {f"benchmarks/{name}" for name in linked} == {*RECORDS} - {"benchmarks/results.md"}


def test_no_stub_is_left():
    """Of maintain/new-chapter.py."""
    files = [file for script in SCRIPTS.values() for file in script.parent.glob("*.*")]
    files += [*REPOSITORY.glob("maintain/damages/*.txt"), *map(REPOSITORY.joinpath, RECORDS)]
    assert [str(file) for file in files if "TODO" in file.read_text()] == []


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("readme", READMES)
def test_chapter_readme_commands(readme):
    text = (REPOSITORY / readme).read_text()
    script = (REPOSITORY / readme).with_name("train-llm.py")
    path = r"(?:more/)?\d\d-\S+/train-llm\.py"
    pattern = rf"^(?:\w+=\S+ )?(python|torchrun .*?) {path} (.*?)(?:  +#.*)?$"
    commands = re.findall(pattern, text, re.MULTILINE)
    assert len(commands) >= 2
    inline = re.findall(rf"`(python|torchrun [^`]*)\s{path}\s([^`]*)`", text)
    commands += [(launch.strip(), flags) for launch, flags in inline]
    for launch, flags in commands:
        assert_flags_are_understood(script, flags)
        if launch.startswith("torchrun"):
            torchrun.get_args_parser().parse_args([*shlex.split(launch)[1:], "train-llm.py"])


def test_launch_readme_commands():
    """As above. What run.sh makes of the variables is in tests/test_launch.py."""
    pattern = r"^.*launch/(?:run|slurm)\.sh (\d\d)\S* (.*)$"
    commands = re.findall(pattern, page(LAUNCH), re.MULTILINE)
    assert len(commands) == 12
    for chapter, flags in commands:
        assert_flags_are_understood(CHAPTERS_BY_NUMBER[chapter], flags)


def without_comments(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("# ")]


@pytest.mark.parametrize("name", CONTINUES)
def test_each_idea_is_explained_with_its_code(name):
    """In their order; a snippet begins with the first line of code below the marker."""
    file = SCRIPTS[name].with_name("README.md")
    script, marker = read(name), step_to(name).marker
    code = without_comments(script)
    headings = re.findall(r"^### (\d+)\. ", section(file, "The ideas"), re.MULTILINE)
    assert headings == re.findall(rf"# {marker} (\d+): ", script)
    for number in headings:
        explanation = section(file, f"{number}. ")
        snippet = re.search("```python\n(.*?)```", explanation, re.DOTALL)[1]
        stretches = [without_comments(part) for part in snippet.split("...\n")]
        (below,) = re.findall(rf"# {marker} {number}: .*\n((?s:.*))", script)
        assert stretches[0][0] == without_comments(below)[0], number
        for stretch in stretches:
            starts = range(len(code) - len(stretch) + 1)
            assert any(code[i : i + len(stretch)] == stretch for i in starts), stretch


def test_scripts_and_flags_in_the_texts_exist():
    """Records are left out: they say what was run in their time."""
    files = [*READMES, LAUNCH, *DOCS, "README.md", "outputs/README.md"]
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
