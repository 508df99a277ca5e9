"""Chapter 9: the Trainer of Transformers, with configuration files, on Slurm.

A template to copy. Hydra composes the configuration from the files in `conf/`. The Trainer trains
as chapters 1 to 3 do. Submitit starts the jobs on Slurm. The chapter continues no other chapter.

    python train-llm.py --config-name demo     # needs no GPU and no network
    torchrun --standalone --nproc-per-node 2 train-llm.py --config-name demo parallel=ddp
    python train-llm.py -m hydra/launcher=slurm parallel=fsdp nodes=2 data=alpaca,tinystories
"""

import glob
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

os.environ |= {
    "GOMP_SPINCOUNT": "10000",  # waiting CPU threads spin for a shorter time
    "COMET_DISABLE_AUTO_LOGGING": "1",  # Comet: patch no library
    "COMET_LOGGING_CONSOLE": "ERROR",  # Comet: no long report at the end
    "HYDRA_FULL_ERROR": "1",  # Hydra: raise errors, do not print them
    "PYTHON_LIBRARY": os.path.dirname(os.__file__),  # for conf/data/stdlib.yaml
    "REPOSITORY": os.path.abspath(f"{__file__}/../../.."),  # for conf/train.yaml
}
import comet_ml
import datasets
import hydra
import numpy as np
import psutil
import pyarrow.compute
import torch
import transformers
from accelerate.utils import gather, reduce, wait_for_everyone
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from submitit import JobEnvironment
from submitit.helpers import TorchDistributedEnvironment
from torch.distributed.tensor import DTensor
from torch.utils.data import Subset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import rotate_checkpoints

# -- Configuration ---------------------------------------------------------------------------------
# All fields with their types and defaults. The files in conf/ override the defaults, and the
# command line overrides the files. An unknown name or a value of the wrong type is an error.


@dataclass
class Model:
    name: str = MISSING  # Hub id or local folder of a causal language model
    from_scratch: bool = False  # random weights, not pretrained ones


@dataclass
class Data:  # the first three fields are arguments of datasets.load_dataset
    path: str = MISSING  # Hub id, or the format of local files: text, json, csv, parquet
    data_files: str | None = None  # local files: a path or a glob
    options: dict = MISSING  # more arguments, such as name: the configuration on the Hub
    text_column: str = "text"  # the column to train on
    seq_length: int = 1024  # tokens in one packed sample


@dataclass
class Fsdp:  # fsdp_config of TrainingArguments
    reshard_after_forward: bool = True  # free gathered layers after the forward pass
    activation_checkpointing: bool = False  # less memory, more computing
    cpu_offload: bool = False  # shards, gradients and AdamW state stay in CPU memory


# Keys of other configurations, and what takes their place with FSDP2.
NOT_IN_FSDP2 = {
    "use_orig_params": "FSDP2 always trains the original parameters",
    "sync_module_states": "each process loads all weights before FSDP2 shards them",
    "limit_all_gathers": "FSDP2 needs no limit",
    "forward_prefetch": "Accelerate has none; FSDP2 gathers the next layer early by itself",
    "backward_prefetch": "FSDP2 always gathers the next layer early",
    "sharding_strategy": "reshard_after_forward takes its place",
    "auto_wrap_policy": "each layer of the model is a unit: TRANSFORMER_BASED_WRAP",
    "min_num_params": "each layer of the model is a unit, whatever its size",
}


@dataclass
class Parallel:  # all fields but `several` are TrainingArguments
    several: bool = MISSING  # true: several processes train, with DDP or FSDP
    fsdp: bool = False  # FSDP2: each process holds a shard of the model
    fsdp_config: Fsdp = MISSING  # settings of FSDP
    activation_checkpointing: bool = False  # less memory, more computing; FSDP: see Fsdp
    bf16: bool = True  # GPUs compute in bf16. CPUs compute in fp32. Weights stay in fp32.
    fp16: bool = False  # compute in fp16, for GPUs without bf16


