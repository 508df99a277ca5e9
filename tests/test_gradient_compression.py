"""Chapter 8 sends less than chapter 2; without --compress, it is chapter 2 to the last bit."""

import json
import math

import pytest
import torch
from helpers.assertions import assert_one_sentence, assert_same_model, exact, told
from helpers.runner import CHAPTER_2, CHAPTER_8, SCRIPTS, Job, patches
from helpers.trainer import resume, take_over

CHAPTER = CHAPTER_8
# The small model's matrices are compressed, its norms are not.
SMALL = ["--min-compress", 600]


def without_bytes(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.startswith("communication/")} for r in records]


# -- The same training -----------------------------------------------------------------------------


@pytest.mark.rest
def test_without_compression_it_is_chapter_2(train):
    """To the last bit."""
    flags = ["--max-steps", 6, "--eval-freq", 3, "--gradient-accumulation-steps", 2, "-b", 2]
    two = train(*flags, name="two", script=CHAPTER_2)
    eight = train(*flags, name="eight")
    assert without_bytes(exact(eight.records)) == exact(two.records)
    assert_same_model(two, eight)
    assert set(eight.column("communication/ratio")) == {1.0}


@pytest.mark.rest
def test_replicas_stay_equal_and_losses_near(train):
    """Also with many buckets, on which PowerSGD of PyTorch hangs if nobody waits."""
    flags = ["--max-steps", 6, "--eval-freq", 0, "--log-freq", 6, "--lr", 3e-3, *SMALL]
    plain = train(*flags, name="plain", processes=3)
    for method in ("powersgd", "dct", "dct-topk"):
        flags_of_method = ["--compress", method, "--keep", 0.25, "--powersgd-rank", 2]
        options = {"name": method, "processes": 3, "before": patches("small_buckets")}
        run = train(*flags, *flags_of_method, **options)
        assert len({digest for (digest,) in told(run, "weights ")}) == 1
        assert min(int(count) for (count,) in told(run, "buckets ")) > 2
        assert {flag for (flag,) in told(run, "rebuilt ")} == {"01"[method != "powersgd"]}
        assert run.column("loss") == pytest.approx(plain.column("loss"), rel=0.05)
        assert run.column("grad_norm") != plain.column("grad_norm")


# -- The mathematics, computed once more -----------------------------------------------------------

SHAPES = [(40, 64), (7,), (8, 32), (99,), (5, 67), (16, 8)]
# The others have fewer than 100 numbers, or a number of them that 64 does not divide.
COMPRESSED = [0, 2, 5]
CASES = [("dct", 0.5, False, 4), ("dct-topk", 0.1, False, 4)]
CASES += [("dct", 0.1, True, 4), ("dct-topk", 0.1, True, 4)]
CASES += [("fp16", 0.5, True, 2), ("bf16", 0.5, True, 2)]


@pytest.fixture(scope="module")
def hooks(tmp_path_factory):
    """What the hooks of three ranks have made of given gradients."""
    folder = tmp_path_factory.mktemp("hooks")
    left = folder / "left"
    left.mkdir()
    arguments = [CHAPTER_8, json.dumps(SHAPES), json.dumps(CASES), left]
    job = Job(SCRIPTS / "compression_hooks.py", arguments, folder / "output.txt", 3, cwd=folder)
    assert job.wait() == 0, job.output
    return [torch.load(folder / f"results-{rank}.pt") for rank in range(3)]


def dct() -> torch.Tensor:
    """The orthonormal DCT-II of 64 numbers by its definition, as a matrix in double precision."""
    n = torch.arange(64, dtype=torch.float64)
    rows = []
    for k in range(64):
        scale = math.sqrt((1 if k == 0 else 2) / 64)
        rows.append(scale * torch.cos(math.pi * (2 * n + 1) * k / 128))
    return torch.stack(rows)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    return x.double().view(-1, 64) @ dct().T


def inverse(c: torch.Tensor) -> torch.Tensor:
    return c @ dct()


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    torch.manual_seed(100 * step + rank)
    return [torch.randn(shape) for shape in SHAPES]


