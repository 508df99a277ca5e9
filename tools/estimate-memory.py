"""Estimates the memory of a training step: which chapter, how many devices, which batch.

    python tools/estimate-memory.py --devices 1 2 4 8 --gpu-memory 80
    python tools/estimate-memory.py -m my-model/config.json -b 4 -s 2048 --explain

Only the config of the model is needed, and no GPU. What stays from step to step (weights,
gradients, AdamW's moments) is counted on the meta device. What lives within a step is traced: a
forward and a backward pass run on fake tensors, which have shapes and no memory, with the settings
of the chapters, and every allocation and release is noted down. Of layers of a kind one is traced,
in between others, and stands for all. What FSDP gathers and scatters is added by its rules.

GB are 1e9 bytes.
"""

import argparse
import json
import logging
import math
import os
import sys
import warnings
import weakref
from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

aten = torch.ops.aten
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Columns of a trace. Gradients twice: those that the backward pass has made so far, and those
# among them that have not yet been added to older ones, if there are any.
COLUMNS = ["activations", "copies", "logits", "gradients", "new gradients"]
ACTIVATIONS, COPIES, LOGITS, GRADIENTS, NEW = range(len(COLUMNS))


# -- The model -------------------------------------------------------------------------------------


@dataclass
class Model:
    """A causal language model without values: its config, its parameters, its layers."""

    config: object
    parameters: list[tuple[int, ...]]  # shapes; tied ones once
    layers: list[list[tuple[int, ...]]]  # shapes of the parameters of each layer
    kinds: list  # equal for layers that are built alike

    @property
    def root(self) -> list[tuple[int, ...]]:
        """Shapes of what is in no layer: embeddings, the last norm, the head."""
        rest = list(self.parameters)
        for shape in (shape for layer in self.layers for shape in layer):
            rest.remove(shape)
        return rest


