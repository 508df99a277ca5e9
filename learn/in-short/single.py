"""The whole training loop on one device, with a model of Transformers and real text.

A small Llama starts with random weights, and learns from the source code of Python's own library.

    python learn/in-short/single.py
"""

import glob
import sysconfig
from itertools import islice
from pathlib import Path

import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

STEPS = 20
BATCH_SIZE = 8  # samples in a step
SEQ_LENGTH = 256  # tokens in a sample

repository = Path(__file__).resolve().parents[2]
folder = repository / "models" / "tiny-llama"
output = repository / "outputs" / "in-short" / Path(__file__).stem
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Random weights. For trained weights, write `from_pretrained(folder)`, with a folder that has them.
# Embeddings and output head are two matrices here, as in most large models. Weights are in fp32,
# because bf16 would round small updates away.
torch.manual_seed(0)
config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
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
    loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
    loss.backward()
    # Clip the gradient before the update, so that no bad batch spoils the weights.
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()  # because backward() adds to the gradients
    print(f"step {step:2}  loss {loss.item():.4f}  gradient norm {grad_norm.item():.4f}")

model.save_pretrained(output)
