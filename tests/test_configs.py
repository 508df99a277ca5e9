"""--config: a YAML file of flags, and the files in launch/configs/."""

import re

import pytest
import yaml
from helpers.pages import assert_flags_are_understood
from helpers.runner import CHAPTER_1, CHAPTER_4, REPOSITORY, SCRIPTS, Run

CONFIGS = sorted((REPOSITORY / "launch" / "configs").glob("*.yaml"))


@pytest.fixture
def understood(tmp_path):
    def run(*flags, chapter=CHAPTER_1) -> dict[str, str]:
        run = Run(SCRIPTS / "print_flags.py", [chapter, *flags], tmp_path / "output")
        assert run.wait() == 0, run.output
        lines = run.output.splitlines()
        (tmp_path / "output").unlink()
        return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))

    return run


@pytest.mark.parametrize("chapter", [CHAPTER_1, CHAPTER_4], ids=lambda path: path.parent.name)
def test_every_config_is_understood(understood, chapter):
    """Chapter 4 needs a number of steps, since a stream does not know how long an epoch is."""
    assert len(CONFIGS) >= 5
    for config in CONFIGS:
        keys = yaml.safe_load(config.read_text())
        length = [] if "max_steps" in keys else ["--max-steps", 9]
        flags = understood("--config", config, *length, chapter=chapter)
        for key, value in keys.items():
            read = flags[key]
            assert read == str(value) or float(read) == float(value), (config.name, key)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_commands_in_the_comments(config):
    """Each file names a command that uses it."""
    pattern = r"^#     (?:python|torchrun .*) (\S+) (--config .*)$"
    ((script, flags),) = re.findall(pattern, config.read_text(), re.MULTILINE)
    assert f"launch/configs/{config.name}" in flags
    assert_flags_are_understood(REPOSITORY / script, flags)


def test_precedence(understood, tmp_path):
    """The command line, then the file, then --demo, then the default."""
    config = tmp_path / "runs[v2]" / "flags*.yaml"  # a name, and no pattern
    config.parent.mkdir()
    config.write_text("lr: 6e-4\nbatch_size: 2\nfrom_scratch: false\nweight_decay: 0\n")
    flags = understood("--config", config, "--demo", "-b", 3)
    assert flags["batch_size"] == "3"  # not 2, 8 (demo) or 8
    assert float(flags["lr"]) == 6e-4  # which PyYAML reads as a text; not 2e-3 (demo) or 3e-5
    assert float(flags["weight_decay"]) == 0
    assert flags["from_scratch"] == "False"
    assert flags["seq_length"] == "256"  # of the demo
    assert flags["ckpt_freq"] == "200"
    assert flags["log_freq"] == "10"
