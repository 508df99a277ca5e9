"""The loops of docs/porting.md, on any number of processes.

They have the losses and gradient norms of a plain loop. The norms are those before clipping.
"""

import re

import pytest
import torch
from helpers.runner import REPOSITORY, Job
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

PAGE = (REPOSITORY / "docs" / "porting.md").read_text()
HEAD, *LOOPS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ANY_BATCH, FSDP, DECODER, CHECKPOINT, TENSOR_PARALLEL = LOOPS

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
PRINT = "\nif os.environ['RANK'] == '0':\n    print('results', *losses, *norms)\n"
# AdamW hides gradients that are twice too large in the losses, so most loops are tested with SGD.
OPTIMIZERS = {"SGD": 0.3, "AdamW": 0.02}  # and their learning rates


def run(folder, loop, call, processes, size=12, optimizer="SGD", model=MODEL):
    """The losses and the gradient norms of a loop of the page."""
    folder.mkdir(exist_ok=True)
    assert loop.count("torch.optim.AdamW(") == call.count("LR") == 1
    loop, call = loop.replace("AdamW", optimizer), call.replace("LR", str(OPTIMIZERS[optimizer]))
    script = folder / "mine.py"
    batches = BATCHES.replace("SIZE", str(size))
    script.write_text(HEAD + loop + model + batches + f"losses, norms = {call}" + PRINT)
    output = folder / f"output-{len([*folder.glob('output-*')])}.txt"
    job = Job(script, [], output, processes, cwd=folder)
    assert job.wait() == 0, job.output
    line = next(x for x in job.ranks[0].output.splitlines() if x.startswith("results"))
    results = [float(number) for number in line.split()[1:]]
    steps = len(results) // 2
    return results[:steps], results[steps:]


MAX_NORM = 0.5  # of a gradient; smaller than the norms of most steps


def plain_loop(names: dict, optimizer: str, loss_of):
    """The losses and gradient norms of a loop without any of this, and the trained weights."""
    model, losses, norms = names["model"], [], []
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=OPTIMIZERS[optimizer])
    for batch in names["batches"]:
        loss = loss_of(model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(norm.item())
    assert min(losses) < 0.9 * losses[0]
    assert max(norms) > MAX_NORM  # so the gradient is clipped
    return (losses, norms), model.state_dict()


def without_any_of_this(size=12, optimizer="SGD", model=MODEL):
    names = {}
    exec(model + BATCHES.replace("SIZE", str(size)), names)

    def loss_of(model, batch):
        inputs, targets = default_collate([names["dataset"][i] for i in batch])
        return cross_entropy(model(inputs), targets)

    return plain_loop(names, optimizer, loss_of)


def assert_same(results, expected):
    for found, numbers in zip(results, expected, strict=True):
        assert found == pytest.approx(numbers, rel=1e-4)


def of_steps(results, first, last=None):
    return tuple(numbers[first:last] for numbers in results)


def assert_same_weights(file, expected):
    saved = torch.load(file)
    assert saved.keys() == expected.keys()
    for name, value in saved.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.rest
@pytest.mark.parametrize(("size", "micro", "processes"), [(10, 2, 3), (7, 3, 2)])
def test_any_batch(tmp_path, size, micro, processes):
    """The last batch of an epoch has 4 samples or 1, which leaves some ranks without any."""
    expected, weights = without_any_of_this(size)
    call = f"train(model, dataset, batches, micro_batch={micro}, lr=LR, max_norm={MAX_NORM})"
    assert_same(run(tmp_path, ANY_BATCH, call, processes, size), expected)
    assert_same_weights(tmp_path / "model.pt", weights)


# The first layer and the head share a matrix, as embeddings and head do.
TIED = MODEL.replace(
    "self.head = torch.nn.Linear(8, 4)",
    "self.first, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)\n"
    "        self.head.weight = self.first.weight",
).replace("self.layers(x)", "self.layers(self.first(x))")


@pytest.mark.rest
@pytest.mark.parametrize("model", [MODEL, TIED], ids=["", "tied"])
def test_fsdp_with_a_model_of_ones_own(tmp_path, model):
    expected, weights = without_any_of_this(size=16, model=model)
    call = f"train(Model, dataset, batches, lr=LR, max_norm={MAX_NORM})"
    assert_same(run(tmp_path, FSDP, call, 2, size=16, model=model), expected)
    assert_same_weights(tmp_path / "model.pt", weights)


# 13 tokens, of which each but the last is an input: 2, 3 and 4 ranks divide 12 tokens and 12 heads.
TEXT = (
    DECODER
    + """
torch.manual_seed(0)
model = Decoder(vocabulary=12, length=12, width=24, size=2, layers=4)
dataset = torch.randint(0, 12, (64, 13), generator=torch.Generator().manual_seed(1))
dataset[:, 1::2] = dataset[:, ::2][:, :6]  # so that there is something to learn
"""
)


def decoder_alone(optimizer="SGD"):
    names = {}
    exec(HEAD + TEXT + BATCHES.replace("SIZE", "8"), names)
    names["batches"] = names["batches"][:16]

    def loss_of(model, batch):
        tokens = names["dataset"][batch]
        logits = model(tokens[:, :-1], torch.arange(12))
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return plain_loop(names, optimizer, loss_of)[0]


def run_split(folder, processes, steps=16, save_every=99, optimizer="SGD"):
    call = f"train(model, dataset, batches[:{steps}], lr=LR, max_norm={MAX_NORM}, "
    call += f"save_every={save_every})"
    options = {"size": 8, "optimizer": optimizer, "model": TEXT}
    return run(folder, CHECKPOINT + TENSOR_PARALLEL, call, processes, **options)


@pytest.mark.rest
def test_tensor_parallelism(tmp_path):
    assert_same(run_split(tmp_path, 3), decoder_alone())


@pytest.mark.rest
def test_tensor_parallelism_resumes(tmp_path):
    """On another number of ranks, with the moments of AdamW."""
    expected = decoder_alone("AdamW")
    options = {"save_every": 6, "optimizer": "AdamW"}
    assert_same(run_split(tmp_path, 2, steps=9, **options), of_steps(expected, 0, 9))
    assert_same(run_split(tmp_path, 4, **options), of_steps(expected, 6))
