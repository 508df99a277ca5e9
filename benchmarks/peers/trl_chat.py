"""Chapter 16 beside TRL: the speed and memory of preparing conversations, and exact tokens.

    pip install --target trl --no-deps trl
    PYTHONPATH=trl python benchmarks/peers/trl_chat.py prepare --rows 8000
    PYTHONPATH=trl python benchmarks/peers/trl_chat.py templates
    PYTHONPATH=trl python benchmarks/peers/trl_chat.py train

`prepare` makes conversations of about 500 tokens from Python's own library. Chapter 16 and TRL's
SFTTrainer then make samples of them in turn, each in a new process. `templates` tokenizes several
conversations with all chat templates of TRL, and compares the tokens and the labels with those of a
server: the ids of each prompt, and the ids of each answer. `train` gives both the same ids, labels
and weights, and compares their losses and times. `--lora` is for chapter 17.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import re
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("COMET_MODE", "disabled")
import datasets
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.append(str(REPOSITORY / "tools"))
from models import load_chapter  # noqa: E402

SIZE = 1024
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def templates() -> dict[str, str]:
    [folder] = importlib.util.find_spec("trl").submodule_search_locations
    files = sorted(Path(folder, "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text("utf-8") for file in files}


def tokenizer_with(template: str):
    """The tiny tokenizer, in which all special tokens of the template are one token each."""
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "models" / "tiny-llama")
    found = {
        *re.findall(r"<[|\uff5c][^<>{}'\" ]+[|\uff5c]>|</?[a-z_]+>|\[/?[A-Z_]+\]", template),
        *SPECIAL,
    }
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found)})
    tokenizer.bos_token = tokenizer.eos_token
    tokenizer.chat_template = template
    return tokenizer


# -- Preparing -------------------------------------------------------------------------------------


def write_rows(file: Path, rows: int) -> None:
    """Two questions and two answers each, about 500 tokens together."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    text = "".join(source.read_text("utf-8") for source in sources)
    chance = random.Random(0)

    def part(length: int) -> str:
        begin = chance.randrange(len(text) - length)
        return text[begin : begin + length]

    with file.open("w") as stream:
        for _ in range(rows):
            messages = []
            for _ in range(2):
                messages.append({"role": "user", "content": part(200)})
                messages.append({"role": "assistant", "content": part(chance.randrange(100, 800))})
            stream.write(json.dumps({"messages": messages}) + "\n")


def prepare(who: str, file: str) -> None:
    """Prints what one of them needs to make samples of this file, without reading it."""
    if who != "chapter":
        from trl import SFTConfig, SFTTrainer

        tokenizer = tokenizer_with(templates()["qwen2_5_training"])
        tokenizer.eos_token = "<|im_end|>"
        config = AutoConfig.from_pretrained(REPOSITORY / "models" / "tiny-llama")
        config.vocab_size = len(tokenizer)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        options = {"max_length": SIZE, "assistant_only_loss": True, "report_to": [], "bf16": False}
        options["packing"] = who == "trl-packed"
        settings = SFTConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, **options)
        rows = datasets.load_dataset("json", data_files=file, split="train")
        before = resource.getrusage(resource.RUSAGE_SELF)
        trainer = SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
        after = resource.getrusage(resource.RUSAGE_SELF)
        tokens = sum(len(ids) for ids in trainer.train_dataset["input_ids"])
    else:
        chapter = load_chapter(16)
        tokenizer = tokenizer_with(templates()["qwen2_5"])
        args = SimpleNamespace(seq_length=SIZE, template_options={}, packing=True)
        args = SimpleNamespace(**vars(args), dataset_name=file, dataset_subset=None)
        with contextlib.redirect_stdout(io.StringIO()):
            datasets.load_dataset("json", data_files=file)  # so that it is in the cache
            before = resource.getrusage(resource.RUSAGE_SELF)
            samples, held_out = chapter.load_samples(args, tokenizer)
        after = resource.getrusage(resource.RUSAGE_SELF)
        tokens = (len(samples) + len(held_out)) * SIZE
    # Seconds of the CPU, because other programs may run beside this one
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    speed = f"{tokens:,} tokens in {seconds:.1f} CPU seconds, {tokens / seconds:,.0f} tokens/s"
    peak = f"peak {after.ru_maxrss / 1e6:.2f} GB, of which {before.ru_maxrss / 1e6:.2f} GB before"
    print(f"{who}: {speed}, {peak}", flush=True)


