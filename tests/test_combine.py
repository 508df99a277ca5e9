"""tools/combine.py joins all pairs of its list as text, and a sample of them trains as it should.

`maintain/prove-joins.py` compares all of them.
"""

import itertools
import re
import subprocess
import sys

import pytest
from helpers.runner import REPOSITORY, load

PROVE = load(REPOSITORY / "maintain" / "prove-joins.py")
COMBINE = PROVE.combine
PAIRS = COMBINE.known_pairs()
NAMES = {name[:2]: name for name in COMBINE.SCRIPTS}


def test_all_pairs_join(tmp_path):
    """Without conflicts, unknown names and unused imports."""
    for pair in PAIRS.values():
        if pair.status == "like":
            numbers, without = COMBINE.parts_of(pair.name)
            names = [NAMES[number] for number in numbers]
            text, _ = COMBINE.script_of(names, tmp_path, NAMES.get(without))
            assert COMBINE.carry.conflicts(text) == [], pair.name
            (tmp_path / f"{pair.name}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--config", REPOSITORY / "pyproject.toml"]
    done = subprocess.run(
        [*command, "--ignore", "I,E402", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_stored_resolutions():
    """Each is of a pair in the list, and has few places, unless both chapters cut the model."""
    for file in COMBINE.JOINS.glob("[0-9]*.txt"):
        assert PAIRS[file.stem].status == "like", file
        both_cut = {*COMBINE.parts_of(file.stem)[0]} <= PROVE.CUT_THE_MODEL
        assert 1 <= len(COMBINE.read_resolutions(file)) <= (26 if both_cut else 3), file


def test_a_side_without_lines(tmp_path):
    """A resolution may keep nothing of a place where one side has removed all lines."""
    (tmp_path / "06+11.txt").write_text("The other chapter has it elsewhere\n-\n- seed = 1\n")
    (place,) = COMBINE.read_resolutions(tmp_path / "06+11.txt")
    assert place.fits([], ["    seed = 1\n"])
    assert place.fits(["    seed = 1\n"], [])
    assert not place.fits(["    seed = 2\n"], ["    seed = 1\n"])
    assert place.lines([], ["    seed = 1\n"]) == ""


def test_trials():
    """A run of a pair may have a model of its own, and go on with other groups."""
    trial = PROVE.read_trial("8 llama untied", " --a 2 > --a 4 --b", "01", "qwen3")
    assert (trial.ranks, trial.model, trial.like_ranks) == (8, "llama untied", 1)
    assert (trial.flags, trial.moved_flags) == (["--a", "2"], ["--a", "4", "--b"])
    trial = PROVE.read_trial("4", " --a 2 = itself on 2: --a 1", "01", "qwen3")
    assert (trial.model, trial.like, trial.like_ranks) == ("qwen3", "itself", 2)
    assert (trial.like_flags, trial.moved_flags) == (["--a", "1"], [])


GROUPS = ["--tensor-parallel", "2", "--context-parallel", "4"]


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("pair", ["06+11", "11+13"])
def test_the_kv_heads_of_a_rank(pair, heads, tmp_path, monkeypatch):
    """Context groups exchange the heads that a tensor group leaves to a rank."""
    COMBINE.write([NAMES[number] for number in pair.split("+")], tmp_path, None)
    config = {"model_type": "llama"} | PROVE.models.SIZE | {"num_key_value_heads": heads}
    sentence = "the 2 kv heads of a rank cannot be shared equally" if heads == 4 else ""
    case = (8, config, GROUPS, sentence)
    PROVE.assertions.assert_said(
        tmp_path / "train-llm.py", "check_model", case, tmp_path, monkeypatch
    )


@pytest.mark.parametrize("pair", ["06+11", "07+11", "11+13"])
def test_groups_that_do_not_divide_the_ranks(pair, tmp_path, monkeypatch, capsys):
    """Ranks that share samples are all groups together. By default, one dimension has the rest."""
    COMBINE.write([NAMES[number] for number in pair.split("+")], tmp_path, None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    script = PROVE.runner.load(tmp_path / "train-llm.py")
    flag = "--pipeline-parallel" if pair == "07+11" else "--tensor-parallel"
    monkeypatch.setattr(sys, "argv", ["train-llm.py", "--context-parallel", "4"])
    assert getattr(script.parse_args(), flag[2:].replace("-", "_")) == 2
    monkeypatch.setattr(sys, "argv", [*sys.argv, flag, "4"])
    with pytest.raises(SystemExit):
        script.parse_args()
    said = capsys.readouterr().err
    assert "must divide the number of ranks, 8" in said
    assert flag in said
    assert "--context-parallel" in said


def test_a_pair_with_conflicts_is_stale(monkeypatch):
    monkeypatch.setattr(COMBINE, "stored_resolutions", lambda *names: [])
    assert PROVE.is_stale(PROVE.read_proofs()["04+06"])


def test_the_page_has_the_table():
    page = COMBINE.PAGE.read_text()
    assert page.endswith(COMBINE.lists()), "run maintain/prove-joins.py"
    assert all(name in page for name in PAIRS)
    proved = {name for name in PAIRS if COMBINE.verdict(*COMBINE.parts_of(name)).status == "proved"}
    assert proved >= {"05+17", "05+17+19", "04+05+18"}


def combine(*arguments):
    command = [sys.executable, REPOSITORY / "tools" / "combine.py", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_command(tmp_path):
    """It writes a script with the flags of both, names conflicts, and refuses what is wrong."""
    status, output = combine("5", "17", "-o", tmp_path / "lora-nodes")
    assert (status, output.splitlines()[1][:16]) == (0, "05+17 is proved:")
    text = (tmp_path / "lora-nodes" / "train-llm.py").read_text()
    assert {"--shard-size", "--lora-rank"} <= {*re.findall('add\\("(--[a-z-]+)"', text)}
    assert {"# NODES 3:", "# LORA 3:", "# CHAT 3:"} <= {*re.findall("# [A-Z]+ 3:", text)}
    assert "run.sh lora-nodes -e lora-nodes" in text.split('"""')[1]
    diff = (tmp_path / "lora-nodes" / "changes.diff").read_text()
    assert diff.startswith("--- 03-fsdp/train-llm.py\n+++ lora-nodes/train-llm.py\n")
    status, output = combine("06", "18", "05", "-o", tmp_path / "three")
    assert (status, output[:33]) == (1, "error: 05+06+18 is refused: 06+18")
    assert not (tmp_path / "three").exists()
    status, output = combine("04", "07", "-o", tmp_path / "open")
    (line,) = re.findall(r"conflicts at lines (\d+): edit them\. a schedule", output)
    lines = (tmp_path / "open" / "train-llm.py").read_text().splitlines()
    assert lines[int(line) - 1] == "<<<<<<< chapter 04"
    for wrong in (["05"], ["05", "99"], ["05", "17", "-o", REPOSITORY / "03-fsdp"]):
        assert combine(*wrong)[0] == 2


def test_more_than_two_chapters():
    """Each pair may be proved, and three of the chapters may not join."""
    pair = COMBINE.verdict(["04", "06", "12", "21"])
    assert (pair.status, pair.text[:21]) == ("not tried", "each pair is proved, ")
    pair = COMBINE.verdict(["04", "05", "06", "12"])
    assert (pair.status, pair.text[:10]) == ("open", "05+06+12: ")
    pair = COMBINE.verdict(["05", "06", "12", "18"])
    assert (pair.status, pair.text[:7]) == ("wrong", "06+18: ")


def test_the_draw():
    """Joins of four and five chapters whose pairs are all proved, and the same in each run."""
    drawn = PROVE.draw()
    assert drawn == PROVE.draw() != PROVE.draw(seed=1)
    for name in drawn:
        numbers = name.split("+")
        assert len(numbers) in (4, 5)
        assert len({*numbers} & PROVE.CUT_THE_MODEL) <= 2
        pairs = [COMBINE.verdict([*pair]) for pair in itertools.combinations(numbers, 2)]
        assert {pair.status for pair in pairs} == {"proved"}


def test_a_pair_without_a_line_joins_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(COMBINE, "known_pairs", dict)
    monkeypatch.setattr(sys, "argv", ["combine.py", "18", "19", "-o", str(tmp_path / "new")])
    COMBINE.main()
    assert "\nwarning: 18+19 is not proved, so compare losses first" in capsys.readouterr().out
    assert (tmp_path / "new" / "changes.diff").exists()


# A run takes seconds, so only these in each test of all. Chapter 20 is compared beside the others,
# because it needs torchao.
SAMPLE = ["04+06", "05+17+19", "07+18", "10+21", "11+12", "15+19", "04+08-03", "06+12", "11+13"]


@pytest.mark.rest
def test_a_sample_trains_as_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr(PROVE, "STEPS", 2)
    proofs = PROVE.read_proofs()
    chosen = [proofs[name] for name in SAMPLE]
    for proof in chosen:  # on 2 ranks, if they are enough
        proof.trials = proof.trials[:1]
        proof.trials[0].moved_flags = []
    found = dict(PROVE.prove(chosen, tmp_path))
    assert [row for row in found.values() if not isinstance(row, PROVE.Row)] == []


@pytest.mark.rest
def test_the_loss_of_routers_counts_once_in_a_step(tmp_path, monkeypatch):
    """Also where a stored resolution has the lines of chapters 4 and 10 that see to it."""
    monkeypatch.setattr(PROVE, "STEPS", 2)
    models = PROVE.models.MODELS
    has_loss = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    monkeypatch.setitem(models, "mixtral routers", models["mixtral"] | has_loss)
    copies = {"04": [], "10": ["--shard-size", "1"]}
    flags = {"04+11": ["--context-parallel", "1"], "04+08-03": ["--compress", "dct", "--keep", "1"]}
    flags["10+11"] = [*flags["04+11"], *copies["10"]]
    proofs = []
    for name, own in flags.items():
        model = "mixtral routers"
        trial = PROVE.Trial(2, own, name[:2], 2, copies[name[:2]], model, [])
        proofs.append(PROVE.Proof(name, name[:2], [trial]))
    found = dict(PROVE.prove(proofs, tmp_path))
    assert [row for row in found.values() if not isinstance(row, PROVE.Row)] == []
