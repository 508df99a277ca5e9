"""Chapter 6 trains what chapter 1 trains, with every layer computed by a group of ranks."""

import importlib.util
import re
import sys

import pytest
import torch
from conftest import (
    LLAMA,
    assert_one_sentence,
    assert_same_losses,
    damaged,
    exact,
    write_model,
)
from runner import CHAPTER_3, CHAPTER_6, REPOSITORY, Job
from safetensors.torch import load_file
from test_fsdp import (
    OFF,
    PEAK,
    SCALER,
    assert_same_folder,
    norms,
    save_weights,
    take_over,
    told,
    whole_state,
)
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.rest

TP = {"script": CHAPTER_6}

# Put before a script: rank 0 saves the whole gradients of the first step, before they are clipped.
GRADIENTS = """
import os
import torch

models, saved = [], []

def train(self, mode=True):
    if hasattr(self, "lm_head"):
        models[:] = [self]
    return original_train(self, mode)

original_train = torch.nn.Module.train
torch.nn.Module.train = train

def clip(parameters, max_norm):
    if not saved:
        (model,) = models
        gradients = {name: p.grad for name, p in model.named_parameters()}
        whole = {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in gradients.items()}
        saved.append(whole)
        if os.environ.get("RANK", "0") == "0":
            torch.save({n: g.clone() for n, g in whole.items()}, os.environ["GRADIENTS"])
    return original_clip(parameters, max_norm)

original_clip = torch.nn.utils.clip_grad_norm_
torch.nn.utils.clip_grad_norm_ = clip
"""

SIZE = {"hidden_size": 36, "intermediate_size": 66, "num_hidden_layers": 2, "head_dim": 10}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
BIASES = {"attention_bias": True, "mlp_bias": True}
# Shards differ in size: of 66 columns a rank has 33 in a group, which are 17 and 16 in two groups.
FAMILIES = {
    "llama": SIZE | BIASES | {"tie_word_embeddings": True},
    "mistral": SIZE | {"tie_word_embeddings": False, "sliding_window": 32},
    "qwen2": SIZE | {"tie_word_embeddings": True, "hidden_size": 40},
    "qwen3": SIZE | {"tie_word_embeddings": False, "attention_bias": True},
    # Without positions, the gradient of a bias of k would be zero.
    "smollm3": SIZE | {"tie_word_embeddings": True, "mlp_bias": True, "no_rope_layers": [1, 0]},
}


def write_weights(folder, family: str, families=FAMILIES, **config):
    """A model's folder with weights, in which no norm is one and no bias is zero."""
    write_model(folder, model_type=family, **families[family] | config)
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


@pytest.fixture
def gradients(trainer):
    """Runs one step; returns the gradients by name, and the run."""

    def run(*flags, name, **options):
        file = trainer.folder / f"gradients-{name}"
        flags = ["--no-from-scratch", "--max-steps", 1, "--eval-freq", 1, *flags]
        before = options.pop("before", "") + GRADIENTS
        options |= {"env": {"GRADIENTS": str(file)}, "before": before}
        result = trainer(*flags, name=name, **options)
        assert file.exists(), result.output
        return torch.load(file), result

    return run


def worst(expected: dict, found: dict) -> tuple[float, str]:
    """The largest relative error of the gradient of a parameter, and its name."""
    assert expected.keys() == found.keys()
    assert all(g.norm() > 0 for g in expected.values())
    errors = {n: ((found[n] - g).norm() / g.norm()).item() for n, g in expected.items()}
    return max((error, name) for name, error in errors.items())


# -- The same training -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_each_family(gradients, tmp_path, family):
    """Of every parameter, on a group of two ranks; on two such groups, with checkpointing."""
    folder = write_weights(tmp_path / family, family)
    expected, single = gradients("-m", folder, "-b", 4, name="single")
    for processes, flags in ((2, ["-b", 4]), (4, ["-b", 2, "--activation-checkpointing"])):
        flags += ["-m", folder, "--tensor-parallel", 2]
        options = {"name": f"on-{processes}", "processes": processes} | TP
        found, run = gradients(*flags, **options)
        error, name = worst(expected, found)
        print(f"{family} on {processes} ranks: {error:.1e} ({name})")
        assert error < 1e-4, name
        assert_same_losses(single, run, 1, **OFF)


