"""MDS shards: the tool writes rows as chapter 4 makes them; any number of ranks reads the same."""

import json
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NO_TORCHVISION, STAND_IN, TINY_LLAMA, assert_one_sentence, exact
from runner import CHAPTER_4, REPOSITORY, Job, Run, load
from test_streaming import WATCH, reference_rows
from transformers import AutoTokenizer

WRITE_MDS = REPOSITORY / "tools" / "write-mds.py"
IMPORTABLE = ""
if NO_TORCHVISION:
    IMPORTABLE = f"import sys; sys.path.append({str(STAND_IN)!r})\n"


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """For these tests alone: elsewhere it would take the place of a torchvision that is missing."""
    with pytest.MonkeyPatch.context() as patch:
        if NO_TORCHVISION:
            patch.syspath_prepend(STAND_IN)
        yield


# A remote storage of the library: `test://FOLDER` is a folder of this machine
REMOTE = """
import os, shutil
from streaming.base.storage import download

class Folder(download.CloudDownloader):
    @staticmethod
    def _client_identifier():
        return "test"

    def clean_up(self):
        pass

    def _download_file_impl(self, remote, local, timeout):
        with open(os.environ["REQUESTS"], "a") as file:
            print(remote, file=file)
        if os.path.exists(os.environ["REQUESTS"] + "-refuse") and "shard.0" in remote:
            raise ConnectionError("503")
        temporary = local + f".{os.getpid()}"
        shutil.copy(remote.removeprefix("test:/"), temporary)
        os.rename(temporary, local)

download.DOWNLOADER_MAPPINGS["test"] = Folder
"""


@pytest.fixture(scope="module")
def write(tmp_path_factory, dataset):
    """Runs the tool on the documents of `dataset`."""
    folder = tmp_path_factory.mktemp("mds")

    def run(name, *flags, start_only=False, status=0):
        output = folder / f"{name}.txt"
        output.unlink(missing_ok=True)
        arguments = ["-o", folder / name, "-m", TINY_LLAMA, "-d", dataset, "-s", 32, *flags]
        run = Run(WRITE_MDS, arguments, output, before=IMPORTABLE)
        if start_only:
            return run
        assert run.wait() == status, run.output
        run.folder = folder / name
        return run

    return run


@pytest.fixture(scope="module")
def few(texts, tmp_path_factory):
    file = tmp_path_factory.mktemp("few") / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:80]))
    return file


@pytest.fixture(scope="module")
def shards(write, few):
    """Rows in several shards."""
    return write("shards", "-d", few, "--processes", 1, "--part-rows", 30).folder


@pytest.fixture(scope="module")
def zipped(write, few):
    """The same rows, as an address needs them."""
    flags = ["-d", few, "--processes", 1, "--part-rows", 30, "--compression", "zstd"]
    return write("zipped", *flags).folder


def rows_in(folder) -> list[list[int]]:
    from streaming import LocalDataset

    rows = LocalDataset(str(folder))
    return [rows[i]["tokens"].tolist() for i in range(len(rows))]


@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc"])
def test_rows(write, texts, packing):
    """Also from two processes."""
    processes = 2 if packing == "trunc" else 1
    run = write(packing, "--packing", packing, "--processes", processes, "--max-documents", 390)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    documents = [[*tokenizer(t)["input_ids"], tokenizer.eos_token_id] for t in texts[:390]]
    expected = reference_rows(documents, packing, 32)
    assert rows_in(run.folder) == expected
    assert f"{len(expected):,} rows of 32 tokens in" in run.output
    facts = json.loads((run.folder / "rows.json").read_text())
    assert (facts["seq_length"], facts["packing"]) == (32, packing)
    assert facts["tokenizer"] == str(TINY_LLAMA)  # which the model of the tests below is not


