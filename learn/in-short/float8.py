"""The loop of fsdp.py with linear layers that multiply in 8 bits (fp8).

Before a product, torchao rounds weights, inputs and gradients to 8 bits, each tensor with a scale.
Weights and AdamW moments stay in fp32. On CPUs, the products are emulated, and rounded in the same
way. It needs torchao: pip install -c constraints.txt ".[float8]"

    torchrun --standalone --nproc-per-node 2 learn/in-short/float8.py
"""

import glob
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
from torchao import float8
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
head = model.lm_head  # stays as it is: its rounding errors would go straight into the loss
settings = float8.Float8LinearConfig(
    enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu"
)
float8.convert_to_float8_training(
    model, config=settings, module_filter_fn=lambda layer, name: layer is not head
)
mesh = init_device_mesh(device.type, (world_size,))  # the devices that share the model
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)  # a layer is gathered as a whole
fully_shard(model, mesh=mesh)  # the rest: embeddings, last norm and output head
model.to_empty(device=device)  # memory for the shards of this rank
options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
set_model_state_dict(model, weights, options=options)  # each rank gets its shards from rank 0
# A state dict does not have the rotary frequencies, so compute them again.
model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)

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
    optimizer.step()
    float8.precompute_float8_dynamic_scale_for_fsdp(model)  # scales, the same on all ranks
    optimizer.zero_grad()  # because backward() adds to the gradients
    loss = loss.detach()  # over this rank's samples
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

dcp.save(model.state_dict(), checkpoint_id=output)  # each rank writes its shards
dist.destroy_process_group()