NEOX = {"hidden_size": 40, "intermediate_size": 66, "num_hidden_layers": 2}
NEOX |= {"num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0}
NEOX |= {"use_parallel_residual": False, "tie_word_embeddings": True}


def test_the_family_that_the_page_adds(gradients, tmp_path):
    """The plan of docs/other-models.md, in a copy of this chapter; and with a wrong name in it."""
    page = (REPOSITORY / "docs" / "other-models.md").read_text()
    (plan,) = re.findall(r"```python\n(NEOX = .*?)```", page, re.DOTALL)
    kv_heads = 'getattr(config, "num_key_value_heads", config.num_attention_heads)'
    assert f"`{kv_heads}`" in page
    changes = {
        "config.num_key_value_heads": kv_heads,
        "\n\ndef build_model(": f"\n{plan}\n\ndef build_model(",
    }
    script = damaged(CHAPTER_6, tmp_path, changes)
    folder = write_weights(tmp_path / "neox", "gpt_neox", {"gpt_neox": NEOX})
    expected, single = gradients("-m", folder, "-b", 4, name="single")
    options = {"processes": 2, "script": script}
    found, run = gradients("-m", folder, "-b", 4, name="neox", **options)
    error, name = worst(expected, found)
    print(f"gpt_neox: {error:.1e} ({name})")
    assert error < 1e-4, name
    assert_same_losses(single, run, 1, **OFF)


def test_gradients_of_compiled_layers(gradients, tmp_path):
    """With and without checkpointing. The second run finds what the first has cached."""
    folder = write_weights(tmp_path / "llama", "llama")
    expected, single = gradients("-m", folder, "-b", 4, name="single")
    cache = f"import os; os.environ['TORCHINDUCTOR_CACHE_DIR'] = {str(tmp_path)!r}\n"
    cases = (["--eval-freq", 0], ["--activation-checkpointing"])  # evaluating compiles again: once
    for number, flags in enumerate(cases):
        options = {"name": f"run-{number}", "processes": 2, "before": cache} | TP
        found, run = gradients("-m", folder, "-b", 4, "--compile", *flags, **options)
        error, name = worst(expected, found)
        print(f"{' '.join(map(str, flags))}: {error:.1e} ({name})")
        assert error < 1e-4, (flags, name)
        assert run.column("loss") == pytest.approx(single.column("loss"), rel=1e-5)
    assert_same_losses(single, run, 1, **OFF)


# Each rank tells at its end which samples and seeds it used, and what it holds.
WATCH = """
import hashlib
import torch
import torch.distributed as dist

samples, seeds, shapes, held = [], [], set(), {}

def to_empty(self, *, device, recurse=True):
    original_to_empty(self, device=device)
    with torch.no_grad():
        for tensor in [*self.parameters(), *self.buffers()]:
            getattr(tensor, "_local_tensor", tensor).fill_(torch.nan)
    models.append(self)
    forward = self.forward
    def watched(input_ids, **options):
        if self.training:
            samples.extend(hashlib.sha256(row.numpy()).hexdigest()[:16] for row in input_ids)
            seeds.append(torch.initial_seed())
        return forward(input_ids=input_ids, **options)
    self.forward = watched
    for layer in self.model.layers:
        layer.register_forward_hook(lambda layer, inputs, y: shapes.add(tuple(y.shape)))
    self.lm_head.register_forward_hook(
        lambda head, inputs, y: shapes.add(tuple(y.to_local().shape)) and None
    )
    return self

models = []
original_to_empty = torch.nn.Module.to_empty
torch.nn.Module.to_empty = to_empty

def step(self, *args, **options):
    result = original_step(self, *args, **options)
    for name, parameter in models[0].named_parameters():
        state = self.state[parameter]
        tensors = [parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]]
        assert len({tensor.to_local().numel() for tensor in tensors}) == 1
        held[name] = tensors[0].to_local().numel()
    return result

original_step = torch.optim.AdamW.step
torch.optim.AdamW.step = step

def tell():
    assert models[0].lm_head.weight is models[0].model.embed_tokens.weight
    group = models[0]._get_fsdp_state()._fsdp_param_group
    print("\\nroot", len(group.fsdp_params))
    for tensor in [*models[0].parameters(), *models[0].buffers()]:
        assert not getattr(tensor, "_local_tensor", tensor).isnan().any()
    print("\\nsamples", *samples)
    print("seeds", *seeds)
    print("shapes", *(f"{'x'.join(map(str, shape))}" for shape in sorted(shapes)))
    print("held", *(f"{name}={size}" for name, size in held.items()))
    destroy()

destroy = dist.destroy_process_group
dist.destroy_process_group = tell
"""

# Put before a script: prints the norm of the whole gradients of each step, in double precision. The
# logged norm adds up the squares of a tensor in fp32 on a CPU, so its last digits depend on how the
# tensors are split.
NORMS = """
import torch

def clip(parameters, max_norm):
    parameters = list(parameters)
    whole = [getattr(p.grad, "full_tensor", lambda g=p.grad: g)().double() for p in parameters]
    print("\\nnorm", sum(g.square().sum().item() for g in whole) ** 0.5)
    return original_clip(parameters, max_norm)

original_clip = torch.nn.utils.clip_grad_norm_
torch.nn.utils.clip_grad_norm_ = clip
"""


def farthest(found: list[float], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


# Ranks, flags. Two ranks form a group if nothing else is said, which is all of the node.
ONCE = ["--no-reshard-after-forward", "--gradient-accumulation-steps", 2, "-b", 3]
CASES = {
    "pretrained and tied": [
        (2, ["-b", 12, "--activation-checkpointing"]),
        (4, ["-b", 6, "--tensor-parallel", 2]),
        (3, ["-b", 4, "--tensor-parallel", 1, "--cpu-offload"]),
    ],
    "from scratch and untied": [
        (2, ["-b", 6, "--gradient-accumulation-steps", 2, "--cpu-offload"]),
        (4, [*ONCE, "--tensor-parallel", 2]),
        (3, ["-b", 4, "--tensor-parallel", 1]),
    ],
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_weights(tmp_path_factory.mktemp("models") / "tied", "llama", num_hidden_layers=1)


@pytest.mark.parametrize("source", CASES)
def test_losses_are_those_of_chapter_1(trainer, tied, tmp_path, source):
    """Also gradient norms, and the held-out loss. The groups cannot share its samples evenly.

    Norms within 1e-6 in double precision. Those in the log of chapter 1 are 1e-5 off by themselves.
    """
    flags = ["--max-steps", 30, "--eval-freq", 15, "--lr", 1e-3, "--ckpt-freq", 99]
    if source == "pretrained and tied":
        flags += ["-m", tied, "--no-from-scratch"]
    else:
        # Without a padding token, whose row of the embeddings is zero in chapter 1 alone
        config = {"model_type": "qwen3"} | FAMILIES["qwen3"] | {"pad_token_id": None}
        config["num_hidden_layers"] = 1
        flags += ["-m", write_model(tmp_path / "m", **config)]
    single = trainer(*flags, "-b", 12, name="single", before=NORMS)
    expected = norms(single.output)
    assert len(single.column("eval/loss")) == 2
    (held_out,) = re.findall(r"(\d+) held out", single.output)
    assert int(held_out) % 4
    for processes, split in CASES[source]:
        options = {"name": f"on-{processes}", "processes": processes, "before": NORMS} | TP
        run = trainer(*flags, *split, **options)
        assert_same_losses(single, run, 30, **OFF)
        found = norms(run.run.ranks[0].output)
        assert len(found) == 30
        logged = [farthest(single.column("grad_norm"), expected)]
        logged += [farthest(run.column("grad_norm"), found)]
        print(f"{source}, {processes} ranks: {farthest(found, expected):.1e}, logged {logged}")
        assert farthest(found, expected) < 1e-6


def test_a_group_is_one_device(trainer, tied):
    """Its ranks read the same samples and draw the same seeds; they hold other parts."""
    flags = ["-m", tied, "-b", 2, "--max-steps", 5, "--eval-freq", 0, "--tensor-parallel", 2]
    run = trainer(*flags, processes=4, before=WATCH, **TP)
    for what in ("samples ", "seeds "):
        (a, b, c, d), count = told(run, what), 10 if what == "samples " else 5
        assert a == b
        assert c == d
        assert len({*a, *c}) == len(a) + len(c) == 2 * count
    # FSDP gathers the tied weights once; the other tensor of the root is the last norm
    assert told(run, "root ") == [["2"]] * 4
    # Between layers a half of the tokens; a half of the vocabulary in the logits
    assert told(run, "shapes ") == [["2x16x36", "2x32x1024"]] * 4
    sizes = {n: x.numel() for n, x in load_file(run.folder / "final" / "model.safetensors").items()}
    held = [dict(pair.split("=") for pair in rank) for rank in told(run, "held ")]
    for name, size in sizes.items():
        parts = [int(rank[name]) for rank in held]
        # Norms, and biases of sums, are whole in each group
        whole = "norm" in name or re.search(r"(o|down)_proj.bias", name)
        assert sum(parts) == size * (2 if whole else 1), name
        assert max(parts) <= -(-size // (2 if whole else 4)) + 36, name


def test_compute_precision(trainer, tied):
    """In bf16 nearly the same losses; a gradient scaler, as for fp16, changes nothing."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 3]
    single = trainer(*flags, "--max-steps", 3, "--dtype", "bf16", name="single")
    run = trainer(*flags, "--dtype", "bf16", name="bf16", processes=2, **TP)
    assert run.column("loss") == pytest.approx(single.column("loss"), rel=2e-3)
    assert run.column("eval/loss") == pytest.approx(single.column("eval/loss"), rel=2e-3)
    flags = ["--max-steps", 2, "--eval-freq", 0, "--max-grad-norm", 0]
    plain = trainer(*flags, name="plain", processes=2, **TP)
    scaled = trainer(*flags, name="scaled", processes=2, before=SCALER, **TP)
    assert scaled.column("loss") == plain.column("loss")
    assert "scale 2 65536.0" in scaled.output


# -- Checkpoints -----------------------------------------------------------------------------------


def test_resume_on_other_groups(trainer, tied):
    """Saved by two groups of two; bit for bit on as many. One, four, and chapter 3 go on, too."""
    flags = ["-m", tied, "--no-from-scratch", "--max-steps", 4, "--eval-freq", 4]
    flags += ["--ckpt-freq", 2, "--lr", 1e-3]
    two = {"name": "origin", "processes": 4} | TP
    origin = trainer(*flags, "-b", 6, "--tensor-parallel", 2, **two)
    take_over(origin, trainer, "same", 2)
    same = trainer(*flags, "-b", 6, "--tensor-parallel", 2, **two | {"name": "same"})
    assert exact(same.records) == exact(origin.records)
    a, b = (whole_state(run.folder / "step-00000004") for run in (origin, same))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    others = [
        (2, ["-b", 12, "--tensor-parallel", 2], TP),
        (4, ["-b", 3, "--tensor-parallel", 1], TP),
        (2, ["-b", 6], {"script": CHAPTER_3}),
    ]
    for number, (processes, split, script) in enumerate(others):
        take_over(origin, trainer, f"other-{number}", 2)
        options = {"name": f"other-{number}", "processes": processes} | script
        resumed = trainer(*flags, *split, **options)
        assert "Continuing from" in resumed.output
        assert_same_losses(origin, resumed, 4, **OFF)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_final_is_the_folder_of_chapter_1(trainer, tmp_path, family):
    """To the last bit: a learning rate of 0 leaves the weights that were read from many files."""
    folder = write_weights(tmp_path / "one", family)
    weights = AutoModelForCausalLM.from_pretrained(folder)
    weights.save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len([*folder.glob("*.safetensors")]) > 1
    flags = ["-m", folder, "--no-from-scratch", "--max-steps", 1, "--lr", 0, "--eval-freq", 0]
    single = trainer(*flags, "-b", 4, name="single")
    split = ["-b", 2, "--tensor-parallel", 2]
    run = trainer(*flags, *split, name="split", processes=4, **TP)
    assert_same_folder(single.folder / "final", run.folder / "final")
    final = AutoModelForCausalLM.from_pretrained(run.folder / "final")
    for a, b in zip(final.parameters(), weights.parameters(), strict=True):
        assert torch.equal(a, b)


def test_random_weights_are_those_of_chapter_1(trainer, tmp_path):
    """Also where the parts of a tensor differ in size; all ranks draw the whole of it."""
    folder = write_model(tmp_path / "m", model_type="llama", **FAMILIES["llama"])
    flags = ["-m", folder, "--max-steps", 1, "--lr", 0, "--eval-freq", 0]
    single = trainer(*flags, "-b", 4, name="single")
    run = trainer(*flags, "-b", 2, "--tensor-parallel", 2, name="split", processes=4, **TP)
    a, b = (load_file(run.folder / "final" / "model.safetensors") for run in (single, run))
    assert a.keys() == b.keys()
    name = "model.embed_tokens.weight"
    # A padding token's row is zero in chapter 1
    assert torch.equal(a.pop(name)[1:], b.pop(name)[1:])
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_each_rank_reads_its_part(trainer, tmp_path):
    """On two groups of two ranks, none ever holds the whole model. A quarter is its own."""
    shape = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    folder = write_model(tmp_path / "large", **shape | {"num_attention_heads": 8})
    save_weights(folder, torch.bfloat16, max_shard_size="30MB")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    whole = 4 * model.num_parameters()
    flags = ["-m", folder, "-b", 1, "--tensor-parallel", 2]
    result = trainer(*flags, "--no-from-scratch", processes=4, before=PEAK, **TP)
    for (taken,) in told(result, "loading took"):
        print(f"{int(taken) / whole:.2f} of the model")
        assert whole / 4 < int(taken) < 0.7 * whole


# -- What would happen -----------------------------------------------------------------------------

# What is damaged, in a model of which family; the gradient that is worst, and how wrong at least.
HEAD_NORMS_LEFT_OUT = {
    "self_attn.[qk]_norm": "self_attn.[qk]norm",
    "    assert not missed": "    assert True or not missed",
    # Without this, FSDP stops at the norm: it is no DTensor.
    "weight.to_local().shape": "weight.shape",
}
OTHER_SAMPLES = {"(micro_step * groups + group)": "(micro_step * groups + RANK)"}
# As in a script that does not call init_weights, which would tie them again
UNTIED = {
    "    model.tie_weights()\n": "    model.tie_weights = lambda **options: None\n",
    "    for buffer in model.buffers()": """
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    for buffer in model.buffers()""",
}
TRAPS = {
    "tied weights that become two parameters": ("llama", UNTIED, "embed_tokens", 0.5),
    "norms of heads that the plan leaves out": ("qwen3", HEAD_NORMS_LEFT_OUT, "_norm.weight", 0.5),
    "other samples on each rank of a group": ("llama", OTHER_SAMPLES, "", 0.2),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_wrong_gradients_are_noticed(gradients, tmp_path, trap):
    """So the tests above can fail."""
    family, damages, name, error = TRAPS[trap]
    script = damaged(CHAPTER_6, tmp_path, damages)
    folder = write_weights(tmp_path / "m", family)
    expected, single = gradients("-m", folder, "-b", 4, name="single")
    options = {"name": "damaged", "processes": 2, "script": script, "status": None}
    found, run = gradients("-m", folder, "-b", 4, **options)
    found = {name: found[name] for name in expected}  # tied weights have one name there
    print(trap, worst(expected, found), single.column("loss"), run.column("loss"))
    assert worst(expected, found)[0] > error
    assert name in worst(expected, found)[1]


def test_a_parameter_that_the_plan_misses_is_named(trainer, tmp_path):
    script = damaged(CHAPTER_6, tmp_path, {"self_attn.[qk]_norm": "self_attn.[qk]norm"})
    folder = write_model(tmp_path / "m", model_type="qwen3", **FAMILIES["qwen3"])
    result = trainer("-m", folder, "--max-steps", 1, processes=1, script=script, status=None)
    assert result.status
    assert "AssertionError: not in the plan: ['model.layers.0.self_attn.q_norm" in result.output


# -- Wrong flags -----------------------------------------------------------------------------------

SMALL = SIZE | {"tie_word_embeddings": True}
# Ranks, ranks of a group, length of samples, the model, and a part of the sentence
REFUSED = {
    "ranks": (3, 2, 32, SMALL, "--tensor-parallel 2 does not divide the 3 ranks"),
    "heads": (3, 3, 30, SMALL | {"num_key_value_heads": 1}, "3 does not divide 4 heads"),
    "kv heads": (2, 2, 32, SMALL | {"num_key_value_heads": 1}, "2 does not divide 1 kv heads"),
    "tokens": (2, 2, 33, SMALL, "2 does not divide 33 tokens of a sample"),
    "columns": (2, 2, 32, SMALL | {"intermediate_size": 65}, "2 does not divide 65 columns"),
    "a window": (2, 2, 64, SMALL | {"model_type": "mistral", "sliding_window": 63}, "window, 63"),
    "a family": (1, 1, 32, {"model_type": "gpt2", "n_positions": 64, "eos_token_id": 0}, "gpt2"),
}


JOINED = """
import torch.distributed as dist

def join(*arguments, **options):
    original(*arguments, **options)
    dist.barrier()

original = dist.init_process_group
dist.init_process_group = join
"""


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(trainer, tmp_path, case):
    processes, size, length, config, part = REFUSED[case]
    folder = write_model(tmp_path / "m", **{"model_type": "llama"} | config)
    flags = ["-m", folder, "-s", length, "--tensor-parallel", size, "--max-steps", 1]
    # On a busy machine, a rank may leave before another one has joined, which adds a traceback.
    result = trainer(*flags, processes=processes, status=None, before=JOINED, **TP)
    # All ranks leave by themselves, so that no rank fails in a barrier with a traceback.
    assert result.run.ranks[0].process.exitcode == 1
    assert_one_sentence(result.output, part)
    assert case == "ranks" or "chapter 3" in result.output


def test_groups_that_span_nodes(trainer):
    """A warning says why this is slow; without one the groups are within a node."""
    node = "import os; os.environ['LOCAL_WORLD_SIZE'] = '1'"
    flags = ["--max-steps", 1, "--eval-freq", 0, "--tensor-parallel", 2]
    for before, count in ((node, 1), ("", 0)):
        run = trainer(*flags, name=f"on-{count}", processes=2, before=before, **TP)
        assert run.output.count("warning: groups of 2 span nodes") == count


# -- The benchmark ---------------------------------------------------------------------------------

BENCHMARK = REPOSITORY / "benchmarks" / "tensor-parallel.py"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}


@pytest.mark.parametrize("what", ["traffic", "memory"])
def test_benchmark(what, tmp_path, monkeypatch, capsys):
    """It ends with an error where losses differ, or what it counts from what it computes."""
    spec = importlib.util.spec_from_file_location("benchmark", BENCHMARK)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.SHAPE |= SHAPE
    tool.LLAMA |= SHAPE
    tool.KEPT = [[]]

    def launch(processes, *arguments):  # without torchrun, and without its imports
        output = tmp_path / f"output-{len([*tmp_path.iterdir()])}.txt"
        job = Job(BENCHMARK, arguments, output, processes, env={"COMET_AUTO_LOG_DISABLE": "true"})
        assert job.wait() == 0, job.output
        return job.output

    tool.launch = launch
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), what, "--ranks", "2"])
    tool.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    if what == "traffic":
        found = {row[1].strip() for row in rows if row[3].strip()}
        assert found == {
            f"{a} {b}" for a in ("FSDP", "TP") for b in ("all-gather", "reduce-scatter")
        }
    else:
        ((_, whole, all_tokens, split_tokens),) = rows
        assert float(whole) > float(all_tokens) > float(split_tokens) > 0
