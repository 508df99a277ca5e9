"""The loop of fsdp.py with long samples: context parallelism, with an all-to-all of heads.

All processes share each sample, and each process has a part of its tokens. Only attention needs the
tokens of other processes. For attention, each process gets some of the heads, for all tokens.

    torchrun --standalone --nproc-per-node 2 learn/in-short/context_parallel.py
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
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

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
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)


def swap(x):
    """Splits dimension 1 over the ranks, and joins dimension 2. The backward pass undoes it."""
    parts = torch.stack(x.chunk(world_size, dim=1))  # part 0 goes to rank 0, and so on
    parts = all_to_all_single_autograd(parts, None, None, dist.group.WORLD)  # None: equal sizes
    return torch.cat(parts.unbind(), dim=2)


def attention_of_own_heads(module, query, key, value, mask, **options):
    # From (samples, heads, tokens of a rank, size) to (samples, heads of a rank, tokens, size)
    query, key, value = swap(query), swap(key), swap(value)
    output, _ = sdpa_attention_forward(module, query, key, value, mask, **options)
    # From (samples, tokens, heads of a rank, size) to (samples, tokens of a rank, heads, size)
    return swap(output), None  # None: attention weights, which training does not need


# The layers look up their attention function by its name. Transformers makes no mask for a name
# that it does not know. The function above needs none, because it is causal.
AttentionInterface.register("own_heads", attention_of_own_heads)
model.set_attn_implementation("own_heads")

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
    # Shift the labels before the split, because the next token may be on the next rank.
    labels = input_ids.roll(-1, dims=1)
    labels[:, -1] = -100  # no label, because the sample ends
    positions = torch.arange(SEQ_LENGTH, device=device)[None]
    batch = {"input_ids": input_ids, "shift_labels": labels, "position_ids": positions}
    batch = {name: x.chunk(world_size, dim=1)[rank].contiguous() for name, x in batch.items()}
    # All ranks divide by the mean number of labels of a rank. So the mean over ranks, which FSDP
    # computes for gradients, is the mean over all labels.
    labels_per_rank = BATCH_SIZE * (SEQ_LENGTH - 1) / world_size
    # Transformers computes a loss only if it gets `labels`, but then reads `shift_labels`.
    batch["labels"] = batch["shift_labels"]
    loss = model(**batch, num_items_in_batch=labels_per_rank, use_cache=False).loss
    loss.backward()
    # Clip the gradient before the update, so that no bad batch spoils the weights.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    grad_norm = grad_norm.full_tensor()  # of the shards of all ranks
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    loss = loss.detach()  # of the tokens of this rank
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

dcp.save(model.state_dict(), checkpoint_id=output)  # each rank writes its shards
dist.destroy_process_group()
