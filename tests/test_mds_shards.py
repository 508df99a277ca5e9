"""MDS shards: the tool writes the rows of chapter 4, and chapter 10 reads them on any ranks."""

import json
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from helpers.assertions import assert_one_sentence, exact
from helpers.data import IMPORTABLE, NO_TORCHVISION, STAND_IN, write_documents
from helpers.models import TINY_LLAMA
from helpers.plain_loops import plain_losses, reference_rows
from helpers.runner import CHAPTER_10, REPOSITORY, Run, load, patches, run_tool
from helpers.trainer import take_over, watched
from transformers import AutoTokenizer

TOOL = REPOSITORY / "tools" / "prepare-data.py"


@pytest.fixture(scope="module", autouse=True)
def stand_in():
    """For these tests alone: elsewhere it would take the place of a torchvision that is missing."""
    with pytest.MonkeyPatch.context() as patch:
        if NO_TORCHVISION:
            patch.syspath_prepend(STAND_IN)
        yield


@pytest.fixture(scope="module")
def write(tmp_path_factory, dataset):
    """Runs the tool on the documents of `dataset`."""
    folder = tmp_path_factory.mktemp("mds")

    def run(name, *flags, data=dataset, before="", start_only=False, status=0):
        output = folder / f"{name}.txt"
        output.unlink(missing_ok=True)
        arguments = [data, "-o", folder / name, "--no-shuffle", "--mds"]
        arguments += ["-m", TINY_LLAMA, "-s", 32, *flags]
        run = Run(TOOL, arguments, output, before=IMPORTABLE + before)
        if start_only:
            return run
        assert run.wait() == status, run.output
        run.folder = folder / name
        return run

    return run


@pytest.fixture(scope="module")
def few(texts, tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("few") / "text.jsonl", texts[:80])


@pytest.fixture(scope="module")
def shards(write, few):
    """Rows in several shards."""
    return write("shards", "--part-rows", 30, data=few).folder


@pytest.fixture(scope="module")
def many(shards, tmp_path_factory):
    """A shard for each row of `shards`, and the same shards compressed."""
    from streaming import MDSWriter

    folders = []
    for compression in (None, "zstd"):
        folder = tmp_path_factory.mktemp("many") / "mds"
        options = {"compression": compression, "hashes": ["xxh3_64"], "size_limit": 400}
        with MDSWriter(
            out=str(folder), columns={"tokens": "ndarray:int32:32"}, **options
        ) as writer:
            for row in rows_in(shards):
                writer.write({"tokens": np.array(row, np.int32)})
        facts = json.loads((shards / "rows.json").read_text())
        facts["index_hash"] = hash_of(folder / "index.json")
        (folder / "rows.json").write_text(json.dumps(facts))
        index = json.loads((folder / "index.json").read_text())
        assert {shard["samples"] for shard in index["shards"]} == {1}
        folders.append(folder)
    return folders


def hash_of(file) -> str:
    return xxhash.xxh3_64(file.read_bytes()).hexdigest()


def rows_in(folder) -> list[list[int]]:
    from streaming import LocalDataset

    rows = LocalDataset(str(folder))
    return [rows[i]["tokens"].tolist() for i in range(len(rows))]


@pytest.mark.rest
@pytest.mark.parametrize("packing", ["pack", "overflow", "trunc"])
def test_rows(write, texts, packing, tmp_path):
    """Also from two processes, of another column than `text`, and of a pattern at an address."""
    flags = ["--packing", packing]
    options = {}
    if packing == "trunc":
        flags += ["--workers", 2]
    if packing == "overflow":
        options["data"] = write_documents(tmp_path / "columns.jsonl", texts, column="body")
        flags += ["--text-column", "body"]
    if packing == "pack":
        for begin in (0, 200):
            write_documents(tmp_path / f"part-{begin:03}.jsonl", texts[begin : begin + 200])
        options["data"] = f"file://{tmp_path}/part-*.jsonl"
    run = write(packing, *flags, **options)
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    documents = [[*tokenizer(t)["input_ids"], tokenizer.eos_token_id] for t in texts]
    expected = reference_rows(documents, packing, 32)
    assert rows_in(run.folder) == expected
    assert f"{len(expected):,} rows of 32 tokens in" in run.output
    facts = json.loads((run.folder / "rows.json").read_text())
    assert (facts["seq_length"], facts["packing"]) == (32, packing)
    assert facts["rows"] == len(expected)
    assert facts["index_hash"] == hash_of(run.folder / "index.json")
    assert facts["largest_token"] == max(map(max, expected))
    assert facts["tokenizer"] == str(TINY_LLAMA)  # which the model of the tests below is not


