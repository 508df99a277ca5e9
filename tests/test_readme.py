"""The READMEs say what is true: their commands run, their table of flags is that of --help."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import assert_one_sentence, assert_same_losses
from runner import CHAPTER_1, CHAPTER_2, CHAPTER_3, REPOSITORY, Run
from test_chapters import STEPS, changed_code_lines
from torch.distributed import run as torchrun
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

README = (REPOSITORY / "README.md").read_text()
COMMANDS = [
    line for block in re.findall("```\n(.*?)```", README, re.DOTALL) for line in block.splitlines()
]


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


def test_demo_and_generate_commands(tmp_path):
    """From another folder, in an environment where the Hub cannot be reached."""
    demo, *others = [c.split(" && ")[-1] for c in COMMANDS if c.endswith("--demo")]
    generate = next(c for c in COMMANDS if "generate.py" in c)
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = here(demo.replace("01-single-gpu", f"{REPOSITORY}/01-single-gpu"))
    # Not into outputs/, where somebody's demo may stand
    command += ["--save-dir", str(tmp_path)]
    run = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    assert "warning" not in run.stderr.lower()
    folder = tmp_path / "demo-single-gpu"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert records[-1]["eval/loss"] < 4.7

    # The others have the same losses. 20 steps show it; the learning rate rises for 40.
    assert len(others) == 2
    for chapter, demo in zip(("02-ddp", "03-fsdp"), others, strict=True):
        command = here(demo.replace(chapter, f"{REPOSITORY}/{chapter}"))
        command += ["--save-dir", str(tmp_path), "--max-steps", "20"]
        run = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900
        )
        assert run.returncode == 0, run.stderr
        file = tmp_path / f"demo-{chapter[3:]}" / "metrics.jsonl"
        for one, two in zip(records[:2], map(json.loads, file.open()), strict=False):
            assert one["step"] == two["step"]
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)

    command = here(generate.replace("outputs/", f"{tmp_path}/"))
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("def ")
    assert len(run.stdout) > 200
    assert "self" in run.stdout
    assert run.stderr == ""


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


@pytest.mark.parametrize("file", ["README.md", *READMES, "outputs/README.md"])
def test_links_lead_somewhere(file):
    path = REPOSITORY / file
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize(("readme", "count"), [*zip(READMES, (4, 5, 3), strict=True)])
def test_chapter_readme_commands(tmp_path, readme, count):
    """Every flag and value is understood: all that is wrong is a flag added here."""
    text = (REPOSITORY / readme).read_text()
    script = (REPOSITORY / readme).with_name("train-llm.py")
    pattern = r"^(?:\w+=\S+ )?(python|torchrun .*?) ?train-llm.py (.*?)(?:  +#.*)?$"
    commands = re.findall(pattern, text, re.MULTILINE)
    assert len(commands) == count
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


LLAMAS = {
    "Llama-3.2-1B": (2048, 8192, 16, 32, {"head_dim": 64, "tie_word_embeddings": True}),
    "Llama-3.1-8B": (4096, 14336, 32, 32, {}),
    "Llama-3.1-70B": (8192, 28672, 80, 64, {}),
}


def test_memory_table_of_chapter_3():
    """Its arithmetic, from the shapes."""
    text = (REPOSITORY / "03-fsdp" / "README.md").read_text()
    for name, (hidden, intermediate, layers, heads, others) in LLAMAS.items():
        config = AutoConfig.for_model(
            "llama",
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            vocab_size=128256,
            **others,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        sizes = [
            sum(p.numel() for p in module.parameters())
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ]
        whole = model.num_parameters()
        states = [16 * whole / devices / 1e9 for devices in (1, 1, 2, 4, 8)]
        gathered = 2 * (whole - sum(sizes) + 2 * sizes[0]) / 1e9
        row = " | ".join(f"{cell:.1f}" for cell in [*states, gathered])
        assert f"| {name} | {whole / 1e9:.3g}e9 | {row} |" in text


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
