"""Shows one optimizer step of a chapter: a picture of all ranks, and what the first one computes.

    python tools/step-timeline.py 02-ddp
    python tools/step-timeline.py more/07-pipeline-parallel -b 1 --gradient-accumulation-steps 8
    python tools/step-timeline.py 03-fsdp --processes 4 -o step.svg
    python tools/step-timeline.py 02-ddp --processes 1 --compile    # the table, of one device

The chapter runs unmodified, as its `--demo` unless flags of the chapter say otherwise: on GPUs, if
there is one for each process, and else on CPUs. torch.profiler watches it. The picture, PNG or SVG,
shows the fastest step after the first two, because other programs disturb some steps. Two lanes per
rank:

computing      On a CPU, operators of the process's main thread, without waiting. On a GPU, all
               kernels and copies but those of NCCL. Gaps too short to be seen are closed.
communicating  Collectives and messages, on a CPU from the call until the data has arrived, on a GPU
               the kernels of NCCL. So a long bar may mean that another rank is late. Bars above
               each other are under way together.

The tool also prints how much of the time of communication is hidden: the rank computes meanwhile.
Its table adds up the time of rank 0 by kinds of work: on a CPU of each operator, without those that
it calls, and on a GPU of each kernel. Python and waiting are in none of them.

It has not run on GPUs yet. Its test reads a trace in the format that torch.profiler exports.
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from bisect import bisect
from collections import Counter
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

from models import load_script, script_of, table

NUMBERS = (2, 3, 4, 5, 6, 7, 8, 11, 12, 13)  # chapters that torchrun starts
CHAPTERS = {script_of(number).parent.name: script_of(number) for number in NUMBERS}
FLAGS = ["--demo", "--max-steps", "7", "--eval-freq", "0"]
FIRST_STEP = 3  # the ones before have more to do

ENGINE, WAIT = "autograd::engine::evaluate_function", "_c10d_functional::wait_tensor"
PHASE = "step-timeline:"
WATCHED = (PHASE, "aten::", "c10d::", "gloo:", ENGINE, WAIT)
# What gloo's threads do, and the calls that lead to it: its reduce-scatter is an all-reduce inside.
CALLS = {
    "gloo:all_reduce": {"allreduce": "all-reduce", "reduce_scatter": "reduce-scatter"},
    "gloo:all_gather": {"allgather": "all-gather"},
    "gloo:all_to_all": {"alltoall": "all-to-all"},
    "gloo:reduce": {"c10d::reduce_": "reduce"},  # the whole name, which others contain
    "gloo:broadcast": {"broadcast": "broadcast"},
    "gloo:send": {"send": "send"},
    "gloo:recv": {"recv": "receive"},
}
# Parts of the names of NCCL's kernels, such as ncclDevKernel_AllReduce_Sum_f32_RING_LL
NCCL = {"AllReduce": "all-reduce", "AllGather": "all-gather", "ReduceScatter": "reduce-scatter"}
NCCL |= {"SendRecv": "send, receive", "Broadcast": "broadcast", "Reduce_": "reduce"}
# Kinds of work, by the names of operators and kernels: the first that fits counts. A fused kernel
# names its operations, such as triton_red_fused__to_copy_mean_mul_pow_rsqrt.
WORK = {
    "attention": r"attention|flash|fmha|cudnn.*sdpa",
    "loss": r"softmax|nll_loss|cross_entropy",
    "optimizer and clipping": r"adamw?|foreach|multi_tensor|norm_?2|linalg_vector_norm",
    "matrix products": r"\bmm\b|addmm|bmm|matmul|gemm|cutlass|nvjet|linear",
    "compiled kernels": r"triton",
    "copies and casts": r"copy|memcpy|memset|fill|zero|cat\b",
    "the rest": "",
}
# Okabe and Ito's colours, which colour-blind readers can tell apart
COLORS = {"data": "#999999", "forward": "#56b4e9", "backward": "#0072b2", "update": "#cc79a7"}
COLORS |= {"else": "#d0d0d0"}
COLORS |= {"all-reduce": "#d55e00", "all-gather": "#e69f00", "reduce-scatter": "#009e73"}
COLORS |= {"send": "#b07800", "receive": "#f0e442", "broadcast": "#000000", "reduce": "#882255"}
COLORS |= {"all-to-all": "#6a3d9a", "send, receive": "#b07800"}
LOOK = {"font.size": 12, "figure.facecolor": "white", "svg.hashsalt": "step"}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}


def watch(folder: Path, script: Path, flags: list[str]) -> None:
    """In each process of the chapter: runs it, and writes down what the profiler has seen."""
    from torch import cuda
    from torch.profiler import profile, record_function

    sys.argv = [str(script), *flags]
    chapter = load_script(script)
    original = chapter.timed

    @contextmanager
    def timed(phase, *arguments):
        with record_function(PHASE + phase), original(phase, *arguments):
            yield

    chapter.timed = timed
    chapter.DEMO["experiment_name"] = None  # a run without a name writes nothing
    with profile() as profiler:  # of the CPU, and of a GPU if there is one
        chapter.main()
    file = folder / f"{os.environ['RANK']}.json"
    if cuda.is_available():
        profiler.export_chrome_trace(str(file))
        return
    events = [
        (event.name(), event.start_ns(), event.end_ns(), event.start_thread_id())
        for event in profiler.profiler.kineto_results.events()
        if event.name().startswith(WATCHED)
    ]
    file.write_text(json.dumps(events))


def outermost(events) -> list[tuple]:
    """Those events of a thread that are in no other, in their order."""
    found = []
    for event in sorted(events, key=lambda event: (event[1], -event[2])):
        if not found or event[1] >= found[-1][2]:
            found.append(event)
    return found


def around(events: list[tuple], time: int) -> tuple | None:
    """The one among outermost events that this moment is in."""
    place = bisect(events, time, key=lambda event: event[1]) - 1
    return events[place] if place >= 0 and time < events[place][2] else None


def work_of(times: list[tuple]) -> Counter:
    """The time of each kind of work, from (name, time)."""
    found = Counter()
    for name, time in times:
        found[next(k for k, part in WORK.items() if re.search(part, name, re.IGNORECASE))] += time
    return found


def own_times(operators: list[tuple]) -> list[tuple]:
    """(name, time) of each operator of a thread, without the operators that it calls."""
    found, callers = [], []
    for name, begin, end, _ in sorted(operators, key=lambda event: (event[1], -event[2])):
        while callers and callers[-1]["end"] <= begin:
            callers.pop()
        if callers:
            callers[-1]["time"] -= end - begin
        callers.append({"name": name, "end": end, "time": end - begin})
        found.append(callers[-1])
    return [(event["name"], event["time"]) for event in found]


def read_computing(of_main: list[tuple]) -> list[tuple]:
    """(phase, begin, end) of operators, without waiting."""
    phases, engine, pauses, operators = (
        outermost(event for event in of_main if event[0].startswith(prefixes))
        for prefixes in (PHASE, ENGINE, ("c10d::", WAIT), "aten::")
    )
    computing = []
    for _, begin, end, _ in operators:
        name, _, phase_end, _ = around(phases, begin) or (PHASE + "else", 0, 0, 0)
        phase = name.removeprefix(PHASE)
        if phase == "schedule":  # both kinds of passes; at its end it reduces gradients
            later = bisect(engine, begin, key=lambda event: event[1])
            is_last = later == len(engine) or engine[later][1] > phase_end
            phase = "backward" if is_last or around(engine, begin) else "forward"
        for _, pause_begin, pause_end, _ in pauses[bisect(pauses, begin, key=itemgetter(2)) :]:
            if pause_begin >= end:
                break
            computing.append((phase, begin, max(begin, pause_begin)))
            begin = min(end, pause_end)
        computing.append((phase, begin, end))
    return computing


def read_communicating(events: list[tuple]) -> list[tuple]:
    """(kind, begin, end), from the call in the main thread to the end in a thread of gloo."""
    communicating = []
    for work, calls in CALLS.items():
        begun = sorted(
            (begin, kind)
            for name, begin, *_ in events
            for part, kind in calls.items()
            if name == part or (name.startswith("c10d::") and part in name.removeprefix("c10d::"))
        )
        ends = [end for name, begin, end, _ in sorted(events, key=itemgetter(1)) if name == work]
        if len(begun) != len(ends):
            sys.exit(f"error: {len(begun)} calls of {', '.join(calls)} have {len(ends)} {work}")
        communicating += [
            (kind, begin, end) for (begin, kind), end in zip(begun, ends, strict=True)
        ]
    return sorted(communicating, key=itemgetter(1))


def read_steps(events: list[tuple]) -> list[dict]:
    """Of each step its begin and end, the spans of both lanes, and times of work, in ns."""
    main_thread = next(thread for name, *_, thread in events if name == PHASE + "update")
    of_main = [event for event in events if event[3] == main_thread]
    lanes = {"computing": read_computing(of_main), "communicating": read_communicating(events)}
    steps, begin = [], None
    for name, phase_begin, end, _ in outermost(e for e in of_main if e[0].startswith(PHASE)):
        begin = begin or phase_begin
        if name == PHASE + "update":
            within = {k: [s for s in v if begin <= s[1] < end] for k, v in lanes.items()}
            inside = [e for e in of_main if e[0].startswith("aten::") and begin <= e[1] < end]
            work = work_of(own_times(inside))
            steps.append({"begin": begin, "end": end, "work": work} | within)
            begin = None
    return steps


def read_trace(events: list[dict]) -> list[dict]:
    """The same as `read_steps`, from the `traceEvents` of a GPU that torch.profiler has exported.

    A kernel runs later than the call that launches it. Both have the same `correlation`. The call
    tells the step and the phase, because Python makes it within the annotation of a phase.
    """

    def span(event: dict) -> tuple[int, int]:
        begin = round(1000 * event["ts"])  # microseconds
        return begin, begin + round(1000 * event["dur"])

    timed = [event for event in events if "dur" in event]
    marks = [e for e in timed if e["cat"] == "user_annotation" and e["name"].startswith(PHASE)]
    phases = outermost((event["name"], *span(event), 0) for event in marks)
    ends = [end for name, _, end, _ in phases if name == PHASE + "update"]
    calls = [event for event in timed if event["cat"] in ("cuda_runtime", "cuda_driver")]
    launches = {event["args"].get("correlation"): span(event)[0] for event in calls}
    steps = [{"computing": [], "communicating": [], "work": Counter()} for _ in ends]
    for event in timed:
        launch = launches.get(event.get("args", {}).get("correlation"))
        is_work = event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
        if not is_work or launch is None or launch < phases[0][1] or launch > ends[-1]:
            continue
        step = steps[bisect(ends, launch)]
        if event["name"].startswith("nccl"):
            kinds = [kind for part, kind in NCCL.items() if part in event["name"]]
            step["communicating"].append(((kinds or ["else"])[0], *span(event)))
        else:
            phase, *_ = around(phases, launch) or (PHASE + "else",)
            step["computing"].append((phase.removeprefix(PHASE), *span(event)))
            step["work"] += work_of([(event["name"], round(1000 * event["dur"]))])
    for step in steps:
        for lane in ("computing", "communicating"):
            step[lane].sort(key=itemgetter(1))
        step["begin"] = step["computing"][0][1]
        step["end"] = max(end for _, _, end in step["computing"])
    return steps


def choose(ranks: list[list[dict]]) -> tuple[int, list[dict]]:
    """The number of the fastest step, and what each rank did in it."""
    steps = [*enumerate(zip(*ranks, strict=True), 1)][FIRST_STEP - 1 :]
    if not steps:
        sys.exit(f"error: step {FIRST_STEP} is the first one to draw: raise --max-steps")
    return min(steps, key=lambda s: max(r["end"] for r in s[1]) - min(r["begin"] for r in s[1]))


def covered(spans: list[tuple]) -> int:
    """The time that is covered by spans (what, begin, end). Spans may overlap."""
    total, last_end = 0, 0
    for _, begin, end in sorted(spans, key=itemgetter(1)):
        total += max(0, end - max(begin, last_end))
        last_end = max(last_end, end)
    return total


def hidden_share(ranks: list[dict]) -> float | None:
    """The share of the time of communication in which the rank also computes, over all ranks.

    None, if no rank communicates in the step.
    """
    communication = hidden = 0
    for rank in ranks:
        # A collective may end after the step.
        sent = [(what, begin, min(end, rank["end"])) for what, begin, end in rank["communicating"]]
        either = covered(sent + rank["computing"])
        communication += covered(sent)
        hidden += covered(sent) + covered(rank["computing"]) - either
    return hidden / communication if communication else None


def rows(spans: list[tuple]) -> list[int]:
    """A row for each span, so that those in a row do not overlap."""
    ends, places = [], []
    for _, begin, end in spans:
        place = next((n for n, other in enumerate(ends) if other <= begin), len(ends))
        ends[place : place + 1] = [end]
        places.append(place)
    return places


def draw(title: str, ranks: list[dict]):
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start = min(rank["begin"] for rank in ranks)
    length = max(rank["end"] for rank in ranks) - start
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(12, 1.3 + 1.25 * len(ranks)), layout="constrained")
        axes = figure.subplots()
        used, labels = set(), {}
        for n, rank in enumerate(ranks):
            bars = []  # (what, begin, end), computing pieces joined
            for what, begin, end in rank["computing"]:
                if bars and bars[-1][0] == what and begin - bars[-1][2] < length / 1000:
                    begin = bars.pop()[1]
                bars.append((what, begin, end))
            for lane, spans in (("computing", bars), ("communicating", rank["communicating"])):
                place = 2.5 * n + (lane == "communicating")
                labels[place] = f"rank {n} {lane}" if lane == "computing" else lane
                places = rows(spans)
                height = 0.8 / (1 + max(places, default=0))
                for (what, begin, end), row in zip(spans, places, strict=True):
                    span = ((begin - start) / 1e6, (end - begin) / 1e6)
                    where = (place - 0.4 + row * height, height)
                    color = COLORS.get(what, "#444444")
                    # An edge shows also what is very short.
                    edge = 0.8 if lane == "communicating" else 0
                    axes.broken_barh([span], where, color=color, linewidth=edge)
                    used.add(what)
        axes.set(title=title, xlabel="ms since the step began", xlim=(0, length / 1e6))
        axes.set_yticks([*labels], labels.values())
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        order = [what for what in COLORS if what in used] + sorted(used - {*COLORS})
        patches = [Patch(color=COLORS.get(what, "#444444"), label=what) for what in order]
        place = {"loc": "outside lower center", "columnspacing": 1, "handlelength": 1.3}
        figure.legend(handles=patches, frameon=False, ncols=10, **place)
    return figure


def save(figure, file: Path) -> None:
    import matplotlib as mpl

    with mpl.rc_context(LOOK):
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("chapter", help="its folder, such as 02-ddp; its flags may follow")
    parser.add_argument("--processes", type=int, default=2, help="[%(default)s]")
    parser.add_argument("-o", "--output", type=Path, help=".png or .svg [step-CHAPTER.png]")
    args, flags = parser.parse_known_args()
    name = Path(args.chapter).name
    if name not in CHAPTERS:
        parser.error(f"no chapter {args.chapter} that communicates: choose {', '.join(CHAPTERS)}")
    output = args.output or Path(f"step-{name}.png")
    if output.suffix not in (".png", ".svg"):
        parser.error(f"--output {output} must end in .png or .svg")
    from torch import cuda

    if not importlib.util.find_spec("matplotlib"):  # before the run, which takes a while
        sys.exit('error: this tool needs matplotlib: pip install -c constraints.txt ".[tools]"')
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(args.processes), __file__, "--watch", folder]
        command += [str(CHAPTERS[name]), *FLAGS, *flags]
        env = dict(os.environ)
        on_gpus = cuda.device_count() >= args.processes
        if not on_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error: " in line]
            sys.exit(errors[0] if errors else done.stderr)
        files = [Path(folder) / f"{rank}.json" for rank in range(args.processes)]
        seen = [json.loads(file.read_text()) for file in files]
    if on_gpus:
        number, ranks = choose([read_trace(trace["traceEvents"]) for trace in seen])
    else:
        number, ranks = choose([read_steps(events) for events in seen])
    devices = "GPUs" if on_gpus else "CPU processes"
    title = f"{name} on {args.processes} {devices}: optimizer step {number}"
    try:
        save(draw(title, ranks), output)
    except OSError as error:
        sys.exit(f"error: cannot write {output}: {error.strerror}")
    print(f"wrote {output}")
    share = hidden_share(ranks)
    if share is not None:
        print(f"{share:.0%} of the time of communication is hidden by computation")
    step, whole = ranks[0], ranks[0]["end"] - ranks[0]["begin"]
    times = {kind: step["work"][kind] for kind in WORK} | {"the whole step": whole}
    cells = [[kind, f"{time / 1e6:.1f}", f"{time / whole:.0%}"] for kind, time in times.items()]
    print("\n" + table("rank 0 | ms | share", cells))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--watch"]:
        watch(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
