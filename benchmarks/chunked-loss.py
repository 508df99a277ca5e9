"""Peak memory and CPU time of head and loss: usual, with --chunked-loss, and PyTorch's own.

    python benchmarks/chunked-loss.py --tokens 2048 4096 --vocabulary 32000 128256

It takes the loss of chapter 1 in a Llama of one layer with random weights, forward and backward
pass. The three ways take turns; times are medians of CPU seconds of one thread. The peak is that of
PyTorch's MemTracker, without the weights. PyTorch's own way is `linear_cross_entropy` (2.13) with
`LinearCrossEntropyOptions()`.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch.distributed._tools.mem_tracker import MemTracker

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "tools"))
from models import load_chapter, table  # noqa: E402

WAYS = ["usual", "chunked", "linear_cross_entropy"]
HIDDEN = 512


def use_linear_cross_entropy(model):
    head = model.get_output_embeddings()

    def loss(logits, labels, **options):
        labels = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        options = torch.nn.LinearCrossEntropyOptions()
        total = F.linear_cross_entropy(
            logits.flatten(0, 1), head.weight, labels, reduction="sum", options=options
        )
        return total / (labels != -100).sum()

    head.forward = torch.clone
    model.loss_function = loss


def make_model(way: str, vocabulary: int, dtype: torch.dtype):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    if way == "chunked":
        load_chapter(1).use_chunked_loss(model)
    if way == "linear_cross_entropy":
        use_linear_cross_entropy(model)
    return model


def measure(model, ids) -> tuple[float, float, float]:
    """The loss, CPU seconds, and the peak in GB above the weights."""
    begin = time.process_time()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    seconds = time.process_time() - begin
    model.zero_grad()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[ids.device]["Total"]
    model.zero_grad()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return loss.item(), seconds, (peak - weights) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    rows = []
    for vocabulary in args.vocabulary:
        models = {way: make_model(way, vocabulary, dtype) for way in WAYS}
        for tokens in args.tokens:
            ids = torch.randint(vocabulary, (1, tokens))
            rounds = [
                {way: measure(model, ids) for way, model in models.items()}
                for _ in range(args.rounds)
            ]
            for way in WAYS:
                loss, _, peak = rounds[0][way]
                seconds = statistics.median(result[way][1] for result in rounds)
                numbers = [f"{loss:.5f}", f"{peak:.3f}", f"{seconds:.1f}"]
                rows += [[f"{tokens:,}", f"{vocabulary:,}", way, *numbers]]
    print(table(f"tokens | vocabulary | {args.dtype} | loss | peak, GB | CPU seconds", rows))


if __name__ == "__main__":
    main()
