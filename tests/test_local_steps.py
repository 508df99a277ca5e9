"""Chapter 15: rounds of local steps are those of a plain loop over replicas, and resume exactly."""

import json
import os
import re
import shutil
import signal
from collections import namedtuple
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import (
    LLAMA,
    assert_one_sentence,
    assert_opens,
    assert_same_model,
    exact,
    take_over,
    write_model,
)
from runner import CHAPTER_2, CHAPTER_5, CHAPTER_15, REPOSITORY, Run, load
from safetensors.torch import load_file
from test_fsdp import assert_same_checkpoint, save_weights, told
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

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
    usual |= {"outer_start": 0, "accumulation": 1, "clip": 1.0, "weight_decay": 0.01, "steps": 7}
    s = namedtuple("Settings", [*usual, "eval_freq"])(**usual | {"eval_freq": 2} | given)
    rows = rows_of(folder, dataset)
    models, optimizers, schedulers = [], [], []
    for _ in range(s.replicas):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": s.weight_decay}]
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
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip).item())
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


def far(found, expected) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def assert_as_planned(run, plain: Plain, tolerance: float = 1e-6) -> None:
    """Ranks of a replica add up gradients in another order, which AdamW makes larger in weights.
    Drift is a difference of squares."""
    errors = {
        "losses": far(run.column("loss"), plain.losses) / tolerance,
        "norms": far(run.column("grad_norm"), plain.norms) / tolerance / 30,
        "evaluations": far(run.column("eval/loss"), plain.evaluations) / tolerance,
    }
    rounds = {r["step"]: r for r in run.records if "outer/drift" in r}
    assert [*rounds] == [*plain.rounds]
    norms = [rounds[step]["outer/grad_norm"] for step in rounds]
    errors["outer norms"] = far(norms, [norm for norm, _ in plain.rounds.values()]) / tolerance / 5
    for step, (size, drift) in plain.rounds.items():
        error = abs(rounds[step]["outer/drift"] - drift) / size
        errors[f"drift {step}"] = error / tolerance / 1e3
    saved = load_file(run.folder / "final" / "model.safetensors")
    for name, weight in plain.weights.items():
        errors[name] = (saved[name] - weight).abs().max().item() / tolerance / 3
    print({name: f"{error:.2g}" for name, error in errors.items()})
    wrong = [name for name, error in errors.items() if not error <= 1]
    assert not wrong, wrong


# -- Runs ------------------------------------------------------------------------------------------

STEPS = ["--max-steps", 7, "--eval-freq", 2, "--ckpt-freq", 2, "--keep-checkpoints", 9]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folders):
    return save_weights(write_model(folders / "llama", **LLAMA))


@pytest.fixture(scope="module")
def untied(folders):
    """FSDP keeps its head whole after a forward pass."""
    return save_weights(write_model(folders / "untied", **LLAMA | {"tie_word_embeddings": False}))


@pytest.fixture(scope="module")
def with_dropout(folders, dropout_model):
    return save_weights(shutil.copytree(dropout_model, folders / "with-dropout"))


@pytest.fixture
def train(trainer, llama):
    """Runs the chapter; by default, each of two ranks is a replica, and rounds have 3 steps."""

    def run(*flags, replicas=2, ranks=1, script=CHAPTER_15, start=False, **options):
        own = ["--replicas", replicas, "--shard-size", ranks, "--inner-steps", 3]
        own = own if "15-" in str(script) else ["--shard-size", ranks]
        own = [] if script == CHAPTER_2 else own
        options |= {"processes": replicas * ranks, "script": script}
        call = trainer.start if start else trainer
        return call("-m", llama, "--no-from-scratch", *STEPS, "-b", 1, *own, *flags, **options)

    return run


# Flags, and the settings of the plain loop
CASES = {
    "rounds of one step": (["--inner-steps", 1], {"inner_steps": 1}),
    "accumulation": (["--gradient-accumulation-steps", 2], {"accumulation": 2}),
    "4 replicas": ([], {"replicas": 4}),
    "2 replicas of 2 ranks": ([], {"ranks": 2}),
    "1 replica": ([], {"replicas": 1, "ranks": 2}),
    "2 replicas of 2 copies": (["--shard-size", 1], {"ranks": 2}),
    "clipping": (
        ["--max-grad-norm", 0.2, "--weight-decay", 0.1],
        {"clip": 0.2, "weight_decay": 0.1},
    ),
    "averages first": (["--outer-start", 2], {"outer_start": 2}),
}


