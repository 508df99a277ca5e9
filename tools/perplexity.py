"""Measures the perplexity of a model on held-out documents.

    python tools/perplexity.py outputs/my-run/final -d roneneldan/TinyStories -s 512
    python tools/perplexity.py outputs/my-run/step-00000500 -d "held-out/*.jsonl"
    python tools/perplexity.py Qwen/Qwen3-0.6B -d allenai/c4 --dataset-subset en -b 2

The model is one that tools/generate.py reads, and the dataset one that tools/prepare-data.py reads.
The documents are the first ones that are held out, or the first ones of all. Each document ends
with an end-of-text token and is cut into rows of its own. The loss is the mean over all tokens but
the first of each row, in fp32 and in nats. Figures compare only at the same `--seq-length`, since
the first tokens of a row have little context, and for the same tokenizer.
"""

import argparse
import math
import sys
from itertools import islice

import documents
import torch
import transformers
from generate import load
from torch.nn.functional import cross_entropy

from models import load_chapter, positive

chapter = load_chapter(1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Perplexity of a model on held-out documents.")
    add, count = parser.add_argument, positive(int)
    add("model", help="a run's final/ or step-* folder, another folder, or a Hub id")
    add("-d", "--dataset-name", required=True, help="Hub id, file, pattern or address")
    add("--dataset-subset", help="configuration name on the Hub")
    add("--text-column", default="text", help="the column to read [%(default)s]")
    add("--eval-documents", type=count, default=1000, help="how many, the first ones [%(default)s]")
    add("-s", "--seq-length", type=int, default=1024, help="tokens per row [%(default)s]")
    add("-b", "--batch-size", type=count, default=8, help="rows per forward pass [%(default)s]")
    args = parser.parse_args()
    if args.seq_length < 2:
        parser.error("--seq-length must be at least 2")
    return args


def tokenized(tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """The token ids of the first held-out documents of all that tools/prepare-data.py reads."""
    flags = documents.reading(subset=args.dataset_subset, text_column=args.text_column)
    texts = islice(documents.held_out_texts(args.dataset_name, flags), args.eval_documents)
    return chapter.tokenize({"text": [*texts]}, tokenizer, "text")["input_ids"]


@torch.no_grad()
def mean_loss(model, rows: list[list[int]], args: argparse.Namespace) -> float:
    """The mean over the labels of all rows, each label once."""
    loss_sum = 0.0
    for begin in range(0, len(rows), args.batch_size):
        batch = rows[begin : begin + args.batch_size]
        # A label of -100 has no loss. Padding comes last, where no token attends to it, so it needs
        # no mask, and any token id will do.
        labels = torch.full((len(batch), args.seq_length), -100)
        for label, row in zip(labels, batch, strict=True):
            label[: len(row)] = torch.tensor(row)
        labels = labels.to(model.device)
        logits = model(input_ids=labels.clamp(min=0), use_cache=False).logits
        # A token is predicted from the tokens before it, so the first one of a row has no loss.
        predicted, expected = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss_sum += cross_entropy(predicted, expected, reduction="sum").item()
    return loss_sum / labels_in(rows)


def labels_in(rows: list[list[int]]) -> int:
    return sum(len(row) - 1 for row in rows)


def measure(args: argparse.Namespace) -> tuple[float, int, int]:
    """The mean loss, and the numbers of documents and of labels."""
    tokenizer, model = load(args.model)
    model.float()
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    if args.seq_length > positions:
        sys.exit(f"error: {args.model} has {positions} positions only: lower --seq-length")

    try:
        token_ids = tokenized(tokenizer, args)
    except Exception as error:
        sys.exit(f"error: cannot load the dataset {args.dataset_name} ({error!r:.300})")
    if not token_ids:
        sys.exit(f"error: no document with text in {args.dataset_name}")
    largest = max(max(ids) for ids in token_ids)
    if largest >= model.config.get_text_config().vocab_size:
        sys.exit(f"error: token {largest} is outside the vocabulary of {args.model}")
    length = args.seq_length
    rows = [ids[i : i + length] for ids in token_ids for i in range(0, len(ids), length)]
    return mean_loss(model, rows, args), len(token_ids), labels_in(rows)


def main() -> None:
    args = parse_args()
    transformers.logging.disable_progress_bar()
    try:
        loss, count, tokens = measure(args)
    except torch.OutOfMemoryError:
        sys.exit("error: out of GPU memory: lower --batch-size or --seq-length")
    numbers = f"({count} documents, {tokens} tokens)"
    print(f"loss {loss:.4f}  perplexity {math.exp(loss):.2f}  {numbers}")


if __name__ == "__main__":
    main()
