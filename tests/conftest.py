"""Small models, small text, and `train`, which runs a chapter and reads what it wrote."""

import functools
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

# Before anything imports the libraries, which read these once: caches of our own, no account, and
# the CPU alone, where fp32 losses can be compared and one machine has any number of devices.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["OMP_NUM_THREADS"] = "1"  # several tests run at a time; more threads than cores spin
os.environ["GOMP_SPINCOUNT"] = "10000"  # as in the chapters; their own line comes too late here
_CACHE = tempfile.TemporaryDirectory(prefix="distributed-training-demo-")
os.environ["HF_HOME"] = _CACHE.name
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens: tests need no network
os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "false"  # so no file of the disk makes a client
os.environ["COMET_AUTO_LOG_DISABLE"] = "true"  # only some tests wait a second for its archive
os.environ["COMET_AUTO_LOG_ENV_DETAILS"] = "false"  # a list of all packages, in seconds
os.environ["COMET_CONFIG"] = os.path.join(_CACHE.name, "comet.config")
for name in ("COMET_API_KEY", "HF_TOKEN", "HF_HUB_OFFLINE"):
    os.environ.pop(name, None)

import torch  # noqa: E402
from runner import CHAPTER_1, CHAPTER_2, REPOSITORY, Job, Run, load, run_tool  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

TINY_LLAMA = REPOSITORY / "models" / "tiny-llama"
DEMO_TEMPLATE = REPOSITORY / "models" / "tiny-chat" / "template.jinja"
# mosaicml-streaming imports torchvision for images
NO_TORCHVISION = importlib.util.find_spec("torchvision") is None
STAND_IN = REPOSITORY / "tests" / "empty-torchvision"


def write_model(folder: Path, **config) -> Path:
    """A folder with the tiny tokenizer and this config, without weights."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_LLAMA / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2048}))
    return folder


def save_weights(folder: Path, dtype=torch.float32, **options) -> Path:
    """Adds random weights to a model's folder."""
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, **options)
    return folder


def save_uneven_weights(folder: Path) -> Path:
    """As `save_weights`, but no weight of a norm is one, and no bias is zero."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def write_documents(file: Path, documents, column="text") -> Path:
    """A JSON Lines file with a row for each document."""
    return write_rows(file, [{column: document} for document in documents])


def write_rows(file: Path, rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


# For `before`: torch.compile with the same graphs, without the C++ code of Inductor, which takes a
# minute and more. test_training.py compiles with Inductor.
WITHOUT_INDUCTOR = """
import functools
import torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""

# For the end of `before`: each rank calls `tell` before it leaves the process group.
AT_END = """
import torch.distributed

def tell_and_leave(group=None):
    if group is None:  # all groups
        tell()
    leave(group)

leave = torch.distributed.destroy_process_group
torch.distributed.destroy_process_group = tell_and_leave
"""


# For `before`: AdamW's step with this number does something else first, on one rank.
IN_STEP = """
import os, signal, torch

def step(*arguments, **options):
    steps.append(None)
    if len(steps) == NUMBER and os.environ.get("RANK", "0") == "SOME_RANK":
        ACTION
    return original_step(*arguments, **options)

steps = []
original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""


def in_step(number: int, action: str, rank: int = 1) -> str:
    code = IN_STEP.replace("NUMBER", str(number)).replace("SOME_RANK", str(rank))
    return code.replace("ACTION", action)


# The longest ones, in this order, some of it without computing: one of them at the end leaves a
# core idle.
LONGEST = (
    "test_demo_and_the_commands",
    "test_equal_to_chapter_1",
    "test_signal_requeue_and_scancel",
    "test_time_limit",
    "test_killed_workers_come_back",
    "test_bytes_between_two_nodes",
    "test_an_elastic_job",
    "test_kinds_of_hangs",
)


def pytest_addoption(parser):
    group = parser.getgroup("tiers", "two tiers of tests").addoption
    group("--rest", action="store_true", help="what the quick tier leaves out")
    group("--all", action="store_true", help="both tiers")


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


def replaced(text: str, changes: dict) -> str:
    """The text with other pieces. Each of the old ones is there once."""
    for piece, instead in changes.items():
        assert text.count(piece) == 1, piece
        text = text.replace(piece, instead)
    return text


def damaged(chapter: Path, folder: Path, damages: dict) -> Path:
    """A copy of a chapter with other lines."""
    script = folder / chapter.parent.name / chapter.name
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(replaced(chapter.read_text(), damages))
    return script


def assert_one_sentence(output: str, part: str) -> None:
    """The output has a single error, on one line, and that line has `part` in it."""
    assert "Traceback" not in output, output
    errors = re.findall("^(?:[a-z-]+.py: )?error: .*", output, re.MULTILINE)
    assert len(errors) == 1, output
    assert part in errors[0], output


# Debian's package of each program that some tests need
PACKAGES = {"shellcheck": "shellcheck", "munged": "munge"}
PACKAGES |= dict.fromkeys(("slurmctld", "slurmd", "sbatch"), "slurm-wlm")


def require(*programs: str) -> None:
    """Skips a test where a program is missing. In CI, which installs them all, it fails."""
    path = f"{os.environ['PATH']}:/usr/sbin"  # where daemons are, which not every PATH has
    for program in programs:
        if not shutil.which(program, path=path):
            missing = pytest.fail if os.environ.get("CI") else pytest.skip
            missing(f"no {program}: apt install {PACKAGES[program]}")


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


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt install chromium")


@contextmanager
def browser_page(address: str, below: str = ""):
    """The page in a browser. It asks only for what is below, and there is no error at the end."""
    from playwright.sync_api import sync_playwright

    complaints, requests = [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1800, "height": 1000})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        yield page
        browser.close()
    assert complaints == []
    assert [url for url in requests if not url.startswith((below or address, "data:"))] == []


NOT_EXACT = ("tokens_per_second", "time/", "memory/")


def exact(records: list[dict]) -> list[dict]:
    """The records without what depends on the clock and the machine."""
    return [{k: v for k, v in r.items() if not k.startswith(NOT_EXACT)} for r in records]


def take_over(origin, trainer, name: str, step: int) -> Path:
    """A run's folder as it was after this step, in any format, with the records of all steps."""
    folder = trainer.folder / name
    for checkpoint in origin.folder.glob(f"**/step-{step:08d}"):
        shutil.copytree(checkpoint, folder / checkpoint.relative_to(origin.folder))
    shutil.copy(origin.folder / "metrics.jsonl", folder)
    return folder


