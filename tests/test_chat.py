"""Chapter 16: conversations that share a sample, its rows, and what a server needs of a run.

test_labels.py has the rows as tools/prepare-data.py writes them.
"""

import json
import re
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from helpers.assertions import assert_one_sentence
from helpers.models import DEMO_TEMPLATE, LLAMA, MODELS, TINY_LLAMA, save_weights, write_model
from helpers.plain_loops import SIZE, flags_for, samples_of
from helpers.runner import CHAPTER_16, CHAPTERS_BY_NUMBER, load, run_tool
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)


@pytest.fixture(scope="session")
def chat():
    return load(CHAPTER_16)


# -- Conversations that share a sample -------------------------------------------------------------


def varlen(module, query, key, value, mask, scaling=None, cu_seq_lens_q=None, **options):
    """In place of FlashAttention, which knows where conversations begin in the joined samples."""
    batch, heads, length, size = query.shape
    repeat = heads // key.shape[1]
    joined = [x.transpose(0, 1).flatten(1, 2) for x in (query, key, value)]
    joined[1:] = [x.repeat_interleave(repeat, 0) for x in joined[1:]]
    parts = []
    for begin, end in pairwise(cu_seq_lens_q):
        q, k, v = (x[:, begin:end] for x in joined)
        parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    output = torch.cat(parts, 1).view(heads, batch, length, size)
    return output.permute(1, 2, 0, 3), None


AttentionInterface.register("varlen", varlen)
AttentionMaskInterface.register("varlen", lambda *arguments, **options: None)


@pytest.fixture
def find(monkeypatch):
    """The line of `build_model`, for models of this process."""
    [line] = re.findall(r"packed_sequence_indices = (lambda .*cumsum.*)", CHAPTER_16.read_text())
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", eval(line))


@pytest.mark.parametrize("attention", ["sdpa", "eager", "varlen"])
def test_each_conversation_has_its_own_logits(chat, find, tmp_path, attention):
    config = AutoConfig.from_pretrained(write_model(tmp_path / "llama", **LLAMA))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    ids = torch.arange(100, 132).view(2, 16)
    positions = [*range(16), *range(5), *range(7), *range(4)]
    rows = {"input_ids": pa.array(ids.flatten().numpy()), "position_ids": pa.array(positions)}
    args = SimpleNamespace(seq_length=16)
    batch = chat.model_inputs(rows, [0, 1], args, torch.device("cpu"))
    logits = model(**batch, use_cache=False).logits
    model.set_attn_implementation("eager")
    for row, begin, end in ((0, 0, 16), (1, 0, 5), (1, 5, 12), (1, 12, 16)):
        alone = model(ids[row : row + 1, begin:end]).logits[0]
        torch.testing.assert_close(logits[row, begin:end], alone)


