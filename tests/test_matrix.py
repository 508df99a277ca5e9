"""The matrix: what chapters train is what their references train, and a resume repeats it.

A row trains two steps on some ranks, with an evaluation and a checkpoint after each, and continues
from the first checkpoint in the same processes. `CHECKS` are the properties of each row. The rows
of a chapter on as many ranks are a test. `-k` finds it by the words of any of its rows:

    python -m pytest --all tests/test_matrix.py -k "qwen3 or 12-expert"
"""

import pytest
import torch
from helpers.assertions import assert_opens, assert_synced, exact, final_tensors, worst
from helpers.matrix import (
    CP,
    EP,
    PP,
    SCRATCH,
    TP,
    Adapters,
    Conversations,
    Found,
    Itself,
    Row,
    SameRows,
    SameShards,
    Trained,
    WithTorchMuon,
    found_by,
    train,
)
from helpers.runner import CONTINUES, FACTS
from helpers.trainings import AGAIN, OFFLOAD, WHOLE

GPIPE, INTERLEAVED, ZBV = (["--schedule", name] for name in ("gpipe", "interleaved", "zbv"))
TOKENS, UNEVEN = ["--exchange", "tokens"], ["--layers-per-stage", "1,3", "--reshard-after-forward"]
GRID = [PP, 2, TP, 2]
ALL_FREQUENCIES = ["--compress", "dct", "--keep", 1, "--min-compress", 600]
# A row without `quick` has the mark `rest`.
ROWS = [
    Row("02", "llama", 6, quick=True),
    Row("02", "llama of 2", 6, ["--compile"]),
    Row("03", "llama", 6, quick=True),
    Row("03", "llama untied of 2", 4, [WHOLE, "--compile"]),
    Row("03", "gpt2", 8, [SCRATCH], ranks=3),
    Row("03", "gpt_neox", 8, [SCRATCH, AGAIN], ranks=3),
    Row("03", "mixtral", 4, ranks=3),
    Row("03", "llama", 6, [AGAIN, OFFLOAD], ranks=4),
    Row("04", "llama", 6, reference=SameRows, quick=True),
    Row("04", "llama of 2", 6, ["--packing", "overflow", "--compile"], reference=SameRows),
    Row("04", "llama", 4, ["--packing", "overflow"], ranks=3, reference=SameRows),
    Row("05", "llama", 6, ["--shard-size", 1], quick=True),
    Row("05", "llama untied", 3, ["--shard-size", 2], ranks=4),
    Row("06", "llama", 12, quick=True),
    Row("06", "llama", 12, [OFFLOAD]),
    Row("06", "llama untied", 8, [TP, 1, OFFLOAD], ranks=3),
    Row("06", "llama", 12, [TP, 2, AGAIN, SCRATCH], ranks=4),
    Row("06", "mistral", 6, [TP, 2, WHOLE], ranks=4),
    Row("06", "qwen2", 12, [TP, 2], ranks=4),
    Row("06", "qwen3", 12, [TP, 2], ranks=4),
    Row("06", "smollm3", 12, [TP, 2], ranks=4),
    Row("07", "llama", 12, quick=True),
    Row("07", "llama", 6, [*INTERLEAVED, SCRATCH]),
    Row("07", "llama untied", 6, [*ZBV, OFFLOAD]),
    Row("07", "mistral window", 12),
    Row("07", "qwen2 window", 6, [*ZBV]),
    Row("07", "qwen3", 12),
    Row("07", "smollm3", 12),
    Row("07", "gemma2", 6, [*INTERLEAVED]),
    Row("07", "gemma3_text", 12),
    Row("07", "llama untied", 6, [*INTERLEAVED, "--compile", AGAIN]),
    Row("07", "gpt2", 6, [*ZBV]),
    Row("07", "llama", 6, [PP, 1]),
    Row("07", "llama", 6, ranks=4),
    Row("07", "gpt2", 6, [PP, 2, SCRATCH], ranks=4),
    Row("07", "llama of 8", 3, [*INTERLEAVED], ranks=4),
    Row("07", "llama of 8", 3, [*ZBV, SCRATCH, AGAIN], ranks=4),
    Row("07", "llama untied", 6, [*GPIPE, PP, 2, *UNEVEN], ranks=4),
    Row("08", "llama", 6, ALL_FREQUENCIES, quick=True),
    Row("10", "llama", 6, reference=SameShards, quick=True),
    Row("11", "llama", 24, quick=True),
    Row("11", "mistral window", 24),
    Row("11", "llama of 2", 24, [*TOKENS, "--compile", AGAIN]),
    Row("11", "llama", 8, [CP, 1], ranks=3),
    Row("11", "llama", 24, [*TOKENS], ranks=4),
    Row("11", "gpt2", 24, ranks=4),
    Row("11", "gpt_neox", 24, [*TOKENS], ranks=4),
    Row("11", "mixtral", 24, ranks=4),
    Row("11", "olmo2", 12, [CP, 2, AGAIN, *TOKENS], ranks=4),
    Row("11", "opt", 24, ranks=4),
    Row("11", "phi3", 24, ranks=4),
    Row("11", "qwen2", 24, [*TOKENS, OFFLOAD], ranks=4),
    Row("11", "qwen3", 24, ranks=4),
    Row("11", "smollm3", 12, [CP, 2, AGAIN], ranks=4),
    Row("12", "mixtral with a loss of its router", 6, same_batch=True, quick=True),
    Row("12", "mixtral", 6, [WHOLE]),
    Row("12", "gpt_oss", 12, [OFFLOAD]),
    Row("12", "mixtral", 3, [EP, 2, AGAIN, SCRATCH], ranks=4),
    Row("12", "qwen3_moe", 6, [EP, 2], ranks=4),
    Row("12", "olmoe", 6, ranks=4),
    Row("12", "deepseek_v3", 6, [EP, 2, AGAIN], ranks=4),
    Row("13", "llama", 12, GRID, ranks=4, quick=True),
    Row("13", "llama untied", 6, [*GRID, *ZBV, SCRATCH], ranks=4),
    Row("13", "llama", 12, [*GRID, *UNEVEN], ranks=4),
    Row("13", "smollm3", 6, [*GRID, *INTERLEAVED, AGAIN], ranks=4),
    Row("13", "llama", 6, [PP, 1, TP, 2], ranks=4),
    Row("13", "llama of 2", 12, [*GRID, "--compile", AGAIN], ranks=4),
    Row("13", "llama", 6, GRID, ranks=8),
    Row("13", "llama untied", 3, [*GRID, *INTERLEAVED, SCRATCH, AGAIN], ranks=8),
    Row("14", "llama", 6, reference=Itself, quick=True),
    Row("14", "llama", 6, [AGAIN, OFFLOAD], reference=Itself),
    Row("14", "llama untied of 2", 12, [WHOLE, "--compile"], reference=Itself),
    Row("14", "qwen2", 8, ranks=3, reference=Itself),
    Row("14", "mixtral", 6, ranks=4, reference=Itself),
    Row("16", "llama", 2, reference=Conversations, quick=True),
    Row("16", "llama", 12, ranks=1, reference=Conversations),
    Row("16", "llama untied", 4, data="alone", ranks=1, reference=Conversations),
    Row("16", "llama untied of 2", 3, ["--compile"], reference=Conversations),
    Row("16", "llama", 1, data="blank", reference=Conversations),
    Row("16", "llama", 6, data="texts", reference=Conversations),
    Row("16", "llama", 2, [WHOLE], ranks=3, reference=Conversations),
    Row("16", "llama untied", 4, [OFFLOAD], ranks=3, reference=Conversations),
    Row("16", "llama untied", 3, [AGAIN], ranks=4, reference=Conversations),
    Row("16", "llama", 1, data="blank", ranks=4, reference=Conversations),
    Row("17", "llama", 2, reference=Adapters, quick=True),
    Row("17", "llama untied", 12, ranks=1, reference=Adapters),
    Row("17", "llama", 3, [OFFLOAD], reference=Adapters),
    Row("17", "mixtral", 6, [AGAIN], reference=Adapters),
    Row("17", "llama", 6, ["--compile", AGAIN], reference=Adapters),
    Row("17", "gpt2", 4, ranks=3, reference=Adapters),
    Row("17", "llama", 2, ["--lora-targets", ".*(q|v)_proj"], ranks=3, reference=Adapters),
    Row("17", "llama untied", 3, [WHOLE], ranks=4, reference=Adapters),
    Row("18", "llama", 6, reference=WithTorchMuon, quick=True),
    Row("18", "llama", 6, [AGAIN, OFFLOAD], reference=WithTorchMuon),
    Row("18", "llama untied", 12, [WHOLE], reference=WithTorchMuon),
    Row("18", "llama untied", 4, ranks=3, reference=WithTorchMuon),
    Row("18", "gpt2", 8, [SCRATCH], ranks=3, reference=WithTorchMuon),
    Row("18", "mixtral", 8, ranks=3, reference=WithTorchMuon),
    Row("18", "llama", 6, [SCRATCH], ranks=4, reference=WithTorchMuon),
    Row("18", "qwen3_moe", 3, [OFFLOAD], ranks=4, reference=WithTorchMuon),
    Row("19", "llama untied", 4, quick=True),
    Row("19", "llama untied of 2", 4, [WHOLE, "--compile"]),
    Row("19", "gpt_neox", 8, [AGAIN], ranks=3),
    Row("19", "mixtral", 6, [OFFLOAD], ranks=4),
]
# Who says nothing of its losses has chapter 1's.
WITHOUT_ROWS = {name[:2] for name in CONTINUES if "losses" not in FACTS[name]}
WITHOUT_ROWS -= {row.chapter for row in ROWS}
for number in sorted(WITHOUT_ROWS):
    ROWS.append(Row(number, "llama", 6, quick=True))
    ROWS.append(Row(number, "llama untied", 6, [OFFLOAD], ranks=4))