@pytest.mark.rest
def test_the_tool_goes_on(write):
    """After SIGKILL, and after all parts but the index; then there is nothing to do.

    A second process never writes to the same folder.
    """
    flags = ["--part-rows", 30]
    expected = rows_in(write("undisturbed", "--part-rows", 999).folder)
    tool = write("killed", *flags, before=patches("stop_after_part_1"), start_only=True)
    folder = tool.file.with_name("killed")
    try:
        end = time.monotonic() + 60
        while not (folder / "part-00001").exists():
            assert time.monotonic() < end, tool.output
            time.sleep(0.005)
        second = write("killed", *flags, status=1)
    finally:
        tool.process.kill()
        tool.wait()
    assert_one_sentence(second.output, "another process writes to")

    assert "Continuing after 2 parts" in write("killed", *flags).output
    assert rows_in(folder) == expected
    (folder / "index.json").unlink()
    write("killed", *flags)
    assert rows_in(folder) == expected
    assert "are complete" in write("killed", *flags).output
    facts = json.loads((folder / "rows.json").read_text())
    assert facts["largest_token"] == max(map(max, expected))  # of several parts
    assert facts["index_hash"] == hash_of(folder / "index.json")


@pytest.fixture
def train(trainer):
    """Runs chapter 10."""

    def run(data, *flags, name="run", before="", **options):
        flags = ["-d", data, "--eval-freq", 0, "--shuffle-window", 16, *flags]
        options["env"] = {"REQUESTS": str(trainer.folder / f"requests-{name}")}
        options |= {"script": CHAPTER_10, "before": IMPORTABLE + before}
        return watched(trainer, *flags, name=name, **options)

    return run


def rows_of_steps(seen: list[torch.Tensor], steps: int) -> list[torch.Tensor]:
    """The rows of each step, over all ranks."""
    per_rank = [rows.view(steps, -1, rows.shape[-1]) for rows in seen]
    return [torch.cat([rows[n] for rows in per_rank]) for n in range(steps)]


def in_order(steps: list[torch.Tensor]) -> list[list]:
    return [sorted(rows.tolist()) for rows in steps]


@pytest.mark.rest
def test_from_2_to_4_to_1_rank(train, write, texts, tmp_path, trainer, pretrained):
    """With another -b each, across the end of an epoch: the losses of a run that never stops."""
    file = write_documents(tmp_path / "few.jsonl", texts[:56])
    data = write("elastic", "--part-rows", 30, "--packing", "overflow", data=file).folder
    expected = rows_in(data)
    count = len(expected)
    steps = count // 8 + 6
    flags = ["-m", pretrained, "--no-from-scratch", "--max-steps", steps, "--ckpt-freq", 5]
    flags += ["--keep-checkpoints", 99, "--lr", 1e-3, "--global-batch-size", 8]
    two = train(data, *flags, "-b", 2, name="two")
    rows = rows_of_steps(two.seen, steps)
    assert two.column("loss") == pytest.approx(plain_losses(pretrained, rows), rel=1e-5)
    padding = [(labels < 0).float().mean().item() for labels in rows]
    assert two.column("padding") == pytest.approx(padding, abs=1e-6)
    assert max(padding) > 0.1
    assert two.column("epoch") == [step * 8 / count for step in range(1, steps + 1)]

    last = count // 8 // 5 * 5
    assert 10 < last < count / 8 < steps
    take_over(two, trainer, "four", 10)
    four = train(data, *flags, "-b", 1, processes=4, name="four")
    take_over(four, trainer, "one", last)
    one = train(data, *flags, "-b", 4, processes=1, name="one")
    for run, step in ((four, 10), (one, last)):
        assert "Continuing from" in run.output
        assert in_order(rows_of_steps(run.seen, steps - step)) == in_order(rows[step:])
        for name in ("loss", "grad_norm"):
            assert run.column(name) == pytest.approx(two.column(name), rel=1e-5)
        assert run.column("epoch") == two.column("epoch")

    # An epoch has each row once. The next epoch has another order.
    of_step = rows_of_steps(one.seen, steps - last)
    taken = [tuple(row) for labels in [*rows[:last], *of_step] for row in labels.tolist()]
    assert set(taken) == set(map(tuple, expected))
    whole_steps = count // 8 * 8
    assert sum(taken[:whole_steps].count(row) for row in set(taken)) == whole_steps


