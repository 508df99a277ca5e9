"""The loop of single.py with the layers on different devices: pipeline parallelism, with 1F1B.

Each process has a stage, which is some of the layers, and sends its activations to the next stage.
A batch is split into micro-batches, so that all stages have work at the same time.

    torchrun --standalone --nproc-per-node 2 learn/in-short/pipeline.py
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STEPS = 20
BATCH_SIZE = 8  # samples in a step
SEQ_LENGTH = 256  # tokens in a sample
MICRO_BATCHES = 4  # in a step

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
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
is_first = rank == 0
is_last = rank == world_size - 1


class Elsewhere(torch.nn.Module):
    """Takes the place of a layer of another stage. The other layers keep their numbers."""

    def forward(self, hidden_states, **options):
        return hidden_states


class Stage(torch.nn.Module):
    """Turns token ids or activations into activations, or in the last stage into logits."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        inputs = {"input_ids": x} if is_first else {"inputs_embeds": x}
        return self.model(**inputs, use_cache=False).logits


def loss_of(logits, labels):
    """The loss of a micro-batch, on the last stage."""
    return model.loss_function(logits, labels, vocab_size=config.vocab_size)


# Each rank keeps its share of the layers. The ends of the model belong to first and last stage.
layers = model.model.layers
for number in range(len(layers)):
    stage_of_layer = number * world_size // len(layers)
    if stage_of_layer != rank:
        layers[number] = Elsewhere()
if not is_first:
    model.model.embed_tokens = Elsewhere()
if not is_last:
    model.model.norm = Elsewhere()
    model.lm_head = Elsewhere()
stage = PipelineStage(Stage(model).to(device), rank, world_size, device)
schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
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
    # A step is the forward and backward passes of all micro-batches. The last stage has the losses.
    losses = []
    if is_first:
        schedule.step(input_ids)
    elif is_last:
        schedule.step(target=input_ids, losses=losses)
    else:
        schedule.step()
    # Clip the gradient of all stages alike: the norm is over all stages.
    gradients = [parameter.grad for parameter in model.parameters()]
    grad_norm = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(grad_norm)
    grad_norm = grad_norm.sqrt()
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm=1.0, total_norm=grad_norm)
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    if is_last:
        loss = torch.stack(losses).mean()
        print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

dcp.save(model.state_dict(), checkpoint_id=output)  # each rank writes its layers
dist.destroy_process_group()
