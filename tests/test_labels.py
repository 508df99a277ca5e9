"""tools/labels.py: the rows of chapters 16 and 17, which tools/prepare-data.py --rows writes.

Which tokens have labels is written out by hand, for templates in the manner of known families.
"""

import json
import random
import re
from itertools import pairwise
from types import SimpleNamespace

import datasets
import pyarrow.parquet as pq
import pytest
from helpers.assertions import assert_one_sentence
from helpers.data import write_documents, write_rows
from helpers.models import DEMO_TEMPLATE, TINY_LLAMA
from helpers.runner import REPOSITORY, load, run_tool
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

END = ("<|endoftext|>", 0)
LISTS = ("input_ids", "labels")


@pytest.fixture(scope="session")
def labels():
    return load(REPOSITORY / "tools" / "labels.py")


def tokenize(labels, messages: list, tokenizer, size: float, tools=None) -> dict[str, list]:
    """The columns of the texts of one conversation."""
    row = {"messages": messages, "tools": json.dumps(tools)}
    texts = labels.texts_of_rows([row], tokenizer, {}, size)
    return {name: [text[name] for text in texts] for name in labels.COLUMNS}


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
def test_labels_are_the_answers(labels, family):
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
    found = tokenize(labels, messages, tokenizer, 1024)
    assert len(found["input_ids"]) == len(expected)
    for text, ids, found_labels in zip(expected, *(found[name] for name in LISTS), strict=True):
        pieces = re.split("[«»]", text)  # every second one is an answer
        expected_ids, expected_labels = [], []
        for number, piece in enumerate(pieces):
            tokens = [token for part in piece.split("¦") for token in tokens_of(part)]
            expected_ids += tokens
            expected_labels += tokens if number % 2 else [-100] * len(tokens)
        assert ids == expected_ids
        assert found_labels == expected_labels


def test_answers_that_do_not_fit(labels):
    """The first answer has a label for each of its tokens; what follows is cut."""
    tokenizer = tokenizer_with(CHATML)
    turn = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]
    whole = tokenize(labels, turn * 2, tokenizer, 99)
    first = len(tokenize(labels, turn, tokenizer, 99)["labels"][0])
    for size, length, left_out in ((first - 1, 0, 2), (first, first, 1), (first + 9, first, 1)):
        found = tokenize(labels, turn * 2, tokenizer, size)
        assert (found["answers"], len(found["stop_tokens"][0])) == ([2], 2 - left_out)
        for name in LISTS:
            assert found[name][0] == whole[name][0][:length]


Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"a": None, "b": 3}}}]


def test_messages_without_a_loss(labels):
    """Their text stands in the next prompt."""
    answers = [A | {"content": "b", "weight": 0.0}, A | {"train": False}, A | {"weight": 1}]
    messages = [m for answer in answers for m in (Q, answer)]
    tokenizer = tokenizer_with(CHATML)
    found = tokenize(labels, messages, tokenizer, 99)
    [ids], [found_labels] = (found[name] for name in LISTS)
    assert tokenizer.decode([i for i in found_labels if i >= 0]) == "a<|im_end|>"
    assert tokenizer.decode(ids).count("<|im_start|>assistant\nb<|im_end|>") == 1


def test_the_first_token_has_no_label(labels):
    """In a row, the conversation before would predict it."""
    bare = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role != 'user' }}{% endfor %}"
    messages = [Q | {"content": ""}, A | {"content": "a b c"}]
    [found] = tokenize(labels, messages, tokenizer_with(bare), 99)["labels"]
    assert found[0] == -100
    assert min(found[1:]) >= 0


def test_rows_have_every_conversation_once(labels):
    chance = random.Random(0)
    texts = [[n] * chance.randint(0, 40) for n in range(1, 300)]
    for several in (True, False):
        packed = labels.pack([{name: [*ids] for name in LISTS} for ids in texts], 64, several)
        found = []
        for row in packed:
            begins = [i for i, position in enumerate(row["position_ids"]) if position == 0]
            parts = [row["input_ids"][a:b] for a, b in pairwise([*begins, 64])]
            found += [part for part in parts if part[0]]
            assert row["labels"] == [n or -100 for n in row["input_ids"]]
            assert row["answer_tokens"] == sum(n > 0 for n in row["input_ids"])
            assert several or len(parts) <= 2
        assert sorted(found) == [ids for ids in texts if ids]
        if several:
            used = sum(map(len, texts)) / 64
            assert len(packed) < 1.02 * used + 1


