"""Estimates the memory of a training step: which chapter, how many devices, which batch.

    python tools/estimate-memory.py --devices 1 2 4 8 --gpu-memory 80
    python tools/estimate-memory.py -m my-model/config.json -b 4 -s 2048 --explain
    python tools/estimate-memory.py --devices 32 --shard-size 8 --tensor-parallel 8

Only the config of the model is needed, and no GPU. What stays from step to step (weights,
gradients, AdamW's moments) is counted on the meta device. What lives within a step is traced: a
forward and a backward pass run on fake tensors, which have shapes and no memory, with the settings
of the chapters, and every allocation and release is noted down. Of layers of a kind one is traced,
in between others, and stands for all. What FSDP gathers and scatters is added by its rules. Layers
that are split, as in chapter 6, are traced with the plan of that chapter, on one rank of a process
group that does not exist. Pipelines follow PyTorch's order of the passes on each rank.

GB are 1e9 bytes. A place in the model is a number: -1 for the embeddings, 0 for the first layer,
and the number of layers for the head, which is all that comes behind the last layer.
"""

import argparse
import json
import logging
import math
import os
import runpy
import sys
import warnings
import weakref
from collections import defaultdict
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

REPOSITORY = Path(__file__).resolve().parents[1]
aten = torch.ops.aten
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Columns of a trace. Gradients twice: those that the backward pass has made so far, and those
# among them that have not yet been added to older ones, if there are any. The last two count what
# is released here and was allocated at an earlier or at a later place.
ACTIVATIONS, COPIES, LOGITS, GRADIENTS, NEW, EARLIER, LATER = range(7)
COLUMNS = 7
EMBEDDINGS = -1


# -- The model -------------------------------------------------------------------------------------


@dataclass
class Model:
    """A causal language model without values: its config, its parameters, its layers."""

    config: object
    parameters: list[tuple[int, ...]]  # shapes; tied ones once
    layers: list[list[tuple[int, ...]]]  # shapes of the parameters of each layer
    kinds: list  # equal for layers that are built alike
    ranks: int = 1  # that split each layer, as in chapter 6; the shapes are those of one rank

    @property
    def root(self) -> list[tuple[int, ...]]:
        """Shapes of what is in no layer: embeddings, the last norm, the head."""
        rest = list(self.parameters)
        for shape in chain(*self.layers):
            rest.remove(shape)
        return rest


