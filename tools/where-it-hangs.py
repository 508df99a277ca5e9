"""Shows which rank waits in which collective, and where the ranks parted.

    python tools/where-it-hangs.py "torchrun --standalone --nproc-per-node 2 train.py"
    HANG_DUMPS=/tmp/dumps launch/run.sh 02 --demo     # a rank that waits leaves a dump there
    python tools/where-it-hangs.py /tmp/dumps

Given a command, the tool runs it until all ranks wait (tools/watch/hangs.py), and ends it. Given
a folder, it reads the dumps there: those of tools/watch, and those that NCCL leaves at a timeout
(TORCH_NCCL_DUMP_ON_TIMEOUT=1). PyTorch numbers the collectives of each process group. The ranks
must call the same collective under the same number, so the first number where they differ is the
place of the mistake.

Exit status: 0 if nothing hangs, 1 if ranks wait for each other or one of them died, 2 if there are
no ranks or no dumps.
"""

import argparse
import json
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import psutil

PRELOAD = Path(__file__).resolve().parent / "watch"
# Frames of these files are no lines of the user's script, and these have what a script calls.
LIBRARIES = ("tools/watch/", "-packages/", "lib/python3", "<frozen", "<string>")
FUNCTIONS = "torch/distributed/.*(distributed_c10d|_coll)"