# -- The properties --------------------------------------------------------------------------------
# Equal means: but for the order in which fp32 numbers are added up.


def losses(row: Row, found: Found, expected: Found, trained: Trained) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)


def norms(row, found, expected, trained):
    assert found.norm == pytest.approx(expected.norm, rel=3e-5)  # chapter 1 sums squares in fp32


def held_out_losses(row, found, expected, trained):
    assert found.held_out == pytest.approx(expected.held_out, rel=1e-5)


def epochs_and_rates(row, found, expected, trained):
    assert not expected.order or found.order == expected.order


def gradients(row, found, expected, trained):
    """Of each parameter, before they are clipped."""
    is_mixture = any("experts" in name for name in found.weights)
    for step in range(1 if is_mixture else 2):  # a router may choose another expert then
        error, name = worst(expected.gradients[step], found.gradients[step])
        assert error < 1e-4, (step + 1, name, error)


def final_weights(row, found, expected, trained):
    assert found.weights.keys() == expected.weights.keys()
    squares, count = 0.0, 0
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-4)
        squares += (found.weights[name] - weight).double().square().sum().item()
        count += weight.numel()
    # On average, much less than an update. Alone, a weight whose gradient is rounding may differ.
    assert (squares / count) ** 0.5 < 0.01 * row.reference.rate


