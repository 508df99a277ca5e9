"""Chapters 16 and 17 beside TRL: on the rows of prepare-data.py --rows, the losses are equal.

pip install --target trl --no-deps trl==1.16.0
PYTHONPATH=trl python benchmarks/peers/trl_losses.py 16
"""

import json
import os
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["COMET_MODE"] = "disabled"
import datasets
import numpy as np
import torch
import trl
from peft import LoraConfig
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SIZE, STEPS, BATCH, LR = 1024, 30, 2, 1e-3
FLAGS = ["--log-freq", 1, "--eval-freq", 0, "--lr-scheduler", "constant", "--no-compile"]


def write_conversations(file: Path) -> None:
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    text = "".join(source.read_text("utf-8") for source in sources)
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(100):
            messages = []
            for _ in range(2):
                for role, most in (("user", 300), ("assistant", 700)):
                    begin = draw.randrange(len(text) - most)
                    content = text[begin : begin + draw.randrange(50, most)]
                    messages.append({"role": role, "content": content})
            print(json.dumps({"messages": messages}), file=out)


def run(*command) -> None:
    command = [sys.executable, *(str(part) for part in command)]
    subprocess.run(command, check=True, capture_output=True, cwd=REPOSITORY)


def write_model(folder: Path):
    tiny = REPOSITORY / "models" / "tiny-llama"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    special = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.bos_token = tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config = AutoConfig.from_pretrained(tiny)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), SIZE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return tokenizer


def losses_of_trl(folder: Path, tokenizer, number: str) -> list[float]:
    data = datasets.load_dataset("parquet", data_dir=str(folder / "data"))["train"]
    orders = [np.random.RandomState((0, epoch)).permutation(len(data)) for epoch in (0, 1)]
    rows = []
    for i in np.concatenate(orders)[: STEPS * BATCH]:
        labels = data[int(i)]["labels"]
        length = max(n for n, label in enumerate(labels) if label >= 0) + 1  # without padding
        rows.append({"input_ids": data[int(i)]["input_ids"][:length], "labels": labels[:length]})
    settings = trl.SFTConfig(
        output_dir=folder / "trl",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        seed=0,  # that of the chapter, so the random A of LoRA has the same numbers
        logging_steps=1,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        save_strategy="no",
        report_to=[],
    )
    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    trainer = trl.SFTTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        peft_config=LoraConfig(**lora) if number == "17" else None,
    )
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def main(number: str) -> None:
    torch.set_num_threads(1)  # as torchrun has it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_conversations(folder / "chats.jsonl")
        tokenizer = write_model(folder / "model")
        model = ["-m", folder / "model", "-s", SIZE]
        rows = ["--as", "messages", "--rows", "--no-packing", "-o", folder / "data"]
        run("tools/prepare-data.py", folder / "chats.jsonl", *rows, *model)
        [script] = REPOSITORY.glob(f"more/{number}-*/train-llm.py")
        flags = ["-d", folder / "data", "-e", "run", "--save-dir", folder, "--dtype", "fp32"]
        flags += ["-b", BATCH, "--max-steps", STEPS, "--lr", LR, *FLAGS]
        run("-m", "torch.distributed.run", "--standalone", script, *model, *flags)
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        ours = [json.loads(line)["loss"] for line in lines]
        theirs = losses_of_trl(folder, tokenizer, number)
    difference = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    print(f"{len(ours)} losses, from {ours[0]:.4f} to {ours[-1]:.4f}: within {difference:.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
