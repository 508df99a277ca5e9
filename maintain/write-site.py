"""Writes a folder of static pages, which answer questions without an installation.

    python maintain/write-site.py            # outputs/site/, from the stored grid
    python maintain/write-site.py --grid     # computes the grid again, in 10 minutes to an hour

`layouts.html` shows which layouts fit a model, how fast they are, and why others do not fit. The
page computes no layout. It looks up choices that `estimate-scaling.py --choose` has made for a
grid of models, GPUs, links, lengths and batches: benchmarks/records/layouts.json. `index.html` has
the map of the chapters, and `side-by-side.html` the chapters in columns.

--grid writes each finished part to a work file. If you stop it, the same command goes on there.
At first it makes all choices without a trace. Then it traces the memory of some of them.
"""

import argparse
import base64
import hashlib
import html
import importlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import time
from functools import cache
from itertools import product
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = REPOSITORY / "tools"
TEMPLATES = REPOSITORY / "maintain" / "site"
GRID = REPOSITORY / "benchmarks" / "records" / "layouts.json"
WORK = REPOSITORY / "outputs" / "layouts.jsonl"
SITE = REPOSITORY / "outputs" / "site"
# The choices of the grid depend on these files.
ESTIMATORS = ["estimate-scaling.py", "choose-layout.py", "estimate-memory.py", "models.json"]
SHOWN = 3  # layouts of a choice
PROGRESS_SECONDS = 10

sys.path.append(str(TOOLS))

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


@cache
def models() -> list[str]:
    """The names in models.json, dense ones first, by the number of weights of their layers."""
    stored = json.loads((TOOLS / "models.json").read_text())

    def size(name: str) -> tuple[bool, int]:
        config = stored[name]
        experts = config.get("num_experts", config.get("num_local_experts", 0))
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        layer = config["hidden_size"] * width * max(experts, 1)
        return experts > 0, config["num_hidden_layers"] * layer

    return sorted(stored, key=size)


def axes() -> dict:
    stored = json.loads((TOOLS / "models.json").read_text())
    return {
        "models": {name: stored[name] for name in models()},
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
def tools():
    """The estimators. They import torch only when they load a model."""
    layouts = importlib.import_module("choose-layout")
    return layouts.scaling, layouts


@cache
def model_of(name: str):
    import torch

    torch.set_num_threads(1)  # for each process of --grid
    return tools()[0].load_model(name)


def choices(name, gpu, devices, length, batch, link, trace: bool) -> dict:
    """What the tool prints for a cell of the grid."""
    scaling, layouts = tools()
    flags = shlex.split(command(name, gpu, devices, length, batch, link, trace))[2:]
    args = scaling.parse_args(flags)
    model = model_of(name)
    fit, out = layouts.choose(model, devices, args)
    if trace and fit:
        layouts.trace_best(fit, out, devices, args, wanted=SHOWN)
    elif trace:
        layouts.trace_smallest(model, fit, out, devices, args)
    return {
        "best": [shown(model, choice, devices, args) for choice in fit[:SHOWN]],
        "more": max(0, len(fit) - SHOWN),
        "out": [[c.layout.name(), c.layout.chapter, c.problem] for c in out],
    }


def shown(model, choice, devices: int, args) -> dict:
    """A layout with its figures, rounded as the tool prints them."""
    _, layouts = tools()
    layout = choice.layout
    of_chapter = layouts.command(layout, devices, args)
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
        "parts": [round(part / 1e9, 1) for part in layouts.memory_parts(model, layout, args)],
        "traced": None if choice.traced is None else round(choice.traced / 1e9),
        "command": of_chapter,
        "bubble": float(f"{choice.bubble:.1%}"[:-1]) if layout.pp > 1 else None,
        "step": round(choice.step, 3),
        "efficiency": float(f"{choice.efficiency:.1%}"[:-1]),
    }


def too_long(name: str, length: int) -> str:
    """The sentence of the tool if the model has fewer positions, or nothing."""
    scaling, layouts = tools()
    args = scaling.parse_args(["--choose", "-m", name, "--devices", "1", "-s", str(length)])
    try:
        layouts.check_length(model_of(name), args)
    except SystemExit as error:
        return str(error).removeprefix("error: ")
    return ""


# -- The grid --------------------------------------------------------------------------------------


def untraced_parts() -> list[tuple]:
    """A part has the choices for all links."""
    return [*product(models(), LENGTHS, BATCHES, GPUS, DEVICES)]


