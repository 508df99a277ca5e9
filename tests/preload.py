"""The server of runner.py imports this once: what takes time, and is the same in every run.

It also trains a step as one of two ranks, of which no other one exists: the first call of an
operation takes longer than all later ones. No thread is left, which a fork would not have.
"""

# ruff: noqa: F401

import gc

import comet_ml
import datasets
import jsonargparse
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import transformers.modeling_layers
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto
import transformers.models.llama.modeling_llama
import transformers.optimization
import transformers.tokenization_utils_tokenizers
from torch.distributed.checkpoint import state_dict
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # hundreds of regular expressions, kept by transformers


def train_a_step():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    config = transformers.LlamaConfig(num_attention_heads=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for part in (*model.model.layers, model):
        torch.distributed.fsdp.fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    state_dict.get_state_dict(model, optimizer)
    dist.destroy_process_group()


train_a_step()
gc.collect()
gc.freeze()  # a collection in a run would copy all these objects
