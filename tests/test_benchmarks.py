"""The benchmarks run, and chapter 1 and the Trainer reach the same losses there."""

import re
import subprocess
import sys

from runner import REPOSITORY


def run(script, *arguments) -> str:
    command = [sys.executable, REPOSITORY / "benchmarks" / script, *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chapter_1_computes_what_the_trainer_computes():
    """The benchmark itself ends with an error where the losses differ by more than 0.1 %."""
    output = run("single-gpu.py", "--rounds", 1, "--warmup", 3, "--steps", 3, "-b", 2, "-s", 64)
    rows = re.findall(r"^\| (transformers.Trainer|chapter 1, eager) \| [\d,]+ \|", output, re.M)
    assert rows == ["transformers.Trainer", "chapter 1, eager"]


def test_data_path():
    output = run("data-path.py", "--tokens", 500_000, "--rounds", 1)
    assert len(re.findall(r"^\| (packing|a batch|both).*\|$", output, re.M)) == 3


def test_chapters_2_and_3_against_chapter_1():
    """Ends with an error where the losses differ by more than 0.1 %."""
    work = ["--processes", 2, "--flags", f"-s 64 -d {REPOSITORY}/README.md --num-epochs 9"]
    output = run("chapters.py", "--rounds", 1, "--warmup", 5, "--steps", 5, *work)
    rows = re.findall(r"^\| (chapter [^|]+) \| [\d,]+ \|", output, re.M)
    assert rows == ["chapter 1", "chapter 2, 2 processes", "chapter 3, 2 processes"]


def test_checkpoints():
    output = run("checkpoints.py", "--shape", "tiny", "--rounds", 1, "--saves", 1, "--steps", 2)
    rows = re.findall(r"^\| (chapter \d)[^|]+ \| -?[\d.]+ \|", output, re.M)
    assert rows == ["chapter 1", "chapter 3", "chapter 3"]