@pytest.mark.rest
@pytest.mark.parametrize("case", CASES, ids=str)
def test_averages_are_those_of_the_definition(hooks, case):
    method, keep, feedback, steps = case
    ranks = range(len(hooks))
    left = [[torch.zeros(math.prod(shape) // 64, 64).double() for shape in SHAPES] for _ in ranks]
    expected = []
    for step in range(steps):
        given = [gradients(step, rank) for rank in ranks]
        means = [sum(parts).double() / len(ranks) for parts in zip(*given, strict=True)]
        for i in COMPRESSED if method.startswith("dct") else []:
            sent = []
            for rank in ranks:
                c = spectrum(given[rank][i]) + left[rank][i]
                mask = torch.zeros_like(c, dtype=torch.bool)
                mask[:, : round(keep * 64)] = True
                if method == "dct-topk":
                    smallest = c.abs().sort(descending=True).values[:, round(keep * 64) - 1]
                    mask = c.abs() >= smallest[:, None]
                sent.append(c * mask)
                left[rank][i] = c * ~mask if feedback else torch.zeros_like(c)
            means[i] = inverse(sum(sent) / len(ranks)).view(SHAPES[i])
        expected.append(means)
    tolerance = {"dct-topk": 1e-4, "fp16": 2e-3, "bf16": 2e-2}.get(method, 1e-5)
    for rank in ranks:
        averages, residuals, volume = hooks[rank][json.dumps(case)]
        for step in range(steps):
            for i, mean in enumerate(expected[step]):
                close = {"rtol": tolerance, "atol": tolerance}
                torch.testing.assert_close(averages[step][i].double(), mean, **close)
                assert torch.equal(averages[step][i], hooks[0][json.dumps(case)][0][step][i])
                if i not in COMPRESSED and method.startswith("dct"):  # whole: to the last bit
                    plain = sum(gradients(step, r)[i] for r in ranks) / len(ranks)
                    torch.testing.assert_close(averages[step][i], plain, rtol=1e-6, atol=1e-6)
        if method.startswith("dct"):
            for i in COMPRESSED if feedback else []:
                torch.testing.assert_close(residuals[i].double(), left[rank][i], **close)
            assert not any(torch.is_tensor(r) for r in residuals) or feedback
            elements = sum(math.prod(SHAPES[i]) for i in COMPRESSED)
            whole = sum(map(math.prod, SHAPES)) - elements
            kept = elements // 64 * round(keep * 64)
            factor = len(ranks) if method == "dct-topk" else 2
            assert volume == steps * 4 * (factor * kept + 2 * whole)
        else:  # two bytes for each number
            assert volume == steps * 2 * 2 * sum(map(math.prod, SHAPES))


@pytest.mark.rest
def test_other_ranks_begin_with_the_mean(hooks):
    for rank, results in enumerate(hooks):
        assert len(results["mean"]) == len(results["own"]) == len(SHAPES) + 2
        mean = sum(10.0**other for other in range(len(hooks) + 1)) / (len(hooks) + 1)
        for tensor in results["mean"]:
            torch.testing.assert_close(tensor, torch.full_like(tensor, mean))
        for tensor in results["own"]:
            assert torch.equal(tensor, torch.full_like(tensor, 10.0**rank))


# -- Checkpoints -----------------------------------------------------------------------------------

FLAGS = ["--max-steps", 6, "--eval-freq", 3, "--ckpt-freq", 3, "--keep", 0.1, *SMALL]


@pytest.fixture
def interrupted(train):
    """An undisturbed run, and one that goes on from its step 3. Both have many buckets."""

    def run(method, processes, on=None):
        flags = [*FLAGS, "--compress", method]
        options = {"processes": processes, "before": patches("small_buckets")}
        origin = train(*flags, name="origin", **options)
        if not on:
            return origin, resume(origin, train, 3, *flags, **options)
        take_over(origin, train, "resumed", 3)
        options |= {"name": "resumed", "processes": on}
        return origin, train(*flags, "-b", 4 * processes // on, **options)

    return run


@pytest.mark.rest
@pytest.mark.parametrize("method", ["powersgd", "dct-topk"])
def test_resume_on_the_same_ranks_is_exact(interrupted, method):
    """Also what each rank remembers: residuals, and the matrices of PowerSGD."""
    origin, resumed = interrupted(method, 2)
    step = origin.checkpoints[-1]
    for rank in range(2):
        file = f"memory-{rank}-of-2.pt"
        a, b = (torch.load(run.folder / step / file) for run in (origin, resumed))
        counts = [len(memory) for memory in a]
        assert counts == [len(memory) for memory in b]
        assert counts[0] > 0
        assert (min(counts) > 2) == (method == "powersgd")  # three tensors of each bucket
        for memory, other in zip(a, b, strict=True):
            assert all(torch.equal(memory[key], other[key]) for key in memory)


@pytest.mark.rest
@pytest.mark.parametrize(("method", "before", "after"), [("dct-topk", 2, 4), ("powersgd", 4, 2)])
def test_resume_on_other_ranks(interrupted, method, before, after):
    origin, resumed = interrupted(method, before, on=after)
    assert resumed.column("loss")[:3] == origin.column("loss")[:3]
    assert resumed.column("loss") == pytest.approx(origin.column("loss"), rel=0.02)
    assert resumed.column("loss") != origin.column("loss")
    files = {path.name for path in (resumed.folder / "step-00000006").glob("memory-*")}
    assert files == {f"memory-{rank}-of-{after}.pt" for rank in range(after)}


@pytest.mark.rest
def test_a_folder_that_nodes_do_not_share(train, tmp_path):
    """Rank 0 misses the memory of rank 1 in the first save."""
    flags = ["--max-steps", 1, "--eval-freq", 0, "--save-dir", "runs"]
    options = {"before": patches("own_disk"), "env": {"DISKS": f"{tmp_path}/disk-"}}
    result = train(*flags, status=1, **options)
    sentence = "memory-1-of-2.pt: put --save-dir on a shared disk"
    assert_one_sentence(result.run.ranks[0].output, sentence)


# -- Wrong flags -----------------------------------------------------------------------------------


@pytest.mark.rest
def test_an_all_gather_of_too_much_is_refused(train):
    flags = ["--compress", "dct-topk", "--keep", 1]
    result = train(*flags, status=2)
    sentence = "with dct-topk, --keep must be below 2 / 2 (ranks)"
    assert_one_sentence(result.run.ranks[0].output, sentence)


@pytest.mark.rest
def test_the_method_lasts(train):
    """Residuals of another method, or a Q of another rank, would spoil the gradients silently."""
    flags = ["--compress", "powersgd", "--eval-freq", 0, *SMALL]
    train(*flags, "--max-steps", 1)
    refused = train(*flags, "--max-steps", 2, "--powersgd-rank", 2, status=1)
    assert_one_sentence(refused.run.ranks[0].output, "powersgd_rank was 4, and is 2")
