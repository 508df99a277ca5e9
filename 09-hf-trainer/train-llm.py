"""Chapter 9: the same training with the Trainer of Transformers, by configuration, and on Slurm.

A template to copy. Hydra composes the configuration from the files in `conf/`, the Trainer of
Transformers trains, and Submitit starts the jobs on Slurm. The chapter continues no other chapter.

    python train-llm.py --config-name demo                  # two minutes on any machine, no network
    torchrun --standalone --nproc-per-node 2 train-llm.py --config-name demo parallel=ddp
    python train-llm.py -m hydra/launcher=slurm parallel=fsdp nodes=2 data=alpaca,tinystories
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ |= {
    "GOMP_SPINCOUNT": "10000",  # CPU threads that wait for each other spin: less of it
    "COMET_DISABLE_AUTO_LOGGING": "1",  # Comet: patch no library
    "COMET_LOGGING_CONSOLE": "ERROR",  # Comet: no long report at the end
    "HYDRA_FULL_ERROR": "1",  # Hydra: raise errors, do not print them
    "PYTHON_LIBRARY": os.path.dirname(os.__file__),  # for conf/data/stdlib.yaml
}
import comet_ml
import datasets
import hydra
import numpy as np
import psutil
import pyarrow as pa
import torch
import transformers
from accelerate.utils import gather, reduce
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from submitit import JobEnvironment
from submitit.helpers import TorchDistributedEnvironment
from torch.distributed.tensor import DTensor
from torch.utils.data import Subset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import get_reporting_integration_callbacks

# -- Configuration ---------------------------------------------------------------------------------
# All fields with their types and defaults. The files in conf/ override the defaults, and the
# command line overrides the files. An unknown name or a value of another type is an error.


@dataclass
class Model:
    name: str = MISSING  # Hub id or local folder of a causal language model
    from_scratch: bool = False  # random weights, not pretrained ones


@dataclass
class Data:  # the first three are arguments of datasets.load_dataset
    path: str = MISSING  # Hub id; for local files the format: text, json, csv or parquet
    data_files: str | None = None  # local files: a path or a glob
    options: dict = MISSING  # more arguments: name, the configuration on the Hub, and others
    text_column: str = "text"  # the column to train on
    seq_length: int = 1024  # tokens in one packed sample


@dataclass
class Fsdp:  # fsdp_config of TrainingArguments
    reshard_after_forward: bool = True  # free gathered layers after the forward pass
    activation_checkpointing: bool = False  # less memory, more computing
    cpu_offload: bool = False  # shards, gradients and AdamW state stay in CPU memory


@dataclass
class Parallel:  # all but the first are TrainingArguments
    several: bool = MISSING  # processes; each has a copy of the model, unless fsdp
    fsdp: bool = False  # each process has a share of the model, by FSDP2
    fsdp_config: Fsdp = MISSING  # for fsdp
    activation_checkpointing: bool = False  # less memory, more computing; not for fsdp
    bf16: bool = True  # on GPUs, compute in bf16; the weights stay in fp32, and so do CPUs
    fp16: bool = False  # compute in fp16, for GPUs without bf16


@dataclass
class Optimizer:  # TrainingArguments
    learning_rate: float = 3e-5  # peak
    lr_scheduler_type: str = "cosine"  # course of the learning rate: transformers.SchedulerType
    warmup_steps: int = 0  # steps until the peak learning rate
    weight_decay: float = 0.01  # AdamW's, not for biases and norms
    max_grad_norm: float = 1.0  # clips gradients; 0: no clipping


@dataclass
class Training:  # TrainingArguments; steps are optimizer steps
    per_device_train_batch_size: int = 8  # samples per device and forward pass
    per_device_eval_batch_size: int = 8  # samples per device in an evaluation
    gradient_accumulation_steps: int = 1  # forward passes per optimizer step
    num_train_epochs: int = 3  # passes over the dataset
    max_steps: int = 1_000_000_000  # stop after this many steps
    eval_steps: int = 500  # steps between evaluations on held-out samples
    logging_steps: int = 10  # steps between logged metrics
    save_steps: int = 500  # steps between checkpoints
    save_total_limit: int = 2  # checkpoints to keep
    seed: int = 0  # of random weights and the order of samples


@dataclass
class Config:
    model: Model = MISSING  # conf/model
    data: Data = MISSING  # conf/data
    parallel: Parallel = MISSING  # conf/parallel
    optimizer: Optimizer = MISSING  # conf/train.yaml
    training: Training = MISSING  # conf/train.yaml
    experiment_name: str = MISSING  # the folder of a run and its variants, in save_dir
    save_dir: str = MISSING  # the folder of all runs
    run_folder: str = MISSING  # not to be set: Hydra makes it from the names and the overrides
    report_to: list[str] = MISSING  # any of comet_ml, tensorboard, wandb
    nodes: int = 1  # nodes of a Slurm job
    devices: int = 8  # devices per node: a Slurm job has a task for each


ConfigStore.instance().store("schema", Config)


# -- A run -----------------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config):
    try:
        train(OmegaConf.to_object(config))
    except Exception:
        # Hydra and Submitit would end this rank with status 0. Slurm would call the job complete,
        # and the other ranks would wait for this one.
        traceback.print_exc()
        sys.exit(1)


def train(config):
    run = Run(config)
    try:
        args = training_arguments(config)
        tokenizer = AutoTokenizer.from_pretrained(config.model.name)
        model = load_model(config.model, args.seed)
        # Local rank 0 runs the block first. The other ranks find its results in the cache.
        with args.main_process_first():
            train_samples, eval_samples = load_samples(config.data, tokenizer)
        reporters = get_reporting_integration_callbacks(config.report_to)
    except Exception as error:
        fail(f"cannot set up the run with {config.model} and {config.data} ({error!r:.500})")
    global_batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    total_steps = args.num_train_epochs * len(train_samples) // global_batch
    if not total_steps:
        fail("the dataset is too small: lower per_device_train_batch_size or seq_length")
    args.max_steps = min(args.max_steps, total_steps)
    checkpoint = run.resume(config, global_batch)
    say(f"{args.world_size} × {args.device}, global batch {global_batch}, checkpoint: {checkpoint}")
    trainer = InOrder(
        model,
        args,
        train_dataset=train_samples,
        eval_dataset=eval_samples,
        processing_class=tokenizer,  # is saved with the model
        data_collator=transformers.default_data_collator,  # no padding: all samples are full
        callbacks=[run, *reporters],  # `run` first: it adds numbers to what the others report
    )
    trainer.train(checkpoint)
    if trainer.state.global_step < args.max_steps:
        leave(trainer)
    trainer.save_model(f"{config.run_folder}/final")
    say(f"Done: the model is in {config.run_folder}/final")


def training_arguments(config):
    """The configuration in the words of the Trainer."""
    if "SUBMITIT_EXECUTOR" in os.environ:
        # Sets the variables of torchrun from the variables of the job, before TrainingArguments
        # reads them. A job that was queued again may meet old workers: each time a new port.
        environment = TorchDistributedEnvironment()
        environment.master_port += int(os.environ.get("SLURM_RESTART_COUNT", 0))
        # All GPUs of the node stay visible. The process takes the one of its local rank.
        environment.export(set_cuda_visible_devices=False)
    settings = asdict(config.optimizer) | asdict(config.training) | asdict(config.parallel)
    several = settings.pop("several")
    on_gpu = torch.cuda.is_available()  # asked here: the submitting node may have none
    settings["bf16"] &= on_gpu
    args = transformers.TrainingArguments(
        **settings,
        use_cpu=not on_gpu,  # otherwise several processes without GPUs train each for itself
        output_dir=config.run_folder,
        run_name=config.experiment_name,
        ddp_find_unused_parameters=False,  # every step uses all parameters
        eval_strategy="steps",
        logging_nan_inf_filter=False,  # the default hides a loss that is not a number
        disable_tqdm=True,
        report_to="none",  # train() passes the reporters itself, in its order
    )
    if several != (args.world_size > 1):
        fail(f"{args.world_size} processes: parallel=single takes one, ddp and fsdp take several")
    args._n_gpu = 1  # a process drives one GPU; the Trainer would drive all, by DataParallel
    return args


def load_model(config, seed):
    if not config.from_scratch:
        return AutoModelForCausalLM.from_pretrained(config.name, dtype=torch.float32)
    with torch.device("meta"):  # shapes, no memory
        model_config = AutoConfig.from_pretrained(config.name)
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    torch.manual_seed(seed)
    model.to_empty(device="cpu").tie_weights()
    model.init_weights()  # the weights that chapter 1 has on CPUs
    return model


# -- Data: samples and order of chapters 1 to 3 ----------------------------------------------------


class PackedSamples:
    """All documents end to end, cut into samples of `seq_length` tokens; the last rest is dropped.

    `tokens` is a view of the memory-mapped Arrow file that `datasets` has cached.
    """

    def __init__(self, documents, data, tokenizer):
        def tokenize(texts):  # an end-of-text token stands after each document
            documents = tokenizer([text for text in texts if text])["input_ids"]
            return {"input_ids": [[*ids, tokenizer.eos_token_id] for ids in documents]}

        tokenized = documents.map(
            tokenize,
            batched=True,
            input_columns=data.text_column,
            remove_columns=documents.column_names,
        )
        chunks = tokenized.data.column("input_ids").chunks  # each one a list of documents
        self.tokens = pa.chunked_array([chunk.flatten() for chunk in chunks])
        self.seq_length = data.seq_length

    def __len__(self):
        return len(self.tokens) // self.seq_length

    def __getitem__(self, index):
        token_ids = self.tokens.slice(index * self.seq_length, self.seq_length).to_pylist()
        return {"input_ids": token_ids, "labels": token_ids}  # Transformers shifts the labels


def load_samples(data, tokenizer):
    """The samples to train on and those held out: a split of their own, or the last 1 %."""
    splits = datasets.load_dataset(data.path, data_files=data.data_files, **data.options)
    train_samples = PackedSamples(splits["train"], data, tokenizer)
    for name in ("validation", "test"):
        if name in splits:
            return train_samples, PackedSamples(splits[name], data, tokenizer)
    total = len(train_samples)
    begin = total - max(1, total // 100)
    return Subset(train_samples, range(begin)), Subset(train_samples, range(begin, total))


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        """A permutation for each epoch, by seed and epoch. For the Trainer, the run is one epoch.

        A run that resumes skips the samples that it has read.
        """
        size = len(self.train_dataset)
        count = self.args.max_steps * self.get_total_train_batch_size(self.args)
        epochs = [
            np.random.RandomState((self.args.seed, epoch)).permutation(size)
            for epoch in range(count // size + 1)
        ]
        return np.concatenate(epochs)[:count]


# -- The callback of a run -------------------------------------------------------------------------


class Run(transformers.TrainerCallback):
    """Measures a run, stops it at a signal, and resumes it. `run.json` says where it stands.

    Slurm sends SIGUSR2 before the time limit, and SIGTERM to a job that has to make room.
    """

    def __init__(self, config):
        self.signals = []
        # Submitit's own handlers would queue the job again from rank 0 alone, while others train.
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda *received: self.signals.append(received))
        self.file = Path(config.run_folder, "run.json")

    def resume(self, config, global_batch):
        """The newest checkpoint, if any. With other settings it would be another training."""
        self.tokens_per_step = global_batch * config.data.seq_length
        settings = (
            f"{config.model}, {config.data}, {config.optimizer}, seed {config.training.seed}, "
            f"global batch {global_batch}"
        )
        self.record = {"settings": settings, "checkpoint": None, "comet_key": os.urandom(16).hex()}
        if self.file.exists():
            self.record = json.loads(self.file.read_text())
        if self.record["settings"] != settings:
            fail(f"keep the settings or take another experiment_name: {self.record['settings']}")
        os.environ["COMET_EXPERIMENT_KEY"] = self.record["comet_key"]  # resumes, too
        if not comet_ml.get_config("comet.api_key"):
            os.environ["COMET_START_ONLINE"] = "0"  # writes an archive
        return self.record["checkpoint"]

    def on_train_begin(self, args, state, control, model, **kwargs):
        # The Trainer takes the settings of FSDP also where it does not shard, without a word.
        if args.fsdp and not any(isinstance(p, DTensor) for p in model.parameters()):
            tell = say if args.device.type == "cpu" else fail
            tell("parallel=fsdp, but nothing is sharded: on CPUs, the Trainer runs DDP instead")
        self.step, self.time = state.global_step, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        # One rank may have the signal a step before another. So all ranks add up what they have.
        if reduce(torch.tensor(len(self.signals), device=args.device), "sum") > 0:
            control.should_log = control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            tokens = (state.global_step - self.step) * self.tokens_per_step
            logs["tokens_per_second"] = tokens / (time.perf_counter() - self.time)
            self.step, self.time = state.global_step, time.perf_counter()
            # Bytes at most on the GPU; without one, now in the process.
            memory = torch.cuda.max_memory_reserved() or psutil.Process().memory_info().rss
            ranks = gather(torch.tensor([memory / 1e9], device=args.device)).tolist()
            logs |= {f"memory/rank{rank}_gb": gb for rank, gb in enumerate(ranks)}
        # The Trainer keeps its history in its checkpoints. So a run that resumes has the records
        # up to the checkpoint, and each step stands there once.
        state.log_history[-1] |= logs
        if args.should_save:
            lines = [json.dumps(record).replace("eval_", "eval/") for record in state.log_history]
            Path(args.output_dir, "metrics.jsonl").write_text("\n".join(lines))

    def on_save(self, args, state, control, **kwargs):
        # The Trainer saves file by file. A checkpoint counts when all ranks have written theirs.
        reduce(torch.zeros(1, device=args.device))
        if args.should_save:
            self.record["checkpoint"] = f"{args.output_dir}/checkpoint-{state.global_step}"
            self.file.write_text(json.dumps(self.record))


def leave(trainer):
    """Ends a run that was stopped. A job of Slurm is queued again, unless somebody cancelled it."""
    say(f"Stopped after step {trainer.state.global_step}: the same command continues the run")
    if os.environ.get("SUBMITIT_EXECUTOR") == "slurm" and trainer.args.should_save:
        job = JobEnvironment().job_id
        if b"RUNNING" in subprocess.check_output(["squeue", "--format=%T", "--jobs", job]):
            say(f"Job {job} is queued again")
            subprocess.check_call(["scontrol", "requeue", job])
    trainer.accelerator.wait_for_everyone()  # a rank that ends before would end the job
    sys.exit(143)  # as after SIGTERM


def say(message):
    """Prints a line, on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        print(message, flush=True)


def fail(message):
    """Exits with a one-line message about a mistake that the user can fix."""
    sys.exit(f"error: {message}")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        # Of Hydra and Submitit: several lines, and sometimes the reason is in the cause.
        fail(" ".join(f"{error} {error.__cause__ or ''}".split()))
