"""What a user often gets wrong: one sentence, a status that is not 0, and nothing is written."""

import gzip
import json
import shutil

import pytest
from conftest import LLAMA, TINY_LLAMA, assert_one_sentence, save_weights, write_model
from safetensors.torch import load_file, save_file

# By chapter 1 itself. The flags, a part of the sentence
CASES = {
    "zero batch": (["-b", 0], 'Parser key "batch_size"'),
    "negative clipping": (["--max-grad-norm", -1], 'Parser key "max_grad_norm"'),
    "no number": (["--lr", "fast"], 'Parser key "lr"'),
    "unknown scheduler": (["--lr-scheduler", "sine"], "--lr-scheduler sine: sine is not a valid"),
    "scheduler of a metric": (["--lr-scheduler", "reduce_lr_on_plateau"], "reduce_lr_on_plateau:"),
    "scheduler's option": (["--lr-scheduler", "warmup_stable_decay"], "'num_decay_steps'"),
    "no such device": (["--device", "mps"], "--device: invalid choice: 'mps' (choose from 'cpu')"),
    "unknown attention": (["--attention", "flahs"], 'attn_implementation="flahs"'),
    "attention of servers": (["--attention", "paged|eager"], "paged|eager cannot train here"),
    "no backward pass": (["--attention", "flex_attention"], "flex_attention cannot train here"),
    "no such package": (["--attention", "flash_attention_2"], "the package for FlashAttention2"),
    "slash in the name": (["-e", "a/b"], "without slashes"),
    "name that climbs": (["-e", ".."], "without slashes"),
    "unknown flag": (["--batchsize", 8], "--batchsize"),
    "unknown key": (["--config", "{tmp}/unknown.yaml"], "batchsize"),
    "missing file": (["-d", "{tmp}/none.txt"], "none.txt"),
    "no text column": (["-d", "{tmp}/numbers.csv"], "choose --text-column among"),
    "broken JSON": (["-d", "{tmp}/[a-z]*.jsonl"], "broken.jsonl: JSON parse error"),
    "no column in one file": (["-d", "{tmp}/[a-f]*.csv"], "else.csv: Column name ['text']"),
    "no Parquet": (["-d", "{tmp}/*.parquet"], "cut.parquet: Parquet file size is 4 bytes"),
    "cut archive": (["-d", "{tmp}/*.txt.gz"], "cut.txt.gz: Compressed file ended before"),
    "UTF-16": (["-d", "{tmp}/utf-16.txt"], "utf-16.txt: convert it to UTF-8"),
    "UTF-16 without mark": (["-d", "{tmp}/utf-16-le.txt"], "convert it to UTF-8"),
    "too small": (["-d", "{tmp}/small.txt"], "too little text"),
    "no weights": (["--no-from-scratch"], "no file named model.safetensors"),
    "beyond the positions": (["-s", 129], "the model has 128 positions"),
    "no end of text": (["-m", "{tmp}/endless"], "has no end-of-text token"),
    "outside the vocabulary": (["-m", "{tmp}/few"], "is outside the vocabulary of"),
    "images": (["-m", "{tmp}/images"], "no plain decoder of text"),
    "half of a model": (["-m", "{tmp}/bart"], "no plain decoder of text"),
    "encoder": (["-m", "{tmp}/bert"], "no plain decoder of text"),
    "a tensor lacks": (["-m", "{tmp}/lacks", "--no-from-scratch"], "1.mlp.up_proj.weight"),
    "not finite": (["--lr", 1e30, "--max-grad-norm", 0], "is not finite: lower --lr"),
    "unwritable": (["--save-dir", "{tmp}/small.txt/x"], "small.txt/x"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad-input")
    (folder / "numbers.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "small.txt").write_text("a few words")
    (folder / "good.jsonl").write_text('{"text": "a"}\n')
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": "b"\n{"text": "c"}\n')
    (folder / "date.csv").write_text("text,date\na,2026-11-27\n")
    (folder / "else.csv").write_text("txt,date\na,b\n")
    (folder / "cut.parquet").write_bytes(b"PAR1")
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"some text " * 99)[:-9])
    for encoding in ("utf-16", "utf-16-le"):  # with its mark, and without
        (folder / f"{encoding}.txt").write_text("some text", encoding)
    (folder / "unknown.yaml").write_text("batchsize: 8")
    config = json.loads((TINY_LLAMA / "tokenizer_config.json").read_text())
    config.pop("eos_token")
    (write_model(folder / "endless", **LLAMA) / "tokenizer_config.json").write_text(
        json.dumps(config)
    )
    few = write_model(folder / "few", **LLAMA) / "config.json"
    few.write_text(json.dumps(json.loads(few.read_text()) | {"vocab_size": 1000}))
    write_model(folder / "images", model_type="gemma3", text_config={}, vision_config={})
    for encoder in ("bart", "bert"):
        write_model(folder / encoder, model_type=encoder)
    lacks = save_weights(write_model(folder / "lacks", **LLAMA)) / "model.safetensors"
    tensors = load_file(lacks)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, lacks, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("case", CASES)
def test_one_sentence(trainer, files, case):
    flags, part = CASES[case]
    flags = [str(flag).format(tmp=files) for flag in flags]
    result = trainer("--max-steps", 4, *flags, status=1)
    assert_one_sentence(result.output, part.format(tmp=files))
    assert [*trainer.folder.glob("run/step-*/*")] == []


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


@pytest.mark.parametrize("case", ["no end of text", "zero batch"])
def test_the_first_rank_of_a_node_says_it(trainer, files, case):
    """Once for both ranks, before torchrun ends the others."""
    flags, part = CASES[case]
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
