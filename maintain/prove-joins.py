"""Compares joined chapters with the chapter that defines the training: the proof of a join.

    python maintain/prove-joins.py                # what the record lacks, or has for another script
    python maintain/prove-joins.py 05+11 04+05    # these
    python maintain/prove-joins.py 05+11 --ranks 2    # quickly, without a row
    python maintain/prove-joins.py --stale        # only says which rows are of another script
    python maintain/prove-joins.py --damages      # with wrong lines, which it must notice
    python maintain/prove-joins.py --draw         # only draws joins of four and five chapters

`maintain/joins/pairs.txt` says with what each pair is compared, and with which flags. On 2 and 4
ranks, in fp32, the losses and norms of 6 steps, two held-out losses, all gradients of two steps and
the final model must be those of that chapter. A run that goes on from the checkpoint of step 3 must
repeat the rest to the last bit; with other flags, which make other groups of the ranks, but for
rounding. And each chapter must keep its promise: a rank of chapter 11 has a part of the tokens.
Each row goes into benchmarks/records/combining.md at once, so a stopped run can go on.
"""

import argparse
import importlib
import itertools
import json
import math
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path += [str(REPOSITORY / folder) for folder in ("tests", "tools")]
combine = importlib.import_module("combine")
importlib.import_module("helpers.environment")
torch = importlib.import_module("torch")
damages = importlib.import_module("damages")
assertions, changed, data, models, runner, trainings = (
    importlib.import_module(f"helpers.{name}")
    for name in ("assertions", "chapters", "data", "models", "runner", "trainings")
)

STEPS, BATCH, LENGTH = 6, 8, 32  # samples per step, tokens per sample
TEMPLATE = REPOSITORY / "models" / "tiny-chat" / "template.jinja"
FLOAT8 = Path(sys.prefix) / "float8"  # torchao, beside which all scripts print its warnings
IN_16S = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # for chapter 20
models.MODELS |= {f"{name} in 16s": models.MODELS[name] | IN_16S for name in ("llama", "mixtral")}
IN_64S = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # for chapter 22
models.MODELS["llama in 64s"] = models.MODELS["llama"] | IN_64S
models.MODELS["llama with 8 kv heads"] = models.MODELS["llama"] | {"num_key_value_heads": 8}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
models.MODELS["mixtral with router loss"] = models.MODELS["mixtral"] | ROUTERS
models.MODELS["qwen3_moe in all layers"] = models.MODELS["qwen3_moe"] | {"mlp_only_layers": []}
CUT_THE_MODEL = {"06", "07", "11", "12", "13"}
DEGREES = ("--tensor-parallel", "--context-parallel", "--pipeline-parallel")


class Wrong(Exception):
    """The pair does not train what it should."""


@dataclass
class Trial:
    """The joined script on some ranks, and the run that must have the same losses."""

    ranks: int
    flags: list[str]
    like: str
    like_ranks: int
    like_flags: list[str]
    model: str
    moved_flags: list[str]  # with which the run also goes on from its checkpoint, if there are any


@dataclass
class Proof:
    """A line of pairs.txt that says how to compare."""

    name: str
    like: str  # the chapter that defines the training, or `16 with torch.optim.Muon`
    trials: list[Trial]
    damage: tuple[str, str] = ("", "")  # lines of the joined script, and wrong ones
    number_of_damage: int = 0  # among those of all pairs

    @property
    def numbers(self) -> list[str]:
        return combine.parts_of(self.name)[0]

    @property
    def without(self) -> str | None:
        return combine.parts_of(self.name)[1]


def read_proofs() -> dict[str, Proof]:
    found = {}
    for pair in combine.known_pairs().values():
        if pair.status == "like":
            like, *parts = (part.strip() for part in pair.text.split("|"))
            pieces = [part.split(":", 1) for part in parts]
            model = next((text.strip() for head, text in pieces if head == "model"), "llama")
            trials = [read_trial(*piece, like, model) for piece in pieces if piece[0] != "model"]
            found[pair.name] = Proof(pair.name, like, trials)
    return found


