"""The scripts of in-short/: the losses, gradient norms and weights of a single process, their diffs
and their page, and what a damage does."""

import json
import re
import shutil

import datasets
import pytest
import torch
from conftest import TINY_LLAMA
from runner import CHAPTER_1, REPOSITORY, Job, Run, load, outcome
from safetensors.torch import load_file
from test_readme import page
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FOLDER = REPOSITORY / "in-short"
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}
TREE = load(REPOSITORY / "tools" / "diff-chapters.py")
every_script = pytest.mark.parametrize("name", SCRIPTS)
STEPS = 4
SEQ_LENGTH = 32
BATCH_SIZE = 8
LR = 5e-4  # AdamW amplifies rounding errors. Its steps are smaller here than in the scripts.
TEXT = """f"{sysconfig.get_path('stdlib')}/[a-z]*.py\""""
MODELS = ("tiny-llama", "tiny-mixtral")
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


class Short:
    """Runs copies of the scripts in a folder with small models, on few short samples."""

    def __init__(self, folder, texts):
        self.folder, self.count, self.output = folder, 0, ""
        self.texts = texts[:100]
        (folder / "text").mkdir()
        for number, text in enumerate(self.texts):
            (folder / "text" / f"{number:03}.py").write_text(text)
        for model in MODELS:
            shutil.copytree(REPOSITORY / model, folder / model)
            config = json.loads((folder / model / "config.json").read_text())
            (folder / model / "config.json").write_text(json.dumps(config | SIZES))

    def __call__(self, name, processes=1, damages=None):
        """The steps on each rank that prints them, and the weights that the script has saved."""
        self.count += 1
        root = self.folder / str(self.count)
        (root / "in-short").mkdir(parents=True)
        for model in MODELS:
            (root / model).symlink_to(self.folder / model)
        changes = {
            "STEPS = 20": f"STEPS = {STEPS}",
            "SEQ_LENGTH = 256": f"SEQ_LENGTH = {SEQ_LENGTH}",
        }
        changes |= {"lr=2e-3": f"lr={LR}"}
        changes |= {TEXT: repr(f"{self.folder}/text/*.py"), "LOCAL_STEPS = 5": "LOCAL_STEPS = 2"}
        text = SCRIPTS[name].read_text()
        for line, instead in (changes | (damages or {})).items():
            assert text.count(line) == 1 or line == "LOCAL_STEPS = 5", (name, line)
            text = text.replace(line, instead)
        script = root / "in-short" / f"{name}.py"
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


def expected_of(name, short, request, processes):
    if name == "local_steps":
        return plain_local_steps(short, processes)
    return request.getfixturevalue("mixture" if name == "expert_parallel" else "single")


PROCESSES = [(name, n) for name in SCRIPTS if name != "single" for n in (2, 4)]


@pytest.mark.parametrize(("name", "processes"), PROCESSES)
def test_trains_as_one_process(short, request, name, processes):
    """Losses, gradient norms and saved weights. Those of single.py; local steps have others."""
    run = short(name, processes)
    assert_equal(run, expected_of(name, short, request, processes))


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
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(lines))
    # Its own order of samples is another one.
    given = f"def sample_order(first, count, *_):\n    return {order}[first : first + count]\n\n\n"
    entry = 'if __name__ == "__main__":'
    script = tmp_path / "train-llm.py"
    script.write_text(CHAPTER_1.read_text().replace(entry, given + entry))
    flags = ["-e", "run", "--save-dir", tmp_path, "-m", tmp_path / "model"]
    flags += ["-d", tmp_path / "data", "-s", SEQ_LENGTH, "-b", BATCH_SIZE, "--max-steps", STEPS]
    flags += ["--lr", LR, "--log-freq", 1, *OFF]
    run = Run(script, flags, tmp_path / "output", env={"COMET_AUTO_LOG_DISABLE": "true"})
    assert run.wait() == 0, run.output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    columns = [[record[name] for record in records] for name in ("loss", "grad_norm")]
    assert_equal(single, (*columns, weights_in(tmp_path / "run" / "final")))
    assert len(samples) > STEPS * BATCH_SIZE


