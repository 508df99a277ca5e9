"""tools/prepare-data.py beside datasets.load_dataset and to_parquet: CPU seconds and memory.

    python benchmarks/prepare-data.py --megabytes 80 --conversations 20000

Each figure is of a whole process, its start included. The two alternate on the same files.
"""

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools" / "prepare-data.py"
USUAL = """
import sys, datasets
kind, file, cache, output = sys.argv[1:]
options = {"parse_agent_traces": False} if kind == "json" else {}
rows = datasets.load_dataset(kind, data_files=[file], split="train", cache_dir=cache, **options)
rows.to_parquet(output)
"""


def write_files(folder: Path, megabytes: int, conversations: int) -> None:
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzäé"
    words = ["".join(chance.choices(letters, k=chance.randint(2, 9))) for _ in range(5000)]

    def text(most: int) -> str:
        return " ".join(chance.choices(words, k=chance.randint(3, most))) + ".\n"

    size = 0
    with open(folder / "a.txt", "w") as plain, open(folder / "a.jsonl", "w") as rows:
        while size < megabytes * 1e6:
            document = "".join(text(40) for _ in range(chance.randint(1, 30)))
            size += len(document.encode())
            plain.write(document + "<|endoftext|>")
            rows.write(json.dumps({"id": size, "text": document}, ensure_ascii=False) + "\n")
    with open(folder / "chats.jsonl", "w") as rows:
        for _ in range(conversations):
            roles = ["user", "assistant"] * chance.randint(1, 4)
            messages = [{"role": role, "content": text(60)} for role in roles]
            rows.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def measure(*command) -> tuple[float, float]:
    """CPU seconds, and the peak of the anonymous memory in MB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                peak = max(peak, int(line.split()[1]))
        time.sleep(0.01)
    assert process.returncode == 0, command
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, peak / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    write_files(folder, args.megabytes, args.conversations)
    for name, kind in ("a.txt", "text"), ("a.jsonl", "json"), ("chats.jsonl", "json"):
        flags = ["--as", "messages"] if name == "chats.jsonl" else []
        megabytes = (folder / name).stat().st_size / 1e6
        for _ in range(args.rounds):
            outputs = folder / "cache", folder / "usual.parquet"
            usual, usual_peak = measure(sys.executable, "-c", USUAL, kind, folder / name, *outputs)
            tool, peak = measure(sys.executable, TOOL, folder / name, "-o", folder / "out", *flags)
            rates = f"{megabytes / usual:.0f} and {megabytes / tool:.0f} MB/s"
            print(f"{name}: {rates}, {usual_peak:.0f} and {peak:.0f} MB", flush=True)
            shutil.rmtree(folder / "cache")
            shutil.rmtree(folder / "out")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
