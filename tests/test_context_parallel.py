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
from runner import CHAPTER_11, Job, load
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


if __name__ == "__main__":
    compare(json.loads(Path(sys.argv[1]).read_text()))
