"""The two tiers of tests, and the fixtures that several files use."""

import functools
import importlib.util
import os
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.register_assert_rewrite("helpers")

import helpers.environment
from helpers.data import write_documents, write_rows
from helpers.models import (
    DEMO_TEMPLATE,
    LLAMA,
    MIXTURES,
    TINY_LLAMA,
    UNEVEN_MODELS,
    save_weights,
    write_model,
    write_weights,
)
from helpers.programs import require
from helpers.runner import CHAPTER_1, REPOSITORY, load, run_tool
from helpers.slurm import Slurm
from helpers.trainer import Trainer
from transformers import AutoTokenizer

# The longest ones, in this order, some of it without computing: one of them at the end leaves a
# core idle.
LONGEST = (
    "test_signal_requeue_and_scancel",
    "test_time_limit",
    "test_killed_workers_come_back",
    "test_an_elastic_job",
    "test_kinds_of_hangs",
    "test_a_sample_trains_as_it_should",
    "test_rows",
    "test_compile_changes_nothing_but_speed",
)


def pytest_addoption(parser):
    group = parser.getgroup("tiers", "two tiers of tests").addoption
    group("--rest", action="store_true", help="what the quick tier leaves out")
    group("--all", action="store_true", help="both tiers")


def pytest_itemcollected(item):
    """`-k qwen3` selects the jobs of test_matrix.py that have such a row."""
    parameters = getattr(item, "callspec", SimpleNamespace(params={})).params
    item.extra_keyword_matches |= {str(row) for row in parameters.get("rows", ())}


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: [not item.name.startswith(name) for name in LONGEST])
    if not config.getoption("--all"):
        wanted = config.getoption("--rest")
        others = [item for item in items if bool(item.get_closest_marker("rest")) != wanted]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", **LLAMA)


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory) -> Path:
    """The same model with weights on the disk, so that a plain loop can begin with them."""
    return save_weights(write_model(tmp_path_factory.mktemp("models") / "pretrained", **LLAMA))


@pytest.fixture(scope="session")
def dropout_model(tmp_path_factory):
    """A model whose forward pass draws random numbers."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 0}
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    return write_model(folder, model_type="gpt2", resid_pdrop=0.1, attn_pdrop=0.1, **shape)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """With a second loss, of its router."""
    auxiliary = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    return write_weights(folder, "mixtral", MIXTURES, **auxiliary)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """Of four layers, because two stages per rank need four stages."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    return write_weights(folder, "llama", UNEVEN_MODELS, num_hidden_layers=4, pad_token_id=None)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY_LLAMA)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Documents of 1 to 60 words, with letters that take several tokens."""
    chance = random.Random(0)
    words = ["def", "return", "self", "lambda", "the", "loss", "gradient", "Größe", "学习", "x"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 60))) for _ in range(400)]


@pytest.fixture(scope="session")
def dataset(texts, tmp_path_factory) -> Path:
    return write_documents(tmp_path_factory.mktemp("data") / "text.jsonl", texts)


@pytest.fixture(scope="session")
def conversations(texts, tmp_path_factory) -> Path:
    """Of one to four turns, some with a system message, and answers of 1 to 60 words."""
    chance = random.Random(0)
    rows = []
    for _ in range(300):
        messages = [{"role": "system", "content": "x"}] * chance.randint(0, 1)
        for _ in range(chance.randint(1, 4)):
            words = chance.choice(texts).split()[: chance.choice([1, 5, 20])]
            messages += [{"role": "user", "content": chance.choice(texts)[:20]}]
            messages += [{"role": "assistant", "content": " ".join(words)}]
        rows.append({"messages": messages})
    return write_rows(tmp_path_factory.mktemp("chat") / "chat.jsonl", rows)


@pytest.fixture(scope="session")
def rows_of_conversations(conversations, tmp_path_factory):
    """Their rows of 64 tokens, as tools/prepare-data.py makes them with these flags."""

    @functools.cache
    def prepared(*flags) -> Path:
        output = tmp_path_factory.mktemp("rows") / "rows"
        more = ["-m", TINY_LLAMA, "-s", 64, "--no-shuffle", "-o", output, *flags]
        more += [] if "--chat-template" in flags else ["--chat-template", DEMO_TEMPLATE]
        command = [conversations, "--as", "messages", "--rows", *more]
        run_tool(output.parent, "prepare-data.py", *command)
        return output

    return prepared


@pytest.fixture
def prepare(tmp_path, monkeypatch, capsys):
    """Runs tools/prepare-data.py in this process and in the folder of the test: its output."""
    tool = load(REPOSITORY / "tools" / "prepare-data.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*flags, status=0) -> str:
        monkeypatch.setattr("sys.argv", ["prepare-data.py", "-o", "out", *map(str, flags)])
        capsys.readouterr()
        code = 0
        try:
            tool.main()
        except SystemExit as end:
            code = end.code or 0
        output = capsys.readouterr().out + (code if isinstance(code, str) else "")
        assert (1 if isinstance(code, str) else int(code)) == status, output
        return output

    return run


@pytest.fixture(scope="module")
def torchao():
    """The package of chapter 20. It is apart, because beside it all scripts print its warnings."""
    folder = Path(sys.prefix) / "float8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        if not importlib.util.find_spec("torchao"):
            missing = pytest.fail if os.environ.get("CI") else pytest.skip
            missing(f"no torchao: pip install -c constraints.txt --no-deps -t {folder} torchao")
        yield


@pytest.fixture
def trainer(tmp_path, model, dataset) -> Trainer:
    return Trainer(tmp_path, model, dataset)


@pytest.fixture
def train(trainer, request) -> Trainer:
    """Runs the chapter of this file, on two ranks if a call does not say otherwise."""
    return trainer.of(request.module.CHAPTER)


@pytest.fixture(scope="session")
def chapter_1():
    """Chapter 1 as a module, for tests of its functions."""
    return load(CHAPTER_1)


@pytest.fixture
def slurm(tmp_path):
    require("munged", "slurmctld", "slurmd", "sbatch")
    work = tmp_path / "a folder"
    work.mkdir()
    # Not in `tmp_path`: Slurm's sockets need short names, of at most 108 characters.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        slurm = Slurm(Path(folder), work)
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.stop()
