"""Weights are saved in several files."""

import functools

import transformers

original = transformers.PreTrainedModel.save_pretrained
small = functools.partialmethod(original, max_shard_size="20KB")
transformers.PreTrainedModel.save_pretrained = small