# A part of the sentence, and a template
WRONG = {
    "leaves out the answers": CHATML.replace("m.content", "''"),
    "is refused .*: an answer does not begin where its prompt ends": CHATML.replace(
        "assistant\n'", "assistant\n<think>'"
    ),
    "no special token": CHATML.replace("<|im_end|>", ""),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_templates(labels, sentence):
    rows = [{"messages": [Q, A | {"content": "a b"}]}]
    with pytest.raises(SystemExit, match=f"error: .*{sentence}"):
        labels.find_stop_token(tokenizer_with(WRONG[sentence]), {}, rows)


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


def ids_of_a_server(tokenizer, messages: list, tools) -> tuple[list, list]:
    """Those of the prompt of the last message, and of this message."""
    options = {"tokenize": False, "tools": tools}
    prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    whole = tokenizer.apply_chat_template(messages, **options)
    answer = whole[len(prompt) :].rstrip()
    return tuple(
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer)
    )


@pytest.mark.parametrize("family", TEMPLATES)
def test_tokens_of_a_server(labels, family):
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
        found = tokenize(labels, messages, tokenizer, 9999, tools)
        parsed, _ = labels.conversation_of({"messages": messages})
        if family == "tools":
            assert parsed[-3]["tool_calls"] == CALLS
        texts = list(zip(*(found[name] for name in LISTS), strict=True))
        if found["refusal"] != [""] * len(texts):
            refused += 1
            assert texts == [([], [])]
            continue
        count = 0
        for n, message in enumerate(parsed, 1):
            if message["role"] == "assistant":
                prompt_ids, answer_ids = ids_of_a_server(tokenizer, parsed[:n], tools)
                end = len(prompt_ids) + len(answer_ids)
                assert any(
                    ids[:end] == prompt_ids + answer_ids
                    and of_text[len(prompt_ids) : end] == answer_ids
                    for ids, of_text in texts
                ), (answers, n)
                count += len(answer_ids)
        assert sum(label >= 0 for _, of_text in texts for label in of_text) == count
        number = sum(message["role"] == "assistant" for message in parsed)
        assert found["answers"] == [number] + [0] * (len(texts) - 1)  # in the first text
    if family in FAMILIES:
        rows = [{"messages": messages}]
        assert labels.find_stop_token(tokenizer, {}, rows) == answer_ids[-1]
    expected = len(TURNS) - 2 if family == "a thought" else 0
    assert refused == expected


def test_answers_of_sentencepiece(labels):
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
        messages = [Q | {"content": "a"}, A | {"content": answer + "<end>"}]
        [found] = tokenize(labels, messages, tokenizer, 99)["labels"]
        ids = [label for label in found if label >= 0]
        assert tokenizer.convert_ids_to_tokens(ids) == [*expected, "<end>"]


# -- The tool --------------------------------------------------------------------------------------