def numel(shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


def shard_numel(shapes, devices: int) -> int:
    """Of the fullest rank: FSDP cuts every parameter along its first dimension."""
    return sum(math.ceil(shape[0] / devices) * math.prod(shape[1:]) for shape in shapes)


def build(config, ranks: int = 1):
    """On the meta device, as the chapters do; with several ranks, the part of the first of them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if ranks > 1:  # the other ranks of this process group do not exist
        if dist.is_initialized() and dist.get_world_size() != ranks:
            dist.destroy_process_group()
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        plan = chapter("06-tensor-parallel")["PLANS"][config.model_type]
        tp.parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
        model.tie_weights()
    return model


@lru_cache
def chapter(folder: str) -> dict:
    """What the script of a chapter defines."""
    return runpy.run_path(str(REPOSITORY / folder / "train-llm.py"))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is split."""
    return getattr(tensor, "_local_tensor", tensor)


def layers_of(model) -> list:
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def layer_list(model) -> torch.nn.ModuleList | None:
    """Where the decoder layers are, if they all are in one list."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return next((one for one in lists if [*one] == layers_of(model)), None)


def describe(config, ranks: int = 1) -> Model:
    model = build(config, ranks)
    layers = layers_of(model)
    types = getattr(config.get_text_config(), "layer_types", None) or []
    types = types if len(types) == len(layers) else [None] * len(layers)
    kinds = [*zip(map(repr, layers), types, strict=True)]
    shapes = [[tuple(local(p).shape) for p in part.parameters()] for part in (model, *layers)]
    return Model(config, shapes[0], shapes[1:], kinds, ranks)


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
    place: int
    is_cast: bool = False
    users: int = 0  # storages that stand for it


def storage_key(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Notes down what operations allocate and when it is released, segment by segment of a step.

    Segments are ("forward", place) and ("backward", place).
    """

    supports_higher_order_operators = True

    def __init__(self, model, head: int):
        super().__init__()
        self.weights = {storage_key(p) for p in model.parameters()}
        self.alive = {storage_key(x): None for x in [*model.parameters(), *model.buffers()]}
        inner = {p for layer in layers_of(model) for p in layer.parameters()}
        self.root_shapes = [set(local(p).shape) for p in model.parameters() if p not in inner]
        self.segments = defaultdict(list)
        self.head, self.segment = head, None
        self.on = self.ended = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # so that torch.compile does not give up

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor that is split: comes again, as this rank's part of it
        wait = torch.ops._c10d_functional.wait_tensor.default  # fake ones would copy
        result = args[0] if op is wait else op(*args, **kwargs or {})
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.alive:
                self.add(tensor, op, *args)
        return result

    def add(self, tensor: torch.Tensor, op, source=None, *others) -> None:
        """Notes what an operation has made; its first argument is the source."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        of_tensor = isinstance(source, torch.Tensor)
        made_of = self.alive.get(storage_key(source)) if of_tensor else None
        is_cast = op is aten._to_copy.default
        of_gradient = made_of and made_of.column == GRADIENTS
        if of_gradient and op is aten.add.Tensor and made_of.is_cast:
            # Autograd adds up the two gradients of tied weights in the first of them, if nothing
            # else refers to it, which is so for what autocast has cast; with fake tensors never.
            allocation = made_of
        else:
            place = self.segment[1]
            column = LOGITS if place == self.head else ACTIVATIONS
            # Of tied weights: the gradient from the head waits for that from the embeddings.
            weight_like = op is aten.mm.default and set(tensor.shape) in self.root_shapes
            if of_tensor and (weight_like or (is_cast and of_gradient)):
                column = GRADIENTS
            if of_tensor and storage_key(source) in self.weights:
                column = COPIES if source.numel() == tensor.numel() else column
            allocation = Allocation(storage.nbytes(), column, place, is_cast) if self.on else None
            self.note(allocation, 1)
        if allocation:
            allocation.users += 1
        self.alive[key] = allocation
        weakref.finalize(storage, self.release, key).atexit = False

    def without(self, function):
        """The function, such that this notes nothing of it."""

        def call(*args):
            with mock.patch.object(self, "on", False):
                return function(*args)

        return call

    def note(self, allocation: Allocation | None, sign: int) -> None:
        if allocation and not self.ended:
            self.segments[self.segment].append((allocation, sign))

    def release(self, key: int) -> None:
        allocation = self.alive.pop(key)
        if allocation:
            allocation.users -= 1
            if not allocation.users:
                self.note(allocation, -1)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete, and has become its `.grad`."""
        allocation = self.alive.get(storage_key(parameter.grad))
        if allocation:
            allocation.column = GRADIENTS
            self.note(allocation, 0)

    def table(self) -> dict[tuple, np.ndarray]:
        """For each segment the bytes that are added, a row per event, in the columns above."""
        tables = {}
        for segment, events in self.segments.items():
            tables[segment], place = np.zeros((len(events), COLUMNS)), segment[1]
            for row, (allocation, sign) in zip(tables[segment], events, strict=True):
                row[allocation.column] = sign * allocation.bytes
                if allocation.column == GRADIENTS:
                    row[NEW] = (sign or -1) * allocation.bytes
                elif sign < 0 and allocation.place != place:
                    row[EARLIER if allocation.place < place else LATER] = allocation.bytes
        return tables


VIEWS = "view _unsafe_view permute t transpose unsqueeze squeeze expand alias slice select detach"
REDUCTIONS = "amax amin argmax sum mean var var_mean prod any all gather"
FUSED = "convert_element_type full full_like scalar_tensor scatter slice_scatter constant_pad_nd"
FUSED += " clone where iota arange cat index_select copy"


def is_one_of(names: str, node) -> bool:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "") in names.split()


def is_fused(node) -> bool:
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or is_one_of(FUSED, node)


def feeds_fused(user) -> bool:
    """Whether what this node reads needs no memory, if a fused kernel computes it."""
    if is_one_of(VIEWS, user):
        return all(map(feeds_fused, user.users))
    return user.op != "output" and (is_fused(user) or is_one_of(REDUCTIONS, user))


class Fused(torch.fx.Interpreter):
    """Runs a graph as compiled code would: what only feeds fused kernels takes no memory."""

    def __init__(self, graph: torch.fx.GraphModule, recorder: Recorder):
        super().__init__(graph)
        self.recorder = recorder
        nodes = [*graph.graph.nodes]
        self.inlined = {n for n in nodes if is_fused(n) and all(map(feeds_fused, n.users))}
        # What a fused kernel reads has to live until that kernel runs.
        position = {node: i for i, node in enumerate(nodes)}
        last_use, self.user_to_last_uses = {}, defaultdict(list)
        for node in reversed(nodes):
            through = [
                last_use[user] if user in self.inlined or is_one_of(VIEWS, user) else user
                for user in node.users
            ]
            last_use[node] = max(through, key=position.get, default=node)
            if node.op != "output":
                self.user_to_last_uses[last_use[node]].append(node)

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