def read_trial(head: str, text: str, like: str, model: str) -> Trial:
    """`2`, or with a model of its own `2 qwen3`, and then flags:

    `--shard-size 1`, `--shard-size 1 = itself on 2: --shard-size 2`, `--shard-size 1 > --shard-size
    2`.
    """
    number, _, own_model = head.partition(" ")
    ranks, model = int(number), own_model or model
    text, _, moved = text.partition(">")
    own, _, other = text.partition("=")
    flags = own.split()
    if other:
        what, _, like_flags = other.partition(":")
        script, _, like_ranks = what.strip().rpartition(" on ")
        compared_with = (script, int(like_ranks), like_flags.split())
    else:
        # Each rank has its own place in a stream. Other chapters train the same on any ranks.
        is_stream = like.startswith("04")
        compared_with = (like, shares(ranks, flags) if is_stream else 1, [])
    return Trial(ranks, flags, *compared_with, model, moved.split())


def shares(ranks: int, flags: list[str]) -> int:
    """How many ranks or groups read other samples."""
    for flag in DEGREES:
        if flag in flags:
            ranks //= int(flags[flags.index(flag) + 1])
    return ranks


# -- Data, models and scripts ----------------------------------------------------------------------


def write_data(folder: Path, with_rows: bool) -> None:
    """Documents in several files, conversations, and perhaps rows of chapter 10."""
    chance = random.Random(0)
    words = ["def", "return", "self", "lambda", "the", "loss", "gradient", "Größe", "学习", "x"]
    texts = [" ".join(chance.choices(words, k=chance.randint(1, 60))) for _ in range(300)]
    data.write_documents(folder / "text.jsonl", texts)
    for part in range(4):
        data.write_documents(folder / f"part-{part}.jsonl", texts[part::4])
    rows = []
    for text in texts:
        answer = " ".join(text.split()[: chance.choice([1, 5, 20])])
        question = {"role": "user", "content": chance.choice(texts)[:20]}
        rows.append({"messages": [question, {"role": "assistant", "content": answer}]})
    data.write_rows(folder / "chat.jsonl", rows)
    flags = [folder / "chat.jsonl", "--as", "messages", "--rows", "-m", models.TINY_LLAMA]
    flags += ["--chat-template", TEMPLATE, "-s", LENGTH, "-o", folder / "chats"]
    runner.run_tool(folder, "prepare-data.py", *flags)
    if not with_rows:
        return
    flags = [folder / "text.jsonl", "-o", folder / "rows", "-m", models.TINY_LLAMA]
    flags += ["-s", LENGTH, "--mds", "--no-shuffle"]
    runner.run_tool(folder, "prepare-data.py", *flags, before=finds(data.STAND_IN))


def data_flags(numbers: set[str], folder: Path) -> list:
    """The flags of the chapter that reads the data."""
    if "16" in numbers:
        return ["-d", folder / "chats"]
    if numbers & {"04", "10"}:
        held_out = ["--eval-dataset", folder / "text.jsonl", "--eval-documents", 20]
        held_out += ["--shuffle-window", 9]
        if "10" in numbers:
            return ["-d", folder / "rows", *held_out]
        return ["-d", folder / "part-*.jsonl", "--packing", "overflow", *held_out]
    return ["-d", folder / "text.jsonl"]


def chapters_in(numbers: list[str], without: str | None = None) -> set[str]:
    """Also the chapters that these continue, such as 16 for 17."""
    names = {name[:2]: name for name in combine.SCRIPTS}
    found = {name[:2] for number in numbers for name in combine.ancestors(names[number])}
    return found - {without}


