"""Estimates, on paper, how a training scales: bytes, times and efficiency on 1 to 1,024 nodes.

    python tools/estimate-scaling.py -m meta-llama/Llama-3.1-8B -b 2 -s 8192
    python tools/estimate-scaling.py -m my-model/config.json --link 25 --explain
    python tools/estimate-scaling.py -b 1 -s 131072 --devices 8 --context-parallel 8
    python tools/estimate-scaling.py --choose -m meta-llama/Llama-3.1-70B --devices 64 -s 8192

Nothing is measured here. Give the rate that your devices reach on one node, and the speed of your
links; the rest follows from formulae, which --explain prints. Only the config of the model is
needed, and tools/models.json has those of some models. The methods are those of the chapters:
DDP (2), FSDP (3), HSDP, which shards within a node and averages between nodes (5), and tensor (TP,
6) and pipeline parallelism (PP, 7), each with FSDP between its groups. Flags add context (CP, 11)
and expert parallelism (EP, 12), pipelines of tensor groups (3D, 13), rounds of local steps (LOCAL,
15) and another optimizer (MUON, 18). All methods train on the same number of samples per device.

--choose prints the layouts of a model on so many devices that fit, the fastest first, and why the
others fall out. tools/choose-layout.py does this.

GB are 1e9 bytes, Gbit/s are 1e9 bits per second.
"""

import argparse
import importlib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parent))
from models import fail, load_chapter, load_config, positive, table

# Microseconds for each hop of a collective, and for its launch: NCCL's own constants for its
# "simple" protocol, in src/graph/tuning.cc (baseLatencies, hwLatencies; June 2026).
LAUNCH, NVLINK, NVLINK_TREE, NETWORK = 8.4e-6, 3.4e-6, 4.0e-6, 14.0e-6
# GB/s that NCCL reckons with for the 18 links of NVLink 4, whose nominal rate is 450 (topo.h)
NVLINK_4 = 18 * 20.6
# The share of a device that collectives beside a computation use: 20 of 132 multiprocessors
TAKEN = 20 / 132
# Bytes that an update moves for a parameter. AdamW reads the weight, the gradient and two moments,
# and writes all but the gradient. Clipping reads the gradients for their norm, and scales them.
ADAMW, CLIPPING = 28, 12
# The share of a device's bandwidth that an update reaches. benchmarks/records/speed.md has 32.2 ms
# for 1.236e9 parameters on an H100 of 3,350 GB/s. This time counts AdamW twice, and clipping once.
UPDATE_SHARE = 1.236e9 * (2 * ADAMW + CLIPPING) / 32.2e-3 / 3.35e12
# The part of the result of a matrix product that one multiprocessor computes, and their number
TILE, MULTIPROCESSORS = (128, 256), 132
BUCKET = 25 * 2**20  # bytes: bucket_cap_mb of DistributedDataParallel
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
METHODS = ["DDP", "FSDP", "HSDP", "TP", "PP"]
MORE_METHODS = {"CP": ["context_parallel"], "EP": ["expert_parallel"]}  # with their flags
MORE_METHODS["3D"] = ["pipeline_parallel", "tensor_parallel"]
MORE_METHODS |= {"LOCAL": ["inner_steps"], "MUON": ["muon"]}
# Stages per rank, and units of time of a micro-batch on a rank, as in tools/draw-schedule.py
SCHEDULES = {"gpipe": (1, 1), "1f1b": (1, 1), "interleaved": (2, 2), "zbv": (2, 6)}
PREFETCHED = 3  # stages of a rank that PyTorch's schedules keep gathered at a time

FORMULAE = Path(__file__).with_name("scaling-formulae.txt").read_text("utf-8")


@dataclass
class Cluster:
    devices: int  # per node
    rate: float  # FLOPs per second that a device computes with, where nothing waits
    link_in: float  # bytes per second and direction from a device to others of its node
    link: float  # bytes per second and direction from a device to other nodes
    memory: float = 3.35e12  # bytes per second that a device reads or writes in its memory
    # FLOPs per second of attention; None counts all its FLOPs, masked or not, with the others
    attention: float | None = None


@dataclass
class Group:
    """Ranks that communicate: `ranks` of them on `nodes` nodes, equally many on each."""

    ranks: int
    nodes: int


