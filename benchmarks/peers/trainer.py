"""What a user of `transformers.Trainer` would run: the same training as chapter 1, in its terms.

Not run by hand: `benchmarks/single-gpu.py` starts it. Prints one JSON object: tokens per second
after the warm-up, and the mean loss between two logs. The blocks, their order and the initial
weights are those of chapter 1, whose functions prepare them; everything else is the Trainer's.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"

CHAPTER_1 = Path(__file__).resolve().parents[2] / "01-single-gpu" / "train-llm.py"


def load_chapter():
    spec = importlib.util.spec_from_file_location("chapter_1", CHAPTER_1)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chapter_1"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--tuned", action="store_true", help="compile, Liger kernels")
    ours, chapter_flags = parser.parse_known_args()
    chapter = load_chapter()

    import datasets
    import torch
    import transformers
    from torch.utils.data import Dataset, SequentialSampler

    sys.argv = [str(CHAPTER_1), *chapter_flags]
    args = chapter.parse_args()
    datasets.disable_progress_bars()
    transformers.set_seed(args.seed)
    config, tokenizer = chapter.load_config_and_tokenizer(args)
    blocks, _ = chapter.load_blocks(args, tokenizer, chapter.RunState(), args.batch_size)
    order = chapter.sample_order(range(args.max_steps * args.batch_size), len(blocks), args.seed)

    class Blocks(Dataset):
        def __len__(self):
            return len(order)

        def __getitem__(self, position):
            block = torch.from_numpy(blocks[order[position]].astype("int64"))
            return {"input_ids": block, "labels": block}

    class SequentialTrainer(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, _, state, control, **kwargs):
            if state.global_step in (ours.warmup, args.max_steps):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter())

    times = []
    torch.manual_seed(args.seed)
    with torch.device("meta"):  # or there would be other initial weights than chapter 1's
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device=args.device).tie_weights()
    model.init_weights()
    settings = {"torch_compile": True, "use_liger_kernel": True} if ours.tuned else {}
    with tempfile.TemporaryDirectory() as folder:
        trainer = SequentialTrainer(
            model=model,
            train_dataset=Blocks(),
            args=transformers.TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=args.batch_size,
                max_steps=args.max_steps,
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
            callbacks=[Clock()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    begin, end = times
    tokens = (args.max_steps - ours.warmup) * args.batch_size * args.seq_length
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert all(map(math.isfinite, losses))
    print(json.dumps({"tokens_per_second": tokens / (end - begin), "losses": losses}))


if __name__ == "__main__":
    main()
