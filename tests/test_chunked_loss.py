"""Chapter 19: the same loss and gradients as with whole logits, which never exist."""

import pytest
import torch
from helpers.runner import CHAPTER_19, load
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

TOKENS, VOCABULARY = 66, 100
SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
FAMILIES = {
    "llama": SIZE,
    "gpt2": GPT,
    "gptj": GPT,  # its head has a bias
    "mixtral": SIZE | {"output_router_logits": True},  # adds a loss of its router
    "gemma3_text": SIZE,
    "phi3": SIZE,
}


@pytest.fixture(scope="module")
def chapter():
    module = load(CHAPTER_19)
    module.LOSS_CHUNK = 40
    return module


def make_model(family, size):
    ids = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = CONFIG_MAPPING[family](vocab_size=VOCABULARY, **size, **ids)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


class LargestLogits(TorchDispatchMode):
    """The largest number of rows that a tensor with a column for each token of the vocabulary has.

    `kept`: all rows of such tensors that wait for the backward pass.
    """

    rows = kept = 0

    def keep(self, tensor):
        if tensor.shape[-1:] == (VOCABULARY,) and tensor.shape[0] != SIZE["hidden_size"]:
            self.kept += tensor.numel() // VOCABULARY
        return tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape[-1:] == (VOCABULARY,):
            self.rows = max(self.rows, result.numel() // VOCABULARY)
        return result


def train_step(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels = ids.clone()
    labels[:, 5:9] = -100
    with LargestLogits() as largest:
        with torch.autograd.graph.saved_tensors_hooks(largest.keep, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), gradients, largest


@pytest.mark.parametrize("family", FAMILIES)
def test_same_loss_and_gradients(chapter, family):
    model = make_model(family, FAMILIES[family])
    loss, gradients, largest = train_step(model)
    assert largest.rows == TOKENS
    assert largest.kept >= TOKENS
    chapter.use_chunked_loss(model)
    chunked_loss, chunked_gradients, largest = train_step(model)
    # The head's transposed weight has 32 rows, fewer than a chunk.
    assert largest.rows == chapter.LOSS_CHUNK
    assert largest.kept == 0
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)
    assert gradients.keys() == chunked_gradients.keys()
    scale = max(gradient.abs().max() for gradient in gradients.values()).item()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            chunked_gradients[name], gradient, rtol=1e-5, atol=1e-6 * scale, msg=name
        )


def test_bf16_keeps_the_loss_in_fp32(chapter):
    """The sum of PyTorch's own linear_cross_entropy is a bf16 number, which has three digits."""
    model = make_model("llama", SIZE).bfloat16()
    loss, _, _ = train_step(model)
    chapter.use_chunked_loss(model)
    chunked_loss, _, _ = train_step(model)
    assert chunked_loss.dtype == torch.float32
    torch.testing.assert_close(chunked_loss, loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("family", ["cohere", "gemma2", "granite"])
def test_models_that_change_their_logits(chapter, family):
    model = make_model(family, SIZE)
    chapter.use_chunked_loss(model)
    with pytest.raises(SystemExit, match="changes its logits before the loss: use --no-"):
        train_step(model)
