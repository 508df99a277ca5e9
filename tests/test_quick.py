"""The quick tier of the chapters from 2 on: one job on 2 ranks, its resume, and one bad flag.

The job has chapter 1's losses, gradient norms and held-out loss. (Chapters 4, 10, 16 and 17 read
other rows, so a plain loop over the same rows takes the place of chapter 1. For chapter 18,
chapter 1 has torch.optim.Muon.) A resumed run repeats it to the last bit. No checkpoint gets its
name before all of its files are on the disk.
"""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from helpers.assertions import (
    OFF,
    assert_one_sentence,
    assert_opens,
    assert_same_losses,
    assert_same_model,
    assert_synced,
    final_tensors,
)
from helpers.chapters import with_torch_muon
from helpers.data import IMPORTABLE, NO_TORCHVISION, STAND_IN, write_documents
from helpers.hf_trainer import Runs
from helpers.models import DEMO_TEMPLATE, TINY_LLAMA, save_weights, weights_away
from helpers.plain_loops import (
    assert_equal,
    flags_for,
    plain_loop,
    plain_loop_over_rows,
    with_adapters,
)
from helpers.runner import CHAPTERS_BY_NUMBER, CONTINUES, FACTS, load, patches, run_tool
from helpers.trainer import resume, watched
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

STEPS = ["--max-steps", 6, "--eval-freq", 3, "--ckpt-freq", 3, "--lr", 1e-3]
STEPS += ["--keep-checkpoints", 9]
TWICE = ["--gradient-accumulation-steps", 2]
EVERYTHING = ["--compress", "dct", "--keep", 1, "--min-compress", 600]  # all frequencies
GRID = ["--pipeline-parallel", 2, "--tensor-parallel", 2]
# Flags of the job, for 8 samples per step; bad flags, and a part of the sentence. Each chapter that
# claims chapter 1's losses has the usual ones if no others stand here.
USUAL = (["-b", 2, *TWICE], ["--cpu-offlod"], "--cpu-offlod")
CHAPTERS = {
    "02-ddp": (["-b", 2, *TWICE], ["-b", 0], "batch_size"),
    "05-multi-node": (
        ["-b", 2, *TWICE, "--shard-size", 1],
        ["--shard-size", 3],
        "--shard-size 3 does not divide the 2 ranks",
    ),
    "06-tensor-parallel": (["-b", 4, *TWICE], ["--tensor-parallel", 3], "number of ranks, 2"),
    # The second held-out batch has micro-batches of 2 samples and padding, and of padding
    "07-pipeline-parallel": (
        ["-b", 4, *TWICE],
        ["--layers-per-stage", "1,2"],
        "2 stages cannot share 2 layers as [1, 2]",
    ),
    "08-gradient-compression": (
        ["-b", 2, *TWICE, *EVERYTHING],
        ["--compress", "zip"],
        "invalid choice",
    ),
    "11-context-parallel": (["-b", 8], ["--context-parallel", 3], "number of ranks, 2"),
    "12-expert-parallel": (
        ["-b", 2, *TWICE],
        ["--expert-parallel", 3],
        "--expert-parallel 3 must divide the ranks and experts of the model",
    ),
    "13-3d-parallel": (
        ["-b", 4, *TWICE, *GRID],
        ["--pipeline-parallel", 1, "--tensor-parallel", 3],
        "times --tensor-parallel must divide the number of ranks, 4",
    ),
    "18-muon": (["-b", 2, *TWICE], ["--lr", "fast"], "lr"),
}
CHAPTERS |= {n: USUAL for n in CONTINUES if n not in CHAPTERS and "losses" not in FACTS[n]}
# Others train `pretrained`, on two ranks.
MODELS = {"11-context-parallel": "far_looking", "12-expert-parallel": "mixtral"}
MODELS["13-3d-parallel"] = "tied"
PROCESSES = {"13-3d-parallel": 4}
# The second loss of a mixture is that of a micro-batch, so chapter 1 has the same ones.
ALONE = {"12-expert-parallel": ["-b", 2, "--gradient-accumulation-steps", 4]}
WATCH_SAVES = patches("files_on_disk", "slow_rank_1")


def script_of(chapter: str):
    return CHAPTERS_BY_NUMBER[chapter[:2]]


