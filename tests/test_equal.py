"""Chapters whose losses are those of chapter 1 train what chapter 1 trains.

A job for each number of ranks runs many cases. Losses, norms, held-out losses, all gradients of two
steps and the model in the end are those of chapter 1 at the same global batch. For chapter 18,
chapter 1 has torch.optim.Muon. Chapter 14 on several ranks trains what it trains on one rank.
"""

from pathlib import Path

import pytest
import torch
from helpers.assertions import OFF, assert_same_losses, final_tensors, worst
from helpers.chapters import with_torch_muon
from helpers.models import write_weights
from helpers.runner import CONTINUES, FACTS
from helpers.trainings import AGAIN, BATCH, OFFLOAD, STEPS, WHOLE, Case, described, run_cases

pytestmark = pytest.mark.rest

TP, PP, CP, EP = (f"--{x}-parallel" for x in ("tensor", "pipeline", "context", "expert"))
GPIPE, INTERLEAVED, ZBV = (["--schedule", name] for name in ("gpipe", "interleaved", "zbv"))
TOKENS, UNEVEN = ["--exchange", "tokens"], ["--layers-per-stage", "1,3", "--reshard-after-forward"]
SCRATCH = ["--from-scratch"]
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
    run_cases(tmp_path, "single", [*alone.values()], 1)
    run_cases(tmp_path, "job", [case for _, case in cases.values()], ranks)
    problems = []
    for name, (single, _) in cases.items():
        problems += differences(Case(tmp_path / single), Case(tmp_path / name))
    assert problems == [], "\n".join(problems)
