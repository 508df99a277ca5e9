"""Each rank has gradients of its own: those of a sum of products with given numbers.

Each step prints nothing; the averages of all steps and what has not been sent go to a file of each
rank.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
spec = importlib.util.spec_from_file_location("chapter_8", sys.argv[1])
chapter = importlib.util.module_from_spec(spec)
sys.modules["chapter_8"] = chapter
spec.loader.exec_module(chapter)
dist.init_process_group("gloo")
SHAPES = json.loads(sys.argv[2])


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        self.device = torch.device("cpu")

    def num_parameters(self):
        return sum(p.numel() for p in self.parameters())

    def forward(self, numbers):
        return sum((w * n).sum() for w, n in zip(self.weights, numbers, strict=True))


def numbers(step):
    torch.manual_seed(100 * step + rank)
    return [torch.randn(shape) for shape in SHAPES]


class Watched(chapter.Compression):
    def average(self, parameter, gradient):
        future = super().average(parameter, gradient)
        futures.append((future, gradient))
        return future


results = {}
for case in json.loads(sys.argv[3]):
    method, keep, feedback, steps = case
    args = SimpleNamespace(compress=method, keep=keep, error_feedback=feedback, min_compress=100)
    args.powersgd_rank = 2
    model = Model()
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=0.002
    )
    compression = Watched(model, args, None)
    ddp.register_comm_hook(compression, chapter.Compression.hook)
    averages = []
    for step in range(steps):
        futures = []
        ddp(numbers(step)).backward()
        # On GPUs a future waits for the streams of the tensors that are its value, for no others.
        for future, gradient in futures:
            (tensor,) = torch.utils._pytree.tree_leaves(future.wait())
            assert tensor.data_ptr() == gradient.data_ptr(), (case, tensor, gradient)
        averages.append([p.grad.clone() for p in model.parameters()])
        for p in model.parameters():
            p.grad.zero_()
    names = [name for name, _ in model.named_parameters()]
    residuals = [compression.powersgd.error_dict.get(name, 0) for name in names]
    results[json.dumps(case)] = (averages, residuals, compression.volume)

# The memory of a job with one rank more, and then that of a job with as many ranks as this one.
# Each also has what PowerSGD keeps of bucket 0, and its rank.
folder = Path(sys.argv[4])
names = [name for name, _ in Model().named_parameters()]
for what, others in (("mean", size + 1), ("own", size)):
    for other in range(others) if rank == 0 else []:
        memory = {
            name: torch.full(shape, 10.0**other) for name, shape in zip(names, SHAPES, strict=True)
        }
        saved = [memory, {0: torch.tensor(10.0**other)}, {0: torch.tensor(10.0**other)}]
        torch.save(saved, folder / f"memory-{other}-of-{others}.pt")
    dist.barrier()
    memory = chapter.Compression(Model(), args, folder).memory
    assert [*memory[0]] == names
    results[what] = [*memory[0].values(), memory[1][0], memory[2][0]]
    dist.barrier()
    for file in folder.iterdir() if rank == 0 else []:
        file.unlink()
torch.save(results, f"results-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
