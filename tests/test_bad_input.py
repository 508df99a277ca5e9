"""What a user often gets wrong: one sentence, a status that is not 0, and nothing is written."""

import json
import shutil

import pytest
from helpers.assertions import assert_one_sentence
from helpers.data import IMPORTABLE
from helpers.models import LLAMA, TINY_LLAMA, save_weights, write_model
from helpers.runner import CHAPTERS_BY_NUMBER, CONTINUES, FACTS
from safetensors.torch import load_file, save_file

RANGES = "--lr, --weight-decay, --max-grad-norm: from 0 on; --adam-beta2: 0 to below 1"
# By the parser, with status 2. The flags, a part of the sentence
FLAGS = {
    "zero batch": (["-b", 0], 'Parser key "batch_size"'),
    "negative clipping": (["--max-grad-norm", -1], RANGES),
    "unknown schedule": (["--lr-scheduler", "sine"], "invalid choice: 'sine'"),
    "no number": (["--lr", "fast"], 'Parser key "lr"'),
    "negative rate": (["--lr", -1], RANGES),
    "negative decay": (["--weight-decay", -0.1], RANGES),
    "moments that never end": (["--adam-beta2", 1], RANGES),
    "switch in place of a text": (["--config", "{tmp}/no.yaml"], 'Parser key "text_column"'),
    "no such device": (["--device", "mps"], "--device: invalid choice: 'mps' (choose from 'cpu')"),
    "slash in the name": (["-e", "a/b"], 'Parser key "experiment_name"'),
    "name that climbs": (["-e", ".."], 'Parser key "experiment_name"'),
    "unknown flag": (["--batchsize", 8], "--batchsize"),
    "unknown key": (["--config", "{tmp}/unknown.yaml"], "batchsize"),
}
# By chapter 1 itself, or by a library, with status 1
CASES = {
    "unknown attention": (["--attention", "flahs"], 'attn_implementation="flahs"'),
    "no such package": (["--attention", "flash_attention_2"], "the package for FlashAttention2"),
    "missing file": (["-d", "{tmp}/none.txt"], "none.txt"),
    "no such split": (["-d", "{tmp}/numbers.csv:tain"], "such as {tmp}/numbers.csv:train"),
    "no text column": (["-d", "{tmp}/numbers.csv"], "choose --text-column of ['a', 'b']"),
    "broken JSON": (["-d", "{tmp}/broken.jsonl"], "let tools/prepare-data.py read the files"),
    "large text": (["-d", "{tmp}/l*.txt"], "a file above 20 MB: let tools/prepare-data.py"),
    "folder of texts": (["-d", "{tmp}"], "tools/prepare-data.py has not written {tmp}"),
    "no such folder": (["-d", "usr/nowhere"], "there is no folder usr/nowhere"),
    "no such model": (["-m", "usr/tiny-lama"], "there is no folder usr/tiny-lama"),
    "an empty file": (["-d", "{tmp}/empty.txt"], "too little text"),
    "an empty table": (["-d", "{tmp}/empty.jsonl"], "too little text"),
    "weights that are no weights": (
        ["-m", "{tmp}/pointer", "--no-from-scratch"],
        "/pointer cannot be",
    ),
    "two heads": (
        ["-m", "{tmp}/two-heads", "--no-from-scratch"],
        "set tie_word_embeddings to false",
    ),
    "too small": (["-d", "{tmp}/small.txt"], "too little text"),
    "no weights": (["--no-from-scratch"], "no file named model.safetensors"),
    "no end of text": (["-m", "{tmp}/endless"], "has no end-of-text token"),
    "outside the vocabulary": (["-m", "{tmp}/few"], "is outside the vocabulary of"),
    "a tensor lacks": (["-m", "{tmp}/lacks", "--no-from-scratch"], "1.mlp.up_proj.weight"),
    "not finite": (["--lr", 1e30, "--max-grad-norm", 0], "is not finite: lower --lr"),
    "unwritable": (["--save-dir", "{tmp}/small.txt/x"], "small.txt/x"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad-input")
    (folder / "numbers.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "small.txt").write_text("a few words")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"\n{"text": "c"}\n')
    with (folder / "large.txt").open("w") as large:
        large.truncate(20_000_001)
    (folder / "unknown.yaml").write_text("batchsize: 8")
    (folder / "no.yaml").write_text("text_column: no")  # YAML reads this as false
    config = json.loads((TINY_LLAMA / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (write_model(folder / "endless", **LLAMA) / "tokenizer_config.json").write_text(
        json.dumps(config)
    )
    few = write_model(folder / "few", **LLAMA) / "config.json"
    few.write_text(json.dumps(json.loads(few.read_text()) | {"vocab_size": 1000}))
    lacks = save_weights(write_model(folder / "lacks", **LLAMA)) / "model.safetensors"
    tensors = load_file(lacks)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, lacks, metadata={"format": "pt"})
    (folder / "empty.txt").touch()
    (folder / "empty.jsonl").touch()
    pointer = save_weights(write_model(folder / "pointer", **LLAMA)) / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4200000\n")
    tied = save_weights(write_model(folder / "two-heads", **LLAMA | {"tie_word_embeddings": True}))
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", FLAGS | CASES)
def test_one_sentence(trainer, files, case):
    flags, part = (FLAGS | CASES)[case]
    flags = [str(flag).format(tmp=files) for flag in flags]
    result = trainer("--max-steps", 4, *flags, status=2 if case in FLAGS else 1)
    assert_one_sentence(result.output, part.format(tmp=files))
    assert [*trainer.folder.glob("run/step-*/*")] == []
    if case == "not finite":  # the bad step is logged. JSON has no infinity
        assert result.column("loss")[-1] is None or result.column("grad_norm")[-1] is None


# By chapter: the ranks, flags, a part of the sentence
OWN_LOSSES = {name for name in CONTINUES if "losses" in FACTS[name]}
CHAPTERS = dict.fromkeys(CONTINUES.keys() - OWN_LOSSES, (2, ["--cpu-offlod"], "--cpu-offlod"))
CHAPTERS |= {
    "02-ddp": (2, ["-b", 0], "batch_size"),
    "04-streaming": (2, ["--shuffle-window", 0], "shuffle_window"),
    "05-multi-node": (2, ["--shard-size", 3], "--shard-size 3 does not divide the 2 ranks"),
    "06-tensor-parallel": (2, ["--tensor-parallel", 3], "number of ranks, 2"),
    "07-pipeline-parallel": (2, ["--layers-per-stage", "1,2"], "cannot share 2 layers as [1, 2]"),
    "08-gradient-compression": (2, ["--compress", "zip"], "invalid choice"),
    "10-mds-shards": (2, ["--local-cache"], "expected one argument"),
    "11-context-parallel": (2, ["--context-parallel", 3], "number of ranks, 2"),
    "12-expert-parallel": (2, ["-m", "{mixtral}", "--expert-parallel", 3], "--expert-parallel 3"),
    "13-3d-parallel": (4, ["--pipeline-parallel", 1, "--tensor-parallel", 3], "of ranks, 4"),
}
LOOK_AT_THE_MODEL = ("07-pipeline-parallel", "12-expert-parallel")  # the others: by the parser


@pytest.mark.parametrize("chapter", sorted(CHAPTERS))
def test_a_wrong_flag(trainer, mixtral, chapter):
    """Rank 0 says it for all, and nothing is written."""
    ranks, flags, part = CHAPTERS[chapter]
    flags = [str(flag).format(mixtral=mixtral) for flag in flags]
    options = {"script": CHAPTERS_BY_NUMBER[chapter[:2]], "processes": ranks, "before": IMPORTABLE}
    result = trainer(*flags, status=1 if chapter in LOOK_AT_THE_MODEL else 2, **options)
    assert_one_sentence(result.run.ranks[0].output, part)
    assert result.checkpoints == []


@pytest.mark.rest
def test_tensors_that_the_model_does_not_use_are_named(trainer, files):
    folder = trainer.folder / "more"
    shutil.copytree(files / "lacks", folder)
    save_weights(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.bias"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = trainer("-m", folder, "--no-from-scratch", "--max-steps", 1)
    assert "up_proj.bias" in result.output


def test_the_first_rank_of_a_node_says_it(trainer, files):
    """Once for both ranks, before torchrun ends the others."""
    flags, part = CASES["no end of text"]
    flags = [str(flag).format(tmp=files) for flag in flags]
    assert_one_sentence(trainer(*flags, processes=2, status=1).output, part)


@pytest.mark.rest
def test_out_of_gpu_memory_names_the_flags_that_help(trainer):
    """There may be no GPU here: the optimizer runs out of memory in its stead."""
    before = "import torch\n"
    before += "def step(*_, **__): raise torch.OutOfMemoryError('CUDA out of memory')\n"
    before += "torch.optim.AdamW.step = step\n"
    result = trainer("--max-steps", 2, status=1, before=before)
    assert_one_sentence(result.output, "--activation-checkpointing")
