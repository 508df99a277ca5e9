"""Rows of tokens with labels, for chapters 16 and 17. tools/prepare-data.py --rows writes them.

A conversation becomes the text that a server would send to the model, and only the tokens of its
answers have labels. A document of text has a label on each token but the first. A row holds several
whole texts. `position_ids` begin at 0 where a text begins, so that a model can keep them apart.

The first pass tokenizes all documents into Arrow files, which are mapped into memory. Only then is
it known which conversations have an answer that fits, and the last 1 % of these are held out. The
second pass packs the texts. `rows.json` has the facts that a training checks.
"""

import json
import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path

import numpy
import pyarrow
import pyarrow.compute
import xxhash
from rows import BATCH, in_order, processes, tokens_of_text
from tqdm import tqdm

LOOK = 100  # conversations that show whether the template fits
PACKED = 1000  # texts that are packed together
EVAL_ROWS = 1000  # held-out rows at most, because each evaluation takes time
SHOWN = 1500  # characters of the first row that the tool prints
NO_LABEL = -100  # a token without a loss
# A text is a row of token ids. A conversation becomes one text, or several, and rows are made of
# texts. `stop_tokens` are the last tokens of the answers that fit into a row. Only the first text
# of a conversation has the number of all its `answers`, or a `refusal`, which says why there are
# none.
LIST = pyarrow.list_(pyarrow.int32())
COLUMNS = dict.fromkeys(["input_ids", "labels", "stop_tokens"], LIST)
COLUMNS |= {"answers": pyarrow.int32(), "refusal": pyarrow.string()}
TEXTS = pyarrow.schema(COLUMNS)


# -- All together ----------------------------------------------------------------------------------


def write_rows(documents: Callable, write: Callable, work: Path, args) -> tuple[dict, dict]:
    """Writes the rows of both splits. Returns how many there are, and the facts of rows.json.

    `documents(split)` yields arrays with one document, and `write(split, tables)` counts the rows.
    """
    texts_in.cache_clear()
    tokenizer = load_tokenizer(args)
    facts = facts_of_rows(tokenizer, args)
    if args.form == "messages":
        look_at([json.loads(data) for data in islice(bytes_of(documents("train")), LOOK)], args)
    with processes(args.workers, begin, args) as pool:
        files = {split: work / f"{split}.arrow" for split in ("train", "validation")}
        for split, file in files.items():
            tokenize_split(pool, split, documents(split), file, args)
        train = texts_in(str(files["train"]))
        parts = {split: (file, 0, len(texts_in(str(file)))) for split, file in files.items()}
        if not parts["validation"][2]:
            begin_held_out = place_to_hold_out(train)
            parts["validation"] = (files["train"], begin_held_out, len(train))
            parts["train"] = (files["train"], 0, begin_held_out)
        if args.form == "messages":
            ends = pyarrow.compute.list_flatten(train["stop_tokens"]).unique().to_pylist()
            ends = [token for token in ends if token in tokenizer.added_tokens_decoder]
            facts["stop_tokens"] = ends
        digest = xxhash.xxh3_128(f"{facts['tokenizer']} {facts['template']}".encode())
        rows = {}
        for split, (file, first, end) in parts.items():
            tables = packed_tables(pool, file, first, end, args)
            table = next(tables, None)
            if table is None:
                what = "to train on" if split == "train" else "to hold out"
                sys.exit(f"error: too few texts fit into -s {args.seq_length} {what}: raise -s")
            if split == "train":
                facts["first"] = marked(*first_row(table), tokenizer)
            tables = chain([table], tables)
            if split == "validation":
                tables = first_rows(tables, EVAL_ROWS)
            rows[split] = write(split, digested(tables, digest))
    return rows, facts | {"rows_hash": digest.hexdigest()}


def facts_of_rows(tokenizer, args) -> dict:
    """What a training must share with its rows, but for their hash."""
    from datasets.fingerprint import Hasher

    vocabulary = sorted(tokenizer.get_vocab().items())
    is_chat = args.form == "messages"
    return {
        "command": shlex.join(["python", "tools/prepare-data.py", *sys.argv[1:]]),
        "model_name": args.model_name,
        "length": args.seq_length,
        "packed": args.packing != "none",
        "tokenizer": Hasher.hash(json.dumps(vocabulary)),
        "template": Hasher.hash(tokenizer.chat_template) if is_chat else None,
        "chat_template": args.chat_template,
        "stop_tokens": [tokenizer.eos_token_id],
    }


def load_tokenizer(args):
    """With the chat template of --chat-template, or its own."""
    import transformers

    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model_name)
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {args.model_name} has no end-of-text token")
    tokenizer.chat_template = args.chat_template or tokenizer.chat_template
    if args.form == "messages" and not tokenizer.chat_template:
        sys.exit(f"error: {args.model_name} has no chat template: give --chat-template a file")
    return tokenizer


