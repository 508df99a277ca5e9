"""Estimates the memory of a training step: which chapter, how many devices, which batch.

    python tools/estimate-memory.py --devices 1 2 4 8 --gpu-memory 80
    python tools/estimate-memory.py -m my-model/config.json -b 4 -s 2048 --explain
    python tools/estimate-memory.py --devices 32 --shard-size 8 --tensor-parallel 8
    python tools/estimate-memory.py -m my-model --devices 8 --context-parallel 8 -b 1 -s 131072
    python tools/estimate-memory.py -m my-model --devices 2 --gpu-memory 24 --lora-rank 16 -b 1

Only the config of the model is needed, and no GPU. tools/models.json has those of some models. A
forward and a backward pass run on fake tensors, which have shapes and no memory, with the settings
of the chapters, and every allocation and release is noted down. Of layers of a kind one is traced,
in between others, and stands for all. What FSDP gathers and scatters is added by its rules.
Chapters 6, 11, 12, 14, 17, 20 and 22 change layers or attention. Their traces use the code of the
chapter itself, on one rank of a process group that does not exist. Pipelines follow PyTorch's order
of the passes on each rank. Each estimate is of one chapter, and none of joined chapters.

GB are 1e9 bytes. A place in the model is a number: -1 for the embeddings, 0 for the first layer,
and the number of layers for the head, which is all that comes behind the last layer. -2 stands for
the root of FSDP: the parameters that are in no other unit.
"""

import argparse
import importlib.util
import logging
import math
import sys
import warnings
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import transformers
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

sys.path.append(str(Path(__file__).resolve().parent))
from models import SPARE, check_length, fail, load_chapter, load_config, positive

aten = torch.ops.aten
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Columns of a trace. Gradients twice: those that the backward pass has made so far, and those
# among them that have not yet been added to older ones, if there are any. The last two count what
# is released here and was allocated at an earlier or at a later place.
ACTIVATIONS, COPIES, LOGITS, GRADIENTS, NEW, EARLIER, LATER = range(7)
COLUMNS = 7
EMBEDDINGS = -1
ROOT = -2


# -- The model -------------------------------------------------------------------------------------


def numel(shapes, devices: int = 1, even: bool = False) -> int:
    """Numbers on the fullest rank. FSDP cuts rows. For experts, chapter 12 chooses (`even`)."""
    total = 0
    for shape in shapes:
        cut = shape[chapter(EXPERTS)["even_shards"](shape, devices).dim if even else 0]
        total += math.prod(shape) // cut * math.ceil(cut / devices)
    return total


# Chapters that change the model of chapter 1: what each is called, and the flag of its group
PLAIN, TENSOR, CONTEXT, EXPERTS, LOW_RANK, CHAT, LORA, MUON = 1, 6, 11, 12, 14, 16, 17, 18
FLOAT8, QLORA = 20, 22
GROUPS = {TENSOR: "tensor_parallel", CONTEXT: "context_parallel", EXPERTS: "expert_parallel"}


@lru_cache
def chapter(number: int) -> dict:
    """What the script of a chapter defines. It prints nothing, except errors."""
    module = load_chapter(number)
    module.say = lambda message: None
    return vars(module)