def fail(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


# -- Dumps -----------------------------------------------------------------------------------------


class PlainUnpickler(pickle.Unpickler):
    """For the dumps of NCCL, which have only numbers, texts, lists and dicts: runs no code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump")


def read_dumps(folder):
    """By rank: the dump of the rank. A dump of NCCL has no stack of the main thread."""
    dumps = {}
    for file in sorted(filter(Path.is_file, folder.iterdir())):
        try:
            if re.fullmatch(r"rank-\d+\.json", file.name):
                dump = json.loads(file.read_text())
                dumps[dump["rank"]] = dump
            elif number := re.fullmatch(r"(?!incomplete|stacks).*?(\d+)", file.name):
                with file.open("rb") as stream:
                    trace = PlainUnpickler(stream).load()
                times = {"started": 0, "written": file.stat().st_mtime}
                dumps.setdefault(int(number[1]), from_nccl(int(number[1]), trace) | times)
        except (ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            fail(f"{file} is no dump of collectives: {error}")
    # A dump that was written before a rank of the newest job began is of an earlier job.
    last = max(dumps.values(), key=lambda dump: dump["written"], default=None)
    if last:
        begun = max(dump["started"] for dump in dumps.values())
        old = {r for r, d in dumps.items() if d["written"] < begun or r >= last["world_size"] > 0}
        if old:
            print(f"Note: the dumps of {text(old)} are left out: they are of an earlier job.")
        dumps = {rank: dump for rank, dump in dumps.items() if rank not in old}
    return dict(sorted(dumps.items()))


def from_nccl(rank, trace):
    groups = {}
    for group in trace.get("pg_config", {}).values():
        ranks = group["ranks"]
        groups[group["name"]] = json.loads(ranks) if isinstance(ranks, str) else ranks
    size = 1 + max((r for ranks in groups.values() for r in ranks), default=0)
    dump = {"rank": rank, "world_size": size, "state": "waits", "note": "", "stack": []}
    return dump | {"groups": groups, "entries": trace["entries"]}


def line_of(frames):
    """The innermost line of the user's code: (file, line, function)."""
    for file, line, function in frames:
        if not any(part in file for part in LIBRARIES):
            return file, line, function
    return frames[0] if frames else None


def is_done(entry):
    return entry.get("retired") or entry["state"] == "completed"


class Call:
    """A collective that a rank has begun."""

    def __init__(self, entry):
        self.operation = entry["profiling_name"].split(":")[-1].lstrip("_")
        self.sizes = entry["input_sizes"]
        self.line = line_of([(f["filename"], f["line"], f["name"]) for f in entry["frames"]])
        self.done = is_done(entry)

    def __str__(self):
        shapes = ", ".join("×".join(map(str, size)) or "1" for size in self.sizes)
        shapes = f" of {shapes} numbers" if shapes else ""
        return f"{self.operation}{shapes} at {place(self.line)}"


def place(line):
    if line is None:
        return "an unknown line"
    file, number, function = line
    inside = "" if function == "<module>" else f" ({function})"
    return f"{os.path.basename(file)}:{number}{inside}"


class Group:
    """The calls of each rank of a process group, by their number."""

    def __init__(self, name, description, dumps):
        self.name, self.description = name, description
        self.calls = defaultdict(dict)
        members = {rank for dump in dumps.values() for rank in dump["groups"].get(name, [])}
        for rank, dump in dumps.items():
            for entry in dump["entries"]:
                # NCCL records a batch of messages as "coalesced", after its messages.
                is_message = entry["is_p2p"] or entry["profiling_name"].endswith(":coalesced")
                if entry["process_group"][0] == name and not is_message:
                    members.add(rank)
                    call = self.calls[rank][entry["collective_seq_id"]] = Call(entry)
                    if "error" in dump and entry is dump["entries"][-1]:
                        call.done = False  # it has ended with this error
        self.ranks = sorted(members & dumps.keys())

    def __str__(self):
        return f"Process group {self.name} ({self.description}), {text(self.ranks)}"

    def first_difference(self):
        """The first number under which the ranks have different calls, or None."""
        begin = max((min(self.calls[r]) for r in self.ranks if self.calls[r]), default=1)
        end = max((max(self.calls[r]) for r in self.ranks if self.calls[r]), default=0)
        for number in range(begin, end + 1):
            calls = [self.calls[r].get(number) for r in self.ranks]
            if None in calls or len({(c.operation, differing_sizes(c)) for c in calls}) > 1:
                if all(c is None or c.done for c in calls):
                    continue  # some ranks have gone on to another call, and nobody waits here
                return number
        return None


def differing_sizes(call):
    """Ranks must agree on sizes in these collectives. In others, sizes may differ."""
    same = call.operation in ("all_reduce", "allreduce", "broadcast", "all_gather", "allgather")
    return str(call.sizes) if same else ""


# -- The report ------------------------------------------------------------------------------------


def text(ranks):
    ranks = sorted(ranks)
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def stands(dump):
    """The line of the main thread, and its call of torch.distributed. Without a stack: the last."""
    if dump["state"] == "has ended":
        return "has ended"
    if dump["stack"]:
        line = place(line_of(dump["stack"][::-1]))
        calls = [name for file, _, name in dump["stack"] if re.search(FUNCTIONS, file)]
        calls = [name for name in calls if not name.startswith(("_", "wait", "wrapper"))]
        return f"went to {calls[-1]} at {line}" if calls else f"stands at {line}"
    if not dump["entries"]:
        return "has vanished" if "error" in dump else "stands at an unknown line"
    waiting = [*takewhile(lambda entry: not is_done(entry), reversed(dump["entries"]))]
    verb, entry = ("waits in", waiting[-1]) if waiting else ("last called", dump["entries"][-1])
    return f"{verb} {Call(entry)}, in group {' '.join(entry['process_group'])}"


def has_own_error(dump):
    """Has the rank died, and not because another one did not answer?"""
    return "error" in dump and not re.search("[Cc]onnection|peer|[Tt]imed out", dump["error"])


def order(dump):
    """An error comes before a process that has only vanished, and before lost connections."""
    return not has_own_error(dump), not dump["stack"], dump["written"]


def show(group, number, dumps):
    """Prints the last common call of a group, and the next call of each rank."""
    print(f"\n{group}")
    common = group.calls[group.ranks[0]].get(number - 1)
    print(f"  {number - 1:6}  all   {common}" if common else "          no common call")
    for rank in group.ranks:
        call = group.calls[rank].get(number)
        no_call = "unknown" if dumps[rank]["state"] == "was asked" else "no call"
        print(f"> {number:6}  rank {rank}: {call or f'{no_call}, {stands(dumps[rank])}'}")


def explain(group, number, dumps, waiting_for):
    """One sentence about the first difference of a group."""
    same_call = defaultdict(list)
    for rank in group.ranks:
        call = group.calls[rank].get(number)
        same_call[(call.operation, call.line, differing_sizes(call)) if call else None].append(rank)

    def before(rank, line):
        """How often the rank has called this line before."""
        calls = group.calls[rank].items()
        return sum(n < number and call.line == line for n, call in calls)

    def usualness(key):
        """The usual call is that of most ranks; of two halves, that of a line called before."""
        ranks = same_call[key]
        return key is not None, len(ranks), before(ranks[0], key[1]) if key else 0

    odd, *_, usual = sorted(same_call, key=usualness)
    rank, usual_rank = same_call[odd][0], same_call[usual][0]
    who, others = text(same_call[odd]), text(same_call[usual])
    operation, line, _ = usual
    rounds = before(usual_rank, line)
    verb = "wait" if len(same_call[usual]) > 1 else "waits"
    wait = f"{others} {verb} in {operation} at {place(line)}"
    after = f" after {rounds} calls" if rounds else ""
    if odd is None and (busy := [r for r in same_call[None] if r not in waiting_for]):
        where = ", ".join(f"rank {r} {stands(dumps[r])}" for r in busy)
        is_unknown = any(dumps[r]["state"] == "was asked" for r in busy)
        end = "its calls are unknown" if is_unknown else "never made this call"
        return f"{where}, and {end}; {wait}{after}."
    if odd is None:
        other, other_number = waiting_for[rank]
        who = text(r for r in same_call[None] if waiting_for[r] == waiting_for[rank])
        call = other.calls[rank][other_number]
        missing = [r for r in other.ranks if other_number not in other.calls[r]]
        without = f", which {text(missing)} did not call" if missing else ""
        return (
            f"{who} waits in group {other.name} ({other.description}) in {call}{without}; {wait} "
            f"in group {group.name} ({group.description}): a call is left out, or the ranks call "
            "the groups in another order."
        )
    call = group.calls[rank][number]
    if odd[:2] == usual[:2]:
        sizes = f"{call.sizes} and {group.calls[usual_rank][number].sizes}"
        return f"{who} and {others} make the same call with other sizes, {sizes}: {place(line)}."
    now = f"{call.operation} at {place(call.line)}"
    after = f" after {rounds} calls at {place(line)}" if rounds else ""
    return f"{who} went to {now}{after}; {wait}."


def report(dumps):
    """Prints what the dumps show. Returns the exit status."""
    if not dumps:
        print("No rank has waited long enough to leave a dump.")
        return 0
    size = max(dump["world_size"] for dump in dumps.values())
    for note in {dump["note"] for dump in dumps.values()} - {""}:
        print(f"Note: {note}")
    missing = set(range(size)) - dumps.keys()
    if missing:
        print(f"No dump of {text(missing)}: dead, stopped, or on another node.")
    for rank, dump in dumps.items():
        error = f": {dump['error']}" if "error" in dump else ""
        print(f"rank {rank} {stands(dump)}{error}")
    names = {tuple(entry["process_group"]) for d in dumps.values() for entry in d["entries"]}
    groups = [Group(name, description, dumps) for name, description in sorted(names)]
    found = [(group, group.first_difference()) for group in groups]
    found = [(group, number) for group, number in found if number is not None]
    for group, number in found:
        show(group, number, dumps)
    # In which group and call a rank waits
    waiting_for = {
        rank: (group, number)
        for group, number in found
        for rank in group.ranks
        if (call := group.calls[rank].get(number)) and not call.done
    }
    died = sorted((rank for rank in dumps if "error" in dumps[rank]), key=lambda r: order(dumps[r]))
    if died and (has_own_error(dumps[died[0]]) or not found):
        first = dumps[died[0]]
        others = "; ".join(f"rank {r} {stands(dumps[r])}" for r in dumps if r != died[0])
        sentence = f"rank {died[0]} died first ({first['error']}): it {stands(first)}. {others}"
        print(f"\n{sentence.strip()}")
        return 1
    if found:
        # A rank that waits nowhere is the cause of the others.
        causes = [
            (group, number)
            for group, number in found
            if any(r not in waiting_for and number not in group.calls[r] for r in group.ranks)
        ]
        print("\n" + explain(*(causes or found)[0], dumps, waiting_for))
        return 1
    ended = {rank for rank, dump in dumps.items() if dump["state"] == "has ended"}
    if ended == dumps.keys():
        print("All ranks have ended, and made the same calls.")
        return 0
    busy = {rank for rank, dump in dumps.items() if stands(dump).startswith("stands")}
    gone = ended | missing | busy
    if gone and gone != missing | dumps.keys():
        where = [f"rank {rank} {stands(dumps[rank])}" for rank in sorted(gone & dumps.keys())]
        print(f"\nThe others wait for {'; '.join([text(gone), *where])}.")
        return 1
    print(
        "\nAll ranks have made the same recorded calls, so compare the lines above. Gloo does not "
        "record send and recv. If all ranks are in one call, they may disagree on a source, a "
        "destination or a tag, or the network does not answer. If they compute or wait for data, "
        "give more --seconds."
    )
    return 1


# -- Run a command until it hangs ------------------------------------------------------------------


def run(command, folder, seconds):
    """Runs the command until all ranks wait or it ends. Returns the exit status."""
    env = os.environ | {"HANG_DUMPS": str(folder), "HANG_SECONDS": str(seconds)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PRELOAD), os.environ.get("PYTHONPATH")]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left
    process = subprocess.Popen(shlex.split(command), env=env)
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if all_wait(folder, seconds):
                dumps = read_dumps(folder)
                ask_for_stacks(folder, dumps)
                process.send_signal(signal.SIGSTOP)  # so that it writes no report about its workers
                end_all(folder)
                asked = dumps_of_stacks(folder, dumps)
                dumps |= {rank: dump for rank, dump in asked.items() if dump["stack"]}
                return report(dict(sorted(dumps.items())))
            if idle_for(folder) > 6 * seconds and not has_ranks(folder):
                return report_no_ranks(folder, seconds)
        if process.returncode:
            print(f"The command ended with status {process.returncode}.")
            return report_death(folder)
        print("The command ended with status 0: it does not hang.")
        return 0
    finally:
        end_all(folder)


