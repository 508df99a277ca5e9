"""The loop of single.py with layers that several devices compute together: tensor parallelism.

Each process has some of the heads and columns of each layer, and computes them for all tokens.
Between these matrix products, each process has some of the tokens (sequence parallelism).

    torchrun --standalone --nproc-per-node 2 learn/in-short/tensor_parallel.py
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.utils.data import DataLoader
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
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
TOKENS = Shard(1)  # of (samples, tokens, ...): each rank has some of the tokens
PLAN = {
    # Each rank looks up its part of the vocabulary. A reduce-scatter adds the results up.
    "model.embed_tokens": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=TOKENS),
    # Norms work on single tokens, so tokens stay split.
    "model.layers.*.*_layernorm": tp.SequenceParallel(),
    # Attention needs all tokens: an all-gather. Each rank has some heads: columns of q, k and v.
    # With its rows of o, it computes a part of a sum. A reduce-scatter adds the parts up.
    "model.layers.*.self_attn": tp.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": TOKENS},
        desired_input_kwarg_layouts={"hidden_states": Replicate()},
    ),
    "model.layers.*.self_attn.[qkv]_proj": tp.ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": tp.RowwiseParallel(output_layouts=TOKENS),
    # The same for the MLP: an all-gather, columns, rows, and a reduce-scatter.
    "model.layers.*.mlp": tp.PrepareModuleInput(
        input_layouts=TOKENS, desired_input_layouts=Replicate()
    ),
    "model.layers.*.mlp.gate_proj": tp.ColwiseParallel(),
    "model.layers.*.mlp.up_proj": tp.ColwiseParallel(),
    "model.layers.*.mlp.down_proj": tp.RowwiseParallel(output_layouts=TOKENS),
    "model.norm": tp.SequenceParallel(),
    # Each rank computes the logits of all tokens, for its part of the vocabulary.
    "lm_head": tp.ColwiseParallel(
        input_layouts=TOKENS, output_layouts=Shard(-1), use_local_output=False
    ),
}
mesh = init_device_mesh(device.type, (world_size,))
tp.parallelize_module(model, mesh, PLAN)
# By itself, the model would number only the tokens of this rank.
positions = torch.arange(SEQ_LENGTH, device=device)[None]
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
loader = DataLoader(samples, batch_size=BATCH_SIZE)

# The loop.
model.train()  # with dropout, if the model has any
for step, batch in enumerate(islice(loader, STEPS), start=1):
    input_ids = batch["input_ids"].to(device)
    # The model shifts the labels by one token itself, so the labels are the input. A cache of keys
    # and values serves generation only.
    batch = {"input_ids": input_ids, "labels": input_ids, "position_ids": positions}
    with tp.loss_parallel():  # no rank has whole logits
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    # Clip the gradient before the update, so that no bad batch spoils the weights.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    grad_norm = grad_norm.full_tensor()  # of the parts of all ranks
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    loss = loss.full_tensor()  # all ranks have the same loss
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

dcp.save(model.state_dict(), checkpoint_id=output)  # each rank writes its parts
dist.destroy_process_group()