def final_opens(row, found, expected, trained):
    """Adapters: test_lora.py"""
    if row.reference != Adapters:
        assert_opens(trained.run)


def exact_resume(row, found, expected, trained):
    """To the last bit, in a single step."""
    run, again = trained.run, trained.again
    assert again.gradients(2) == {}
    assert exact(again.records) == exact(run.records)
    pairs = ((again.gradients(1), found.gradients[1]), (final_tensors(again), found.weights))
    for repeated, first in pairs:
        assert repeated.keys() == first.keys()
        assert [name for name in first if not torch.equal(repeated[name], first[name])] == []


def is_compiled(row, found, expected, trained):
    for case in (trained.run, trained.again):
        assert all((graphs > 0) == ("--compile" in row.flags) for graphs in case.graphs)


def order_of_writes(row, found, expected, trained):
    """A folder gets its name when all of its files are on the disk: test_resume.py"""
    if row.quick:
        names = ["step-00000001", "step-00000002", "final", "step-00000002", "final"]
        assert_synced(trained.output, names)


CHECKS = [losses, norms, held_out_losses, epochs_and_rates, gradients, final_weights, final_opens]
CHECKS += [exact_resume, is_compiled, order_of_writes]
JOBS = {}
for row in ROWS:
    JOBS.setdefault(row.job, []).append(row)


def job_of(name: str):
    marks = [] if JOBS[name][0].quick else [pytest.mark.rest]
    return pytest.param(JOBS[name], id=name, marks=marks)


@pytest.mark.parametrize("rows", [job_of(name) for name in JOBS])
def test_rows(tmp_path, request, rows):
    failures = {}
    for trained in train(rows, tmp_path, request.getfixturevalue):
        found = found_by(trained.run)
        for check in CHECKS:
            try:
                check(trained.row, found, trained.expected, trained)
            except AssertionError as error:
                failures[f"{trained.row}: {check.__name__}"] = str(error)[:500]
    assert failures == {}