def test_the_tool_goes_on(write):
    """After SIGKILL, and after all parts but before the index; then there is nothing to do."""
    expected = rows_in(write("undisturbed", "--processes", 1, "--part-rows", 999).folder)
    flags = ["--processes", 1, "--part-rows", 30]
    tool = write("killed", *flags, start_only=True)
    folder = tool.file.with_name("killed")
    end = time.monotonic() + 60
    while len([*folder.glob("part-*")]) < 2:
        assert time.monotonic() < end, tool.output
        time.sleep(0.005)
    tool.process.kill()
    tool.wait()
    stopped = [*folder.glob("part-*")]
    run = write("killed", *flags)
    assert (
        f"Continuing after {len(stopped)} parts" in run.output or (folder / "index.json").exists()
    )
    assert rows_in(folder) == expected
    (folder / "index.json").unlink()
    write("killed", *flags)
    assert rows_in(folder) == expected
    assert "is complete" in write("killed", *flags).output
    assert_one_sentence(write("killed", "--packing", "trunc", status=1).output, "of other flags")


@pytest.mark.parametrize(
    ("flags", "status", "sentence"),
    [
        (["-s", 1], 2, "--seq-length must be at least 2"),
        (["--part-rows", 0], 2, "must be at least 1"),
        (["-d", "/nowhere/*.jsonl"], 1, "cannot load the dataset"),
        (["-s", 100_000], 1, "not a single row"),
        (["-o", str(REPOSITORY)], 1, "has other files"),
    ],
)
def test_bad_flags_of_the_tool(write, flags, status, sentence):
    run = write(f"bad-{sentence[:9]}", "--processes", 1, *flags, status=status)
    assert_one_sentence(run.output, sentence)


@pytest.fixture
def train(trainer):
    """Runs chapter 4 on MDS shards; `seen` has the rows of each rank, in the order of steps."""

    def run(data, *flags, processes=2, name="run", before="", **options):
        path = trainer.folder / f"seen-{name}-"
        before = IMPORTABLE + WATCH + before
        flags = ["-d", data, "--eval-freq", 0, "--shuffle-window", 16, *flags]
        env = {"SEEN": str(path), "REQUESTS": str(trainer.folder / "requests")}
        options |= {"script": CHAPTER_4, "processes": processes, "env": env}
        result = trainer(*flags, name=name, before=before, **options)
        saved = [path.with_name(path.name + str(rank)) for rank in range(processes)]
        result.seen = [torch.load(file) for file in saved if file.exists()]
        return result

    return run


def global_batches(seen: list[torch.Tensor], steps: int) -> list[list]:
    """The rows of each step, over all ranks, in a fixed order."""
    per_rank = [rows.view(steps, -1, rows.shape[-1]) for rows in seen]
    return [sorted(torch.cat([r[n] for r in per_rank]).tolist()) for n in range(steps)]