def compile_backend(recorder: Recorder):
    """torch.compile's, up to the point where it would generate code."""

    def compiler(graph, inputs):
        fused = Fused(graph, recorder)

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
        autocast = torch.is_autocast_enabled("cpu")
        if function is torch.nn.functional.scaled_dot_product_attention:
            # FlashAttention drops out without a mask to keep, the CPU's kernel cannot.
            kwargs = kwargs | {"dropout_p": 0.0}
            # In fp32 there is no kernel for grouped queries that does without the whole matrix.
            query = args[0] if args else kwargs["query"]
            if query.dtype == torch.float32 and not autocast and kwargs.get("enable_gqa"):
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    return function(*args, **kwargs)
        elif autocast and getattr(function, "__name__", "") in self.IN_FP32:
            halves = (torch.bfloat16, torch.float16)
            args = [x.float() if getattr(x, "dtype", None) in halves else x for x in args]
        return function(*args, **kwargs)


def trace(config, flags, batch: int, autocast: bool, layers=None, ranks: int = 1) -> dict:
    """Allocations of a forward and a backward pass, for each segment of them, in bytes.

    `layers` are the numbers of those to keep, None keeps all; `ranks` split each layer.
    """
    on_gpu, dtype = flags.device == "cuda", flags.dtype
    model = build(config, ranks)
    head = len(layers_of(model))
    for i in reversed(range(head)):
        if layers is not None and i not in layers:
            del layer_list(model)[i]
    if flags.activation_checkpointing:
        options = {"use_reentrant": False}  # the default
        if on_gpu and not flags.compile:  # the backward pass would not know of it
            options["context_fn"] = lambda: (nullcontext(), AsOnGPU())
        model.activation_checkpointing_enable(options)
    precision = torch.float32 if dtype == "fp32" else torch.bfloat16  # fp16 takes as much
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        materialize(model, torch.float32 if autocast else precision)
        recorder = Recorder(model, head)
        numbers = dict(zip(layers_of(model), layers or range(head), strict=True))
        # Looks for position ids that restart within a row. The chapters have none: it returns None.
        packed = {"find_packed_sequence_indices": lambda *args: None}
        stack.enter_context(mock.patch.multiple(transformers.masking_utils, **packed))
        # PyTorch refuses fake tensors in fp32 there; the way around it takes as much memory.
        grouped = {"_can_use_grouped_mm": lambda inputs, weight, _: weight.dtype == torch.bfloat16}
        stack.enter_context(mock.patch.multiple(transformers.integrations.moe, **grouped))
        # Tensors that are split ask for the shapes of whole results, which are never made.
        shapes = ShardingPropagator._propagate_tensor_meta_non_cached
        unseen = {"_propagate_tensor_meta_non_cached": recorder.without(shapes)}
        stack.enter_context(mock.patch.multiple(ShardingPropagator, **unseen))
        call = marked(GradientCheckpointingLayer.__call__, numbers, recorder)
        stack.enter_context(mock.patch.object(GradientCheckpointingLayer, "__call__", call))
        if flags.compile:
            torch._dynamo.reset()
            backend = compile_backend(recorder)
            parts = [*numbers]  # all layers, or in chapter 6 their attention and MLP
            if ranks > 1:
                parts = [part for layer in parts for part in (layer.self_attn, layer.mlp)]
            for part in parts:
                part.compile(backend=backend, dynamic=False)
            if on_gpu:
                loss_function = torch.compile(model.loss_function, backend=backend, dynamic=False)
                model.loss_function = loss_function
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(recorder.accumulated)
        ids = torch.zeros(batch, flags.seq_length, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
        if ranks > 1:  # as in chapter 6
            stack.enter_context(tp.loss_parallel())
            inputs["position_ids"] = torch.arange(flags.seq_length)[None]
        stack.enter_context(recorder)
        stack.enter_context(AsOnGPU() if on_gpu else nullcontext())
        for measured in (False, True) if flags.compile else (True,):  # the first time compiles
            recorder.on, recorder.segment = measured, ("forward", EMBEDDINGS)
            with torch.autocast("cpu", precision, enabled=autocast and dtype != "fp32"):
                loss = model(**inputs).loss
                loss = loss.full_tensor() if ranks > 1 else loss
            recorder.segment = ("backward", head)
            torch.autograd.backward(loss)  # loss.backward() would switch AsOnGPU off
            recorder.on, recorder.ended = False, measured
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
                part = torch.empty(local(old).shape, dtype=dtype)
                if isinstance(old, DTensor):
                    whole = {"shape": old.shape, "stride": old.stride(), "run_check": False}
                    part = DTensor.from_local(part, old.device_mesh, old.placements, **whole)
                new[old] = torch.nn.Parameter(part)
            module._parameters[name] = new.get(old)
        for name, old in module._buffers.items():
            if old is not None:
                module._buffers[name] = torch.empty(old.shape, dtype=old.dtype)


def marked(original, numbers: dict, recorder: Recorder):
    """The layers' `__call__`, which begins a segment with each pass, outside what is compiled."""

    def begin(*segment):
        return lambda gradient: setattr(recorder, "segment", segment)

    def call(layer, *args, **kwargs):
        if recorder.segment[0] == "backward":  # computes again for its backward pass
            return original(layer, *args, **kwargs)
        if recorder.segment[1] == EMBEDDINGS:
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(begin("backward", EMBEDDINGS))
        number = numbers[layer]
        recorder.segment = ("forward", number)
        output = original(layer, *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        first.register_hook(begin("backward", number))
        if number == max(numbers.values()):
            recorder.segment = ("forward", recorder.head)
        return output

    return call


class Traces:
    """The traces of a model with these flags, for any batch size."""

    def __init__(self, model: Model, flags):
        self.model, self.flags = model, flags
        self.layers = representatives(model.kinds)
        has_list = layer_list(build(model.config)) is not None
        self.kept = sorted(set(self.layers)) if has_list and not flags.all_layers else None
        one = partial(trace, model.config, flags, layers=self.kept, ranks=model.ranks)
        self.traced = lru_cache(one)

    @cached_property
    def split(self):
        """The traces of a rank of chapter 6."""
        return Traces(describe(self.model.config, self.flags.tensor_parallel), self.flags)

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

    def of(self, tables: dict, direction: str, place: int) -> np.ndarray:
        """The events of this segment, or of the one that stands for it."""
        is_layer = 0 <= place < len(self.layers)
        name = self.layers[place] if is_layer and self.kept is not None else place
        return tables.get((direction, name), np.zeros((0, COLUMNS)))


# -- A step with each method -----------------------------------------------------------------------


@dataclass
class Method:
    name: str
    sharded: bool = False
    buckets: bool = False  # gradients stay from step to step
    reshard: bool = True
    offload: bool = False
    chapter: int = 0  # of 5 to 7, whose flags say how many devices make a group
    flag: str = ""

    def copy_ranks(self, devices: int, flags) -> int:
        """How many of the devices hold a copy of the weights together, or of their part of them."""
        if not self.sharded:
            return 1
        group = getattr(flags, self.flag) if self.flag else 1
        return group if self.chapter == 5 else devices // group


METHODS = [
    Method("chapter 1"),
    Method("DDP", buckets=True),
    Method("FSDP", sharded=True),
    Method("no reshard", sharded=True, reshard=False),
    Method("offload", sharded=True, offload=True),
    Method("HSDP", sharded=True, chapter=5, flag="shard_size"),
    Method("tensor parallel", sharded=True, chapter=6, flag="tensor_parallel"),
    Method("pipeline", sharded=True, reshard=False, chapter=7, flag="pipeline_parallel"),
]
METHODS = {method.name: method for method in METHODS}


def methods(devices: int, flags) -> list[Method]:
    """Those of chapters 1 to 3, and of chapters 5 to 7 if the flag of each divides the devices."""
    groups = {method.name: getattr(flags, method.flag, 1) for method in METHODS.values()}
    return [METHODS[name] for name, group in groups.items() if group and devices % group == 0]


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


def moment(name: str, *sizes: float) -> Moment:
    return Moment(name, dict(zip(PARTS, map(float, sizes), strict=True)))


def states(traces: Traces, method: Method, devices: int, flags) -> dict[str, int]:
    """Bytes that a rank keeps from step to step, or under DDP and FSDP at least its optimizer."""
    if method.chapter == 7:
        ranks = [stages.states for stages in pipeline(traces, devices, flags.batch_size, flags)]
        return {name: max(sizes[name] for sizes in ranks) for name in ranks[0]}
    model = traces.split.model if method.chapter == 6 else traces.model
    count = shard_numel(model.parameters, method.copy_ranks(devices, flags))
    steps = 4 * len(model.parameters)  # AdamW counts the steps of each tensor
    return {"weights": 4 * count, "gradients": 4 * count, "moments": 8 * count + steps}


class Sharding:
    """What FSDP adds to a step on this many devices, in bytes: gathered weights, buffers, shards.

    As PyTorch 2.13 does it: a layer is gathered into a buffer, and from there copied to its
    parameters. In the forward pass the buffer stays until the next layer is there, in the backward
    pass the next one is gathered ahead. Gradients are copied to a buffer in fp32 and scattered from
    there; it stays until the next one is needed. On one device there are only copies.

    All lists have an entry for each layer, and then one for the root, whose place is `EMBEDDINGS`.
    """

    def __init__(self, model: Model, method: Method, devices: int, flags):
        size, groups = BYTES[flags.dtype], [*model.layers, model.root]
        padded = [devices * shard_numel(shapes, devices) for shapes in groups]
        self.layers, self.reshard = len(model.layers), method.reshard
        self.whole = [size * numel(shapes) for shapes in groups]
        self.buffer = [size * count * (devices > 1) for count in padded]
        self.scatter = [4 * count for count in padded]
        self.shard = [4 * count // devices for count in padded]
        # Gathered once for all micro-batches of a step, along with whole gradients in fp32
        self.stays = flags.gradient_accumulation_steps > 1 and not method.reshard
        self.whole_gradients = [4 * numel(shapes) if self.stays else 0 for shapes in groups]

    def gathered(self, direction: str, place: int) -> float:
        layers, root = self.whole[:-1], self.whole[EMBEDDINGS]
        here = layers[place] if 0 <= place < self.layers else 0
        if direction == "forward" and self.stays:
            return root + sum(layers)
        if direction == "forward":
            before = 0 if self.reshard else sum(layers[: max(place, 0)])
            return root + before + here + self.buffer[min(place, self.layers - 1)]
        if not self.reshard:
            return root + sum(layers[: place + 1])
        return root + here + (self.buffer[place - 1] if place > 0 else 0)

    def scattering(self, direction: str, place: int) -> float:
        """The buffer of the layer before, which is still on its way."""
        behind = direction == "backward" and place < self.layers - 1
        return self.scatter[place + 1] if behind else 0


def course(traces: Traces, method: Method, devices: int, batch: int, flags) -> list[Moment]:
    """The fullest moment of each segment of a step, the last one if gradients accumulate."""
    if method.chapter == 7:  # of the fullest rank
        ranks = [stages.course() for stages in pipeline(traces, devices, batch, flags)]
        return max(ranks, key=lambda moments: max(moment.total for moment in moments))
    kept = states(traces, method, devices, flags)
    traces = traces.split if method.chapter == 6 else traces
    model = traces.model
    tables = traces(batch, autocast=not method.sharded)
    here = 0 if method.offload and flags.device == "cuda" else 1  # else it is the same memory
    accumulates = flags.gradient_accumulation_steps > 1
    sharding = Sharding(model, method, method.copy_ranks(devices, flags), flags)
    # FSDP adds up others than fp32 ones in fp32 when a layer is done.
    in_place = sharding.stays and flags.dtype == "fp32"
    there_before = in_place if method.sharded else method.buckets or accumulates
    column = NEW if there_before else GRADIENTS
    head = len(model.layers)
    moments, now = [], np.zeros(COLUMNS)
    shards = sum(sharding.shard) if accumulates and not sharding.stays else 0

    def note(name: str, row, gradients: float, copies: float) -> None:
        fixed = [here * kept["weights"], gradients, here * kept["moments"]]
        moments.append(moment(name, *fixed, copies, row[ACTIVATIONS], row[LOGITS]))

    order = [("forward", place) for place in range(EMBEDDINGS, head + 1)]
    order += [("backward", place) for place in range(head, EMBEDDINGS - 1, -1)]
    for direction, place in order:
        name = title(direction, place, head)
        rows = now + np.vstack([0 * now, traces.of(tables, direction, place).cumsum(axis=0)])
        fullest = rows[rows[:, [ACTIVATIONS, COPIES, LOGITS, column]].sum(axis=1).argmax()]
        now = rows[-1].copy()
        if not method.sharded:
            held = kept["gradients"] if there_before else 0
            note(name, fullest, held + fullest[column], fullest[COPIES])
            continue
        others = here * shards + sum(sharding.whole_gradients)
        copies = sharding.gathered(direction, place)
        scattering = sharding.scattering(direction, place)
        note(name, fullest, others + scattering + fullest[column], copies)
        if direction == "backward" and place < head:
            # Its gradients, whole, to the buffer; then they are freed.
            now[column] = 0 if place == EMBEDDINGS else rows[0][column]
            others += sharding.scatter[place] + now[column]
            if not sharding.stays:  # else they are in there already
                others += max(rows[-1][column] - now[column], sharding.shard[place])
            copies = 0 if place == EMBEDDINGS else copies - sharding.whole[place]
            note(f"{name}, scatter", rows[-1], others, copies)
            sharding.whole_gradients[place] = 0
            if sharding.stays or not accumulates:
                shards += sharding.shard[place]
    note("update", np.zeros(COLUMNS), here * kept["gradients"], 0)
    return moments


def stage_count(flags) -> int:
    return flags.pipeline_parallel * (2 if flags.schedule == "interleaved" else 1)


def micro_batches(flags) -> int:
    """At least as many as stages, which is the default of chapter 7."""
    return max(flags.gradient_accumulation_steps, stage_count(flags))


@lru_cache
def passes(schedule: str, ranks: int, micro_batches: int, stages: int) -> list[list[tuple]]:
    """For each rank the stages that it computes, one after the other, and in which direction."""
    schedule = chapter("07-pipeline-parallel")["SCHEDULES"][schedule]
    directions = {"F": "forward", "B": "backward"}
    return [
        [(x[0], directions[x[1].value]) for x in actions if x and x[1].value in directions]
        for actions in get_schedule_ops(schedule, ranks, micro_batches, stages)
    ]


class Stages:
    """What a rank of chapter 7's pipeline has, in bytes: its stages, sharded among the pipelines.

    Weights stay gathered during a step, and gradients whole and in fp32. They are scattered at the
    end of the step.
    """

    def __init__(self, traces: Traces, rank: int, devices: int, batch: int, flags):
        model, self.flags, self.traces = traces.model, flags, traces
        self.head, self.size = len(model.layers), BYTES[flags.dtype]
        ranks, count = flags.pipeline_parallel, stage_count(flags)
        # As in chapter 7: embeddings and head count as a layer each.
        cuts = [round(n * (self.head + 2) / count) - 1 for n in range(count + 1)]
        self.places = {n: range(*cuts[n : n + 2]) for n in range(rank, count, ranks)}
        # A head that is tied to the embeddings is a copy, which AdamW does not update.
        embeddings, norm, *behind = model.root
        copy = [] if behind or count == 1 else [embeddings]
        groups = dict(enumerate(model.layers)) | {EMBEDDINGS: [embeddings]}
        groups |= {self.head: [norm, *behind, *copy]}
        self.groups = {place: groups[place] for n in self.places for place in self.places[n]}
        self.shards = devices // ranks
        self.tables = traces(batch, autocast=False)
        shapes = [*chain(*self.groups.values())]
        self.weights = 4 * shard_numel(shapes, self.shards)
        for shape in copy if self.head in self.groups else ():
            shapes.remove(shape)
        shard = shard_numel(shapes, self.shards)
        self.states = {"weights": 4 * shard, "gradients": 4 * shard}
        self.states |= {"moments": 8 * shard + 4 * len(shapes)}
        # Each micro-batch has buffers for what neighbours send, and token ids, twice. The gradient
        # that this rank has sent last is kept, too.
        tokens, many = batch * flags.seq_length, micro_batches(flags)
        ends = sum((n > 0) + (n < count - 1) for n in self.places)
        sent = many * ends + any(n > 0 for n in self.places)
        self.buffers = tokens * (sent * model.config.hidden_size * self.size + many * 2 * 8)
        self.passes = passes(flags.schedule, ranks, micro_batches(flags), count // ranks)[rank]

    def rows(self, direction: str, stage: int, place: int) -> np.ndarray:
        """The sums of a segment's events. What other stages have sent stays in its buffer."""
        rows = self.traces.of(self.tables, direction, place).cumsum(axis=0)
        first, last = self.places[stage][0], self.places[stage][-1]
        rows[:, ACTIVATIONS] += rows[:, EARLIER] if place == first else 0
        rows[:, ACTIVATIONS] += rows[:, LATER] if place == last else 0
        return np.vstack([np.zeros(COLUMNS), rows])

    def course(self) -> list[Moment]:
        """The fullest moment of each segment, of all micro-batches."""
        moments, in_flight = {}, {stage: [] for stage in self.places}
        gradients = dict.fromkeys(self.groups, 0)
        whole = {place: numel(shapes) for place, shapes in self.groups.items()}
        copies = self.size * sum(whole.values())

        def note(name: str, row, gradients: float, copies: float) -> None:
            fixed = [self.weights, gradients, self.states["moments"]]
            activations = row[ACTIVATIONS] + self.buffers
            new = moment(name, *fixed, copies, activations, row[LOGITS])
            moments[name] = max(new, moments.get(name, new), key=lambda moment: moment.total)

        for stage, direction in self.passes:  # first in, first out
            now = np.zeros(COLUMNS) if direction == "forward" else in_flight[stage].pop(0)
            others = sum(chain(*in_flight.values()), np.zeros(COLUMNS))
            for place in self.places[stage][:: 1 if direction == "forward" else -1]:
                rows = now + self.rows(direction, stage, place)
                added = gradients[place] and self.flags.dtype == "fp32"  # in place
                column = NEW if added else GRADIENTS
                fullest = rows[rows[:, [ACTIVATIONS, LOGITS, column]].sum(axis=1).argmax()]
                held = sum(gradients.values()) + fullest[column]
                note(title(direction, place, self.head), others + fullest, held, copies)
                now = rows[-1].copy()
                if direction == "backward":
                    now[[GRADIENTS, NEW]], gradients[place] = 0, 4 * whole[place]
            if direction == "forward":
                in_flight[stage].append(now)
        scattered = 0  # shards of gradients; FSDP begins with what is in no layer
        for place in sorted(self.groups, key=lambda place: 0 <= place < self.head):
            copies -= self.size * whole[place]
            shard = 4 * shard_numel(self.groups[place], self.shards)
            buffer, before = self.shards * shard, sum(gradients.values())
            gradients[place] = 0
            held = scattered + buffer + max(before, sum(gradients.values()) + shard)
            name = f"{title('backward', place, self.head)}, scatter"
            note(name, np.zeros(COLUMNS), held, copies)
            scattered += shard
        note("update", np.zeros(COLUMNS), scattered, 0)
        return [*moments.values()]


def pipeline(traces: Traces, devices: int, batch: int, flags) -> list[Stages]:
    """All ranks of a pipeline."""
    return [Stages(traces, rank, devices, batch, flags) for rank in range(flags.pipeline_parallel)]


def title(direction: str, place: int, layers: int) -> str:
    if place == layers:
        return "loss" if direction == "forward" else "loss, backward"
    return f"{direction}, {'embeddings' if place == EMBEDDINGS else f'layer {place + 1}'}"


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
    def fits(batch: int) -> bool:
        moments = course(traces, method, devices, batch, flags)
        return max(moment.total for moment in moments) <= flags.gpu_memory * 1e9 * (1 - SPARE)

    # The largest batch that fits: doubling, then halving the steps.
    fitting, step = 0, 1
    while fitting + step < 2**20 and fits(fitting + step):
        fitting, step = fitting + step, 2 * step
    while step > 1:
        step //= 2
        fitting += step if fits(fitting + step) else 0
    kept = states(traces, method, devices, flags)
    moments = course(traces, method, devices, flags.batch_size, flags)
    cpu_memory = sum(kept.values()) if method.offload and flags.device == "cuda" else 0
    fits_now = fits(flags.batch_size)
    return Estimate(method.name, devices, kept, moments, fits_now, fitting, cpu_memory)


# -- Output ----------------------------------------------------------------------------------------


def gb(size: float, digits: int = 3) -> str:
    return f"{size / 1e9:.{digits}f}"


def digits_for(largest: float) -> int:
    return 1 if largest >= 10e9 else 2 if largest >= 1e9 else 4


def markdown(rows: list[list[str]]) -> str:
    """A table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines += [f"| {' | '.join([first.ljust(widths[0]), *cells])} |"]
    return "\n".join(lines)


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
    for method in METHODS.values():
        if method.flag and getattr(flags, method.flag):
            flag = f"--{method.flag.replace('_', '-')} {getattr(flags, method.flag)}"
            lines += [f"- {method.name}: chapter {method.chapter} with {flag}"]
    if flags.pipeline_parallel:
        many = f"{micro_batches(flags)} micro-batches"
        lines[-1] += f", {flags.schedule} and {many}; the fullest rank"
    return "\n".join(lines)


def explanation(traces: Traces, estimates: list[Estimate], flags) -> str:
    """The arithmetic, with the numbers of this model."""
    model = traces.model
    count, root, tensors = numel(model.parameters), numel(model.root), len(model.parameters)
    layers, size = [numel(layer) for layer in model.layers], BYTES[flags.dtype]
    most = max(estimate.devices for estimate in estimates)
    part, largest = shard_numel(model.parameters, most), max(layers, default=0)
    sizes = " + ".join(f"{layers.count(x)} × {x:,}" for x in dict.fromkeys(layers))
    lines = [
        "Where the figures come from",
        "",
        f"Parameters: {sizes} in layers + {root:,} in the root (embeddings, last norm, head; tied "
        f"ones once) = {count:,}, in {tensors} tensors.",
        f"States: 4 × {count:,} for weights, as much for gradients, 2 × 4 × {count:,} + 4 × "
        f"{tensors} for moments: {gb(16 * count)} GB.",
        f"Shards on {most}: {part:,} parameters on the fullest rank (of each tensor, 1/{most} of "
        f"the rows, rounded up), {gb(16 * part)} GB.",
        f"Gathered by FSDP: {size} bytes × ({root:,} in the root + 2 × {largest:,} in two layers) "
        f"= {gb(size * (root + 2 * largest))} GB; on one device one layer.",
    ]
    for autocast, whose in ((True, "Chapters 1 and 2"), (False, "Chapter 3")):
        tables = traces(flags.batch_size, autocast)

        def sums(direction, place, *columns, tables=tables):
            """Bytes after each event of a segment, from 0."""
            rows = traces.of(tables, direction, place)[:, columns]
            return [0, *np.cumsum(rows.sum(axis=1))]

        forward = sums("forward", len(layers) // 2, ACTIVATIONS, COPIES)
        backward = sums("backward", len(layers) // 2, ACTIVATIONS, COPIES, NEW)
        head = sums("forward", len(layers), LOGITS)
        lines += [
            f"{whose}, traced: a layer takes up to {gb(max(forward))} GB while it computes, keeps "
            f"{gb(forward[-1])} GB, and takes up to {gb(max(backward))} GB more in its backward "
            f"pass. The head takes up to {gb(max(head))} GB and keeps {gb(head[-1])} GB."
        ]
    for estimate in (estimate for estimate in estimates if estimate.devices == most):
        digits = digits_for(estimate.fullest.total)
        lines += ["", f"{estimate.method} on {estimate.devices}, GB in the course of a step:", ""]
        rows = [["moment", *PARTS, "together"]]
        for moment in shown(estimate, len(layers)):
            sizes = [*moment.parts.values(), moment.total]
            rows += [[moment.name, *(gb(size, digits) for size in sizes)]]
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
    result = {"flags": vars(flags), "parameters": numel(model.parameters)}
    result |= {"layers": len(model.layers), "estimates": []}
    for one in estimates:
        values = {"devices": one.devices, "method": one.method, "states": one.states}
        values |= {"parts": one.fullest.parts, "total": one.fullest.total}
        values |= {"fullest_moment": one.fullest.name, "fits": one.fits}
        values |= {"largest_batch": one.largest_batch, "cpu_memory": one.cpu_memory}
        values |= {"moments": {moment.name: moment.total for moment in one.moments}}
        result["estimates"] += [values]
    return json.dumps(result, indent=2)


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
    add("--shard-size", type=positive, help="also HSDP, chapter 5: GPUs that share a copy")
    add("--tensor-parallel", type=positive, help="also chapter 6: GPUs that split each layer")
    add("--pipeline-parallel", type=positive, help="also chapter 7: GPUs of a pipeline")
    add("--schedule", choices=["1f1b", "gpipe", "interleaved"], default="1f1b", help="of chapter 7")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="whose rules of computing")
    add("--dtype", choices=BYTES, help="compute precision [bf16 for cuda, fp32 for cpu]")
    add("--activation-checkpointing", action="store_true", help="less memory, more compute")
    add("--compile", action=switch, help="[on for cuda, off for cpu]")
    add("--json", action="store_true", help="all figures in bytes, for programs")
    add("--explain", action="store_true", help="the arithmetic, with this model's numbers")
    every = "trace each layer, slower, to check the short way"
    add("--all-layers", action="store_true", help=every)
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


def check_groups(config, counts: list[int], args) -> None:
    """Refuses what chapters 5 to 7 would refuse."""
    for flag in (method.flag for method in METHODS.values() if method.flag):
        size = getattr(args, flag) or 1
        if all(count % size for count in counts):
            fail(f"--{flag.replace('_', '-')} {size} divides none of --devices")
    if args.tensor_parallel:
        chapter("06-tensor-parallel")["check_plan"](config, args)
    if args.pipeline_parallel:
        families, count = chapter("07-pipeline-parallel")["FAMILIES"], stage_count(args)
        if config.model_type not in families:
            fail(f"{config.model_type} is not among {', '.join(families)}: chapter 7 lacks it")
        if config.num_hidden_layers < count:
            fail(f"{config.num_hidden_layers} layers cannot make {count} stages")


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable()  # of PyTorch, whose errors come with a sentence of ours
    config, name = load_config(args.model_name), args.model_name
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and args.seq_length > positions:
        fail(f"--seq-length {args.seq_length} is more than the {positions} positions of {name}")
    try:
        model = describe(config)
    except Exception as error:
        fail(f"cannot build a causal LM from {name}: {first_line(error)}")
    counts = [*dict.fromkeys(args.devices)]
    check_groups(config, counts, args)
    try:
        traces = Traces(model, args)
        estimates = [
            estimate(traces, method, devices, args)
            for devices in counts
            for method in methods(devices, args)
        ]
    except Exception as error:
        remedy = ", try --no-compile" if args.compile else ""
        fail(f"cannot trace a step of {name}{remedy}: {first_line(error)}")
    if args.json:
        print(as_json(model, estimates, args))
        return
    print(headline(model, args))
    for devices in counts:
        print(f"\n{devices} device{'s' if devices > 1 else ''}\n")
        print(table([x for x in estimates if x.devices == devices], args))
    print("\n" + legend(args))
    if args.explain:
        print("\n" + explanation(traces, estimates, args))


if __name__ == "__main__":
    main()
