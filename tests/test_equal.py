"""Chapters whose losses are those of chapter 1 train what chapter 1 trains.

A job for each number of ranks runs many cases. Losses, norms, held-out losses, all gradients of two
steps and the model in the end are those of chapter 1 at the same global batch. For chapter 18,
chapter 1 has torch.optim.Muon. Chapter 14 on several ranks trains what it trains on one rank.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import (
    Folder,
    assert_same_losses,
    damaged,
    final_tensors,
    save_uneven_weights,
    write_model,
)
from runner import CHAPTERS_BY_NUMBER, CONTINUES, FACTS, REPOSITORY, Job, free_port
from test_muon import with_torch_muon

pytestmark = pytest.mark.rest

STEPS, BATCH = 2, 24  # samples per step, for 1, 2, 3, 4 and 8 ranks
# Two groups of two ranks can share heads and layers, and nothing else divides by the ranks.
SIZE = {"hidden_size": 40, "intermediate_size": 66, "num_hidden_layers": 4, "head_dim": 10}
SIZE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERT = {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 40, "n_layer": 4, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
GPT2 |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0) | {"bos_token_id": 0}
MODELS = {
    "llama": SIZE | BIASES | TIED,
    "llama untied": SIZE | UNTIED,
    "llama of 2": SIZE | BIASES | TIED | {"num_hidden_layers": 2},  # compiles in half the time
    "llama untied of 2": SIZE | UNTIED | {"num_hidden_layers": 2},
    "llama of 8": SIZE | TIED | {"num_hidden_layers": 8},
    "mistral": SIZE | UNTIED | {"sliding_window": 32},
    "mistral window": SIZE | UNTIED | {"sliding_window": 8},
    "qwen2": SIZE | TIED,
    "qwen2 window": SIZE | TIED | MIXED | {"use_sliding_window": True},
    "qwen3": SIZE | UNTIED | {"attention_bias": True},
    "smollm3": SIZE | TIED | {"mlp_bias": True, "no_rope_layers": [1, 0] * 2},
    "gemma2": SIZE | MIXED | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 5.0},
    "gemma3_text": SIZE | MIXED,
    "gpt2": GPT2,
    "gpt_neox": SIZE | UNTIED | {"num_attention_heads": 4},
    "olmo2": SIZE | UNTIED,
    "phi3": SIZE | UNTIED | {"hidden_size": 80, "sliding_window": None},
    "opt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96}
    | {"word_embed_proj_dim": 64, "max_position_embeddings": 64, "dropout": 0.0},
    "mixtral": SIZE | TIED | {"num_local_experts": 4, "intermediate_size": 40},
    "qwen3_moe": SIZE | UNTIED | EXPERT | {"num_experts": 6, "mlp_only_layers": [0]},
    "olmoe": SIZE | UNTIED | EXPERT | {"num_experts": 8, "head_dim": 8, "hidden_size": 64},
    "gpt_oss": SIZE | UNTIED | {"num_local_experts": 4, "intermediate_size": 40},
    "deepseek_v3": SIZE
    | UNTIED
    | EXPERT
    | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
}
AGAIN, WHOLE, OFFLOAD = "--activation-checkpointing", "--no-reshard-after-forward", "--cpu-offload"
TP, PP, CP, EP = (f"--{x}-parallel" for x in ("tensor", "pipeline", "context", "expert"))
GPIPE, INTERLEAVED, ZBV = (["--schedule", name] for name in ("gpipe", "interleaved", "zbv"))
TOKENS, UNEVEN = ["--exchange", "tokens"], ["--layers-per-stage", "1,3", "--reshard-after-forward"]
SCRATCH = ["--from-scratch"]
PARTS = ["--rank", 4, "--density", 0.05, "--alpha", 9]
# By the job, whose name begins with the number of ranks: the chapter, the model, the samples of a
# rank at a time, and other flags. The accumulation follows from the samples.
CASES = {
    "2": [
        ("02", "llama", 6, []),
        ("03", "llama untied of 2", 4, [WHOLE, "--compile"]),
        ("05", "llama", 6, ["--shard-size", 1]),
        ("06", "llama", 12, [OFFLOAD]),
        ("07", "llama", 6, [*INTERLEAVED, *SCRATCH]),
        ("07", "llama untied", 6, [*ZBV, OFFLOAD]),
        ("07", "mistral window", 12, []),
        ("07", "qwen2 window", 6, [*ZBV]),
        ("07", "qwen3", 12, []),
        ("07", "smollm3", 12, []),
        ("07", "gemma2", 6, [*INTERLEAVED]),
        ("07", "gemma3_text", 12, []),
        ("07", "llama untied", 6, [*INTERLEAVED, "--compile", AGAIN]),
        ("07", "gpt2", 6, [*ZBV]),
        ("07", "llama", 6, [PP, 1]),
        ("11", "mistral window", 24, []),
        ("11", "llama of 2", 24, [*TOKENS, "--compile", AGAIN]),
        ("12", "mixtral", 6, [WHOLE]),
        ("12", "gpt_oss", 12, [OFFLOAD]),
        ("14", "llama", 6, [AGAIN, OFFLOAD]),
        ("14", "llama untied of 2", 12, [WHOLE, "--compile"]),
        ("18", "llama", 6, [AGAIN, OFFLOAD]),
        ("18", "llama untied", 12, [WHOLE]),
        ("19", "llama untied of 2", 4, [WHOLE, "--compile"]),
    ],
    "3": [
        ("02", "llama of 2", 4, ["--compile"]),
        ("03", "gpt2", 8, [*SCRATCH]),
        ("03", "gpt_neox", 8, [*SCRATCH, AGAIN]),
        ("03", "mixtral", 4, []),
        ("06", "llama untied", 8, [TP, 1, OFFLOAD]),
        ("11", "llama", 8, [CP, 1]),
        ("14", "qwen2", 8, []),
        ("18", "llama untied", 4, []),
        ("18", "gpt2", 8, [*SCRATCH]),
        ("18", "mixtral", 8, []),
        ("19", "gpt_neox", 8, [AGAIN]),
    ],
    "4 shards and stages": [
        ("03", "llama", 6, [AGAIN, OFFLOAD]),
        ("05", "llama untied", 3, ["--shard-size", 2]),
        ("06", "llama", 12, [TP, 2, AGAIN, *SCRATCH]),
        ("06", "mistral", 6, [TP, 2, WHOLE]),
        ("06", "qwen2", 12, [TP, 2]),
        ("06", "qwen3", 12, [TP, 2]),
        ("06", "smollm3", 12, [TP, 2]),
        ("07", "llama", 6, []),
        ("07", "gpt2", 6, [PP, 2, *SCRATCH]),
        ("07", "llama of 8", 3, [*INTERLEAVED]),
        ("07", "llama of 8", 3, [*ZBV, *SCRATCH, AGAIN]),
        ("07", "llama untied", 6, [*GPIPE, PP, 2, *UNEVEN]),
        ("14", "mixtral", 6, []),
        ("18", "llama", 6, [*SCRATCH]),
        ("18", "qwen3_moe", 3, [OFFLOAD]),
        ("19", "mixtral", 6, [OFFLOAD]),
    ],
    "4 tokens and experts": [
        ("11", "llama", 24, [*TOKENS]),
        ("11", "gpt2", 24, []),
        ("11", "gpt_neox", 24, [*TOKENS]),
        ("11", "mixtral", 24, []),
        ("11", "olmo2", 12, [CP, 2, AGAIN, *TOKENS]),
        ("11", "opt", 24, []),
        ("11", "phi3", 24, []),
        ("11", "qwen2", 24, [*TOKENS, OFFLOAD]),
        ("11", "qwen3", 24, []),
        ("11", "smollm3", 12, [CP, 2, AGAIN]),
        ("12", "mixtral", 3, [EP, 2, AGAIN, *SCRATCH]),
        ("12", "qwen3_moe", 6, [EP, 2]),
        ("12", "olmoe", 6, []),
        ("12", "deepseek_v3", 6, [EP, 2, AGAIN]),
    ],
    "4 grids": [
        ("13", "llama", 12, [PP, 2, TP, 2]),
        ("13", "llama untied", 6, [PP, 2, TP, 2, *ZBV, *SCRATCH]),
        ("13", "llama", 12, [PP, 2, TP, 2, *UNEVEN]),
        ("13", "smollm3", 6, [PP, 2, TP, 2, *INTERLEAVED, AGAIN]),
        ("13", "llama", 6, [PP, 1, TP, 2]),
        ("13", "llama of 2", 12, [PP, 2, TP, 2, "--compile", AGAIN]),
    ],
    "8": [
        ("13", "llama", 6, [PP, 2, TP, 2]),
        ("13", "llama untied", 3, [PP, 2, TP, 2, *INTERLEAVED, *SCRATCH, AGAIN]),
    ],
}
# Who says nothing of its losses has chapter 1's.
WITHOUT_CASES = {n[:2] for n in CONTINUES if "losses" not in FACTS[n]}
WITHOUT_CASES -= {number for cases in CASES.values() for number, *_ in cases}
for number in sorted(WITHOUT_CASES):
    CASES["2"].append((number, "llama", 6, []))
    CASES["4 shards and stages"].append((number, "llama untied", 6, [OFFLOAD]))
OFF = {"grad_norm": 3e-5}  # chapter 1's own norm adds up squares in fp32


def write_weights(folder, name: str):
    write_model(folder, model_type=name.split(" ")[0], **MODELS[name])
    return save_uneven_weights(folder)


def described(folder, name, number, model, batch, more) -> dict:
    script = CHAPTERS_BY_NUMBER.get(number, number)  # or a script
    if number == "19":
        script = damaged(script, folder, {"LOSS_CHUNK = 1024": "LOSS_CHUNK = 50"})
    flags = ["-e", name, "-m", folder / model, "--save-dir", folder]
    flags += PARTS if number == "14" else ["--no-from-scratch"]
    flags += ["-d", folder / "text.jsonl", "-s", 32, "-b", batch, "--lr", 1e-4, "--log-freq", 1]
    flags += ["--max-steps", STEPS, "--eval-freq", STEPS // 2, "--ckpt-freq", 99, *more]
    (folder / name).mkdir()
    env = {"MASTER_PORT": str(free_port())}
    case = {"name": name, "script": str(script), "env": env, "folder": str(folder / name)}
    return case | {"flags": [str(flag) for flag in flags]}


def run(folder, name, cases, processes, before="") -> Job:
    (folder / f"{name}.json").write_text(json.dumps(cases))
    many, output = REPOSITORY / "tests" / "many_trainings.py", folder / f"{name}.txt"
    job = Job(many, [folder / f"{name}.json"], output, processes, before=before)
    assert job.wait(500) == 0, job.output[-5000:]
    return job


def accumulation(ranks, number, batch, more) -> list:
    """Its number is that of micro-batches of a rank, or of those that go through a pipeline."""
    split = {f: more[more.index(f) + 1] for f in (TP, PP, CP) if f in more}
    if number == "06":
        groups = ranks // split.get(TP, ranks)
    elif number in ("07", "13"):
        groups = ranks // split.get(PP, ranks) // split.get(TP, 1)
    elif number == "11":
        groups = ranks // split.get(CP, ranks)
    else:
        groups = ranks
    count = BATCH // batch // groups
    assert count * batch * groups == BATCH, (number, ranks, batch, more)
    return ["--gradient-accumulation-steps", count]


class Case(Folder):
    def gradients(self, step: int) -> dict:
        """Of all ranks; those of a stage are equal on all of its ranks."""
        files = sorted(self.folder.glob(f"gradients-{step}-*"))
        return {name: g for file in files for name, g in torch.load(file).items()}


def worst(expected: dict, found: dict) -> tuple[float, str]:
    """The largest relative error of the gradient of a parameter, and its name."""
    assert expected.keys() == found.keys()
    largest = max(g.norm() for g in expected.values())
    errors = {}
    for name, g in expected.items():  # a bias of keys may have no gradient but rounding
        errors[name] = ((found[name] - g).norm() / max(g.norm(), 1e-5 * largest)).item()
    return max((error, name) for name, error in errors.items())


def differences(single: Case, case: Case) -> list[str]:
    try:
        assert_same_losses(single, case, STEPS, **OFF)
        is_mixture = any("experts" in name for name in final_tensors(single))
        for step in (1,) if is_mixture else (1, 2):  # a router may choose another expert then
            error, name = worst(single.gradients(step), case.gradients(step))
            print(f"{case.folder.name}: step {step}, {error:.1e} ({name})")
            assert error < 1e-4, (step, name, error)
        a, b = final_tensors(single), final_tensors(case)
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)
    except AssertionError as error:
        return [f"{case.folder.name}: {error}"]
    return []


@pytest.mark.parametrize("job", CASES)
def test_equal_to_chapter_1(tmp_path, dataset, job):
    ranks = int(job[0])
    (tmp_path / "text.jsonl").write_bytes(dataset.read_bytes())
    alone, cases = {}, {}
    for number, model, batch, more in CASES[job]:
        origin = SCRATCH if SCRATCH[0] in more else []
        script = {"14": "14", "18": with_torch_muon(tmp_path)}.get(number, "01")
        single = f"{model} alone {'random' if origin else ''} {Path(script).parent.name or script}"
        if not (tmp_path / model).exists():
            write_weights(tmp_path / model, model)
        if single not in alone:
            alone[single] = described(tmp_path, single, script, model, BATCH, origin)
        name = "-".join(map(str, (number, model, batch, *more)))
        flags = [*more, *accumulation(ranks, number, batch, more)]
        cases[name] = single, described(tmp_path, name, number, model, batch, flags)
    run(tmp_path, "single", [*alone.values()], 1)
    run(tmp_path, "job", [case for _, case in cases.values()], ranks)
    problems = []
    for name, (single, _) in cases.items():
        problems += differences(Case(tmp_path / single), Case(tmp_path / name))
    assert problems == [], "\n".join(problems)