def final_tensors(run) -> dict:
    files = run.folder.glob("final/*.safetensors")  # chapter 21 writes several
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_model(a, b) -> None:
    a, b = final_tensors(a), final_tensors(b)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def resume(run, trainer, step: int, *flags, name="resumed", again=None, near=0, **options):
    """Begins the run again at this step. It repeats the rest to the last bit.

    `near`: on other ranks, so many logged losses and norms are equal but for rounding.
    """
    take_over(run, trainer, name, step)
    resumed = (again or trainer)(*flags, name=name, **options)
    assert f"Continuing from {resumed.folder}" in resumed.output
    if near:
        assert_same_losses(run, resumed, near, grad_norm=3e-5)
    else:
        assert exact(resumed.records) == exact(run.records)
        assert_same_model(resumed, run)
    return resumed


@contextmanager
def weights_away(folder: Path):
    """The weights of this model cannot be read meanwhile."""
    file, elsewhere = folder / "model.safetensors", folder / "elsewhere"
    file.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(file)


def assert_opens(run, reference=None) -> None:
    """Transformers opens `final/`: in fp32, in bf16, and from a copy that is stored in bf16."""

    def opened(folder, dtype):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
        assert not any(report.values()), report  # no tensor is missing or left over
        with torch.no_grad():
            return model, model(torch.arange(32)[None]).logits

    final, copy = run.folder / "final", run.folder / "stored-in-bf16"
    model, logits = opened(final, "auto")
    assert model.dtype == logits.dtype == torch.float32
    if reference:
        expected = opened(reference.folder / "final", "auto")[1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    in_bf16, logits_in_bf16 = opened(final, torch.bfloat16)
    error = (logits_in_bf16.float() - logits).norm() / logits.norm()
    assert 0 < error < 0.03
    in_bf16.save_pretrained(copy)
    stored, again = opened(copy, "auto")
    assert stored.dtype == torch.bfloat16
    assert torch.equal(again, logits_in_bf16)


def assert_same_losses(a, b, logged_steps: int, grad_norm: float = 1e-5) -> None:
    """Equal but for the order in which fp32 numbers are added up."""
    for name, tolerance in (("loss", 1e-5), ("grad_norm", grad_norm), ("eval/loss", 1e-5)):
        assert b.column(name) == pytest.approx(a.column(name), rel=tolerance), name
    for name in ("step", "epoch", "learning_rate"):
        assert b.column(name) == a.column(name), name
    assert len(a.column("loss")) == logged_steps


def kept_bytes(model, ids) -> int:
    """What autograd keeps for the backward pass: each storage once, but parameters and buffers."""
    own = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers(), ids]}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The result holds the graph; with checkpointing, also what is to be computed again
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in own)


class Folder:
    """What a run has written into its folder."""

    def __init__(self, folder: Path, output: str = ""):
        self.folder, self.output = folder, output

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]

    def column(self, name: str) -> list[float]:
        return [record[name] for record in self.records if name in record]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("step-*"))


class Result(Folder):
    def __init__(self, run: Run | Job, folder: Path, status: int):
        super().__init__(folder, run.output)
        self.run, self.status = run, status


class Trainer:
    """`trainer(...)` runs a chapter to its end; `trainer.start(...)` lets it run.

    That is chapter 1, or with `processes` chapter 2 on so many ranks, without torchrun.
    """

    def __init__(self, folder: Path, model: Path, dataset: Path):
        self.folder, self.model, self.dataset = folder, model, dataset
        self.numbers = itertools.count()

    def defaults(self, name: str) -> list:
        defaults = ["-e", name, "--save-dir", self.folder, "-m", self.model, "--from-scratch"]
        return [*defaults, "-d", self.dataset, "-s", 32, "-b", 4, "--lr", 1e-2, "--log-freq", 1]

    def start(self, *flags, name="run", script=None, comet=False, processes=0, **options):
        output = self.folder / f"output-{next(self.numbers)}.txt"
        env = {"COMET_AUTO_LOG_DISABLE": str(not comet).lower()} | options.pop("env", {})
        flags = [*self.defaults(name), *flags]
        if processes:
            return Job(script or CHAPTER_2, flags, output, processes, env=env, **options)
        return Run(script or CHAPTER_1, flags, output, env=env, **options)

    def __call__(self, *flags, name="run", status=0, **options) -> Result:
        run = self.start(*flags, name=name, **options)
        result = Result(run, self.folder / name, run.wait())
        assert status is None or result.status == status, result.output
        return result


@pytest.fixture
def trainer(tmp_path, model, dataset) -> Trainer:
    return Trainer(tmp_path, model, dataset)


@pytest.fixture(scope="session")
def chapter_1():
    """Chapter 1 as a module, for tests of its functions."""
    return load(CHAPTER_1)