def order_of(sizes, seed=0, window=1024):
    """The rows of each of 2 epochs."""
    return np.split(load(CHAPTER_10).sample_order(seed, 0, tuple(sizes), window), 2)


@pytest.mark.parametrize("count", [1, 65, 1003])
def test_each_row_once_in_an_epoch(count):
    """For shards of any sizes. The order depends on seed, sizes and window alone."""
    chance = np.random.RandomState(count)
    sizes = []
    while sum(sizes) < count:
        sizes.append(min(int(chance.randint(1, 60)), count - sum(sizes)))
    epochs = order_of(sizes, window=5)
    for rows in epochs:
        assert sorted(rows) == [*range(count)]
    if count > 5 * 64:  # so that a window has several rows
        assert len({tuple(rows) for rows in [range(count), *epochs]}) == 3
        assert list(order_of(sizes, seed=1, window=5)[0]) != list(epochs[0])
        assert list(order_of(sizes, window=6)[0]) != list(epochs[0])


def test_one_shard_is_shuffled_within_windows():
    first, second = order_of([6400], window=5)
    assert list(first) != list(second)
    places = first.reshape(100, 64)  # of part p in column p, which begins with row 100 p
    windows = (places - 100 * np.arange(64)) // 5
    assert (windows == np.arange(100)[:, None] // 5).all()


@pytest.mark.parametrize(("world_size", "batch_size"), [(8, 8), (128, 2)])
def test_a_rank_downloads_some_of_the_shards(world_size, batch_size):
    """Whatever the batch size, a rank reads the same few of the 64 parts in each step."""
    chapter = load(CHAPTER_10)
    sizes = (10,) * 1280
    args = SimpleNamespace(batch_size=batch_size, gradient_accumulation_steps=3, seed=0)
    args.shuffle_window = 25
    samples = SimpleNamespace(read=lambda n: n, sizes=sizes)
    taken = []
    for rank in {0, 1, world_size - 1}:
        rows = []
        step = world_size * batch_size * 3
        for first in range(0, sum(sizes) - step, step):
            rows += chapter.read_step(samples, first, args, rank, world_size)
        assert len({n // 10 for n in rows}) <= 1.1 * 1280 * max(1 / world_size, 1 / 64) + 2
        taken += rows
    assert len(set(taken)) == len(taken)


@pytest.mark.rest
def test_an_address_and_its_cache(train, many, trainer):
    """A rank fetches a shard once, or again if its cache is small. The cache begins empty."""
    plain, zipped = many
    flags = ["--max-steps", 30, "-b", 4, "--local-cache", trainer.folder / "cache"]
    local = train(plain, *flags, name="local")
    remote = train(f"test://{zipped}", *flags, name="remote", before=patches("remote_folder"))
    assert exact(remote.records) == exact(local.records)
    requests = (trainer.folder / "requests-remote").read_text().splitlines()
    fetched = [line for line in requests if "shard." in line]
    assert len(fetched) == len(set(fetched))
    assert {line.split()[0] for line in fetched} == {"0", "1"}

    # Uncompressed shards, and a cache for two shards of each part
    index = json.loads((plain / "index.json").read_text())["shards"]
    largest = max(shard["raw_data"]["bytes"] for shard in index)
    limit = 2 * 64 * largest
    flags[-1] = small = trainer.folder / "small"
    flags += ["--cache-limit", f"{limit}b"]
    run = train(f"test://{plain}", *flags, name="small", before=patches("remote_folder"))
    assert exact(run.records) == exact(local.records)
    kept = sum(file.stat().st_size for file in small.rglob("*.mds"))
    assert 0.5 * limit < kept <= limit < sum(shard["raw_data"]["bytes"] for shard in index)
    requests = (trainer.folder / "requests-small").read_text().splitlines()
    fetched = [line for line in requests if "shard." in line]
    assert len(fetched) > len(set(fetched))


def test_the_least_recently_used_shard_is_removed(monkeypatch):
    chapter = load(CHAPTER_10)
    monkeypatch.setattr(chapter, "check", lambda shard: None)
    downloads = []

    class Shard(list):
        def get_max_size(self):
            return 1

        evict = get_max_size

    class Stream:
        def prepare_shard(self, shard):
            downloads.append(shard[0]["tokens"])
            return 1

    rows = chapter.MdsRows.__new__(chapter.MdsRows)
    rows.is_remote, rows.stream = True, Stream()
    rows.shards = [Shard([{"tokens": number}]) for number in range(3)]
    rows.sizes, rows.ends = [1, 1, 1], np.array([1, 2, 3])
    rows.cached, rows.cache_bytes, rows.cache_limit = chapter.OrderedDict(), 0, 2
    assert [rows.read(n) for n in (0, 1, 0, 2, 0, 1)] == [0, 1, 0, 2, 0, 1]
    assert downloads == [0, 1, 2, 1]


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.rest
def test_a_flipped_bit_in_a_folder(train, shards, trainer, tmp_path):
    """Otherwise another token would be trained on, without an error."""
    data = tmp_path / "copy"
    shutil.copytree(shards, data)
    flip_a_bit(min(data.glob("part-*/shard*")))
    run = train(data, processes=1, status=1)
    assert_one_sentence(run.output, "is damaged: its hash is not the hash in index.json")


@pytest.mark.rest
def test_reading_while_computing(train, many, trainer):
    plain, zipped = many
    flags = ["--max-steps", 8, "-b", 4]
    local = train(plain, *flags, processes=1, name="local")
    flags += ["--local-cache", trainer.folder / "cache"]
    options = {"processes": 1, "before": patches("remote_folder", "download_in_a_step")}
    remote = train(f"test://{zipped}", *flags, name="remote", **options)
    assert torch.equal(remote.seen[0], local.seen[0])
    assert remote.column("loss") == local.column("loss")


@pytest.mark.rest
def test_other_rows_are_refused(train, shards, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shards, other)
    facts = json.loads((other / "rows.json").read_text())
    (other / "rows.json").write_text(json.dumps(facts | {"tokenizer_probe": [1, 2]}))
    cases = [
        (shards, ["-s", 16], "have 32 tokens: give this to -s"),
        (other, [], "are of another tokenizer: "),
        (shards, ["-b", 5000], "too few rows: lower --batch-size"),
    ]
    texts = tmp_path / "texts"
    texts.mkdir()
    shutil.copy(shards / "index.json", texts)
    remedy = "lacks rows.json: let tools/prepare-data.py --mds make rows"
    cases += [(texts, [], remedy), (f"test://{texts}", [], remedy)]
    for data, flags, sentence in cases:
        flags = ["--max-steps", 1, *flags]
        run = train(
            data, *flags, processes=1, status=1, name="refused", before=patches("remote_folder")
        )
        assert_one_sentence(run.output, sentence)


@pytest.mark.rest
def test_a_run_does_not_go_on_with_other_rows(train, shards, tmp_path):
    """Their number is the same, so nothing but the index shows that row n is another one."""
    data = tmp_path / "copy"
    shutil.copytree(shards, data)
    train(data, "--max-steps", 1, processes=1, name="rewritten")
    index = json.loads((data / "index.json").read_text())
    index["shards"].reverse()
    (data / "index.json").write_text(json.dumps(index))
    run = train(data, "--max-steps", 2, processes=1, status=1, name="rewritten")
    assert_one_sentence(run.output, "undo this, or choose another -e")
    assert "error: the text or the tokenizer has changed" in run.output


def test_preflight_looks_at_rows(shards, tmp_path):
    flags = ["10", "-m", TINY_LLAMA, "-d", shards, "--from-scratch", "-s", 32]
    for more, error in ([], "give --eval-dataset"), (["--eval-freq", 0, "-s", 64], "32 tokens"):
        output = run_tool(tmp_path, "preflight.py", *flags, *more, status=1)
        assert re.search(f"  error: .*{error}", output)
    output = run_tool(tmp_path, "preflight.py", *flags, "--eval-freq", 0, "-b", 1)
    steps = 3 * len(rows_in(shards)) // 8
    assert f" {steps} of 8 samples of 32 tokens on 8 devices: {steps * 8 * 32:,} tokens" in output
    assert steps > 10


def test_preflight_refuses_compressed_rows_in_a_folder(many, tmp_path):
    """They are for an address. Some of them may have been decompressed."""
    plain, zipped = many
    flags = ["10", "-m", TINY_LLAMA, "--from-scratch", "-s", 32, "--eval-freq", 0, "-d"]
    mixed = tmp_path / "mixed"
    shutil.copytree(zipped, mixed)
    shutil.copy(min(plain.glob("*.mds")), mixed)
    for folder in (zipped, mixed):
        output = run_tool(tmp_path, "preflight.py", *flags, folder, status=1)
        assert f"error: {folder} has compressed rows" in output


def test_the_command_of_chapter_10(write, few, tmp_path):
    """With the length and the tokenizer of the rows. Compressed rows need an address."""
    command = (
        "Train on it: torchrun --standalone --nproc-per-node 1 more/10-mds-shards/train-llm.py"
    )
    run = write("command", data=few)
    flags = f"-d {run.folder} -e command -s 32 --eval-freq 0 -m {TINY_LLAMA}"
    assert run.output.splitlines()[-1] == f"{command} {flags}"
    run = write("held-out", "--held-out", "10%", "--compression", "zstd", data=few)
    flags = f"-d s3://BUCKET/held-out -e held-out -s 32 --eval-dataset {run.folder} -m {TINY_LLAMA}"
    assert run.output.splitlines()[-1] == f"{command} {flags}"
    assert "01-single-gpu" not in run.output


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_of_mds_with_texts(write, tmp_path, compression):
    """A folder of MDS gives the rows of the same texts in a JSON file."""
    from streaming import MDSWriter

    texts = [f"Document {i} has words of its own. " * 8 for i in range(60)]
    write_documents(tmp_path / "texts.jsonl", texts, column="body")
    columns = {"body": "str", "id": "int"}
    options = {"compression": compression, "size_limit": 5_000}
    with MDSWriter(out=str(tmp_path / "mds"), columns=columns, **options) as writer:
        for i, text in enumerate(texts):
            writer.write({"body": text, "id": i})
    flags = ["--text-column", "body", "--part-rows", 40]
    name = f"texts-{compression}"
    run = write(name, *flags, data=tmp_path / "mds")
    expected = write(f"{name}-json", *flags, data=tmp_path / "texts.jsonl")
    shards = sorted(path.relative_to(run.folder) for path in run.folder.glob("part-*/*.mds"))
    assert len(shards) >= 2
    for shard in shards:
        assert (run.folder / shard).read_bytes() == (expected.folder / shard).read_bytes()
