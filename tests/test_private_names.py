"""Private names of other packages that chapters, tools, benchmarks and tests use, with the reason.

Nobody promises that these names stay. An upgrade that removes one fails here with a list, and not
in the middle of a run.
"""

import ast
import importlib
import inspect
import re

import pytest
import torch
import transformers
from runner import REPOSITORY

CHECKED = {"torch": "2.13.0", "transformers": "5.24.0", "datasets": "5.2.0"}
DISPATCH = "torch.utils._python_dispatch"
PYTREE = "torch.utils._pytree"
COLLECTIVES = "torch.distributed._functional_collectives"
# Where the name is, and why it is used
NAMES = {
    # PyTorch, in chapters
    "torch._dynamo.config.optimize_ddp": "DDP would cut compiled layers; no public name",
    # Its keys are the same on all ranks, so that a second run loads the code of another rank
    "torch._functorch.config.enable_autograd_cache": (
        "https://github.com/pytorch/pytorch/issues/188390"
    ),
    f"{DISPATCH}.TorchDispatchMode": "sees each operation; documented, but only under this name",
    f"{PYTREE}.tree_map_only": "changes tensors inside nested dictionaries",
    f"{PYTREE}.tree_leaves": "finds the tensors among the arguments of an operation",
    "torch.distributed.distributed_c10d._set_pg_timeout": "a longer limit until the first step",
    "torch.distributed.distributed_c10d._world": "all process groups, also those of a mesh",
    "torch.distributed.DeviceMesh._flatten": "one norm over two dimensions in one all-reduce",
    f"{COLLECTIVES}.all_to_all_single_autograd": "an all-to-all with a backward pass",
    f"{COLLECTIVES}.all_gather_single_autograd": "an all-gather with a backward pass",
    "torch.distributed.pipelining._schedule_visualizer.get_schedule_ops": "the order of a schedule",
    # Transformers, in chapters
    "transformers.PreTrainedModel._supports_flash_attn": "no public question for this",
    "transformers.PreTrainedConfig._attn_implementation": "which attention has been chosen",
    "transformers.masking_utils.find_packed_sequence_indices": "waits for the GPU in each step",
    "transformers.PreTrainedModel.get_expanded_tied_weights_keys": "what the config wants tied",
    "transformers.Trainer._get_train_sampler": "the order of samples of chapters 1 to 3",
    "transformers.TrainingArguments.n_gpu": "chapter 9 sets _n_gpu, which this property returns",
    # datasets, in chapters
    "datasets.IterableDataset._resolve_features": "the columns of a stream",
    # Only in tools, benchmarks and tests
    f"{DISPATCH}._disable_current_modes": "a counter must not count its own operations",
    f"{COLLECTIVES}.AsyncCollectiveTensor": "a result that has not arrived yet",
    "torch._dynamo.backends.common.aot_autograd": "the graphs of a compiled layer",
    "torch._inductor.decomposition.select_decomp_table": "the operations of a compiled layer",
    "torch._subclasses.fake_tensor.FakeTensor": "memory without memory",
    "torch._subclasses.fake_tensor.FakeTensorMode": "memory without memory",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator."
    "_propagate_tensor_meta_non_cached": "tensors of the estimate must not be kept in its cache",
    "torch.testing._internal.distributed.fake_pg.FakeStore": "ranks without processes",
    "torch.ops._c10d_functional": "collectives, by their operations",
    "torch.ops.aten._local_scalar_dense": "a number that Python reads",
    "torch.ops.aten._to_copy": "an operation",
    "torch.ops.aten._unsafe_view": "an operation",
    "torch.autograd._engine_run_backward": "when a backward pass runs, for the checks of exercises",
    "torch.ops.aten.add.default._opname": "the name of an operation",
    "torch.UntypedStorage._cdata": "tells whether two tensors share memory",
    "transformers.AttentionInterface._global_mapping": "what is registered, to restore it",
    "transformers.LlamaForCausalLM._no_split_modules": "the layers that FSDP wraps",
}
# Attributes that objects have, without a name in their class: the module that uses them
ATTRIBUTES = {
    "_compatible_flash_implementations": "transformers.modeling_utils",
    "_attn_implementation_internal": "transformers.configuration_utils",
    "_is_hf_initialized": "transformers.initialization",
    "_weight_conversions": "transformers.conversion_mapping",
}
# Private, but not of these packages; or of the standard library, whose names are fixed by Python
OTHERS = {
    "_replace",
    "_exit",
    "_current_frames",
    "_run_exitfuncs",
    "_registry",
    "_dash_pattern",
    "_n_gpu",
}


def find(name: str):
    """The object, or None if there is none any more."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
            break
        except ImportError:
            continue
    for part in parts[count:]:
        found = getattr(found, part, None)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def used_names(text: str) -> set[str]:
    """Private names that this script imports, or takes from an object that is not its own."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and any(map(is_private, node.module.split("."))):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names if is_private(alias.name)}
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= set() if is_own else {node.attr}
    return found


def test_every_name_is_there():
    missing = [name for name in NAMES if find(name) is None]
    for name, module in ATTRIBUTES.items():
        if name not in inspect.getsource(importlib.import_module(module)):
            missing.append(f"{name} in {module}")
    assert missing == [], "these names are gone: find what has taken their place"


def test_every_private_name_is_listed():
    known = {part for name in NAMES for part in name.split(".")} | {*ATTRIBUTES} | OTHERS
    unknown = {}
    for file in REPOSITORY.glob("*/**/*.py"):
        if {".venv", "outputs"} & {*file.parts}:
            continue
        for name in used_names(file.read_text()) - known:
            unknown[name] = file.name
    assert unknown == {}, "list them in NAMES, with a reason"


@pytest.mark.parametrize("package", CHECKED)
def test_the_list_was_checked_with_these_versions(package):
    """Read the reasons again after an upgrade: some may be over."""
    text = (REPOSITORY / "constraints.txt").read_text()
    (version,) = re.findall(rf"^{package}==(.*)$", text, re.MULTILINE)
    assert CHECKED[package] == version


def test_parameters_that_are_initialised_stay():
    """`_is_hf_initialized` on a parameter, as chapters from 3 on set it."""
    config = transformers.AutoConfig.for_model(
        "llama",
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        vocab_size=9,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    with torch.no_grad():
        model.lm_head.weight.fill_(3)
    model.is_custom_code = lambda: False
    model.init_weights()
    assert (model.lm_head.weight == 3).all()
