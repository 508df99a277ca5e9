"""The loop of fsdp.py with a mixture of experts: expert parallelism.

Each process has some of the experts of each layer. Tokens travel to their experts, and the results
travel back, so no process gathers all experts of a layer. FSDP shards all other weights.

    torchrun --standalone --nproc-per-node 2 learn/in-short/expert_parallel.py
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
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

STEPS = 20
BATCH_SIZE = 8  # samples in a step
SEQ_LENGTH = 256  # tokens in a sample

repository = Path(__file__).resolve().parents[2]
folder = repository / "models" / "tiny-mixtral"
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
config.output_router_logits = False  # no auxiliary loss: each rank would have another one
experts_per_rank = config.num_local_experts // world_size


def expert_parallel(experts, tokens, chosen, shares):
    """Sends tokens to the ranks of their experts, and adds up the results that come back.

    For each token, `chosen` has the numbers of its experts, and `shares` their weights in the sum.
    """
    # Copies of the tokens, sorted by expert: first the copies for rank 0, then for rank 1, ...
    per_token = chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)
    copies = tokens[order // per_token]
    # First tell each rank how many copies will come for each of its experts.
    counts = chosen.flatten().bincount(minlength=config.num_local_experts).view(world_size, -1)
    arriving_counts = torch.empty_like(counts)
    dist.all_to_all_single(arriving_counts, counts)
    send = counts.sum(1).tolist()
    receive = arriving_counts.sum(1).tolist()
    # The backward pass sends the gradients of the copies the other way.
    arrived = all_to_all_single_autograd(copies, receive, send, dist.group.WORLD)
    # The copies from each rank are sorted by expert, so the counts tell the expert of each copy.
    numbers = torch.arange(experts_per_rank, device=device).repeat(world_size)
    numbers = numbers.repeat_interleave(arriving_counts.flatten())
    gate_up = experts.gate_up_proj.to_local()  # the experts of this rank
    down = experts.down_proj.to_local()
    results = torch.zeros_like(arrived)
    for number in range(experts_per_rank):
        gate, up = linear(arrived[numbers == number], gate_up[number]).chunk(2, dim=-1)
        results[numbers == number] = linear(experts.act_fn(gate) * up, down[number])
    # Send the results back, and undo the sort: result i belongs to copy order[i].
    returned = all_to_all_single_autograd(results, send, receive, dist.group.WORLD)
    returned = returned[order.argsort()].view(len(tokens), per_token, -1)
    return (returned * shares[..., None]).sum(1)


weights = {}
if rank == 0:  # the only rank that holds the whole model, in CPU memory
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
with torch.device("meta"):  # shapes without memory
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
# Transformers calls this function in each layer, in place of its own.
ALL_EXPERTS_FUNCTIONS.register("expert_parallel", expert_parallel)
model.set_experts_implementation("expert_parallel")
mesh = init_device_mesh(device.type, (world_size,))
for layer in model.model.layers:
    experts = layer.mlp.experts
    for name, weight in list(experts.named_parameters()):
        # The weight is (experts, ...): each rank keeps its experts. A meta tensor sends nothing.
        part = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, torch.nn.Parameter(part))
    # FSDP gathers a layer as a whole, but not its experts.
    fully_shard(layer, mesh=mesh, ignored_params=set(experts.parameters()))
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
    # FSDP averages gradients over the ranks. An expert has added up gradients from all ranks.
    for layer in model.model.layers:
        for parameter in layer.mlp.experts.parameters():
            parameter.grad /= world_size
    # Clip the gradient before the update, so that no bad batch spoils the weights.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    grad_norm = grad_norm.full_tensor()  # of the shards of all ranks
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    loss = loss.detach()  # over this rank's samples
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

dcp.save(model.state_dict(), checkpoint_id=output)  # each rank writes its shards
dist.destroy_process_group()
