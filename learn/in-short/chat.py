"""The loop of ddp.py on conversations: only the tokens of the answers have a loss.

A sample is a conversation, and the rest of the sample is padding. The loss is the mean over the
answer tokens of all processes.

    torchrun --standalone --nproc-per-node 2 learn/in-short/chat.py
"""

import os
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel
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
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
model = DistributedDataParallel(model)  # it averages gradients during the backward pass
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0)

# The data: conversations, which a template turns into texts. A chat model has its own template.
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = (repository / "models" / "tiny-chat" / "template.jinja").read_text()
file = str(repository / "models" / "tiny-chat" / "stdlib.jsonl")
conversations = load_dataset("json", data_files=file, split="train")


def tokenize(row):
    """The tokens of a conversation, and labels: -100 for all tokens but those of the answers."""
    messages = row["messages"]
    render = partial(tokenizer.apply_chat_template, tokenize=False)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    ids, labels = [], []
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            # A server sends the tokens of the prompt. The model has to learn those of the answer.
            prompt = render(messages[:n], add_generation_prompt=True)
            answer = render(messages[: n + 1])[len(prompt) :].rstrip()
            ids = encode(prompt) + encode(answer)
            labels += [-100] * (len(encode(prompt)) - len(labels)) + encode(answer)
    padding = SEQ_LENGTH - len(ids)  # none of these conversations is longer
    return {"input_ids": ids + [0] * padding, "labels": labels + [-100] * padding}


# `map` runs once: it keeps its result on the disk for the next run.
samples = conversations.map(tokenize, remove_columns="messages")
samples = samples.shuffle(seed=0).with_format("torch")
# Each rank reads other samples.
sampler = DistributedSampler(samples, shuffle=False)
loader = DataLoader(samples, batch_size=BATCH_SIZE // world_size, sampler=sampler)

# The loop.
model.train()  # with dropout, if the model has any
for step, batch in enumerate(islice(loader, STEPS), start=1):
    input_ids = batch["input_ids"].to(device)
    labels = batch["labels"].to(device)
    # The answer tokens of all ranks. A rank's own mean would give short answers more weight.
    answer_tokens = (labels >= 0).sum()
    dist.all_reduce(answer_tokens)
    # The sum of the losses, divided by this number. DDP averages the gradients, and so divides by
    # the number of ranks, too. A cache of keys and values serves generation only.
    share = answer_tokens / world_size
    loss = model(input_ids, labels=labels, num_items_in_batch=share, use_cache=False).loss
    loss.backward()
    # Clip the gradient before the update, so that no bad batch spoils the weights.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    loss = loss.detach()  # over this rank's samples
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    if rank == 0:
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

if rank == 0:
    model.module.save_pretrained(output)
del model  # delete the wrapper before its process group
dist.destroy_process_group()
