"""Chapter 16: a plain loop, in which each conversation is alone, has the same losses and gradients.

Which tokens have labels is written out by hand, for templates in the manner of known families.
"""

import json
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import LLAMA, TINY_LLAMA, damaged, save_weights, write_model, write_rows
from runner import CHAPTER_16, REPOSITORY, load
from test_equal import OFF, STEPS, Case, described, run, worst
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    get_scheduler,
)

END = ("<|endoftext|>", 0)
DEMO_TEMPLATE = REPOSITORY / "models" / "tiny-chat" / "template.jinja"


@pytest.fixture(scope="session")
def chat():
    return load(CHAPTER_16)


# -- Labels ----------------------------------------------------------------------------------------

# Templates in the manner of these families, shortened. « and » are the borders of the answers, of
# which a text has all labels, and no others. ¦ is a border of tokens. Qwen3 and Phi-3 change
# earlier turns, so there are two texts. In Llama 3 with this tokenizer, two line ends are one token
# only at the end of a prompt, so the second prompt has other tokens than the first text.
LLAMA_3 = """{{- '<|begin|>' }}{% for m in messages %}
{{- '<|header|>' + m.role + '<|end_header|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\n\n' }}{% endif %}"""
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}
{{- '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
QWEN_2 = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nHelp.<|im_end|>\n' }}
{%- endif %}"""
QWEN_3 = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}
{%- set text = m.content if loop.index0 > ns.last else m.content.split('</think>\n\n')[-1] %}
{{- '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}{{ '<turn>' }}
{{- 'model' if m.role == 'assistant' else m.role }}{{ '\n' + m.content | trim + '<end_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"""
PHI_3 = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"""
MISTRAL = """{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}
{{- '[INST] ' + m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}
{%- endfor %}"""
THOUGHT = "<think>\nMoin?\n</think>\n\n"
FAMILIES = {
    "Llama-3": (
        LLAMA_3,
        "<|begin|><|header|>user<|end_header|>\n¦\nHi<|eot|><|header|>assistant<|end_header|>\n\n"
        "«Größe 学习.<|eot|>»",
        "<|begin|><|header|>user<|end_header|>\n¦\nHi<|eot|><|header|>assistant<|end_header|>\n¦\n"
        "Größe 学习.<|eot|><|header|>user<|end_header|>\n¦\nAnd?<|eot|>"
        "<|header|>assistant<|end_header|>\n\n«No<|eot|>»",
    ),
    "Qwen2.5": (QWEN_2 + CHATML,),
    "Qwen3": (
        QWEN_3,
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«{THOUGHT}Größe 学习.<|im_end|>»",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nGröße 学习.<|im_end|>\n"
        f"<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n«{THOUGHT}No<|im_end|>»",
    ),
    "Gemma": (GEMMA,),
    "Mistral": (MISTRAL,),
    "Phi-3": (PHI_3,),
    "ChatML": (
        CHATML,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Größe 学习.<|im_end|>»\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n«No<|im_end|>»",
    ),
    "the demo": (
        DEMO_TEMPLATE.read_text(),
        "User: Hi\nAssistant:« Größe 学习.<|endoftext|>»\nUser: And?\nAssistant:« No<|endoftext|>»",
    ),
}


def tokenizer_with(template: str):
    """The tiny tokenizer, in which the special tokens of this template are one token each.

    As many tokenizers do, it would add a begin-of-text token of its own.
    """
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    special = sorted({*re.findall(r"<[|\w]+>|</s>|\[/?INST\]", template)} - {"</think>"})
    begin = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[END])
    tokenizer.backend_tokenizer.post_processor = begin
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("family", [name for name, (_, *texts) in FAMILIES.items() if texts])
def test_labels_are_the_answers(chat, family):
    """As written out above. The others: test_tokens_of_a_server"""
    template, *expected = FAMILIES[family]
    tokenizer = tokenizer_with(template)
    thought = THOUGHT if family == "Qwen3" else ""

    def tokens_of(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    messages = [{"role": "user", "content": "Hi"}]
    messages += [{"role": "assistant", "content": f"{thought}Größe 学习.", "name": None}]
    messages += [{"role": "user", "content": "And?"}]
    messages += [{"role": "assistant", "content": f"{thought}No"}]
    messages += [{"role": "user", "content": "This has no answer."}]
    found = chat.tokenize({"messages": [messages]}, tokenizer, {}, 1024)
    assert len(found["input_ids"]) == len(expected)
    for text, ids, labels in zip(expected, found["input_ids"], found["labels"], strict=True):
        pieces = re.split("[«»]", text)  # every second one is an answer
        expected_ids, expected_labels = [], []
        for number, piece in enumerate(pieces):
            tokens = [token for part in piece.split("¦") for token in tokens_of(part)]
            expected_ids += tokens
            expected_labels += tokens if number % 2 else [-100] * len(tokens)
        assert ids == expected_ids
        assert labels == expected_labels


def test_answers_that_do_not_fit(chat):
    """The first answer has a label for each of its tokens; what follows is cut."""
    tokenizer = tokenizer_with(CHATML)
    turn = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
    whole = chat.tokenize({"messages": [turn * 2]}, tokenizer, {}, 99)
    first = len(chat.tokenize({"messages": [turn]}, tokenizer, {}, 99)["labels"][0])
    for size, length, left_out in ((first - 1, 0, 2), (first, first, 1), (first + 9, first, 1)):
        found = chat.tokenize({"messages": [turn * 2]}, tokenizer, {}, size)
        assert (found["answers"], len(found["stop_tokens"][0])) == ([2], 2 - left_out)
        for name in ("input_ids", "labels"):
            assert found[name][0] == whole[name][0][:length]


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": 3}}}]


def test_messages_without_a_loss(chat):
    """Their text stands in the next prompt."""
    answers = [A | {"content": "b", "weight": 0.0}, A | {"train": False}, A | {"weight": 1}]
    messages = [m for answer in answers for m in (Q, answer)]
    [ids], [labels] = (
        chat.tokenize({"messages": [messages]}, tokenizer_with(CHATML), {}, 99)[name]
        for name in ("input_ids", "labels")
    )
    tokenizer = tokenizer_with(CHATML)
    assert tokenizer.decode([i for i in labels if i >= 0]) == "a<|im_end|>"
    assert tokenizer.decode(ids).count("<|im_start|>assistant\nb<|im_end|>") == 1


def test_the_first_token_has_no_label(chat):
    """In a sample, the conversation before would predict it."""
    bare = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role != 'user' }}{% endfor %}"
    rows = {"messages": [[Q | {"content": ""}, A | {"content": "a b c"}]]}
    [labels] = chat.tokenize(rows, tokenizer_with(bare), {}, 99)["labels"]
    assert labels[0] == -100
    assert min(labels[1:]) >= 0


def test_samples_have_every_conversation_once(chat):
    chance = random.Random(0)
    rows = [[n] * chance.randint(0, 40) for n in range(1, 300)]
    for several in (True, False):
        batch = {name: [[*row] for row in rows] for name in ("input_ids", "labels")}
        batch |= {"position_ids": [[*range(len(row))] for row in rows]}
        batch |= {name: [1] * len(rows) for name in chat.COLUMNS if name not in batch}
        packed = chat.pack(batch, 64, several)
        found = []
        for ids, labels, positions in zip(
            packed["input_ids"], packed["labels"], packed["position_ids"], strict=True
        ):
            begins = [i for i, position in enumerate(positions) if position == 0]
            parts = [ids[a:b] for a, b in pairwise([*begins, 64])]
            found += [part.tolist() for part in parts if part[0]]
            assert labels.tolist() == [n or -100 for n in ids]
            assert several or len(parts) <= 2
        assert sorted(found) == [row for row in rows if row]
        if several:
            used = sum(map(len, rows)) / 64
            assert len(packed["labels"]) < 1.02 * used + 1


# A part of the sentence, and a template
WRONG = {
    "leaves out the answers": CHATML.replace("m.content", "''"),
    "is refused .*: an answer does not begin where its prompt ends": CHATML.replace(
        "assistant\n'", "assistant\n<think>'"
    ),
    "no special token": CHATML.replace("<|im_end|>", ""),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_templates(chat, sentence):
    args = SimpleNamespace(template_options={})
    rows = {"messages": [[Q, A | {"content": "a b"}]]}
    with pytest.raises(SystemExit, match=f"error: .*{sentence}"):
        chat.find_stop_token(tokenizer_with(WRONG[sentence]), args, rows)


# -- Tokens of a server ----------------------------------------------------------------------------

# As Qwen3.5's: the prompt opens a thought. An answer without a thought does not continue it.
THINKING = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and '</think>' in m.content %}{{ '<think>\n' }}
{{- m.content.split('<think>\n')[-1] }}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""
SPACE = """{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
TOOLS = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
{{- '<|im_start|>' + m.role + '\n' + m.content }}{% for call in m.tool_calls or [] %}
{{- '<call>' }}{% for name, value in call.function.arguments | items %}
{{- name }}={{ value | tojson }}{% endfor %}{% endfor %}
{{- '<|call|>' if m.tool_calls else '<|im_end|>' }}{{ '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {name: template for name, (template, *_) in FAMILIES.items()}
TEMPLATES |= {"a thought": THINKING, "a space": SPACE, "tools": TOOLS}
TEMPLATES |= {"a stop that takes the line end": CHATML}  # as in the tokenizer of Phi-3
# Answers; the questions are numbered
TURNS = [
    *[["a"], ["\nx = 1"], ["\n\na\n\n"], [" a"], ["  a  "], ["a", "b", "\nc"], ["", "a"]],
    *[["'s it"], ["123", "4"], ["\ta"], ["\r\na"], ["Größe 学习"], ["\u00a0a"], ["<|im_end|>a"]],
    *[["```\ncode\n```"], ["a\n", "b\n"], ["\U0001f680"], ["assistant\n"], ["...\n\n\n", "a"]],
    *[["\r\nb \r\n"], ["\U0001f680\u200d e\u0301"]],
    *[["<think>\nt\n</think>\n\na"], ["<think>\nt\n</think>\n\na", "<think>\n</think>\nb"]],
]


@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_of_a_server(chat, family):
    """The ids of each prompt, alone, and of each answer, alone. No other token has a label."""
    tokenizer = tokenizer_with(TEMPLATES[family])
    if family == "a stop that takes the line end":
        stop = AddedToken("<|im_end|>", special=True, rstrip=True)
        tokenizer.add_special_tokens({"extra_special_tokens": [stop]})
    refused = 0
    for answers in TURNS:
        messages = []
        for number, answer in enumerate(answers):
            messages += [Q | {"content": f"question {number}"}, A | {"content": answer}]
        if family == "tools":
            calls = json.dumps(CALLS)
            messages += [A | {"tool_calls": calls}, {"role": "tool", "content": "4"}, A]
        tools = [{"type": "function", "function": {"name": "f"}}] if family == "tools" else None
        batch = {"messages": [messages], "tools": [json.dumps(tools)]}
        found = chat.tokenize(batch, tokenizer, {}, 9999)
        parsed, _ = chat.conversation_of({"messages": messages})
        if family == "tools":
            assert parsed[-3]["tool_calls"] == CALLS
        texts = list(zip(found["input_ids"], found["labels"], strict=True))
        if found["refusal"] != [""] * len(texts):
            refused += 1
            assert texts == [([], [])]
            continue
        count = 0
        for n, message in enumerate(parsed):
            if message["role"] == "assistant":
                options = {"tokenize": False, "tools": tools}
                prompt = tokenizer.apply_chat_template(
                    parsed[:n], add_generation_prompt=True, **options
                )
                whole = tokenizer.apply_chat_template(parsed[: n + 1], **options)
                prompt_ids, answer_ids = (
                    tokenizer(text, add_special_tokens=False)["input_ids"]
                    for text in (prompt, whole[len(prompt) :].rstrip())
                )
                end = len(prompt_ids) + len(answer_ids)
                assert any(
                    ids[:end] == prompt_ids + answer_ids
                    and labels[len(prompt_ids) : end] == answer_ids
                    for ids, labels in texts
                ), (answers, n)
                count += len(answer_ids)
        assert sum(label >= 0 for _, labels in texts for label in labels) == count
        number = sum(message["role"] == "assistant" for message in parsed)
        assert found["answers"] == [number] + [0] * (len(texts) - 1)  # in the first text
    if family in FAMILIES:
        args = SimpleNamespace(template_options={})
        assert chat.find_stop_token(tokenizer, args, batch) == answer_ids[-1]
    expected = len(TURNS) - 2 if family == "a thought" else 0
    assert refused == expected


def test_answers_of_sentencepiece(chat):
    """It begins a text with a space, but not an answer."""
    pieces = ["▁", "\n", *"abcdefghijklmnopqrstuvwxyz:", "▁a", "▁b", "<end>"]
    backend = Tokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, [("▁", "a"), ("▁", "b")])
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(["<end>"])
    backend.enable_truncation(2)  # as in the files of some tokenizers
    backend.enable_padding(length=9)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for answer, expected in (("ab", ["a", "b"]), (" ab", ["▁a", "b"]), ("\na", ["\n", "a"])):
        row = {"messages": [[Q | {"content": "a"}, A | {"content": answer + "<end>"}]]}
        [labels] = chat.tokenize(row, tokenizer, {}, 99)["labels"]
        ids = [label for label in labels if label >= 0]
        assert tokenizer.convert_ids_to_tokens(ids) == [*expected, "<end>"]


# -- Files of conversations ------------------------------------------------------------------------

# A template that refuses a question
STRICT = """{% for m in messages if m.content == 'No' %}{{ raise_exception('No.') }}{% endfor %}"""
PLAIN = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»"


def write_file(file, rows) -> None:
    """In the format of the ending. A table has a type for each field: absent keys are null."""
    if file.suffix == ".jsonl":
        write_rows(file, rows)
    else:
        rows = datasets.Dataset.from_list(rows)
        {".csv": rows.to_csv, ".parquet": rows.to_parquet}[file.suffix](file)


TURN = {"messages": [Q, A]}
PAIR = {"prompt": "q", "response": "a"}
LONG = {"messages": [Q, A | {"content": "a " * 99}]}
REFUSED_ROW = {"messages": [Q | {"content": "No"}, A]}
CODES = [{"instruction": "q", "input": f"{n:03}", "output": "NA"} for n in range(99)]
CALLED = [[{"function": {"name": "f", "arguments": {key: 1}}}] for key in "ab"]
CALLED = [{"messages": [Q, A | {"tool_calls": calls}]} for calls in CALLED]
# The ending of a file, its rows, and what the first text or the sentence has
FILES = {
    "codes": ("csv", CODES, "user\nq\n\n000<|im_end|>\n<|im_start|>assistant\n«NA"),
    # Nulls in a table are those of absent keys. In JSON, they are meant.
    "calls with nulls": ("parquet", CALLED * 50, "«a<call>a=1<|call|>»"),
    "a null that is meant": (
        "jsonl",
        [{"messages": [Q, A | {"tool_calls": CALLS}]}] + [TURN] * 99,
        "«a<call>a=nullb=3<|call|>»",
    ),
    "tools": ("jsonl", [TURN | {"tools": [{"name": "f"}]}] * 99, '{"name": "f"}<|im_s'),
    "a long one at the end": ("jsonl", [TURN] * 50 + [LONG] * 2, PLAIN),
    "few refused": (
        "jsonl",
        [TURN] * 96 + [REFUSED_ROW] * 3,
        "warning: the template refuses 3 conversations, as with: No.",
    ),
    "many refused": (
        "jsonl",
        [TURN] * 94 + [REFUSED_ROW] * 5,
        "error: more than 5 % of the conversations are refused",
    ),
    "all refused": ("jsonl", [REFUSED_ROW] * 99, "a conversation is refused"),
    "no answers": ("jsonl", [{"messages": [Q]}] * 99, "error: no conversation has an answer"),
}


LISTS = ("input_ids", "labels")


def test_data_that_are_not_clean(chat, tmp_path):
    """Files of other tools: one sentence, and nothing is guessed."""
    args = SimpleNamespace(dataset_subset=None, template_options={}, seq_length=64, packing=False)
    listed = A | {"content": [{"type": "text", "text": "a"}]}
    for rows, sentence in (
        ([PAIR], "rows.jsonl has no messages: let tools/prepare-data.py make them"),
        ([{"messages": json.dumps([Q, A])}], "a conversation is refused (docs/data.md says why): "),
        (
            [{"messages": [Q, A | {"tool_calls": CALLS}]}],
            "must be str, bytes or bytearray, not list",
        ),
        ([{"messages": [Q | {"content": []}, listed]}], "the content of a message is no text"),
    ):
        args.dataset_name = str(write_rows(tmp_path / "rows.jsonl", rows * 9))
        with pytest.raises(SystemExit, match=f"error: .*{re.escape(sentence)}"):
            chat.load_samples(args, tokenizer_with(CHATML))


def test_held_out(chat, tmp_path, monkeypatch):
    """A part of a folder, or 1 %. A limit keeps evaluations short."""
    (tmp_path / "folder").mkdir()
    file = write_rows(tmp_path / "rows.jsonl", [TURN] * 500)
    for name in ("train-00000", "validation-00000"):
        write_file(tmp_path / "folder" / f"{name}.parquet", [TURN] * 20)
    args = {"dataset_subset": None, "template_options": {}, "seq_length": 64, "packing": False}
    for limit, data, expected in (
        *[(1000, file, (495, 5)), (3, file, (497, 3))],
        *[(1000, tmp_path / "folder", (20, 20)), (3, tmp_path / "folder", (20, 3))],
    ):
        monkeypatch.setattr(chat, "EVAL_SAMPLES", limit)
        parts = chat.load_samples(
            SimpleNamespace(**args, dataset_name=str(data)), tokenizer_with(CHATML)
        )
        assert tuple(map(len, parts)) == expected
        assert len(parts[1].data.column("answer_tokens")) == expected[1]
    with pytest.raises(SystemExit, match=f"error: .* has not written {tmp_path}: give it this fol"):
        chat.load_samples(SimpleNamespace(dataset_name=str(tmp_path)), None)


def test_no_answer_fits(chat, tmp_path, capsys):
    """One is refused, too. Nothing is left to train on, and main() says so."""
    file = write_rows(tmp_path / "rows.jsonl", [LONG] * 30 + [REFUSED_ROW])
    args = SimpleNamespace(dataset_name=str(file), dataset_subset=None, template_options={})
    args = SimpleNamespace(**vars(args), seq_length=64, packing=False)
    train, _ = chat.load_samples(args, tokenizer_with(STRICT + TOOLS))
    assert len(train) == 0
    assert "31 conversations, 30 answers: 0 fit into -s 64" in capsys.readouterr().out


def test_files_of_conversations(chat, prepare, tmp_path, capsys):
    """Each file is read, with nothing silent, or refused before its conversations are tokenized."""
    for case, (ending, rows, expected) in FILES.items():
        write_file(file := tmp_path / f"{case}.{ending}", rows)
        prepare(file, "--as", "messages", "--no-shuffle", "--overwrite")
        name = str(tmp_path / "out")
        args = SimpleNamespace(dataset_name=name, dataset_subset=None, template_options={})
        args = SimpleNamespace(**vars(args), seq_length=64, packing=False)
        try:
            train, held_out = chat.load_samples(args, tokenizer := tokenizer_with(STRICT + TOOLS))
        except SystemExit as end:
            found = end.code
            assert "fit into" not in capsys.readouterr().out or case == "many refused"
        else:
            found = capsys.readouterr().out
            for sample in train:
                before = -100
                for token, label in zip(*(sample[n].tolist() for n in LISTS), strict=True):
                    found += "»" * (label < 0 <= before) + "«" * (before < 0 <= label)
                    found += tokenizer.decode([token])
                    before = label
            assert len(held_out) == 1
        assert expected in found, (case, found)


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
    positions = torch.tensor([[*range(16)], [*range(5), *range(7), *range(4)]])
    batch = {"input_ids": ids, "position_ids": positions}
    logits = model(**chat.model_inputs(batch, torch.device("cpu")), use_cache=False).logits
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


# -- The plain loop --------------------------------------------------------------------------------

BATCH, SIZE = 12, 64  # samples per step, for 1 to 4 ranks


def flags_for(folder, data) -> list:
    return ["-m", folder, "--no-from-scratch", "-d", data, "--chat-template", DEMO_TEMPLATE]


def plain_loop(
    chat, folder, data, packing=True, adapt=lambda model: model, steps=STEPS
) -> SimpleNamespace:
    """Losses, norms, held-out losses and gradients of one process, a conversation at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = DEMO_TEMPLATE.read_text()
    args = SimpleNamespace(dataset_name=str(data), dataset_subset=None, template_options={})
    args = SimpleNamespace(**vars(args), seq_length=SIZE, packing=packing)
    train_set, eval_set = chat.load_samples(args, tokenizer)
    order = chat.sample_order(0, 0, len(train_set))
    model = adapt(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    by_decay = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (1, 0)]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(by_decay, (0.01, 0), strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = get_scheduler("cosine", optimizer, 0, steps)

    def losses_of(samples):
        """The sum over the answers of each conversation, and their number of tokens."""
        for sample in samples:
            begins = [0, SIZE]  # with --no-packing
            if packing:
                begins = [*(sample["position_ids"] == 0).nonzero().flatten(), SIZE]
            for begin, end in pairwise(begins):
                ids, labels = (sample[name][begin:end] for name in ("input_ids", "labels"))
                count = (labels >= 0).sum().item()
                if count:
                    logits = model(ids[None]).logits[0, :-1]
                    entropy = torch.nn.functional.cross_entropy
                    yield entropy(logits, labels[1:], reduction="sum"), count

    result = SimpleNamespace(loss=[], norm=[], held_out=[], gradients=[])
    for step in range(steps):
        samples = [train_set[int(i)] for i in order[step * BATCH : (step + 1) * BATCH]]
        sums, counts = zip(*losses_of(samples), strict=True)
        loss = sum(sums) / sum(counts)
        loss.backward()
        named = [(n, p) for n, p in model.named_parameters() if p.grad is not None]
        gradients = {n.removeprefix("base_model.model."): p.grad.clone() for n, p in named}
        result.gradients.append(gradients)  # without the prefix of PEFT
        result.loss.append(loss.item())
        result.norm.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // 2) == 0:
            with torch.no_grad():
                sums, counts = zip(*losses_of(eval_set), strict=True)
            result.held_out.append(sum(sums).item() / sum(counts))
    return result


def assert_job_is_plain(folder, cases: list, plain: dict, ranks: int) -> None:
    """Also the gradients of two steps."""
    run(folder, "job", cases, ranks)
    for name, expected in plain.items():
        found = Case(folder / name)
        assert_equal(expected, found)
        for step in (1, 2):
            error, parameter = worst(expected.gradients[step - 1], found.gradients(step))
            assert error < 1e-4, (name, step, parameter, error)


def assert_equal(plain, found) -> None:
    assert found.column("loss") == pytest.approx(plain.loss, rel=1e-5)
    assert found.column("grad_norm") == pytest.approx(plain.norm, rel=OFF["grad_norm"])
    assert found.column("eval/loss") == pytest.approx(plain.held_out, rel=1e-5)


# By the ranks: the model, the samples of a rank at a time, and other flags
CASES = {
    1: [("tied", 12), ("untied", 4, "--no-packing")],
    2: [("untied", 3, "--compile"), ("tied", 1, "--no-packing", "blank")],
    3: [("tied", 2, "--no-reshard-after-forward"), ("untied", 4, "--cpu-offload")],
    4: [("untied", 3, "--activation-checkpointing"), ("tied", 1, "--no-packing", "blank")],
}
# About every second conversation loses its labels, so some micro-batches have no answer.
BLANK = {
    '        text["position_ids"]': "        if sum(text['input_ids'][3:4]) % 2:\n"
    "            labels[:] = [-100] * len(labels)\n"
    '        text["position_ids"]'
}


@pytest.mark.rest
@pytest.mark.parametrize("ranks", CASES)
def test_each_conversation_alone(chat, tmp_path, conversations, ranks):
    cases, plain = [], {}
    blank = damaged(CHAPTER_16, tmp_path / "blank", BLANK)
    for kind, batch, *more in CASES[ranks]:
        folder = tmp_path / kind
        if not folder.exists():
            save_weights(write_model(folder, **LLAMA | {"tie_word_embeddings": kind == "tied"}))
        flags = [*flags_for(folder, conversations), "-s", SIZE, "--lr", 1e-3]
        flags += ["--gradient-accumulation-steps", BATCH // ranks // batch]
        flags += [flag for flag in more if flag != "blank"]
        name = f"{kind}-{batch}"
        case = described(tmp_path, name, "16", kind, batch, flags)
        module = chat
        if "blank" in more:
            case["script"], module = str(blank), load(blank)
        plain[name] = plain_loop(module, folder, conversations, "--no-packing" not in more)
        cases.append(case)
    assert_job_is_plain(tmp_path, cases, plain, ranks)
