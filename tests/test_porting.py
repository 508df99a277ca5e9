"""The loops of docs/porting.md: on any number of processes, the losses of a loop without them."""

import itertools
import re

import pytest
import torch
from runner import REPOSITORY, Job
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

PAGE = (REPOSITORY / "docs" / "porting.md").read_text()
HEAD, *LOOPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SMALLEST, ANY_BATCH, RESUME, FSDP, TENSOR_PARALLEL = LOOPS

MODEL = """
import torch


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(Layer(), Layer())
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layers(x))


torch.manual_seed(0)
model = Model()
inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
"""
BATCHES = """
order = [torch.randperm(64, generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)]
batches = [epoch[i : i + SIZE] for epoch in order for i in range(0, 64, SIZE)]
"""
PRINT = "\nif os.environ['RANK'] == '0':\n    print('losses', *losses)\n"


# AdamW does not notice gradients that are twice too large, so most loops are tested with SGD.
OPTIMIZERS = {"SGD": 0.3, "AdamW": 0.02}  # and their learning rates


def run(folder, loop, call: str, processes: int, size=12, optimizer="SGD") -> list[float]:
    folder.mkdir(exist_ok=True)
    assert loop.count("torch.optim.AdamW(") == call.count("LR") == 1
    loop, call = loop.replace("AdamW", optimizer), call.replace("LR", str(OPTIMIZERS[optimizer]))
    script = folder / "mine.py"
    batches = BATCHES.replace("SIZE", str(size))
    script.write_text(HEAD + loop + MODEL + batches + f"losses = {call}" + PRINT)
    output = folder / f"output-{len([*folder.glob('output-*')])}.txt"
    job = Job(script, [], output, processes, cwd=folder)
    assert job.wait() == 0, job.output
    line = next(x for x in job.ranks[0].output.splitlines() if x.startswith("losses"))
    return [float(loss) for loss in line.split()[1:]]


def without_any_of_this(size=12, max_norm=None, optimizer="SGD"):
    """The losses of a plain loop, and its model."""
    names = {}
    exec(MODEL + BATCHES.replace("SIZE", str(size)), names)
    model, losses = names["model"], []
    lr = OPTIMIZERS[optimizer]
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=lr)
    for batch in names["batches"]:
        inputs, targets = default_collate([names["dataset"][i] for i in batch])
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(losses) < 0.7 * losses[0]
    return losses, model.state_dict()


def assert_same(losses, expected):
    assert losses == pytest.approx(expected, rel=1e-4)


def assert_same_weights(file, expected):
    saved = torch.load(file)
    assert saved.keys() == expected.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_smallest_loop(tmp_path):
    call = "train(model, dataset, global_batch=12, epochs=4, lr=LR)"
    curves = [run(tmp_path / str(n), SMALLEST, call, n) for n in (1, 2, 3)]
    assert len(curves[0]) == 20  # 60 of 64 samples in each epoch
    assert min(curves[0]) < 0.6 * curves[0][0]
    for curve in curves[1:]:
        assert_same(curve, curves[0])


@pytest.mark.parametrize(("size", "micro"), [(12, 12), (10, 2), (7, 3), (3, 1)])
def test_any_batch(tmp_path, size, micro):
    """The last batch of an epoch has 4 samples or 1, which leaves some ranks without any."""
    expected, weights = without_any_of_this(size)
    call = f"train(model, dataset, batches, micro_batch={micro}, lr=LR)"
    for processes in (1, 2, 3):
        folder = tmp_path / str(processes)
        assert_same(run(folder, ANY_BATCH, call, processes, size), expected)
        assert_same_weights(folder / "model.pt", weights)


def test_resume(tmp_path):
    expected, _ = without_any_of_this(size=8, optimizer="AdamW")
    first = "train(model, dataset, batches[:14], lr=LR, save_every=6)"
    again = "train(model, dataset, batches, lr=LR, save_every=6)"
    for before, after in itertools.permutations((1, 2, 4), 2):
        folder = tmp_path / f"{before}-{after}"
        options = {"size": 8, "optimizer": "AdamW"}
        assert_same(run(folder, RESUME, first, before, **options), expected[:14])
        assert_same(run(folder, RESUME, again, after, **options), expected[12:])


def test_fsdp_with_a_model_of_ones_own(tmp_path):
    expected, weights = without_any_of_this(size=16, max_norm=0.5)
    assert expected != without_any_of_this(size=16)[0]  # so the norm is clipped
    call = "train(Model, dataset, batches, lr=LR, max_norm=0.5)"
    for processes in (1, 2, 4):
        folder = tmp_path / str(processes)
        assert_same(run(folder, FSDP, call, processes, size=16), expected)
        assert_same_weights(folder / "model.pt", weights)


def test_tensor_parallelism(tmp_path):
    expected, _ = without_any_of_this()
    ways = {"up": "columns", "down": "rows"}
    plan = {f"layers.{n}.{name}": how for n in (0, 1) for name, how in ways.items()}
    call = f"train(model, dataset, batches, lr=LR, plan={plan})"
    for processes in (1, 2, 3):
        assert_same(run(tmp_path / str(processes), TENSOR_PARALLEL, call, processes), expected)
    with pytest.raises(AssertionError, match="is not split"):
        run(tmp_path / "no", TENSOR_PARALLEL, call.replace("layers.0.up", "layer.0.up"), 1)
