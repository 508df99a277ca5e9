"""launch/run.sh: what it starts, and a job on two nodes whose workers die."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from helpers.assertions import assert_one_sentence, exact
from helpers.programs import require
from helpers.runner import (
    CHAPTER_1,
    CHAPTER_2,
    CHAPTER_3,
    CHAPTER_10,
    CHAPTERS_BY_NUMBER,
    REPOSITORY,
)
from helpers.torchrun import ACTIVE, CLEAN, Launch
from torch.distributed import run as torchrun

RUN = REPOSITORY / "launch" / "run.sh"
TORCHRUN = REPOSITORY / "launch" / "torchrun.py"
CHAPTERS = [path.parent.name for path in CHAPTERS_BY_NUMBER.values()]


@pytest.mark.rest
def test_shellcheck_finds_nothing():
    require("shellcheck")
    scripts = [*(REPOSITORY / "launch").glob("*.sh"), REPOSITORY / ".ci" / "run"]
    assert len(scripts) == 3
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Counts three GPUs, and prints all that it is asked to start. preflight may find an error.
STUB = """#!/bin/sh
if [ "$1" = -c ]; then echo 3; exit; fi
case "$*" in *preflight.py*) echo "$@" > preflight.txt; exit "${FOUND-0}" ;; esac
echo "python of the environment" "store ${TORCH_DISABLE_SHARE_RDZV_TCP_STORE-}" "folder $PWD"
for argument in "$@"; do echo "$argument"; done
"""


@pytest.fixture
def start(tmp_path):
    """Calls run.sh from another folder; returns what it would have started, line by line."""
    stub = tmp_path / "venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(STUB)
    stub.chmod(0o755)

    def call(*arguments, status=0, **variables):
        active = {"VIRTUAL_ENV": "yes", "PATH": f"{stub.parent}:{os.environ['PATH']}"}
        options = {"env": CLEAN | active | variables, "cwd": tmp_path, "text": True}
        done = subprocess.run([RUN, *arguments], capture_output=True, timeout=30, **options)
        assert done.returncode == status, done.stderr
        return done.stderr if status else done.stdout.splitlines()

    return call


def understood(started: list[str]):
    """The options as torchrun reads them, the script, and its flags."""
    assert started[1] == str(TORCHRUN)
    options = torchrun.get_args_parser().parse_args(started[2:])
    return options, options.training_script, options.training_script_args


@pytest.mark.parametrize("name", ["02", "02-ddp", "02-ddp/", "10", "more/10-mds-shards"])
def test_one_node_needs_no_variable(start, tmp_path, name):
    """Flags arrive as they are, and file names in them are still relative to the caller."""
    flags = ["--demo", "-d", "a file.txt", "", "*", "$HOME"]
    started = start(name, *flags)
    assert started[0] == f"python of the environment store 1 folder {tmp_path}"
    options, script, arguments = understood(started)
    chapter = CHAPTER_10 if "10" in name else CHAPTER_2
    assert (script, arguments) == (str(chapter), flags)
    assert options.standalone
    assert options.local_addr == "localhost"  # the host's name may have no address
    assert (options.nproc_per_node, options.max_restarts) == ("3", 0)


ONE = {"NPROC_PER_NODE": "5", "MAX_RESTARTS": "7", "MASTER_ADDR": "node-0"}
TWO = ONE | {"NNODES": "2", "PREFLIGHT": "0"}
AS_TWO = {"standalone": False, "nnodes": "2", "rdzv_backend": "c10d", "rdzv_id": "03-fsdp"}
AS_TWO |= {"rdzv_endpoint": "node-0:29400", "rdzv_conf": "", "local_addr": None}
SOME = ONE | {"NNODES": "1:2", "MASTER_PORT": "1234", "RDZV_ID": "a job", "LOCAL_ADDR": "ib0"}
AS_SOME = {"nnodes": "1:2", "rdzv_endpoint": "node-0:1234", "rdzv_id": "a job", "local_addr": "ib0"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        # As of several nodes, but there is one
        (ONE, {"standalone": True, "nproc_per_node": "5", "max_restarts": 7}),
        (TWO, AS_TWO),
        (SOME | {"NODE_RANK": "0"}, AS_SOME | {"rdzv_conf": "is_host=true"}),
        (SOME | {"NODE_RANK": "1"}, AS_SOME | {"rdzv_conf": "is_host=false"}),
    ],
)
def test_variables(start, variables, expected):
    options, script, _ = understood(start("03", **variables))
    assert script == str(CHAPTER_3)
    assert vars(options) == vars(options) | expected


def test_nodes_are_compared_first(start, tmp_path):
    """By one process on each node. An error ends the job, before the chapter starts."""
    look = tmp_path / "preflight.txt"
    several = {"NNODES": "2", "MASTER_ADDR": "node-0"}
    for variables in ({}, several | {"PREFLIGHT": "0"}, several | {"NNODES": "1:2"}):
        start("03", "-e", "x", **variables)
        assert not look.exists()
    assert understood(start("03", "-e", "x", **several))[1] == str(CHAPTER_3)
    preflight = str(REPOSITORY / "tools" / "preflight.py")
    options, script, flags = understood(["python", *look.read_text().split()])
    assert (script, flags) == (preflight, [str(CHAPTER_3.parent), "-e", "x"])
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "1", 0)
    assert_one_sentence(start("03", status=2, FOUND="1", **several), "PREFLIGHT=0")


def test_a_folder_with_a_script_is_a_chapter(start, tmp_path):
    script = tmp_path / "joined" / "train-llm.py"
    script.parent.mkdir()
    script.touch()
    assert understood(start("joined", "-e", "x"))[1:] == (str(script), ["-e", "x"])


def test_the_chapter_for_one_device_is_started_by_python(start):
    assert start("01", "--demo")[1:] == [str(CHAPTER_1), "--demo"]


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (["2"], {}, f"there is no chapter 2: take one of {' '.join(CHAPTERS)}"),
        (["02"], {"NNODES": "2"}, "NNODES=2 needs MASTER_ADDR"),
        (["01"], {"NPROC_PER_NODE": "2"}, "chapter 01 trains on one device"),
        (["02"], {"PET_NNODES": "2"}, "torchrun reads PET_NNODES: unset"),
    ],
)
def test_mistakes_end_in_one_sentence(start, arguments, variables, sentence):
    assert_one_sentence(start(*arguments, status=2, **variables), sentence)


# How rank 0 ends, and the end of what torchrun prints. Rank 1 waits for rank 0.
WAITS = 'import os, signal, sys, time\nif os.environ["RANK"] == "1":\n    time.sleep(60)\n'
ENDS = {
    """print(" 3%|# | 1/30 [00:01<00:29, 1.0it/s]", end="", file=sys.stderr)