# A template that refuses a question
STRICT = """{% for m in messages if m.content == 'No' %}{{ raise_exception('No.') }}{% endfor %}"""
PLAIN = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n«a<|im_end|>»"
ROWS = ["--as", "messages", "--rows", "--no-shuffle", "--overwrite"]


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A tokenizer whose template refuses a question."""
    folder = tmp_path_factory.mktemp("models") / "strict"
    tokenizer_with(STRICT + TOOLS).save_pretrained(folder)
    return folder


def rows_in(folder, split="train") -> list[dict]:
    return pq.read_table(sorted(folder.glob(f"{split}-*"))).to_pylist()


def write_file(file, rows) -> None:
    """In the format of the ending. A table has a type for each field: absent keys are null."""
    if file.suffix == ".jsonl":
        write_rows(file, rows)
    else:
        rows = datasets.Dataset.from_list(rows)
        {".csv": rows.to_csv, ".parquet": rows.to_parquet}[file.suffix](file)


TURN = {"messages": [Q, A]}
LONG = {"messages": [Q, A | {"content": "a " * 99}]}
REFUSED_ROW = {"messages": [Q | {"content": "No"}, A]}
CODES = [{"instruction": "q", "input": f"{n:03}", "output": "NA"} for n in range(99)]
CALLED = [[{"function": {"name": "f", "arguments": {key: 1}}}] for key in "ab"]
CALLED = [{"messages": [Q, A | {"tool_calls": calls}]} for calls in CALLED]
NULL = {"messages": [Q, A | {"tool_calls": CALLS}]}
TOOL = TURN | {"tools": [{"name": "f"}]}
# The ending of a file, its rows, and what the output has
FILES = {
    "codes": ("csv", CODES, "user\nq\n\n000<|im_end|>\n<|im_start|>assistant\n«NA"),
    # Nulls in a table are those of absent keys. In JSON, they are meant.
    "calls with nulls": ("parquet", CALLED * 50, "«a<call>a=1<|call|>»"),
    "a null that is meant": ("jsonl", [NULL] + [TURN] * 99, "«a<call>a=nullb=3<|call|>»"),
    "tools": ("jsonl", [TOOL] * 99, '{"name": "f"}<|im_s'),
    "a long one at the end": ("jsonl", [TURN] * 50 + [LONG] * 2, "49 rows in train, 1 rows in val"),
    "a plain one": ("jsonl", [TURN] * 9, PLAIN),
    "few refused": (
        "jsonl",
        [TURN] * 96 + [REFUSED_ROW] * 3,
        "refuses 3 conversations, as with: No.",
    ),
}
# What the output has, and the rows
WITHOUT_ROWS = {
    "error: more than 5% of the conversations are refused": [TURN] * 94 + [REFUSED_ROW] * 5,
    "a conversation is refused": [REFUSED_ROW] * 99,
    "30 answers: 0 fit into -s 64": [LONG] * 30,
    "error: too few texts fit into -s 64 to train on": [TURN],
    "error: no conversation has an answer": [{"messages": [Q]}] * 99,
}


@pytest.mark.parametrize("case", FILES)
def test_files_of_conversations(prepare, labels, tmp_path, strict, case):
    """They become rows, with nothing silent."""
    ending, rows, expected = FILES[case]
    write_file(file := tmp_path / f"rows.{ending}", rows)
    output = prepare(file, *ROWS, "-m", strict, "-s", 64, "--no-packing")
    tokenizer = AutoTokenizer.from_pretrained(strict)
    for row in rows_in(tmp_path / "out"):
        assert row.keys() == {*LISTS, "answer_tokens"}  # one text, so no positions
        assert len(row["input_ids"]) == len(row["labels"]) == 64
        assert row["answer_tokens"] == sum(label >= 0 for label in row["labels"])
        output += labels.marked(row["input_ids"], row["labels"], [0], tokenizer)
    assert expected in output
    assert len(rows_in(tmp_path / "out", "validation")) == 1


@pytest.mark.parametrize("part", WITHOUT_ROWS)
def test_files_without_rows(prepare, tmp_path, strict, part):
    """They end in a sentence, and leave nothing."""
    file = write_rows(tmp_path / "rows.jsonl", WITHOUT_ROWS[part])
    output = prepare(file, *ROWS, "-m", strict, "-s", 64, "--no-packing", status=1)
    assert part in output
    assert_one_sentence(output, "error: ")
    assert not (tmp_path / "out" / "rows.json").exists()


def test_held_out(prepare, tmp_path, strict, monkeypatch):
    """A split of the sources, or 1 %. A limit keeps evaluations short."""
    file = write_rows(tmp_path / "rows.jsonl", [TURN] * 500)
    (tmp_path / "folder").mkdir()
    for name in ("a", "a_val"):
        write_rows(tmp_path / "folder" / f"{name}.jsonl", [TURN] * 20)
    for limit, data, expected in (
        *[(1000, file, (495, 5)), (3, file, (497, 3))],
        *[(1000, tmp_path / "folder", (20, 20)), (3, tmp_path / "folder", (20, 3))],
    ):
        monkeypatch.setattr("labels.EVAL_ROWS", limit)
        prepare(data, *ROWS, "-m", strict, "-s", 64, "--no-packing")
        counts = (len(rows_in(tmp_path / "out", split)) for split in ("train", "validation"))
        assert tuple(counts) == expected
    # Packed, no row of one split has a conversation of the other one.
    rows = [{"messages": [Q | {"content": f"{n}"}, A]} for n in range(500)]
    write_rows(file, rows)
    prepare(file, *ROWS, "-m", strict, "-s", 64)
    tokenizer = AutoTokenizer.from_pretrained(strict)
    texts = [
        "".join(tokenizer.decode(row["input_ids"]) for row in rows_in(tmp_path / "out", split))
        for split in ("train", "validation")
    ]
    numbers = [sorted(map(int, re.findall(r"user\n(\d+)<", text))) for text in texts]
    assert numbers == [[*range(497)], [*range(497, 500)]]


@pytest.fixture
def flags(tmp_path, strict):
    """To make rows of a file without overwriting."""
    rows = [{"messages": [Q | {"content": "x" * n}, A]} for n in range(99)]
    write_rows(tmp_path / "rows.jsonl", rows)
    return ["rows.jsonl", *ROWS[:-1], "-m", strict, "-s", 64]


def facts_in(folder) -> dict:
    return json.loads((folder / "out" / "rows.json").read_text())


def test_what_the_folder_says(prepare, tmp_path, strict, flags):
    """For people and for a chapter."""
    prepare(*flags)
    facts = facts_in(tmp_path)
    assert facts["command"].startswith("python tools/prepare-data.py -o out rows.jsonl --as mess")
    tokenizer = AutoTokenizer.from_pretrained(strict)
    assert tokenizer.convert_ids_to_tokens(facts["stop_tokens"]) == ["<|im_end|>"]
    page = (tmp_path / "out" / "README.md").read_text()
    for fact in ("tokenizer", "template", "stop_tokens"):
        assert f" {facts[fact]} |" in page.replace("`", "")
    assert "rows of 64 tokens" in page
    for name in ("train", "validation"):  # as people read the folder
        rows = datasets.load_dataset(str(tmp_path / "out"), split=name)
        assert rows[0] == rows_in(tmp_path / "out", name)[0]


def test_what_decides_the_rows(prepare, tmp_path, flags):
    """It makes other rows, or asks to replace them. The options are not those of this template."""
    template = tmp_path / "other.jinja"
    template.write_text(CHATML + "{{ '' }}")
    prepare(*flags)
    assert "Nothing has changed" in prepare(*flags)
    hashes = {facts_in(tmp_path)["rows_hash"]}
    for more, name, is_other in (
        (["-s", 96], "--seq-length", True),
        (["--chat-template", template], "--chat-template", True),
        (["--template-options", "{a: false}"], "--template-options", False),
        (["--no-packing"], "--packing", True),
    ):
        prepare(*flags, "--overwrite")
        output = prepare(*flags, *more, status=1)
        assert_one_sentence(output, f"out was made with different flags ({name}): --overwrite")
        prepare(*flags, *more, "--overwrite")
        facts = facts_in(tmp_path)
        assert (facts["rows_hash"] not in hashes) == is_other
        assert (facts["chat_template"] is None) == (name != "--chat-template")
        hashes.add(facts["rows_hash"])


def test_labels_decide_the_rows(prepare, tmp_path, flags):
    """Equal tokens, and other labels."""
    hashes = set()
    for weight in (0, 1):
        rows = [{"messages": [Q, A | {"weight": weight}, Q, A]}] * 9
        write_rows(tmp_path / "rows.jsonl", rows)
        prepare(*flags, "--overwrite")
        hashes.add(facts_in(tmp_path)["rows_hash"])
    assert len(hashes) == 2


def test_flags_of_rows(prepare, tmp_path, flags):
    for more in (["--mds"], ["--packing", "trunc"], ["--template-options", "3"]):
        prepare(*flags, *more, status=2)
    prepare("rows.jsonl", "--as", "messages", "--chat-template", DEMO_TEMPLATE, status=2)
    output = prepare("rows.jsonl", *ROWS, "-m", TINY_LLAMA, status=1)
    assert_one_sentence(output, "has no chat template: give --chat-template a file")


def test_what_the_template_does_not_read(labels, tmp_path, capsys):
    """And special tokens in questions, answers and calls. A tag of thoughts is none."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.add_tokens(["<\uff5cUser\uff5c>", "<think>", "\n\n\n"])
    tokenizer.save_pretrained(tmp_path)
    args = SimpleNamespace(form="messages", template_options={}, chat_template=None)
    args.model_name = tmp_path
    call = json.dumps([{"function": {"name": "f", "arguments": {"x": "<|im_end|>"}}}])
    for messages, keys, tokens in (
        ([Q, A], "", ""),
        ([Q, A | {"mood": "x", "weight": 1.0}], "mood", ""),
        ([Q | {"content": "What is <|im_end|>?"}, A], "", "<|im_end|> (9 times)"),
        ([Q, A | {"content": "<|endoftext|>" * 2}], "", "<|endoftext|> (18 times)"),
        ([Q, A | {"content": "<\uff5cUser\uff5c>"}], "", "<\uff5cUser\uff5c> (9 times)"),
        ([Q, A | {"tool_calls": call}], "tool_calls", "<|im_end|> (9 times)"),
        ([Q, A | {"content": "<think>\n\n\nb"}], "", ""),
    ):
        labels.look_at([{"messages": messages}] * 9, args)
        output = capsys.readouterr().out
        assert "answers end with <|im_end|>" in output
        warnings = [f"the chat template does not read these keys: {keys}"] * bool(keys)
        what = f"contents of messages contain special tokens: {tokens}"
        warnings += [f"{what}: remove those that are not meant"] * bool(tokens)
        assert re.findall("warning: (.*)", output) == warnings