def refuse(trainer, chapter: str, flags: list, sentence: str, status=1) -> None:
    """Status 2: by the parser."""
    options = {"script": script_of(chapter), "name": "refused"}
    options["processes"] = PROCESSES.get(chapter, 2)
    result = trainer(*flags, status=status, **options)
    assert_one_sentence(result.run.ranks[0].output, sentence)
    assert result.checkpoints == []


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_one_job(trainer, request, chapter):
    flags, bad, sentence = CHAPTERS[chapter]
    folder = request.getfixturevalue(MODELS.get(chapter, "pretrained"))
    steps = ["-m", folder, "--no-from-scratch", *STEPS]
    alone = with_torch_muon(trainer.folder) if chapter == "18-muon" else None  # or chapter 1
    batch = ALONE.get(chapter, ["-b", 8])
    single = trainer(*steps, *batch, name="single", script=alone)

    def train(name):
        options = {"script": script_of(chapter), "processes": PROCESSES.get(chapter, 2)}
        options["before"] = WATCH_SAVES
        return trainer(*steps, *flags, name=name, **options)

    run = train("run")
    assert_same_losses(single, run, 6, **OFF)
    assert_synced(run.run.ranks[0].output, ["step-00000003", "step-00000006", "final"])
    assert_same_weights(single, run)
    assert_opens(run, reference=single)
    with weights_away(folder):
        resume(run, trainer, 3, again=train)
    needs_model = chapter in ("07-pipeline-parallel", "12-expert-parallel")  # not by the parser
    refuse(trainer, chapter, bad, sentence, status=1 if needs_model else 2)


def assert_same_weights(a, b) -> None:
    """But for the order in which fp32 numbers are added up."""
    a, b = final_tensors(a), final_tensors(b)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-4)


