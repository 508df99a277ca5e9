"""Chapter 16: a plain loop, in which each conversation is alone, has the same losses and gradients.

test_labels.py has its rows, which tools/prepare-data.py writes.
"""

import json
import re
import shutil
from itertools import pairwise
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers.models import DEMO_TEMPLATE, LLAMA, TINY_LLAMA, save_weights, write_model
from helpers.plain_loops import BATCH, SIZE, assert_job_is_plain, flags_for, plain_loop, samples_of
from helpers.runner import CHAPTER_16, load, run_tool
from helpers.trainings import described
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
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


# -- The plain loop --------------------------------------------------------------------------------


# By the ranks: the model, the samples of a rank at a time, and other flags
CASES = {
    1: [("tied", 12), ("untied", 4, "--no-packing")],
    2: [("untied", 3, "--compile"), ("tied", 1, "--no-packing", "blank"), ("tied", 6, "text")],
    3: [("tied", 2, "--no-reshard-after-forward"), ("untied", 4, "--cpu-offload")],
    4: [("untied", 3, "--activation-checkpointing"), ("tied", 1, "--no-packing", "blank")],
}


def without_labels(rows, folder):
    """A copy in which about every second row has no label, so some micro-batches have no answer."""
    shutil.copytree(rows, folder)
    for file in folder.glob("train-*"):
        found = pq.read_table(file).to_pylist()
        for row in found:
            if row["input_ids"][3] % 2:
                row |= {"labels": [-100] * SIZE, "answer_tokens": 0}
        pq.write_table(pa.Table.from_pylist(found), file)
    return folder


@pytest.mark.rest
@pytest.mark.parametrize("ranks", CASES)
def test_each_conversation_alone(chat, tmp_path, rows_of_conversations, dataset, ranks):
    """And each document of rows of text."""
    cases, plain = [], {}
    for kind, batch, *more in CASES[ranks]:
        folder = tmp_path / kind
        if not folder.exists():
            save_weights(write_model(folder, **LLAMA | {"tie_word_embeddings": kind == "tied"}))
        name = f"{kind}-{batch}"
        rows = rows_of_conversations(*[flag for flag in more if flag == "--no-packing"])
        if "text" in more:
            rows = tmp_path / "rows-of-text"
            command = [dataset, "--rows", "-m", TINY_LLAMA, "-s", SIZE, "-o", rows]
            run_tool(tmp_path, "prepare-data.py", *command)
        if "blank" in more:
            rows = without_labels(rows, tmp_path / f"rows-of-{name}")
        flags = [*flags_for(folder, rows), "--lr", 1e-3]
        flags += ["--gradient-accumulation-steps", BATCH // ranks // batch]
        flags += [flag for flag in more if flag not in ("blank", "text", "--no-packing")]
        plain[name] = plain_loop(chat, folder, rows)
        cases.append(described(tmp_path, name, "16", kind, batch, flags))
    assert_job_is_plain(tmp_path, cases, plain, ranks)