def numel(shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def shard_numel(shapes, devices: int) -> int:
    """Of the fullest rank: FSDP cuts every parameter along its first dimension."""
    return sum(math.ceil(shape[0] / devices) * math.prod(shape[1:]) for shape in shapes)


def build(config):
    """On the meta device, as the chapters do."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def layer_list(model) -> torch.nn.ModuleList | None:
    """Where the decoder layers are, if they all are in one list."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    ]
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return lists[0] if len(lists) == 1 and len(lists[0]) == len(layers) else None


def describe(config) -> Model:
    model = build(config)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    shapes = [[tuple(p.shape) for p in layer.parameters()] for layer in layers]
    types = getattr(config.get_text_config(), "layer_types", None) or []
    types = types if len(types) == len(layers) else [None] * len(layers)
    kinds = [*zip(map(repr, layers), types, strict=True)]
    return Model(config, [tuple(p.shape) for p in model.parameters()], shapes, kinds)


def representatives(kinds: list) -> list[int]:
    """For each layer, the one to trace in its place.

    The first and the last one have neighbours like no other and stand for themselves; of each kind
    in between, one does for all.
    """
    last = len(kinds) - 1
    inner = {kind: i for i, kind in reversed([*enumerate(kinds)][1:last])}
    return [i if i in (0, last) else inner[kind] for i, kind in enumerate(kinds)]


# -- The trace -------------------------------------------------------------------------------------


@dataclass
class Allocation:
    bytes: int
    column: int
    is_cast: bool = False
    users: int = 0  # storages that stand for it


class Recorder(TorchDispatchMode):
    """Notes down what operations allocate and when it is released, segment by segment of a step."""

    supports_higher_order_operators = True

    def __init__(self, model):
        super().__init__()
        tensors = [*model.parameters(), *model.buffers()]
        self.weights = {x.untyped_storage()._cdata for x in model.parameters()}
        self.known = {x.untyped_storage()._cdata: None for x in tensors}
        self.segments = defaultdict(list)
        layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        inner = {id(p) for layer in layers for p in layer.parameters()}
        self.root_shapes = [set(p.shape) for p in model.parameters() if id(p) not in inner]
        self.segment, self.on, self.in_head, self.ended = None, False, False, False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that torch.compile does not give up

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    column, is_cast = self.column(op, tensor, *args), op is aten._to_copy.default
                    self.add(storage, column, is_cast, self.added_in_place(op, *args))
        return result

    def added_in_place(self, op, source=None, *others) -> Allocation | None:
        """Where autograd adds up the two gradients of tied weights.

        In the first of them, if nothing else refers to it, which is so for what autocast has cast;
        with fake tensors never.
        """
        if op is aten.add.Tensor and isinstance(source, torch.Tensor):
            first = self.known.get(source.untyped_storage()._cdata)
            if first and first.column == GRADIENTS and first.is_cast:
                return first
        return None

    def column(self, op, tensor: torch.Tensor, source=None, *others) -> int:
        """What an operation has made, from the tensor that is its first argument."""
        if isinstance(source, torch.Tensor):
            key = source.untyped_storage()._cdata
            if key in self.weights and source.numel() == tensor.numel():
                return COPIES
            # Of tied weights: the gradient from the head waits for that from the embeddings.
            weight_like = op is aten.mm.default and set(tensor.shape) in self.root_shapes
            made_of = self.known.get(key)
            is_copy = op is aten._to_copy.default and made_of
            if weight_like or (is_copy and made_of.column == GRADIENTS):
                return GRADIENTS
        return LOGITS if self.in_head else ACTIVATIONS

    def add(self, storage, column: int, is_cast: bool, old: Allocation | None) -> None:
        new = Allocation(storage.nbytes(), column, is_cast) if self.on else None
        allocation = old or new
        self.known[storage._cdata] = allocation
        if allocation:
            allocation.users += 1
            if not old:
                self.segments[self.segment].append((allocation, 1))
        weakref.finalize(storage, self.release, storage._cdata).atexit = False

    def release(self, key: int) -> None:
        allocation = self.known.pop(key)
        if allocation and not self.ended:
            allocation.users -= 1
            if not allocation.users:
                self.segments[self.segment].append((allocation, -1))

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete, and has become its `.grad`."""
        allocation = self.known.get(parameter.grad.untyped_storage()._cdata)
        if allocation:
            allocation.column = GRADIENTS
            self.segments[self.segment].append((allocation, 0))

    def table(self) -> dict[object, np.ndarray]:
        """For each segment the bytes that are added, a row per event, in the columns above."""
        tables = {}
        for segment, events in self.segments.items():
            rows = np.zeros((len(events), len(COLUMNS)))
            for row, (allocation, sign) in zip(rows, events, strict=True):
                row[allocation.column] = sign * allocation.bytes
                if allocation.column == GRADIENTS:
                    row[NEW] = (sign or -1) * allocation.bytes
            tables[segment] = rows
        return tables


class Fused(torch.fx.Interpreter):
    """Runs a graph as compiled code would: what only feeds fused kernels takes no memory."""

    recorder: Recorder

    def __init__(self, graph: torch.fx.GraphModule):
        super().__init__(graph)
        self.inlined = {node for node in graph.graph.nodes if self.is_inlined(node)}
        # What a fused kernel reads has to live until that kernel runs.
        position = {node: i for i, node in enumerate(graph.graph.nodes)}
        last_use, self.user_to_last_uses = {}, defaultdict(list)
        for node in reversed(graph.graph.nodes):
            through = [
                last_use[user] if user in self.inlined or is_view(user) else user
                for user in node.users
            ]
            last_use[node] = max(through, key=position.get, default=node)
            if node.op != "output":
                self.user_to_last_uses[last_use[node]].append(node)

    def is_inlined(self, node) -> bool:
        return fuses(node) and all(self.reads_inlined(user) for user in node.users)

    def reads_inlined(self, user) -> bool:
        if user.op == "output":
            return False
        if is_view(user):
            return all(self.reads_inlined(other) for other in user.users)
        return fuses(user) or reduces(user)

    def run_node(self, node):
        was_on, self.recorder.on = self.recorder.on, self.recorder.on and node not in self.inlined
        try:
            return super().run_node(node)
        finally:
            self.recorder.on = was_on

    def call_function(self, target, args, kwargs):
        # Attention that is to be computed again draws the same random numbers again, if any.
        if target is torch.ops.higher_order.run_and_save_rng_state:
            return torch.empty(0), args[0](*args[1:], **kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)


VIEWS = "view _unsafe_view permute t transpose unsqueeze squeeze expand alias slice select detach"
REDUCTIONS = "amax amin argmax sum mean var var_mean prod any all gather"
FUSED = "convert_element_type full full_like scalar_tensor scatter slice_scatter constant_pad_nd"
FUSED += " clone where iota arange cat index_select copy"


def name_of(node) -> str:
    return node.target.overloadpacket.__name__ if hasattr(node.target, "overloadpacket") else ""


def is_view(node) -> bool:
    return name_of(node) in VIEWS.split()


def reduces(node) -> bool:
    return name_of(node) in REDUCTIONS.split()


def fuses(node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name_of(node) in FUSED.split()


def compile_backend(recorder: Recorder):
    """torch.compile's, up to the point where it would generate code."""

    def compiler(graph, inputs):
        fused = Fused(graph)
        fused.recorder = recorder

        def run(args):
            results = fused.boxed_run(args)
            fused.env = {}
            return results

        run._boxed_call = True
        return run

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )


@contextmanager
def adapted_transformers():
    """Replaces the functions that need real tensors."""
    masking, experts = transformers.masking_utils, transformers.integrations.moe
    with ExitStack() as patches:
        # Looks for position ids that restart within a row. The chapters have none: it returns None.
        patches.enter_context(
            mock.patch.object(masking, "find_packed_sequence_indices", return_value=None)
        )
        # PyTorch refuses fake tensors in fp32 there; the way around it takes as much memory.
        in_bf16 = lambda inputs, weight, offsets: weight.dtype == torch.bfloat16  # noqa: E731
        patches.enter_context(mock.patch.object(experts, "_can_use_grouped_mm", in_bf16))
        yield


class AsOnGPU(TorchFunctionMode):
    """Where GPUs compute in other types than the CPU, or with other kernels, so does this."""

    # Of autocast's list for CUDA, what language models use. Source:
    # https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
    IN_FP32 = "pow exp log rsqrt reciprocal softmax log_softmax softplus layer_norm group_norm norm"
    IN_FP32 += " normalize sum prod cumsum cumprod cross_entropy nll_loss __pow__ __rpow__"
    IN_FP32 += " __rdiv__ __rtruediv__"
    IN_FP32 = frozenset(IN_FP32.split())

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.nn.functional.scaled_dot_product_attention:
            # FlashAttention drops out without a mask to keep, the CPU's kernel cannot.
            kwargs = kwargs | {"dropout_p": 0.0}
            # In fp32 there is no kernel for grouped queries that does without the whole matrix.
            query = args[0] if args else kwargs["query"]
            in_fp32 = query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
            if in_fp32 and kwargs.get("enable_gqa"):
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    return function(*args, **kwargs)
        elif torch.is_autocast_enabled("cpu") and getattr(function, "__name__", "") in self.IN_FP32:
            args = [upcast(arg) for arg in args]
        return function(*args, **kwargs)


def upcast(value):
    low = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


def trace(config, flags, batch: int, autocast: bool, layers=None) -> dict:
    """Allocations of a forward and a backward pass, for each segment of them.

    Segments are ("forward", i) and ("backward", i) for layer i, with "embeddings" before and "head"
    behind the layers. `layers` are the numbers of those to keep, None keeps all.
    """
    on_gpu, dtype = flags.device == "cuda", flags.dtype
    model = build(config)
    if layers is not None:
        kept = layer_list(model)
        others = set(range(len(kept))) - set(layers)
        for i in sorted(others, reverse=True):
            del kept[i]
    if flags.activation_checkpointing:
        options = {"use_reentrant": False}  # the default
        if on_gpu and not flags.compile:  # the backward pass would not know of it
            options["context_fn"] = lambda: (nullcontext(), AsOnGPU())
        model.activation_checkpointing_enable(options)
    precision = torch.float32 if dtype == "fp32" else torch.bfloat16  # fp16 takes as much
    with FakeTensorMode(), adapted_transformers(), warnings.catch_warnings(action="ignore"):
        materialize(model, torch.float32 if autocast else precision)
        recorder = Recorder(model)
        decoder_layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if flags.compile:
            torch._dynamo.reset()
            backend = compile_backend(recorder)
            for layer in decoder_layers:
                layer.compile(backend=backend, dynamic=False)
            if on_gpu:
                model.loss_function = torch.compile(
                    model.loss_function, backend=backend, dynamic=False
                )
        numbers = layers or range(len(decoder_layers))
        for number, layer in zip(numbers, decoder_layers, strict=True):
            mark(layer, number, number == numbers[-1], recorder)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(recorder.accumulated)
        ids = torch.zeros(batch, flags.seq_length, dtype=torch.int64)
        with recorder, AsOnGPU() if on_gpu else nullcontext():
            for measured in (False, True) if flags.compile else (True,):  # the first time compiles
                recorder.on, recorder.segment = measured, ("forward", "embeddings")
                with torch.autocast("cpu", precision, enabled=autocast and dtype != "fp32"):
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                recorder.segment = ("backward", "head")
                torch.autograd.backward(loss)  # loss.backward() would switch AsOnGPU off
                recorder.on = recorder.in_head = False
                recorder.ended = measured
                del loss
                if not measured:
                    model.zero_grad()
    return recorder.table()


