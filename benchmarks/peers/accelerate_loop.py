"""What a user of Accelerate would write: the usual loop, prepared for one device or many (DDP)."""

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import report, set_up
from torch.utils.data import DataLoader


def main() -> None:
    _, args, dataset, model, clock = set_up()
    precision = {"fp32": "no"}.get(args.dtype, args.dtype)
    accumulation = args.gradient_accumulation_steps
    accelerator = Accelerator(
        mixed_precision=precision,
        cpu=args.device == "cpu",
        gradient_accumulation_steps=accumulation,
    )
    set_seed(args.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}]
    groups.append({"params": vectors, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
    # Its steps are counted per device: the prepared scheduler makes as many as there are devices.
    steps = args.max_steps * accelerator.num_processes
    scheduler = transformers.get_scheduler(args.lr_scheduler, optimizer, args.warmup_steps, steps)
    loader = DataLoader(dataset, batch_size=args.batch_size, pin_memory=args.device == "cuda")
    if args.compile:
        for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
            layer.compile()
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses, loss_sum = [], torch.zeros((), device=accelerator.device)
    step = 0
    for batch in loader:
        # Between optimizer steps, the last four calls in this block do nothing.
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)  # divides by the number of passes
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        loss_sum += loss.detach() / accumulation
        if not accelerator.sync_gradients:
            continue
        step += 1
        if step % args.log_freq == 0:
            losses.append(accelerator.reduce(loss_sum, "mean").item() / args.log_freq)
            loss_sum.zero_()
        clock.step()
    report(clock, losses)


if __name__ == "__main__":
    main()