def bytes_of(documents: Iterator[pyarrow.Array]) -> Iterator[bytes]:
    return (document[0].as_py() for document in documents)


def marked(ids: list[int], labels: list[int], begins: list[int], tokenizer) -> str:
    """A row as text: « and » around what has a loss, and │ between two texts."""
    text = ""
    parts = zip(begins, [*begins[1:], len(ids)], strict=True)
    for number, (begin, end) in enumerate(parts):
        tokens = zip(ids[begin:end], labels[begin:end], strict=True)
        text += "│" * (number > 0)
        for has_loss, part in groupby(tokens, key=lambda pair: pair[1] >= 0):
            piece = tokenizer.decode([token for token, _ in part])
            text += f"«{piece}»" if has_loss else piece
    return text


def first_row(table: pyarrow.Table) -> tuple[list, list, list]:
    """Its token ids, its labels, and the places where a text begins."""
    row = {name: column[0].as_py() for name, column in zip(table.column_names, table, strict=True)}
    positions = row.get("position_ids", [0])
    return row["input_ids"], row["labels"], [n for n, place in enumerate(positions) if place == 0]


def first_rows(tables: Iterator[pyarrow.Table], count: int) -> Iterator[pyarrow.Table]:
    for table in tables:
        yield table.slice(0, count)
        count -= len(table)
        if count <= 0:
            return


def digested(tables: Iterator[pyarrow.Table], digest) -> Iterator[pyarrow.Table]:
    """The tables, whose numbers are in the hash when they are all read."""
    for table in tables:
        for column in table:
            is_list = pyarrow.types.is_list(column.type)
            numbers = pyarrow.compute.list_flatten(column) if is_list else column
            digest.update(numpy.ascontiguousarray(numbers.to_numpy()))
        yield table


# -- First pass: texts -----------------------------------------------------------------------------


def begin(args) -> None:
    """In each process."""
    global tokenizer, flags
    tokenizer, flags = load_tokenizer(args), args


def tokenize_split(pool: Executor, split: str, documents: Iterator, file: Path, args) -> None:
    """Writes the texts of all documents, and prints how many answers fit."""
    documents = bytes_of(documents)
    batches = iter(lambda: [*islice(documents, BATCH)], [])
    count = 0
    with pyarrow.ipc.new_stream(str(file), TEXTS) as writer:
        bar = tqdm(unit=" documents", unit_scale=True, disable=None, desc=f"{split} tokens")
        for size, batch in in_order(pool, tokenize, batches, args.workers):
            writer.write_batch(batch)
            bar.update(size)
            count += size
        bar.close()
    texts = texts_in(str(file))
    if args.form == "text" or not count:
        return
    answers = pyarrow.compute.sum(texts["answers"]).as_py()
    fitting = len(pyarrow.compute.list_flatten(texts["stop_tokens"]))
    counts = f"{count:,} conversations, {answers:,} answers"
    print(f"{split}: {counts}: {fitting:,} fit into -s {args.seq_length}")
    refused = texts["refusal"].filter(pyarrow.compute.not_equal(texts["refusal"], ""))
    if len(refused):
        what = f"the template refuses {len(refused):,} conversations"
        print(f"warning: {what}, as with: {refused[0]}")
        if len(refused) > count / 20:
            sys.exit("error: more than 5% of the conversations are refused, too many to leave out")


@lru_cache
def texts_in(file: str) -> pyarrow.Table:
    return pyarrow.ipc.open_stream(pyarrow.memory_map(file)).read_all()


def tokenize(documents: list[bytes]) -> tuple[int, pyarrow.RecordBatch]:
    """The number of some documents, and their texts, in a process that has begun."""
    if flags.form == "messages":
        rows = [json.loads(document) for document in documents]
        texts = texts_of_rows(rows, tokenizer, flags.template_options, flags.seq_length)
    else:
        texts = []
        for document in documents:
            texts += pieces_of(document.decode(), tokenizer, flags.seq_length)
    columns = [[text[name] for text in texts] for name in TEXTS.names]
    return len(documents), pyarrow.record_batch(columns, TEXTS)


def pieces_of(document: str, tokenizer, size: int) -> list[dict]:
    """The texts of a document: one, or pieces of `size` tokens.

    A piece begins with the last token of the one before, so only the first token of a document has
    no label.
    """
    texts = []
    for ids in tokens_of_text(document, tokenizer):
        for begin in range(0, len(ids) - 1, size - 1):
            piece = ids[begin : begin + size]
            text = new_text() | {"input_ids": piece, "labels": [NO_LABEL, *piece[1:]]}
            texts.append(text | {"answers": int(begin == 0)})
    return texts


