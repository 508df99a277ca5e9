"""The server of runner.py imports this once: what takes time, and is the same in every run."""

# ruff: noqa: F401

import gc

import comet_ml
import datasets
import jsonargparse
import torch
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
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # hundreds of regular expressions, kept by transformers

gc.collect()
gc.freeze()  # a collection in a run would copy all these objects
