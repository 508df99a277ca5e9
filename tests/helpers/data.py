"""Small text, and its tokens."""

import argparse
import importlib.util
import json
from pathlib import Path

from helpers.runner import REPOSITORY

# mosaicml-streaming imports torchvision for images
NO_TORCHVISION = importlib.util.find_spec("torchvision") is None
STAND_IN = REPOSITORY / "tests" / "empty-torchvision"


def write_documents(file: Path, documents, column="text") -> Path:
    """A JSON Lines file with a row for each document."""
    return write_rows(file, [{column: document} for document in documents])


def write_rows(file: Path, rows) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


IMPORTABLE = ""
if NO_TORCHVISION:
    IMPORTABLE = f"import sys; sys.path.append({str(STAND_IN)!r})\n"


END = 0  # of text, for the tiny tokenizer


def arguments(name, seq_length=32, text_column="text"):
    return argparse.Namespace(
        dataset_name=str(name), dataset_subset=None, text_column=text_column, seq_length=seq_length
    )


def tokens_of(chapter_1, tokenizer, name, **options) -> list[int]:
    """All tokens, those to train on and the held-out ones."""
    parts = chapter_1.load_tokens(arguments(name, **options), tokenizer)
    return [token for part in parts for token in part.to_pylist()]


def expected_tokens(tokenizer, texts) -> list[int]:
    return [token for text in texts for token in [*tokenizer(text)["input_ids"], END]]