# -- Training --------------------------------------------------------------------------------------

STEPS, BATCH, LR = 30, 2, 1e-3


def load_samples(folder: Path, packing: bool):
    """The samples of the chapter in its order."""
    args = {"seq_length": SIZE, "template_options": {}, "packing": packing, "dataset_subset": None}
    args |= {"dataset_name": str(folder / "rows.jsonl")}
    chapter, args = load_chapter(16), SimpleNamespace(**args)
    with contextlib.redirect_stdout(io.StringIO()):
        samples, _ = chapter.load_samples(args, AutoTokenizer.from_pretrained(folder / "model"))
    order = chapter.sample_order(0, 0, len(samples))
    return samples.with_format(None).select(order[: STEPS * BATCH])


def train_chapter(folder: Path, number: str, *flags: str) -> list[float]:
    """The losses. By default, each conversation has a sample of its own, as in TRL."""
    [script] = REPOSITORY.glob(f"{number}-*/train-llm.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", script]
    command += ["-m", folder / "model", "-d", folder / "rows.jsonl", "-e", f"run-{number}"]
    command += ["-s", SIZE, "-b", BATCH, "--max-steps", STEPS, "--log-freq", 1, "--eval-freq", 0]
    command += ["--lr", LR, "--lr-scheduler", "constant", "--no-compile", *flags]
    command += ["--dtype", "fp32", "--save-dir", folder]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    lines = (folder / f"run-{number}" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    shutil.rmtree(folder / f"run-{number}")
    samples = load_samples(folder, packing=not flags)
    seconds = [record["time/total_ms"] / 1e3 for record in records]
    report(" ".join([f"chapter {number}", *flags]), seconds, sum(samples["answer_tokens"]))
    return [record["loss"] for record in records]


def train_trl(folder: Path, number: str) -> list[float]:
    """The losses of TRL, with the samples of the chapter in the chapter's order."""
    from peft import LoraConfig
    from transformers import DataCollatorForSeq2Seq, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = []
    for sample in load_samples(folder, packing=False):
        labels = sample["labels"]
        length = max(i for i, label in enumerate(labels) if label >= 0) + 1  # without padding
        rows.append({"input_ids": sample["input_ids"][:length], "labels": labels[:length]})
    settings = SFTConfig(
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
        disable_tqdm=True,
    )
    times = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments, **options):
            times.append(time.perf_counter())

    lora = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    trainer = SFTTrainer(
        model,
        settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        peft_config=LoraConfig(**lora) if number == "17" else None,
        callbacks=[Clock()],
    )
    trainer.train()
    answers = sum(label >= 0 for row in rows for label in row["labels"])
    report("TRL", [after - before for before, after in pairwise(times)], answers)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def report(who: str, seconds: list[float], answers: int) -> None:
    """`answers` is the number of answer tokens of all steps."""
    step = statistics.median(seconds[1:])
    print(f"{who}: {step:.3f} s a step, {answers / STEPS / step:,.0f} answer tokens/s", flush=True)


def train(number: str) -> None:
    torch.set_num_threads(1)  # as torchrun has it
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", 100)
        tokenizer = tokenizer_with(templates()["qwen2_5"])
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(folder / "model")
        config = AutoConfig.from_pretrained(REPOSITORY / "models" / "tiny-llama")
        config.vocab_size = len(tokenizer)
        config.max_position_embeddings = SIZE
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        for _ in range(3):  # in turn, because other programs may run beside these
            ours = train_chapter(folder, number, "--no-packing")
            theirs = train_trl(folder, number)
            train_chapter(folder, number)  # packed
    differences = [abs(a - b) / b for a, b in zip(ours, theirs, strict=True)]
    print(f"{STEPS} losses, from {ours[0]:.4f} to {ours[-1]:.4f}: within {max(differences):.1e}")


# -- Exact tokens ----------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 3}}}
USER = {"role": "user", "content": "Hi"}