def test_documents(prepare, chapter_1, texts, tmp_path):
    """Whole documents share rows. All tokens but the first of each have labels."""
    long = "x y " * 99
    write_documents(tmp_path / "a.jsonl", [*texts, "a<|endoftext|>b", long])
    prepare("a.jsonl", "--rows", "--no-shuffle", "-m", TINY_LLAMA, "-s", 64)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    rows = {"text": [*texts, "a<|endoftext|>b", long]}
    expected = []
    for ids in chapter_1.tokenize(rows, tokenizer, "text")["input_ids"]:
        # A piece of a long one begins with the last token of the piece before.
        expected += [ids[n : n + 64] for n in range(0, len(ids) - 1, 63)]
    found = []
    for split in ("train", "validation"):
        for row in rows_in(tmp_path / "out", split):
            begins = [n for n, position in enumerate(row["position_ids"]) if position == 0]
            for begin, end in pairwise([*begins, 64]):
                ids, of_text = (row[name][begin:end] for name in LISTS)
                if begin == 0 or any(ids):  # no padding
                    assert of_text == [-100, *ids[1:]]
                    found.append(ids)
            assert row["answer_tokens"] == sum(label >= 0 for label in row["labels"])
    assert sorted(found) == sorted(expected)
    facts = json.loads((tmp_path / "out" / "rows.json").read_text())
    assert facts["stop_tokens"] == [tokenizer.eos_token_id]
    assert facts["template"] is None