def case_of(train, model, dataset, flags, settings, script=CHAPTER_15, name="run"):
    """A run with Nesterov momentum, and the plain loop."""
    settings = PAPER | settings
    outer = ["--outer-lr", settings["outer_lr"], "--outer-momentum", settings["outer_momentum"]]
    sizes = {name: settings.get(name, usual) for name, usual in {"replicas": 2, "ranks": 1}.items()}
    run = train("-m", model, *outer, *flags, **sizes, script=script, name=name)
    return run, plain_loop(model, dataset, **settings)


def test_one_job(train, trainer, llama, dataset):
    """The plain loop, a resume within a round, and one bad flag."""
    run, plain = case_of(train, llama, dataset, *CASES["accumulation"])
    assert_as_planned(run, plain)
    assert_opens(run)
    take_over(run, trainer, "resumed", 4)
    resumed, _ = case_of(train, llama, dataset, *CASES["accumulation"], name="resumed")
    assert "Continuing from" in resumed.output
    assert exact(resumed.records) == exact(run.records)
    assert_same_model(resumed, run)
    result = train("--checkpoint-format", "full", name="refused", status=2)
    assert_one_sentence(result.run.ranks[0].output, "full holds one replica only")


@pytest.mark.rest
@pytest.mark.parametrize("case", [case for case in CASES if case != "accumulation"])
def test_a_run_is_the_plain_loop(train, llama, dataset, case):
    """Losses, norms, held-out losses within a round, numbers of the rounds, final weights."""
    assert_as_planned(*case_of(train, llama, dataset, *CASES[case]))


# Evaluation in each step, and no save, which would hide stale weights
WHOLE_HEAD = (["--eval-freq", 1, "--ckpt-freq", 99], {"eval_freq": 1, "ranks": 2})


@pytest.mark.rest
@pytest.mark.parametrize("more", [[], ["--no-reshard-after-forward"]])
def test_units_that_stay_whole(train, untied, dataset, more):
    flags, settings = WHOLE_HEAD
    assert_as_planned(*case_of(train, untied, dataset, [*flags, *more], settings))


@pytest.mark.rest
def test_messages_in_bf16(train, llama, dataset):
    """They round a pseudo-gradient. Two runs would differ by as much if bf16 were not used."""
    run, plain = case_of(train, llama, dataset, ["--outer-dtype", "bf16"], {})
    assert_as_planned(run, plain, tolerance=2e-3)
    with pytest.raises(AssertionError):
        assert_as_planned(run, plain, tolerance=1e-5)
    bytes_per_round = run.column("communication/bytes_per_step")[2]
    assert bytes_per_round == 2 * sum(w.numel() for w in plain.weights.values())


# -- Special cases are other chapters --------------------------------------------------------------


def assert_near(one, other, norms=True) -> None:
    """Held-out losses at the ends of rounds: between them, those of the last round."""
    for name, tolerance in {"loss": 1e-6, "grad_norm": 3e-5}.items():
        if norms or name == "loss":
            assert other.column(name) == pytest.approx(one.column(name), rel=tolerance), name
    ends = {r["step"] for r in other.records if "outer/drift" in r}
    held_out = [
        [r["eval/loss"] for r in run.records if "eval/loss" in r and r["step"] in ends]
        for run in (one, other)
    ]
    assert len(held_out[0]) >= 2
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-6)
    a, b = (load_file(x.folder / "final" / "model.safetensors") for x in (one, other))
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=0, atol=3e-6)


@pytest.mark.rest
def test_one_replica_is_chapter_5(train):
    """With the defaults, outer learning rate 1 and no momentum."""
    five = train(script=CHAPTER_5, replicas=1, ranks=2, name="five")
    assert_near(five, train(replicas=1, ranks=2))


# -- Checkpoints -----------------------------------------------------------------------------------


def resume(train, trainer, script=CHAPTER_15, steps=(4,), flags=(), **options) -> None:
    """Runs that go on from these steps repeat the rest, bit for bit."""
    flags = ["--outer-lr", 0.7, "--outer-momentum", 0.9, *flags]
    origin = train(*flags, script=script, name="origin", **options)
    for step in steps:
        take_over(origin, trainer, f"from-{step}", step)
        resumed = train(*flags, script=script, name=f"from-{step}", **options)
        assert "Continuing from" in resumed.output
        assert exact(resumed.records) == exact(origin.records)
        assert_same_model(resumed, origin)


FORMATS = {
    "shard": ([], {}),
    "local, async": (["--checkpoint-format", "local", "--async-checkpoint"], {}),
    "shard, async, replicas of 2 ranks": (["--async-checkpoint"], {"ranks": 2}),
}


@pytest.mark.rest
@pytest.mark.parametrize("case", FORMATS)
def test_resume_within_a_round(train, trainer, with_dropout, case):
    """Before the first round has ended, within the second, and after it."""
    flags, options = FORMATS[case]
    flags = [*flags, "-m", with_dropout]
    resume(train, trainer, steps=(2, 4, 6), flags=flags, **options)


