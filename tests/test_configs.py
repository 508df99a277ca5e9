"""--config: a YAML file of flags, which every check sees; and the files in configs/."""

import re
import shlex

import pytest
import yaml
from conftest import assert_one_sentence
from runner import (
    CHAPTER_1,
    CHAPTER_2,
    CHAPTER_3,
    CHAPTER_4,
    CHAPTER_5,
    CHAPTER_6,
    CHAPTER_7,
    CHAPTER_8,
    CHAPTER_10,
    REPOSITORY,
    Run,
)

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))

# In place of `main`: prints the flags that a chapter has understood.
PRINT = """
import runpy, sys
sys.argv = sys.argv[1:]
flags = runpy.run_path(sys.argv[0])["parse_args"]()
for name, value in vars(flags).items():
    print(f"{name}={value}")
"""


@pytest.fixture
def understood(tmp_path):
    script = tmp_path / "print.py"
    script.write_text(PRINT)

    def run(*flags, chapter=CHAPTER_1) -> dict[str, str]:
        run = Run(script, [chapter, *flags], tmp_path / "output")
        assert run.wait() == 0, run.output
        lines = run.output.splitlines()
        (tmp_path / "output").unlink()
        return dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))

    return run


CHAPTERS = [CHAPTER_1, CHAPTER_2, CHAPTER_3, CHAPTER_4]
CHAPTERS += [CHAPTER_5, CHAPTER_6, CHAPTER_7, CHAPTER_8, CHAPTER_10]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda p: p.parent.name)
def test_every_config_is_understood_by_every_chapter(understood, chapter):
    assert len(CONFIGS) >= 5
    for config in CONFIGS:
        keys = yaml.safe_load(config.read_text())
        # A stream does not know how long an epoch is
        needs_steps = chapter == CHAPTER_4 and "max-steps" not in keys
        length = ["--max-steps", 9] if needs_steps else []
        flags = understood("--config", config, *length, chapter=chapter)
        for key, value in keys.items():
            read = flags[key.replace("-", "_")]
            assert read == str(value) or float(read) == float(value), (config.name, key)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_commands_in_the_comments(tmp_path, config):
    """Each file names a command that uses it; all that is wrong with it is a flag added here."""
    commands = re.findall(
        r"^#     (?:python|torchrun .*) (0\S+) (--config .*)$", config.read_text(), re.M
    )
    assert len(commands) == 1
    for script, flags in commands:
        assert f"configs/{config.name}" in flags
        options = {"cwd": REPOSITORY}
        flags = [*shlex.split(flags), "--log-freq", "none"]
        run = Run(REPOSITORY / script, flags, tmp_path / "output", **options)
        assert run.wait() == 2
        assert_one_sentence(run.output, "--log-freq")


def test_natural_yaml(understood, tmp_path):
    """A switch that is false, and a list for a flag with several values."""
    config = tmp_path / "flags.yaml"
    config.write_text("compile: false\nfrom-scratch: false\nactivation-checkpointing: false\n")
    flags = understood("--config", config, "--demo")
    for name in ("compile", "from_scratch", "activation_checkpointing"):
        assert flags[name] == "False"
    config.write_text("layers-per-stage: [2, 2]\ncpu-offload: false\ndemo: false\n")
    flags = understood("--config", config, chapter=CHAPTER_7)
    assert flags["layers_per_stage"] == "[2, 2]"
    assert flags["cpu_offload"] == flags["demo"] == "False"


def test_precedence(understood, tmp_path):
    """The command line, then the file, then --demo, then the default."""
    config = tmp_path / "flags.yaml"
    config.write_text("lr: 6e-4\nbatch-size: 2\nno-from-scratch: true\nweight-decay: 0\n")
    flags = understood("--config", config, "--demo", "-b", 3)
    assert flags["batch_size"] == "3"  # not 2, 8 (demo) or 8
    assert float(flags["lr"]) == 6e-4  # which PyYAML reads as a text; not 2e-3 (demo) or 3e-5
    assert float(flags["weight_decay"]) == 0
    assert flags["from_scratch"] == "False"
    assert flags["seq_length"] == "256"  # of the demo
    assert flags["ckpt_freq"] == "200"
    assert flags["log_freq"] == "10"
    config.write_text("demo: true\n")
    assert understood("--config", config)["seq_length"] == "256"