@pytest.mark.rest
def test_processes_write_the_same_rows(conversations, tmp_path):
    flags = [conversations, *ROWS, "-m", TINY_LLAMA, "--chat-template", DEMO_TEMPLATE, "-s", 64]
    hashes = set()
    for workers in (1, 2):
        more = ["--workers", workers, "-o", tmp_path / f"by-{workers}"]
        run_tool(tmp_path, "prepare-data.py", *flags, *more)
        facts = json.loads((tmp_path / f"by-{workers}" / "rows.json").read_text())
        hashes.add(facts["rows_hash"])
    assert len(hashes) == 1


def test_the_rows_of_the_demo(prepare, tmp_path):
    """They are those that the tool makes today."""
    chat = REPOSITORY / "models" / "tiny-chat"
    flags = ["--chat-template", chat / "template.jinja", "-m", TINY_LLAMA, "-s", 256]
    prepare(chat / "stdlib.jsonl", *ROWS, *flags)
    for split in ("train", "validation"):
        assert rows_in(chat / "rows", split) == rows_in(tmp_path / "out", split)
    shipped, new = (
        json.loads((folder / "rows.json").read_text())
        for folder in (chat / "rows", tmp_path / "out")
    )
    for name in shipped.keys() - {"command", "model_name"}:
        assert shipped[name] == new[name], name
