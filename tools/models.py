"""Loads the config of a model, for the estimators. `models.json` has some: no network needed."""

import json
import os
from pathlib import Path

STORED = json.loads(Path(__file__).with_name("models.json").read_text())


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
