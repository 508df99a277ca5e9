"""FlashAttention's way through Transformers, with a stand-in for the package, which needs a GPU."""

import torch
import transformers.modeling_flash_attention_utils as flash
from transformers import AttentionInterface
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask


def function(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"scale": softmax_scale, "enable_gqa": True}
    causal = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    return causal.transpose(1, 2)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0):
    raise AssertionError("no sample is packed")


flash._lazy_imports = lambda *names, **options: (function, varlen, None, None, None)
AttentionInterface.register("flash_stand_in", flash_attention_forward)
AttentionMaskInterface.register("flash_stand_in", flash_attention_mask)