def like_script(proof: Proof, like: str, script: Path, folder: Path) -> tuple[Path, set[str]]:
    """The script to compare with, and its chapters. It may be a join, such as 10+14."""
    if like == "itself":
        return script, chapters_in(proof.numbers, proof.without)
    if "+" in like:
        own = Proof(like, like, [])
        return own_script(own, folder), chapters_in(own.numbers, own.without)
    number, _, other = like.partition(" with ")
    chapter = runner.CHAPTERS_BY_NUMBER[number]
    if other:  # torch.optim.Muon in place of AdamW
        chapter = changed.with_torch_muon(folder, chapter)
    return chapter, chapters_in([number])


def case(folder, name, script, chapters, ranks, flags, model) -> dict:
    """A case of tests/helpers/scripts/many_trainings.py, in a folder with its name."""
    per_pass = BATCH // shares(ranks, flags) // 2
    every = ["-e", name, "-m", folder / model, "--save-dir", folder, "-s", LENGTH, "-b", per_pass]
    every += [*data_flags(chapters, folder), "--lr", 1e-3, "--lr-scheduler", "constant"]
    every += ["--max-steps", STEPS, "--eval-freq", STEPS // 2, "--ckpt-freq", STEPS // 2]
    every += ["--log-freq", 1, "--keep-checkpoints", 9]
    every += trainings.PARTS if "14" in chapters else ["--no-from-scratch"]
    if "05" in chapters:
        every += ["--global-batch-size", BATCH]
    else:
        every += ["--gradient-accumulation-steps", 2]
    every += flags
    (folder / name).mkdir()
    env = {"MASTER_PORT": str(runner.free_port())}
    found = {"name": name, "script": str(script), "env": env, "folder": str(folder / name)}
    return found | {"flags": [str(flag) for flag in every], "facts": True}


# -- Running ---------------------------------------------------------------------------------------


def own_script(proof: Proof, folder: Path) -> Path:
    """The joined script, with chunks that are smaller than a batch."""
    script = folder / f"joined-{proof.name}" / "train-llm.py"
    script.parent.mkdir(exist_ok=True)
    chapters, without = names_of_chapters(proof)
    text, _ = combine.script_of(chapters, script.parent, without)
    if lines := combine.carry.conflicts(text):
        raise Wrong(f"the text does not join: lines {lines}")
    if text.count(proof.damage[0]) != 1 and proof.damage[0]:
        sys.exit(f"error: {proof.name} has not one place with {proof.damage[0]!r}")
    text = text.replace(*proof.damage)
    script.write_text(text.replace("LOSS_CHUNK = 1024", "LOSS_CHUNK = 50"))
    return script


def names_of_chapters(proof: Proof) -> tuple[list[str], str | None]:
    names = {name[:2]: name for name in combine.SCRIPTS}
    return [names[number] for number in proof.numbers], names.get(proof.without)


def hash_of(proof: Proof) -> str:
    return combine.hash_of(*names_of_chapters(proof))


def run_trials(proof: Proof, folder: Path) -> None:
    """The run to compare with, the joined one, and its end again: a job for each of the scripts.

    A job of its own, because PyTorch remembers the process groups of earlier meshes.
    """
    script = own_script(proof, folder)
    chapters = chapters_in(proof.numbers, proof.without)
    for trial in proof.trials:
        if not (folder / trial.model).exists():
            models.write_weights(folder / trial.model, trial.model)
        name, like_name = names_of_runs(proof, trial)
        if not (folder / like_name).exists():  # other pairs are compared with this run, too
            like, like_chapters = like_script(proof, trial.like, script, folder)
            described = (like, like_chapters, trial.like_ranks, trial.like_flags, trial.model)
            run_job([case(folder, like_name, *described)], trial.like_ranks, folder)
        described = (script, chapters, trial.ranks, trial.flags, trial.model)
        cases = [case(folder, name, *described), case(folder, f"{name} again", *described)]
        cases[1]["continues"] = checkpoint_of(name, f"{name} again", folder)
        run_job(cases, trial.ranks, folder)
        if trial.moved_flags:
            moved = f"{name} moved"
            described = (script, chapters, trial.ranks, trial.moved_flags, trial.model)
            continues = {"continues": checkpoint_of(name, moved, folder)}
            run_job([case(folder, moved, *described) | continues], trial.ranks, folder)


def checkpoint_of(name: str, other: str, folder: Path) -> list[str]:
    """The checkpoint in the middle of a run, and its place in another one."""
    return [str(folder / each / f"step-{STEPS // 2:08d}") for each in (name, other)]


def names_of_runs(proof: Proof, trial: Trial) -> tuple[str, str]:
    like = proof.name if trial.like == "itself" else trial.like
    like = f"like {like} on {trial.like_ranks} {trial.model} {' '.join(trial.like_flags)}"
    own = f"{proof.name} on {trial.ranks} {trial.model} {' '.join(trial.flags)}".strip()
    if proof.number_of_damage:
        own += f" damaged {proof.number_of_damage}"
    return own, like.strip()


def finds(*folders: Path) -> str:
    """Code of a run, after which it finds packages there, too. No other run may have them."""
    return f"import sys\nsys.path += {[str(folder) for folder in folders]}\n"


def run_job(cases: list[dict], ranks: int, folder: Path) -> None:
    file = folder / f"{cases[0]['name']}.json"
    file.write_text(json.dumps(cases))
    script = runner.SCRIPTS / "many_trainings.py"
    text = Path(cases[0]["script"]).read_text()
    folders = [FLOAT8] if "import float8" in text else []
    folders += [data.STAND_IN] if "from streaming" in text else []
    output = folder / f"{file.stem}.txt"
    job = runner.Job(script, [file], output, ranks, before=finds(*folders))
    try:
        status, said = job.wait(600), job.output
    except TimeoutError as error:
        status, said = 1, f"{error}"
    if status:
        last = re.findall(r"^case (.*)$", said, re.MULTILINE)[-1]
        raise Wrong(f"{last}: {error_in(said)}")


def error_in(output: str) -> str:
    lines = re.findall(
        r"^(?:Fatal Python error|\w+(?:\.\w+)*(?:Error|Exception)|error)\b.*", output, re.MULTILINE
    )
    return lines[0] if lines else output[-500:]


# -- Comparing -------------------------------------------------------------------------------------


@dataclass
class Limits:
    """The largest differences, relative but for the model."""

    loss: float
    norm: float
    first_gradient: float
    second_gradient: float
    model: float


EXACT = Limits(2e-5, 1e-4, 1e-4, 1e-4, 1e-3)  # but for the order in which fp32 numbers are added
# With chapter 20, such a difference after the first step may round a number to the next one of 8
# bits. In fp32, or if ranks have other inputs, all numbers are rounded otherwise.
SAME_ROUNDING = Limits(1e-4, 5e-3, 1e-4, 5e-2, 1e-2)
OTHER_ROUNDING = Limits(3e-3, 5e-2, 0.4, 0.6, math.inf)


def limits_of(proof: Proof, trial: Trial) -> Limits:
    if "20" not in proof.numbers:
        return EXACT
    return SAME_ROUNDING if trial.like in ("20", "itself") else OTHER_ROUNDING


@dataclass
class Row:
    """Of the record."""

    name: str
    like: str
    ranks: list[int]
    losses: float  # the largest relative differences
    gradients: float
    promises: list[str]
    script: str  # a hash of the joined script

    def __str__(self) -> str:
        *others, last = map(str, self.ranks)
        ranks = f"{', '.join(others)} and {last}" if others else last
        chapters = "chapters" if "+" in self.like else "chapter"
        like = f"{chapters} {self.like}" if self.like[0].isdigit() else self.like
        numbers = f"{self.losses:.0e} | {self.gradients:.0e}"
        kept = ", ".join(self.promises) or "the losses"
        return f"| {self.name} | {like} | {ranks} | {numbers} | {kept} | {self.script} |"


def compared(proof: Proof, folder: Path) -> Row:
    losses, gradients, promises = 0.0, 0.0, {}
    for trial in proof.trials:
        name, like_name = names_of_runs(proof, trial)
        own, again, like = (
            trainings.Case(folder / each) for each in (name, f"{name} again", like_name)
        )
        limits = limits_of(proof, trial)
        losses = max(losses, compare_records(name, like, own, limits))
        is_mixture = any("experts" in tensor for tensor in like.gradients(1))
        for step in (1,) if is_mixture else (1, 2):  # a router may choose another expert then
            error, parameter = assertions.worst(like.gradients(step), own.gradients(step))
            if error > (limits.first_gradient if step == 1 else limits.second_gradient):
                raise Wrong(
                    f"{name}: the gradient of {parameter} in step {step} differs by {error}"
                )
            gradients = max(gradients, error)
        finals = (assertions.final_tensors(like), assertions.final_tensors(own))
        compare_models(name, *finals, limits.model)
        if assertions.exact(again.records) != assertions.exact(own.records):
            raise Wrong(f"{name}: the resumed run has other losses")
        if trial.moved_flags:
            moved = trainings.Case(folder / f"{name} moved")
            losses = max(losses, compare_records(f"{name} moved", like, moved, limits))
        for number in sorted(chapters_in(proof.numbers, proof.without) & PROMISES.keys()):
            if promise := PROMISES[number](trial, facts_of(folder / name)):
                promises[promise] = None
    ranks = sorted({trial.ranks for trial in proof.trials})
    known = [*dict.fromkeys(trial.model for trial in proof.trials)]
    if len(known) > 1:
        promises[f"also with {', '.join(known[1:])}"] = None
    if any(trial.moved_flags for trial in proof.trials):
        promises["goes on with other groups"] = None
    return Row(proof.name, proof.like, ranks, losses, gradients, [*promises], hash_of(proof))


def compare_records(name: str, like, own, limits: Limits) -> float:
    """The largest difference of the losses. A wrong loss or norm is an error."""
    largest = 0.0
    for column, most in {
        "loss": limits.loss,
        "eval/loss": limits.loss,
        "grad_norm": limits.norm,
    }.items():
        error = largest_difference(like.column(column), own.column(column))
        if error > most:
            raise Wrong(f"{name}: {column} {own.column(column)}, not {like.column(column)}")
        largest = max(largest, error if column != "grad_norm" else 0)
    return largest


def largest_difference(expected: list[float], found: list[float]) -> float:
    if len(expected) != len(found) or not expected:
        raise Wrong(f"{len(found)} numbers in place of {len(expected)}")
    return max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(expected, found, strict=True))


