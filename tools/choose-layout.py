"""Chooses how to divide a training between devices. `estimate-scaling.py --choose` calls this.

    python tools/estimate-scaling.py --choose -m meta-llama/Llama-3.1-70B --devices 64 -s 8192

A layout says how many devices form a tensor (tp), pipeline (pp), context (cp) or expert group (ep).
The other dimension is data parallelism (dp): groups that train on different samples. Each layout is
that of a chapter, and of no joined chapters. All of them train on the same global batch. `memory`
has formulae for the memory of a layout, and `estimate-scaling.py` those for its time. The best
layouts are traced with `estimate-memory.py`.

Memory is in bytes and times are in seconds. Printed GB are 1e9 bytes.
"""

import argparse
import copy
import importlib
import math
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
from models import REPOSITORY, SPARE, check_length, load_config, script_of, table

scaling = importlib.import_module("estimate-scaling")

TRACED = 3  # the best layouts
# Layouts that differ by less count as equally fast, because the estimate is not more exact.
CLOSE = 1.05
ROWS = 10  # of the table of layouts that fit
NO_JOINS = "Joined chapters, such as 06+11, are not among the layouts: docs/combining.md"
MOST_DEVICES = 65_536  # where the search for a number of devices ends


@dataclass(frozen=True)
class Layout:
    chapter: int
    method: str  # the name in estimate-scaling.py
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    shards: int = 1  # ranks between which FSDP divides the weights, or this rank's part of them
    exchange: str = "heads"  # of chapter 11
    schedule: str = "1f1b"  # of chapters 7 and 13
    stages: int = 1  # of a rank
    samples: int = 1  # of a micro-batch of a group
    micro_batches: int = 1  # of a group, in a step
    checkpointing: bool = False
    reshard: bool = True  # False: --no-reshard-after-forward

    def name(self) -> str:
        names = {1: "one device", 2: "DDP", 3: "FSDP", 5: "HSDP"}
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "dp": self.dp}
        groups = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        if self.schedule == "interleaved":
            groups += f", interleaved × {self.stages}"
        return names.get(self.chapter, groups) + ("" if self.reshard else ", no reshard")


@dataclass
class Choice:
    """A layout, its bytes per device by formula and by trace, and its times."""

    layout: Layout
    memory: float
    step: float = 0.0
    efficiency: float = 0.0  # computation without repetitions / step
    bubble: float = 0.0  # share of the step
    inside: float = 0.0  # bytes that a device sends in a step, within its node
    outside: float = 0.0  # and to other nodes
    traced: float | None = None
    problem: str = field(default="")


# -- Which layouts there are -----------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def powers_of_two(limit: int) -> list[int]:
    return [2**k for k in range(limit.bit_length()) if 2**k <= limit]