@dataclass
class Optimizer:  # TrainingArguments
    learning_rate: float = 3e-5  # peak
    lr_scheduler_type: str = "cosine"  # a name of transformers.SchedulerType
    warmup_steps: int = 0  # steps until the peak learning rate
    adam_beta2: float = 0.999  # of AdamW; training from scratch often takes 0.95
    weight_decay: float = 0.01  # of AdamW; biases and norms have none
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
    experiment_name: str = MISSING  # folder in save_dir, for a run and its variants
    save_dir: str = MISSING  # the folder of all runs
    run_folder: str = MISSING  # Hydra sets it, from the names and the overrides
    report_to: list[str] = MISSING  # any of comet_ml, tensorboard, wandb
    nodes: int = 1  # nodes of a Slurm job
    devices: int | None = None  # tasks per node; by default 8 on Slurm, locally one per GPU


def tasks_per_node(devices, default=None):
    """For conf/hydra/launcher. Without a number, the GPUs of this machine, or one CPU process."""
    return devices or default or torch.cuda.device_count() or 1


def folder_name(overrides):
    """For conf/train.yaml: a name without slashes, and not too long for a file system."""
    name = overrides.replace("/", "-").encode()[:200].decode(errors="ignore")
    if name == overrides:
        return name
    return f"{name}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"


OmegaConf.register_new_resolver("tasks", tasks_per_node, replace=True)
OmegaConf.register_new_resolver("folder", folder_name, replace=True)
ConfigStore.instance().store("schema", Config)


# -- A run -----------------------------------------------------------------------------------------


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config):
    try:
        # Hydra also accepts unknown names, after a plus sign, and the run would ignore them.
        config = OmegaConf.merge(Config, OmegaConf.to_container(config))
    except OmegaConfBaseException as error:
        explain(error)
    try:
        train(OmegaConf.to_object(config))
    except Exception:
        # Without sys.exit, Hydra and Submitit end the rank with status 0. Slurm then calls the job
        # complete, and the other ranks wait for this rank.
        traceback.print_exc()
        sys.exit(1)


def train(config):
    run = Run(config)
    check_numbers(config)
    try:
        args = training_arguments(config)
        tokenizer = AutoTokenizer.from_pretrained(config.model.name)
        model = load_model(config.model, args.seed)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if longest and config.data.seq_length > longest:  # the model has learned no more positions
            fail(f"data.seq_length must be at most {longest}, the positions of the model")
        if tokenizer.eos_token_id is None:
            fail(f"the tokenizer of {config.model.name} has no end-of-text token")
        # Local rank 0 runs the block first. The other ranks find its results in the cache.
        with args.main_process_first():
            vocabulary = model.get_input_embeddings().num_embeddings
            train_samples, eval_samples = load_samples(config.data, tokenizer, vocabulary)
        reporters = get_reporting_integration_callbacks(config.report_to)
    except Exception as error:
        fail(f"cannot set up the run with {config.model} and {config.data} ({error!r:.500})")
    global_batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    total_steps = args.num_train_epochs * len(train_samples) // global_batch
    if not total_steps:
        fail("the dataset is too small: lower per_device_train_batch_size or seq_length")
    args.max_steps = min(args.max_steps, total_steps)
    tokens = getattr(train_samples, "dataset", train_samples).tokens  # with those held out
    tokens_hash = datasets.fingerprint.Hasher.hash_bytes(map(np.asarray, tokens.chunks))
    checkpoint = run.resume(config, global_batch, tokens_hash)
    say(f"{args.world_size} x {args.device}, global batch {global_batch}, checkpoint: {checkpoint}")
    trainer = InOrder(
        model,
        args,
        train_dataset=train_samples,
        eval_dataset=eval_samples,
        processing_class=tokenizer,  # the Trainer saves it with the model
        data_collator=transformers.default_data_collator,  # no padding: samples are equally long
        callbacks=[run, *reporters],  # `run` first: it adds metrics for the reporters
    )
    trainer.train(checkpoint)
    if trainer.state.global_step < args.max_steps:
        leave(trainer)
    trainer.save_model(f"{config.run_folder}/final")
    say(f"Done: the model is in {config.run_folder}/final")


