"""Chapter 14 trains B, A and S exactly as autograd would train them through dense matrices."""

import tempfile
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import assert_one_sentence
from helpers.models import kept_bytes
from helpers.runner import CHAPTER_14, load
from helpers.trainer import resume
from transformers import AutoConfig, AutoModelForCausalLM

RANK, DENSITY, ALPHA = 4, 0.05, 9.0
PARTS = ["--rank", RANK, "--density", DENSITY, "--alpha", ALPHA]


@pytest.fixture
def sparse(trainer):
    """Runs chapter 14, which has no --from-scratch."""
    usual = trainer.defaults
    trainer.defaults = lambda name: [f for f in usual(name) if f != "--from-scratch"] + PARTS
    return partial(trainer, script=CHAPTER_14)


@pytest.fixture(scope="module")
def chapter():
    """The script as a module, for tests of its functions."""
    return load(CHAPTER_14)


# -- Runs ------------------------------------------------------------------------------------------


def test_numbers_of_parameters(sparse):
    run = sparse("--max-steps", 1, "--eval-freq", 0, processes=1)
    assert "14 matrices are now sparse plus low-rank, 0 stay dense" in run.output
    # Of a layer: 4 of 32 × 32 and 3 of 32 × 64, with r (m + n) numbers and 5 % of m n, rounded up
    parts = 2 * (4 * (4 * 64 + 52) + 3 * (4 * 96 + 103))
    others = 2048 * 32 + 5 * 32  # the tied embeddings and the norms
    dense = others + 2 * (4 * 32 * 32 + 3 * 32 * 64)
    counts = f"{dense:,} parameters of the dense model are now {others + parts:,}"
    assert counts in run.output
    refused = sparse("--density", 0, processes=1, status=2)
    assert_one_sentence(refused.output, "density")


@pytest.mark.rest
def test_resume_on_other_ranks(trainer, sparse):
    """A checkpoint has shards of the values, and the places once."""
    flags = ["--max-steps", 6, "--eval-freq", 3, "--ckpt-freq", 3]
    four = sparse(*flags, "-b", 1, name="four", processes=4)
    for ranks in (1, 2):
        options = {"name": f"on-{ranks}", "processes": ranks}
        flags_there = [*flags, "-b", 4 // ranks]
        resume(four, trainer, 3, *flags_there, near=6, again=sparse, **options)
    metadata = dcp.FileSystemReader(four.folder / "step-00000003").read_metadata()
    layer = "model.model.layers.0.mlp.up_proj."
    pieces = {
        name.removeprefix(layer): [tuple(chunk.sizes) for chunk in tensor.chunks]
        for name, tensor in metadata.state_dict_metadata.items()
        if name.startswith(layer)
    }
    # W is 64 x 32, and has 103 values
    shards = {"B": [(16, 4)] * 4, "A": [(1, 32)] * 4, "values": [(26,)] * 3 + [(25,)]}
    assert pieces == shards | {"support": [(103,)]}


# -- Gradients and merged weights, against dense matrices ------------------------------------------

SHAPE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4}
GROUPED = SHAPE | {"num_key_value_heads": 2, "head_dim": 16}
CONFIGS = {"llama": GROUPED, "qwen2": GROUPED}  # without and with biases
TOKENS = torch.randint(3, 97, (2, 24), generator=torch.Generator().manual_seed(0))
ARGS = {"seq_length": 24, "rank": RANK, "density": DENSITY, "alpha": ALPHA, "seed": 0}
ARGS |= {"attention": None}


