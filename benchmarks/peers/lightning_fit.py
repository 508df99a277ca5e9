"""What a user of Lightning would write: a module and a Trainer, on one device or many (DDP)."""

import lightning
import torch
import transformers
from common import RANK, WORLD_SIZE, report, set_up
from torch.utils.data import DataLoader


class CausalLM(lightning.LightningModule):
    def __init__(self, model, args, clock):
        super().__init__()
        self.model, self.args, self.clock = model, args, clock
        self.losses, self.loss_sum = [], 0.0

    def training_step(self, batch, _):
        loss = self.model(**batch, use_cache=False).loss
        self.loss_sum = self.loss_sum + loss.detach() / self.args.gradient_accumulation_steps
        return loss

    def on_train_batch_end(self, outputs, batch, batch_number):
        if (batch_number + 1) % self.args.gradient_accumulation_steps:
            return
        if (self.trainer.global_step) % self.args.log_freq == 0:
            mean = self.trainer.strategy.reduce(
                self.loss_sum / self.args.log_freq, reduce_op="mean"
            )
            self.losses.append(float(mean))
            self.loss_sum = 0.0
        self.clock.step()

    def configure_optimizers(self):
        args = self.args
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": args.weight_decay}]
        groups.append({"params": vectors, "weight_decay": 0.0})
        optimizer = torch.optim.AdamW(groups, lr=args.lr, fused=True)
        schedule = (args.lr_scheduler, optimizer, args.warmup_steps, args.max_steps)
        scheduler = transformers.get_scheduler(*schedule)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    _, args, dataset, model, clock = set_up()
    lightning.seed_everything(args.seed, verbose=False)
    if args.compile:
        for layer in model.model.layers if hasattr(model, "model") else model.transformer.h:
            layer.compile()
    trainer = lightning.Trainer(
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        precision={"fp32": "32-true"}.get(args.dtype, f"{args.dtype}-mixed"),
        max_steps=args.max_steps,
        accumulate_grad_batches=args.gradient_accumulation_steps,
        gradient_clip_val=args.max_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    sampler = torch.utils.data.DistributedSampler(dataset, WORLD_SIZE, RANK, shuffle=False)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, pin_memory=args.device == "cuda")
    module = CausalLM(model, args, clock)
    trainer.fit(module, loader)
    report(clock, module.losses)


if __name__ == "__main__":
    main()