def end_all(folder):
    """Kills what the tool has started, and other processes that got this folder for their dumps."""
    started = psutil.Process().children(recursive=True)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process in started or process.environ().get("HANG_DUMPS") == str(folder):
                process.kill()


def all_wait(folder, seconds):
    """Do all ranks wait, or some for so long that the others will leave no dump?

    Ranks in no call, such as in an evaluation, or all without a watcher, get six times as long.
    """
    beat = folder / "beat"  # no watcher runs if its rank holds the lock of Python
    if beat.exists() and time.time() - beat.stat().st_mtime > 6 * seconds:
        return True
    dumps = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    waiting = [dump for dump in dumps if dump["state"] == "waits"]
    recent = [dump for dump in waiting if time.time() - dump["written"] < seconds]
    complete = dumps and len(dumps) == max(dump["world_size"] for dump in dumps)
    in_call = any(
        stands(dump).startswith("went to") or not all(map(is_done, dump["entries"]))
        for dump in recent
    )
    waited = max((time.time() - dump["since"] for dump in recent), default=0)
    is_stuck = (complete and in_call) or min(waited, idle_for(folder)) > 6 * seconds
    return is_stuck and waiting and len(recent) == len(waiting)


def ask_for_stacks(folder, dumps):
    """A rank that holds the lock of Python, or makes other calls, leaves no dump, but a stack."""
    known = {dump["pid"] for dump in dumps.values()}
    for file in folder.glob("stacks-*"):
        pid = int(file.name.removeprefix("stacks-"))
        if pid not in known:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
    time.sleep(0.5)