sys.exit("error: there is no file 学习.txt:\\n  check the path")
""": "=====\n\ntorchrun ended with exit status 1 after:\n"
    "error: there is no file 学习.txt:\n  check the path\n",
    "os.kill(os.getpid(), signal.SIGKILL)": r"error: rank 0 was killed \(SIGKILL\).*\n",
}


@pytest.mark.rest
@pytest.mark.parametrize("end", ENDS, ids=["a mistake", "killed"])
def test_the_cause_comes_last(tmp_path, end):
    """With torchrun's report above it."""
    script = tmp_path / "train-llm.py"
    script.write_text(WAITS + end)
    command = [sys.executable, TORCHRUN, "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, env=CLEAN, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert "Root Cause" in done.stderr
    assert re.search(ENDS[end] + r"\Z", done.stderr), done.stderr


@pytest.mark.rest
def test_one_node(trainer):
    """In a folder with a space."""
    flags = ["--max-steps", 3, "--eval-freq", 0]
    env = CLEAN | ACTIVE | {"NPROC_PER_NODE": "1"}
    one = Launch(trainer, "one.txt", [RUN, "02"], *flags, name="a run", env=env)
    assert one.wait(120) == 0, one.output
    undisturbed = trainer(*flags, name="undisturbed", processes=1)
    assert len(one.records) == 3
    assert exact(one.records) == exact(undisturbed.records)


def test_commands_in_the_scripts_are_understood(start):
    """Those at the top of run.sh, except that its first line names no chapter."""
    commands = [line[4:] for line in RUN.read_text().splitlines() if " launch/run.sh 0" in line]
    assert len(commands) == 4
    for command in commands:
        words = shlex.split(command, comments=True)
        begin = words.index("launch/run.sh")
        variables = dict(word.split("=") for word in words[:begin])
        options, _, flags = understood(start(*words[begin + 1 :], **variables))
        assert flags in (["--demo"], ["-e", "alpaca-ddp"])
        assert options.nnodes == variables.get("NNODES", "1:1")