def traced_parts() -> list[tuple]:
    return [(name, devices) for devices in TRACED_DEVICES for name in models()]


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


def work_header() -> dict:
    """The work file begins with this line, so that parts of two grids are never mixed."""
    text = b"".join((TOOLS / name).read_bytes() for name in ESTIMATORS)
    return {"axes": axes(), "estimators": hashlib.sha256(text).hexdigest()}


def read_work(file: Path) -> dict[tuple, dict]:
    if not file.exists():
        file.write_text(json.dumps(work_header()) + "\n")
        return {}
    text = file.read_text()
    if not text.endswith("\n"):  # it was stopped in a line
        file.open("a").write("\n")
    header, *lines = text.splitlines()
    if json.loads(header) != work_header():
        sys.exit(f"error: {file} has parts of a grid with other axes or formulae: delete it")
    done = {}
    for line in lines:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        done[tuple(result["part"])] = result
    return done


def compute_parts(parts: list[tuple], done: dict, file: Path, processes: int, what: str) -> None:
    """Adds the missing parts to `done` and to the work file."""
    missing = [part for part in parts if part not in done]
    if not missing:
        return
    begin = last = time.monotonic()
    # Not forks: the first part imports torch, and a process that waits has no need for it.
    context = multiprocessing.get_context("spawn")
    # Ctrl-C is for this process. It ends the others.
    ignore = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
    pool_of = context.Pool(min(processes, len(missing)), **ignore)
    with pool_of as pool, file.open("a") as work:
        for count, result in enumerate(pool.imap_unordered(compute, missing), 1):
            work.write(json.dumps(result) + "\n")
            work.flush()
            done[tuple(result["part"])] = result
            now = time.monotonic()
            if now - last > PROGRESS_SECONDS or count == len(missing):
                minutes = (now - begin) / count * (len(missing) - count) / 60
                finished = len(parts) - len(missing) + count
                text = f"{what}: {finished:,} of {len(parts):,} parts, {minutes:.0f} minutes left"
                print(text, flush=True)
                last = now
        pool.close()  # The processes end by themselves, and so free the lock of tqdm
        pool.join()


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
            traced = done.get((name, devices)) if devices in TRACED_DEVICES else None
            # Where nothing fits, the tool would also trace larger numbers of devices.
            if traced and traced["cells"][0]["best"]:
                place = links_of(devices).index(TRACED["link"])
                found[place] = packed(traced["cells"][0], traced=True)
        cells[f"{name} {length} {batch} {gpu.split(',')[0]} {devices}"] = found

    def line(value) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = [f'"axes": {line(axes())}', f'"parameters": {line(parameters())}']
    parts += [f'"refused": {line(refused)}']
    parts += [f'"{name}": {pool.lines()}' for name, pool in pools.items()]
    rows = ",\n".join(f"{line(key)}:{line(value)}" for key, value in cells.items())
    parts.append(f'"cells": {{\n{rows}\n}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parameters() -> dict[str, float]:
    """Billions, for each model."""
    return {name: round(model_of(name).parameters / 1e9, 2) for name in models()}


def write_grid(processes: int, trace: bool) -> None:
    WORK.parent.mkdir(exist_ok=True)
    done = read_work(WORK)
    try:
        compute_parts(untraced_parts(), done, WORK, processes, "choices")
        if trace:
            compute_parts(traced_parts(), done, WORK, processes, "traces")
    except KeyboardInterrupt:
        print("\nstopped: the same command goes on here")
        if any(part not in done for part in untraced_parts()):
            sys.exit(130)
    GRID.write_text(grid_text(done))
    traced = sum(part in done for part in traced_parts())
    print(f"wrote {GRID}: {traced} of {len(traced_parts())} choices traced")


# -- The pages -------------------------------------------------------------------------------------

PICTURES = [f"docs/step-{name}.png" for name in ("02-ddp", "03-fsdp", "06-tensor-parallel")]
PICTURES += [f"docs/step-{name}.png" for name in ("07-pipeline-parallel", "11-context-parallel")]
PICTURES += ["docs/step-13-3d-parallel.png", "docs/schedule-1f1b.svg"]
KINDS = {".png": "image/png", ".svg": "image/svg+xml"}


def markdown(text: str, folder: str, links: str) -> str:
    """HTML of paragraphs, lists, tables, code and folds, as our pages have them.

    `folder` is the place of the page, and `links` the prefix of links to files of the repository.
    """

    def linked(match) -> str:
        words, place = match.groups()
        if "://" not in place:
            place = links + os.path.normpath(os.path.join(folder, place))
        return f'<a href="{place}">{words}</a>'

    def inline(line: str) -> str:
        line = html.escape(line, quote=False)
        line = re.sub(r"`([^`]+)`", r"<code>\1</code>", line)
        line = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", line)
        line = re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", line)
        return re.sub(r"\[([^\]]+)\]\(([^)]+)\)", linked, line)

    def row(line: str, cell: str) -> str:
        cells = line.strip().removeprefix("|").removesuffix("|").split("|")
        return "<tr>" + "".join(f"<{cell}>{inline(x.strip())}</{cell}>" for x in cells) + "</tr>"

    found = []
    for block in re.split(r"\n{2,}", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith("```"):
            found.append(f"<pre>{html.escape(chr(10).join(lines[1:-1]))}</pre>")
        elif re.match("</?details>", lines[0]):
            found.append(block)
        elif lines[0].startswith("|"):
            rows = "".join(row(line, "td") for line in lines[2:])
            found.append(
                f"<table><thead>{row(lines[0], 'th')}</thead><tbody>{rows}</tbody></table>"
            )
        elif re.match(r"- ", lines[0]):
            items = re.split(r"^- ", block, flags=re.MULTILINE)[1:]
            found.append("<ul>" + "".join(f"<li>{inline(item)}</li>" for item in items) + "</ul>")
        else:
            found.append(f"<p>{inline(block)}</p>")
    return "\n".join(found)


def section(text: str, heading: str) -> str:
    """The text under a heading."""
    found = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1]


def tree(readme: str, links: str) -> str:
    """The tree of the chapters, with links."""
    (text,) = re.findall(r"```text\n(01-.*?)```", readme, re.DOTALL)
    names = r"\d\d-[a-z0-9]+(-[a-z0-9]+)*"
    linked = re.sub(names, lambda m: f'<a href="{links}{m[0]}/README.md">{m[0]}</a>', text)
    label = "The tree of the chapters"
    return f'<pre tabindex="0" role="region" aria-label="{label}">{linked}</pre>'


def picture(file: str) -> str:
    """A picture as a part of the page. Its caption is the text that our pages give it."""
    name = Path(file).name
    pages = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("[0-9][0-9]-*/README.md"))]
    captions = [
        caption
        for page in pages
        for caption in re.findall(rf"!\[([^\]]+)\]\([^)]*{re.escape(name)}\)", page.read_text())
    ]
    content = (REPOSITORY / file).read_bytes()
    kind = KINDS[Path(file).suffix]
    source = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    caption = html.escape(captions[0])
    if name.startswith("schedule"):
        caption += ": a schedule of chapter 7"
    return f'<img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption>'