def check_numbers(config):
    """Refuses numbers that are too small. With 0 steps, some would mean every step."""
    smallest = {"data.seq_length": 2, "training.seed": 0}  # the others: 1
    numbers = {"data.seq_length": config.data.seq_length}
    numbers |= {f"training.{name}": number for name, number in asdict(config.training).items()}
    for name, number in numbers.items():
        least = smallest.get(name, 1)
        if number < least:
            fail(f"{name} must be {least} or more, not {number}")


def training_arguments(config):
    """Translates the configuration into the arguments of the Trainer."""
    if "SUBMITIT_EXECUTOR" in os.environ:
        # Without torchrun, the process sets torchrun's variables itself, before TrainingArguments
        # reads them. On Linux, outgoing connections take ports from 32768 on, so the port is below
        # 30000. A job that starts again may meet its old workers, so each start takes a new port.
        environment = TorchDistributedEnvironment()
        restarts = int(os.getenv("SLURM_RESTART_COUNT", 0))
        environment.master_port = 20_000 + (environment.master_port + restarts) % 10_000
        # All GPUs of the node stay visible. The process takes the GPU of its local rank.
        environment.export(set_cuda_visible_devices=False)
    settings = asdict(config.optimizer) | asdict(config.training) | asdict(config.parallel)
    several = settings.pop("several")
    del settings["save_total_limit"]  # Run removes old checkpoints, as the Trainer is too early
    on_gpu = torch.cuda.is_available()  # on the job's node, not on the submitting node
    settings["bf16"] &= on_gpu
    if several and os.getenv("GROUP_WORLD_SIZE") == "1":  # torchrun, on one node
        # The ranks meet in torchrun's store. After a restart, this store has keys of dead ranks, so
        # each attempt gets a prefix. The Trainer would set up the process group without a prefix.
        store, rank, world_size = next(torch.distributed.rendezvous("env://"))
        store = torch.distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        options = {"rank": rank, "world_size": world_size, "timeout": timedelta(minutes=30)}
        torch.distributed.init_process_group(store=store, **options)
    args = transformers.TrainingArguments(
        **settings,
        use_cpu=not on_gpu,  # without it, several CPU processes train separately
        output_dir=config.run_folder,
        run_name=config.experiment_name,
        ddp_find_unused_parameters=False,  # every step uses all parameters
        eval_strategy="steps",
        logging_nan_inf_filter=False,  # the default hides a loss that is not a number
        disable_tqdm=True,
        report_to="none",  # train() passes the reporters itself, after `run`
    )
    if several != (args.world_size > 1):
        fail(f"{args.world_size} processes: parallel=single takes one, ddp and fsdp take several")
    args._n_gpu = 1  # one GPU per process; the Trainer would use all GPUs with DataParallel
    return args


def load_model(config, seed):
    model_config = AutoConfig.from_pretrained(config.name)
    if getattr(model_config, "quantization_config", None):
        fail(f"{config.name} is quantized: give one in bf16 or fp32")
    if not config.from_scratch:
        model = AutoModelForCausalLM.from_pretrained(config.name, dtype=torch.float32)
        # Transformers does not tie weights that differ, so the model would not be the config's.
        tied_by_config = model.get_expanded_tied_weights_keys(all_submodels=True)
        if model.all_tied_weights_keys != tied_by_config:
            remedy = "set tie_word_embeddings to false in config.json"
            fail(f"the config ties the head to the embeddings, and the files do not: {remedy}")
        return model
    with torch.device("meta"):  # shapes, no memory
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
    torch.manual_seed(seed)
    model.to_empty(device="cpu").tie_weights()
    model.init_weights()  # on CPUs, the same random weights as in chapter 1
    return model


# -- Data: samples and order of chapters 1 to 3 ----------------------------------------------------


