"""What several tools share: the scripts of chapters, configs of models, flags and tables.

`models.json` has some configs, which need no network.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path

from chapters import script_of

if sys.stdout:  # not closed
    sys.stdout.reconfigure(errors="replace")  # a terminal may know ASCII alone
REPOSITORY = Path(__file__).resolve().parents[1]
# Of the memory of a GPU, for what PyTorch does not count: CUDA's context, the buffers of NCCL and
# cuBLAS, gaps between blocks. A rule of thumb.
SPARE = 0.1
STORED = json.loads(Path(__file__).with_name("models.json").read_text())


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def positive(kind):
    """For flags: a number of this kind above 0."""

    def number(text: str):
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    number.__name__ = kind.__name__
    return number


def sync(folder: Path) -> None:
    """Waits until a folder and all of its files are on the disk, as the chapters do."""
    for path in [*folder.rglob("*"), folder]:
        opened = os.open(path, os.O_RDONLY)
        os.fsync(opened)
        os.close(opened)


def table(header: str, rows: list[list]) -> str:
    """As Markdown. The header has its bars between the columns."""
    lines = [f"| {header} |", "|---" * (header.count("|") + 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def load_script(script: Path):
    """A script as a module. An import statement takes no file name with a hyphen."""
    name = f"{script.parent.name}_{script.stem}"
    spec = importlib.util.spec_from_file_location(name, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.compile look for it there
    spec.loader.exec_module(module)
    return module


def load_chapter(number: int):
    """The script of a chapter as a module, so that a tool reads what the chapter reads."""
    return load_script(script_of(number))


def load_config(name: str):
    """The config of a model: a name in `models.json` or on the Hub, a folder, or a config.json.

    Of a model with parts for images or sound, it is the config of the text model inside.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    values = None
    if os.path.isfile(name):
        values = json.loads(Path(name).read_text())
    elif name in STORED and not os.path.isdir(name):
        values = dict(STORED[name])
    if values:
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    else:
        config = AutoConfig.from_pretrained(name)
    for found in (config.get_text_config(), config):
        if type(found) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return found
    fail(f"{name} is no plain decoder of text: choose another model")


def check_length(config, seq_length: int) -> None:
    if seq_length < 2:
        fail(f"--seq-length {seq_length} leaves no token to predict: give 2 or more")
    longest = getattr(config, "max_position_embeddings", None)
    if longest and seq_length > longest:
        fail(f"--seq-length {seq_length} is more than the model's {longest} positions")


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
