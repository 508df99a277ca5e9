"""The scripts of learn/in-short/: the losses, gradient norms and weights of a single process, diffs
and their page, and what a damage does."""

import importlib
import json
import re
import shutil

import datasets
import pytest
import torch
from helpers.chapters import replaced
from helpers.models import TINY_LLAMA
from helpers.pages import page
from helpers.runner import CHAPTER_1, REPOSITORY, Job, Run, load
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FOLDER = REPOSITORY / "learn" / "in-short"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
STEPS = 4
SEQ_LENGTH = 32
BATCH_SIZE = 8
LR = 5e-4  # AdamW amplifies rounding errors. Its steps are smaller here than in the scripts.
TEXT = """f"{sysconfig.get_path('stdlib')}/[a-z]*.py\""""
MODELS = ("tiny-llama", "tiny-mixtral")
CHAT = REPOSITORY / "models" / "tiny-chat"
# Small models. Four ranks can share their heads, layers and experts.
SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES["intermediate_size"] = 96
# single.py with the mixture of expert_parallel.py
MIXTURE = {
    '"tiny-llama"': '"tiny-mixtral"',
    "model = AutoModel": "config.output_router_logits = False\nmodel = AutoModel",
    # Transformers would write other names.
    "model.save_pretrained(output)": """output.mkdir(parents=True)
torch.save(model.state_dict(), output / "weights.pt")""",
}

# single.py with the optimizer of muon.py
ADAMW = f"torch.optim.AdamW(model.parameters(), lr={LR}, weight_decay=0)"
TORCH_MUON = {
    ADAMW: f"torch_muon.AdamWAndMuon(model, lr={LR})",
    "import torch\n": "import torch\nfrom helpers import torch_muon\n",
}


