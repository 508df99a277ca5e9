"""Builds the site: all pages with search, which layout fits, and the chapters side by side.

    python maintain/write-site.py            # outputs/site/site/, from the stored grid
    python maintain/write-site.py --grid     # computes the grid again, in 10 minutes to an hour

Zensical (maintain/mkdocs.yml) makes the site from our Markdown pages as they are. Links to scripts
and to other files lead to the repository. This script adds two pages. `layouts.html` shows which
layouts fit a model, how fast they are, and why others do not fit. The page computes no layout. It
looks up choices that `estimate-scaling.py --choose` has made for a grid of models, GPUs, links,
lengths and batches: benchmarks/records/layouts.json. `side-by-side.html` has the chapters in
columns.

--grid makes all choices without a trace at first. Then it traces the memory of some of them.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = REPOSITORY / "tools"
TEMPLATES = REPOSITORY / "maintain" / "site"
GRID = REPOSITORY / "benchmarks" / "records" / "layouts.json"
SITE = REPOSITORY / "outputs" / "site"
SHOWN = 3  # layouts of a choice

sys.path.append(str(TOOLS))
from models import STORED as MODELS  # noqa: E402
from models import check_length, positive  # noqa: E402

# The estimators. They import torch only when they load a model.
chooser = importlib.import_module("choose-layout")
scaling = chooser.scaling

# -- The axes of the grid --------------------------------------------------------------------------

# Flags of estimate-scaling.py. Its defaults are those of an H100, and its rate is 40 % of the dense
# rate in bf16 of the datasheet. The RTX 4090 has the same share of its own datasheet's rate.
GPUS = {
    "RTX 4090, 24 GB": "--gpu-memory 24 --rate 67 --attention-rate 56 --memory 1008"
    " --link-in-node 24",
    "H100, 80 GB": "",
    "H200, 141 GB": "--gpu-memory 141 --memory 4800",
}
DEVICES = [2**k for k in range(11)]
PER_NODE = 8
LINKS = [1, 10, 100, 400]  # Gbit/s per device between nodes
LENGTHS = [2048, 8192, 32768, 131072]
BATCHES = [2**19, 2**22]  # tokens of a step
# The memory of these choices is traced. A trace takes half a minute, a choice a tenth of a second.
TRACED = {"gpu": "H100, 80 GB", "length": 8192, "batch": 2**22, "link": 400}
TRACED_DEVICES = [8, 64, 256, 1024]
COMMAND = (
    "python tools/estimate-scaling.py --choose -m {model} --devices {devices} -s {length}"
    " --global-batch-size {samples} {link} {gpu} {trace}"
)


def axes() -> dict:
    return {
        "models": MODELS,
        "gpus": GPUS,
        "devices": DEVICES,
        "devices per node": PER_NODE,
        "links": LINKS,
        "lengths": LENGTHS,
        "batches": BATCHES,
        "command": COMMAND,
    }


def links_of(devices: int) -> list[int]:
    """A node alone has no link to others, and its choice is stored once."""
    return LINKS if devices > PER_NODE else LINKS[-1:]


def command(model, gpu, devices, length, batch, link, trace: bool) -> str:
    """The command that prints a choice of the grid."""
    values = {"model": model, "devices": devices, "length": length, "samples": batch // length}
    values["link"] = f"--link {link}" if devices > PER_NODE else ""
    values |= {"gpu": GPUS[gpu], "trace": "" if trace else "--no-trace"}
    return " ".join(COMMAND.format(**values).split())


# -- Choices ---------------------------------------------------------------------------------------


@cache
def model_of(name: str):
    import torch

    torch.set_num_threads(1)  # for each process of --grid
    return scaling.load_model(name)


def choices(name, gpu, devices, length, batch, link, trace: bool) -> dict:
    """What the tool prints for a cell of the grid."""
    flags = shlex.split(command(name, gpu, devices, length, batch, link, trace))[2:]
    args = scaling.parse_args(flags)
    model = model_of(name)
    fit, out = chooser.choose(model, devices, args)
    if trace and fit:
        chooser.trace_best(fit, out, devices, args, wanted=SHOWN)
    elif trace:
        chooser.trace_smallest(model, fit, out, devices, args)
    return {
        "best": [shown(model, choice, devices, args) for choice in fit[:SHOWN]],
        "more": max(0, len(fit) - SHOWN),
        "out": [[c.layout.name(), c.layout.chapter, c.problem] for c in out],
    }


def shown(model, choice, devices: int, args) -> dict:
    """A layout with its figures, rounded as the tool prints them."""
    layout = choice.layout
    of_chapter = chooser.command(layout, devices, args)
    # The page fills in what it knows.
    of_chapter = re.sub(r"--nnodes \d+", "--nnodes {nodes}", of_chapter)
    of_chapter = re.sub(r"--nproc-per-node \d+", "--nproc-per-node {ranks}", of_chapter)
    batch = f"-b {layout.samples} --gradient-accumulation-steps {layout.micro_batches}"
    flags = f"-m {args.model_name} -s {args.seq_length} {batch}"
    of_chapter = of_chapter.replace(flags, "{flags}")
    return {
        "name": layout.name(),
        "chapter": layout.chapter,
        "samples": layout.samples,
        "micro-batches": layout.micro_batches,
        "checkpointing": int(layout.checkpointing),
        "GB": round(choice.memory / 1e9),
        "parts": [round(part / 1e9, 1) for part in chooser.memory_parts(model, layout, args)],
        "traced": None if choice.traced is None else round(choice.traced / 1e9),
        "command": of_chapter,
        "bubble": float(f"{choice.bubble:.1%}"[:-1]) if layout.pp > 1 else None,
        "step": round(choice.step, 3),
        "efficiency": float(f"{choice.efficiency:.1%}"[:-1]),
    }


def too_long(name: str, length: int) -> str:
    """The sentence of the tool if the model has fewer positions, or nothing."""
    args = scaling.parse_args(["--choose", "-m", name, "--devices", "1", "-s", str(length)])
    try:
        check_length(model_of(name).config, args.seq_length)
    except SystemExit as error:
        return str(error).removeprefix("error: ")
    return ""


# -- The grid --------------------------------------------------------------------------------------


def untraced_parts() -> list[tuple]:
    """A part has the choices for all links."""
    return [*product(MODELS, LENGTHS, BATCHES, GPUS, DEVICES)]


def traced_parts() -> list[tuple]:
    return [(name, devices) for devices in TRACED_DEVICES for name in MODELS]


def compute(part: tuple) -> dict:
    if len(part) == 2:
        name, devices = part
        of_cell = [TRACED[axis] for axis in ("length", "batch", "link")]
        cell = choices(name, TRACED["gpu"], devices, *of_cell, trace=True)
        return {"part": part, "cells": [cell]}
    name, length, batch, gpu, devices = part
    refused = too_long(name, length)
    if refused:
        return {"part": part, "refused": refused}
    cells = [
        choices(name, gpu, devices, length, batch, link, trace=False) for link in links_of(devices)
    ]
    return {"part": part, "cells": cells}


def compute_parts(parts: list[tuple], processes: int, what: str) -> dict[tuple, dict]:
    from tqdm import tqdm

    done = {}
    # Not forks: the first part imports torch, and a process that waits has no need for it.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(compute, parts)
        for result in tqdm(results, what, len(parts), unit=" parts"):
            done[tuple(result["part"])] = result
        pool.close()  # The processes end by themselves, and so free the lock of tqdm
        pool.join()
    return done


class Strings:
    """Gives each value a number. The grid has the same strings and layouts many times."""

    def __init__(self):
        self.numbers = {}

    def number(self, value) -> int:
        key = json.dumps(value, ensure_ascii=False)
        return self.numbers.setdefault(key, len(self.numbers))

    def lines(self) -> str:
        return "[\n" + ",\n".join(self.numbers) + "\n]"


def grid_text(done: dict) -> str:
    """The grid as JSON, with a line for each value, so that a change shows as lines."""
    pools = {name: Strings() for name in ("strings", "layouts", "problems", "reasons")}
    strings, layouts, problems, reasons = pools.values()

    def packed(cell: dict, traced: bool) -> list:
        out = []
        for name, chapter, problem in cell["out"]:
            out += [problems.number([name, chapter]), problems.number(problem)]
        numbers = [int(traced), cell["more"], reasons.number(out)]
        for layout in cell["best"]:
            fixed = [strings.number(layout["name"]), layout["chapter"], layout["samples"]]
            fixed += [layout["micro-batches"], layout["checkpointing"], layout["GB"]]
            fixed += [layout["parts"], layout["traced"], strings.number(layout["command"])]
            numbers += [layouts.number(fixed), layout["step"], layout["efficiency"]]
            numbers.append(layout["bubble"])
        return numbers

    cells, refused = {}, {}
    for part in untraced_parts():
        name, length, batch, gpu, devices = part
        if "refused" in done[part]:
            refused[f"{name} {length}"] = done[part]["refused"]
            continue
        found = [packed(cell, traced=False) for cell in done[part]["cells"]]
        if (length, batch, gpu) == (TRACED["length"], TRACED["batch"], TRACED["gpu"]):
            traced = done[name, devices] if devices in TRACED_DEVICES else None
            # Where nothing fits, the tool would also trace larger numbers of devices.
            if traced and traced["cells"][0]["best"]:
                place = links_of(devices).index(TRACED["link"])
                found[place] = packed(traced["cells"][0], traced=True)
        cells[f"{name} {length} {batch} {gpu.split(',')[0]} {devices}"] = found

    parameters = {name: round(model_of(name).parameters / 1e9, 2) for name in MODELS}  # billions

    def line(value) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = [f'"axes": {line(axes())}', f'"parameters": {line(parameters)}']
    parts += [f'"refused": {line(refused)}']
    parts += [f'"{name}": {pool.lines()}' for name, pool in pools.items()]
    rows = ",\n".join(f"{line(key)}:{line(value)}" for key, value in cells.items())
    parts.append(f'"cells": {{\n{rows}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_grid(processes: int) -> None:
    done = compute_parts(untraced_parts(), processes, "choices")
    done |= compute_parts(traced_parts(), processes, "traces")
    GRID.write_text(grid_text(done))
    print(f"wrote {GRID}")


# -- The pages -------------------------------------------------------------------------------------

PICTURES = (".png", ".svg")


def read_git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def with_links(text: str, name: str, known: set[str], link: Callable[[str], str]) -> str:
    """The page `name` with links that the site has: to pages, to pictures, or by `link`."""

    def linked(match) -> str:
        place, _, anchor = match[1].partition("#")
        if "://" in place or place.startswith("mailto:") or not place:
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(name), place))
        if f"{target}/README.md" in known:  # GitHub shows the README of a folder
            place = f"{place.rstrip('/')}/README.md"
        elif target not in known:
            place = link(target)
        return f"]({place}{'#' if anchor else ''}{anchor})"

    text = re.sub(r"\]\(([^)\s]+)\)", linked, text)
    # GitHub reads Markdown inside of folds. This Markdown wants to be told.
    return text.replace("<details>", '<details markdown="1">')


def copy_pages(folder: Path, site: Path, links: str | None) -> None:
    """Our Markdown pages and their pictures, with the links of a site."""
    names = read_git("ls-files", "--cached", "--others", "--exclude-standard")
    pages = [name for name in names if name.endswith(".md") and (REPOSITORY / name).exists()]
    pictures = [name for name in names if name.endswith(PICTURES)]
    for name in (*pages, *pictures):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name in pictures:
            shutil.copy(REPOSITORY / name, file)
            continue
        here = (site / name).parent

        def link(target: str, here=here) -> str:
            return links + target if links else os.path.relpath(REPOSITORY / target, here)

        text = (REPOSITORY / name).read_text("utf-8")
        file.write_text(with_links(text, name, {*pages, *pictures}, link), "utf-8")


def fill(template: str, parts: dict[str, str]) -> str:
    parts = parts | {"STYLE": (TEMPLATES / "style.css").read_text("utf-8")}
    parts |= {"THEME": (TEMPLATES / "theme.js").read_text("utf-8")}
    text = (TEMPLATES / template).read_text("utf-8")
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: parts[match[1]], text)


def rates() -> dict[str, dict]:
    """The memory and the rates of each kind of GPU, as the tool reads its flags."""
    found = {}
    for name, flags in GPUS.items():
        args = scaling.parse_args(shlex.split(flags))
        found[name.split(",")[0]] = {
            "memory_gb": args.gpu_memory,
            "text": f"{args.rate:g} TFLOP/s in matrix products, {args.attention_rate:g} TFLOP/s in "
            f"attention, {args.memory:,.0f} GB/s of memory and {args.link_in_node:.0f} GB/s to the "
            "other GPUs of a node",
        }
    return found


def read_grid(file: Path) -> dict:
    remedy = "run python maintain/write-site.py --grid"
    try:
        grid = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"error: cannot read the grid in {file} ({error}): {remedy}")
    if grid.get("axes") != axes():
        sys.exit(f"error: {file} has a grid with other models or axes: {remedy}")
    return grid


def layouts_page() -> str:
    grid = read_grid(GRID)
    scripts = [*REPOSITORY.glob("0?-*/train-llm.py"), *REPOSITORY.glob("more/*/train-llm.py")]
    chapters = {int(path.parent.name[:2]): path.parent.name for path in sorted(scripts)}
    of_gpu = rates()
    traced = sum(cell[0] for cells in grid["cells"].values() for cell in cells)
    sentence = ""
    if traced:
        sentence = f"For {traced} choices, the tool has also traced it ({TRACED['gpu']}, "
        sentence += f"{TRACED['length']:,} tokens per sample, {TRACED['batch']:,} tokens per step, "
        sentence += f"{TRACED['link']} Gbit/s)."
    data = grid | {"parts": chooser.PARTS, "spare": chooser.SPARE, "rates": of_gpu}
    data |= {"chapters": chapters, "techniques": chooser.NAMES | {1: "one GPU"}}
    # The page needs no configs.
    data["axes"] = {name: value for name, value in data["axes"].items() if name != "models"}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return fill(
        "layouts.html",
        {
            "TRACED": sentence,
            "GRID": text.replace("</", "<\\/"),
            "SCRIPT": (TEMPLATES / "layouts.js").read_text("utf-8"),
            "RATES_H100": of_gpu["H100"]["text"],
            "RATES_H200": of_gpu["H200"]["text"],
            "RATES_4090": of_gpu["RTX 4090"]["text"],
        },
    )


def write_site(folder: Path, links: str | None) -> None:
    """The pages in `folder`/pages, and the site that Zensical makes of them in `folder`/site."""
    pages, site = folder / "pages", folder / "site"
    shutil.rmtree(pages, ignore_errors=True)
    copy_pages(pages, site, links)
    (pages / "layouts.html").write_text(layouts_page(), "utf-8")
    command = [sys.executable, TOOLS / "side-by-side.py", "-o", pages / "side-by-side.html"]
    subprocess.run(command, check=True)
    shutil.copy(REPOSITORY / "maintain" / "mkdocs.yml", folder)
    if importlib.util.find_spec("zensical") is None:
        sys.exit('error: the site needs Zensical: pip install -c constraints.txt ".[site]"')
    subprocess.run([sys.executable, "-m", "zensical", "build", "--clean"], cwd=folder, check=True)
    print(f"wrote {site}/index.html")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, default=SITE, help=f"the folder [{SITE}]")
    prefix = "of links to scripts, with a / at its end [the files of this folder]"
    add("--links", help=prefix)
    add("--grid", action="store_true", help="compute the grid, and write it to its record")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--processes", type=positive(int), default=cores, help=f"of --grid [all cores: {cores}]")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    if args.grid:
        write_grid(args.processes)
    write_site(args.output.resolve(), args.links)


if __name__ == "__main__":
    main()
