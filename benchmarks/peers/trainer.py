"""What a user of `transformers.Trainer` would run: with its defaults, or tuned; on one device, with
DDP, or sharded with FSDP."""

import tempfile

import transformers
from common import Clock, report, set_up
from torch.utils.data import SequentialSampler


class InOrder(transformers.Trainer):
    """The dataset has chapter 1's order already."""

    def _get_train_sampler(self, *_):
        return SequentialSampler(self.train_dataset)


class StepClock(transformers.TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_step_end(self, *_, **__):
        self.clock.step()


def main() -> None:
    own, args, dataset, model, clock = set_up("--tuned", "--fsdp", "--liger")
    settings = {"use_liger_kernel": own.liger}
    if own.tuned:  # its defaults have the fused AdamW already, and SDPA
        settings["torch_compile"] = True
        if args.device == "cuda":
            settings |= {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    if own.fsdp:
        layers = model._no_split_modules
        settings["fsdp"] = "full_shard"
        settings["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": layers}
    with tempfile.TemporaryDirectory() as folder:
        trainer = InOrder(
            model=model,
            train_dataset=dataset,
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=args.batch_size,
                max_steps=args.max_steps,
                gradient_accumulation_steps=args.gradient_accumulation_steps,
                learning_rate=args.lr,
                lr_scheduler_type=args.lr_scheduler,
                warmup_steps=args.warmup_steps,
                weight_decay=args.weight_decay,
                max_grad_norm=args.max_grad_norm,
                bf16=args.dtype == "bf16",
                use_cpu=args.device == "cpu",
                logging_steps=args.log_freq,
                gradient_checkpointing=args.activation_checkpointing,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=args.seed,
                **settings,
            ),
            callbacks=[StepClock(clock)],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    if own.fsdp:
        kinds = {type(parameter).__name__ for parameter in trainer.model_wrapped.parameters()}
        assert "DTensor" in kinds, f"nothing is sharded: {kinds}"
    report(clock, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