def build(chapter, family: str, config=None, **flags):
    """The whole model of a config, as rank 0 makes it."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(family, **config or CONFIGS[family]).save_pretrained(folder)
        args = SimpleNamespace(**ARGS | flags | {"model_name": folder})
        return chapter.load_model(args, checkpoint=None)


def with_random_parts(chapter, family: str, **flags):
    """B and biases are not zero here, so that every gradient is."""
    model = build(chapter, family, **flags)
    for layer in chapter.sparse_layers(model).values():
        torch.nn.init.normal_(layer.B, std=0.1)
        if layer.bias is not None:
            torch.nn.init.normal_(layer.bias, std=0.1)
    return model


def dense_of(layer) -> torch.Tensor:
    """W by its definition, place by place."""
    weight = (ALPHA / RANK * (layer.B.double() @ layer.A.double())).detach()
    columns = weight.shape[1]
    for place, value in zip(layer.support.tolist(), layer.values.tolist(), strict=True):
        weight[place // columns, place % columns] += value
    return weight


def dense_model(chapter, model):
    """The same model in plain Transformers, in double precision."""
    dense = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
    layers = chapter.sparse_layers(model)
    weights = model.state_dict()
    for name, layer in layers.items():
        weights[f"{name}.weight"] = dense_of(layer)
    assert dense.load_state_dict(weights, strict=False).missing_keys == []
    return dense


def assert_near(a: torch.Tensor, b: torch.Tensor, what: str, tolerance: float = 1e-6) -> None:
    """Within a millionth of the largest element."""
    error = (a - b).abs().max() / b.abs().max()
    assert error <= tolerance, f"{what}: {error:.1e}"


def errors_of_gradients(chapter, model) -> dict[str, float]:
    """For each parameter, the largest error relative to the largest element."""
    model.double()
    dense = dense_model(chapter, model)
    for each in (model, dense):
        each.train()
        each(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    expected = {name: p.grad for name, p in dense.named_parameters()}
    for name, layer in chapter.sparse_layers(model).items():
        gradient = expected.pop(f"{name}.weight")
        expected[f"{name}.B"] = ALPHA / RANK * gradient @ layer.A.T
        expected[f"{name}.A"] = ALPHA / RANK * layer.B.T @ gradient
        expected[f"{name}.values"] = gradient.flatten()[layer.support.long()]
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == expected.keys()
    errors = {}
    for name, gradient in expected.items():
        # The bias of the keys may have no effect on the loss: only noise is left.
        size = gradient.abs().max().clamp(1e-4)
        errors[name] = ((found[name] - gradient).abs().max() / size).item()
    return errors


@pytest.mark.parametrize("family", CONFIGS)
def test_gradients_and_merged_weights(chapter, family):
    model = with_random_parts(chapter, family)
    dense = dense_model(chapter, model).eval()
    merged = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    weights = chapter.merged_weights(model, model.state_dict())
    assert weights.keys() == merged.state_dict().keys()
    merged.load_state_dict(weights)
    model.eval()
    with torch.no_grad():
        logits, expected = (each(input_ids=TOKENS).logits for each in (merged, model))
        assert_near(logits, expected, "merged")
        assert_near(logits, dense(input_ids=TOKENS).logits, "by definition", 1e-5)
    errors = errors_of_gradients(chapter, model)
    assert max(errors.values()) < 1e-12, max(errors.items(), key=lambda pair: pair[1])


@pytest.mark.rest
def test_compiled_without_graph_breaks(chapter):
    """The same gradients as without the compiler."""
    gradients = []
    for backend in (None, "aot_eager"):
        model = with_random_parts(chapter, "llama")
        if backend:
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(fullgraph=True, backend=backend)  # a break would be an error
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert_near(gradients[1][name], gradient, name, 2e-6)


def test_no_dense_weight_is_kept_for_the_backward_pass(chapter):
    """As many bytes as the dense model keeps."""
    model = with_random_parts(chapter, "llama")
    dense = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    assert kept_bytes(model, TOKENS) == kept_bytes(dense, TOKENS)


# -- Initial values --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_every_value_is_initialised(chapter, family, monkeypatch):
    """`torch.empty` leaves whatever is in memory: here NaN, and the largest integer."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        model = build(chapter, family)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        assert x.isfinite().all(), name
    for name, layer in chapter.sparse_layers(model).items():
        bound = layer.A.shape[1] ** -0.5
        assert not layer.B.any(), name
        assert layer.bias is None or not layer.bias.any(), name
        for part in (layer.A, layer.values):
            assert 0.95 * bound < part.abs().max() <= bound, name
            assert abs(part.mean()) < 0.2 * bound, name
        assert layer.support.max() < len(layer.B) * layer.A.shape[1], name


def test_no_weight_decay_for_the_parts(chapter):
    model = with_random_parts(chapter, "qwen2")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = chapter.parameter_groups(model, SimpleNamespace(weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(groups, lr=0.1).step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"model.embed_tokens.weight", "lm_head.weight"}
    torch.testing.assert_close(model.lm_head.weight, 0.95 * before["lm_head.weight"])


# -- The places of S -------------------------------------------------------------------------------


def test_places_are_the_same_in_every_version(chapter):
    """Other numbers would be another S, so that old runs could not resume."""
    places = chapter.random_places(1000, 12, (3, 1))
    assert places.tolist() == [42, 84, 103, 180, 205, 218, 288, 351, 549, 646, 740, 818]
    model = build(chapter, "llama", seed=3)
    layers = [*chapter.sparse_layers(model).values()]
    for number, layer in enumerate(layers):
        size = len(layer.B) * layer.A.shape[1]
        expected = chapter.random_places(size, len(layer.values), (3, number))
        assert layer.support.tolist() == expected.tolist()
    assert len({tuple(layer.support.tolist()) for layer in layers}) == len(layers)


@pytest.mark.parametrize(("size", "count"), [(1000, 30), (50, 24)])
def test_places_are_different_and_equally_likely(chapter, size, count):
    rounds = 300
    counts = np.zeros(size)
    for seed in range(rounds):
        places = chapter.random_places(size, count, (seed, 0))
        assert len(places) == count
        assert (np.diff(places) > 0).all()
        assert places[0] >= 0
        assert places[-1] < size
        counts[places] += 1
    # Sums over tenths of all places, whose standard deviation is at most the root of their mean
    tenths = counts.reshape(10, -1).sum(1)
    mean = rounds * count / 10
    assert abs(tenths - mean).max() < 4 * mean**0.5


# -- What is refused, and what is printed ----------------------------------------------------------


@pytest.mark.rest
def test_small_matrices_stay_dense(chapter):
    """With rank 20, B and A of the keys and values of grouped heads would be larger than W."""
    shape = {"hidden_size": 96, "num_key_value_heads": 1, "intermediate_size": 96}
    model = build(chapter, "llama", SHAPE | shape, rank=20)
    assert len(chapter.sparse_layers(model)) == 10
    dense = AutoModelForCausalLM.from_config(model.config)
    for layer in model.model.layers:
        assert type(layer.self_attn.k_proj) is torch.nn.Linear
        assert type(layer.self_attn.v_proj) is torch.nn.Linear
    # 2 of 96 × 96 for attention and 3 for the MLP: r (m + n) numbers, and 5 % of m n, rounded up
    saved = 96 * 96 - 20 * (96 + 96) - 461
    expected = dense.num_parameters() - 2 * 5 * saved
    assert model.num_parameters() == expected
    args = SimpleNamespace(rank=20, density=DENSITY, alpha=ALPHA)
    assert chapter.replace_layers(dense, args) == 4
