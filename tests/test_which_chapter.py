"""docs/which-chapter.md: its commands print the lines below them, and its answers are short."""

import os
import re
import shlex
import subprocess
import sys
from copy import deepcopy

import pytest
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, Run
from test_readme import MODELS, WHICH, page

TEXT = page(WHICH)
PRINTED = r"^```\n\.venv/bin/python (tools/\S+ [^\n]*)\n```\n\n```text\n(.*?)```$"
COMMANDS = re.findall(PRINTED, TEXT, re.MULTILINE | re.DOTALL)
SENT = re.findall(r"^(?:torchrun .*?|cd \S+ && python )(\d\d-\S+/)?train-llm\.py (.*)$", TEXT, re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The configs of the models, under their names, since the Hub is out of reach."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        config = deepcopy(config)
        config.max_position_embeddings = 4096 if name == "Llama-2-7B" else 131072
        on_the_hub = name.replace("2-7B", "2-7b-hf")
        config.save_pretrained(folder / "meta-llama" / on_the_hub)
    return folder


def run(command: str, folder) -> str:
    tool, *flags = shlex.split(command)
    flags = [flag.replace("meta-llama/", "./meta-llama/") for flag in flags]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    words = [sys.executable, REPOSITORY / tool, *flags]
    options = {"env": env, "cwd": folder, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(words, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_number_of_commands():
    assert len(COMMANDS) == 6


def check(command, expected, folder):
    output = run(command, folder)
    for line in expected.splitlines():
        assert line in output.splitlines(), output


def test_what_the_first_command_prints(folder):
    check(*COMMANDS[0], folder)


@pytest.mark.rest
@pytest.mark.parametrize("number", range(1, len(COMMANDS)))
def test_what_the_other_commands_print(folder, number):
    check(*COMMANDS[number], folder)


@pytest.mark.rest
def test_a_1b_on_one_node_and_on_two(folder):
    """The figures of the sentence below the first table."""
    command = "tools/estimate-scaling.py -m meta-llama/Llama-3.2-1B --devices {} -b 1 -s 8192"
    two = run(command.format("16") + " --link 0.125", folder)
    for method, seconds in (("PP", "17.2"), ("HSDP", "41.6")):
        (row,) = [line for line in two.splitlines() if line.startswith(f"| 2 | 16 | {method} ")]
        assert f"{float(row.split('|')[10]):.1f}" == seconds
        assert f"{seconds} s" in TEXT
    one = run(command.format("8"), folder)
    (row,) = [line for line in one.splitlines() if line.startswith("| 1 | 8 | DDP ")]
    assert f"{float(row.split('|')[10]):.2f} s" in TEXT


@pytest.mark.rest
def test_flags_of_the_command_lines(tmp_path):
    """Every flag is understood: all that is wrong is a flag added here."""
    sent = [(chapter, flags) for chapter, flags in SENT if chapter]
    assert len(sent) == 6
    for number, (chapter, flags) in enumerate(sent):
        script = CHAPTERS_BY_NUMBER[chapter[:2]]
        words = [*shlex.split(flags), "--log-freq", "none"]
        started = Run(script, words, tmp_path / str(number))
        assert started.wait() == 2
        assert "--log-freq" in started.output


def test_answers_have_at_most_150_words():
    answers, _, _ = TEXT.partition("\n## Which chapter\n")
    for answer in answers.split("\n## ")[1:]:
        words = re.sub("```.*?```", "", answer, flags=re.DOTALL).split()
        assert len(words) <= 150, (len(words), answer[:60])