class Short:
    """Runs copies of the scripts in a folder with small models, on few short samples."""

    def __init__(self, folder, texts):
        self.folder, self.count, self.output = folder, 0, ""
        self.texts = texts[:100]
        (folder / "text").mkdir()
        for number, text in enumerate(self.texts):
            (folder / "text" / f"{number:03}.py").write_text(text)
        for model in MODELS:
            shutil.copytree(REPOSITORY / "models" / model, folder / model)
            config = json.loads((folder / model / "config.json").read_text())
            (folder / model / "config.json").write_text(json.dumps(config | SIZES))

    def __call__(self, name, processes=1, damages=None):
        """The steps on each rank that prints them, and the weights that the script has saved."""
        self.count += 1
        root = self.folder / str(self.count)
        (root / "learn" / "in-short").mkdir(parents=True)
        (root / "models").mkdir()
        for model in MODELS:
            (root / "models" / model).symlink_to(self.folder / model)
        (root / "models" / CHAT.name).symlink_to(CHAT)
        changes = {"\nSTEPS = 20": f"\nSTEPS = {STEPS}", "lr=2e-3": f"lr={LR}"}
        if name == "local_steps":
            changes |= {"LOCAL_STEPS = 5": "LOCAL_STEPS = 2"}
        if name != "chat":
            changes |= {"SEQ_LENGTH = 256": f"SEQ_LENGTH = {SEQ_LENGTH}"}
            changes |= {TEXT: repr(f"{self.folder}/text/*.py")}
        text = replaced(SCRIPTS[name].read_text(), changes | (damages or {}))
        script = root / "learn" / "in-short" / f"{name}.py"
        script.write_text(text.replace(":.4f}", ":.9f}"))
        job = Job(script, [], root / "output", processes)
        assert job.wait() == 0, job.output
        self.output = job.output
        found = re.findall(r"^step +(\d+)  loss (\S+)  gradient norm (\S+)$", job.output, re.M)
        assert [int(step) for step, *_ in found] == [*range(1, STEPS + 1)], job.output
        losses, norms = (
            [float(x) for x in column] for column in list(zip(*found, strict=True))[1:]
        )
        return losses, norms, weights_in(root / "outputs" / "in-short" / name)

    def samples(self):
        """The samples that the scripts read, in their order."""
        tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
        tokens = [t for text in self.texts for t in (*tokenizer(text)["input_ids"], 0)]
        count = len(tokens) // SEQ_LENGTH
        order = datasets.Dataset.from_dict({"n": range(count)}).shuffle(seed=0)["n"]
        return torch.tensor(tokens[: count * SEQ_LENGTH]).view(count, -1)[list(order)], list(order)

    def first_model(self):
        config = AutoConfig.from_pretrained(self.folder / "tiny-llama", tie_word_embeddings=False)
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def weights_in(folder):
    """Of a Transformers model, or of a torch.distributed.checkpoint."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    if not (folder / "weights.pt").exists():
        dcp_to_torch_save(folder, folder / "weights.pt")
    return torch.load(folder / "weights.pt")


def differences(run, expected) -> dict[str, float]:
    """The largest relative difference of losses, of gradient norms, and of a weight matrix."""
    names = ("loss", "gradient norm")
    found = {}
    for name, a, b in zip(names, run, expected, strict=False):
        found[name] = max(abs(x - y) / y for x, y in zip(a, b, strict=True))
    assert run[2].keys() == expected[2].keys()
    relative = [(run[2][n] - w).norm() / w.norm() for n, w in expected[2].items()]
    return found | {"weights": torch.stack(relative).max().item()}


def assert_equal(run, expected):
    found = differences(run, expected)
    assert all(difference < 1e-5 for difference in found.values()), found


@pytest.fixture(scope="module")
def short(tmp_path_factory, texts):
    return Short(tmp_path_factory.mktemp("in-short"), texts)


@pytest.fixture(scope="module")
def single(short):
    return short("single")


@pytest.fixture(scope="module")
def mixture(short):
    return short("single", damages=MIXTURE)


@pytest.fixture(scope="module")
def with_torch_muon(short):
    return short("single", damages=TORCH_MUON)


def plain_local_steps(short, replicas):
    """DiLoCo in one process, with plain tensors: one replica after the other."""
    samples, _ = short.samples()
    models = [short.first_model() for _ in range(replicas)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0) for m in models]
    shared = [p.detach().clone() for p in models[0].parameters()]
    momenta = [torch.zeros_like(weight) for weight in shared]
    all_losses, all_norms = [], []
    for step in range(1, STEPS + 1):
        batch = samples[(step - 1) * BATCH_SIZE : step * BATCH_SIZE]
        losses, norms = [], []
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            rows = batch[replica::replicas]
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        all_losses.append(sum(losses) / replicas)
        all_norms.append(sum(norms) / replicas)
        if step % 2:
            continue
        with torch.no_grad():
            columns = zip(*(model.parameters() for model in models), strict=True)
            for weight, momentum, ends in zip(shared, momenta, columns, strict=True):
                gradient = sum(weight - end for end in ends) / replicas
                momentum.mul_(0.9).add_(gradient)
                weight.sub_(0.7 * (gradient + 0.9 * momentum))
                for end in ends:
                    end.copy_(weight)
    return all_losses, all_norms, {n: p.detach() for n, p in models[0].named_parameters()}


def plain_chat(short):
    """One conversation at a time, with the labels of chapter 16's rows."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    tokenizer.chat_template = (CHAT / "template.jinja").read_text()
    rows = datasets.load_dataset("json", data_files=f"{CHAT}/stdlib.jsonl", split="train")
    rows = rows.shuffle(seed=0).select(range(STEPS * BATCH_SIZE))
    labels = load(REPOSITORY / "tools" / "labels.py")
    found = labels.texts_of_rows([*rows], tokenizer, {}, 256)
    model = short.first_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0)
    losses, norms = [], []
    for begin in range(0, STEPS * BATCH_SIZE, BATCH_SIZE):
        loss, count = 0, 0
        for n in range(begin, begin + BATCH_SIZE):
            ids, labels = (torch.tensor(found[n][name]) for name in ("input_ids", "labels"))
            logits = model(ids[None]).logits[0, :-1]
            loss += torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
            count += (labels >= 0).sum()
        (loss / count).backward()
        losses.append((loss / count).item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def expected_of(name, short, request, processes):
    if name == "local_steps":
        return plain_local_steps(short, processes)
    if name == "chat":
        return plain_chat(short)
    fixtures = {"expert_parallel": "mixture", "muon": "with_torch_muon"}
    return request.getfixturevalue(fixtures.get(name, "single"))


PROCESSES = [(name, 2) for name in SCRIPTS if name not in ("single", "float8")]
PROCESSES += [("fsdp", 4), ("expert_parallel", 4), ("muon", 4)]


@pytest.mark.parametrize(("name", "processes"), PROCESSES)
def test_trains_as_one_process(short, request, name, processes):
    """Losses, gradient norms and saved weights: those of single.py, or of a plain loop."""
    run = short(name, processes)
    assert_equal(run, expected_of(name, short, request, processes))


# single.py with the layers of float8.py
IN_8_BITS = """float8.convert_to_float8_training(
    model,
    config=float8.Float8LinearConfig(emulate=True),
    module_filter_fn=lambda layer, name: name != "lm_head",
)
optimizer = torch.optim.AdamW"""


@pytest.mark.rest
def test_float8_rounds_as_one_process(torchao, short, single):
    """One rank is exact. On two ranks, inputs and gradients have other scales."""
    changes = {"optimizer = torch.optim.AdamW": IN_8_BITS}
    changes["import torch\n"] = "import torch\nfrom torchao import float8\n"
    changes["model.save_pretrained(output)"] = MIXTURE["model.save_pretrained(output)"]
    rounded = short("single", damages=changes)
    importlib.import_module("torchao.float8")  # so that torch.load() knows its tensors
    assert_equal(short("float8", 1), rounded)
    found = differences(short("float8", 2), rounded)
    assert 0 < found["loss"] < 1e-3
    assert 0 < found["gradient norm"] < 0.03
    assert differences(single, rounded)["loss"] > 1e-6


# What chapter 1 has, and single.py does not: a schedule, weight decay, evaluation
OFF = ["--lr-scheduler", "constant", "--weight-decay", 0, "--eval-freq", 0, "--no-compile"]


def test_single_trains_as_chapter_1(short, single, tmp_path):
    """With the same initial weights and samples. Both tokenize and pack the documents."""
    samples, order = short.samples()
    model = short.first_model()
    model.save_pretrained(tmp_path / "model")
    for file in TINY_LLAMA.glob("tokenizer*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    # With a second split, chapter 1 holds out nothing of the first.
    (tmp_path / "data").mkdir()
    for split, texts in {"train": short.texts, "validation": short.texts[:9]}.items():
        file = tmp_path / "data" / f"{split}-00000.parquet"
        datasets.Dataset.from_dict({"text": texts}).to_parquet(file)
    # Its own order of samples is another one.
    given = f"def sample_order(seed, epoch, samples):\n    return np.array({order})\n\n\n"
    entry = 'if __name__ == "__main__":'
    script = tmp_path / "train-llm.py"
    script.write_text(CHAPTER_1.read_text().replace(entry, given + entry))
    flags = ["-e", "run", "--save-dir", tmp_path, "-m", tmp_path / "model"]
    flags += ["-d", tmp_path / "data"]
    flags += ["-s", SEQ_LENGTH, "-b", BATCH_SIZE, "--max-steps", STEPS]
    flags += ["--lr", LR, "--log-freq", 1, *OFF]
    run = Run(script, flags, tmp_path / "output")
    assert run.wait() == 0, run.output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    columns = [[record[name] for record in records] for name in ("loss", "grad_norm")]
    assert_equal(single, (*columns, weights_in(tmp_path / "run" / "final")))
    assert len(samples) > STEPS * BATCH_SIZE


@pytest.mark.rest
def test_two_processes_on_a_machine_with_one_gpu(short):
    """Both take the CPU, and nothing takes the GPU."""
    one_gpu = "none = torch._C._get_accelerator\n"
    one_gpu += "torch._C._get_accelerator = lambda *_: torch.device('cuda')\n"
    one_gpu += "torch.cuda.device_count = lambda: 1\nrank = dist.get_rank()"
    there_is_none = "torch._C._get_accelerator = none\nmodel.to_empty(device=device)"
    changes = {"rank = dist.get_rank()": one_gpu, "model.to_empty(device=device)": there_is_none}
    short("fsdp", 2, changes)


def test_diffs_are_up_to_date():
    assert {*load(REPOSITORY / "tools" / "chapters.py").short_scripts()} == {*SCRIPTS}
    text = page("learn/in-short/README.md")
    tables = load(REPOSITORY / "maintain" / "write-tables.py")
    assert tables.with_diffs(text.replace("\n+if rank", "\n-if rank")) == text
