"""Makes `models/tiny-chat/`: conversations about Python's own library, for chapter 16's demo.

    python models/make-tiny-chat.py [--output-dir DIR]

`stdlib.jsonl` has the conversations. A question asks what a function or class does. The answer is
the first sentence of its docstring. A conversation has one to three questions. The file in the
repository was made with Python 3.11.7. Another Python has other docstrings. They are the work of
the Python Software Foundation, under its licence (https://docs.python.org/3/license.html).
"""

import argparse
import ast
import json
import random
import re
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
KINDS = {ast.FunctionDef: "function", ast.ClassDef: "class"}
LONGEST = 200  # characters of an answer


def first_sentence(docstring: str) -> str:
    """On one line. It ends at a full stop, or at an empty line."""
    sentence = re.split(r"(?<=\.)\s|\n\n", docstring.strip())[0]
    return " ".join(sentence.split())


def answers(file: Path) -> dict[str, str]:
    """The answer of each question about the functions and classes of a module."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8", errors="replace"))):
        kind = KINDS.get(type(node))
        if kind and not node.name.startswith("_") and (text := ast.get_docstring(node)):
            question = f"What does the {kind} {node.name} of {file.stem} do?"
            found[question] = first_sentence(text)
    return {q: answer for q, answer in found.items() if 15 < len(answer) < LONGEST}


def conversation(turns: list[tuple[str, str]], has_system_message: bool) -> dict:
    messages = []
    if has_system_message:
        messages.append({"role": "system", "content": "You know Python."})
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "models" / "tiny-chat")
    args = parser.parse_args()

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    pairs = [pair for file in files for pair in answers(file).items()]
    generator = random.Random(0)
    generator.shuffle(pairs)
    rows = []
    while pairs:
        count = generator.choice([1, 1, 2, 3])
        rows.append(conversation(pairs[:count], generator.random() < 0.3))
        pairs = pairs[count:]
    args.output_dir.mkdir(parents=True, exist_ok=True)
    path = args.output_dir / "stdlib.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} conversations from {len(files)} files")


if __name__ == "__main__":
    main()