def dumps_of_stacks(folder, known):
    """Dumps of ranks that have none, from their stacks. Without a stack, a process has died."""
    found = {}
    for file in folder.glob("stacks-*"):
        content = file.read_text()
        begin = re.match(r"rank (\d+) of (\d+)\n", content)
        if not begin or int(begin[1]) in known:
            continue
        dump = {"state": "was asked", "note": "", "written": file.stat().st_mtime}
        dump |= {"world_size": int(begin[2]), "entries": [], "groups": {}}
        dump["stack"] = stack_of(content)
        if not dump["stack"]:
            dump["error"] = "without an error of Python, as after os._exit or a signal"
        elif fatal := re.search("Fatal Python error: (.*)", content):
            dump["error"] = f"{fatal[1]}; the lines of C++ above say why"
        found[int(begin[1])] = dump
    return found


def stack_of(content):
    """The main thread, which faulthandler writes last."""
    main_thread = re.split(r"\n(?:Current t|T)hread .*\n", content)[-1]
    lines = re.findall(r'  File "(.*)", line (\d+) in (.*)', main_thread)
    return [(file, int(number), function) for file, number, function in reversed(lines)]


def idle_for(folder):
    """For how many seconds no process has imported a package."""
    files = folder.glob("stacks-*")
    return time.time() - max((file.stat().st_mtime for file in files), default=time.time())


def has_ranks(folder):
    stacks = [file.read_text() for file in folder.glob("stacks-*")]
    return any(folder.glob("rank-*")) or any(text.startswith("rank") for text in stacks)


def report_no_ranks(folder, seconds):
    ask_for_stacks(folder, {})
    for file in sorted(folder.glob("stacks-*")):
        if stack := stack_of(file.read_text()):
            print(f"A process stands at {place(line_of(stack[::-1]))}")
    print(
        f"No process has joined a process group in {6 * seconds:g} seconds. Ranks are processes of "
        "torchrun or torch.multiprocessing. If they prepare data first, give more --seconds."
    )
    return 2


def report_death(folder):
    """Which rank died first, and where the others were. The signal that ends a rank leaves stacks.

    Gloo answers some calls that do not match with an abort of the process.
    """
    dumps = read_dumps(folder)
    ended = {rank: dump for rank, dump in dumps.items() if dump["state"] != "waits"}
    return report(dict(sorted((ended | dumps_of_stacks(folder, ended)).items())))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", help="a command that hangs, or a folder with dumps")
    text = "a rank waits if it begins no collective for so long (default: 20)"
    parser.add_argument("--seconds", type=float, default=20, help=text)
    args = parser.parse_args()
    if Path(args.what).is_dir():
        dumps = read_dumps(Path(args.what))
        if not dumps:
            fail(f"no dumps in {args.what}: is HANG_DUMPS set, and do the ranks wait?")
        sys.exit(report(dumps))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(args.what, Path(folder), args.seconds))


if __name__ == "__main__":
    main()
