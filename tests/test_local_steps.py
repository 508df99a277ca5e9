"""Chapter 15: rounds of local steps are those of a plain loop over replicas, and resume exactly."""

import json
import shutil
import signal
from collections import namedtuple

import numpy as np
import pytest
import torch
from helpers.assertions import assert_opens, assert_same_checkpoint, assert_same_model, exact, told
from helpers.models import LLAMA, save_weights, write_model
from helpers.runner import CHAPTER_5, CHAPTER_15, in_step, patches, run_tool
from helpers.trainer import resume, take_over
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

CONVERT = "convert-checkpoint.py"
PAPER = {"outer_lr": 0.7, "outer_momentum": 0.9}


# -- The plain loop --------------------------------------------------------------------------------

Plain = namedtuple("Plain", "losses norms evaluations rounds weights")
Rows = namedtuple("Rows", "train held_out")


def rows_of(folder, dataset) -> Rows:
    """All documents, joined and cut into rows of 32 tokens. The last 1 % is held out."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in dataset.open()]
    ids = [n for text in texts for n in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    rows = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    count = len(rows) - max(1, len(rows) // 100)
    order = np.random.RandomState((0, 0)).permutation(count)
    return Rows(rows[:count][order], rows[count:])


def loss_of(model, rows):
    return model(input_ids=rows, labels=rows, use_cache=False).loss


@torch.no_grad()
def evaluate(model, weights, rows) -> float:
    """The mean over all rows of a model with these weights."""
    kept = [p.clone() for p in model.parameters()]
    copy(weights, model)
    model.eval()
    losses = [loss_of(model, rows[n : n + 1]).item() for n in range(len(rows))]
    model.train()
    copy(kept, model)
    return sum(losses) / len(losses)


@torch.no_grad()
def copy(weights, model) -> None:
    for p, weight in zip(model.parameters(), weights, strict=True):
        p.copy_(weight)


def norm(tensors) -> float:
    return sum(tensor.double().square().sum().item() for tensor in tensors) ** 0.5


def plain_loop(folder, dataset, **given) -> Plain:
    """Replicas one after the other, in one process. Ranks of a replica are parts of its batch."""
    usual = {"replicas": 2, "ranks": 1, "inner_steps": 3, "outer_lr": 1.0, "outer_momentum": 0.0}
    usual |= {"outer_start": 0, "accumulation": 1, "steps": 7}
    s = namedtuple("Settings", [*usual, "eval_freq"])(**usual | {"eval_freq": 2} | given)
    rows = rows_of(folder, dataset)
    models, optimizers, schedulers = [], [], []
    for _ in range(s.replicas):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.01}]
        groups += [{"params": vectors, "weight_decay": 0}]
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2, fused=True))
        schedulers.append(get_scheduler("cosine", optimizers[-1], 0, s.steps))
        models.append(model.train())
    shared = [p.detach().clone() for p in models[0].parameters()]
    momentum = [torch.zeros_like(p) for p in shared]
    result = Plain([], [], [], {}, {})
    taken = 0  # rows, one per rank and micro-batch
    for step in range(1, s.steps + 1):
        losses, norms = [], []
        for replica, model in enumerate(models):
            for micro_step in range(s.accumulation):
                for rank in range(s.ranks):
                    first = taken + (micro_step * s.replicas + replica) * s.ranks + rank
                    torch.manual_seed(first)  # for dropout
                    loss = loss_of(model, rows.train[first : first + 1])
                    (loss / s.accumulation / s.ranks).backward()
                    losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            optimizers[replica].step()
            optimizers[replica].zero_grad()
            schedulers[replica].step()
        taken += s.replicas * s.ranks * s.accumulation
        result.losses.append(sum(losses) / len(losses))
        result.norms.append(sum(norms) / len(norms))
        averages_only = step <= s.outer_start
        if averages_only or step % s.inner_steps == 0 or step == s.steps:
            with torch.no_grad():
                each = [
                    [a - p for a, p in zip(shared, m.parameters(), strict=True)] for m in models
                ]
                means = [sum(parts) / s.replicas for parts in zip(*each, strict=True)]
                distances = [norm(map(torch.sub, parts, means)) for parts in each]
                drift = (sum(d * d for d in distances) / s.replicas) ** 0.5
                result.rounds[step] = norm(means), drift
                for n, mean in enumerate(means):
                    if averages_only:
                        shared[n] = shared[n] - mean
                    else:
                        momentum[n] = s.outer_momentum * momentum[n] + mean
                        looking_ahead = mean + s.outer_momentum * momentum[n]
                        shared[n] = shared[n] - s.outer_lr * looking_ahead
            for model in models:
                copy(shared, model)
        if step % s.eval_freq == 0 or step == s.steps:
            result.evaluations.append(evaluate(models[0], shared, rows.held_out))
    names = [name for name, _ in models[0].named_parameters()]
    result.weights.update(zip(names, shared, strict=True))
    return result


def assert_as_planned(run, plain: Plain, tolerance: float = 1e-6) -> None:
    """Ranks of a replica add up gradients in another order, which AdamW makes larger in weights.
    Drift is a difference of squares."""
    assert run.column("loss") == pytest.approx(plain.losses, rel=tolerance)
    assert run.column("grad_norm") == pytest.approx(plain.norms, rel=30 * tolerance)
    assert run.column("eval/loss") == pytest.approx(plain.evaluations, rel=tolerance)
    rounds = {r["step"]: r for r in run.records if "outer/drift" in r}
    assert [*rounds] == [*plain.rounds]
    for step, (size, drift) in plain.rounds.items():
        assert rounds[step]["outer/grad_norm"] == pytest.approx(size, rel=5 * tolerance)
        assert rounds[step]["outer/drift"] == pytest.approx(
            drift, rel=0, abs=1e3 * tolerance * size
        )
    saved = load_file(run.folder / "final" / "model.safetensors")
    for name, weight in plain.weights.items():
        torch.testing.assert_close(saved[name], weight, rtol=0, atol=3 * tolerance)


# -- Runs ------------------------------------------------------------------------------------------

STEPS = ["--max-steps", 7, "--eval-freq", 2, "--ckpt-freq", 2, "--keep-checkpoints", 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def untied(folders):
    """FSDP keeps its head whole after a forward pass."""
    return save_weights(write_model(folders / "untied", **LLAMA | {"tie_word_embeddings": False}))


@pytest.fixture(scope="module")
def with_dropout(folders, dropout_model):
    return save_weights(shutil.copytree(dropout_model, folders / "with-dropout"))


@pytest.fixture
def train(trainer, pretrained):
    """Runs the chapter; by default, each of two ranks is a replica, and rounds have 3 steps."""

    def run(*flags, replicas=2, ranks=1, script=CHAPTER_15, **options):
        own = ["--replicas", replicas, "--shard-size", ranks, "--inner-steps", 3]
        own = own if script == CHAPTER_15 else ["--shard-size", ranks]
        options |= {"processes": replicas * ranks, "script": script}
        model = ["-m", pretrained, "--no-from-scratch"]
        return trainer(*model, *STEPS, "-b", 1, *own, *flags, **options)

    return run


# Flags, and the settings of the plain loop
CASES = {
    "accumulation": (["--gradient-accumulation-steps", 2], {"accumulation": 2}),
    "4 replicas": ([], {"replicas": 4}),
    "1 replica": ([], {"replicas": 1, "ranks": 2}),
    "2 replicas of 2 copies": (["--shard-size", 1], {"ranks": 2}),
    "averages first": (["--outer-start", 2], {"outer_start": 2}),
    "units that stay whole": (["--eval-freq", 1], {"eval_freq": 1, "ranks": 2}),
}


def case_of(train, model, dataset, flags, settings, script=CHAPTER_15, name="run"):
    """A run with Nesterov momentum, and the plain loop."""
    settings = PAPER | settings
    outer = ["--outer-lr", settings["outer_lr"], "--outer-momentum", settings["outer_momentum"]]
    sizes = {name: settings.get(name, usual) for name, usual in {"replicas": 2, "ranks": 1}.items()}
    run = train("-m", model, *outer, *flags, **sizes, script=script, name=name)
    return run, plain_loop(model, dataset, **settings)


def test_one_job(train, trainer, pretrained, dataset):
    """The plain loop, and a resume within a round."""
    run, plain = case_of(train, pretrained, dataset, *CASES["accumulation"])
    assert_as_planned(run, plain)
    assert_opens(run)

    def again(name):
        return case_of(train, pretrained, dataset, *CASES["accumulation"], name=name)[0]

    resume(run, trainer, 4, again=again)


@pytest.mark.rest
@pytest.mark.parametrize("case", [case for case in CASES if case != "accumulation"])
def test_a_run_is_the_plain_loop(train, untied, dataset, case):
    """Losses, norms, held-out losses within a round, numbers of the rounds, final weights."""
    flags, settings = CASES[case]
    flags = [*flags, "--ckpt-freq", 99]  # a save would hide stale weights
    assert_as_planned(*case_of(train, untied, dataset, flags, settings))


@pytest.mark.rest
def test_messages_in_bf16(train, pretrained, dataset):
    """They round a pseudo-gradient. Two runs would differ by as much if bf16 were not used."""
    run, plain = case_of(train, pretrained, dataset, ["--outer-dtype", "bf16"], {})
    assert_as_planned(run, plain, tolerance=2e-3)
    bytes_per_round = run.column("communication/bytes_per_step")[2]
    assert bytes_per_round == 2 * sum(w.numel() for w in plain.weights.values())


# -- Checkpoints -----------------------------------------------------------------------------------


@pytest.mark.rest
@pytest.mark.parametrize("saved", ["shard", "local"])
def test_resume_within_a_round(train, trainer, with_dropout, saved):
    """Before the first round has ended, and within the second one."""
    flags = ["--outer-lr", 0.7, "--outer-momentum", 0.9, "-m", with_dropout]
    flags += ["--checkpoint-format", saved, "--async-checkpoint"]
    origin = train(*flags, name="origin")
    for step in (2, 4):
        resume(origin, trainer, step, *flags, name=f"from-{step}", again=train)


@pytest.mark.rest
def test_another_number_of_replicas(train, trainer):
    """Replica n begins as old replica n mod N, with its weights and moments."""
    flags = ["--global-batch-size", 4]
    origin = train(*flags, name="origin")
    before = {}
    for replicas in (1, 2, 4):
        name = f"on-{replicas}"
        take_over(origin, trainer, name, 4)
        run = train(*flags, name=name, replicas=replicas, before=patches("fingerprint"))
        assert "Continuing from" in run.output
        assert run.column("loss") == pytest.approx(origin.column("loss"), rel=0.02)
        before[replicas] = told(run, "began ")
    first, second = before[2]
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert before[1] == [first]
    assert before[4] == [first, second, first, second]


@pytest.mark.rest
def test_its_weights_in_other_chapters(train, trainer):
    """A checkpoint within a round: the shared weights, for a new run and as a model."""
    origin = train(name="origin")
    checkpoint = origin.folder / "step-00000004"
    held_out = [r["eval/loss"] for r in origin.records if r["step"] == 4 and "eval/loss" in r]
    folder = trainer.folder / "hub"
    run_tool(trainer.folder, CONVERT, checkpoint, folder, "--to", "transformers")
    # With a learning rate of 0, the first evaluation is that of the weights
    flags = ["--max-steps", 1, "--lr", 0, "--resume-dir", checkpoint, "--skip-optimizer"]
    as_a_model = ["--max-steps", 1, "--lr", 0, "-m", folder]
    for name, some in (("checkpoint", flags), ("model", as_a_model)):
        other = train(*some, script=CHAPTER_5, name=f"from-{name}")
        assert other.column("eval/loss") == pytest.approx(held_out, rel=1e-6)


@pytest.mark.rest
def test_its_checkpoints_become_another_format(train, trainer):
    """With the state of each replica, bit for bit."""
    origin = train(name="origin", ranks=2)
    local = train("--checkpoint-format", "local", name="local", ranks=2)
    checkpoint = "step-00000004"
    paths = [local.folder / checkpoint, trainer.folder / "shard" / checkpoint]
    run_tool(trainer.folder, CONVERT, *paths, "--to", "shard")
    assert_same_checkpoint(trainer.folder / "shard" / checkpoint, origin.folder / checkpoint)


@pytest.mark.rest
def test_a_stop_signal(train):
    """It stops all ranks at the next logged step, within a long round."""
    flags = ["--max-steps", 12, "--eval-freq", 0, "--ckpt-freq", 99, "--inner-steps", 50]
    flags += ["--log-freq", 5]
    undisturbed = train(*flags, name="undisturbed")
    stop = in_step(7, "os.kill(os.getpid(), signal.SIGTERM)")
    stopped = train(*flags, name="stopped", before=stop, status=128 + signal.SIGTERM)
    assert "Stopped after step 10: with -e, the same command" in stopped.output
    resumed = train(*flags, name="stopped")
    assert exact(resumed.records) == exact(undisturbed.records)
    assert_same_model(resumed, undisturbed)
