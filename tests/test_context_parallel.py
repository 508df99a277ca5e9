"""Chapter 11 trains what chapter 1 trains, with the tokens of each sample split over a group."""

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    WITHOUT_INDUCTOR,
    assert_one_sentence,
    assert_opens,
    assert_same_losses,
    damaged,
    exact,
    take_over,
    write_model,
)
from runner import CHAPTER_3, CHAPTER_11, REPOSITORY, Job, load
from test_fsdp import NORMS, OFF, SCALER, assert_same_checkpoint, norms, told
from test_quick import WATCH_SAVES
from test_resume import assert_synced
from torch import distributed as dist
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

CP = {"script": CHAPTER_11}

SIZE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
SIZE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0}
FAMILIES = {
    "gpt2": GPT2,
    "gpt_neox": SIZE | {"num_attention_heads": 4, "hidden_dropout": 0.0, "attention_bias": True},
    "llama": SIZE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": SIZE | {"sliding_window": None},
    "mixtral": SIZE | {"num_local_experts": 4, "sliding_window": None},
    "olmo2": SIZE,
    "opt": SIZE
    | {"num_attention_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "phi3": SIZE | {"sliding_window": None},
    "qwen2": SIZE,
    "qwen3": SIZE,
    "smollm3": SIZE | {"no_rope_layers": [1, 0]},
}


def write_weights(folder: Path, family: str, **config) -> Path:
    """A model's folder with large random weights: attention looks far, so that errors show."""
    write_model(folder, model_type=family, **FAMILIES.get(family, SIZE) | config)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return folder


# -- Gradients of many cases in one job ------------------------------------------------------------
# The ranks of the job run this file. They compute the loss and the gradients of each case twice:
# with the functions of the chapter, and with the whole batch in one process.


def one_process(folder: Path, input_ids) -> tuple[float, dict]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss = model.train()(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def together(script, flags: list, input_ids, device) -> tuple[float, dict]:
    sys.argv = [sys.argv[0], *map(str, flags)]
    args = script.parse_args()
    args.dtype = "fp32"
    config, _ = script.load_config_and_tokenizer(args)
    script.check_split(config, args)
    model = script.build_model(args, config, device, None).train()
    groups = script.WORLD_SIZE // args.context_parallel
    own = input_ids.chunk(groups)[script.RANK // args.context_parallel]
    loss = script.loss_of(model, own, args)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item(), {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def compare(cases: list[dict]) -> None:
    scripts = {case["script"]: None for case in cases}
    scripts = {name: load(Path(name)) for name in scripts}
    device = next(iter(scripts.values())).join_process_group()
    registers = [x._global_mapping for x in (AttentionInterface, AttentionMaskInterface)]
    originals = [dict(register) for register in registers]
    for case in cases:
        script = scripts[case["script"]]
        torch.manual_seed(2)
        torch._dynamo.reset()
        input_ids = torch.randint(1, 2048, (4, case["seq_length"]))
        for register, original in zip(registers, originals, strict=True):
            register.update(original)
        expected_loss, expected = one_process(case["folder"], input_ids)
        flags = [
            "-m",
            case["folder"],
            "--no-from-scratch",
            "-s",
            case["seq_length"],
            *case["flags"],
        ]
        loss, found = together(script, flags, input_ids, device)
        assert found.keys() == expected.keys()
        largest = max(gradient.abs().max() for gradient in expected.values())
        errors = {}
        for name, gradient in expected.items():
            size = gradient.abs().max()
            if size < 1e-5 * largest:  # zero but for rounding: a bias of keys without rotation
                size = largest
            errors[name] = (found[name] - gradient).abs().max() / size
        worst = max(errors, key=errors.get)
        result = {"loss": abs(loss - expected_loss), "gradient": errors[worst].item(), "of": worst}
        result["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
        if script.RANK == 0:
            print("\nresult", json.dumps({"name": case["name"]} | result), flush=True)
    dist.destroy_process_group()


def compared(folder: Path, processes: int, cases: list[dict], status=0, **options) -> str:
    """The output of rank 0."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases, default=str))
    job = Job(Path(__file__), [file], folder / "compare.txt", processes, **options)
    assert job.wait(240) == status, job.output
    return job.ranks[0].output


def results(*arguments, **options) -> dict:
    output = compared(*arguments, **options)
    lines = [line for line in output.splitlines() if line.startswith("result ")]
    found = [json.loads(line.removeprefix("result ")) for line in lines]
    return {x["name"]: SimpleNamespace(**x) for x in found}


def case(folder: Path, *flags, name: str, script=CHAPTER_11, seq_length=32) -> dict:
    return {"folder": folder, "flags": flags, "name": name, "script": script} | {
        "seq_length": seq_length
    }


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("families")
    return {family: write_weights(parent / family, family) for family in FAMILIES}


@pytest.mark.rest
def test_gradients_of_each_family_on_two_ranks(tmp_path, folders):
    cases = []
    for family, folder in folders.items():
        for exchange in ("heads", "tokens"):
            cases.append(case(folder, "--exchange", exchange, name=f"{family}, {exchange}"))
    # Windows are exact with heads: the mask is for whole samples.
    for family in ("mistral", "phi3"):
        folder = write_weights(tmp_path / family, family, sliding_window=8)
        cases.append(case(folder, name=f"{family}, window"))
    folder = write_weights(tmp_path / "auxiliary", "mixtral", output_router_logits=True)
    cases.append(case(folder, name="auxiliary loss"))
    found = results(tmp_path, 2, cases)
    # A limit that the README names: this loss of a rank is not linear in its tokens.
    auxiliary = found.pop("auxiliary loss")
    print(f"auxiliary loss: loss {auxiliary.loss:.1e}, gradient {auxiliary.gradient:.1e} (limit)")
    assert 1e-6 < auxiliary.loss < 1e-3
    assert 1e-4 < auxiliary.gradient < 1e-1
    assert_exact(found)


@pytest.mark.rest
def test_gradients_of_each_family_on_four_ranks(tmp_path, folders):
    """One group of four; two groups of two, with activation checkpointing."""
    cases = []
    for family, folder in folders.items():
        for exchange in ("heads", "tokens"):
            flags = ["--exchange", exchange]
            cases.append(case(folder, *flags, name=f"{family}, {exchange}"))
            flags += ["--context-parallel", 2, "--activation-checkpointing"]
            cases.append(case(folder, *flags, name=f"{family}, {exchange}, two groups"))
    assert_exact(results(tmp_path, 4, cases))


def assert_exact(found: dict) -> None:
    for name, result in found.items():
        print(f"{name}: loss {result.loss:.1e}, gradient {result.gradient:.1e} ({result.of})")
    assert found
    assert [result for result in found.values() if result.loss > 1e-5] == []
    assert [result for result in found.values() if result.gradient > 3e-5] == []


@pytest.mark.rest
def test_gradients_of_compiled_layers(tmp_path, folders):
    """With Inductor, the second job finds what the first job has cached."""
    heads = case(folders["llama"], "--compile", "--exchange", "heads", name="heads")
    flags = ["--compile", "--activation-checkpointing", "--exchange", "tokens"]
    tokens = case(folders["llama"], *flags, name="tokens, checkpointing")
    inductor = {"env": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}}
    jobs = [([heads], {"before": WITHOUT_INDUCTOR}), ([tokens], inductor), ([tokens], inductor)]
    for number, (cases, options) in enumerate(jobs):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = results(folder, 2, cases, **options)
        assert_exact(found)
        assert [result.graph_breaks for result in found.values()] == [0]


# -- The same training -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "pretrained"
    return write_weights(folder, "llama", num_hidden_layers=1)


def test_one_group_trains_what_chapter_1_trains(trainer, pretrained):
    """Losses, norms, the held-out loss, and a resume that changes nothing."""
    flags = ["-m", pretrained, "--no-from-scratch", "--max-steps", 4, "--eval-freq", 2]
    flags += ["-b", 4, "--lr", 1e-3, "--ckpt-freq", 2, "--keep-checkpoints", 9]
    single = trainer(*flags, name="single", before=NORMS)
    run = trainer(*flags, name="run", processes=2, before=NORMS + WATCH_SAVES, **CP)
    assert_synced(run.run.ranks[0].output, run.folder, ["step-00000002", "step-00000004", "final"])
    assert_same_losses(single, run, 4, **OFF)
    assert_opens(run, reference=single)
    assert norms(run.run.ranks[0].output) == pytest.approx(norms(single.output), rel=1e-6)
    assert "Attention sdpa, compute precision fp32" in run.output
    assert "Groups of 2 ranks share each sample, and exchange heads" in run.output
    take_over(run, trainer, "again", 2)
    again = trainer(*flags, name="again", processes=2, **CP)
    assert "Continuing from" in again.output
    assert exact(again.records) == exact(run.records)
    result = trainer("--context-parallel", 3, name="refused", processes=2, status=None, **CP)
    assert result.run.ranks[0].process.exitcode == 1
    assert_one_sentence(result.output, "--context-parallel 3 does not divide the 2 ranks")


# Ranks, and flags for a global batch of 12 samples
TOKENS = ["--exchange", "tokens"]
CASES = [
    (2, ["-b", 12, "--activation-checkpointing"]),
    (2, ["-b", 6, *TOKENS, "--gradient-accumulation-steps", 2, "--no-reshard-after-forward"]),
    (4, ["-b", 3, "--context-parallel", 2, "--gradient-accumulation-steps", 2]),
    (4, ["-b", 12, *TOKENS, "--cpu-offload"]),
    (3, ["-b", 4, "--context-parallel", 1]),
]


@pytest.mark.rest
def test_losses_are_those_of_chapter_1(trainer, pretrained):
    """Also gradient norms, and the held-out loss. The groups cannot share its samples evenly."""
    flags = ["-m", pretrained, "--no-from-scratch", "--max-steps", 30, "--eval-freq", 15]
    flags += ["--lr", 1e-3, "--ckpt-freq", 99, "--max-grad-norm", 0.3]
    single = trainer(*flags, "-b", 12, name="single", before=NORMS)
    assert min(single.column("grad_norm")) > 0.3  # every gradient is clipped
    (held_out,) = re.findall(r"(\d+) held out", single.output)
    assert int(held_out) % (2 * 3)  # two groups, three samples in a batch
    for number, (processes, split) in enumerate(CASES):
        options = {"name": f"run-{number}", "processes": processes, "before": NORMS} | CP
        run = trainer(*flags, *split, **options)
        assert_same_losses(single, run, 30, **OFF)
        found, expected = norms(run.run.ranks[0].output), norms(single.output)
        differences = [abs(a / b - 1) for a, b in zip(found, expected, strict=True)]
        losses = zip(run.column("loss"), single.column("loss"), strict=True)
        loss = max(abs(a - b) for a, b in losses)
        print(f"{processes} ranks, {split}: losses {loss:.1e}, norms {max(differences):.1e}")
        assert max(differences) < 1e-6


# Each rank tells which samples it read, and which of its activations were dropped.
WATCH = """
import hashlib
import torch
import torch.distributed as dist

seeds, dropped, samples = [], [], []
original_seed = torch.manual_seed

def seed(number):
    seeds.append(number)
    return original_seed(number)

torch.manual_seed = seed
original_dropout = torch.nn.Dropout.forward

def dropout(self, x):
    y = original_dropout(self, x)
    if self.training and not dropped:
        dropped.append(hashlib.sha256((y == 0).numpy()).hexdigest()[:16])
    return y

torch.nn.Dropout.forward = dropout
destroy = dist.destroy_process_group

def tell():
    print("\\nseeds", *seeds[1:])
    print("dropped", *dropped)
    destroy()

dist.destroy_process_group = tell
"""


@pytest.mark.rest
@pytest.mark.parametrize("exchange", ["heads", "tokens"])
def test_dropout_and_resume(trainer, dropout_model, exchange):
    """Ranks of a group drop other activations, and a resumed run drops the same ones."""
    flags = ["-m", dropout_model, "-b", 2, "--max-steps", 4, "--eval-freq", 4, "--ckpt-freq", 2]
    flags += ["--context-parallel", 2, "--exchange", exchange]
    options = {"processes": 4, "before": WATCH} | CP
    origin = trainer(*flags, name="origin", **options)
    seeds = [seed for rank in told(origin, "seeds ") for seed in rank]
    assert len({*seeds}) == len(seeds) == 4 * 4
    assert len({mask for (mask,) in told(origin, "dropped ")}) == 4
    take_over(origin, trainer, "same", 2)
    same = trainer(*flags, name="same", **options)
    assert "Continuing from" in same.output
    assert exact(same.records) == exact(origin.records)
    assert_same_checkpoint(*(run.folder / "step-00000004" for run in (origin, same)))


@pytest.mark.rest
def test_resume_in_chapter_3_and_back(trainer, pretrained):
    flags = ["-m", pretrained, "--no-from-scratch", "--max-steps", 6, "--eval-freq", 6]
    flags += ["--lr", 1e-3, "--ckpt-freq", 2, "--keep-checkpoints", 9]
    flags += ["--lr-scheduler", "constant"]  # the number of steps changes other schedules
    origin = trainer(*flags, "-b", 4, name="origin", processes=2, **CP)
    take_over(origin, trainer, "other", 2)
    scripts = [(4, ["-b", 2], {"script": CHAPTER_3}), (6, ["-b", 2, *TOKENS], CP)]
    for steps, split, script in scripts:
        groups = ["--context-parallel", 2] if script == CP else []
        split = [*split, *groups, "--max-steps", steps]
        processes = 4 if script == CP else 2
        other = trainer(*flags, *split, name="other", processes=processes, **script)
        assert "Continuing from" in other.output
    columns = zip(origin.column("loss"), other.column("loss"), strict=True)
    assert all(abs(a - b) < 1e-5 for a, b in columns)
    assert other.column("eval/loss")[-1] == pytest.approx(origin.column("eval/loss")[-1], rel=1e-5)
    # And `final/` opens in Transformers, with the loss of the run.
    final = AutoModelForCausalLM.from_pretrained(other.folder / "final")
    assert final.config._attn_implementation == "sdpa"
    saved = AutoModelForCausalLM.from_pretrained(origin.folder / "final").state_dict()
    for name, x in final.state_dict().items():
        assert torch.allclose(x, saved[name], atol=1e-5), name


@pytest.mark.rest
@pytest.mark.parametrize("exchange", ["heads", "tokens"])
def test_compute_precision(trainer, pretrained, exchange):
    """In bf16 nearly the same losses; a gradient scaler, as for fp16, changes nothing."""
    flags = ["-m", pretrained, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 3]
    single = trainer(*flags, "--dtype", "bf16", name="single")
    flags += ["--exchange", exchange, "--max-grad-norm", 0]
    run = trainer(*flags, "--dtype", "bf16", name="bf16", processes=2, **CP)
    assert run.column("loss")[:1] == pytest.approx(single.column("loss")[:1], rel=2e-3)
    if exchange == "heads":
        flags = ["--max-steps", 2, "--eval-freq", 0, "--max-grad-norm", 0]
        plain = trainer(*flags, name="plain", processes=2, **CP)
        scaled = trainer(*flags, name="scaled", processes=2, before=SCALER, **CP)
        assert scaled.column("loss") == plain.column("loss")
        assert "scale 2 65536.0" in scaled.output


# -- What would happen -----------------------------------------------------------------------------

LABELS = "    labels = input_ids.roll(-1, dims=1)\n"
END = "    labels[:, -1] = -100  # no label, because the sample ends\n"
GIVEN = 'batch["labels"] = batch["shift_labels"]'
LATE = {
    LABELS: "",
    END: "",
    '"shift_labels": labels': '"shift_labels": input_ids',
    GIVEN: f"{GIVEN} = batch['shift_labels'].roll(-1, dims=1)\n    {GIVEN[:15]}[:, -1] = -100",
}
COUNT = "len(input_ids) * (args.seq_length - 1) / args.context_parallel"
OWN_COUNT = '(batch["shift_labels"] != -100).sum()'
SHARD = "    if args.cpu_offload:\n"
ALONG = """
    shape = (WORLD_SIZE // args.context_parallel, args.context_parallel)
    policy["mesh"] = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))["dp"]
"""
ORDER = "torch.cat(in_order, dim=3)"
WINDOW = "args.seq_length > window:"
LISTED = 'FAMILIES += ["qwen3", "smollm3"]'
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
LINEAR = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2}
LINEAR |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
LINEAR |= {"linear_num_key_heads": 4, "linear_num_value_heads": 4}
LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
# What is damaged, the exchange, the model; how wrong the worst gradient is, at least.
TRAPS = {
    "labels shifted after the split": (LATE, "heads", "llama", {}, 0.1),
    "the mean over the labels of a rank": ({COUNT: OWN_COUNT}, "heads", "llama", {}, 0.01),
    "no positions": ({'"position_ids": positions, ': ""}, "tokens", "llama", {}, 0.1),
    "FSDP along the groups": ({SHARD: ALONG + SHARD}, "heads", "llama", {}, 0.1),
    "keys in the order of the ranks": (
        {ORDER: "torch.cat(parts.unbind(), dim=3)"},
        "tokens",
        "llama",
        {},
        0.1,
    ),
    "aligned at the upper left": (
        {"attn_mask=causal,": "is_causal=True,"},
        "tokens",
        "llama",
        {},
        0.1,
    ),
    "a dropped window": ({WINDOW: "False:"}, "tokens", "mistral", {"sliding_window": 8}, 0.1),
    "no mask for a window": (
        {"return mask_function(q": "return None and mask_function(q"},
        "heads",
        "mistral",
        {"sliding_window": 8},
        0.1,
    ),
    "a convolution": ({LISTED: 'FAMILIES = ["lfm2"]'}, "heads", "lfm2", CONVOLUTION, 0.1),
    "linear attention": (
        {LISTED: 'FAMILIES = ["qwen3_next"]'},
        "heads",
        "qwen3_next",
        LINEAR,
        0.1,
    ),
}


@pytest.mark.rest
def test_wrong_gradients_are_noticed(tmp_path):
    """So the tests above can fail. In some cases, the loss is nearly right."""
    cases = []
    for number, (trap, (damages, exchange, family, config, _)) in enumerate(TRAPS.items()):
        parent = tmp_path / str(number)
        parent.mkdir()
        script = damaged(CHAPTER_11, parent, damages)
        folder = write_weights(parent / "model", family, **config)
        cases.append(case(folder, "--exchange", exchange, name=trap, script=script))
    found = results(tmp_path, 2, cases)
    for trap, result in found.items():
        print(f"{trap}: loss {result.loss:.1e}, gradient {result.gradient:.1e} ({result.of})")
    for trap, (*_, least) in TRAPS.items():
        assert found[trap].gradient > least, trap
    assert found["FSDP along the groups"].loss < 1e-5


@pytest.mark.rest
def test_frequencies_of_longrope_depend_on_the_last_position(tmp_path):
    """So two ranks of a group would rotate with other frequencies. `check_split` refuses this."""
    config = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}
    folder = write_weights(tmp_path / "phi3", "phi3", head_dim=8, **config)
    rotation = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb
    used = []
    for first in (0, 16):
        rotation(torch.zeros(1), torch.arange(first, first + 16)[None])
        used.append(rotation.inv_freq.clone())
    assert torch.equal(used[0], 4 * used[1])


@pytest.mark.rest
def test_no_mask_is_built(tmp_path, folders):
    """Transformers could take distant chunks for packed documents, and build a mask for them."""
    begin = "        outputs = []\n"
    tell = {begin: begin + "        say(f'mask {mask is not None}')\n"}
    script = damaged(CHAPTER_11, tmp_path, tell)
    output = compared(tmp_path, 2, [case(folders["llama"], *TOKENS, name="plain", script=script)])
    assert re.findall("^mask (.*)$", output, re.MULTILINE) == ["False"] * 2


# -- Wrong flags -----------------------------------------------------------------------------------

# Ranks, flags, the model, and a part of the sentence
REFUSED = {
    "ranks": (4, ["--context-parallel", 3], {}, "3 does not divide the 4 ranks"),
    "half of the tokens": (4, ["-s", 36], {}, "choose a multiple of 8"),
    "kv heads": (8, [], {}, "8 does not divide 4 kv heads: add --exchange tokens"),
    "heads": (8, [], {"model_type": "gpt2"}, "8 does not divide 4 kv heads"),
    "a window": (2, TOKENS, {"sliding_window": 8}, "window, 8: use --exchange heads"),
    "a family": (2, [], {"model_type": "lfm2"}, "lfm2 is not in the list"),
    "frequencies": (2, [], {"rope_parameters": {"rope_type": "longrope"}}, "use chapter 3"),
}
ACCEPTED = {
    "tokens for more ranks than kv heads": (8, TOKENS, {}),
    "a window with heads": (2, [], {"sliding_window": 8}),
    "a window as long as a sample": (2, TOKENS, {"sliding_window": 32}),
    "one rank": (1, ["-s", 34], {}),
}


@pytest.fixture
def check(monkeypatch):
    """Calls `check_split` of a rank, without any other process to wait for."""
    monkeypatch.setattr(dist, "barrier", lambda: None)

    def run(processes: int, flags: list, config: dict, local_rank: int):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        monkeypatch.setattr(sys, "argv", ["train-llm.py", "-s", "32", *map(str, flags)])
        script = load(CHAPTER_11)
        monkeypatch.setattr(script, "WORLD_SIZE", processes)
        config = {"model_type": "llama", "num_attention_heads": 4} | config
        script.check_split(SimpleNamespace(**config), script.parse_args())

    return run


@pytest.mark.rest
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_sentence(check, name, monkeypatch):
    """The first rank of a node says why. The others wait meanwhile: torchrun ends them."""
    waits = []
    monkeypatch.setattr(time, "sleep", waits.append)
    *arguments, part = REFUSED[name]
    for local_rank in (0, 1):
        with pytest.raises(SystemExit, match=re.escape(part)):
            check(*arguments, local_rank=local_rank)
        assert waits == [5] * local_rank


@pytest.mark.rest
@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(check, name):
    check(*ACCEPTED[name], local_rank=0)


# -- The benchmark ---------------------------------------------------------------------------------

BENCHMARK = REPOSITORY / "benchmarks" / "context-parallel.py"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}


@pytest.mark.rest
@pytest.mark.parametrize("what", ["traffic", "memory", "attention"])
def test_benchmark(what, tmp_path, monkeypatch, capsys):
    """It ends with an error where losses differ, or what it counts from what it computes."""
    tool = load(BENCHMARK)
    tool.SHAPE |= SHAPE
    tool.LLAMA |= SHAPE
    tool.FLAGS = [[], ["--activation-checkpointing"]] if what == "traffic" else [[]]

    def launch(processes, *arguments):  # without torchrun, and without its imports
        output = tmp_path / f"output-{len([*tmp_path.iterdir()])}.txt"
        job = Job(BENCHMARK, arguments, output, processes, env={"COMET_AUTO_LOG_DISABLE": "true"})
        assert job.wait() == 0, job.output
        return job.output

    tool.launch = launch
    lengths = ["--ranks", "2", "--lengths", "128", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), what, *lengths])
    tool.main()
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in rows if row and re.search(r"\d", row[-1])]
    if what == "traffic":
        found = {(row[2].strip(), row[4].strip()) for row in rows}
        tokens = {("tokens", "all-gather"), ("tokens", "reduce-scatter")}
        assert found == tokens | {("heads", "all-to-all")}
        assert len(rows) == 6
    elif what == "memory":
        ((_, whole, _, heads, tokens, masks),) = rows
        assert float(whole) > float(tokens) > float(heads) > 0
        assert float(masks) > 0
    else:
        ((_, layer, alone, *_),) = rows
        assert float(layer) >= float(alone) >= 0


if __name__ == "__main__":
    compare(json.loads(Path(sys.argv[1]).read_text()))
