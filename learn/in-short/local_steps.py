"""The loop of ddp.py over slow links: local steps, as in DiLoCo (arXiv 2311.08105).

Each process is a replica, which trains alone for some steps. Then all replicas average the changes
of their weights. An outer optimizer takes this average for a gradient, and makes a step.

    torchrun --standalone --nproc-per-node 2 learn/in-short/local_steps.py
"""

import glob
import os
import sysconfig
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STEPS = 20
BATCH_SIZE = 8  # samples in a step
SEQ_LENGTH = 256  # tokens in a sample
LOCAL_STEPS = 5  # until the next outer step

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
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)
# The weights after the last outer step. At first, all ranks have the weights of the same seed.
shared = [parameter.detach().clone() for parameter in model.parameters()]
outer_optimizer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)

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
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    if step % LOCAL_STEPS == 0:
        with torch.no_grad():
            for weight, parameter in zip(shared, model.parameters(), strict=True):
                weight.grad = weight - parameter  # a gradient points uphill: start minus end
                dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
            outer_optimizer.step()
            for weight, parameter in zip(shared, model.parameters(), strict=True):
                parameter.copy_(weight)  # all replicas go on from the same weights
    loss = loss.detach()  # over this rank's samples
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    dist.all_reduce(grad_norm, dist.ReduceOp.AVG)  # each replica has its own
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

if rank == 0:
    model.save_pretrained(output)
dist.destroy_process_group()