def test_the_probe_finds_models_that_mix(chat, find):
    for kind, shape in {
        "llama": LLAMA,
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
        "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    }.items():
        shape = {k: v for k, v in shape.items() if k != "model_type"}
        config = AutoConfig.for_model(kind, **shape | {"vocab_size": 64})
        model = AutoModelForCausalLM.from_config(config).train()
        assert chat.mixes_conversations(model, torch.device("cpu")) == (kind == "opt"), kind

    def refuse(**inputs):  # as linear attention does
        raise ValueError("cannot keep packed sequences apart")

    model.forward = refuse
    assert chat.mixes_conversations(model, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_is_right_about_mixtures(chat, find, monkeypatch, dtype):
    """Also in bf16, where a router may choose another expert after rounding."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("mixtral", **MODELS["mixtral"])
    models = [AutoModelForCausalLM.from_config(config, dtype=dtype) for _ in range(5)]
    assert not any(chat.mixes_conversations(model, torch.device("cpu")) for model in models)
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda p: None)
    assert all(chat.mixes_conversations(model, torch.device("cpu")) for model in models)


# -- Rows ------------------------------------------------------------------------------------------


def test_rows_of_something_else_are_refused(chat, tmp_path, rows_of_conversations):
    """In one sentence, with the command that helps."""
    packed = rows_of_conversations()
    args = SimpleNamespace(dataset_name=str(packed), model_name="m", seq_length=SIZE)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    train_rows, _, answer_tokens, stop_tokens = chat.load_rows(args, tokenizer)
    assert tokenizer.chat_template == DEMO_TEMPLATE.read_text()  # as in final/
    assert stop_tokens == [tokenizer.eos_token_id]
    samples = samples_of(packed, "train")
    assert len(answer_tokens) == len(samples)
    for name, column in train_rows.items():
        assert column.to_pylist() == torch.cat([row[name] for row in samples]).tolist()
    facts = json.loads((packed / "rows.json").read_text())

    def refused(sentence: str, **changes) -> None:
        args = SimpleNamespace(dataset_name=str(packed), model_name="m", seq_length=SIZE)
        vars(args).update(changes)
        with pytest.raises(SystemExit, match=f"^error: [^\n]*{re.escape(sentence)}[^\n]*$"):
            chat.load_rows(args, tokenizer)

    again = f"run `{facts['command']} -m m -s {{}} --overwrite`"
    refused(f"has another length: {again.format(32)}", seq_length=32)
    tokenizer.add_tokens(["another"])
    refused(f"has another tokenizer: {again.format(SIZE)}")
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    folder = shutil.copytree(packed, tmp_path / "rows")
    (folder / "rows.json").write_text(json.dumps(facts | {"chat_template": None}))
    refused(f"has another template: {again.format(SIZE)}", dataset_name=str(folder))
    tokenizer.chat_template = DEMO_TEMPLATE.read_text()
    chat.load_rows(SimpleNamespace(**vars(args) | {"dataset_name": str(folder)}), tokenizer)
    for file in folder.glob("validation-*"):
        file.unlink()
    refused(f"has no held-out rows: {again.format(SIZE)}", dataset_name=str(folder))
    commands = '`python tools/prepare-data.py "x/y" --as messages --rows -m m -s 64 -o data/rows`'
    commands += ", and then `train-llm.py -m m -s 64 -d data/rows`"
    refused(f"x/y has no rows: first run {commands}", dataset_name="x/y")


# -- What comes with a run -------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", ["16-chat", "17-lora"])
def test_a_run_and_what_must_stay(
    trainer, pretrained, conversations, rows_of_conversations, chapter
):
    """`final/` has the template and the token that ends an answer, as a server needs them."""
    folder = shutil.copytree(pretrained, trainer.folder / "chat-model")
    GenerationConfig(eos_token_id=5).save_pretrained(folder)
    flags = [*flags_for(folder, rows_of_conversations()), "-b", 2, "--max-steps", 1]
    options = {"script": CHAPTERS_BY_NUMBER[chapter[:2]], "processes": 2}
    run = trainer(*flags, **options)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    assert tokenizer.chat_template == DEMO_TEMPLATE.read_text()
    for name in ("final", "step-00000001"):  # the stop tokens of the base, and of the answers
        stops = GenerationConfig.from_pretrained(run.folder / name).eos_token_id
        assert stops == [5, tokenizer.eos_token_id]
    command = [run.folder / "final", "--prompt", "Hi", "--temperature", 0, "--max-new-tokens", 9]
    whole, answer = (
        run_tool(trainer.folder, "generate.py", *command, *more)
        for more in (["--prompt", "User: Hi\nAssistant:"], ["--chat"])
    )
    assert whole == f"User: Hi\nAssistant:{answer}"
    refused = {}
    if chapter == "16-chat":
        other = trainer.folder / "other.jinja"
        other.write_text("{# another #}" + DEMO_TEMPLATE.read_text())
        refused["rows_hash was"] = ["-d", rows_of_conversations("--chat-template", other)]
    else:
        command = [run.folder / "step-00000001", trainer.folder / "new", "--to", "transformers"]
        output = run_tool(trainer.folder, "convert-checkpoint.py", *command, status=1)
        assert_one_sentence(output, "chapter 17, with B and A apart")
        save_weights(folder, dtype=torch.bfloat16)  # another base in the same folder
        refused["base_hash was"] = []
    refused["/chat.jsonl has no rows"] = ["-d", conversations]
    for part, more in refused.items():
        result = trainer(*flags, "--max-steps", 2, *more, status=1, **options)
        assert_one_sentence(result.run.ranks[0].output, part)
        assert result.checkpoints == ["step-00000001"]