FINGERPRINT = """
import hashlib, torch

def fingerprint(tensors):
    return hashlib.sha256(b"".join(t.to_local().numpy().tobytes() for t in tensors)).hexdigest()

def step(self, *args, **options):
    if self.state and not told:
        told.append(1)
        parameters = [p for group in self.param_groups for p in group["params"]]
        moments = [self.state[p]["exp_avg"] for p in parameters]
        parameters = [p.detach() for p in parameters]
        print("\\nbegan", fingerprint(parameters), fingerprint(moments))
    return original(self, *args, **options)

told = []
original = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""


@pytest.mark.rest
def test_another_number_of_replicas(train, trainer):
    """Replica n begins as old replica n mod N, with its weights and moments."""
    flags = ["--global-batch-size", 4]
    origin = train(*flags, name="origin")
    before = {}
    for replicas in (1, 2, 4):
        name = f"on-{replicas}"
        take_over(origin, trainer, name, 4)
        run = train(*flags, name=name, replicas=replicas, before=FINGERPRINT)
        assert "Continuing from" in run.output
        assert run.column("loss") == pytest.approx(origin.column("loss"), rel=0.02)
        before[replicas] = told(run, "began ")
    first, second = before[2]
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert before[1] == [first]
    assert before[4] == [first, second, first, second]
    # Replicas of two ranks read the shards of the old replicas
    take_over(origin, trainer, "ranks", 4)
    run = train(*flags, name="ranks", ranks=2)
    assert run.column("loss") == pytest.approx(origin.column("loss"), rel=0.02)


@pytest.mark.rest
def test_its_weights_in_other_chapters(train, trainer):
    """A checkpoint within a round: the shared weights, for a new run and as a model."""
    origin = train(name="origin")
    checkpoint = origin.folder / "step-00000004"
    held_out = [r["eval/loss"] for r in origin.records if r["step"] == 4 and "eval/loss" in r]
    folder = trainer.folder / "hub"
    tool = REPOSITORY / "tools" / "convert-checkpoint.py"
    run = Run(tool, [checkpoint, folder, "--to", "transformers"], trainer.folder / "tool.txt")
    assert run.wait() == 0, run.output
    # With a learning rate of 0, the first evaluation is that of the weights
    flags = ["--max-steps", 1, "--lr", 0, "--resume-dir", checkpoint, "--skip-optimizer"]
    for script in (CHAPTER_5, CHAPTER_15):
        other = train(*flags, script=script, name=f"from-{script.parent.name}")
        assert other.column("eval/loss") == pytest.approx(held_out, rel=1e-6)
    flags = ["--max-steps", 1, "--lr", 0, "-m", folder, "--no-from-scratch"]
    other = train(*flags, script=CHAPTER_5, name="hub-run")
    assert other.column("eval/loss") == pytest.approx(held_out, rel=1e-6)


@pytest.mark.rest
def test_its_checkpoints_become_another_format(train, trainer):
    """The state of each replica, too: a run goes on exactly."""
    origin = train(name="origin", ranks=2)
    local = train("--checkpoint-format", "local", name="local", ranks=2)
    tool = REPOSITORY / "tools" / "convert-checkpoint.py"

    def convert(to: str) -> Run:
        paths = [local.folder / "step-00000004", trainer.folder / to / "step-00000004"]
        run = Run(tool, [*paths, "--to", to], trainer.folder / f"{to}.txt")
        run.wait()
        return run

    run = convert("shard")
    assert "wrote" in run.output, run.output
    checkpoint = "step-00000004"
    assert_same_checkpoint(trainer.folder / "shard" / checkpoint, origin.folder / checkpoint)
    resumed = train(name="shard", ranks=2)
    assert "Continuing from" in resumed.output
    assert exact(resumed.records) == exact(origin.records)
    assert_same_model(resumed, origin)
    assert_one_sentence(convert("single").output, "its state is one of replicas")


@pytest.mark.rest
def test_sigkill_and_a_stop_signal(train, trainer):
    """A signal to one rank stops all of them at the next logged step, within a long round."""
    flags = ["--max-steps", 60, "--eval-freq", 0, "--ckpt-freq", 7, "--inner-steps", 50]
    flags += ["--log-freq", 5]
    undisturbed = train(*flags, name="undisturbed")
    job = train(*flags, name="killed", start=True)
    job.wait_for("step 25/60")
    for rank in job.ranks:
        rank.process.kill()
    job.wait()
    resumed = train(*flags, name="killed")
    assert "Continuing from" in resumed.output
    assert exact(resumed.records) == exact(undisturbed.records)
    assert_same_model(resumed, undisturbed)

    job = train(*flags, name="stopped", start=True)
    job.wait_for("a stop signal takes effect within 5 step(s)")
    job.wait_for("step 10/60")
    job.ranks[1].signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    (step,) = re.findall(r"Stopped after step (\d+): the same command", job.output)
    assert int(step) % 5 == 0
    assert int(step) < 50
    resumed = train(*flags, name="stopped")
    assert exact(resumed.records)[-1] == exact(undisturbed.records)[-1]
    assert_same_model(resumed, undisturbed)


# -- Bytes on the slow link ------------------------------------------------------------------------

# Each node is a network namespace. Before each update, a rank tells how many bytes it has sent.
ENTER = """
import ctypes, os
from pathlib import Path
import torch

