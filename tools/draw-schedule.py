"""Draws who computes what and when in a pipeline, as SVG.

    python tools/draw-schedule.py 1f1b -p 4 -m 8 -o 1f1b.svg

The order of the passes is PyTorch's own. A forward pass takes one unit of time, and a backward pass
two: one for the gradient of the input, and one for the gradients of the weights.
"""

import argparse
import sys
from pathlib import Path

from torch.distributed import pipelining as pp
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

# Class, stages per rank, and the bubble by the formula: for p ranks, m micro-batches, v stages each
SCHEDULES = {
    "gpipe": (pp.ScheduleGPipe, 1, lambda p, m, v: (p - 1) / (m + p - 1)),
    "1f1b": (pp.Schedule1F1B, 1, lambda p, m, v: (p - 1) / (m + p - 1)),
    "interleaved": (pp.ScheduleInterleaved1F1B, 2, lambda p, m, v: (p - 1) / (v * m + p - 1)),
    "zbv": (pp.ScheduleZBVZeroBubble, 2, lambda p, m, v: (p - 1) / (3 * v * m + p - 1)),
}
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
# Okabe and Ito's colours; a rank's second stage has the lighter one
COLOURS = {"F": ("#0072b2", "#56b4e9"), "B": ("#d55e00", "#f0a070"), "I": ("#d55e00", "#f0a070")}
COLOURS |= {"W": ("#009e73", "#7fd0b8")}


def simulate(schedule: str, ranks: int, micro_batches: int, stages: int | None = None) -> list:
    """For each rank (kind, stage, micro-batch, begin, end) of its passes, in their order."""
    kind, default, _ = SCHEDULES[schedule]
    stages = stages or default
    try:
        orders = get_schedule_ops(kind, ranks, micro_batches, stages)
    except (ValueError, AssertionError) as error:
        sys.exit(f"error: {schedule} cannot do this: {error}")
    passes = ("F", "B", "I", "W")
    orders = [[a for a in o if a and a.computation_type.value in passes] for o in orders]
    if schedule == "1f1b":  # torch 2.13 numbers the forward passes of the last rank from 1 on
        last = [a for a in orders[-1] if a.computation_type.value == "F"]
        moved = {id(a): a._replace(microbatch_index=n) for n, a in enumerate(last)}
        orders[-1] = [moved.get(id(a), a) for a in orders[-1]]
    done, timeline = {}, [[] for _ in orders]
    while any(orders):
        before = len(done)
        for rank, order in enumerate(orders):
            while order:
                stage, batch = order[0].stage_index, order[0].microbatch_index
                name = order[0].computation_type.value
                needs = []
                if name == "F" and stage > 0:
                    needs = [("F", stage - 1, batch)]
                elif name in "BI" and stage < ranks * stages - 1:
                    needs = [(name, stage + 1, batch)]
                if any(need not in done for need in needs):
                    break
                free = timeline[rank][-1][4] if timeline[rank] else 0
                begin = max([free, *(done[need] for need in needs)])
                end = begin + UNITS[name]
                timeline[rank].append((name, stage, batch, begin, end))
                done[name, stage, batch] = end
                order.pop(0)
        assert len(done) > before, "no pass can begin"
    return timeline


def bubble(timeline: list) -> float:
    """The share of the time, from the first pass to the last one, in which a rank waits."""
    end = max(passes[-1][4] for passes in timeline)
    busy = sum(end - begin for passes in timeline for *_, begin, end in passes)
    return 1 - busy / (end * len(timeline))


def in_flight(timeline: list) -> list[int]:
    """The most forward passes of each rank that still wait for their backward pass."""
    peaks = []
    for passes in timeline:
        held = peak = 0
        for name, *_ in passes:
            held += {"F": 1, "B": -1, "W": -1}.get(name, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def shades(timeline: list) -> str | None:
    """What dark and light cells are, if the ranks have several stages."""
    stages = 1 + max(stage for passes in timeline for _, stage, *_ in passes)
    if stages == len(timeline):
        return None
    light = "second stage" if stages == 2 * len(timeline) else "later stages"
    return f"dark: first stage of a rank, light: {light}"


LEFT, UNIT, ROW, BAR = 40, 18, 31, 28  # points: the names, a unit of time, a rank, its cells
HEAD = """<svg xmlns="http://www.w3.org/2000/svg"
  width="{0}pt" height="{1}pt" viewBox="0 0 {0} {1}">
<rect width="{0}" height="{1}" fill="white"/>
<defs>"""


def svg(timeline: list) -> str:
    """The picture. Cells of one colour share a shape, which has the size of their pass."""
    end = max(passes[-1][4] for passes in timeline)
    bottom = 4 + ROW * len(timeline)
    kinds = dict.fromkeys(name for passes in timeline for name, *_ in passes)
    title = shades(timeline)
    width, height = LEFT + UNIT * end + 3, bottom + (48 if title else 36)
    lines = [HEAD.format(width, height)]
    for name in kinds:
        for number, colour in enumerate(COLOURS[name]):
            size = f'width="{UNIT * UNITS[name]}" height="{BAR}"'
            lines.append(f'<rect id="{name}{number}" {size} fill="{colour}" stroke="white"/>')
    lines.append("</defs>")
    lines.append('<g font-family="sans-serif" font-size="9" text-anchor="middle">')
    for rank, passes in enumerate(timeline):
        top = 4 + ROW * rank
        lines.append(f'<text x="{LEFT / 2:g}" y="{top + 17}">rank {rank}</text>')
        for name, stage, batch, begin, stop in passes:
            shape = f"{name}{int(stage >= len(timeline))}"
            x, middle = LEFT + UNIT * begin, LEFT + UNIT * (begin + stop) / 2
            number = f'<text font-size="7" x="{middle:g}" y="{top + 17}">{batch}</text>'
            lines.append(f'<use href="#{shape}" x="{x}" y="{top}"/>{number}')
    lines.append(f'<text x="{LEFT + UNIT * end / 2:g}" y="{bottom + 10}">time</text>')
    legend = width - 100 * len(kinds)
    if title:
        lines.append(f'<text x="{legend + 50 * len(kinds)}" y="{bottom + 26}">{title}</text>')
    for number, name in enumerate(kinds):
        x, y = legend + 100 * number, height - 12
        square = f'<rect x="{x}" y="{y}" width="18" height="7" fill="{COLOURS[name][0]}"/>'
        words = f'<text text-anchor="start" x="{x + 23}" y="{y + 7}">{NAMES[name]}</text>'
        lines.append(square + words)
    return "\n".join([*lines, "</g>", "</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("schedule", choices=SCHEDULES, help="what to draw")
    parser.add_argument("-p", "--ranks", type=int, default=4, help="of the pipeline")
    parser.add_argument("-m", "--micro-batches", type=int, default=8)
    parser.add_argument("--stages-per-rank", type=int, help="2 where there must be several")
    parser.add_argument("-o", "--output", type=Path, help="an .svg file")
    args = parser.parse_args()
    timeline = simulate(args.schedule, args.ranks, args.micro_batches, args.stages_per_rank)
    print(f"bubble: {100 * bubble(timeline):.1f}%; in flight: {in_flight(timeline)}")
    if args.output:
        args.output.write_text(svg(timeline))


if __name__ == "__main__":
    main()