def compare_models(name: str, like: dict, own: dict, most: float) -> None:
    if like.keys() != own.keys() or not like:
        raise Wrong(f"{name}: other tensors in final/")
    for tensor in like:
        try:
            torch.testing.assert_close(own[tensor], like[tensor], rtol=1e-3, atol=most)
        except AssertionError as error:
            raise Wrong(f"{name}: {tensor} in final/: {error}") from error


# -- What the chapters promise ---------------------------------------------------------------------


def facts_of(folder: Path) -> list[dict]:
    """Of each rank, as tests/helpers/scripts/many_trainings.py has saved them."""
    return [torch.load(file) for file in sorted(folder.glob("facts-*"))]


def flag(trial: Trial, name: str) -> int:
    return int(trial.flags[trial.flags.index(name) + 1]) if name in trial.flags else 0


def check(holds: bool, sentence: str) -> None:
    if not holds:
        raise Wrong(f"it is not true that {sentence}")


def copies(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 5: ranks of different copies hold the same shards, ranks of a copy hold others."""
    size = flag(trial, "--shard-size") or trial.ranks
    shards = [{n: x for n, x in each["local"].items() if "experts" not in n} for each in facts]
    for rank, own in enumerate(shards):
        check(own == shards[rank % size], f"rank {rank} has the shards of rank {rank % size}")
    check(size == 1 or shards[0] != shards[size - 1], "the ranks of a copy have other shards")
    return f"{trial.ranks // size} copies" if size < trial.ranks else None


def part_of_tokens(trial: Trial, facts: list[dict]) -> str | None:
    """Chapters 6 and 11."""
    tokens = LENGTH
    for name in ("--tensor-parallel", "--context-parallel"):
        tokens //= flag(trial, name) or 1
    for each in facts:
        check(each["tokens of a layer"] == tokens, f"a layer sees {tokens} tokens")
    return f"a layer sees {tokens} of {LENGTH} tokens" if tokens < LENGTH else None


def travels(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 12."""
    check(all(each["tokens of experts"] > 0 for each in facts), "tokens arrive at all ranks")
    return "tokens arrive at the experts of all ranks"


def has_stages(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 7."""
    check(facts[0]["local"].keys() != facts[-1]["local"].keys(), "ranks have other layers")
    return "ranks have other layers"


def is_sparse(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 14."""
    check(any(name.endswith(".values") for name in facts[0]["trains"]), "S has values")
    return "B, A and S train"


def adapters_train(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 17."""
    check(all(".lora_" in name for name in facts[0]["trains"]), "adapters alone train")
    return "adapters alone train"


def owners(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 18: in each copy, each matrix has one owner."""
    size = flag(trial, "--shard-size") or trial.ranks
    shapes = {n: shape for each in facts for n, shape in each["whole"].items()}
    matrices = [n for n, shape in shapes.items() if ".layers." in n and len(shape) == 2]
    for begin in range(0, trial.ranks, size):
        owned = sum(each["owned"] for each in facts[begin : begin + size])
        check(owned == len(matrices), f"a copy has {len(matrices)} owned matrices, and not {owned}")
    return "each matrix has one owner in each copy"


def cuts_the_loss(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 19."""
    check(all(each["chunks"] > 1 for each in facts), "the loss has several chunks")
    return "the loss has chunks"


def multiplies_in_8_bits(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 20: also what FSDP gathers has 8 bits."""
    for each in facts:
        check(each["in 8 bits"] and all(each["in 8 bits"]), "layers have weights of torchao")
    return "layers multiply and gather in 8 bits"


def sends_nothing(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 21."""
    check(not any(each["sent"] for each in facts), "rank 0 sends no weights")
    return "rank 0 sends no weights"


def is_in_4_bits(trial: Trial, facts: list[dict]) -> str | None:
    """Chapter 22: each rank has its share of the codes, two in a byte, and of the scales."""
    for each in facts:
        codes, scales = (
            {name: size for name, (size, _) in each["local"].items() if name.endswith(end)}
            for end in (".original0", ".original1")
        )
        check(sum(codes.values()) == 32 * sum(scales.values()) > 0, "layers have codes and scales")
        weights = [name for name in each["local"] if name.endswith(".base_layer.weight")]
        check(not weights, "no layer has a 16-bit weight")
    return "frozen weights have 4 bits"


PROMISES = {"05": copies, "06": part_of_tokens, "11": part_of_tokens, "12": travels}
PROMISES |= {"07": has_stages, "14": is_sparse, "17": adapters_train, "18": owners}
PROMISES |= {"19": cuts_the_loss, "20": multiplies_in_8_bits, "21": sends_nothing}
PROMISES["22"] = is_in_4_bits


# -- The command -----------------------------------------------------------------------------------


def prove(proofs: list[Proof], folder: Path) -> Iterator[tuple[str, Row | str]]:
    """For each pair its row, or what is wrong."""
    write_data(folder, with_rows=any("10" in proof.numbers for proof in proofs))
    for proof in proofs:
        yield proof.name, proved(proof, folder)


def proved(proof: Proof, folder: Path) -> Row | str:
    try:
        run_trials(proof, folder)
        return compared(proof, folder)
    except (Wrong, AssertionError) as error:
        return f"{proof.name} is wrong: {error}"


def damages_are_noticed(proofs: dict[str, Proof], names: list[str]) -> bool:
    """Whether each line of maintain/joins/damages.txt makes its pair (#) wrong on 4 ranks or more.

    With several trials, one has to be wrong.
    """
    chosen = damages.damages([combine.JOINS / "damages.txt"])
    chosen = [damage for damage in chosen if not names or damage.chapter in names]
    all_noticed = True
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), with_rows=any("10" in damage.chapter for damage in chosen))
        for number, damage in enumerate(chosen, 1):
            proof = proofs[damage.chapter]
            lines = ("\n".join(damage.old), "\n".join(damage.new))
            proof = replace(proof, damage=lines, number_of_damage=number)
            parts = [replace(proof, trials=[trial]) for trial in proof.trials if trial.ranks >= 4]
            results = (proved(part, Path(folder)) for part in parts)
            result = next((result for result in results if not isinstance(result, Row)), None)
            verdict = f"noticed: {result[:120]}" if result else "MISSED"
            print(f"{proof.name}: {damage.what}: {verdict}", flush=True)
            all_noticed = all_noticed and result is not None
    return all_noticed


def write_row(row: Row) -> None:
    """Puts a row into the record, in the place of an earlier one of this pair."""
    lines = combine.RECORD.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("|---")) + 1
    rows = {line.split("|")[1].strip(): line for line in lines[begin:]}
    rows[row.name] = str(row)
    lines[begin:] = [rows[name] for name in sorted(rows)]
    combine.RECORD.write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", help="such as 05+11; without: what the record lacks")
    parser.add_argument("--damages", action="store_true", help="damages lines, and must notice it")
    parser.add_argument("--ranks", type=int, nargs="+", help="only on so many, without a row")
    parser.add_argument("--stale", action="store_true", help="prints what would run")
    parser.add_argument("--draw", action="store_true", help="prints joins of proved pairs")
    args = parser.parse_args()
    proofs = read_proofs()
    if unknown := {*args.pairs} - proofs.keys():
        parser.error(f"pairs.txt does not say how to compare {', '.join(sorted(unknown))}")
    if args.draw:
        print("\n".join(draw()))
        return
    if args.damages:
        sys.exit(0 if damages_are_noticed(proofs, args.pairs) else 1)
    chosen = args.pairs or [name for name, proof in proofs.items() if is_stale(proof)]
    if args.stale:
        print("\n".join(chosen))
        return
    if args.ranks:
        for proof in proofs.values():
            proof.trials = [trial for trial in proof.trials if trial.ranks in args.ranks]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for _, result in prove([proofs[name] for name in chosen], Path(folder)):
            print(result, flush=True)
            failed = failed or not isinstance(result, Row)
            if isinstance(result, Row) and not args.ranks:
                write_row(result)
    combine.write_page()
    sys.exit(1 if failed else 0)


def draw(number: int = 10, seed: int = 115) -> list[str]:
    """Joins of four and five chapters whose pairs are all proved. Two may cut the model at most."""
    proved_pairs = {pair.name for pair in combine.all_pairs() if pair.status == "proved"}
    chapters = [name[:2] for name in combine.SCRIPTS]
    possible = []
    for size in (4, 5):
        for numbers in itertools.combinations(chapters, size):
            pairs = {combine.name_of(list(pair)) for pair in itertools.combinations(numbers, 2)}
            if pairs <= proved_pairs and len(CUT_THE_MODEL & {*numbers}) <= 2:
                possible.append(combine.name_of(list(numbers)))
    return sorted(random.Random(seed).sample(possible, number))


def is_stale(proof: Proof) -> bool:
    """Whether the record lacks the pair, or has it for another script than the one of today."""
    text, _ = combine.joined(*names_of_chapters(proof))
    if combine.carry.conflicts(text):
        return True
    return hash_of(proof) not in combine.proved_rows().get(proof.name, [])


if __name__ == "__main__":
    main()