def materialize(model, dtype) -> None:
    """From the meta device to fake tensors that pass for a CPU's; tied weights stay tied."""
    new = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old not in new:
                new[old] = torch.nn.Parameter(torch.empty(old.shape, dtype=dtype))
            module._parameters[name] = new.get(old)
        for name, old in module._buffers.items():
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)


def mark(layer, number: int, is_last: bool, recorder: Recorder) -> None:
    """Has the recorder begin a segment with each pass of this layer, outside what is compiled."""
    layer.marked = (number, is_last, recorder)
    layer.__class__ = marked(type(layer))


@lru_cache  # one class for layers of a class, so that they share their compiled code
def marked(layer_class: type) -> type:
    def call(self, *args, **kwargs):
        number, is_last, recorder = self.marked

        def begin(*segment):
            def hook(gradient):
                recorder.segment, recorder.in_head = segment, False

            return hook

        if recorder.segment[0] == "backward":  # computes again for its backward pass
            return layer_class.__call__(self, *args, **kwargs)
        if recorder.segment[1] == "embeddings":
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(begin("backward", "embeddings"))
        recorder.segment, recorder.in_head = ("forward", number), False
        output = layer_class.__call__(self, *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.requires_grad:
            first.register_hook(begin("backward", number))
        if is_last:
            recorder.segment, recorder.in_head = ("forward", "head"), True
        return output

    return type(layer_class.__name__, (layer_class,), {"__call__": call})


class Traces:
    """The traces of a model with these flags, for any batch size."""

    def __init__(self, model: Model, flags):
        self.model, self.flags = model, flags
        self.layers = representatives(model.kinds)
        has_list = layer_list(build(model.config)) is not None
        self.kept = sorted(set(self.layers)) if has_list and not flags.all_layers else None
        self.traced = lru_cache(self.traced)

    def traced(self, batch: int, autocast: bool) -> dict:
        return trace(self.model.config, self.flags, batch, autocast, self.kept)

    def __call__(self, batch: int, autocast: bool) -> dict:
        """For each segment the bytes that are added, a row per event, in the columns above."""
        autocast = autocast or self.flags.dtype == "fp32"  # there, both compute the same
        first = self.flags.batch_size
        if batch == first:
            return self.traced(batch, autocast)
        # Every tensor has a part that grows with the batch, and one that does not. A batch of one
        # is no example: with a single row, some copies are not needed.
        first = max(first, 2)
        one, two = self.traced(first, autocast), self.traced(first + 1, autocast)
        if any(one[segment].shape != two[segment].shape for segment in one):
            return self.traced(batch, autocast)
        return {name: one[name] + (two[name] - one[name]) * (batch - first) for name in one}

    def of(self, tables: dict, direction: str, place) -> np.ndarray:
        """The events of this segment, or of the one that stands for it."""
        name = place if self.kept is None or isinstance(place, str) else self.layers[place]
        return tables.get((direction, name), np.zeros((0, len(COLUMNS))))


# -- A step with each method -----------------------------------------------------------------------


@dataclass
class Method:
    name: str
    sharded: bool = False
    buckets: bool = False  # gradients stay from step to step
    reshard: bool = True
    offload: bool = False


METHODS = {
    "chapter 1": Method("chapter 1"),
    "DDP": Method("DDP", buckets=True),
    "FSDP": Method("FSDP", sharded=True),
    "no reshard": Method("no reshard", sharded=True, reshard=False),
    "offload": Method("offload", sharded=True, offload=True),
}
PARTS = {
    "weights, fp32": "4 bytes per parameter, under FSDP of this rank's shard",
    "gradients": "as far as they are there, whole or in shards, with FSDP's buffer for scattering",
    "AdamW's moments": "8 bytes per parameter and 4 per tensor, under FSDP of this rank's shard",
    "copies of weights": "in the compute dtype: autocast's, or what FSDP has gathered",
    "activations": "what layers keep for their backward pass, and what they are computing",
    "logits and loss": "all that comes behind the last layer",
}


@dataclass
class Moment:
    """What is in memory at the fullest moment of a segment, in bytes, by `PARTS`."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def states(model: Model, method: Method, devices: int) -> dict[str, int]:
    """Bytes that a rank keeps from step to step, or under DDP and FSDP at least its optimizer."""
    count = shard_numel(model.parameters, devices if method.sharded else 1)
    steps = 4 * len(model.parameters)  # AdamW counts the steps of each tensor
    return {"weights": 4 * count, "gradients": 4 * count, "moments": 8 * count + steps}


class Sharding:
    """What FSDP adds to a step on this many devices, in bytes: gathered weights, buffers, shards.

    As PyTorch 2.13 does it: a layer is gathered into a buffer, and from there copied to its
    parameters. In the forward pass the buffer stays until the next layer is there, in the backward
    pass the next one is gathered ahead. Gradients are copied to a buffer in fp32 and scattered from
    there; it stays until the next one is needed. On one device there are only copies.
    """

    def __init__(self, model: Model, method: Method, devices: int, flags, offload: bool):
        size, several = BYTES[flags.dtype], devices > 1
        groups = [*model.layers, model.root]
        self.whole = [size * numel(shapes) for shapes in groups]  # the root is the last one
        self.buffer = [size * several * devices * shard_numel(x, devices) for x in groups]
        self.shard = [4 * shard_numel(shapes, devices) for shapes in groups]
        self.scatter = [4 * devices * shard_numel(shapes, devices) for shapes in groups]
        self.last = len(model.layers) - 1
        self.accumulates = flags.gradient_accumulation_steps > 1
        # Gathered once for all micro-batches of a step, along with whole gradients in fp32
        self.stays = self.accumulates and not method.reshard
        self.reshard, self.offload = method.reshard, offload
        self.unscattered = [4 * numel(x) if self.stays else 0 for x in groups]

    def gathered(self, direction: str, place) -> float:
        layers, root, buffer = self.whole[:-1], self.whole[-1], self.buffer
        first = place == "embeddings"
        if self.stays and direction == "forward":
            return root + sum(layers)
        if direction == "forward":
            now = self.last + 1 if place == "head" else -1 if first else place
            kept = 0 if self.reshard else sum(layers[: max(now, 0)])
            of_now = layers[now] if 0 <= now <= self.last else 0
            return root + kept + of_now + buffer[min(now, self.last) if self.last >= 0 else -1]
        if not self.reshard:
            return root + sum(layers if place == "head" else () if first else layers[: place + 1])
        ahead = self.last if place == "head" else -1 if first else place - 1
        of_now = layers[place] if place not in ("head", "embeddings") else 0
        return root + of_now + (buffer[ahead] if ahead >= 0 else 0)

    def scattering(self, direction: str, place) -> float:
        """The buffer of the layer before, which is still on its way."""
        if direction == "forward" or place in ("head", self.last):
            return 0
        return self.scatter[0 if place == "embeddings" else place + 1] if self.last >= 0 else 0

    def shards(self, scattered: list[int]) -> float:
        if self.offload:
            return 0
        everything = self.accumulates and not self.stays
        return sum(self.shard if everything else (self.shard[i] for i in scattered))


def course(traces: Traces, method: Method, devices: int, batch: int, flags) -> list[Moment]:
    """The fullest moment of each segment of a step, the last one if gradients accumulate."""
    model = traces.model
    tables = traces(batch, autocast=not method.sharded)
    kept = states(model, method, devices)
    offload = method.offload and flags.device == "cuda"  # else it is the same memory
    here = 0 if offload else 1
    fixed = {"weights, fp32": here * kept["weights"], "AdamW's moments": here * kept["moments"]}
    there_before = method.buckets or flags.gradient_accumulation_steps > 1
    sharding = Sharding(model, method, devices, flags, offload)
    if method.sharded:  # others than fp32 ones are added up in fp32 when a layer is done
        there_before = sharding.stays and flags.dtype == "fp32"
    gradients = NEW if there_before else GRADIENTS
    moments, now, scattered = [], np.zeros(len(COLUMNS)), []

    def note(name: str, row, gradients: float, copies: float) -> None:
        within = {"gradients": gradients, "copies of weights": copies}
        within |= {"activations": row[ACTIVATIONS], "logits and loss": row[LOGITS]}
        parts = fixed | within
        moments.append(Moment(name, {part: float(parts[part]) for part in PARTS}))

    numbers = range(len(model.layers))
    order = [("forward", place) for place in ("embeddings", *numbers, "head")]
    order += [("backward", place) for place in ("head", *reversed(numbers), "embeddings")]
    for direction, place in order:
        rows = now + np.cumsum(traces.of(tables, direction, place), axis=0)
        rows = np.vstack([now, rows])
        columns = [ACTIVATIONS, COPIES, LOGITS, gradients]
        fullest = rows[rows[:, columns].sum(axis=1).argmax()]
        name = title(direction, place, len(numbers))
        if not method.sharded:
            held = kept["gradients"] if there_before else 0
            note(name, fullest, held + fullest[gradients], fullest[COPIES])
            now = rows[-1]
            continue
        unscattered = sum(sharding.unscattered)
        others = sharding.shards(scattered) + unscattered
        others += sharding.scattering(direction, place)
        note(name, fullest, others + fullest[gradients], sharding.gathered(direction, place))
        last, now = rows[-1], rows[-1].copy()
        if direction == "backward" and place != "head":
            # Its gradients, whole, to the buffer; then they are freed.
            group = -1 if place == "embeddings" else place
            now[gradients] = 0 if group == -1 else rows[0][gradients]
            others = sharding.shards(scattered) + unscattered + sharding.scatter[group]
            if not sharding.stays:  # else they are in there already
                others += max(last[gradients] - now[gradients], sharding.shard[group])
            if place == "embeddings":
                copies = 0
            else:
                copies = sharding.gathered(direction, place) - sharding.whole[group]
            note(f"{name}, scatter", last, others + now[gradients], copies)
            sharding.unscattered[group] = 0
            scattered.append(group)
    note("update", np.zeros(len(COLUMNS)), here * kept["gradients"], 0)
    return moments


def title(direction: str, place, layers: int) -> str:
    if place == "head":
        return "loss" if direction == "forward" else "loss, backward"
    return f"{direction}, {place if place == 'embeddings' else f'layer {place + 1}'}"


# -- Estimates -------------------------------------------------------------------------------------

# Of the memory of a GPU, for what PyTorch does not count: CUDA's context, the buffers of NCCL and
# cuBLAS, gaps between blocks. A rule of thumb.
SPARE = 0.1


@dataclass
class Estimate:
    """For one method on so many devices; in bytes, per device."""

    method: str
    devices: int
    states: dict[str, int]
    moments: list[Moment]
    fits: bool
    largest_batch: int
    cpu_memory: int

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def estimate(traces: Traces, method: Method, devices: int, flags) -> Estimate:
    room = flags.gpu_memory * 1e9 * (1 - SPARE)

    def total(batch: int) -> float:
        moments = course(traces, method, devices, batch, flags)
        return max(moment.total for moment in moments)

    moments = course(traces, method, devices, flags.batch_size, flags)
    fits = max(moment.total for moment in moments) <= room
    # The largest batch that fits: doubling, then halving the steps.
    fitting, step = 0, 1
    while fitting + step < 2**20 and total(fitting + step) <= room:
        fitting, step = fitting + step, 2 * step
    while step > 1:
        step //= 2
        if total(fitting + step) <= room:
            fitting += step
    kept = states(traces.model, method, devices)
    cpu_memory = sum(kept.values()) if method.offload and flags.device == "cuda" else 0
    return Estimate(method.name, devices, kept, moments, fits, fitting, cpu_memory)


# -- Output ----------------------------------------------------------------------------------------


def gb(size: float, digits: int) -> str:
    return f"{size / 1e9:.{digits}f}"


def markdown(rows: list[list[str]]) -> str:
    """A table with aligned columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    rule = ["-" * width for width in widths]
    aligned = [
        [cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in pairs]
        for pairs in (
            enumerate(zip(row, widths, strict=True)) for row in [rows[0], rule, *rows[1:]]
        )
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in aligned)


def table(estimates: list[Estimate], flags) -> str:
    fullest = [estimate.fullest for estimate in estimates]
    digits = digits_for(max(moment.total for moment in fullest))
    rows = [["GB per device", *(estimate.method for estimate in estimates)]]
    rows += [[part, *(gb(moment.parts[part], digits) for moment in fullest)] for part in PARTS]
    rows += [["together", *(gb(moment.total, digits) for moment in fullest)]]
    rows += [["fullest moment", *(moment.name for moment in fullest)]]
    room = f"fits {flags.gpu_memory:g} GB"
    rows += [[room, *("yes" if estimate.fits else "no" for estimate in estimates)]]
    rows += [["largest batch", *(str(x.largest_batch or "none") for x in estimates)]]
    rows += [["CPU memory", *(gb(estimate.cpu_memory, digits) for estimate in estimates)]]
    return markdown(rows)


def digits_for(largest: float) -> int:
    return 1 if largest >= 10e9 else 2 if largest >= 1e9 else 4


def headline(model: Model, flags) -> str:
    checkpointing = ", activation checkpointing" if flags.activation_checkpointing else ""
    accumulation = flags.gradient_accumulation_steps
    micro = f" ({accumulation} times per step)" if accumulation > 1 else ""
    return (
        f"{flags.model_name}: {numel(model.parameters):,} parameters, {len(model.layers)} layers. "
        f"{flags.batch_size} × {flags.seq_length} tokens per device{micro}, {flags.dtype}"
        f"{', compiled' if flags.compile else ', not compiled'}{checkpointing}"
    )


def legend(flags) -> str:
    lines = [f"- {part}: {counts}" for part, counts in PARTS.items()]
    lines += [
        "- together: the most that PyTorch allocates at a time; the lines above are of that moment",
        f"- fits, largest batch: with {SPARE:.0%} spared for CUDA, NCCL and gaps, a rule of thumb",
        "- no reshard, offload: chapter 3 with --no-reshard-after-forward, with --cpu-offload",
    ]
    return "\n".join(lines)


def explanation(traces: Traces, estimates: list[Estimate], flags) -> str:
    """The arithmetic, with the numbers of this model."""
    model = traces.model
    count, root = numel(model.parameters), numel(model.root)
    layers = [numel(layer) for layer in model.layers]
    size = BYTES[flags.dtype]
    lines = ["Where the figures come from", ""]
    sizes = " + ".join(f"{layers.count(x)} × {x:,}" for x in dict.fromkeys(layers))
    lines += [
        f"Parameters: {sizes} in layers + {root:,} in the root (embeddings, last norm, head; tied "
        f"ones once) = {count:,}, in {len(model.parameters)} tensors.",
        f"States: 4 × {count:,} for weights, as much for gradients, 2 × 4 × {count:,} + 4 × "
        f"{len(model.parameters)} for moments: {gb(16 * count, 3)} GB.",
    ]
    most = max(estimate.devices for estimate in estimates)
    part = shard_numel(model.parameters, most)
    largest = max(layers, default=0)
    lines += [
        f"Shards on {most}: {part:,} parameters on the fullest rank (of each tensor, 1/{most} of "
        f"the rows, rounded up), {gb(16 * part, 3)} GB.",
        f"Gathered by FSDP: {size} bytes × ({root:,} in the root + 2 × {largest:,} in two layers) "
        f"= {gb(size * (root + 2 * largest), 3)} GB; on one device one layer.",
    ]
    for autocast, whose in ((True, "Chapters 1 and 2"), (False, "Chapter 3")):
        tables = traces(flags.batch_size, autocast)
        forward, backward = (
            np.cumsum(traces.of(tables, way, len(layers) // 2)[:, columns].sum(axis=1))
            for way, columns in (
                ("forward", [ACTIVATIONS, COPIES]),
                ("backward", [ACTIVATIONS, COPIES, NEW]),
            )
        )
        head = np.cumsum(traces.of(tables, "forward", "head")[:, LOGITS])
        keeps, computing, back, behind, most_behind = (
            gb(value, 3)
            for value in (
                forward[-1] if len(forward) else 0,
                forward.max(initial=0),
                backward.max(initial=0),
                head[-1],
                head.max(initial=0),
            )
        )
        lines += [
            f"{whose}, traced: a layer takes up to {computing} GB while it computes, keeps {keeps} "
            f"GB, and takes up to {back} GB more in its backward pass. The head takes up to "
            f"{most_behind} GB and keeps {behind} GB."
        ]
    estimates = [estimate for estimate in estimates if estimate.devices == most]
    for estimate in estimates:
        digits = digits_for(estimate.fullest.total)
        lines += ["", f"{estimate.method} on {estimate.devices}, GB in the course of a step:", ""]
        rows = [["moment", *PARTS, "together"]]
        for moment in shown(estimate, len(layers)):
            cells = [gb(moment.parts[part], digits) for part in PARTS]
            rows += [[moment.name, *cells, gb(moment.total, digits)]]
        lines += [markdown(rows)]
    return "\n".join(lines)


def shown(estimate: Estimate, layers: int) -> list[Moment]:
    """Without the layers between the first and the last, unless one of them is the fullest."""
    between = {f"layer {number}" for number in range(2, layers)}
    return [
        moment
        for moment in estimate.moments
        if moment is estimate.fullest or not between & set(moment.name.split(", "))
    ]


def as_json(model: Model, estimates: list[Estimate], flags) -> str:
    return json.dumps(
        {
            "flags": vars(flags),
            "parameters": numel(model.parameters),
            "layers": len(model.layers),
            "estimates": [
                {
                    "devices": estimate.devices,
                    "method": estimate.method,
                    "states": estimate.states,
                    "parts": estimate.fullest.parts,
                    "total": estimate.fullest.total,
                    "fullest_moment": estimate.fullest.name,
                    "fits": estimate.fits,
                    "largest_batch": estimate.largest_batch,
                    "cpu_memory": estimate.cpu_memory,
                    "moments": {moment.name: moment.total for moment in estimate.moments},
                }
                for estimate in estimates
            ],
        },
        indent=2,
    )


# -- Flags -----------------------------------------------------------------------------------------


def fail(message: str) -> None:
    sys.exit(f"error: {message}")


def above(minimum, kind=int):
    def number(text: str):
        value = kind(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not at least {minimum}")
        return value

    return number


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Estimates the memory of a training step on GPUs; the default is in brackets.",
        allow_abbrev=False,
    )
    positive, switch = above(1), argparse.BooleanOptionalAction

    def add(*names, help: str, default=None, **options):
        suffix = "" if default in (None, False) else f" [{default}]"
        parser.add_argument(*names, help=help + suffix, default=default, **options)

    model = "Hub id, local folder, or a config.json"
    add("-m", "--model-name", default="meta-llama/Llama-3.2-1B", help=model)
    add("--devices", type=positive, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs")
    add("--gpu-memory", type=above(0.001, float), default=80.0, help="of each, GB = 1e9 bytes")
    add("-s", "--seq-length", type=above(2), default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=positive, default=8, help="samples per device and forward pass")
    add("--gradient-accumulation-steps", type=positive, default=1, help="passes per optimizer step")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="whose rules of computing")
    add("--dtype", choices=BYTES, help="compute precision [bf16 for cuda, fp32 for cpu]")
    add("--activation-checkpointing", action="store_true", help="less memory, more compute")
    add("--compile", action=switch, help="[on for cuda, off for cpu]")
    add("--json", action="store_true", help="all figures in bytes, for programs")
    add("--explain", action="store_true", help="the arithmetic, with this model's numbers")
    add(
        "--all-layers", action="store_true", help="trace each layer, slower, to check the short way"
    )
    args = parser.parse_args()
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    return args


def load_config(name: str):
    """The config of a model on the Hub, in a folder, or in a file of its own."""
    try:
        if os.path.isfile(name):
            values = json.loads(Path(name).read_text())
            return AutoConfig.for_model(values.pop("model_type"), **values)
        return AutoConfig.from_pretrained(name)
    except KeyError:
        fail(f"{name} is not the config of a model that Transformers knows: it has no model_type")
    except Exception as error:
        fail(f"cannot load the config of {name}: {first_line(error)}")


def first_line(error) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable()  # of PyTorch, whose errors come with a sentence of ours
    config = load_config(args.model_name)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and args.seq_length > positions:
        fail(
            f"--seq-length {args.seq_length} is more than the {positions} positions of "
            f"{args.model_name}"
        )
    try:
        model = describe(config)
    except Exception as error:
        fail(f"cannot build a causal LM from {args.model_name}: {first_line(error)}")
    try:
        traces = Traces(model, args)
        estimates = [
            estimate(traces, method, devices, args)
            for devices in dict.fromkeys(args.devices)
            for method in METHODS.values()
        ]
    except Exception as error:
        remedy = ", try --no-compile" if args.compile else ""
        fail(f"cannot trace a step of {args.model_name}{remedy}: {first_line(error)}")
    if args.json:
        print(as_json(model, estimates, args))
        return
    print(headline(model, args))
    for devices in dict.fromkeys(args.devices):
        print(f"\n{devices} device{'s' if devices > 1 else ''}\n")
        print(table([x for x in estimates if x.devices == devices], args))
    print("\n" + legend(args))
    if args.explain:
        print("\n" + explanation(traces, estimates, args))


if __name__ == "__main__":
    main()