def test_another_number_of_ranks(train, shards, trainer):
    """One process throughout, or two that go on as four or as one: the same rows and losses."""
    count = len(rows_in(shards))
    steps = count // 8 + 6  # into the second pass
    flags = ["--max-steps", steps, "--ckpt-freq", 7, "--keep-checkpoints", 99, "--lr", 1e-3]
    one = train(shards, *flags, "-b", 8, processes=1, name="one")
    two = train(shards, *flags, "-b", 2, "--gradient-accumulation-steps", 2, name="two")
    batches = global_batches(one.seen, steps)
    assert global_batches(two.seen, steps) == batches
    assert two.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert two.column("epoch") == one.column("epoch")
    assert one.column("epoch")[-1] == steps * 8 / count
    for processes, step in ((4, 14), (1, steps // 7 * 7)):
        name = f"resumed-{processes}"
        folder = trainer.folder / name / f"step-{step:08d}"
        shutil.copytree(two.folder / folder.name, folder)
        resumed = train(shards, *flags, "-b", 8 // processes, processes=processes, name=name)
        assert global_batches(resumed.seen, steps - step) == batches[step:]
        assert resumed.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)

    # A pass has each row once, in another order than the next one; it is not the order of the file
    order = [tuple(row) for row in one.seen[0].flatten(0, 1).tolist()]
    assert sorted(order[:count]) == sorted(map(tuple, rows_in(shards)))
    assert order[:48] != order[count : count + 48]
    assert set(order[:48]) != set(map(tuple, rows_in(shards)[:48]))


def test_a_remote_and_its_cache(train, write, trainer):
    """Each shard is fetched once, or again where the cache is smaller; errors are one sentence."""
    many = ["--processes", 1, "--part-rows", 1]
    shards = write("many", *many).folder
    zipped = write("many-zipped", *many, "--compression", "zstd").folder
    flags = ["--max-steps", 30, "-b", 4, "--local-cache", trainer.folder / "cache"]
    local = train(shards, *flags, name="local")
    requests = trainer.folder / "requests"
    remote = train(f"test://{zipped}", *flags, name="remote", before=REMOTE)
    assert exact(remote.records) == exact(local.records)
    fetched = [line for line in requests.read_text().splitlines() if "part-" in line]
    assert len(fetched) == len(set(fetched)) == len([*shards.glob("part-*/shard*")])

    index = json.loads((zipped / "index.json").read_text())["shards"]
    raw = [shard["raw_data"]["bytes"] for shard in index]
    largest = max(shard["raw_data"]["bytes"] + shard["zip_data"]["bytes"] for shard in index)
    requests.unlink()
    flags[-1] = small = trainer.folder / "small"
    limit = ["--cache-limit", f"{6 * largest}b"]
    run = train(f"test://{zipped}", *flags, *limit, name="small", before=REMOTE)
    assert exact(run.records) == exact(local.records)
    kept = sum(file.stat().st_size for file in small.rglob("*.mds"))
    print(f"{kept} of {sum(raw)} bytes are kept, limit {6 * largest}, largest shard {largest}")
    # Both ranks may look at the same moment, and find room for one more shard.
    assert kept <= 7 * largest < sum(raw)
    fetched = [line for line in requests.read_text().splitlines() if "part-" in line]
    assert len(fetched) > len(set(fetched))
    limit = ["--cache-limit", "2b"]
    run = train(f"test://{zipped}", *flags, *limit, name="tiny", before=REMOTE, status=1)
    assert_one_sentence(run.run.ranks[0].output, "cache limit")
    run = train(f"test://{shards}", *flags, name="plain", before=REMOTE, status=1)
    assert_one_sentence(run.run.ranks[0].output, "needs --compression zstd")


@pytest.mark.parametrize("damage", ["refuse", "damaged", "full"])
def test_a_shard_that_cannot_be_read(train, zipped, trainer, tmp_path, damage):
    """One sentence, also of the next start, which finds the shard in the cache."""
    data = tmp_path / "copy"
    shutil.copytree(zipped, data)
    options = {"before": REMOTE}
    if damage == "refuse":
        (trainer.folder / "requests-refuse").touch()
    if damage == "damaged":
        for shard in data.glob("part-*/shard*"):
            content = bytearray(shard.read_bytes())
            content[-5] ^= 1
            shard.write_bytes(content)
    if damage == "full":
        options["largest_file"] = 2000
    flags = ["--max-steps", 5, "--local-cache", trainer.folder / "cache"]
    for _ in range(2 if damage == "damaged" else 1):
        run = train(f"test://{data}", *flags, processes=1, status=1, **options)
        assert_one_sentence(run.output, "cannot read a shard")


KILLED = """
import os, signal, streaming, torch.distributed

construct = streaming.StreamingDataset.__init__

def construct_and_die(self, **options):
    construct(self, **options)
    torch.distributed.barrier()
    os.kill(os.getpid(), signal.SIGKILL)

streaming.StreamingDataset.__init__ = construct_and_die
"""


def test_after_sigkill(zipped, trainer):
    """Shared memory that a killed run has left behind does not stop the next one."""
    flags = ["-d", f"test://{zipped}", "--eval-freq", 0, "--max-steps", 2]
    flags += ["--local-cache", trainer.folder / "cache"]
    env = {"REQUESTS": str(trainer.folder / "requests")}
    options = {"script": CHAPTER_4, "processes": 2, "env": env}
    before = IMPORTABLE + REMOTE
    killed = trainer(*flags, before=before + KILLED, status=-signal.SIGKILL, **options)
    assert "error" not in killed.output
    left = set(Path("/dev/shm").glob("*_locals"))
    assert left
    resumed = trainer(*flags, before=before, **options)
    assert "Done" in resumed.output


def test_other_rows_are_refused(train, shards, trainer, tmp_path):
    cases = [
        (["-s", 16], "'seq_length': 32"),
        (["--packing", "trunc"], "'packing': 'pack'"),
        (["--max-documents", 5], "'max_documents': None"),
    ]
    for flags, sentence in cases:
        run = train(shards, "--max-steps", 1, *flags, processes=1, status=1, name="refused")
        assert_one_sentence(run.output, sentence)
    plain = tmp_path / "plain"
    shutil.copytree(shards, plain)
    (plain / "rows.json").unlink()
    run = train(plain, "--max-steps", 1, processes=1, status=1, name="refused")
    assert_one_sentence(run.output, "see the README of this chapter")
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    facts = json.loads((other / "rows.json").read_text())
    (other / "rows.json").write_text(json.dumps(facts | {"tokenizer_probe": [1, 2]}))
    run = train(other, "--max-steps", 1, processes=1, status=1, name="refused")
    assert_one_sentence(run.output, "'tokenizer_probe': [1, 2]")
    # A run that goes on with other shards
    data = tmp_path / "data"
    shutil.copytree(shards, data)
    train(data, "--max-steps", 1, processes=1, name="changed")
    shutil.rmtree(data)
    shutil.copytree(shards, data)
    index = json.loads((data / "index.json").read_text())
    index["shards"].pop()
    (data / "index.json").write_text(json.dumps(index))
    run = train(data, "--max-steps", 2, processes=1, name="changed", status=1)
    assert_one_sentence(run.output, "has changed since this run began")


def test_the_demo(trainer):
    """The two commands of the README, to the second step, with chapter 1's order of documents."""
    text = (REPOSITORY / "04-streaming" / "README.md").read_text()
    write, train = re.findall(r"^\.venv/bin/\S+ (.*--demo.*)", text, re.MULTILINE)
    tool, *flags = shlex.split(write.replace("outputs/", f"{trainer.folder}/"))
    assert REPOSITORY / tool == WRITE_MDS
    run = Run(WRITE_MDS, [*flags, "--processes", 1], trainer.folder / "out", before=IMPORTABLE)
    assert run.wait() == 0, run.output
    flags = shlex.split(
        train.partition("train-llm.py ")[2].replace("outputs/", f"{trainer.folder}/")
    )
    more = ["--save-dir", trainer.folder, "--max-steps", 1, "--log-freq", 1, "--eval-freq", 0]
    job = Job(CHAPTER_4, [*flags, *more], trainer.folder / "train", 2, before=IMPORTABLE)
    assert job.wait() == 0, job.output
    (record,) = map(json.loads, (trainer.folder / "demo-mds" / "metrics.jsonl").open())
    assert 7.4 < record["loss"] < 7.7


def test_order_of_rows():
    """64 parts take turns, and a rank reads the same parts as long as their number divides 64."""
    chapter = load(CHAPTER_4)

    class Mds:
        size = 64 * 100
        samples_per_shard = np.full(640, 10)

        def __getitem__(self, i):
            return {"tokens": i}

    class Args:
        seed = 0
        shuffle_window = 25

    chapter.WORLD_SIZE = 8
    shards = []
    for rank in range(8):
        chapter.RANK = rank
        windows = chapter.mds_windows(Mds(), 0, Args)
        rows = [int(i) for _ in range(32) for i in next(windows)[0]]
        assert len(rows) == len(set(rows)) == 800
        shards.append({i // 10 for i in rows})
    assert max(len(of_rank) for of_rank in shards) < 110