class PackedSamples:
    """All documents end to end, cut into samples of `seq_length` tokens. The remainder is dropped.

    `tokens` is a view of the memory-mapped Arrow file that `datasets` has cached.
    """

    def __init__(self, documents, data, tokenizer, vocabulary):
        def tokenize(texts):  # each document that is not empty, with one end-of-text token
            texts = [text for text in texts if text]
            documents = tokenizer(texts)["input_ids"] if texts else []
            end = tokenizer.eos_token_id
            documents = [ids if ids[-1] == end else [*ids, end] for ids in documents if ids]
            largest = max(map(max, documents), default=0)
            if largest >= vocabulary:
                fail(f"the tokenizer has a token id {largest}, and the model {vocabulary} tokens")
            return {"input_ids": documents}

        tokenized = documents.map(
            tokenize,
            batched=True,
            input_columns=data.text_column,
            remove_columns=documents.column_names,
            features=datasets.Features(input_ids=datasets.List(datasets.Value("int32"))),
        )
        self.tokens = pyarrow.compute.list_flatten(tokenized.data.column("input_ids"))
        self.seq_length = data.seq_length

    def __len__(self):
        return len(self.tokens) // self.seq_length

    def __getitem__(self, index):
        token_ids = self.tokens.slice(index * self.seq_length, self.seq_length).to_pylist()
        return {"input_ids": token_ids, "labels": token_ids}  # Transformers shifts the labels


