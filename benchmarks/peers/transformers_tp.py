"""What a user of Transformers alone would write for tensor parallelism: `DistributedConfig`.

All processes read the same batch. Gradients are not clipped, because `clip_grad_norm_` raises on
this mixture of DTensors and plain tensors (Transformers 5.23): pass `--max-grad-norm 0`.
"""

import tempfile

import torch
import torch.distributed as dist
import transformers
from common import RANK, WORLD_SIZE, report, set_up
from torch.utils.data import DataLoader
from transformers.distributed.configuration_utils import DistributedConfig


def main() -> None:
    _, args, dataset, model, clock = set_up()
    if args.max_grad_norm or args.dtype != "fp32":
        raise SystemExit(
            "error: it does not clip and does not cast: --max-grad-norm 0 --dtype fp32"
        )
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    if RANK == 0:
        model.save_pretrained(folders[0])
    dist.barrier()
    sizes = DistributedConfig(tp_size=WORLD_SIZE)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folders[0], distributed_config=sizes, dtype=torch.float32
    )
    model.train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    # Not fused: that raises on plain tensors beside DTensors.
    optimizer = torch.optim.AdamW(groups, lr=args.lr, foreach=False)
    schedule = (args.lr_scheduler, optimizer, args.warmup_steps, args.max_steps)
    scheduler = transformers.get_scheduler(*schedule)
    loader = DataLoader(dataset, batch_size=args.batch_size * WORLD_SIZE)
    losses, loss_sum = [], torch.zeros(())
    accumulation = args.gradient_accumulation_steps
    for number, batch in enumerate(loader, 1):
        loss = model(**batch, use_cache=False).loss / accumulation
        loss.backward()
        loss_sum += getattr(loss, "full_tensor", lambda loss=loss: loss)().detach()
        if number % accumulation:
            continue
        step = number // accumulation
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.log_freq == 0:
            losses.append(loss_sum.item() / args.log_freq)
            loss_sum.zero_()
        clock.step()
    report(clock, losses)


if __name__ == "__main__":
    main()