@dataclass
class Collective:
    # all-gather, reduce-scatter, all-reduce or all-to-all. Between two ranks send, receive, reduce,
    # or add, which is the other side of reduce.
    kind: str
    size: float  # bytes of the whole tensor; of an all-to-all, the tensor of one rank
    group: Group

    def sent(self, library: str = "nccl") -> float:
        """Bytes that each rank sends."""
        if self.kind in ("send", "reduce"):
            return self.size
        if self.kind == "add" and library == "gloo":
            return self.size / 2  # each rank adds up one half
        if self.kind in ("receive", "add"):
            return 0.0
        twice = self.kind == "all-reduce" or (library, self.kind) == ("gloo", "reduce-scatter")
        return (2 if twice else 1) * (self.group.ranks - 1) / self.group.ranks * self.size

    def over_link(self, devices: int, library: str = "nccl") -> float:
        """Bytes that leave a node of so many devices, for all groups of this kind together."""
        if self.group.nodes == 1:
            return 0.0
        per_node = self.group.ranks // self.group.nodes
        if self.kind == "all-to-all":
            return self.size * (1 - per_node / self.group.ranks) * devices
        return self.sent(library) * devices / per_node

    def time(self, cluster: Cluster) -> float:
        """Seconds."""
        ranks, nodes = self.group.ranks, self.group.nodes
        if ranks == 1:
            return 0.0
        per_node = ranks // nodes
        speed = cluster.link_in
        if nodes > 1:
            net = per_node * cluster.link
            speed = net if per_node == 1 else min(speed, net)
        if self.kind == "all-to-all":
            within = self.size * (per_node - 1) / ranks / cluster.link_in
            outside = self.size * (1 - per_node / ranks) / cluster.link
            return LAUNCH + (NETWORK if nodes > 1 else NVLINK) + max(within, outside)
        ring = (ranks - nodes) * NVLINK + (nodes - 1) * NETWORK
        if self.kind == "all-reduce":
            tree = (per_node - 1) * NVLINK_TREE + math.log2(nodes) * NETWORK
            ring = 2 * min(ring, tree)
        moved = self.size if self.kind in ("receive", "add") else self.sent()
        return LAUNCH + ring + moved / speed

    def copy_time(self, cluster: Cluster) -> float:
        """Seconds to read and write the whole tensor once."""
        return 2 * self.size / cluster.memory if self.group.ranks > 1 else 0.0


@dataclass
class Model:
    layers: int
    layer: int  # parameters of a layer
    root: int  # the other parameters
    hidden_size: int
    tied: int = 0  # those of embeddings that are the head, too
    # Inputs and outputs of the matrices of a layer, and whether TP splits the inputs
    matrices: tuple[tuple[int, int, bool], ...] = ()
    query_size: int = 0  # numbers of a token's queries, of all heads, and of its keys
    key_size: int = 0
    key_heads: int = 0
    experts: int = 0  # parameters of all experts of a layer, among those of the layer
    expert_count: int = 0  # of a layer
    experts_per_token: int = 0
    config: object = None  # of Transformers

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root

    @property
    def used_by_token(self) -> int:
        """Parameters of a layer without the experts that a token does not use."""
        if not self.expert_count:
            return self.layer
        idle = 1 - self.experts_per_token / self.expert_count
        return self.layer - round(self.experts * idle)


@dataclass
class Estimate:
    nodes: int
    method: str
    counts: dict[str, tuple[int, Collective]]  # of one optimizer step, by name
    compute: float  # seconds of a step
    step: float
    bubble: float = 0.0  # seconds that a rank waits for others to compute
    slower: float = 0.0  # seconds of copies and the update, and by which computing is slower

    def sent(self, library: str = "nccl") -> float:
        """Bytes that a rank sends in a step."""
        return sum(count * c.sent(library) for count, c in self.counts.values())

    def over_link(self, devices: int, library: str = "nccl") -> float:
        """Bytes that leave a node in a step."""
        return sum(count * c.over_link(devices, library) for count, c in self.counts.values())


def compute_times(model: Model, cluster: Cluster, args) -> tuple[float, float, float]:
    """Seconds of a layer forward and backward, and of the rest forward, for one micro-batch."""
    tokens = args.batch_size * args.seq_length
    products = tokens * 2 * model.used_by_token / cluster.rate
    flops = tokens * 4 * (model.query_size or model.hidden_size) * args.seq_length
    if cluster.attention is None:
        attention, attention_backward = flops / cluster.rate, 2 * flops / cluster.rate
    else:  # a causal mask leaves half of them
        attention = flops / 2 / cluster.attention
        attention_backward = 2.5 * attention
    forward = products + attention
    return forward, 2 * products + attention_backward, tokens * 2 * model.root / cluster.rate


def update_time(parameters: float, cluster: Cluster) -> float:
    """Seconds of AdamW and clipping for so many parameters of a rank."""
    return parameters * (ADAMW + CLIPPING) / (UPDATE_SHARE * cluster.memory)


