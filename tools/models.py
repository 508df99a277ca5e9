"""Configs of models, for other tools, and the operations that a token needs.

`models.json` has some configs, which need no network.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
STORED = json.loads(Path(__file__).with_name("models.json").read_text())


def load_chapter(number: int):
    """The script of a chapter as a module, so that a tool reads what the chapter reads."""
    (script,) = REPOSITORY.glob(f"{number:02}-*/train-llm.py")
    spec = importlib.util.spec_from_file_location(f"chapter_{number}", script)
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


def load_config(name: str):
    """The config of a model: a name in `models.json` or on the Hub, a folder, or a config.json."""
    from transformers import AutoConfig

    if os.path.isfile(name):
        values = json.loads(Path(name).read_text())
    elif name in STORED and not os.path.isdir(name):
        values = STORED[name]
    else:
        return AutoConfig.from_pretrained(name)
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def flops_per_token(config, seq_length: int) -> int:
    """Operations of both passes for a token: 6 per weight, and attention (see docs/metrics.md)."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config = config.get_text_config()
    used = model.num_parameters(exclude_embeddings=True)  # looking up an embedding computes nothing
    if config.tie_word_embeddings:
        used += config.vocab_size * config.hidden_size  # the head computes with the same table
    # The first dimension of these weights is the number of experts. A token uses only some experts.
    for name, weight in model.named_parameters():
        if ".experts." in name:
            unused = len(weight) - config.num_experts_per_tok
            used -= unused * weight[0].numel()
    return 6 * used + 12 * config.num_hidden_layers * config.hidden_size * seq_length