def fill(template: str, parts: dict[str, str]) -> str:
    parts = parts | {"STYLE": (TEMPLATES / "style.css").read_text("utf-8")}
    parts |= {"THEME": (TEMPLATES / "theme.js").read_text("utf-8")}
    text = (TEMPLATES / template).read_text("utf-8")
    return re.sub(r"@([A-Z0-9_]+)@", lambda match: parts[match[1]], text)


def index_page(links: str) -> str:
    readme = (REPOSITORY / "README.md").read_text("utf-8")
    introduction = readme.partition("badges.svg)\n")[2].partition("![")[0]
    proved = section(readme, "What has been proved, and what has not")
    table = section(readme, "The chapters").strip().split("\n\n")[0]
    figures = "".join(f"<figure>{picture(file)}</figure>" for file in PICTURES)
    return fill(
        "index.html",
        {
            "INTRODUCTION": markdown(introduction, "", links),
            "CHAPTERS_PICTURE": picture("docs/chapters.svg"),
            "TREE": tree(readme, links),
            "CHAPTERS": markdown(table, "", links),
            "PICTURES": figures,
            "PROVED": markdown(proved, "", links),
        },
    )


def rates() -> dict[str, dict]:
    """The memory and the rates of each kind of GPU, as the tool reads its flags."""
    found = {}
    for name, flags in GPUS.items():
        args = tools()[0].parse_args(shlex.split(flags))
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


