"""Peak memory and time of head and loss: usual, in chunks as in chapter 19, and PyTorch's own.

    python benchmarks/chunked-loss.py --tokens 2048 4096 --vocabulary 32000 128256
    python benchmarks/chunked-loss.py --device cuda --compile --hidden 2048 --tokens 8192 32768

It takes the loss in a Llama of one layer with random weights, forward and backward pass. The ways
take turns; times are medians. On a CPU, they are seconds of one thread, and the peak is that of
PyTorch's MemTracker. On a GPU, they are seconds by the clock, until the GPU is done. The peak is
without weights and gradients. The error is that of the head's gradient, relative to the gradient
with the same weights in fp32. PyTorch's own way is `linear_cross_entropy` (2.13) with
`LinearCrossEntropyOptions()`. `--compile` compiles the loss function, as the chapters do, and
`--chunk` changes the tokens of a chunk.
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

WAYS = ["usual", "chunked"]
WAYS += ["linear_cross_entropy"] if hasattr(F, "linear_cross_entropy") else []


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


def make_model(way: str, vocabulary: int, args):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.hidden,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    model = transformers.LlamaForCausalLM(config).to(args.device, dtype)
    if args.compile:
        model.loss_function = torch.compile(model.loss_function)
    if way == "chunked":
        chapter = load_chapter(19)
        chapter.LOSS_CHUNK = args.chunk
        chapter.use_chunked_loss(model)
    if way == "linear_cross_entropy":
        use_linear_cross_entropy(model)
    return model


def train(model, ids):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item()  # waits for the GPU


def gradient(model, ids) -> torch.Tensor:
    """Of the head, after one forward and backward pass."""
    model.zero_grad()
    train(model, ids)
    return model.get_output_embeddings().weight.grad.float()


def measure(model, ids, expected) -> tuple[float, float, float, float]:
    """The loss, seconds, the peak in GB above weights and gradients, and the error."""
    on_gpu = ids.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    error = (gradient(model, ids) - expected).norm() / expected.norm()  # also compiles
    begin = clock()
    loss = train(model, ids)
    seconds = clock() - begin
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train(model, ids)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            train(model, ids)
        peak = tracker.get_tracker_snapshot("peak")[ids.device]["Total"]
        peak -= 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    return loss, seconds, peak / 1e9, error.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 128256])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for vocabulary in args.vocabulary:
        models = {way: make_model(way, vocabulary, args) for way in WAYS}
        in_fp32 = make_model("usual", vocabulary, args).float()  # the same, perhaps rounded weights
        for tokens in args.tokens:
            ids = torch.randint(vocabulary, (1, tokens), device=args.device)
            expected = gradient(in_fp32, ids)
            rounds = [
                {way: measure(model, ids, expected) for way, model in models.items()}
                for _ in range(args.rounds)
            ]
            for way in WAYS:
                loss, _, peak, error = rounds[0][way]
                seconds = statistics.median(result[way][1] for result in rounds)
                numbers = [f"{loss:.5f}", f"{peak:.3f}", f"{seconds:.3f}", f"{error:.1e}"]
                rows += [[f"{tokens:,}", f"{vocabulary:,}", way, *numbers]]
    print(table(f"tokens | vocabulary | {args.dtype} | loss | peak, GB | seconds | error", rows))


if __name__ == "__main__":
    main()
