"""Small models, with random weights."""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from helpers.runner import REPOSITORY
from transformers import AutoConfig, AutoModelForCausalLM

TINY_LLAMA = REPOSITORY / "models" / "tiny-llama"
DEMO_TEMPLATE = REPOSITORY / "models" / "tiny-chat" / "template.jinja"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_model(folder: Path, **config) -> Path:
    """A folder with the tiny tokenizer and this config, without weights."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY_LLAMA / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2048}))
    return folder


def save_weights(folder: Path, dtype=torch.float32, **options) -> Path:
    """Adds random weights to a model's folder."""
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, **options)
    return folder


def save_uneven_weights(folder: Path) -> Path:
    """As `save_weights`, but no weight of a norm is one, and no bias is zero."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


@contextmanager
def weights_away(folder: Path):
    """The weights of this model cannot be read meanwhile."""
    file, elsewhere = folder / "model.safetensors", folder / "elsewhere"
    file.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(file)


def kept_bytes(model, ids) -> int:
    """What autograd keeps for the backward pass: each storage once, but parameters and buffers."""
    own = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers(), ids]}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # The result holds the graph; with checkpointing, also what is to be computed again
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in own)


# Two groups of two ranks can share heads and layers, and nothing else divides by the ranks.
SIZE = {"hidden_size": 40, "intermediate_size": 66, "num_hidden_layers": 4, "head_dim": 10}
SIZE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
BIASES = {"attention_bias": True, "mlp_bias": True}
EXPERT = {"moe_intermediate_size": 24, "intermediate_size": 40, "num_experts_per_tok": 2}
GPT2 = {"n_embd": 40, "n_layer": 4, "n_head": 4, "n_positions": 64, "eos_token_id": 0}
GPT2 |= dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0) | {"bos_token_id": 0}
MODELS = {
    "llama": SIZE | BIASES | TIED,
    "llama untied": SIZE | UNTIED,
    "llama of 2": SIZE | BIASES | TIED | {"num_hidden_layers": 2},  # compiles in half the time
    "llama untied of 2": SIZE | UNTIED | {"num_hidden_layers": 2},
    "llama of 8": SIZE | TIED | {"num_hidden_layers": 8},
    "mistral": SIZE | UNTIED | {"sliding_window": 32},
    "mistral window": SIZE | UNTIED | {"sliding_window": 8},
    "qwen2": SIZE | TIED,
    "qwen2 window": SIZE | TIED | MIXED | {"use_sliding_window": True},
    "qwen3": SIZE | UNTIED | {"attention_bias": True},
    "smollm3": SIZE | TIED | {"mlp_bias": True, "no_rope_layers": [1, 0] * 2},
    "gemma2": SIZE | MIXED | {"query_pre_attn_scalar": 10, "attn_logit_softcapping": 5.0},
    "gemma3_text": SIZE | MIXED,
    "gpt2": GPT2,
    "gpt_neox": SIZE | UNTIED | {"num_attention_heads": 4},
    "olmo2": SIZE | UNTIED,
    "phi3": SIZE | UNTIED | {"hidden_size": 80, "sliding_window": None},
    "opt": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 96}
    | {"word_embed_proj_dim": 64, "max_position_embeddings": 64, "dropout": 0.0},
    "mixtral": SIZE | TIED | {"num_local_experts": 4, "intermediate_size": 40},
    "mixtral with a loss of its router": SIZE
    | TIED
    | {"num_local_experts": 4, "intermediate_size": 40, "num_hidden_layers": 2}
    | {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    "qwen3_moe": SIZE | UNTIED | EXPERT | {"num_experts": 6, "mlp_only_layers": [0]},
    "olmoe": SIZE | UNTIED | EXPERT | {"num_experts": 8, "head_dim": 8, "hidden_size": 64},
    "gpt_oss": SIZE | UNTIED | {"num_local_experts": 4, "intermediate_size": 40},
    "deepseek_v3": SIZE
    | UNTIED
    | EXPERT
    | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8},
}


def write_weights(folder, name: str, models=MODELS, **config):
    write_model(folder, model_type=name.split(" ")[0], **models[name] | config)
    return save_uneven_weights(folder)


SMALLER = {"num_hidden_layers": 2, "num_experts_per_tok": 2}
MIXTURES = {name: MODELS[name] | SMALLER for name in ("mixtral", "deepseek_v3", "gpt_oss")}
UNEVEN_SIZE = {"hidden_size": 36, "intermediate_size": 66, "num_hidden_layers": 2, "head_dim": 10}
UNEVEN_SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
UNEVEN_SIZE |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
# Shards differ in size: of 66 columns a rank has 33 in a group, which are 17 and 16 in two groups.
UNEVEN_MODELS = {
    "llama": UNEVEN_SIZE | BIASES | {"tie_word_embeddings": True},
    "qwen3": UNEVEN_SIZE | {"tie_word_embeddings": False, "attention_bias": True},
}
CONVERTED_SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
CONVERTED_SIZE |= {"num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0}
CONVERTED_SIZE |= {"eos_token_id": 0}
CONVERTED_MODELS = {
    "gpt_neox": CONVERTED_SIZE | {"tie_word_embeddings": False},
    "mixtral": CONVERTED_SIZE | {"num_key_value_heads": 1, "num_local_experts": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": 0}
    | dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0.0),
}
FAR_LOOKING = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
FAR_LOOKING |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
FAR_LOOKING |= TIED | {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
