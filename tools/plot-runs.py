"""Draws runs, finished or still running, from their `metrics.jsonl`: one picture as PNG and as SVG.

    python tools/plot-runs.py outputs/demo-*
    python tools/plot-runs.py outputs/before outputs/after -o comparison

Loss and held-out loss, tokens per second, memory of the devices, and where the time of a step goes.
"""

import argparse
import statistics
import sys
from pathlib import Path

from records import read_records

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib needs it, too
except ImportError:
    sys.exit('error: this tool needs matplotlib: pip install -c constraints.txt ".[tools]"')

# Okabe and Ito's colours, which colour-blind readers can tell apart; in print, the dashes do.
STYLES = [("#0072b2", "-"), ("#d55e00", (0, (5, 2))), ("#009e73", (0, (1, 1.2)))]
STYLES += [("#cc79a7", (0, (6, 2, 1, 2))), ("#000000", (0, (9, 3))), ("#b07800", (0, (3, 1, 1, 1)))]
PHASES = {"data": ("#e69f00", "xxx"), "forward": ("#56b4e9", ""), "backward": ("#0072b2", "///")}
PHASES |= {"update": ("#cc79a7", "..."), "else": ("#d0d0d0", "")}
# A background of its own: the picture looks the same on a dark page as on paper.
LOOK = {"font.size": 12, "axes.grid": True, "grid.color": "#dddddd", "hatch.linewidth": 0.6}
LOOK |= {"axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "white"}
LOOK |= {"figure.constrained_layout.w_pad": 0.12, "figure.constrained_layout.h_pad": 0.12}
LOOK |= {"axes.axisbelow": True, "svg.hashsalt": "runs", "svg.fonttype": "path"}


def read_run(folder: Path) -> list[dict]:
    """The records of a run that has logged a step."""
    records = read_records(folder)
    if not any("loss" in record for record in records):
        sys.exit(f"error: {folder} has no logged step yet")
    return records


def series(records: list[dict], name: str) -> tuple[list, list]:
    """Steps and values; a value that was not finite is a gap."""
    points = [(record["step"], record[name]) for record in records if name in record]
    return [step for step, _ in points], [float("nan") if y is None else y for _, y in points]


def middle(records: list[dict], name: str) -> float:
    """The median without the first record, which has warm-up and compilation in it."""
    values = [y for y in series(records, name)[1] if y == y]
    return statistics.median(values[1:] or values or [0.0])


def highest(records: list[dict], name: str) -> float:
    """0 where nothing of that name was logged."""
    return max((y for y in series(records, name)[1] if y == y), default=0.0)


def is_resident(records: list[dict]) -> bool:
    """Whether the run logged the memory of its processes, because it had no GPU.

    Earlier chapters logged it under all four names of GPU memory.
    """
    kinds = [f"memory/{a}_{b}_gb" for a in ("current", "peak") for b in ("allocated", "reserved")]
    return any("memory/resident_gb" in record for record in records) or all(
        len({record.get(kind) for kind in kinds}) == 1 for record in records
    )


def most_memory(records: list[dict]) -> float:
    """GB of the fullest GPU, or of the fullest process where there is no GPU."""
    names = ("memory/resident_gb", "memory/peak_allocated_gb")
    return max(highest(records, name) for name in names)


def draw(runs: dict[str, list[dict]]) -> Figure:
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(12, 8.5), layout="constrained")
        loss, speed, memory, times = figure.subplots(2, 2).flat
        styles = dict(zip(runs, STYLES, strict=False))
        # To matplotlib a dollar sign begins a formula, and an underscore a name to leave out.
        labels = {name: f"\u200b{name}".replace("$", r"\$") for name in runs}
        for i, (name, records) in enumerate(runs.items()):
            color, dashes = styles[name]
            # The first is the widest: of curves that coincide, each shows beneath the next.
            width = 1.6 + 1.6 * (len(runs) - 1 - i)
            options = {"color": color, "linestyle": dashes}
            if len(series(records, "loss")[0]) == 1:  # or there would be nothing to see
                options["marker"] = "."
            loss.plot(*series(records, "loss"), linewidth=width, label=labels[name], **options)
            speed.plot(*series(records, "tokens_per_second"), linewidth=2, **options)
            held_out = {"marker": "o", "markersize": 4 + width, "fillstyle": "none"}
            held_out |= {"linestyle": "none", "color": color}
            if series(records, "eval/loss")[0]:
                loss.plot(*series(records, "eval/loss"), **held_out)
        if any("eval/loss" in record for records in runs.values() for record in records):
            loss.plot([], [], **held_out | {"color": "#444444"}, label="held out")
        loss.set(title="Loss, nats per token", xlabel="optimizer step")
        loss.legend(frameon=False)
        speed.set(title="Tokens per second, whole job", xlabel="optimizer step", ylim=(0, None))
        speed.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")

        places = range(len(runs))
        peaks = [most_memory(records) for records in runs.values()]
        bars = memory.barh(places, peaks, color=[styles[name][0] for name in runs], height=0.6)
        memory.bar_label(bars, [f" {peak:.2f}" if peak else " not logged" for peak in peaks])
        title = "Memory of the fullest GPU, GB (peak)"
        if all(map(is_resident, runs.values())):
            title = "Memory of the fullest process, GB"
        memory.set(title=title, xlim=(0, 1.15 * max(peaks) or 1))
        begins = [0.0] * len(runs)
        totals = [middle(records, "time/total_ms") for records in runs.values()]
        for phase, (color, hatch) in PHASES.items():
            lengths = [middle(records, f"time/{phase}_ms") for records in runs.values()]
            if phase == "else":  # logging, evaluation, checkpoints
                lengths = [max(a - b, 0) for a, b in zip(totals, begins, strict=True)]
            look = {"color": color, "hatch": hatch, "edgecolor": "white", "height": 0.6}
            times.barh(places, lengths, left=begins, label=phase, **look)
            begins = [a + b for a, b in zip(begins, lengths, strict=True)]
        times.set(title="Time of an optimizer step, ms (median)")
        place = {"loc": "upper center", "bbox_to_anchor": (0.4, -0.08), "ncols": 5}
        times.legend(frameon=False, columnspacing=1, handlelength=1.3, **place)
        for axes in (memory, times):
            axes.set_yticks(places, labels.values())
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
    return figure


def save(figure: Figure, file: Path) -> None:
    """As its ending says; the same runs give the same bytes."""
    with mpl.rc_context(LOOK):
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})
    if file.suffix == ".png":  # a few colours are enough, and take a third of the bytes
        Image.open(file).convert("RGB").quantize(64).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws runs from their metrics.jsonl.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or metrics.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs"), help="[%(default)s]")
    args = parser.parse_args()
    if len(args.runs) > len(STYLES):
        parser.error(f"more than {len(STYLES)} runs in a picture cannot be told apart")
    if args.output.suffix in (".png", ".svg"):
        args.output = args.output.with_suffix("")
    if not args.output.name or args.output.is_dir():
        parser.error(f"--output {args.output} is a folder: add a name")
    folders = [path.parent if path.name == "metrics.jsonl" else path for path in args.runs]
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):  # the same name in different places
        names = [str(folder) for folder in folders]
    figure = draw(dict(zip(names, map(read_run, args.runs), strict=True)))
    for ending in ("png", "svg"):  # drawing a picture also moves its parts a little
        file = args.output.with_name(f"{args.output.name}.{ending}")
        try:
            save(figure, file)
        except OSError as error:
            sys.exit(f"error: cannot write {file}: {error.strerror}")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