def stolen(compute: float, busy: float) -> float:
    """Seconds by which a computation ends later because collectives beside it use the device."""
    return max(0.0, compute + TAKEN * min(compute, busy) - max(compute, busy))


def waves(rows: float, columns: float) -> float:
    """The time of a matrix product, relative to the time if its last wave of tiles were full."""
    tiles = math.ceil(rows / TILE[0]) * math.ceil(columns / TILE[1])
    full = rows * columns / math.prod(TILE) / MULTIPROCESSORS
    return math.ceil(tiles / MULTIPROCESSORS) / full


def matrix_time(model: Model, tokens: int, parts: int, again: int) -> float:
    """The time of a layer's matrix products on one of so many parts, relative to full waves."""
    time = flops = 0.0
    for inputs, outputs, splits_inputs in model.matrices:
        flops += inputs * outputs * (again + 1)
        i, o = (inputs / parts, outputs) if splits_inputs else (inputs, outputs / parts)
        # Forward passes; in the backward pass, the gradients of the input and of the weights
        passes = (again - 1) * waves(tokens, o) + waves(tokens, i) + waves(o, i)
        time += inputs * outputs * passes
    return time / flops if flops else 1.0


def estimate(method: str, model: Model, nodes: int, cluster: Cluster, args) -> Estimate:
    """One optimizer step of a method: its collectives, and how long they and the step take."""
    devices, accumulation = cluster.devices, args.gradient_accumulation_steps
    everyone = Group(nodes * devices, nodes)
    layer_forward, layer_backward, root_forward = compute_times(model, cluster, args)
    if args.activation_checkpointing:
        layer_backward += layer_forward
    root_backward = 2 * root_forward
    forward = model.layers * layer_forward + root_forward
    backward = model.layers * layer_backward + root_backward
    compute = accumulation * (forward + backward)

    if method == "DDP":
        gradients = 4 * model.parameters
        buckets = math.ceil(gradients / BUCKET)
        bucket = Collective("all-reduce", gradients / buckets, everyone)
        time = bucket.time(cluster)
        # The first bucket is ready after its share of the backward pass, the last one at its end
        late = max(time, buckets * time - backward * (1 - 1 / buckets))
        counts = {"all-reduce, gradients": (buckets, bucket)}
        slower = update_time(model.parameters, cluster)
        if everyone.ranks == 1:
            return Estimate(nodes, method, counts, compute, compute + slower, slower=slower)
        slower += stolen(backward * (1 - 1 / buckets), (buckets - 1) * time)
        return Estimate(nodes, method, counts, compute, compute + late + slower, slower=slower)
    if method in ("PP", "3D"):
        times = compute, layer_forward
        return estimate_pipeline(method, model, nodes, cluster, args, *times)

    weights = BYTES[args.dtype]
    parts = group_size(method, nodes, devices, args)
    group = Group(parts, max(1, parts // devices))
    equal = everyone.ranks // parts  # groups, and ranks that have the same part of each layer
    columns = Group(equal, min(equal, nodes))
    # Who shards the weights of a layer, and of the rest, and how many parameters they shard
    in_node = method in ("HSDP", "LOCAL")
    shards = Group(devices, 1) if in_node else columns if method == "TP" else everyone
    layer_size, root_size = model.layer, model.root
    if method == "TP":
        layer_size, root_size = model.layer / parts, model.root / parts
    if method == "EP":
        layer_size = model.layer - model.experts
    if method == "CP":  # each rank has a part of each sample, and a group has more micro-batches
        accumulation *= parts
        layer_forward, root_forward = layer_forward / parts, root_forward / parts
        layer_backward, root_backward = layer_backward / parts, root_backward / parts
        forward, backward = forward / parts, backward / parts
    gather = Collective("all-gather", weights * layer_size, shards)
    gather_root = Collective("all-gather", weights * root_size, shards)
    scatter = Collective("reduce-scatter", 4 * layer_size, shards)
    scatter_root = Collective("reduce-scatter", 4 * root_size, shards)
    g, g_root, r, r_root = (c.time(cluster) for c in (gather, gather_root, scatter, scatter_root))
    # How often each layer is gathered and scattered in a step; the root is gathered once each time.
    reshards = args.reshard_after_forward
    scatters = accumulation if reshards else 1
    gathers = 2 * scatters if reshards else 1
    counts = {
        "all-gather, layers": (gathers * model.layers, gather),
        "all-gather, root": (scatters, gather_root),
        "reduce-scatter, layers": (scatters * model.layers, scatter),
        "reduce-scatter, root": (scatters, scatter_root),
    }
    if method == "EP":
        gather_experts = Collective("all-gather", weights * model.experts / parts, columns)
        scatter_experts = Collective("reduce-scatter", 4 * model.experts / parts, columns)
        counts["all-gather, experts"] = (gathers * model.layers, gather_experts)
        counts["reduce-scatter, experts"] = (scatters * model.layers, scatter_experts)
        g, r = g + gather_experts.time(cluster), r + scatter_experts.time(cluster)
    between = model.layers - 1
    # The next layer's weights come while this one computes. The root's come before everything.
    first = g_root + g + between * max(layer_forward, g) + layer_forward + root_forward
    # The backward pass gathers again. It begins with the root, while the last layer's weights come.
    again = g if reshards else 0.0
    last = max(root_backward, again) + between * max(layer_backward, again + r) + layer_backward
    # The gradients of a layer leave during the next one. Those of the first layer leave at the end.
    tail = r + r_root
    # Without resharding, the other passes communicate nothing.
    step = scatters * (first + last + tail) + (accumulation - scatters) * (forward + backward)
    copies = sum(count * c.copy_time(cluster) for count, c in counts.values())
    beside = [(between, layer_forward, g), (between, layer_backward, again + r)]
    beside.append((1, root_backward, again))
    slower = copies + scatters * sum(count * stolen(*times) for count, *times in beside)
    owned = model.parameters / (devices if method in ("HSDP", "LOCAL") else everyone.ranks)
    slower += update_time(owned, cluster)
    if method == "HSDP" and nodes > 1:
        copies = Group(nodes, nodes)
        reduce = Collective("all-reduce", 4 * model.layer / devices, copies)
        reduce_root = Collective("all-reduce", 4 * model.root / devices, copies)
        a, a_root = reduce.time(cluster), reduce_root.time(cluster)
        counts["all-reduce, layers"] = (model.layers, reduce)
        counts["all-reduce, root"] = (1, reduce_root)
        step += between * max(layer_backward, again + r, a) + a + a_root
        step -= between * max(layer_backward, again + r)
        slower += between * stolen(layer_backward, max(again + r, a))
        slower -= between * stolen(layer_backward, again + r)
    if method == "LOCAL" and nodes > 1:
        message = weights * model.parameters / devices
        reduce = Collective("all-reduce", message, Group(nodes, nodes))
        counts["all-reduce, weights"] = (1 / args.inner_steps, reduce)
        step += reduce.time(cluster) / args.inner_steps
    if method == "MUON":
        multiplications, numbers = busiest_owner(model, everyone.ranks)
        exchange = Collective("all-to-all", weights * numbers, everyone)
        counts["all-to-all, shards"] = (2, exchange)
        step += 2 * exchange.time(cluster)
        slower += 5 * 2 * multiplications / cluster.rate
    if method == "TP":
        samples = parts * args.batch_size
        tensors, time, more = tensor_parallel(model, group, samples, model.layers, 2, cluster, args)
        counts |= {name: (accumulation * count, c) for name, (count, c) in tensors.items()}
        step += accumulation * time
        slower += accumulation * more
    if method in ("CP", "EP"):
        exchanges = context_exchanges if method == "CP" else expert_exchanges
        for name, (count, c) in exchanges(model, group, args).items():
            counts[name] = (accumulation * count, c)
            step += accumulation * count * c.time(cluster)
    return Estimate(nodes, method, counts, compute, step + slower, slower=slower)


def busiest_owner(model: Model, ranks: int) -> tuple[int, int]:
    """Multiplications of an iteration of Newton-Schulz, and numbers of the matrices of an owner."""
    chapter = load_chapter(18)
    shapes = [SimpleNamespace(shape=(rows, columns)) for rows, columns, _ in model.matrices]
    by_owner = chapter.choose_owners(model.layers * shapes, ranks)
    work = [sum(map(chapter.work_of, owned)) for owned in by_owner]
    numbers = [sum(math.prod(matrix.shape) for matrix in owned) for owned in by_owner]
    return max(work), max(numbers)


def group_size(method: str, nodes: int, devices: int, args) -> int:
    """Ranks of a group of TP, CP, EP or 3D, by default those of a node. 1 for other methods."""
    flags = {"TP": "tensor_parallel", "3D": "tensor_parallel"}
    flags |= {"CP": "context_parallel", "EP": "expert_parallel"}
    if method not in flags:
        return 1
    parts = getattr(args, flags[method]) or devices
    if nodes * devices % parts or max(parts, devices) % min(parts, devices):
        fail(f"{nodes} × {devices} devices cannot form groups of {parts}: change --nodes")
    return parts


def tensor_parallel(
    model: Model, group: Group, samples: float, layers: float, ends: int, cluster, args
):
    """What TP adds to a micro-batch of a rank that has so many layers, and ends of the model.

    Returns the collectives by name with their number, their seconds, and the seconds of copies and
    of smaller matrices.
    """
    inputs = BYTES[args.dtype] * samples * args.seq_length * model.hidden_size
    extra = args.activation_checkpointing  # a forward pass up to the last reduce-scatter
    numbers = {"all-gather": 4 + 2 * extra, "reduce-scatter": 4 + extra}  # in chapter 6
    counts, time, slower = {}, 0.0, 0.0
    for kind, number in numbers.items():
        c, count = Collective(kind, inputs, group), number * layers + ends
        counts[f"{kind}, activations"] = (count, c)
        time += count * c.time(cluster)
        if samples > 1:  # in a single sample, tokens are the first dimension in memory
            slower += count * c.copy_time(cluster)
    again = 3 if args.activation_checkpointing else 2
    tokens = samples * args.seq_length
    split, whole = (matrix_time(model, tokens, n, again) for n in (group.ranks, 1))
    flops = 2 * model.used_by_token
    if cluster.attention is None:  # it has the rate of whole layers
        flops += 4 * (model.query_size or model.hidden_size) * args.seq_length
    per_device = tokens / group.ranks * flops / cluster.rate
    slower += (split / whole - 1) * layers * (1 + again) * per_device
    return counts, time, slower


def context_exchanges(model: Model, group: Group, args) -> dict[str, tuple[int, Collective]]:
    """The collectives of CP in a micro-batch, by name, with their number."""
    n, tokens = group.ranks, args.batch_size * args.seq_length
    size = BYTES[args.dtype] * tokens
    forward = model.layers * (1 + args.activation_checkpointing)
    if args.exchange == "tokens":
        pair = 2 * size * model.key_size  # keys and values
        gather = Collective("all-gather", pair, group)
        scatter = Collective("reduce-scatter", pair, group)
        return {
            "all-gather, keys and values": (forward, gather),
            "reduce-scatter, keys and values": (model.layers, scatter),
        }
    query, key = (
        Collective("all-to-all", size * width / n, group)
        for width in (model.query_size, model.key_size)
    )
    passes = forward + model.layers
    return {
        "all-to-all, queries and results": (2 * passes, query),
        "all-to-all, keys and values": (2 * passes, key),
    }


def expert_exchanges(model: Model, group: Group, args) -> dict[str, tuple[int, Collective]]:
    """The collectives of EP in a micro-batch, by name, with their number."""
    copies = model.experts_per_token * args.batch_size * args.seq_length
    c = Collective("all-to-all", BYTES[args.dtype] * copies * model.hidden_size, group)
    passes = 2 + args.activation_checkpointing
    return {"all-to-all, tokens of experts": (2 * passes * model.layers, c)}


def estimate_pipeline(
    method, model, nodes, cluster, args, compute: float, layer_forward: float
) -> Estimate:
    """One optimizer step with p equally long stages, of the node that sends most.

    With 3D, each stage has groups of t ranks. With PP, t is 1.
    """
    ranks, accumulation = nodes * cluster.devices, args.gradient_accumulation_steps
    p = args.pipeline_parallel or math.gcd(nodes, 8)
    t = group_size(method, nodes, cluster.devices, args)
    v, units = SCHEDULES[args.schedule]
    if args.schedule == "interleaved":
        v = units = args.stages_per_rank
    possible = ranks // t if method == "3D" else cluster.devices if nodes == 1 else nodes
    if possible % p:
        fail(f"{nodes} × {cluster.devices} devices cannot form {p} stages: change --nodes")
    if p * v > model.layers:
        fail(f"{model.layers} layers cannot make {p * v} stages: lower --pipeline-parallel")
    if args.schedule == "zbv" and accumulation == 1:
        fail("--schedule zbv needs --gradient-accumulation-steps of 2 or more")
    micro_batches, layers = p * accumulation, model.layers / p
    same = ranks // (p * t)  # ranks that have the same part of a stage
    stage = Group(same, min(same, max(1, nodes // p)))
    group = Group(t, max(1, t // cluster.devices))
    pair = Group(2, min(nodes, 2))  # neighbours in a pipeline, or its ends
    one = p == 1 or args.schedule == "zbv"  # rank has both ends: the embeddings and the head

    weights, end = BYTES[args.dtype], model.root if one or model.tied else model.root / 2
    gather = Collective("all-gather", weights * model.layer / t, stage)
    gather_end = Collective("all-gather", weights * end / t, stage)
    scatter = Collective("reduce-scatter", 4 * model.layer / t, stage)
    scatter_end = Collective("reduce-scatter", 4 * end / t, stage)
    inputs = weights * args.batch_size * args.seq_length * model.hidden_size
    send = Collective("send", inputs, pair)
    # What a rank between others does in a step, and what one at an end does
    middle = {
        "all-gather, layers": (layers, gather),
        "reduce-scatter, layers": (layers, scatter),
        "send, activations and gradients": (2 * v * micro_batches, send),
    }
    first = middle | {"all-gather, root": (1, gather_end), "reduce-scatter, root": (1, scatter_end)}
    sends = 0 if p == 1 else 2 if one else 2 * v - 1  # nothing from first to last stage, or back
    first["send, activations and gradients"] = (sends * micro_batches, send)
    last = first
    tied = 0.0
    if model.tied and not one:
        shard = model.tied / t / stage.ranks
        copy, reduce = Collective("send", weights * shard, pair), "reduce, tied gradients"
        first = first | {reduce: (1, Collective("add", 4 * shard, pair))}
        first["send, tied weights"] = (1, copy)
        last = last | {reduce: (1, Collective("reduce", 4 * shard, pair))}
        last["receive, tied weights"] = (1, Collective("receive", weights * shard, pair))
        tied = last[reduce][1].time(cluster) + copy.time(cluster)

    # The collectives of TP are part of each pass. A rank at an end has one of each for the end.
    tensors, tensor_time, smaller = {}, 0.0, 0.0
    if t > 1:
        samples, ends = t * args.batch_size, 2 if one else 1
        found = tensor_parallel(model, group, samples, layers, ends, cluster, args)
        tensors, tensor_time, smaller = found[0], *(micro_batches * time for time in found[1:])
    tensors = {name: (micro_batches * count, c) for name, (count, c) in tensors.items()}
    first, last, middle = (counts | tensors for counts in (first, last, middle))
    busy = compute + tensor_time + smaller
    bubble = busy * (p - 1) / (units * micro_batches)
    # So many sends end the step later, with the orders of tools/draw-schedule.py.
    waits = {"gpipe": 2 * (p - 1), "interleaved": 2 * (v * p - 1), "zbv": 5 * p - 7}
    waits["1f1b"] = 2 * (p - 1) * accumulation + 2 * (p - 2)
    one_send = send.time(cluster) * (p > 1)
    most = max(sends, 2 * v * (p > 2)) * micro_batches
    step = max(busy + bubble + waits[args.schedule] * one_send, most * one_send)
    g, g_end, r, r_end = (c.time(cluster) for c in (gather, gather_end, scatter, scatter_end))
    in_stage = model.layers / (p * v)
    if v == 1:
        # A stage gathers its weights when its first micro-batch arrives: one after the other.
        late = p * (g + (in_stage - 1) * max(0, g - layer_forward)) + (1 if one else 2) * g_end
    else:  # All ranks gather their first stages at the same time, before the first pass.
        late = in_stage * g + g_end
    step += late + layers * r + r_end + tied
    copied = [(layers, gather), (layers, scatter), (1, gather_end), (1, scatter_end)]
    copies = sum(count * c.copy_time(cluster) for count, c in copied)
    update = update_time((layers * model.layer + end) / t / stage.ranks, cluster)
    facts = {"compute": compute, "step": step + copies + update, "bubble": bubble}
    facts["slower"] = copies + smaller + update
    ranks = [first, last, middle] if p > 2 else [first, last]
    estimates = [Estimate(nodes, method, counts, **facts) for counts in ranks]
    return max(estimates, key=lambda e: (e.over_link(cluster.devices), e.sent()))


# -- What is printed -------------------------------------------------------------------------------


def summary(estimates: list[Estimate], cluster: Cluster) -> str:
    header = "nodes | devices | method | GB sent per device | GB leaving a node | s communicating |"
    header += " s computing | s in the bubble | s extra | s per step | hidden | efficiency"
    rows = []
    for e in estimates:
        busy = sum(count * c.time(cluster) for count, c in e.counts.values())
        # Two kinds of links at work at once can hide each other, too
        waiting = e.step - e.compute - e.bubble - e.slower
        hidden = f"{1 - min(waiting, busy) / busy:.0%}" if busy else ""
        cells = [e.nodes, e.nodes * cluster.devices, e.method, f"{e.sent() / 1e9:.1f}"]
        cells += [f"{e.over_link(cluster.devices) / 1e9:.1f}", f"{busy:.3f}"]
        cells += [f"{e.compute:.3f}", f"{e.bubble:.3f}" if e.bubble else "", f"{e.slower:.3f}"]
        cells += [f"{e.step:.3f}", hidden, f"{e.compute / e.step:.1%}"]
        rows.append(cells)
    return table(header, rows)


def details(estimates: list[Estimate], cluster: Cluster) -> str:
    """The collectives of a step, on the largest number of nodes."""
    rows = []
    for e in estimates:
        for name, (count, c) in e.counts.items():
            if not count or c.group.ranks == 1:
                continue
            cells = [e.method, name, f"{count:g}", f"{c.size / 1e6:,.1f}", f"{c.sent() / 1e6:,.1f}"]
            cells += [f"{1e3 * c.time(cluster):,.2f}"]
            rows.append(cells)
    return table("method | collective | number | MB each | MB sent each | ms each", rows)


def load_model(name: str) -> Model:
    """The sizes of a model on the Hub, in a folder, or of a config.json."""
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "10")
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.modeling_layers import GradientCheckpointingLayer

    transformers.logging.set_verbosity_error()
    try:
        config = load_config(name)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        fail(f"cannot build a causal LM from the config of {name}: {reason}")
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        fail(f"{name} has no decoder layers that the chapters know")
    inside = sum(p.numel() for layer in layers for p in layer.parameters())
    root = sum(p.numel() for p in model.parameters()) - inside
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    tied = first.weight.numel() if last is not None and last.weight is first.weight else 0
    config = config.get_text_config()
    matrices = tuple(
        (module.in_features, module.out_features, name.endswith(("o_proj", "down_proj")))
        for name, module in layers[0].named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    heads = config.num_attention_heads
    size_of_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    return Model(
        layers=len(layers),
        layer=inside // len(layers),
        root=root,
        hidden_size=config.hidden_size,
        tied=tied,
        matrices=matrices,
        query_size=heads * size_of_head,
        key_size=key_heads * size_of_head,
        key_heads=key_heads,
        experts=sum(p.numel() for p in experts) // len(layers),
        expert_count=len(experts[0]) if experts else 0,
        experts_per_token=config.num_experts_per_tok if experts else 0,
        config=config,
    )


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="estimate-scaling.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count, real = parser.add_argument, positive(int), positive(float)
    add("-m", "--model-name", default="meta-llama/Llama-3.1-8B", help="[meta-llama/Llama-3.1-8B]")
    add("-b", "--batch-size", type=count, default=2, help="samples per device [2]")
    add("-s", "--seq-length", type=count, default=8192, help="tokens per sample [8192]")
    add("--gradient-accumulation-steps", type=count, default=1, help="[1]")
    add("--activation-checkpointing", action="store_true")
    add("--dtype", choices=BYTES, default="bf16", help="in which weights are gathered [bf16]")
    methods = "[DDP FSDP HSDP TP PP, and CP, EP, 3D, LOCAL and MUON if their flags are given]"
    add("--methods", nargs="+", choices=[*METHODS, *MORE_METHODS], help=methods)
    add("--tensor-parallel", type=count, help="ranks of a group of TP [the devices of a node]")
    add("--pipeline-parallel", type=count, help="stages of PP [8, or as many as divide the nodes]")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of PP and 3D [1f1b]")
    add("--stages-per-rank", type=count, default=2, help="of --schedule interleaved [2]")
    reshard = argparse.BooleanOptionalAction
    kept = "gather each layer again for the backward pass, or keep it for the step [gather]"
    add("--reshard-after-forward", action=reshard, default=True, help=kept)
    add("--context-parallel", type=count, help="ranks of a group of CP [the devices of a node]")
    add("--exchange", choices=["heads", "tokens"], default="heads", help="of CP [heads]")
    add("--expert-parallel", type=count, help="ranks of a group of EP [the devices of a node]")
    add("--inner-steps", type=count, help="steps of a round of LOCAL (chapter 15)")
    add("--muon", action="store_true", help="also FSDP with the optimizer of chapter 18")
    nodes = [4**k for k in range(6)]
    add("--nodes", type=count, nargs="+", default=nodes, help=f"[{' '.join(map(str, nodes))}]")
    add("--devices", type=count, nargs="+", help="of all nodes together, instead of --nodes")
    add("--devices-per-node", type=count, default=8, help="[8]")
    add("--rate", type=real, default=400, help="TFLOP/s of matrix products on a device [400]")
    nvlink = f"GB/s per device, one way [{NVLINK_4:.0f}: NVLink 4]"
    add("--link-in-node", type=real, default=NVLINK_4, help=nvlink)
    add("--memory", type=real, default=3350, help="GB/s that a device reads or writes [3350: H100]")
    attention = "TFLOP/s of attention, without masked ones [335: FlashAttention-2 on an H100]"
    add("--attention-rate", type=real, default=335, help=attention)
    add("--link", type=real, default=400, help="Gbit/s per device between nodes, one way [400]")
    add("--choose", action="store_true", help="the best layouts for --devices, and why others fail")
    add("--gpu-memory", type=real, default=80, help="of --choose: GB of each device [80]")
    batch = "of --choose: samples of a step [as many as have 4,194,304 tokens]"
    add("--global-batch-size", type=count, help=batch)
    trace = "of --choose: trace the memory of the best three [on; off takes seconds]"
    add("--trace", action=argparse.BooleanOptionalAction, default=True, help=trace)
    add("--explain", action="store_true", help="the formulae, each with its source")
    args = parser.parse_args(argv)
    if args.methods is None:
        given = [m for m, flags in MORE_METHODS.items() if all(vars(args)[f] for f in flags)]
        args.methods = METHODS + given
    if "LOCAL" in args.methods and not args.inner_steps:
        parser.error("LOCAL needs --inner-steps, the steps of a round")
    if args.devices:
        per_node = min(args.devices_per_node, *args.devices)
        args.nodes = [devices // per_node for devices in args.devices]
        for devices in args.devices:
            if devices % per_node:
                parser.error(f"{devices} devices do not fill nodes of {per_node}")
        if not args.choose:  # --choose also looks for a larger number of devices that fits
            args.devices_per_node = per_node
    if args.choose and len(args.devices or []) != 1:
        parser.error("--choose needs one number of --devices")
    args.global_batch_size = args.global_batch_size or max(1, 2**22 // args.seq_length)
    return args


def check(model: Model, args) -> None:
    """Refuses groups that the chapters would refuse."""
    c = args.context_parallel or args.devices_per_node
    e = args.expert_parallel or args.devices_per_node
    if "CP" in args.methods and args.exchange == "heads" and model.key_heads % c:
        remedy = "add --exchange tokens"
        fail(f"--context-parallel {c} does not divide {model.key_heads} kv heads: {remedy}")
    if "MUON" in args.methods and model.expert_count:
        fail(f"{args.model_name} has experts, whose share of MUON this estimate does not know")
    if "EP" in args.methods and not model.expert_count:
        fail(f"{args.model_name} has no experts, so --expert-parallel is not for it")
    if "EP" in args.methods and model.expert_count % e:
        fail(f"--expert-parallel {e} does not divide {model.expert_count} experts")


def cluster_of(args, per_node: int) -> Cluster:
    """Nodes with so many devices each, with the rates of the flags."""
    rate, link_in, link = args.rate * 1e12, args.link_in_node * 1e9, args.link * 1e9 / 8
    rates = {"attention": args.attention_rate * 1e12}
    return Cluster(per_node, rate, link_in, link, args.memory * 1e9, **rates)


def main() -> None:
    args = parse_args()
    model = load_model(args.model_name)
    check(model, args)
    cluster = cluster_of(args, args.devices_per_node)
    size = f"{args.model_name}: {model.parameters / 1e9:,.2f}e9 parameters"
    links = f"{args.rate:g} TFLOP/s per device, {args.attention_rate:g} in attention"
    links += f", {args.link_in_node:g} GB/s per device in a node"
    links += f", {args.link:g} Gbit/s per device between nodes"
    if args.choose:
        batch = f"{args.global_batch_size} × {args.seq_length} tokens per step"
        memory = f"{args.devices[0]} devices, {args.gpu_memory:g} GB each"
        print(f"Computed, not measured. {size}, {memory}, {batch}, {args.dtype}.\n{links}.\n")
        print(importlib.import_module("choose-layout").report(model, args))
        return
    nodes = sorted(dict.fromkeys(args.nodes))
    estimates = [estimate(m, model, n, cluster, args) for n in nodes for m in args.methods]
    batch = f"{args.batch_size} × {args.seq_length} tokens per device"
    if args.gradient_accumulation_steps > 1:
        batch += f", {args.gradient_accumulation_steps} micro-batches"
    print(f"Computed, not measured. {size}, {batch}, {args.dtype}.\n{links}.\n")
    print(summary(estimates, cluster))
    print(f"\nThe collectives of a step on {nodes[-1]:,} nodes\n")
    print(details([e for e in estimates if e.nodes == nodes[-1]], cluster))
    if args.explain:
        print(f"\n{FORMULAE}")


if __name__ == "__main__":
    main()