def layouts_page(links: str) -> str:
    grid = read_grid(GRID)
    _, layouts = tools()
    chapters = {int(path.parent.name[:2]): path.parent.name for path in script_files()}
    of_gpu = rates()
    traced = sum(cell[0] for cells in grid["cells"].values() for cell in cells)
    sentence = ""
    if traced:
        sentence = f"For {traced} choices, the tool has also traced it ({TRACED['gpu']}, "
        sentence += f"{TRACED['length']:,} tokens per sample, {TRACED['batch']:,} tokens per step, "
        sentence += f"{TRACED['link']} Gbit/s)."
    data = grid | {"parts": layouts.PARTS, "spare": layouts.SPARE, "rates": of_gpu, "link": links}
    data |= {"chapters": chapters, "techniques": layouts.NAMES | {1: "one GPU"}}
    # The page needs no configs.
    data["axes"] = {name: value for name, value in data["axes"].items() if name != "models"}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    published = section(
        (REPOSITORY / "docs" / "scaling.md").read_text("utf-8"), "How far the estimate is off"
    )
    # The sources are the end of what belongs to the first table.
    end = re.search(r"^Sources: .*?\n\n", published, re.MULTILINE | re.DOTALL).end()
    table = markdown(published[:end], "docs", links)
    region = '<div class="scroll published" tabindex="0" role="region"'
    region += ' aria-label="Published speeds and estimates"><table>'
    table = table.replace("<table>", region).replace("</table>", "</table></div>")
    return fill(
        "layouts.html",
        {
            "LINK": links,
            "PUBLISHED": table,
            "TRACED": sentence,
            "GRID": text.replace("</", "<\\/"),
            "SCRIPT": (TEMPLATES / "layouts.js").read_text("utf-8"),
            "RATES_H100": of_gpu["H100"]["text"],
            "RATES_H200": of_gpu["H200"]["text"],
            "RATES_4090": of_gpu["RTX 4090"]["text"],
        },
    )


def script_files() -> list[Path]:
    return sorted(REPOSITORY.glob("[0-9][0-9]-*/train-llm.py"))


def columns_page() -> str:
    """The page of side-by-side.py."""
    columns = importlib.import_module("side-by-side")
    files = columns.tree.chapters()
    titles = [str(path.relative_to(REPOSITORY)) for path in files]
    texts = [path.read_text("utf-8").removesuffix("\n").split("\n") for path in files]
    return smaller(columns.page(titles, texts, columns.continued(files)))


def smaller(page: str) -> str:
    """The page with half of its bytes, and the same looks: each token needs fewer of them."""
    token = r'<span class="(\w{1,3})">([^<]*)</span>'

    def short(match) -> str:
        name, text = match.groups()
        # Names, punctuation and spaces have the colour of the page.
        return text if name in ("n", "p", "w") else f"<i class={name}>{text}</i>"

    page = re.sub(token, short, page)
    page = page.replace('<span class="line gap"></span>', '<i class="line gap"></i>')
    page = re.sub(r'id="(\d+-\d+)" data-n="(\d+)"', r"id=\1 data-n=\2", page)
    merged = ""
    while merged != page:  # neighbours of the same kind
        merged, page = page, re.sub(r"(<i class=(\w+)>[^<]*)</i><i class=\2>", r"\1", page)
    return page.replace("<style>", "<style>\n  pre i { font-style: normal; }", 1)


def write_site(folder: Path, links: str) -> None:
    pages = {"index.html": index_page(links), "layouts.html": layouts_page(links)}
    pages["side-by-side.html"] = columns_page()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            (folder / name).write_text(text, "utf-8")
    except OSError as error:
        sys.exit(f"error: cannot write {folder}: {error.strerror}")
    size = sum((folder / name).stat().st_size for name in pages)
    print(f"wrote {', '.join(pages)} in {folder}: {size / 1e6:.1f} MB")


def parse_args(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, default=SITE, help=f"the folder [{SITE}]")
    here = "the files of this folder"
    add("--links", help=f"prefix of links to files of the repository, with a / at its end [{here}]")
    add("--grid", action="store_true", help="compute the grid, and write it to its record")
    trace = "with --grid: trace the memory of some choices [on]"
    add("--trace", action=argparse.BooleanOptionalAction, default=True, help=trace)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--processes", type=int, default=cores, help=f"of --grid [all cores: {cores}]")
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error("--processes must be at least 1")
    return args


def main() -> None:
    args = parse_args()
    if args.grid:
        write_grid(args.processes, args.trace)
    links = args.links or os.path.relpath(REPOSITORY, args.output) + "/"
    write_site(args.output, links)


if __name__ == "__main__":
    main()
