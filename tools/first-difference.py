"""Finds the first parameter in which two training runs differ, and names the likely cause.

    python tools/first-difference.py --reference "python train.py" \
        --port "torchrun --standalone --nproc-per-node 2 train-ddp.py"

Both commands run their first optimizer steps under a recorder (tools/watch/steps.py), without any
change to the scripts. The tool then compares each parameter: the gradient before and after
clipping, the settings of the optimizer, and the values after the step. Use fp32, no dropout, the
same initial weights and the same global batch. A folder of --keep can take the place of a command.

Exit status: 0 without a difference, 1 with a difference, 2 if the runs cannot be compared.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

from models import positive

PRELOAD = Path(__file__).resolve().parent / "watch"
# Relative differences that rounding explains: of gradients and values, and of updates. AdamW
# divides each element by its own size, so rounding of the smallest elements shows in the update. In
# bf16, this says nothing.
TOLERANCES = {"fp32": (1e-4, 2e-2), "bf16": (5e-2, float("inf"))}


def fail(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


# -- Two runs --------------------------------------------------------------------------------------


def run(command, folder, steps):
    env = os.environ | {"FIRST_DIFFERENCE": str(folder), "FIRST_DIFFERENCE_STEPS": str(steps)}
    paths = [str(PRELOAD), os.environ.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(f"Running {command}", flush=True)
    status = subprocess.run(shlex.split(command), env=env, stdout=sys.stderr).returncode
    if status:
        fail(f"the command ended with status {status}: {command}")


class Recording:
    """What the ranks of a run have recorded: `steps[step]` has the parameters of all ranks, one
    rank after the other, in the order of the forward pass."""

    def __init__(self, folder):
        files = [torch.load(file) for file in sorted(Path(folder).glob("step*.pt"))]
        if not files:
            fail(f"no optimizer step was recorded in {folder}: does the script call a step()?")
        self.steps = defaultdict(list)
        self.samples = defaultdict(lambda: defaultdict(list))
        self.rows, self.labels = defaultdict(list), defaultdict(list)  # of all forward passes
        for file in files:
            for entry in file["parameters"]:
                # A parameter of no module, without a gradient, takes no part.
                if entry["kind"] != "function" or entry["gradient"] is not None:
                    self.steps[file["step"]].append(entry | {"rank": file["rank"]})
            self.samples[file["step"]][file["rank"]] += file["samples"]
            self.rows[file["step"]] += file["rows"]
            self.labels[file["step"]] += file["labels"]
        self.evaluated = any(file["evaluated"] for file in files)
        self.precisions = {name for file in files for name in file["precisions"]}
        self.is_random = any(file["random"] for file in files)
        for entries in self.steps.values():
            entries.sort(key=lambda entry: (entry["rank"], entry["place"]))
        if all(entry["gradient"] is None for entry in self.steps[1]):
            fail(f"{folder}: no parameter of the optimizer has a gradient. {SENTENCES['stale']}")

    def samples_of(self, step):
        return {sample for samples in self.samples[step].values() for sample in samples}

    def copies(self, step):
        """By name: the records of all ranks. The names come in the order of the forward pass."""
        found = defaultdict(list)
        for entry in self.steps[step]:
            found[entry["names"][0]].append(entry)
        return found


def pairs(reference, port, step):
    """(name, record of the reference, record of the port, copies of the port), in forward order."""
    ours = {name: copies[0] for name, copies in reference.copies(step).items()}
    order = sorted(ours, key=lambda name: ours[name]["place"])
    theirs = port.copies(step)
    by_alias = {alias: name for name, entry in ours.items() for alias in entry["names"]}

    def within(name):
        """The name without wrappers, if the reference has it."""
        while name and name not in by_alias:
            name = name.partition(".")[2]
        return name

    matched = defaultdict(list)
    unknown = []
    for name, copies in theirs.items():
        found = [by_alias[known] for known in map(within, copies[0]["names"]) if known]
        if found:
            matched[found[0]].append(copies)
        else:
            unknown.append(name)
    missing = sorted(ours.keys() - matched.keys())
    if matched and bool(missing) != bool(unknown):
        side = "reference" if missing else "port"
        for name in missing or unknown:
            entry = ours[name] if missing else theirs[name][0]
            if entry["gradient"] is not None:
                sentence = f"{name} has a gradient in the {side}, and is not in the other optimizer"
                fail(f"{sentence}. {SENTENCES['stale']}")
        if step == 1:
            print(f"Note: {name} is frozen, and only in the optimizer of the {side}.")
    elif unknown:
        # A pipeline may number its layers anew: the parameters of all ranks, one after the other.
        chain = port.steps[step]
        if [entry["shape"] for entry in chain] != [ours[name]["shape"] for name in order]:
            fail(
                f"the runs have other parameters, such as {(missing or unknown)[0]}, and order and "
                "shapes do not match either: give them the same names. The flat parts of "
                "FullyShardedDataParallel cannot be compared: try fully_shard"
            )
        if step == 1:
            print("Note: names differ, so parameters are matched by order and shape.")
        matched = {name: [[entry]] for name, entry in zip(order, chain, strict=True)}
    result = []
    for name in order:
        for copies in matched[name]:
            shape, of_port = ours[name]["shape"], copies[0]["shape"]
            if of_port != shape:
                fail(
                    f"{name} has the shape {of_port} in the port, not {shape}. Parts of a tensor "
                    "can only be compared if they are DTensors"
                )
            result.append((name, ours[name], copies[0], copies))
    return result


# -- What differs ----------------------------------------------------------------------------------


def flat(tensor, like):
    """One row of numbers. A missing gradient counts as zeros."""
    if tensor is None:
        return torch.zeros(like.numel(), dtype=torch.float64)
    return tensor.double().flatten()


def size(vectors):
    """The norm per element of all vectors: what a gradient of this model usually has."""
    count = sum(v.numel() for v in vectors)
    return (sum(v.square().sum() for v in vectors) / max(count, 1)).sqrt().item()


class Difference:
    """Of one tensor: how large, relative to the reference, and the ratio of the two."""

    def __init__(self, name, ours, theirs, usual, ranks=()):
        self.name = name
        self.ranks = ranks  # of the port, if two of them are compared
        floor = 0.01 * usual * ours.numel() ** 0.5  # of a gradient that is zero but for rounding
        self.norm = max(ours.norm().item(), floor, 1e-30)
        self.relative = ((theirs - ours).norm() / self.norm).item()
        self.ratio = ((theirs @ ours) / (ours @ ours).clamp(min=1e-60)).item()
        self.rest = ((theirs - self.ratio * ours).norm() / theirs.norm().clamp(min=1e-30)).item()


def differences(matches, key, tolerance):
    """All tensors that differ by more than the tolerance, in forward order."""
    vectors = [(n, flat(a[key], a["before"]), flat(b[key], a["before"])) for n, a, b, _ in matches]
    usual = size([ours for _, ours, _ in vectors])
    found = [Difference(*vector, usual) for vector in vectors]
    return [d for d in found if not d.relative <= tolerance]  # also NaN


def across_ranks(matches, key, tolerance):
    """Parameters whose copies differ between the first rank and another one."""
    usual = size([flat(ours[key], ours["before"]) for _, ours, _, _ in matches])
    found = []
    for name, ours, _, (first, *others) in matches:
        for copy in others:
            vectors = [flat(x[key], ours["before"]) for x in (first, copy)]
            found.append(Difference(name, *vectors, usual, (first["rank"], copy["rank"])))
    return [d for d in found if not d.relative <= tolerance]


def read_the_same(reference, port, step):
    """Have all ranks of the port read the same samples, and less than the reference?"""
    first, *others = [set(samples) for samples in port.samples[step].values()]
    is_same = others and all(samples == first for samples in others)
    return is_same and first and first < reference.samples_of(step)


def read_others(reference, port, step):
    """Has the port left out samples of the reference? Rows of another shape cannot tell."""
    expected, seen = reference.samples_of(step), port.samples_of(step)
    shapes = {sample.rpartition(" ")[0] for sample in seen}
    comparable = {sample for sample in expected if sample.rpartition(" ")[0] in shapes}
    return not comparable <= seen


def known_ratio(found, tolerance):
    """N or 1/N, if all gradients differ by this factor up to rounding, and the factor."""
    if any(not d.rest <= tolerance for d in found):
        return None
    ratios = [d.ratio for d in found]
    rounding = min(tolerance, 0.01)
    for n in range(2, int(0.25 / rounding)):  # beyond, any ratio would fit
        for text, factor in ((f"{n} times too large", n), (f"{n} times too small", 1 / n)):
            if all(abs(r / factor - 1) < rounding for r in ratios):
                return text, factor
    return None


def labels_differ(reference, port, step):
    """A sentence if the numbers of labels, or of samples, are not those of an equal average."""
    for what in ("labels", "rows"):
        ours, theirs = getattr(reference, what)[step], getattr(port, what)[step]
        if what == "labels" and ours and sum(theirs) % sum(ours):
            return SENTENCES["labels lost"].format(sum(theirs), sum(ours))
        if len({*theirs}) > 1 and sorted(ours) != sorted(theirs):
            what = what.replace("rows", "samples")
            return SENTENCES["means"].format(what=what, least=min(theirs), most=max(theirs))
    return None


def not_reached(matches, reference, port, steps):
    """Parts of a training loop that the recorded steps have not used in both runs."""
    both = [record for of_step in matches for _, *two, _ in of_step for record in two]
    seen = [reference.samples_of(step) for step in steps]
    rates = {str(record["settings"].get("lr")) for record in both}
    runs = (reference, port)
    forward_passes = [len(run.rows[n]) / len(run.samples[n]) for run in runs for n in steps]
    parts = {
        "clipping (no gradient was above the limit: lower it)": any(r["is_clipped"] for r in both),
        "the schedule (the learning rate was the same: take more steps)": len(rates) > 1,
        "accumulation (one forward pass per step)": max(forward_passes, default=0) > 1,
        "the end of an epoch": any(x & y for x, y in pairwise(seen)),
        "evaluation": reference.evaluated and port.evaluated,
    }
    return ", ".join(part for part, reached in parts.items() if not reached)


# -- The report ------------------------------------------------------------------------------------

SENTENCES = {
    "begin": "The runs begin with other weights: save them once, and load them in both.",
    "between": "Something outside of the optimizer has changed the weights between the steps.",
    "weights of ranks": "The ranks have other weights: they need those of rank 0 at the start.",
    "same samples": "The ranks have read the same samples: each rank needs its own part of them.",
    "other samples": "The runs have read other samples: first give them the same ones, in the same "
    "order.",
    "not averaged": "The ranks do not average this gradient: they call the model without its "
    "wrapper, or leave this parameter out.",
    "not zeroed": "This is the gradient of both steps together: gradients are not zeroed.",
    "later step": "Earlier steps are equal: look at what a step leaves behind, such as gradients "
    "that are not zeroed, stale buffers, or the order of the samples.",
    "hidden": " Clipping hides this: after clipping, the gradients are equal.",
    "clipping": "Gradients are equal before clipping only: the runs clip by another norm, for "
    "example by the norm of one rank's part.",
    "ends": "Only tied or embedding weights differ: often, the gradients of their two uses, or of "
    "their parts, are not added up.",
    "norms": "Only norms or biases differ: often, each rank has seen a part of the tokens or "
    "heads, and the sum over the ranks of a tensor-parallel group is missing.",
    "large": "All gradients are {ratio}: they are summed over ranks or micro-batches and not "
    "averaged, or the loss is multiplied by a number, as of ranks or of a GradScaler.",
    "small": "All gradients are {ratio}: they are divided twice, for example by the script and by "
    "DDP, or the loss is multiplied by a number.",
    "clipped alone": "Each rank clips its own gradient, then the ranks average: average first.",
    "scaled": "The ranks have the same gradient, times other numbers: for example, each rank clips "
    "by the norm of its own part.",
    "stale": "Was the optimizer made before fully_shard, which replaces parameters, or before "
    "another copy of the model?",
    "one run": "Only one run has a gradient here: the other has frozen it, or does not use it.",
    "means": "A possible cause: forward passes have from {least} to {most} {what}. The average of "
    "their means is not the mean of all: each mean needs the weight of its number of {what}.",
    "labels lost": "The losses of the port have {} labels, those of the reference {}: compare the "
    "shift of labels, such as at the border of a chunk, and what is masked.",
    "some": "Only these gradients are {ratio}: they are not divided by the same number as others.",
    "unknown": "No known pattern: look at what this parameter gets in forward and backward pass.",
    "state": "Gradients and settings are equal, values are not: compare the optimizers and their "
    "state.",
    "state of ranks": "Gradients are equal, values are not: the optimizer state differs between "
    "ranks.",
}


def names_of(matches):
    return {name for name, *_ in matches}


def kind(matches, names):
    """The sentence of parameters of one kind, if only these differ."""
    entries = [ours for name, ours, _, _ in matches if name in names]
    if len(names) == len(names_of(matches)):
        return None
    if all(is_end(entry) for entry in entries):
        return SENTENCES["ends"]
    if all(len(entry["shape"]) <= 1 for entry in entries):
        return SENTENCES["norms"]
    return None


def is_end(entry):
    """Embeddings, the head, and tied weights."""
    words = ("embed", "wte", "lm_head")
    named = any(word in name for word in words for name in entry["names"])
    return named or len(entry["names"]) > 1 or entry["kind"] == "Embedding"


def cause(reference, port, step, matches, found, tolerance):
    """The sentence about gradients that differ in the first step."""
    gradients = {name: [x["gradient"] is None for x in two] for name, *two, _ in matches}
    if len({*gradients[found[0].name]}) > 1:
        return SENTENCES["one run"]
    names = {difference.name for difference in found}
    trained = {n for n, ours, *_ in matches if flat(ours["gradient"], ours["before"]).any()}
    if ratio := known_ratio(found, tolerance):
        text, factor = ratio
        which = "large" if factor > 1 else "small"
        return SENTENCES[which if trained <= names else "some"].format(ratio=text)
    if read_others(reference, port, step):
        return SENTENCES["other samples"]
    if trained <= names and (sentence := labels_differ(reference, port, step)):
        return sentence
    return kind(matches, names) or SENTENCES["unknown"]


def report(found, matches, what, sentence):
    """Prints a difference. Returns the exit status."""
    first = found[0]
    where, ratio = "", "ratio port / reference"
    if first.ranks:
        one, other = first.ranks
        where, ratio = f" on ranks {one} and {other}", f"ratio rank {other} / rank {one}"
    count = len({difference.name for difference in found})
    print(f"The first difference: {what} of {first.name}{where}")
    print(f"  relative difference {first.relative:.2g}, {ratio} {first.ratio:.4g}")
    print(f"  {count} of {len(names_of(matches))} parameters differ")
    print(sentence)
    return 1


def compare(reference, port):
    """Prints the first difference. Returns the exit status."""
    low = {"autocast", "bfloat16", "float16"} & (reference.precisions | port.precisions)
    if low:
        print(f"Warning: not in fp32 ({', '.join(sorted(low))}). Small differences are not seen,")
        print("and updates are not compared.")
    if reference.is_random or port.is_random:
        print("Warning: the forward pass draws random numbers, as dropout does: turn it off.")
    tolerances = TOLERANCES["bf16" if low else "fp32"]
    steps = sorted(reference.steps.keys() & port.steps.keys())
    compared = []
    for step in steps:
        matches = pairs(reference, port, step)
        if step == 1 and not all(x["saw_clipping"] for _, *two, _ in matches for x in two):
            print("Note: clipping was not seen in both runs, so these gradients may be clipped.")
        print(f"Step {step}")
        previous = compared[-1] if compared else None
        if compare_gradients(reference, port, step, matches, previous, tolerances[0]):
            return 1
        if compare_updates(matches, tolerances[1], step):
            return 1
        compared.append(matches)
    steps_done = f"{len(steps)} steps" if steps[1:] else "1 step"
    print(f"No difference: {len(names_of(matches))} parameters, {steps_done}.")
    if parts := not_reached(compared, reference, port, steps):
        print(f"Not compared, because these steps did not use it: {parts}.")
    return 0


def compare_gradients(reference, port, step, matches, previous, tolerance):
    """From the values before a step to its clipped gradients. True if there is a difference."""
    if found := differences(matches, "before", tolerance):
        sentence = SENTENCES["begin" if step == 1 else "between"]
        return report(found, matches, "the value before the step", sentence)
    if found := across_ranks(matches, "before", tolerance):
        return report(found, matches, "the value before the step", SENTENCES["weights of ranks"])
    found = differences(matches, "gradient", tolerance)
    if found and read_the_same(reference, port, step):
        return report(found, matches, "the gradient", SENTENCES["same samples"])
    if of_ranks := across_ranks(matches, "gradient", tolerance):
        if not across_ranks(matches, "clipped", tolerance):
            sentence = SENTENCES["clipped alone"]
        elif all(difference.rest <= tolerance for difference in of_ranks):
            sentence = SENTENCES["scaled"]
        else:
            names = {difference.name for difference in of_ranks}
            sentence = kind(matches, names) or SENTENCES["not averaged"]
        return report(of_ranks, matches, "the gradient", sentence)
    clipped = differences(matches, "clipped", tolerance)
    if found:
        if previous is None:
            sentence = cause(reference, port, step, matches, found, tolerance)
        elif has_last_gradient(matches, previous, tolerance):
            sentence = SENTENCES["not zeroed"]
        else:
            is_other = read_others(reference, port, step)
            sentence = SENTENCES["other samples" if is_other else "later step"]
        sentence += "" if clipped else SENTENCES["hidden"]
        return report(found, matches, "the gradient", sentence)
    if clipped:
        return report(clipped, matches, "the clipped gradient", SENTENCES["clipping"])
    return 0


def has_last_gradient(matches, previous, tolerance):
    """Are the port's gradients those of the reference plus those of the step before?"""
    before = {name: theirs for name, _, theirs, _ in previous}
    sums = []
    for name, ours, theirs, copies in matches:
        last = flat(before[name]["clipped"], ours["before"])
        total = flat(ours["gradient"], ours["before"]) + last
        sums.append((name, ours | {"gradient": total}, theirs, copies))
    return not differences(sums, "gradient", tolerance)