node = os.environ["NODES"].split()[int(os.environ["RANK"]) // 2]
handle = os.open(f"/run/netns/{node}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000) == 0
os.environ |= {"MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "eth0"}

def step(self, *args, **options):
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if "eth0:" in line]
    print("\\nsent", line.partition(":")[2].split()[8])
    return original(self, *args, **options)

original = torch.optim.AdamW.step
torch.optim.AdamW.step = step
"""


@pytest.mark.rest
def test_bytes_between_data_centres(train, tmp_path_factory, monkeypatch):
    """A round sends what chapter 5 sends in a step. Other steps send nothing, if not logged."""
    monkeypatch.syspath_prepend(REPOSITORY / "benchmarks")
    link = load(REPOSITORY / "benchmarks" / "slow-links.py").Link()
    shape = LLAMA | {"hidden_size": 128, "intermediate_size": 256}
    model = write_model(tmp_path_factory.mktemp("models") / "larger", **shape)
    flags = ["-m", model, "--from-scratch", "--max-steps", 12, "--log-freq", 12, "--eval-freq", 0]
    flags += ["--ckpt-freq", 12]
    with skip_without_root(), link:
        options = {"ranks": 2, "before": ENTER, "env": {"NODES": " ".join(link.names)}}
        runs = [train(*flags, script=CHAPTER_5, name="five", **options)]
        runs.append(train(*flags, "--inner-steps", 4, name="rounds", **options))
        more = ["--inner-steps", 4, "--outer-dtype", "bf16", "--log-freq", 6]
        runs.append(train(*flags, *more, name="bf16", **options))
    sent = []
    for run in runs:
        counts = np.array(re.findall(r"^sent (\d+)$", run.run.ranks[0].output, re.MULTILINE), int)
        sent.append(np.diff(counts))  # of steps 1 to 11, each until the update of the next one
    five, rounds, bf16 = sent
    print(five, rounds, bf16)
    per_step = np.median(five)
    payload = 2 * runs[1].column("communication/bytes_per_step")[0] * 4  # of two ranks
    assert per_step == pytest.approx(payload, rel=0.05)
    assert rounds[[3, 7]] == pytest.approx(per_step, rel=0.05)
    assert bf16[[3, 7]] == pytest.approx(per_step / 2, rel=0.05)
    alone = [n for n in range(11) if n not in (3, 7)]
    assert max(rounds[alone]) < 1_000
    logged = 5  # the norm, the loss, the signal, the memory of all ranks
    assert 1_000 < bf16[logged] < 30_000
    assert max(bf16[[n for n in alone if n != logged]]) < 1_000


@contextmanager
def skip_without_root():
    try:
        yield
    except SystemExit as error:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing(str(error))


# -- Flags -----------------------------------------------------------------------------------------


@pytest.mark.rest
def test_mistakes_end_in_one_sentence(train, trainer):
    mistakes = {
        "--replicas 2 × --shard-size 2 does not divide the 2 ranks": ["--shard-size", 2],
        "--checkpoint-format full holds one replica only": ["--checkpoint-format", "full"],
        "--inner-steps: must be a number, 1 or larger": ["--inner-steps", 0],
        "--outer-momentum: must be a number, 0 or larger and below 1": ["--outer-momentum", 1],
    }
    for sentence, flags in mistakes.items():
        result = train(*flags, name="refused", status=2)
        assert_one_sentence(result.run.ranks[0].output, sentence)
    origin = train("--max-steps", 2, name="origin")
    result = train("--inner-steps", 4, name="origin", status=1)
    assert_one_sentence(result.run.ranks[0].output, "--inner-steps was 3 in this run")
    five = train("--max-steps", 2, script=CHAPTER_5, name="five")
    for script, other in ((CHAPTER_15, five), (CHAPTER_5, origin)):
        result = train(script=script, name=other.folder.name, status=1)
        assert_one_sentence(result.run.ranks[0].output, "is from another chapter")