def load_samples(data, tokenizer, vocabulary):
    """Training samples, and held-out samples: another split, or the last 1 % of the samples."""
    files = data.data_files
    if files and os.path.isfile(files):
        files = glob.escape(files)  # `datasets` reads a name as a pattern
    splits = datasets.load_dataset(data.path, data_files=files, **data.options)
    train_samples = PackedSamples(splits["train"], data, tokenizer, vocabulary)
    for name in ("validation", "test"):
        if name in splits:
            return train_samples, PackedSamples(splits[name], data, tokenizer, vocabulary)
    total = len(train_samples)
    begin = total - max(1, total // 100)
    return Subset(train_samples, range(begin)), Subset(train_samples, range(begin, total))


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        """One permutation per epoch, end to end. So the Trainer sees a run of a single epoch.

        A resumed run skips the samples that the run has read before.
        """
        size = len(self.train_dataset)
        count = self.args.max_steps * self.get_total_train_batch_size(self.args)
        epochs = range(count // size + 1)
        orders = [np.random.RandomState((self.args.seed, n)).permutation(size) for n in epochs]
        return np.concatenate(orders)[:count]


# -- The callback of a run -------------------------------------------------------------------------


class Run(transformers.TrainerCallback):
    """Measures, stops and resumes a run. `run.json` has the name of the newest complete checkpoint.

    Slurm sends SIGUSR2 before the time limit. Slurm sends SIGTERM to preempt or cancel a job.
    """

    def __init__(self, config):
        self.signals = []
        # Submitit's handlers would queue the job again from rank 0, while the other ranks train.
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda *received: self.signals.append(received))
            # conf/hydra/launcher/slurm.yaml holds back the signals that come during the imports.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        self.file = Path(config.run_folder, "run.json")
        self.keep = config.training.save_total_limit

    def resume(self, config, global_batch, tokens_hash):
        """Returns the newest complete checkpoint, or None. The settings must not have changed."""
        self.tokens_per_step = global_batch * config.data.seq_length
        self.parameters = asdict(config) | {"global_batch": global_batch}
        settings = f"{config.model}, {config.data}, {config.optimizer}, seed {config.training.seed}"
        settings += f", global batch {global_batch}, tokens {tokens_hash}"
        self.record = {"settings": settings, "checkpoint": None, "comet_key": os.urandom(16).hex()}
        if self.file.exists():
            self.record = json.loads(self.file.read_text())
        if self.record["settings"] != settings:
            fail(f"keep the settings or take another experiment_name: {self.record['settings']}")
        os.environ["COMET_EXPERIMENT_KEY"] = self.record["comet_key"]  # resume the experiment
        if not comet_ml.get_config("comet.api_key"):
            os.environ["COMET_START_ONLINE"] = "0"  # writes an archive
        return self.record["checkpoint"]

    def on_train_begin(self, args, state, control, model, **kwargs):
        # On CPUs, the Trainer accepts the settings of FSDP, shards nothing, and does not say so.
        if args.fsdp and not any(isinstance(p, DTensor) for p in model.parameters()):
            tell = say if args.device.type == "cpu" else fail
            tell("parallel=fsdp, but nothing is sharded: on CPUs, the Trainer runs DDP instead")
        # The Trainer has put the special tokens of the tokenizer into the settings of generation.
        # Transformers refuses to save changed settings that it doubts, such as a temperature
        # without sampling. It sees a change by this hash.
        settings = model.generation_config
        settings._original_object_hash = hash(settings)
        if args.should_save:
            parameters = json.dumps(self.parameters, indent=2)
            Path(args.output_dir, "parameters.json").write_text(parameters)
        self.step, self.time = state.global_step, time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        # A signal may reach one rank a step later than another. The ranks add up their signals, so
        # all ranks stop after the same step.
        if reduce(torch.tensor(len(self.signals), device=args.device), "sum") > 0:
            control.should_log = control.should_save = control.should_training_stop = True

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            tokens = (state.global_step - self.step) * self.tokens_per_step
            logs["tokens_per_second"] = tokens / (time.perf_counter() - self.time)
            self.step, self.time = state.global_step, time.perf_counter()
            # Peak memory of the GPU. Without a GPU: memory of the process.
            memory = torch.cuda.max_memory_reserved() or psutil.Process().memory_info().rss
            ranks = gather(torch.tensor([memory / 1e9], device=args.device)).tolist()
            logs |= {f"memory/rank{rank}_gb": gb for rank, gb in enumerate(ranks)}
        # Checkpoints have the history, so after a resume each step is in the file once.
        state.log_history[-1] |= logs
        if args.should_save:
            lines = [json.dumps(record).replace("eval_", "eval/") for record in state.log_history]
            Path(args.output_dir, "metrics.jsonl").write_text("\n".join(lines) + "\n")

    def on_save(self, args, state, control, **kwargs):
        # A checkpoint is complete when all ranks have written their files.
        wait_for_everyone()
        if args.should_save:
            self.record["checkpoint"] = f"{args.output_dir}/checkpoint-{state.global_step}"
            # A kill leaves the old record or the new one, never a half-written file.
            new_file = self.file.with_suffix(".new")
            new_file.write_text(json.dumps(self.record))
            new_file.replace(self.file)
            rotate_checkpoints(args.output_dir, self.keep, self.record["checkpoint"])


def leave(trainer):
    """Ends a stopped run. Queues a Slurm job again, unless Slurm or a user has ended the job."""
    say(f"Stopped after step {trainer.state.global_step}: the same command continues the run")
    if os.getenv("SUBMITIT_EXECUTOR") == "slurm" and trainer.args.should_save:
        job = JobEnvironment().job_id
        if b"RUNNING" in subprocess.check_output(["squeue", "--format=%T", "--jobs", job]):
            say(f"Job {job} is queued again")
            subprocess.check_call(["scontrol", "requeue", job])
    wait_for_everyone()  # a rank that ends earlier would end the job
    sys.exit(143)  # the usual status after SIGTERM


def say(message):
    """Prints a line, on rank 0."""
    if os.getenv("RANK", "0") == "0":
        print(message, flush=True)


def fail(message):
    """Exits with a one-line message about a mistake that the user can fix."""
    sys.exit(f"error: {message}")


def explain(error):
    """Exits with the message of Hydra, OmegaConf or Submitit in one line."""
    # Some messages have several lines. Some have their reason in __cause__.
    message = " ".join(f"{error} {error.__cause__ or ''}".split())
    for key, counterpart in NOT_IN_FSDP2.items():
        if f"{key}' not in 'Fsdp'" in message:  # the key may begin with fsdp_
            message += f" ({counterpart})"
    fail(message)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        explain(error)