def join_group(ranks: int) -> None:
    """Makes this process the first of so many ranks. The others do not exist."""
    if dist.is_initialized() and dist.get_world_size() != ranks:
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def build(config, flags, kind: int, mode: FakeTensorMode, dtype=torch.float32):
    """The model on fake tensors, as this chapter changes it; of several ranks, that of the first.

    `kind` is one of `PLAIN`, `TENSOR`, `CONTEXT`, `EXPERTS`, `LOW_RANK`, `CHAT`, `LORA`, `FLOAT8`,
    `QLORA`.
    """
    changes = chapter(kind) if kind != PLAIN else {}
    config = deepcopy(config)  # the model changes it, for example its implementation of experts
    with mode:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        if kind == LOW_RANK:
            changes["replace_layers"](model, flags)
        if kind in (LORA, QLORA):
            # PEFT moves adapters to the device of the model, where fake tensors already are.
            with mock.patch.object(torch.nn.Module, "to", lambda module, *_, **to: module):
                changes["add_adapters"](model, flags)
        for parameter in model.parameters():  # not the buffers
            parameter.data = parameter.data.to(dtype)
        if kind == QLORA:
            precision = SimpleNamespace(dtype="fp32" if flags.dtype == "fp32" else "bf16")
            changes["quantize_layers"](model, precision, "cpu")
        if kind == FLOAT8:
            with mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)):
                changes["use_float8"](model, torch.device(flags.device))
            for layer in layers_in_8_bits(model):
                layer.weight = torch.nn.Parameter(gathered_in_8_bits(layer, dtype))
    if kind not in GROUPS:
        return model
    ranks = getattr(flags, GROUPS[kind])
    join_group(ranks)
    if kind == TENSOR:
        plan = changes["PLANS"][config.model_type]
        mesh = dist.init_device_mesh("cpu", (ranks,))
        with mode:
            tp.parallelize_module(model, mesh, plan, src_data_rank=None)
            model.tie_weights()
    if kind == EXPERTS:
        ALL_EXPERTS_FUNCTIONS.register("expert_parallel", changes["expert_parallel"])
        model.set_experts_implementation("expert_parallel")
        for experts in changes["experts_of"](model):
            experts.group = dist.group.WORLD
            with mode:
                experts.sent_tokens = torch.zeros(experts.num_experts, dtype=torch.long)
                experts.received_tokens = torch.zeros((), dtype=torch.long)
                for parameter in experts.parameters():  # a rank has some of the experts
                    parameter.data = parameter.data[: len(parameter) // ranks].clone()
    return model


def layers_in_8_bits(model) -> list:
    kind = chapter(FLOAT8)["float8"].float8_linear.Float8Linear
    return [module for module in model.modules() if isinstance(module, kind)]


def gathered_in_8_bits(layer, dtype: torch.dtype):
    """The weight of a layer of chapter 20 as its torchao gathers it: 8-bit numbers, and a scale."""
    weight, numbers = layer.weight._tensor, chapter(FLOAT8)["float8"].float8_training_tensor
    data, scale = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.ones(())
    mm_config, role = layer.linear_mm_config, numbers.GemmInputRole.WEIGHT
    return numbers.Float8TrainingTensor(data, scale, dtype, mm_config, role)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that is split, or the numbers of one in 8 bits."""
    return getattr(tensor, "_local_tensor", getattr(tensor, "_data", tensor))


def shapes_of(parameters) -> list[tuple[int, ...]]:
    return [tuple(local(parameter).shape) for parameter in parameters]


def layers_of(model) -> torch.nn.ModuleList:
    """The list with the decoder layers."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return next(one for one in lists if isinstance(one[0], GradientCheckpointingLayer))


def outer_of(model) -> list:
    """The parameters that are in no layer: embeddings, the last norm, the head."""
    inner = {parameter for layer in layers_of(model) for parameter in layer.parameters()}
    return [parameter for parameter in model.parameters() if parameter not in inner]


def units_of(model) -> dict[int, list]:
    """By place, the parameters that FSDP gathers together in chapter 3."""
    layers = layers_of(model)
    units = {place: [*layer.parameters()] for place, layer in enumerate(layers)}
    if not model.all_tied_weights_keys:
        units[EMBEDDINGS] = [*model.get_input_embeddings().parameters()]
        units[len(layers)] = [*model.get_output_embeddings().parameters()]
    inner = set(chain(*units.values()))
    units[ROOT] = [parameter for parameter in model.parameters() if parameter not in inner]
    return units


# -- The trace -------------------------------------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage()._cdata


class Recorder(TorchDispatchMode):
    """Notes down what operations allocate and when it is released, segment by segment of a step.

    Segments are ("forward", place) and ("backward", place), and None after the step.
    """

    supports_higher_order_operators = True

    def __init__(self, model, examples: list[int]):
        super().__init__()
        # FSDP gathers 8-bit weights. What an emulated product makes of them is no such copy.
        # Nor is what chapter 22 computes from its codes.
        weights = [
            p for p in model.parameters() if not hasattr(p, "_scale") and p.is_floating_point()
        ]
        self.weights = {storage_key(p) for p in weights}
        self.alive = {storage_key(x): None for x in [*model.parameters(), *model.buffers()]}
        self.outer_shapes = [*map(set, shapes_of(outer_of(model)))]
        self.segments, self.segment = defaultdict(list), None
        self.head, self.on = len(examples), False
        self.times = Counter([EMBEDDINGS, *examples, self.head])  # how many each stands for

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
        source_key = storage_key(source) if isinstance(source, torch.Tensor) else None
        made_of, allocation = self.alive.get(source_key), None
        is_cast, of_gradient = op is aten._to_copy.default, made_of and made_of.column == GRADIENTS
        if of_gradient and op is aten.add.Tensor and made_of.is_cast:
            # Autograd adds up the two gradients of tied weights in the first of them, if nothing
            # else refers to it, which is so for what autocast has cast; with fake tensors never.
            allocation, self.alive[source_key] = made_of, None
        elif self.on:
            place = self.segment[1]
            column = LOGITS if place == self.head else ACTIVATIONS
            # Of tied weights: the gradient from the head waits for that from the embeddings.
            weight_like = op is aten.mm.default and set(tensor.shape) in self.outer_shapes
            if weight_like or (is_cast and of_gradient):
                column = GRADIENTS
            if source_key in self.weights and source.numel() == tensor.numel():
                column = COPIES
            sizes = {"bytes": storage.nbytes(), "column": column}
            allocation = SimpleNamespace(**sizes, place=place, is_cast=is_cast)
            self.note(allocation, 1)
        self.alive[key] = allocation
        weakref.finalize(storage, self.release, key).atexit = False

    def note(self, allocation: SimpleNamespace | None, sign: int) -> None:
        if allocation:
            self.segments[self.segment].append((allocation, sign))

    def release(self, key: int) -> None:
        self.note(self.alive.pop(key), -1)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """The gradient of this parameter is complete, and has become its `.grad`."""
        allocation = self.alive.get(storage_key(parameter.grad))
        if allocation:
            allocation.column = GRADIENTS
            self.note(allocation, 0)

    def table(self) -> dict[tuple, np.ndarray]:
        """For each segment the bytes that are added, a row per event, in the columns above."""
        self.segments.pop(None, None)
        tables = {}
        for segment, events in self.segments.items():
            tables[segment], place = np.zeros((len(events), COLUMNS)), segment[1]
            for row, (allocation, sign) in zip(tables[segment], events, strict=True):
                size = allocation.bytes
                if allocation.column == COPIES and place == self.head:
                    size *= self.times[allocation.place]  # autocast releases all of them here
                row[allocation.column] = sign * size
                if allocation.column == GRADIENTS:
                    row[NEW] = (sign or -1) * size
                elif sign < 0 and allocation.place != place:
                    row[EARLIER if allocation.place < place else LATER] = size
        return tables


# Compiled code computes these within other kernels, too, though they are not tagged as pointwise.
FUSED = "full full_like scalar_tensor scatter slice_scatter copy constant_pad_nd iota arange cat"
FUSED += " index_select gather"


def is_view(node) -> bool:
    return node.target is aten._unsafe_view.default or getattr(node.target, "is_view", False)


def is_fused(node) -> bool:
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in FUSED.split()


def feeds_fused(user) -> bool:
    """Whether what this node reads needs no memory, if a fused kernel computes it."""
    if is_view(user):
        return all(map(feeds_fused, user.users))
    return is_fused(user) or torch.Tag.reduction in getattr(user.target, "tags", ())


class Fused(torch.fx.Interpreter):
    """Runs a graph as compiled code would: what only feeds fused kernels takes no memory."""

    def __init__(self, recorder: Recorder, graph: torch.fx.GraphModule, inputs):
        super().__init__(graph)
        self.recorder = recorder
        self._boxed_call = True  # for torch.compile: takes a list of arguments, and empties it
        nodes = [*graph.graph.nodes]
        self.inlined = {n for n in nodes if is_fused(n) and all(map(feeds_fused, n.users))}
        # What a fused kernel reads has to live until that kernel runs.
        position = {node: i for i, node in enumerate(nodes)}
        last_use, self.user_to_last_uses = {}, defaultdict(list)
        for node in reversed(nodes):
            through = [
                last_use[user] if user in self.inlined or is_view(user) else user
                for user in node.users
            ]
            last_use[node] = max(through, key=position.get, default=node)
            if node.op != "output":
                self.user_to_last_uses[last_use[node]].append(node)

    def __call__(self, arguments: list):
        results = self.boxed_run(arguments)
        self.env = {}
        return results

    def run_node(self, node):
        on = self.recorder.on and node not in self.inlined
        with mock.patch.object(self.recorder, "on", on):
            return super().run_node(node)

    def call_function(self, target, args, kwargs):
        # Attention that is to be computed again draws the same random numbers again, if any.
        if target is torch.ops.higher_order.run_and_save_rng_state:
            return torch.empty(0), args[0](*args[1:], **kwargs)
        if target is torch.ops.higher_order.run_with_rng_state:
            return args[1](*args[2:], **kwargs)
        return super().call_function(target, args, kwargs)


class AsOnGPU(TorchFunctionMode):
    """Where GPUs compute in other types than the CPU, or with other kernels, so does this."""

    # Of autocast's list for CUDA, what language models use. Source:
    # https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32
    IN_FP32 = "pow exp log rsqrt reciprocal softmax log_softmax softplus layer_norm group_norm norm"
    IN_FP32 += " normalize sum prod cumsum cumprod cross_entropy nll_loss __pow__ __rpow__"
    IN_FP32 += " __rdiv__ __rtruediv__"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        autocast = torch.is_autocast_enabled("cpu")
        if function is torch.nn.functional.scaled_dot_product_attention:
            # FlashAttention drops out without a mask to keep, the CPU's kernel cannot.
            kwargs = kwargs | {"dropout_p": 0.0}
            # It also knows masks that are aligned at the last token. The CPU writes them out.
            if isinstance(kwargs.get("attn_mask"), CausalBias):
                kwargs |= {"attn_mask": None, "is_causal": True}
            # In fp32 there is no kernel for grouped queries that does without the whole matrix.
            query = args[0] if args else kwargs["query"]
            if query.dtype == torch.float32 and not autocast and kwargs.get("enable_gqa"):
                with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                    return function(*args, **kwargs)
        elif autocast and getattr(function, "__name__", "") in self.IN_FP32.split():
            halves = (torch.bfloat16, torch.float16)
            args = [x.float() if getattr(x, "dtype", None) in halves else x for x in args]
        return function(*args, **kwargs)


class Balanced(TorchFunctionMode):
    """Gives each rank of chapter 12 equally many tokens: fake tensors have no numbers to count."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name == "scatter_add_":  # counts the experts that the tokens have chosen
            self.copies = len(args[2])
        if name == "repeat_interleave":  # for each copy that arrives, the number of its expert
            return args[0].new_zeros(self.copies)
        return function(*args, **kwargs or {})

    def method(self):
        """Stands in for `FakeTensor.tolist`: how many copies of tokens each rank sends and gets."""

        def tolist(counts: FakeTensor) -> list[list[int]]:
            directions, ranks = counts.shape
            each, more = divmod(self.copies, ranks)
            return directions * [[each + (rank < more) for rank in range(ranks)]]

        return tolist


def trace(config, flags, batch: int, autocast: bool, examples: list[int], kind: int) -> dict:
    """Allocations of a forward and a backward pass, for each segment of them, in bytes.

    `examples` has for each layer the one that stands for it; `kind` is that of `build`.
    """
    on_gpu, mode = flags.device == "cuda", FakeTensorMode()
    precision = torch.float32 if flags.dtype == "fp32" else torch.bfloat16  # fp16 takes as much
    model = build(config, flags, kind, mode, torch.float32 if autocast else precision)
    balanced = Balanced()
    rules = [AsOnGPU()] * on_gpu + [balanced] * (kind == EXPERTS)
    every, layers, head = layers_of(model), sorted({*examples}), len(examples)
    for i in sorted({*range(head)} - {*layers}, reverse=True):
        del every[i]
    numbers = dict(zip(layers_of(model), layers, strict=True))
    if flags.activation_checkpointing:
        options = {"use_reentrant": False}  # the default
        # The backward pass would not know of these rules. Compiled code has followed them before.
        if kind == EXPERTS or not flags.compile:
            options["context_fn"] = lambda: (nullcontext(), together(rules))
        model.activation_checkpointing_enable(options)
    with ExitStack() as stack:
        if kind == CONTEXT:  # replaces functions that all models look up by their names
            for interface in (AttentionInterface, AttentionMaskInterface):
                stack.enter_context(mock.patch.dict(interface._global_mapping))
            chapter(kind)["share_attention"](model, flags)
        stack.enter_context(mode)
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        recorder = Recorder(model, examples)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(recorder.accumulated)
        # Tensors that are split ask for the shapes of whole results, which are never made.
        sharding = "torch.distributed.tensor._sharding_prop.ShardingPropagator"
        shapes = ShardingPropagator._propagate_tensor_meta_non_cached
        unseen = mock.patch.object(recorder, "on", False)(shapes)
        call = marked(numbers, recorder)
        patches = {
            f"{sharding}._propagate_tensor_meta_non_cached": unseen,
            # Looks for position ids that restart within a row. Only packed conversations have some.
            "transformers.masking_utils.find_packed_sequence_indices": (
                lambda ids: (ids == 0).cumsum(-1) if kind in (CHAT, LORA, QLORA) else None
            ),
            # PyTorch refuses fake tensors in fp32 there; the way around it takes as much memory.
            "transformers.integrations.moe._can_use_grouped_mm": lambda x, w, _: w.itemsize == 2,
            "transformers.modeling_layers.GradientCheckpointingLayer.__call__": call,
        }
        for name, new in patches.items():
            stack.enter_context(mock.patch(name, new))
        if flags.compile:
            torch._dynamo.reset()
            # torch.compile, up to the point where it would generate code
            backend = aot_autograd(
                fw_compiler=partial(Fused, recorder),
                bw_compiler=partial(Fused, recorder),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=select_decomp_table,
            )
            for part in compiled_parts(numbers, kind):
                part.compile(backend=backend, dynamic=False)
            loss_function = torch.compile(model.loss_function, backend=backend, dynamic=False)
            model.loss_function = loss_function
        if flags.chunked_loss:
            chapter(19)["use_chunked_loss"](model)
        ids = torch.zeros(batch, flags.seq_length, dtype=torch.int64)
        if kind == TENSOR:
            stack.enter_context(tp.loss_parallel())
        if kind == EXPERTS:
            stack.enter_context(mock.patch.object(FakeTensor, "tolist", balanced.method()))
        stack.enter_context(recorder)
        stack.enter_context(together(rules))
        for measured in (False, True) if flags.compile else (True,):  # the first time compiles
            recorder.on, recorder.segment = measured, ("forward", EMBEDDINGS)
            with torch.autocast("cpu", precision, enabled=autocast and flags.dtype != "fp32"):
                loss = loss_of(model, ids, flags, kind)
            recorder.segment = ("backward", head)
            torch.autograd.backward(loss)  # loss.backward() would switch AsOnGPU off
            recorder.on, recorder.segment = False, None
            del loss
            if not measured:
                model.zero_grad()
    return recorder.table()


def loss_of(model, ids: torch.Tensor, flags, kind: int) -> torch.Tensor:
    """The loss of a batch of whole samples, as the chapter computes it."""
    if kind == CONTEXT:
        return chapter(kind)["loss_of"](model, ids, flags)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if kind == TENSOR:
        positions = torch.arange(flags.seq_length)[None]
        return model(**inputs, position_ids=positions).loss.full_tensor()
    if kind in (CHAT, LORA, QLORA):  # packed conversations have a mask
        inputs["position_ids"] = torch.zeros_like(ids)
    return model(**inputs).loss


@contextmanager
def together(contexts: list):
    """One context for all of these, in their order."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def compiled_parts(layers, kind: int) -> list:
    """What the chapter compiles: layers, or parts of them."""
    if kind == TENSOR:
        return [part for layer in layers for part in (layer.self_attn, layer.mlp)]
    if kind == EXPERTS:
        parts = [part for layer in layers for part in layer.children()]
        return [part for part in parts if not chapter(kind)["experts_of"](part)]
    return [*layers]


def marked(numbers: dict, recorder: Recorder):
    """The layers' `__call__`, which begins a segment with each pass, outside what is compiled."""
    original = GradientCheckpointingLayer.__call__

    def begins(tensor: torch.Tensor, place: int) -> None:
        tensor.register_hook(lambda _: setattr(recorder, "segment", ("backward", place)))

    def call(layer, *args, **kwargs):
        if recorder.segment == ("forward", EMBEDDINGS):
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    begins(tensor, EMBEDDINGS)
        recorder.segment = ("forward", numbers[layer])
        output = original(layer, *args, **kwargs)
        begins(output[0] if isinstance(output, tuple) else output, numbers[layer])
        if numbers[layer] == max(numbers.values()):
            recorder.segment = ("forward", recorder.head)
        return output

    return call


class Traces:
    """A model without values, and what it allocates with these flags, for any batch size.

    `kind` is that of `build`. If a chapter splits layers or samples, all is that of one rank.
    """

    def __init__(self, config, flags, kind: int = PLAIN):
        self.config, self.flags, self.kind = config, flags, kind
        model = build(config, flags, kind, FakeTensorMode())
        layers = layers_of(model)
        self.parameters = shapes_of(model.parameters())
        self.outer = shapes_of(outer_of(model))
        units = units_of(model)
        self.units = {place: shapes_of(unit) for place, unit in units.items()}
        # In chapters 17 and 22, the other weights are frozen.
        trained = {place: [p for p in unit if p.requires_grad] for place, unit in units.items()}
        self.trained = {place: shapes_of(unit) for place, unit in trained.items()}
        self.layers = [shapes_of(layer.parameters()) for layer in layers]
        experts = chapter(EXPERTS)["experts_of"](model) if kind == EXPERTS else []
        self.expert_shapes = {*chain(*(shapes_of(part.parameters()) for part in experts))}
        supports = [x for name, x in model.named_buffers() if name.endswith(".support")]
        in_8_bits = layers_in_8_bits(model) if kind == FLOAT8 else []
        # Numbers of one byte: those of chapter 20, and in chapter 22 the two codes in each byte.
        self.shapes_of_bytes = {tuple(layer.weight.shape) for layer in in_8_bits}
        self.shapes_of_bytes |= {
            *shapes_of(p for p in model.parameters() if p.dtype == torch.uint8)
        }
        self.supports = sum(x.numel() * x.element_size() for x in supports)  # of chapter 14
        # The layer that stands for each. The first and the last one have neighbours like no other
        # and stand for themselves; of each kind in between, one does for all.
        kinds, last = [*map(repr, layers)], len(layers) - 1
        inner = {kind: i for i, kind in reversed([*enumerate(kinds)][1:last])}
        self.examples = [i if i in (0, last) else inner[kind] for i, kind in enumerate(kinds)]
        self.traced = lru_cache(lambda *how: trace(config, flags, *how, self.examples, kind))
        self.of_kind = lru_cache(lambda kind: Traces(config, flags, kind))

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

    def sums(self, tables: dict, direction: str, place: int) -> np.ndarray:
        """What a segment, or the one that stands for it, has added after each event, from 0."""
        example = self.examples[place] if 0 <= place < len(self.examples) else place
        rows = tables.get((direction, example), np.zeros((0, COLUMNS)))
        return np.vstack([np.zeros(COLUMNS), rows]).cumsum(axis=0)


# -- A step with each method -----------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    name: str
    chapter: int
    flags: tuple[str, ...] = ()  # from chapter 5 on, the column appears if all of them are given
    kind: int = PLAIN  # how the chapter changes the model, for the traces

    @property
    def sharded(self) -> bool:
        return self.chapter not in (1, 2)

    @property
    def in_pipeline(self) -> bool:
        return self.chapter in (7, 13)

    @property
    def reshard(self) -> bool:
        return self.name != "no reshard" and not self.in_pipeline

    def group(self, flags) -> int | None:
        """How many devices make a group; None if a flag is missing, 1 without groups."""
        sizes = [getattr(flags, flag.strip("-").replace("-", "_"), 1) for flag in self.flags]
        if None in sizes:
            return None
        return math.prod(sizes) if self.kind not in (LOW_RANK, CHAT, LORA, FLOAT8, QLORA) else 1

    def copy_ranks(self, devices: int, flags) -> int:
        """How many of the devices hold a copy of the weights together, or of their part of them.

        In chapter 12 this is true of the experts. The other weights are on all devices.
        """
        group = self.group(flags)
        if not self.sharded:
            return 1
        if self.chapter == 5:
            return group
        return devices if self.chapter == 11 else devices // group


METHODS = [
    Method("chapter 1", 1),
    Method("DDP", 2),
    Method("FSDP", 3),
    Method("no reshard", 3, ("--no-reshard-after-forward",)),
    Method("offload", 3, ("--cpu-offload",)),
    Method("HSDP", 5, ("--shard-size",)),
    Method("tensor parallel", 6, ("--tensor-parallel",), TENSOR),
    Method("pipeline", 7, ("--pipeline-parallel",)),
    Method("context parallel", 11, ("--context-parallel",), CONTEXT),
    Method("expert parallel", 12, ("--expert-parallel",), EXPERTS),
    Method("pipeline × tensor", 13, ("--pipeline-parallel", "--tensor-parallel"), TENSOR),
    Method("sparse low-rank", 14, ("--rank",), LOW_RANK),
    Method("chat", CHAT, ("--rows",), CHAT),
    Method("LoRA", 17, ("--lora-rank",), LORA),
    Method("QLoRA", 22, ("--lora-rank",), QLORA),
    Method("Muon", MUON, ("--muon",)),
    Method("8 bits", FLOAT8, ("--float8",), FLOAT8),
]
METHODS = {method.name: method for method in METHODS}
PARTS = ["weights, fp32", "gradients", "AdamW's moments", "copies of weights", "activations"]
PARTS += ["logits and loss"]


@dataclass
class Rank:
    """What a rank computes in a step: all of the model, or its stages of a pipeline."""

    groups: dict[int, list]  # by place, the shapes of what FSDP gathers together
    trained: dict[int, list]  # those among them that are not frozen
    stages: dict[int, range]  # their places
    passes: list[tuple[int, str]]  # stages and directions, in their order
    copy: list = field(default_factory=list)  # shapes of what AdamW does not update
    buffers: int = 0  # for what other ranks send, bytes per sample


def stage_count(flags) -> int:
    per_rank = flags.stages_per_rank if flags.schedule == "interleaved" else 1
    return flags.pipeline_parallel * per_rank


def ranks(traces: Traces, method: Method) -> list[Rank]:
    """All ranks of a pipeline, else one, which is like all others."""
    flags, head = traces.flags, len(traces.layers)
    if not method.in_pipeline:
        places = range(EMBEDDINGS, head + 1)
        passes = [(0, "forward"), (0, "backward")]
        return [Rank(traces.units, traces.trained, {0: places}, passes)]
    count, number = stage_count(flags), flags.pipeline_parallel
    many = max(flags.gradient_accumulation_steps, count)  # as many as stages are the default
    # As in chapters 7 and 13: embeddings and head count as a layer each.
    cuts = [round(n * (head + 2) / count) - 1 for n in range(count + 1)]
    # A head that is tied to the embeddings is a copy, which AdamW does not update.
    embeddings = traces.outer[: 2 if traces.config.model_type == "gpt2" else 1]  # also of positions
    copy = embeddings[:1] if traces.config.tie_word_embeddings and count > 1 else []
    groups = {EMBEDDINGS: embeddings, head: [*traces.outer[len(embeddings) :], *copy]}
    groups |= dict(enumerate(traces.layers))
    schedule = chapter(7)["SCHEDULES"][flags.schedule]
    # Each rank of a tensor group sends its part of the tokens.
    width = traces.config.hidden_size / (flags.tensor_parallel if method.chapter == 13 else 1)
    directions = {"F": "forward", "B": "backward"}
    result = []
    for rank, actions in enumerate(get_schedule_ops(schedule, number, many, count // number)):
        actions = [(action[0], action[1].value) for action in actions if action]
        passes = [(stage, directions[kind]) for stage, kind in actions if kind in directions]
        stages = {n: range(*cuts[n : n + 2]) for n in range(rank, count, number)}
        own = {place: groups[place] for place in chain(*stages.values())}
        # Each micro-batch has buffers for what neighbours send, and token ids, twice. The gradient
        # that this rank has sent last is kept, too.
        sent = many * sum((n > 0) + (n < count - 1) for n in stages) + any(n > 0 for n in stages)
        per_token = sent * width * BYTES[flags.dtype] + many * 2 * 8
        updates_all = [] if head not in own else copy
        result += [Rank(own, own, stages, passes, updates_all, round(flags.seq_length * per_token))]
    return result


def course(rank: Rank, traces: Traces, method: Method, devices: int, batch: int):
    """Bytes that the rank keeps from step to step, and the fullest moment of each segment.

    FSDP as in PyTorch 2.13: a unit is gathered into a buffer, and from there copied to its
    parameters. In the forward pass the buffer stays until the next unit is there, in the backward
    pass the next one is gathered ahead. The root is whole all the time. So is the head before its
    backward pass, since an evaluation leaves it whole. Embeddings that are a unit are not gathered
    for the backward pass. Gradients are copied to a buffer in fp32 and scattered from
    there; it stays until the next one is needed. On one device there are only copies. In a pipeline
    weights stay gathered during a step, and gradients whole and in fp32, until they are scattered
    at the end of the step. Of other methods this is the last micro-batch.

    In chapter 12 the experts of a layer are a unit of their own. Here they count with their layer.
    In chapter 17 frozen weights are in the compute dtype, without gradients and moments. Those of
    chapter 22 are codes and scales, which are gathered as they are.
    """
    flags, groups, head = traces.flags, rank.groups, len(traces.layers)
    shards, size = method.copy_ranks(devices, flags), BYTES[flags.dtype]
    everyone = devices if method.chapter == EXPERTS else shards
    whole, shard, buffer_size, gathered, frozen = {}, {}, {}, {}, 0
    for place, shapes in groups.items():
        parts = [shards if shape in traces.expert_shapes else everyone for shape in shapes]
        experts = [shape in traces.expert_shapes for shape in shapes]
        pairs = zip(shapes, parts, experts, strict=True)
        sizes = [4 * numel([shape], n, even) for shape, n, even in pairs]
        padded = [n * size for n, size in zip(parts, sizes, strict=True)]
        shard[place], buffer_size[place] = sum(sizes), sum(padded)
        in_layer = 0 <= place < head  # chapter 20 leaves the head as it is
        widths = [1 if in_layer and s in traces.shapes_of_bytes else size for s in shapes]
        whole[place] = sum(n * numel([s]) for n, s in zip(widths, shapes, strict=True))
        # On one device there is no buffer for what arrives.
        arrives = zip(parts, widths, padded, strict=True)
        gathered[place] = sum(width * x // 4 for n, width, x in arrives if n > 1)
        without_gradient = numel(shapes, shards) - numel(rank.trained[place], shards)
        # Codes are never trained, so the trained ones among these have the width of the others.
        bytes_of_all = sum(n * numel([s], shards) for n, s in zip(widths, shapes, strict=True))
        if without_gradient:
            frozen += bytes_of_all - size * numel(rank.trained[place], shards)
        shard[place] -= 4 * without_gradient
        buffer_size[place] -= 4 * shards * without_gradient
    all_shards = sum(shard.values())  # of what AdamW updates, and of its gradients
    updated = all_shards - 4 * numel(rank.copy, shards)
    # AdamW counts for each tensor.
    steps = 4 * (sum(map(len, rank.trained.values())) - len(rank.copy))
    states = {"weights": updated, "gradients": updated, "moments": 2 * updated + steps}
    exchanged = 0
    if method.chapter == MUON:  # a momentum in place of two moments, for the matrices of layers
        matrices = [s for place in range(head) for s in groups[place] if len(s) > 1]
        momentum = 4 * numel(matrices, everyone)
        states["moments"] -= momentum + 4 * len(matrices)  # Muon counts no steps
        exchanged = 2 * momentum * size // 4  # message and received, in the compute dtype
    here = 0 if method.name == "offload" and flags.device == "cuda" else 1  # else the same memory
    in_pipeline, accumulates = method.in_pipeline, flags.gradient_accumulation_steps > 1
    # Gathered once for all micro-batches of a step, along with whole gradients in fp32
    stays = in_pipeline or (accumulates and not method.reshard)
    whole_gradients = {place: 4 * numel(shapes) for place, shapes in rank.trained.items()}
    from_before = here * (method.name == "DDP" or (accumulates and not in_pipeline))
    gradients = whole_gradients if stays else shard
    gradients = {place: from_before * count for place, count in gradients.items()}
    untied = {ROOT, EMBEDDINGS} <= groups.keys()
    adds_in_place = not method.sharded or (stays and flags.dtype == "fp32")
    tables = traces(batch, autocast=not method.sharded)
    moments, in_flight, nothing = {}, {stage: [] for stage in rank.stages}, np.zeros(COLUMNS)

    def note(name: str, row, gradients: float, copies: float) -> None:
        weights = here * (all_shards + frozen) + traces.supports
        sizes = [weights, gradients, here * states["moments"], copies]
        sizes += [row[ACTIVATIONS] + rank.buffers * batch, row[LOGITS]]
        moments[name] = max([*map(float, sizes)], moments.get(name, [0.0]), key=sum)

    def there(forward: bool, place: int) -> set[int]:
        """The units that are whole."""
        if stays and (forward or in_pipeline):
            return {*groups}
        if not method.reshard:
            return {ROOT, *range(EMBEDDINGS, place + 1), head if forward else place} & {*groups}
        return {ROOT, *((place, head) if forward else {place} - {EMBEDDINGS})} & {*groups}

    def arriving(forward: bool, place: int) -> int:
        """The buffer into which a unit is gathered."""
        if stays or not (forward or (method.reshard and place > 0)):
            return 0
        before = place if forward else place - 1
        return gathered[max(unit for unit in groups if unit <= before)]

    def scatter(unit: int, place: int, row, copies: float, left: float, new: float) -> None:
        """Notes the moment when gradients are in the buffer, and others are left for later."""
        # PyTorch frees the gradients that are in the buffer, except the last one of the unit.
        bytes_each = 4 if stays else size
        after = shard[unit] + (bytes_each * numel(rank.trained[unit][-1:]) if gathered[unit] else 0)
        # Gradients that stay are counted already.
        more = max(after - gradients[unit], 0) if stays else max(new, after)
        held = sum(gradients.values()) + buffer_size[unit] + left + more
        name = f"{title('backward', place, head)}, scatter"
        note(name, row, held, copies)
        gradients[unit] = here * shard[unit]

    on_its_way = 0  # the buffer of the group before
    for stage, direction in rank.passes:  # first in, first out
        forward, places = direction == "forward", rank.stages[stage]
        now = nothing if forward else in_flight[stage].pop(0)
        others = sum(chain(*in_flight.values()), nothing)
        for place in places if forward else reversed(places):
            rows = traces.sums(tables, direction, place)
            # What other stages have sent stays in its buffer.
            rows[:, ACTIVATIONS] += rows[:, EARLIER] if place == places[0] else 0
            rows[:, ACTIVATIONS] += rows[:, LATER] if place == places[-1] else 0
            rows += now
            in_place = gradients.get(place, gradients.get(ROOT)) and adds_in_place
            column = NEW if in_place else GRADIENTS
            if method.sharded:
                buffer = np.full(len(rows), arriving(forward, place))
                if untied and place == head and not forward:
                    # The last layer is gathered when the backward pass of the head begins.
                    buffer[rows[:, GRADIENTS] == 0] = 0
                rows[:, COPIES] = buffer + sum(whole[unit] for unit in there(forward, place))
            fullest = rows[rows[:, [ACTIVATIONS, LOGITS, column, COPIES]].sum(axis=1).argmax()]
            held = sum(gradients.values()) + on_its_way + fullest[column]
            note(title(direction, place, head), others + fullest, held, fullest[COPIES])
            before, now = now, rows[-1].copy()
            if forward or not method.sharded:
                continue
            copies = now[COPIES]
            # At the end the root is scattered, and then the embeddings, if they are a unit.
            ready = [ROOT, EMBEDDINGS] if place == EMBEDDINGS else [place]
            for unit in (unit for unit in ready if unit in groups):
                left = 0 if place == EMBEDDINGS else before[column]
                if untied and unit in (head, ROOT):  # the norm's gradient, or the embeddings'
                    left = max(now[column] - whole[unit], 0)
                new, now[column] = now[column] - left, left
                if in_pipeline:
                    gradients[unit] = whole_gradients[unit]
                else:
                    copies -= whole[unit] if unit in there(forward, place) else 0
                    scatter(unit, place, now, copies, left, new)
                    on_its_way = buffer_size[unit]
        if forward:
            in_flight[stage].append(now)
    if in_pipeline:  # FSDP begins with what is in no layer
        for place in sorted(groups, key=lambda place: 0 <= place < head):
            whole[place] = 0
            scatter(place, place, nothing, sum(whole.values()), 0, 0)
    note("update", nothing, here * all_shards, exchanged)
    return states, moments


def step(traces: Traces, method: Method, devices: int, batch: int) -> tuple[dict, dict]:
    """Bytes that stay from step to step, and by moment those of each of `PARTS`.

    Both are those of the fullest rank. Under DDP and FSDP only the optimizer stays in any case.
    """
    traces = traces if method.kind == traces.kind else traces.of_kind(method.kind)
    every = [course(rank, traces, method, devices, batch) for rank in ranks(traces, method)]
    states = {name: max(states[name] for states, _ in every) for name in every[0][0]}
    return states, max((moments for _, moments in every), key=peak)


def peak(moments: dict[str, list[float]]) -> float:
    return max(map(sum, moments.values()))


def title(direction: str, place: int, layers: int) -> str:
    if place == layers:
        return "loss" if direction == "forward" else "loss, backward"
    return f"{direction}, {'embeddings' if place == EMBEDDINGS else f'layer {place + 1}'}"


# -- Estimates and their output --------------------------------------------------------------------


def methods(devices: int, flags) -> list[Method]:
    """Those of chapters 1 to 3, and others whose flags are given and divide the devices."""
    groups = {method: method.group(flags) for method in METHODS.values()}
    return [method for method, group in groups.items() if group and devices % group == 0]


def table(traces: Traces, devices: int) -> str:
    """A column for each method, of its fullest moment."""
    flags = traces.flags
    room = flags.gpu_memory * 1e9 * (1 - SPARE)
    last = ["fullest moment", f"fits {flags.gpu_memory:g} GB", "largest batch", "CPU memory"]
    columns = [["GB per device", *PARTS, "total", *last]]
    steps = {m: step(traces, m, devices, flags.batch_size) for m in methods(devices, flags)}
    most = max(peak(moments) for _, moments in steps.values())
    for method, (states, moments) in steps.items():
        at = partial(step, traces, method, devices)
        largest = bisect_right(range(1, 2**20), room, key=partial(peak_of_batch, at, flags))
        fullest = max(moments, key=lambda name: sum(moments[name]))
        cpu = sum(states.values()) if method.name == "offload" and flags.device == "cuda" else 0
        *sizes, cpu = in_gb([*moments[fullest], peak(moments), cpu], most)
        fits = "yes" if peak(moments) <= room else "no"
        columns += [[method.name, *sizes, fullest, fits, str(largest or "none"), cpu]]
    return markdown([*zip(*columns, strict=True)])


def peak_of_batch(at, flags, batch: int) -> float:
    """Bytes at the fullest moment of a step, which `at` computes for a batch size."""
    if not flags.chunked_loss:
        return peak(at(batch)[1])
    # Each batch has another number of chunks, so another trace. But every moment grows evenly.
    one, two = (at(flags.batch_size + more)[1] for more in (0, 1))
    grown = batch - flags.batch_size
    return max(sum(one[name]) + grown * (sum(two[name]) - sum(one[name])) for name in one)


def course_table(traces: Traces, method: Method, devices: int) -> str:
    """A row for each moment, without layers between the first and the last that are not fullest."""
    _, moments = step(traces, method, devices, traces.flags.batch_size)
    between = {f"layer {number}" for number in range(2, len(traces.layers))}
    rows = [["moment", *PARTS, "total"]]
    for name, sizes in moments.items():
        if sum(sizes) == peak(moments) or not between & set(name.split(", ")):
            rows += [[name, *in_gb([*sizes, sum(sizes)], peak(moments))]]
    return markdown(rows)


def loading_table(traces: Traces, devices: int) -> str:
    """CPU memory at the start and at the end, in chapter 3 and in chapter 21."""
    whole = 4 * numel(traces.parameters)
    # A tensor of three dimensions has all experts of a layer. Transformers joins it at the start,
    # and splits it for final/: the tensor and its parts are in memory together.
    joined = 2 * max((4 * math.prod(x) for x in traces.parameters if len(x) == 3), default=0)
    parts = [[x for x in unit if len(x) < 3] for unit in traces.units.values()]
    largest = max(joined, 4 * max(map(math.prod, chain(*parts))))
    sizes = {"start, pretrained": largest / devices}  # a rank reads its rows of one tensor
    sizes["start, from scratch"] = 4 * max(map(numel, traces.units.values()))
    sizes["end, final/"] = max(joined, 4 * max(map(numel, parts)) * (1 + 1 / devices))
    rows = [["CPU memory, GB", "chapter 3, rank 0", "chapter 21, each rank"]]
    rows += [[moment, *in_gb([whole, size], whole)] for moment, size in sizes.items()]
    return markdown(rows)


def in_gb(sizes, largest: float) -> list[str]:
    """With as many digits as suit the largest one."""
    digits = 1 if largest >= 10e9 else 2 if largest >= 1e9 else 4
    return [f"{size / 1e9:.{digits}f}" for size in sizes]


def markdown(rows: list) -> str:
    """A table with aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines += [f"| {' | '.join([first.ljust(widths[0]), *cells])} |"]
    return "\n".join(lines)


LEGEND = f"""
- weights, fp32: 4 bytes per parameter, under FSDP of this rank's shard; in chapter 14 also 4 bytes
  per place of S, on each rank; in chapter 17, frozen weights are in the compute dtype, and in
  chapter 22 in 4 bits with a scale for each 64
- gradients: as far as they are there, whole or in shards, with FSDP's buffer for scattering
- AdamW's moments: 8 bytes per parameter and 4 per tensor, under FSDP of this rank's shard
- copies of weights: in the compute dtype: autocast's, or what FSDP has gathered
- activations: what layers keep for their backward pass, and what they are computing
- logits and loss: all that comes behind the last layer
- total: the most that PyTorch allocates at a time; the lines above are of that moment
- fits, largest batch: with {SPARE:.0%} spared for CUDA, NCCL and gaps, a rule of thumb
- no reshard, offload: chapter 3 with --no-reshard-after-forward, with --cpu-offload
- HSDP, tensor parallel: chapter 5 with --shard-size, chapter 6 with --tensor-parallel
- pipeline: chapter 7, the fullest rank, with at least as many micro-batches as stages
- pipeline × tensor: chapter 13, the fullest rank, with both flags
- context parallel: chapter 11; expert parallel: chapter 12, if all ranks get equally many tokens
- sparse low-rank: chapter 14 with --rank
- chat: chapter 16, whose rows are packed (--rows); LoRA, QLoRA: 17 and 22 with --lora-rank, packed
- 8 bits: chapter 20, with --float8
- Muon: chapter 18, with --muon. Of its temporary tensors, only the two of the exchange are counted
- CPU memory of start and end: fp32, without shards, which --cpu-offload keeps there
- In chapters 6, 11 and 13, a batch is that of a group of devices."""


# -- Flags -----------------------------------------------------------------------------------------


def parse_args(argv=None) -> argparse.Namespace:
    what = "Estimates the memory of a training step on GPUs; the default is in brackets."
    parser = argparse.ArgumentParser("estimate-memory.py", description=what, allow_abbrev=False)

    count = positive(int)

    def add(*names, help: str, default=None, **options):
        suffix = f" [{default}]" if default else ""
        parser.add_argument(*names, help=help + suffix, default=default, **options)

    llama = "meta-llama/Llama-3.2-1B"
    add("-m", "--model-name", default=llama, help="Hub id, local folder, or a config.json")
    add("--devices", type=count, nargs="+", default=[1, 2, 4, 8], help="numbers of GPUs")
    add("--gpu-memory", type=positive(float), default=80.0, help="of each, GB = 1e9 bytes")
    add("-s", "--seq-length", type=count, default=1024, help="tokens per sample")
    add("-b", "--batch-size", type=count, default=8, help="samples per device and forward pass")
    add("--gradient-accumulation-steps", type=count, default=1, help="passes per optimizer step")
    add("--shard-size", type=count, help="also HSDP, chapter 5: GPUs that share a copy")
    add("--tensor-parallel", type=count, help="also chapter 6: GPUs that split each layer")
    add("--pipeline-parallel", type=count, help="also chapter 7: GPUs of a pipeline")
    add("--schedule", choices=["1f1b", "gpipe", "interleaved"], default="1f1b", help="of chapter 7")
    add("--stages-per-rank", type=count, default=2, help="of --schedule interleaved")
    add("--context-parallel", type=count, help="also chapter 11: GPUs that share each sample")
    add("--exchange", choices=["heads", "tokens"], default="heads", help="of chapter 11")
    add("--expert-parallel", type=count, help="also chapter 12: GPUs that share the experts")
    add("--rank", type=count, help="also chapter 14: columns of B, and rows of A")
    add("--density", type=float, default=0.03, help="of chapter 14: the share of values of S")
    add("--muon", action="store_true", default=None, help="also chapter 18")
    add("--float8", action="store_true", default=None, help="also chapter 20")
    add("--rows", action="store_true", default=None, help="also chapter 16, packed")
    add("--lora-rank", type=count, help="also chapters 17 and 22: rows of A, columns of B")
    add("--lora-targets", default="all-linear", help="of both: or a pattern")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="whose rules of computing")
    add("--dtype", choices=BYTES, help="compute precision [bf16 for cuda, fp32 for cpu]")
    add("--activation-checkpointing", action="store_true", help="less memory, more compute")
    add("--chunked-loss", action="store_true", help="as chapter 19")
    add(
        "--sharded-loading",
        action="store_true",
        help="also CPU memory of start and end, chapter 21",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="[on for cuda, off for cpu]")
    add("--explain", action="store_true", help="also each moment of a step")
    args = parser.parse_args(argv)
    if args.chunked_loss and args.context_parallel:
        parser.error("--chunked-loss does not go with --context-parallel: give one of them")
    if args.float8 and not importlib.util.find_spec("torchao"):
        parser.error('--float8 needs torchao: pip install -c constraints.txt ".[float8]"')
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    args.alpha = args.lora_alpha = 1  # of chapters 14, 17 and 22, without effect on memory
    args.seed = 0
    args.attention = None  # the default of the chapters
    return args


def check(config, args) -> None:
    """Refuses what the chapters would refuse."""
    check_length(config, args.seq_length)
    for method in METHODS.values():
        group = method.group(args)
        if group and all(count % group for count in args.devices):
            flags = " × ".join(method.flags)
            fail(f"{flags} {group} divides none of --devices")
    checks = {TENSOR: "check_plan", CONTEXT: "check_model"}
    for kind, name in checks.items():
        if getattr(args, GROUPS[kind]):
            # The chapter reads the config by its name. The tool knows more names.
            known = SimpleNamespace(from_pretrained=lambda name: config)
            with mock.patch.dict(chapter(kind), AutoConfig=known):
                chapter(kind)[name](args)
    if args.expert_parallel:
        with torch.device("meta"):
            experts = chapter(EXPERTS)["experts_of"](AutoModelForCausalLM.from_config(config))
        if not experts or any(e.num_experts % args.expert_parallel for e in experts):
            fail(f"--expert-parallel {args.expert_parallel} must divide the experts of the model")
    if args.pipeline_parallel:
        families, count = chapter(7)["FAMILIES"], stage_count(args)
        if config.model_type not in families:
            fail(f"{config.model_type} is not among {', '.join(families)}: chapter 7 lacks it")
        if config.num_hidden_layers < count:
            fail(f"{config.num_hidden_layers} layers cannot make {count} stages")


def main(argv=None) -> None:
    args = parse_args(argv)
    transformers.logging.set_verbosity_error()
    logging.disable()  # of PyTorch, whose errors come with a sentence of ours
    problem, name, remedy = "load the config of", args.model_name, ""
    try:
        config = load_config(name)
        problem = "build a causal LM from"
        traces = Traces(config, args)
        check(config, args)
        problem, remedy = "trace a step of", ", try --no-compile" if args.compile else ""
        if args.compile:  # each kind of layer is traced by torch.compile, at three batch sizes
            hint = "Compiled layers are traced: this takes a minute or more, --no-compile is faster"
            print(hint, file=sys.stderr, flush=True)
        size = f"{numel(traces.parameters):,} parameters, {len(traces.layers)} layers"
        tokens = f"{args.batch_size} × {args.seq_length} tokens per device"
        compiled = "compiled" if args.compile else "not compiled"
        lines = [f"{name}: {size}. {tokens}, {args.dtype}, {compiled}"]
        for devices in args.devices:
            plural = "s" if devices > 1 else ""
            lines += ["", f"{devices} device{plural}", "", table(traces, devices)]
            lines += ["", loading_table(traces, devices)] if args.sharded_loading else []
        lines += [LEGEND]
        for method in methods(devices, args) if args.explain else ():
            title = f"{method.name} on {devices}, GB in the course of a step:"
            lines += ["", title, "", course_table(traces, method, devices)]
    except Exception as error:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        fail(f"cannot {problem} {name}{remedy}: {first_line}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
