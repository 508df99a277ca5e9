"""Draws the losses of the recorded demos of chapters 1 to 3: docs/losses.svg.

    python maintain/draw-losses.py

The curves lie on top of each other, so the first one is wide, and the last one is dashed.
"""

import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RUNS = REPOSITORY / "benchmarks" / "demo-runs"
WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 40, 620, 10, 205
STEPS = 400
LOSSES = (4, 8)
# The run, its legend, and how its line looks
CURVES = [
    ("demo-single-gpu", "01-single-gpu", 'stroke="#56b4e9" stroke-width="9"'),
    ("demo-ddp", "02-ddp", 'stroke="#d55e00" stroke-width="4"'),
    ("demo-fsdp", "03-fsdp", 'stroke="#000000" stroke-width="2" stroke-dasharray="4 4"'),
]


def x(step: int) -> float:
    return LEFT + (RIGHT - LEFT) * step / STEPS


def y(loss: float) -> float:
    lowest, highest = LOSSES
    return BOTTOM - (BOTTOM - TOP) * (loss - lowest) / (highest - lowest)


def text(across: float, down: float, words: str, anchor: str) -> str:
    return f'<text x="{across:.1f}" y="{down:.1f}" text-anchor="{anchor}">{words}</text>'


def picture() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<g font-family="sans-serif" font-size="13" fill="#333333">',
    ]
    for loss in range(LOSSES[0], LOSSES[1] + 1):
        parts.append(f'<path d="M{LEFT} {y(loss):.1f}H{RIGHT}" stroke="#dddddd"/>')
        parts.append(text(LEFT - 8, y(loss) + 4, f"{loss}", "end"))
    for step in range(0, STEPS + 1, 100):
        parts.append(text(x(step), BOTTOM + 18, f"{step}", "middle"))
    parts.append(text((LEFT + RIGHT) / 2, HEIGHT - 4, "loss, by optimizer step", "middle"))
    for number, (run, legend, look) in enumerate(CURVES):
        lines = (RUNS / run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        points = [(x(r["step"]), y(r["loss"])) for r in records if "loss" in r]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{line}" fill="none" {look}/>')
        down = TOP + 20 + 22 * number
        parts.append(f'<path d="M470 {down}h40" {look}/>')
        parts.append(text(520, down + 5, legend, "start"))
    return "\n".join([*parts, "</g>", "</svg>", ""])


if __name__ == "__main__":
    file = REPOSITORY / "docs" / "losses.svg"
    file.write_text(picture())
    print(f"wrote {file.relative_to(REPOSITORY)}")