def conversations():
    def turns(*contents, system=None):
        messages = [{"role": "system", "content": system}] if system else []
        for number, content in enumerate(contents):
            role = "assistant" if number % 2 else "user"
            messages.append({"role": role, "content": content})
        return messages

    calls = {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}
    result = {"role": "tool", "name": "f", "tool_call_id": "1", "content": "4"}
    return {
        "one turn": turns("Hi", "It is blue."),
        "two turns": turns("Hi", "Yes.", "And?", "No."),
        "three turns": turns("a", "b", "c", "d", "e", "f"),
        "a system message": turns("Hi", "Yes.", system="Be short."),
        "a line end first": turns("code", "\nx = 1"),
        "line ends": turns("code", "\n\nx\n\n", "more", "\ny\n"),
        "a space first": turns("Hi", " Yes."),
        "spaces": turns("Hi", "  Yes.  "),
        "an empty answer": turns("Hi", "", "And?", "Yes."),
        "digits": turns("1", "123", "2", "4567"),
        "other scripts": turns("Größe", "学习 \U0001f680", "e\u0301", "Да."),
        "code": turns("code", "```python\nx = 1\n```"),
        "a tab": turns("Hi", "\tYes."),
        "an apostrophe": turns("Hi", "'s it"),
        "a thought": turns("Hi", "<think>\nIt is.\n</think>\n\nYes."),
        "two thoughts": turns("a", "<think>\nb\n</think>\n\nc", "d", "<think>\ne\n</think>\n\nf"),
        "a call": [USER, calls],
        "a call and its result": [USER, calls, result, {"role": "assistant", "content": "Yes."}],
    }


def compare(chapter, tokenizer, messages) -> str:
    """`exact`, `refused`, or what differs."""
    found = chapter.tokenize({"messages": [messages]}, tokenizer, {}, 99_999)
    if any(found["refusal"]):
        return "refused"
    texts = list(zip(found["input_ids"], found["labels"], strict=True))
    parsed, _ = chapter.conversation_of({"messages": messages})
    labelled = 0
    for n, message in enumerate(parsed):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(
            parsed[:n], tokenize=False, add_generation_prompt=True
        )
        whole = tokenizer.apply_chat_template(parsed[: n + 1], tokenize=False)
        assert whole.startswith(prompt)
        answer = whole[len(prompt) :].rstrip()
        prompt, answer = (
            tokenizer(x, add_special_tokens=False).input_ids for x in (prompt, answer)
        )
        end = len(prompt) + len(answer)
        if not any(
            ids[:end] == prompt + answer and labels[len(prompt) : end] == answer
            for ids, labels in texts
        ):
            return f"answer {n} differs"
        labelled += len(answer)
    if labelled != sum(label >= 0 for _, labels in texts for label in labels):
        return "other tokens have labels"
    return "exact"


def compare_templates() -> None:
    chapter = load_chapter(16)
    total = Counter()
    names = {n: t for n, t in templates().items() if not n.endswith("_training")}
    for name, template in names.items():
        tokenizer = tokenizer_with(template)
        results = {}
        for case, messages in conversations().items():
            results[case] = compare(chapter, tokenizer, messages)
        counts = Counter(results.values())
        total += counts
        refused = [case for case, result in results.items() if result == "refused"]
        others = {c: r for c, r in results.items() if r not in ("exact", "refused")}
        print(f"| {name} | {counts['exact']} | {', '.join(refused)} | {others or ''} |", flush=True)
    print(dict(total), len(names), "templates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["chapter", "trl", "trl-packed"]
    parser.add_argument("what", choices=["prepare", "templates", "train", *kinds])
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--file")
    args = parser.parse_args()
    if args.what == "templates":
        compare_templates()
    elif args.what == "train":
        train("17" if args.lora else "16")
    elif args.what == "prepare":
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.jsonl")
            write_rows(file, args.rows)
            for number in range(args.rounds):
                for who in kinds:
                    env = os.environ | {"HF_DATASETS_CACHE": f"{folder}/{who}-{number}"}
                    command = [sys.executable, __file__, who, "--file", str(file)]
                    subprocess.run(command, env=env, check=True)
    else:
        prepare(args.what, args.file)


if __name__ == "__main__":
    main()