def texts_of_rows(rows: list[dict], tokenizer, options: dict, size: float) -> list[dict]:
    """The texts of conversations. Labels are NO_LABEL, except for the tokens of answers."""
    texts = []
    for row in rows:
        try:
            texts += texts_of(*conversation_of(row), tokenizer, options, size)
        except Exception as error:  # from a template, it may be any
            texts.append(new_text(refusal=str(error) or repr(error)))
    return texts


def conversation_of(row: dict) -> tuple[list[dict], list | None]:
    """The messages of a row, and its tools or None. Null stands for a key that is not there."""
    messages = [{k: v for k, v in m.items() if v is not None} for m in row["messages"] or []]
    for message in messages:
        if "tool_calls" in message:  # JSON text, as a table would give all calls the same keys
            message["tool_calls"] = json.loads(message["tool_calls"])
    return messages, json.loads(row.get("tools") or "null")


def texts_of(messages: list[dict], tools, tokenizer, options: dict, size: float) -> list[dict]:
    """One or more texts of a conversation, with the answers that fit into `size` tokens."""
    options = {"tokenize": False, "tools": tools, **options}
    texts = [new_text()]
    for n, message in enumerate(messages):
        has_loss = 0 not in (message.get("weight"), message.get("train"))  # False is 0, too
        if message["role"] != "assistant" or n == 0 or not has_loss:
            continue  # an answer needs a prompt
        # The answer begins where the prompt ends, because a server sends this prompt.
        prompt = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(messages[: n + 1], **options)
        if not whole.startswith(prompt):
            raise ValueError(f"an answer does not begin where its prompt ends: {prompt[-60:]!r}")
        answer = whole[len(prompt) :].rstrip()  # without the line end behind it
        # Each is tokenized apart. In one text, a token could have characters of both.
        # SentencePiece puts a space before a text. So tokenize the answer behind a line end, and
        # cut off the tokens of both.
        prompt_ids, line_end, answer_ids = encode([prompt, "\n", "\n" + answer], tokenizer)
        if answer_ids[: len(line_end)] == line_end:
            answer_ids = answer_ids[len(line_end) :]
        else:  # the answer begins with white space, which joins the line end
            [answer_ids] = encode([answer], tokenizer)
        texts[0]["answers"] += 1
        # Whole answers only, because a cut answer does not teach to stop.
        if len(prompt_ids) + len(answer_ids) > size:
            continue
        # Usually, the tokens of the prompt continue the last text, which then grows. Some templates
        # change earlier turns, as Qwen3's removes thoughts. Then begin another text.
        if prompt_ids[: len(texts[-1]["input_ids"])] != texts[-1]["input_ids"]:
            texts.append(new_text())
        text = texts[-1]
        text["labels"] += [NO_LABEL] * (len(prompt_ids) - len(text["labels"])) + answer_ids
        text["labels"][0] = NO_LABEL  # nothing predicts it, even if the prompt is empty
        text["input_ids"] = prompt_ids + answer_ids
        text["stop_tokens"] += answer_ids[-1:]
    return texts


def new_text(refusal: str = "") -> dict:
    """A text without tokens."""
    return {"input_ids": [], "labels": [], "stop_tokens": [], "answers": 0, "refusal": refusal}


