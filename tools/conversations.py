"""Rows of many forms become conversations: messages, and the tools that they may call.

docs/data.md has the forms and the names of roles. What is not clear rejects its row, and nothing
becomes Python notation: a template would write it as text, and the model would learn it.
"""

import json
import re
import shlex
from functools import lru_cache


class Rejected(Exception):
    """A row or a file is left out. The arguments: the reason, and perhaps what shows it."""


# The names of each role, without capitals, hyphens and underscores. A `functioncall` is an answer
# whose content is the call.
ROLES = {
    "system": ["system", "developer"],
    "user": ["user", "human", "prompter"],
    "assistant": ["assistant", "gpt", "chatgpt", "model", "bot", "chatbot", "ai"],
    "tool": ["tool", "toolresponse", "toolresult", "tooloutput", "observation", "ipython"],
    "function_call": ["functioncall", "functioncalls", "toolcall", "toolcalls"],
}
ROLES["tool"] += ["function", "functionresponse", "functionresult", "functionoutput"]
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
PAIRS = [("prompt", "completion"), ("prompt", "response"), ("instruction", "output")]
COLUMNS = ["messages", "conversations", "system", "tools", "input", "history"]
COLUMNS += [*dict.fromkeys(name for pair in PAIRS for name in pair)]
KINDS = {dict: "an object", list: "a list"}
to_json = json.JSONEncoder(ensure_ascii=False).encode


@lru_cache(maxsize=1000)
def plain(name: str) -> str:
    """Function-Call, function_call and FunctionCall are one name."""
    return re.sub(r"[\s_-]", "", name).lower()


def role_of(name: str, roles: dict) -> str:
    """A role of ROLES, or what --role says."""
    role = roles.get(plain(name)) or ROLE_OF.get(plain(name))
    if not role:
        example = shlex.quote(f"{name[:40]}=assistant")
        raise Rejected(f"unknown role {name[:40]!r}: say which one it is, as in --role {example}")
    return role


def without_nulls(value):
    """Tables fill missing keys with null, at every depth. In JSON, a null is meant."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    return [without_nulls(v) for v in value] if isinstance(value, list) else value


def unpacked(value, name: str):
    """The value of JSON text, also of JSON text in JSON text. Other values stay."""
    try:
        while isinstance(value, str):
            value = json.loads(value or "null")
    except (ValueError, RecursionError):
        raise Rejected(f"{name} must be JSON, not this text", value) from None
    return value


def parsed(value, name: str, kind: type):
    """As unpacked(). The value is of this kind, or None."""
    value = unpacked(value, name)
    if not isinstance(value, kind | None):
        raise Rejected(f"{name} must be {KINDS[kind]}", value)
    return value


def text_of_cell(value, name: str) -> str | None:
    """Text, or the digits of a whole number. Other values have more than one way to be written."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str | None):
        raise Rejected(f"{name} must be text", value)
    return value


def conversation_of(row: object, roles: dict, found) -> tuple[list[dict], list]:
    """The messages of a row, and its tools. What is read is removed from the row."""
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        raise Rejected("a row must be an object, or a list of messages", row)
    system = row.pop("system", None)
    name = next((name for name in ("messages", "conversations") if name in row), None)
    pair = next((names for names in PAIRS if row.keys() >= {*names}), None)
    if name and (row[name] is not None or not pair):  # null in rows of another form
        messages = messages_of(row.pop(name), name, roles)
    elif pair and isinstance(row[pair[0]], list):  # two lists of messages, as TRL has them
        messages = messages_of(row.pop(pair[0]), pair[0], roles)
        messages = [message | {"weight": 0.0} for message in messages]
        messages += messages_of(row.pop(pair[1]), pair[1], roles)
    elif pair:
        messages = messages_of(turns_of_pair(row, *pair), "the row", roles)
    else:
        raise Rejected(f"no column messages, and none of the pairs {PAIRS}", f"columns {[*row]}")
    if system not in (None, ""):
        first = message_of({"role": "system", "content": system}, "the row", roles)
        if messages and messages[0]["role"] == "system":
            is_other = messages[0]["content"] != system
            found.counts["system columns that a system message replaces"] += is_other
        else:
            messages = [first, *messages]
    for message in messages:
        if message["role"] == "assistant" and has_loss(message) and not says_something(message):
            raise Rejected("an answer is empty: remove it, or give it a weight of 0")
    tools = parsed(row.pop("tools", None), "tools", list) or []
    tools = [parsed(tool, "a tool", dict) or {} for tool in tools]
    for tool in tools:
        parse_function(tool, "parameters")
    found.unread.update(key for key, value in row.items() if value is not None)
    return messages, tools