RANDOM = "[torch.nn.init.normal_(p, std=0.02) for p in model.parameters()]"
# Code of a script, and what takes its place
DAMAGES = [
    ("ddp", "loss = model(", "loss = model.module("),
    ("ddp", "sampler=sampler", "shuffle=False"),
    ("ddp", "    dist.all_reduce(loss, dist.ReduceOp.AVG)\n", ""),
    ("fsdp", "sampler=sampler", "shuffle=False"),
    ("fsdp", "set_model_state_dict(model, weights, options=options)", RANDOM),
    ("fsdp", "model.model.rotary_emb = ", "unused = "),
    ("fsdp", "    dist.all_reduce(loss, dist.ReduceOp.AVG)\n", ""),
    ("tensor_parallel", "DataLoader(samples,", "DataLoader(samples.shard(2, rank),"),
    ("tensor_parallel", "loss = loss.full_tensor()", "loss = loss.full_tensor() / world_size"),
    ("pipeline", "number * world_size // len(layers)", "number % world_size"),
    ("pipeline", "loss_fn=loss_of)", "loss_fn=loss_of, scale_grads=False)"),
    ("pipeline", "(losses).mean()", "(losses).sum()"),
    ("pipeline", "    dist.all_reduce(grad_norm)\n", ""),
    ("pipeline", "total_norm=grad_norm", "total_norm=grad_norm / 2"),
    ("pipeline", "    model.model.norm = Elsewhere()\n", ""),
    ("context_parallel", "parts = all_to_all_single_autograd(", "_ = ("),
    ("context_parallel", "    labels[:, -1] = -100", "    #"),
    ("context_parallel", "input_ids.roll(-1, dims=1)", "input_ids.clone()"),
    ("context_parallel", '"position_ids": positions}', '"position_ids": 0 * positions}'),
    ("context_parallel", "num_items_in_batch=labels_per_rank, ", ""),
    ("expert_parallel", "parameter.grad /= world_size", "pass"),
    ("expert_parallel", "[order.argsort()]", ""),
    (
        "expert_parallel",
        ".repeat_interleave(arriving_counts.flatten())",
        ".repeat_interleave(arriving_counts.flip(0).flatten())",
    ),
    ("expert_parallel", "config.output_router_logits = False", ""),
    ("expert_parallel", "returned * shares[..., None]", "returned"),
    ("local_steps", "weight - parameter", "parameter - weight"),
    ("local_steps", "nesterov=True", "nesterov=False"),
    ("local_steps", "                dist.all_reduce(weight.grad, dist.ReduceOp.AVG)\n", ""),
    ("local_steps", "parameter.copy_(weight)", "pass"),
    ("local_steps", "step % LOCAL_STEPS == 0", "step % LOCAL_STEPS == 1"),
]


@pytest.mark.rest
@pytest.mark.parametrize(("name", "code", "instead"), DAMAGES)
def test_a_damage_shows(short, request, name, code, instead):
    """The script runs to its end, but its losses, norms or weights are others."""
    found = differences(short(name, 2, {code: instead}), expected_of(name, short, request, 2))
    assert any(not difference < 1e-4 for difference in found.values()), found  # also nan


# Code of a script, what takes its place, and the error
CRASHES = [
    (
        "fsdp",
        "broadcast_from_rank0=True",
        "broadcast_from_rank0=False",
        "model state_dict is empty",
    ),
    ("tensor_parallel", ', "position_ids": positions}', "}", "must match the size of tensor b"),
    ("tensor_parallel", "with tp.loss_parallel():", "if True:", "mixed torch.Tensor and DTensor"),
    (
        "tensor_parallel",
        '"model.norm": tp.SequenceParallel(),',
        "",
        "mixed torch.Tensor and DTensor",
    ),
    (
        "tensor_parallel",
        'mlp.down_proj": tp.RowwiseParallel(',
        'mlp.down_proj": tp.RowwiseParallel(input_layouts=Replicate(), ',
        "Sharding propagation failed",
    ),
    (
        "tensor_parallel",
        'o_proj": tp.RowwiseParallel(',
        'o_proj": tp.RowwiseParallel(input_layouts=Replicate(), ',
        "Sharding propagation failed",
    ),
    (
        "pipeline",
        "    model.model.embed_tokens = Elsewhere()",
        "    pass",
        "'NoneType' object has no attribute 'device'",  # the embeddings have no gradients
    ),
    ("pipeline", "    model.lm_head = Elsewhere()\n", "", "must match the size of tensor b"),
]


@pytest.mark.rest
@pytest.mark.parametrize(("name", "code", "instead", "error"), CRASHES)
def test_a_damage_ends_the_script(short, name, code, instead, error):
    with pytest.raises(AssertionError, match=error):
        short(name, 2, {code: instead})