def encode(texts: list[str], tokenizer) -> list[list[int]]:
    """The token ids of each text."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # which the files of a tokenizer may ask for
    backend.no_padding()
    # "Fast" does not find the place of each token in its text. The template writes the
    # begin-of-text token, so the tokenizer must not add another one.
    return [found.ids for found in backend.encode_batch_fast(texts, add_special_tokens=False)]


# -- Does the template fit? ------------------------------------------------------------------------


def look_at(rows: list[dict], args) -> None:
    """Prints what some conversations show. Ends the tool if none of them has a good answer."""
    tokenizer = load_tokenizer(args)
    stop_token = find_stop_token(tokenizer, args.template_options, rows)
    print(f"answers end with {tokenizer.convert_ids_to_tokens(stop_token)}")
    messages = [message for row in rows for message in row["messages"]]
    keys = {key for message in messages for key in message}
    keys -= {"role", "content", "weight", "train", *re.findall(r"\w+", tokenizer.chat_template)}
    if keys:
        print(f"warning: the chat template does not read these keys: {', '.join(sorted(keys))}")
    others = ("role", "weight", "train")
    texts = [text for m in messages for key, text in m.items() if key not in others]
    texts = [text if isinstance(text, str) else json.dumps(text) for text in texts]
    contents = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if inside := special_tokens(contents, tokenizer):
        what = f"contents of messages contain special tokens: {', '.join(inside)}"
        print(f"warning: {what}: remove those that are not meant")


def find_stop_token(tokenizer, options: dict, rows: list[dict]) -> int:
    """The token that ends the first good answer of some conversations."""
    problem = "no conversation has an answer, of the role 'assistant' and behind a question"
    for text in texts_of_rows(rows, tokenizer, options, math.inf):
        answer_ids = [token for token in text["labels"] if token >= 0]
        if text["refusal"]:
            problem = f"a conversation is refused (docs/data.md says why): {text['refusal']}"
        elif answer_ids and answer_ids == text["stop_tokens"]:  # one token each
            problem = "the chat template leaves out the answers"
        elif answer_ids and answer_ids[-1] not in tokenizer.added_tokens_decoder:
            problem = f"an answer ends with {tokenizer.decode(answer_ids[-9:])!r}, no special token"
        elif answer_ids:
            return answer_ids[-1]
    sys.exit(f"error: {problem}")


def special_tokens(texts: list[list[int]], tokenizer) -> list[str]:
    """Those that stand in the texts. Such a text may end a document or an answer."""
    special = {*tokenizer.all_special_ids}
    for token, added in tokenizer.added_tokens_decoder.items():
        # Some that begin a turn are not marked. Tags and white space may be a part of the text.
        if added.special or re.search(r"[|\uff5c]", added.content):
            special.add(token)
    inside = Counter(token for ids in texts for token in ids if token in special)
    return [f"{tokenizer.convert_ids_to_tokens(t)} ({n:,} times)" for t, n in inside.items()]


# -- Second pass: rows -----------------------------------------------------------------------------


def place_to_hold_out(texts: pyarrow.Table) -> int:
    """The first text of the last 1 % of the documents. Only those with an answer that fits count.

    Before they are packed, because packing sorts them: the last rows would have short texts, and
    both splits could have texts of one conversation.
    """
    # `answers` is above 0 in the first text of each, so this sum is the number of each text's
    # document.
    numbers = numpy.cumsum(texts["answers"].to_numpy() > 0)
    lengths = pyarrow.compute.list_value_length(texts["input_ids"]).to_numpy()
    fitting = numpy.unique(numbers[lengths > 0])
    held_out = fitting[-min(max(1, len(fitting) // 100), EVAL_ROWS) :]
    # If no text fits, there is nothing to train on either.
    return int(numpy.searchsorted(numbers, held_out[0])) if len(held_out) else 0


def packed_tables(pool, file: Path, first: int, end: int, args) -> Iterator[pyarrow.Table]:
    """The rows of the texts with these numbers."""
    places = range(first, end, PACKED)
    batches = ((str(file), place, min(PACKED, end - place)) for place in places)
    bar = tqdm(in_order(pool, pack_texts, batches, args.workers), disable=None, desc="packing")
    return (pyarrow.Table.from_batches([batch]) for batch in bar if len(batch))


def pack_texts(place: tuple[str, int, int]) -> pyarrow.RecordBatch:
    """Packs the texts of a file, from a number on, in a process that has begun."""
    file, first, count = place
    texts = texts_in(file).select(["input_ids", "labels"]).slice(first, count).to_pylist()
    rows = pack(texts, flags.seq_length, several=flags.packing != "none")
    types = dict.fromkeys(["input_ids", "labels", "position_ids"], LIST)
    if flags.packing == "none":
        del types["position_ids"]  # without positions, a model reads a row as one text
    types["answer_tokens"] = pyarrow.int32()
    columns = [[row[name] for row in rows] for name in types]
    return pyarrow.record_batch(columns, pyarrow.schema(types))


def pack(texts: list[dict], size: int, several: bool) -> list[dict]:
    """Rows of `size` tokens. Each has one or several whole texts, then padding."""
    rows = []
    # The longest texts come first, each into the fullest row that has room.
    for text in sorted(texts, key=lambda text: -len(text["labels"])):
        length = len(text["labels"])
        text = {**text, "position_ids": [*range(length)]}
        with_room = [row for row in rows if len(row["labels"]) <= size - length]
        if several and with_room:
            fullest = max(with_room, key=lambda row: len(row["labels"]))
            for name, values in fullest.items():
                values.extend(text[name])
        elif length:  # one or more of its answers fit
            names = ("input_ids", "labels", "position_ids")
            rows.append({name: [*text[name]] for name in names})
    for row in rows:
        padding = size - len(row["labels"])
        row["answer_tokens"] = len(row["labels"]) - row["labels"].count(NO_LABEL)
        row["input_ids"] += [0] * padding  # any token
        row["labels"] += [NO_LABEL] * padding
        row["position_ids"] += range(padding)
    return rows