def check_rows(run, folder, steps: int, held_out) -> None:
    """Other rows on each rank; the losses and norms of a plain loop; final/'s held-out loss."""
    rows = [part.view(steps, -1, part.shape[-1]) for part in run.seen]
    batches = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    losses, norms = plain_loop_over_rows(folder, batches)
    assert run.column("loss") == pytest.approx(losses, rel=1e-5)
    assert run.column("grad_norm") == pytest.approx(norms, rel=3e-5)
    seen = [tuple(row) for part in rows for row in part.flatten(0, 1).tolist()]
    assert len(set(seen)) == len(seen)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["text"] for line in held_out.read_text().splitlines()[:10]]
    ids = [i for text in texts for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    samples = torch.tensor(ids[: len(ids) // 32 * 32]).view(-1, 32)
    final = AutoModelForCausalLM.from_pretrained(run.folder / "final")
    expected = final(input_ids=samples, labels=samples).loss.item()
    assert run.column("eval/loss")[-1] == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def corpus(tmp_path, texts):
    """Two files to train on, and one that is held out. Their documents are short, so all fit."""
    documents = [f"{n} {text[:40]}" for n, text in enumerate(texts)]
    for number in range(2):
        some = documents[number * 100 : number * 100 + 100]
        write_documents(tmp_path / f"{number}.jsonl", some)
    write_documents(tmp_path / "held-out.jsonl", documents[300:320])
    return tmp_path


def rows_job(trainer, chapter, weights, corpus, data, before="") -> None:
    """A job on 2 ranks on these data, whose rows are those of a plain loop, and its resume."""
    held_out = corpus / "held-out.jsonl"
    flags = ["-m", weights, "--no-from-scratch", *STEPS, "-b", 2, *TWICE, "-d", data]
    flags += ["--eval-dataset", held_out, "--eval-documents", 10, "--shuffle-window", 16]

    def train(name):
        options = {"script": script_of(chapter)}
        options["before"] = before + WATCH_SAVES + patches("no_floats")
        return watched(trainer, *flags, name=name, **options)

    run = train("run")
    assert_synced(run.run.ranks[0].output, ["step-00000003", "step-00000006", "final"])
    check_rows(run, weights, 6, held_out)
    assert_opens(run)
    with weights_away(weights):
        resume(run, trainer, 3, again=train)


@pytest.mark.parametrize("chapter", ["04-streaming"])
def test_one_job_of_streams(trainer, pretrained, corpus, chapter):
    rows_job(trainer, chapter, pretrained, corpus, f"{corpus}/?.jsonl")
    refuse(trainer, chapter, ["--shuffle-window", 0], 'Parser key "shuffle_window"', status=2)


@pytest.mark.parametrize("chapter", ["10-mds-shards"])
def test_one_job_of_shards(trainer, pretrained, corpus, monkeypatch, chapter):
    if NO_TORCHVISION:
        monkeypatch.syspath_prepend(STAND_IN)
    flags = [f"{corpus}/?.jsonl", "-o", corpus / "shards", "--no-shuffle", "--mds"]
    flags += ["-m", TINY_LLAMA, "-s", 32, "--part-rows", 30]
    run_tool(corpus, "prepare-data.py", *flags, before=IMPORTABLE)
    shards = corpus / "shards"
    rows_job(trainer, chapter, pretrained, corpus, shards, IMPORTABLE)
    refuse(trainer, chapter, ["--local-cache"], "expected one argument", status=2)


@pytest.mark.parametrize("chapter", ["16-chat", "17-lora"])
def test_one_job_of_conversations(
    trainer, pretrained, conversations, rows_of_conversations, chapter
):
    """`final/` has the template and the token that ends an answer, as a server needs them."""
    folder = shutil.copytree(pretrained, trainer.folder / "chat-model")
    GenerationConfig(eos_token_id=5).save_pretrained(folder)
    rows = rows_of_conversations()
    flags = [*flags_for(folder, rows), "-b", 2, "--lr", 1e-3]
    flags += ["--gradient-accumulation-steps", 3, "--max-steps", 4]
    flags += ["--eval-freq", 2, "--ckpt-freq", 2, "--keep-checkpoints", 9]

    def train(name):
        options = {"script": script_of(chapter), "processes": 2}
        options["before"] = WATCH_SAVES + patches("no_floats")
        return trainer(*flags, name=name, **options)

    run = train("run")
    assert_synced(run.run.ranks[0].output, ["step-00000002", "step-00000004", "final"])
    adapt = with_adapters if chapter == "17-lora" else lambda model: model
    module = load(script_of(chapter))
    assert_equal(plain_loop(module, folder, rows, adapt, steps=4), run)
    if chapter == "16-chat":
        assert_opens(run)
    else:
        command = [run.folder / "step-00000002", trainer.folder / "new", "--to", "transformers"]
        output = run_tool(trainer.folder, "convert-checkpoint.py", *command, status=1)
        assert_one_sentence(output, "chapter 17, with B and A apart: use the final/ of its run")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "final")
    assert tokenizer.chat_template == DEMO_TEMPLATE.read_text()
    for name in ("final", "step-00000002"):  # the stop tokens of the base, and of the answers
        stops = GenerationConfig.from_pretrained(run.folder / name).eos_token_id
        assert stops == [5, tokenizer.eos_token_id]
    command = [run.folder / "final", "--prompt", "Hi", "--temperature", 0, "--max-new-tokens", 9]
    whole, answer = (
        run_tool(trainer.folder, "generate.py", *command, *more)
        for more in (["--prompt", "User: Hi\nAssistant:"], ["--chat"])
    )
    assert whole == f"User: Hi\nAssistant:{answer}"
    with weights_away(folder) if chapter == "16-chat" else nullcontext():
        resume(run, trainer, 2, again=train)
    if chapter == "16-chat":
        other = trainer.folder / "other.jinja"
        other.write_text("{# another #}" + DEMO_TEMPLATE.read_text())
        flags += ["-d", rows_of_conversations("--chat-template", other)]
        refuse(trainer, chapter, [*flags, "-e", "run"], "rows_hash was")
    else:
        save_weights(folder, dtype=torch.bfloat16)  # another base in the same folder
        refuse(trainer, chapter, [*flags, "-e", "run"], "base_hash was")
    refuse(trainer, chapter, [*flags, "-s", 32], "has another length: run `python tools/prepare")
    sentence = '/chat.jsonl has no rows: first run `python tools/prepare-data.py "'
    refuse(trainer, chapter, [*flags, "-d", conversations], sentence)


@pytest.mark.parametrize("chapter", ["09-hf-trainer"])
def test_one_job_of_the_trainer(trainer, tmp_path, model, dataset, chapter):
    (tmp_path / "9").mkdir()
    runs = Runs(tmp_path / "9", model, dataset)
    # The 10 held-out samples divide by 2 ranks × 1. The Trainer would fill up a larger last batch.
    flags = ["training.max_steps=8", "training.eval_steps=4", "parallel=ddp"]
    flags += ["training.per_device_train_batch_size=2", "training.per_device_eval_batch_size=1"]
    flags += ["training.gradient_accumulation_steps=2"]
    single = trainer("-b", 8, "--max-steps", 8, "--eval-freq", 4, name="single")
    options = {"processes": 2, "before": patches("slow_rank_1", "complete_checkpoint")}
    run = runs(*flags, name="run", **options)
    assert "the record names a checkpoint" in run.output
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3), ("eval/loss", 1e-4)):
        assert run.column(name) == pytest.approx(single.column(name), rel=tolerance)
    assert_opens(run, reference=single)
    stopped = runs(
        *flags, name="stopped", processes=2, before=patches("signal_in_step_5"), status=143
    )
    resumed = runs(*flags, name="stopped", **options)
    assert f"checkpoint: {stopped.folder}/checkpoint-5" in resumed.output
    assert resumed.column("loss") == run.column("loss")
    assert_same_model(resumed, run)
    refused = runs.start("training.eval_steps=0")
    assert refused.wait() == 1
    assert_one_sentence(refused.output, "training.eval_steps must be 1 or more, not 0")