def turns_of_pair(row: dict, asks: str, answers: str) -> list[dict]:
    """The messages of a question and an answer, with those of `history` before them."""
    history = parsed(row.pop("history", None), "history", list) or []
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        raise Rejected("history must be a list of pairs", history)
    names = [asks, "input"] if answers == "output" else [asks]
    parts = [text_of_cell(row.pop(name, None), name) for name in names]
    question = "\n\n".join(part for part in parts if part)
    turns = []
    for asked, answer in [*history, (question, row.pop(answers))]:
        turns.append({"role": "user", "content": text_of_cell(asked, asks)})
        turns.append({"role": "assistant", "content": text_of_cell(answer, answers)})
    return turns


def messages_of(turns, column: str, roles: dict) -> list[dict]:
    return [message_of(turn, column, roles) for turn in parsed(turns, column, list) or []]


def message_of(message, column: str, roles: dict) -> dict:
    """A role, a content, and other keys: numbers of `weight` and `train`, text and JSON text."""
    message = parsed(message, f"a message of {column}", dict) or {}
    message = {key: value for key, value in message.items() if value not in (None, [])}
    shown = dict(message)
    role = message.pop("from", message.pop("role", None))
    content = message.pop("value", message.pop("content", None))
    role = role_of(role, roles) if isinstance(role, str) else role
    calls = []
    for key in ("tool_calls", "function_call"):  # the second one is the older form
        if key in message:
            calls += calls_of(message.pop(key), key)
    if role == "function_call":
        calls, role, content = calls_of(content, "function_call"), "assistant", ""
    if calls:
        message["tool_calls"] = calls
        content = "" if content is None else content
    if not isinstance(role, str) or not isinstance(content, str):
        raise Rejected("role and content of a message must be text, perhaps empty", shown)
    result = {"role": role, "content": content}
    for key in sorted(message):
        value = message[key]
        if key in ("weight", "train"):
            if not isinstance(value, int | float) or not abs(value) < 1e9:
                raise Rejected(f"{key} of a message must be a number, or true or false", value)
            result[key] = float(value)  # 0 and false are the same here
        else:
            result[key] = value if isinstance(value, str | bool) else to_json(value)
    return result


def has_loss(message: dict) -> bool:
    return 0 not in (message.get("weight"), message.get("train"))


def says_something(message: dict) -> bool:
    """Whether it has any text: a content, a call, a thought."""
    texts = [value for key, value in message.items() if key not in ("role", "name")]
    return any(isinstance(text, str) and text.strip() for text in texts)


def calls_of(value, name: str) -> list[dict]:
    """The calls of a message: one or a list. Their arguments are objects, as servers make them."""
    value = unpacked(value, name)
    found = [value] if isinstance(value, dict) else parsed(value, name, list) or []
    calls = [parsed(call, "a call of a tool", dict) or {} for call in found]
    for call in calls:
        function = parse_function(call, "arguments")
        function.setdefault("arguments", {})
        if not isinstance(function.get("name"), str):
            raise Rejected("a call of a tool must have a name", call)
    if name == "tool_calls":
        return calls
    return [c if "function" in c else {"type": "function", "function": c} for c in calls]


def parse_function(called: dict, key: str) -> dict:
    """The function of a call or of a tool, whose JSON text becomes objects."""
    if "function" in called:
        called["function"] = parsed(called["function"], "the function of a tool", dict) or {}
    function = called.get("function", called)
    if key in function:
        function[key] = parsed(function[key], key, dict) or {}
    return function


def conversation_as_text(row: object, args, found, fills: bool) -> tuple[str, int]:
    """A conversation as JSON text, and the characters of its contents."""
    if isinstance(row, dict) and (fills or args.drop_nulls):
        row = {column: without_nulls(value) for column, value in row.items()}
    messages, tools = conversation_of(row, args.role, found)
    if not messages:
        return "", 0
    roles = [message["role"] for message in messages]
    found.counts.update(f"messages of {role}" for role in roles)
    found.counts["conversations without an answer"] += "assistant" not in roles[1:]
    found.counts["conversations with tools"] += bool(tools)
    for message in messages:
        found.counts["calls with null, which is kept"] += "null" in message.get("tool_calls", "")
        for key, value in message.items():
            found.types[key].add(type(value).__name__)
    text = to_json({"messages": messages, "tools": to_json(tools) if tools else None})
    return text, sum(len(message["content"]) for message in messages)