PASSES = """        y = self.model(**inputs, use_cache=False).logits
        if y.requires_grad:
            print(f"rank {rank}: F", flush=True)
            y.register_hook(lambda _: print(f"rank {rank}: B", flush=True))
        return y
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("schedule", "orders"),
    [("Schedule1F1B", ["FFBFBFBB", "FBFBFBFB"]), ("ScheduleGPipe", ["FFFFBBBB", "FFFFBBBB"])],
)
def test_order_of_the_pipeline(short, schedule, orders):
    """One forward, one backward. The results of GPipe are the same, so they show no difference.
    Before the first step, a stage makes a pass to know the shapes. The last one goes back, too."""
    damages = {"        return self.model(**inputs, use_cache=False).logits\n": PASSES}
    damages |= {"import PipelineStage, Schedule1F1B": f"import PipelineStage, {schedule}"}
    damages |= {"= Schedule1F1B(": f"= {schedule}("}
    short("pipeline", 2, damages)
    for rank, order in enumerate(orders):
        passes = "".join(re.findall(rf"^rank {rank}: (\w)$", short.output, re.M))
        assert passes == ["F", "FB"][rank] + STEPS * order


def test_every_script_is_damaged():
    assert {name for name, *_ in DAMAGES} == {*SCRIPTS} - {"single"}


@every_script
def test_form(name):
    """The command at the top, at most four constants, no flags, and the loop in the same words."""
    text = SCRIPTS[name].read_text()
    assert text.startswith('"""The ')
    start = "python" if name == "single" else "torchrun --standalone --nproc-per-node 2"
    assert f"\n    {start} in-short/{name}.py\n" in text
    constants = re.search(r"\n\n((?:[A-Z_]+ = .*\n)+)\n", text)[1].splitlines()
    assert 3 <= len(constants) <= 4
    assert "argparse" not in text
    assert "sys.argv" not in text


def test_diffs_are_up_to_date():
    update = "python tools/diff-chapters.py"
    assert {*TREE.SHORT} == {*SCRIPTS} - {"single"}
    for after in TREE.short_scripts()[1:]:
        before = after.with_stem(TREE.SHORT[after.stem])
        assert TREE.unified_diff(before, after) == after.with_suffix(".diff").read_text(), update
    text = page("in-short/README.md")
    assert TREE.with_diffs(text) == text, update
    assert TREE.with_diffs(text.replace("\n+if rank", "\n-if rank")) == text


def test_the_page_explains_every_script():
    """Its table has all scripts, its diffs are those of the tree, and its words are in them."""
    text = page("in-short/README.md")
    rows = re.findall(r"^\| \[`(\w+)\.py`\]\(.*?\) \| (?:`(\w+)\.py`)? ?\|", text, re.MULTILINE)
    assert dict(rows) == {"single": ""} | TREE.SHORT
    sections = re.findall(r"^## `(\w+)\.py`: .*?\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert [name for name, _ in sections] == [*TREE.SHORT]
    for name, content in sections:
        assert f"```diff\n--- {TREE.SHORT[name]}.py\n+++ {name}.py\n" in content
        assert len(re.findall("^- ", content, re.MULTILINE)) >= 7
        for reason in re.findall("^- `([^`]+)`", content, re.MULTILINE):
            assert reason.strip("/= ") in SCRIPTS[name].read_text(), reason


def test_chapters_begin_with_their_short_script():
    """And with the script by hand, where a technique has one."""
    for readme in sorted(REPOSITORY.glob("[0-9][0-9]-*/README.md")):
        first = readme.read_text().split("\n\n")[1]
        assert first.startswith("First, in five minutes"), readme
        assert "](../in-short/" in first, readme
        is_single = "in-short/single.py" in first
        assert is_single or "](../by-hand/" in first, readme


def test_side_by_side(tmp_path):
    tool = REPOSITORY / "tools" / "side-by-side.py"
    assert load(tool).continued(TREE.short_scripts()) == [None, 0, 1, 0, 0, 2, 2, 1]
    status, output = outcome(tmp_path, tool, FOLDER, "-o", tmp_path / "page.html")
    assert status == 0, output
    html = (tmp_path / "page.html").read_text()
    columns = re.findall(r'<section class="column".*?aria-label="(.*?)"', html)
    assert columns == [f"in-short/{name}.py" for name in ("single", *TREE.SHORT)]