def compare_updates(matches, tolerance, step):
    """Settings of the optimizer, and what it has done. True if there is a difference."""
    for name, ours, theirs, _ in matches:
        for setting, value in ours["settings"].items():
            other = theirs["settings"].get(setting, value)
            if any(abs(x - y) > 1e-6 * abs(x) for x, y in zip(value, other, strict=True)):
                one, two = (", ".join(f"{x:g}" for x in numbers) for numbers in (value, other))
                where = f"{one} in the reference, {two} in the port"
                check = "schedule" if step > 1 and setting == "lr" else "learning rate"
                print(f"The first difference: {setting} of {name}: {where}")
                print(f"Gradients are equal, settings are not: check {check} and decay groups.")
                return 1
    updates = []
    for name, ours, theirs, copies in matches:
        one, other = (x | {"update": x["after"] - x["before"]} for x in (ours, theirs))
        updates.append((name, one, other, copies))
    if found := differences(updates, "update", tolerance):
        return report(found, matches, "the update", SENTENCES["state"])
    if found := across_ranks(updates, "after", tolerance):
        return report(found, matches, "the value after the step", SENTENCES["state of ranks"])
    return 0


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", required=True, help="a command, or a folder of --keep")
    parser.add_argument("--port", required=True, help="the command to check, or a folder")
    parser.add_argument("--steps", type=positive(int), default=2, help="to record (default: 2)")
    parser.add_argument("--keep", type=Path, help="leave the recordings in this folder")
    return parser.parse_args()


def main():
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        recordings = []
        for name in ("reference", "port"):
            given = getattr(args, name)
            if not Path(given).is_dir():
                if any((folder / name).glob("*")):
                    fail(f"{folder / name} is not empty: choose another folder for --keep")
                run(given, folder / name, args.steps)
                given = folder / name
            recordings.append(Recording(given))
        sys.exit(compare(*recordings))


if __name__ == "__main__":
    main()
