"""The loop of fsdp.py with another optimizer for the matrices of the layers: Muon.

Muon needs whole matrices, and FSDP has cut them. Each matrix has an owner: the process that gets
all shards of the matrix, computes the update, and sends the shards of the update back.

    torchrun --standalone --nproc-per-node 2 learn/in-short/muon.py
"""

import glob
import math
import os
import sysconfig
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from datasets import load_dataset
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STEPS = 20
BATCH_SIZE = 8  # samples in a step
SEQ_LENGTH = 256  # tokens in a sample

repository = Path(__file__).resolve().parents[2]
folder = repository / "models" / "tiny-llama"
output = repository / "outputs" / "in-short" / Path(__file__).stem

# torchrun starts one process per device, and tells each process its rank and how many there are.
dist.init_process_group()  # gloo sends tensors between CPUs, NCCL between GPUs
rank = dist.get_rank()
world_size = dist.get_world_size()
device = torch.device("cpu")
# Each process of this node needs a GPU of its own. Otherwise all processes take the CPU.
if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)

# Random weights. For trained weights, write `from_pretrained(folder)`, with a folder that has them.
# Embeddings and output head are two matrices here, as in most large models. Weights are in fp32,
# because bf16 would round small updates away.
torch.manual_seed(0)
config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
weights = {}
if rank == 0:  # the only rank that holds the whole model, in CPU memory
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
with torch.device("meta"):  # shapes without memory
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
mesh = init_device_mesh(device.type, (world_size,))  # the devices that share the model
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)  # a layer is gathered as a whole
fully_shard(model, mesh=mesh)  # the rest: embeddings, last norm and output head
model.to_empty(device=device)  # memory for the shards of this rank
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, weights, options=options)  # each rank gets its shards from rank 0
# A state dict does not have the rotary frequencies, so compute them again.
model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
# Muon trains the matrices of the layers, and AdamW trains embeddings, head and norms.
matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
others = [p for p in model.parameters() if p.dim() == 1 or p not in set(matrices)]
optimizer = torch.optim.AdamW(others, lr=2e-3, weight_decay=0)
# Each matrix has an owner, in turn. From now on, matrices are in the order of their owners.
owned = [matrices[owner::world_size] for owner in range(world_size)]
matrices = [matrix for of_owner in owned for matrix in of_owner]
momenta = [torch.zeros_like(matrix) for matrix in matrices]  # sharded as the weights are
# The sizes of shards. All ranks have equally many rows of a matrix.
sizes = [matrix.to_local().numel() for matrix in matrices]
own_sizes = [matrix.to_local().numel() for matrix in owned[rank]]
to_owners = [sum(matrix.to_local().numel() for matrix in of_owner) for of_owner in owned]
from_ranks = [sum(own_sizes)] * world_size


def orthogonalize(matrix):
    """The matrix with the same singular vectors, and with all singular values near 1."""
    x = matrix / matrix.norm()
    for _ in range(5):  # Newton-Schulz: each time, most singular values come nearer to 1
        gram = x @ x.T
        x = 3.4445 * x + (2.0315 * gram @ gram - 4.7750 * gram) @ x
    return x


@torch.no_grad()
def muon_step():
    # One message has the direction of each matrix: its momentum, and a step ahead.
    shards = []
    for matrix, momentum in zip(matrices, momenta, strict=True):
        momentum.lerp_(matrix.grad, 0.05)
        direction = matrix.grad.lerp(momentum, 0.95)
        shards.append(direction.to_local().flatten())
        matrix.grad = None
    message = torch.cat(shards)
    # To the owners. `received` has a row for each rank, so a part of all rows is a whole matrix.
    received = torch.empty(world_size, sum(own_sizes), device=device)
    dist.all_to_all_single(received.view(-1), message, from_ranks, to_owners)
    for matrix, part in zip(owned[rank], received.split(own_sizes, dim=1), strict=True):
        whole = orthogonalize(part.reshape(matrix.shape))
        part.copy_(whole.view(world_size, -1))
    # And back. Each rank moves its own rows, about as far as AdamW would.
    dist.all_to_all_single(message, received.view(-1), to_owners, from_ranks)
    for matrix, update in zip(matrices, message.split(sizes), strict=True):
        lr = optimizer.param_groups[0]["lr"] * 0.2 * math.sqrt(max(matrix.shape))
        weight = matrix.to_local()
        weight.sub_(lr * update.view_as(weight))


# The data: each file is a document.
tokenizer = AutoTokenizer.from_pretrained(folder)
files = sorted(glob.glob(f"{sysconfig.get_path('stdlib')}/[a-z]*.py"))
documents = load_dataset("text", data_files=files, sample_by="document", split="train")


def pack(documents):
    """Joins all documents, and cuts them into samples of equal length, so there is no padding."""
    tokens = []
    # verbose=False: no warning about long documents, because they are cut below.
    for document in tokenizer(documents["text"], verbose=False)["input_ids"]:
        tokens += [*document, tokenizer.eos_token_id]  # the end of the document
    length = len(tokens) // SEQ_LENGTH * SEQ_LENGTH  # without the rest, which fills no sample
    return {"input_ids": torch.tensor(tokens[:length]).view(-1, SEQ_LENGTH).numpy()}


# `map` runs once: it keeps its result on the disk for the next run.
samples = documents.map(pack, batched=True, batch_size=None, remove_columns="text")
samples = samples.shuffle(seed=0).with_format("torch")
# Each rank reads other samples. All ranks together read the batch of single.py.
sampler = DistributedSampler(samples, shuffle=False)
loader = DataLoader(samples, batch_size=BATCH_SIZE // world_size, sampler=sampler)

# The loop.
model.train()  # with dropout, if the model has any
for step, batch in enumerate(islice(loader, STEPS), start=1):
    input_ids = batch["input_ids"].to(device)
    # The model shifts the labels by one token itself, so the labels are the input. A cache of keys
    # and values serves generation only.
    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    # Clip the gradient before the update, so that no bad batch spoils the weights.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    grad_norm = grad_norm.full_tensor()  # of the shards of all ranks
    muon_step()
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    loss = loss.detach()  # over this rank's samples
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

dcp.save(model.state_dict(), checkpoint_id=output)  # each rank writes its shards
dist.destroy_process_group()