def shapes(model, devices: int, per_node: int, args) -> list[Layout]:
    """All layouts, without micro-batches."""
    found = [Layout(1, "DDP")] if devices == 1 else []
    if devices == 1:
        return found
    found.append(Layout(2, "DDP", dp=devices))
    found.append(Layout(3, "FSDP", dp=devices, shards=devices))
    if devices > per_node:
        found.append(Layout(5, "HSDP", dp=devices, shards=per_node))
    for tp in divisors(per_node):
        if model.key_heads % tp or args.seq_length % tp:
            continue
        for pp in powers_of_two(min(devices // tp, model.layers)):
            dp = devices // (tp * pp)
            if tp * pp == 1 or devices % (tp * pp):
                continue
            chapter = 6 if pp == 1 else 7 if tp == 1 else 13
            method = "TP" if pp == 1 else "3D"
            found.append(Layout(chapter, method, tp=tp, pp=pp, dp=dp, shards=dp))
    for cp in divisors(per_node)[1:]:
        if args.seq_length % (2 * cp) == 0 and devices % cp == 0:
            exchange = "tokens" if model.key_heads % cp else "heads"
            facts = {"dp": devices // cp, "shards": devices, "exchange": exchange}
            found.append(Layout(11, "CP", cp=cp, **facts))
    for ep in divisors(per_node)[1:] if model.expert_count else []:
        if model.expert_count % ep == 0:
            found.append(Layout(12, "EP", ep=ep, dp=devices, shards=devices))
    return found


def variants(shape: Layout, layers: int, global_batch: int) -> list[Layout]:
    """This shape with all sizes of micro-batches, with and without checkpointing, and so on."""
    if global_batch % shape.dp:
        return []
    samples_of_group = global_batch // shape.dp
    found = []
    for samples in powers_of_two(min(samples_of_group, 16)):
        count = samples_of_group // samples
        if samples_of_group % samples == 0 and count >= shape.pp:
            layout = replace(shape, samples=samples, micro_batches=count)
            found.append(layout)
            found += [replace(layout, reshard=False)] * (layout.pp == 1 and layout.shards > 1)
            # PyTorch would gather the weights of more stages again and again.
            for stages in range(2, scaling.PREFETCHED + 1):
                rounds_are_full = count % shape.pp == 0 and count >= stages * shape.pp
                if shape.pp > 1 and layers >= stages * shape.pp and rounds_are_full:
                    found.append(replace(layout, schedule="interleaved", stages=stages))
    return [replace(layout, checkpointing=c) for c in (False, True) for layout in found]


# -- Memory and time of a layout -------------------------------------------------------------------

# Bytes per logit at the loss: compiled logits in bf16, and those that a tensor group splits
LOGIT, SPLIT_LOGIT = 4.25, 10.5

PARTS = ["weights and AdamW", "gradients", "copies of weights", "activations", "logits and loss"]


def memory(model, layout: Layout, args, offload: bool = False) -> float:
    """Bytes of the fullest device at its fullest moment, by rules of thumb."""
    return sum(memory_parts(model, layout, args, offload))


def memory_parts(model, layout: Layout, args, offload: bool = False) -> list[float]:
    """These bytes, for each of `PARTS`.

    With AdamW and fp32 weights, a parameter has 4 bytes for its weight, 8 for moments, 4 for the
    gradient and 2 for a copy in bf16. FSDP divides all but the copies by the shards. `offload` is
    --cpu-offload of chapter 3.
    """
    t, n = layout.tp, layout.shards
    tokens = layout.samples * args.seq_length / layout.cp  # that this device computes
    hidden = model.hidden_size
    kept = layer_bytes(model, layout) * tokens  # of a layer, for its backward pass
    again = 0.0  # what the backward pass of a layer computes again
    if layout.checkpointing:
        kept, again = 2 * tokens * hidden / t, kept
    vocabulary = model.root / hidden / (1 if model.tied else 2)
    logits = (SPLIT_LOGIT if t > 1 else LOGIT) * tokens * vocabulary / t
    if layout.pp > 1:
        return max(stages(model, layout, kept, again, logits, 2 * tokens * hidden / t), key=sum)

    layer = (model.layer - model.experts * (1 - 1 / layout.ep)) / t
    root = model.root / t
    activations = model.layers * kept
    if layout.chapter in (1, 2):  # the gradients stay from step to step
        state = [12 * model.parameters, 4 * model.parameters, 2 * model.parameters]
        at_loss, at_backward = [activations, logits], [activations + again, 0.0]
        return state + max(at_loss, at_backward, key=sum)
    whole = model.layers * layer + root
    sharded = 0.0 if offload else whole / n
    if layout.ep > 1:  # the rows of a table share the experts, and the columns shard them
        sharded = model.parameters / n
    accumulated = 4 * sharded if layout.micro_batches > 1 else 0.0
    at_loss, at_backward = root, root + 2 * layer  # two layers are gathered
    if not layout.reshard:
        at_loss = at_backward = whole
        accumulated = 4 * whole if layout.micro_batches > 1 else 0.0
    moments = [
        [12 * sharded, accumulated, 2 * at_loss, activations, logits],
        # Gradients of a layer are in a buffer in fp32, too.
        [12 * sharded, accumulated + 6 * layer, 2 * at_backward, activations + again, 0.0],
        [12 * sharded, 4 * sharded + 4 * root, 2 * root, 0.0, 0.0],  # the update
    ]
    return max(moments, key=sum)


def layer_bytes(model, layout: Layout) -> float:
    """What a layer keeps for the backward pass, in bytes per token of the group.

    Its matrices read and write as many numbers as it has parameters, divided by the hidden size.
    The tokens between them are split in a tensor group, where norms also keep fp32. The inputs of
    attention and MLP are whole. Each expert of a token also has a copy of it, and a result of its
    own. If tokens travel to their experts, the result that comes back is kept, too.
    """
    hidden, width = model.hidden_size, model.used_by_token / model.hidden_size
    between = 6 * hidden if layout.tp > 1 else 2 * hidden
    of_experts = model.experts_per_token * hidden * (3 if layout.ep > 1 else 2)
    return 2 * ((width + between) / layout.tp + 2 * hidden + of_experts)


def layers_of_ranks(model, layout: Layout) -> list[int]:
    """Layers of each rank of a pipeline: embeddings and head count as a layer each."""
    p = layout.pp
    count = p * layout.stages
    cuts = [round(n * (model.layers + 2) / count) for n in range(count + 1)]
    sizes = [after - before for before, after in pairwise(cuts)]
    sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    return [sum(sizes[rank::p]) for rank in range(p)]


def stages(model, layout: Layout, kept, again, logits, message: float) -> list[list[float]]:
    """Bytes of a device of each rank of a pipeline, for each of `PARTS`.

    For each micro-batch, PyTorch has buffers of its own for what the neighbours of a stage send.
    """
    p, t = layout.pp, layout.tp
    count = p * layout.stages
    end = model.root / (1 if model.tied else 2)
    found = []
    for rank, layers in enumerate(layers_of_ranks(model, layout)):
        is_last = rank == p - 1
        parameters = (layers * model.layer + end * ((rank == 0) + is_last)) / t
        in_flight = min(p - rank, layout.micro_batches)
        if layout.stages > 1:  # passes of a part of the layers
            ahead = (layout.stages - 1) * p + 2 * (p - 1 - rank) + 1
            in_flight = min(ahead / layout.stages, layout.micro_batches)
        neighbours = sum((n > 0) + (n < count - 1) for n in range(rank, count, p))
        activations = in_flight * layers * kept + layout.micro_batches * neighbours * message
        at_loss = logits if is_last and logits > again else 0.0
        # Whole gradients, and the buffers of the layer that is scattered
        gradients = 4 * parameters + 6 * model.layer / t
        parts = [12 * parameters / layout.shards, gradients, 2 * parameters]
        found.append([*parts, activations + again * (not at_loss), at_loss])
    return found


def longest_stage(model, layout: Layout, layer: float, head: float) -> float:
    """Computation of the slowest rank of a pipeline, relative to the mean.

    `layer` and `head` are seconds. The last rank also has the head.
    """
    times = [layers * layer for layers in layers_of_ranks(model, layout)]
    times[-1] += head
    return max(times) * len(times) / sum(times)


def settings(layout: Layout, args) -> argparse.Namespace:
    """The flags of estimate-scaling.py for this layout. It counts samples per device."""
    changed = copy.copy(args)
    changed.activation_checkpointing = layout.checkpointing
    changed.tensor_parallel, changed.pipeline_parallel = layout.tp, layout.pp
    changed.context_parallel, changed.expert_parallel = layout.cp, layout.ep
    changed.exchange, changed.schedule = layout.exchange, layout.schedule
    changed.stages_per_rank, changed.reshard_after_forward = layout.stages, layout.reshard
    changed.batch_size = layout.samples / layout.tp
    changed.gradient_accumulation_steps = layout.micro_batches / (layout.pp * layout.cp)
    return changed


def assess(model, layout: Layout, devices: int, args) -> Choice:
    """Memory and times of a layout."""
    flags = settings(layout, args)
    per_node = min(args.devices_per_node, devices)
    cluster = scaling.cluster_of(args, per_node)
    e = scaling.estimate(layout.method, model, devices // per_node, cluster, flags)
    layer, backward, root = scaling.compute_times(model, cluster, flags)
    of_micro_batch = model.layers * (layer + backward) + 3 * root
    useful = flags.gradient_accumulation_steps * of_micro_batch
    layer, head = layer + backward, 3 * (root if model.tied else root / 2)
    step = e.step + (longest_stage(model, layout, layer, head) - 1) * e.compute
    outside = e.over_link(cluster.devices) / cluster.devices
    return Choice(
        layout,
        memory(model, layout, args),
        step=step,
        efficiency=useful / step,
        bubble=e.bubble / step,
        inside=e.sent() - outside,
        outside=outside,
    )


def room(args) -> float:
    """Bytes of a device that PyTorch may use."""
    return args.gpu_memory * 1e9 * (1 - SPARE)


def choose(model, devices: int, args) -> tuple[list[Choice], list[Choice]]:
    """Those that fit, the best first, and those that fall out, each with its problem.

    Of each shape, this is the fastest variant that fits, or else the smallest one. Among the
    fastest layouts, the earliest chapter comes first.
    """
    per_node = min(args.devices_per_node, devices)
    fit, out = [], []
    for shape in shapes(model, devices, per_node, args):
        possible = variants(shape, model.layers, args.global_batch_size)
        if not possible:
            what = f"{args.global_batch_size} samples"
            need = f"{shape.dp} groups of samples with at least {shape.pp} micro-batches"
            out.append(Choice(shape, math.inf, problem=f"{what} are too few for {need}"))
            continue
        smallest = min(possible, key=lambda layout: memory(model, layout, args))
        possible = [layout for layout in possible if memory(model, layout, args) <= room(args)]
        if not possible:
            choice = Choice(smallest, memory(model, smallest, args))
            choice.problem = f"needs {choice.memory / 1e9:.0f} GB"
            out.append(choice)
            continue
        choices = [assess(model, layout, devices, args) for layout in possible]
        fit.append(min(choices, key=lambda choice: choice.step))
    for choice in [*fit]:
        choice.problem = refusal(model, choice.layout, devices, args)
        if choice.problem:
            fit.remove(choice)
            out.append(choice)
    fit.sort(key=lambda choice: choice.step)
    close = [choice for choice in fit if choice.step <= CLOSE * fit[0].step]
    close.sort(key=lambda choice: (choice.layout.chapter, choice.step))
    fit[: len(close)] = close
    return fit, sorted(out, key=lambda choice: choice.memory)


# -- The trace -------------------------------------------------------------------------------------


NAMES = {1: "chapter 1", 2: "DDP", 3: "FSDP", 5: "HSDP", 6: "tensor parallel", 7: "pipeline"}
NAMES |= {11: "context parallel", 12: "expert parallel", 13: "pipeline × tensor"}


def flags_of(layout: Layout, devices: int, args) -> argparse.Namespace:
    """Those of estimate-memory.py for this layout."""
    flags = ["-m", args.model_name, "-s", args.seq_length, "-b", layout.samples]
    flags += ["--gradient-accumulation-steps", layout.micro_batches, "--devices", devices]
    flags += ["--dtype", args.dtype, *technique(layout)]
    flags = [flag for flag in flags if flag != "--no-reshard-after-forward"]
    return importlib.import_module("estimate-memory").parse_args([*map(str, flags)])


def refusal(model, layout: Layout, devices: int, args) -> str:
    """Why the chapter refuses the model, or nothing."""
    if model.config is None:
        return ""
    try:
        check = importlib.import_module("estimate-memory").check
        check(model.config, flags_of(layout, devices, args))
    except SystemExit as error:
        return str(error).removeprefix("error: ")
    return ""


def trace(choice: Choice, devices: int, args, offload: bool = False) -> None:
    """Notes the bytes that estimate-memory.py finds, and whether they are too many."""
    tool = importlib.import_module("estimate-memory")
    layout, choice.problem = choice.layout, ""
    method = tool.METHODS["offload" if offload else NAMES[layout.chapter]]
    if not layout.reshard:
        method = replace(method, name="no reshard")
    traces = tool.Traces(load_config(args.model_name), flags_of(layout, devices, args))
    _, moments = tool.step(traces, method, devices, layout.samples)
    choice.traced = tool.peak(moments)
    if choice.traced > room(args):
        choice.problem = f"needs {choice.traced / 1e9:.0f} GB, traced"


def trace_smallest(model, fit: list[Choice], out: list[Choice], devices: int, args) -> None:
    """Where no layout fits by formula, traces the smallest ones, in case some of them do."""
    sized = [choice for choice in out if choice.memory < math.inf]
    possible = [choice for choice in sized if not refusal(model, choice.layout, devices, args)]
    for smallest in possible[:TRACED]:
        trace(smallest, devices, args)
        if not smallest.problem:
            out.remove(smallest)
            choice = assess(model, smallest.layout, devices, args)
            choice.traced = smallest.traced
            fit.append(choice)


def trace_best(fit: list[Choice], out: list[Choice], devices: int, args, wanted: int) -> None:
    """Traces so many of the best layouts. Those that do not fit after all move to the others."""
    place = 0
    for _ in range(2 * wanted):  # attempts
        if place == min(wanted, len(fit)):
            return
        trace(fit[place], devices, args)
        if fit[place].problem:
            out.insert(0, fit.pop(place))
        else:
            place += 1


# -- What is printed -------------------------------------------------------------------------------


def technique(layout: Layout) -> list:
    """The flags of a chapter that belong to the layout."""
    flags = []
    if layout.chapter == 5:
        flags += ["--shard-size", layout.shards]
    for name, size in (("pipeline", layout.pp), ("tensor", layout.tp)):
        if size > 1:
            flags += [f"--{name}-parallel", size]
    if layout.schedule == "interleaved":
        flags += ["--schedule", "interleaved", "--stages-per-rank", layout.stages]
    if layout.chapter == 11:
        flags += ["--context-parallel", layout.cp, "--exchange", layout.exchange]
    if layout.chapter == 12:
        flags += ["--expert-parallel", layout.ep]
    if layout.checkpointing:
        flags += ["--activation-checkpointing"]
    if not layout.reshard:
        flags += ["--no-reshard-after-forward"]
    return flags


def command(layout: Layout, devices: int, args, *more) -> str:
    """The command line of the chapter, for each node. The run has a name, so it saves."""
    script = script_of(layout.chapter).relative_to(REPOSITORY)
    nodes = devices // min(args.devices_per_node, devices)
    launch = f"torchrun --standalone --nproc-per-node {devices}"
    if nodes > 1:
        launch = f"torchrun --nnodes {nodes} --nproc-per-node {args.devices_per_node}"
        launch += " --rdzv-id run --rdzv-backend c10d --rdzv-endpoint node-0:29400"
    if layout.chapter == 1:
        launch = "python"
    flags = ["-e", "mine", *(["--save-dir", "/shared/runs"] if nodes > 1 else [])]
    flags += ["-d", "data/texts", "-m", args.model_name, "-s", args.seq_length]
    flags += ["-b", layout.samples, "--gradient-accumulation-steps", layout.micro_batches]
    flags += [*technique(layout), *more]
    return f"{launch} {script} {' '.join(map(str, flags))}"


def table_of(fit: list[Choice]) -> str:
    header = "layout | chapter | samples × micro-batches | checkpointing | GB, formula | GB, traced"
    header += " | bubble | GB sent in the node | GB sent between nodes | s per step | efficiency"
    rows = []
    for choice in fit[:ROWS]:
        layout = choice.layout
        batch = f"{layout.samples} × {layout.micro_batches}"
        row = [layout.name(), layout.chapter, batch, "yes" if layout.checkpointing else "no"]
        row += [f"{choice.memory / 1e9:.0f}", f"{choice.traced / 1e9:.0f}" if choice.traced else ""]
        row += [f"{choice.bubble:.1%}" if layout.pp > 1 else "", f"{choice.inside / 1e9:.1f}"]
        row += [f"{choice.outside / 1e9:.1f}", f"{choice.step:.3f}", f"{choice.efficiency:.1%}"]
        rows.append(row)
    return table(header, rows)


def reasons(out: list[Choice]) -> str:
    rows = [[choice.layout.name(), choice.layout.chapter, choice.problem] for choice in out]
    return table("layout | chapter | why not", rows)


def size_of(choice: Choice) -> str:
    """Its memory, traced if it is."""
    if choice.traced:
        return f"{choice.traced / 1e9:.0f} GB per device (traced)"
    return f"{choice.memory / 1e9:.0f} GB per device"


def what_would_fit(model, out: list[Choice], devices: int, args) -> list[str]:
    """Sentences for a model that does not fit: how much is missing, more devices, or offload."""
    free = f"{room(args) / 1e9:.0f} GB of {args.gpu_memory:g} GB are free for PyTorch"
    lines = [f"No layout fits {devices} devices."]
    too_large = [choice for choice in out if choice.problem.startswith("needs ")]
    if too_large:
        smallest = too_large[0]
        name = f"{smallest.layout.name()} (chapter {smallest.layout.chapter})"
        lines[0] += f" The smallest is {name}: {size_of(smallest)}, and {free}."
    more = 2 * devices
    while more <= MOST_DEVICES:
        fit, _ = choose(model, more, args)
        if fit and args.trace:
            trace_best(fit, [], more, args, wanted=1)
        if fit:
            best = fit[0]
            name = f"{best.layout.name()} (chapter {best.layout.chapter})"
            efficiency = f"estimated efficiency {best.efficiency:.1%}"
            lines.append(f"{more} devices are enough: {name}, {size_of(best)}, {efficiency}.")
            lines.append(command(best.layout, more, args))
            break
        more *= 2
    lines.append(
        "Or, to fine-tune, chapter 17: adapters (LoRA) need far less memory, which this prints:"
    )
    flags = f"-m {args.model_name} --devices {devices} --gpu-memory {args.gpu_memory:g}"
    flags += f" -s {args.seq_length} -b 1 --lora-rank 16"
    lines.append(f"python tools/estimate-memory.py {flags}")
    if args.global_batch_size % devices:
        return lines
    count = args.global_batch_size // devices
    layout = Layout(3, "FSDP", dp=devices, shards=devices, micro_batches=count, checkpointing=True)
    offload = Choice(layout, memory(model, layout, args, offload=True))
    offload.problem = refusal(model, layout, devices, args)
    if args.trace and not offload.problem:
        trace(offload, devices, args, offload=True)
    if not offload.problem and offload.memory <= room(args):
        of_node = 16 * model.parameters / devices * min(args.devices_per_node, devices) / 1e9
        lines.append(
            f"Or chapter 3 with --cpu-offload on {devices} devices: {size_of(offload)}, and "
            f"{of_node:,.0f} GB of CPU memory per node. Each step moves weights and gradients "
            "between GPU and CPU, and the CPU computes the update. This time is not estimated."
        )
        lines.append(command(layout, devices, args, "--cpu-offload"))
    return lines


def report(model, args) -> str:
    """All that --choose prints."""
    (devices,) = args.devices
    check_length(model.config, args.seq_length)
    fit, out = choose(model, devices, args)
    if fit and args.trace:
        trace_best(fit, out, devices, args, wanted=TRACED)
    elif args.trace:
        trace_smallest(model, fit, out, devices, args)
    if not fit:
        parts = [*what_would_fit(model, out, devices, args), reasons(out)]
        return "\n\n".join([*parts, NO_JOINS])
    order = f"Among those within {CLOSE - 1:.0%} of the fastest, the earliest chapter is first."
    parts = [f"Layouts that fit, the fastest first. {order}", table_of(fit)]
    if len(fit) > ROWS:
        parts.append(f"{len(fit) - ROWS} slower layouts fit, too.")
    parts += ["The first one:", command(fit[0].layout, devices, args)]
    if out:
        parts += ["Layouts that fall out", reasons(out)]
    return "\n\n".join([*parts, NO_JOINS])
