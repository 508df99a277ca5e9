"""What a user can get wrong: one sentence with the remedy, no traceback, nothing written."""

import http.server
import json
import os
import subprocess
import sys
import threading

import pytest
from conftest import LLAMA, TINY_LLAMA, assert_one_sentence, write_model
from runner import CHAPTER_1

CASES = {
    # flags: status 2
    "zero batch": (["-b", 0], 2, "--batch-size"),
    "no next token": (["-s", 1], 2, "--seq-length"),
    "negative steps": (["--max-steps", -1], 2, "--max-steps"),
    "no number": (["--lr", "fast"], 2, "--lr"),
    "infinite rate": (["--lr", "inf"], 2, "--lr"),
    "beta of 1": (["--adam-beta2", 1], 2, "below 1"),
    "negative frequency": (["--eval-freq", -5], 2, "--eval-freq"),
    "unknown dtype": (["--dtype", "int8"], 2, "--dtype"),
    "absent device": (["--device", "tpu"], 2, "cpu"),
    "slash in the name": (["-e", "a/b"], 2, "--experiment-name"),
    "name that climbs": (["-e", ".."], 2, "--experiment-name"),
    "unknown flag": (["--batchsize", 8], 2, "--batchsize"),
    # data
    "missing file": (["-d", "{tmp}/none.txt"], 1, "none.txt"),
    "empty glob": (["-d", "{tmp}/*.md"], 1, "check that the files exist"),
    "folder without text": (["-d", "{tmp}/empty"], 1, "cannot load the dataset"),
    "several kinds": (["-d", "{tmp}/mixed/*"], 1, "mixed/* must end in .txt, "),
    "no text column": (["-d", "{tmp}/numbers.csv"], 1, "choose --text-column among a, b"),
    "broken file": (["-d", "{tmp}/broken.jsonl"], 1, "JSON parse error"),
    "empty file": (["-d", "{tmp}/empty.jsonl"], 1, "check that the files exist and have text"),
    "no split to train on": (["-d", "{tmp}/only-test"], 1, "no split named train, only test"),
    "a number among texts": (
        ["-d", "{tmp}/number.jsonl"],
        1,
        "changed from string to number in row 1",
    ),
    "a number far below": (["-d", "{tmp}/late.jsonl"], 1, "changed from string to number in row"),
    "too small": (["-d", "{tmp}/small.txt"], 1, "too small"),
    "too small for the batch": (["-b", 10_000], 1, "--batch-size"),
    # model
    "no weights": (["--no-from-scratch"], 1, "--from-scratch"),
    "mistyped folder": (["-m", "{tmp}/lama"], 1, "check the path, or name and network"),
    "mistyped relative folder": (["-m", "./lama"], 1, "check the path, or name and network"),
    "folder without a model": (["-m", "{tmp}/empty"], 1, "check the path, or name and network"),
    "beyond the positions": (["-s", 129], 1, "128 positions"),
    "no end of text": (["-m", "{tmp}/endless"], 1, "has no end-of-text token"),
    "quantized": (["-m", "{tmp}/quantized"], 1, "is quantized (quantization_config in its config)"),
    "tokens outside the vocabulary": (["-m", "{tmp}/few"], 1, "vocabulary of 1000 tokens"),
    "no language model": (["-m", "{tmp}/vit"], 1, "causal LM"),
    "unknown schedule": (["--lr-scheduler", "stairs"], 2, "cosine"),
    "schedule without its options": (["--lr-scheduler", "cosine_with_min_lr"], 2, "cosine"),
    "negative seed": (["--seed", -1], 2, "--seed"),
    "seed above NumPy's limit": (["--seed", 2**32], 2, "below 4294967296"),
    # --config
    "no config file": (["--config", "{tmp}/none.yaml"], 1, "cannot read"),
    "config that is no YAML": (["--config", "{tmp}/broken.yaml"], 1, "cannot read"),
    "empty config": (["--config", "{tmp}/empty.jsonl"], 1, "cannot read"),
    "config of comments": (["--config", "{tmp}/comments.yaml"], 1, "as in batch-size: 8"),
    "config that is a list": (["--config", "{tmp}/list.yaml"], 1, "as in batch-size: 8"),
    "no switch": (["--config", "{tmp}/false.yaml"], 2, "--no-max-steps"),
    "unknown key": (["--config", "{tmp}/unknown.yaml"], 2, "--batchsize"),
    "bad value of a key": (["--config", "{tmp}/zero.yaml"], 2, "--batch-size"),
    # disk
    "unwritable": (["--save-dir", "{tmp}/numbers.csv/x"], 1, "--save-dir"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad-input")
    (folder / "empty").mkdir()
    (folder / "mixed").mkdir()
    (folder / "mixed" / "a.txt").write_text("text")
    (folder / "mixed" / "b.csv").write_text("text\nmore")
    (folder / "numbers.csv").write_text("a,b\n1,2\n3,4\n")
    (folder / "empty.jsonl").write_text("")
    (folder / "broken.yaml").write_text("batch-size: [8")
    (folder / "unknown.yaml").write_text("batchsize: 8")
    (folder / "zero.yaml").write_text("batch-size: 0")
    (folder / "comments.yaml").write_text("# batch-size: 8\n")
    (folder / "list.yaml").write_text("- batch-size: 8\n")
    (folder / "false.yaml").write_text("max-steps: false\n")
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": ')
    (folder / "small.txt").write_text("a few words")
    (folder / "only-test").mkdir()
    (folder / "only-test" / "test.jsonl").write_text('{"text": "a"}\n')
    (folder / "number.jsonl").write_text('{"text": "a"}\n{"text": 5}\n')
    endless = json.loads((TINY_LLAMA / "tokenizer_config.json").read_text())
    endless.pop("eos_token")
    write_model(folder / "quantized", **LLAMA, quantization_config={"quant_method": "fp8"})
    mixture = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}  # chapter 12 needs one
    for models, config in ((folder, LLAMA), (folder / "mixture", mixture)):
        write_model(models / "endless", **config)
        (models / "endless" / "tokenizer_config.json").write_text(json.dumps(endless))
        file = write_model(models / "few", **config) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 1000}))
    long = '{"text": "' + "a" * 1_000_000 + '"}\n'  # `datasets` reads 10 MB at a time
    (folder / "late.jsonl").write_text(12 * long + '{"text": 5}\n')
    vit = {"image_size": 32, "patch_size": 16, "hidden_size": 32, "num_hidden_layers": 1}
    write_model(folder / "vit", model_type="vit", num_attention_heads=2, **vit)
    return folder


QUICK = ("zero batch", "empty glob", "no weights", "unknown key")


def tiers(case):
    return pytest.param(case, marks=[] if case in QUICK else pytest.mark.rest)


@pytest.mark.parametrize("case", [tiers(case) for case in CASES])
def test_one_sentence(trainer, files, case):
    flags, status, part = CASES[case]
    flags = [str(flag).format(tmp=files) for flag in flags]
    result = trainer("--max-steps", 2, *flags, status=None)
    assert result.status == status, result.output
    assert_one_sentence(result.output, part)
    assert "https://huggingface.co//" not in result.output
    assert {path.name for path in (trainer.folder / "run").rglob("*")} <= {
        "lock"
    }  # nothing is written


@pytest.mark.rest
def test_out_of_gpu_memory_names_the_flags_that_help(trainer):
    """There may be no GPU here: the optimizer runs out of memory in its stead."""
    before = "import torch\n"
    before += "def step(*_, **__): raise torch.OutOfMemoryError('CUDA out of memory')\n"
    before += "torch.optim.AdamW.step = step\n"
    result = trainer("--max-steps", 2, status=1, before=before)
    assert_one_sentence(result.output, "--batch-size")
    assert_one_sentence(result.output, "--activation-checkpointing")


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub where one repository is gated and no other exists."""

    def answer(self):
        gated = "/gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Access is restricted." if gated else "Not found.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_POST = answer

    def log_message(self, *_):
        pass


@pytest.mark.rest
def test_hub_says_no_or_nothing(trainer, tmp_path, model):
    """Real processes: the libraries read the address of the Hub when they are imported."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    local = ["-m", str(model), "-s", "32"]
    no_network = [
        trainer.start("-m", "somebody/model", name="model"),
        trainer.start("-d", "somebody/data", name="data"),
    ]
    cases = [
        (["-m", "somebody/gated"], "accept its licence at huggingface.co", "hf auth login"),
        (["-m", "somebody/missing"], "the model somebody/missing", "--demo"),
        ([*local, "-d", "somebody/missing"], "the dataset somebody/missing", "--dataset-subset"),
    ]
    runs = [
        subprocess.Popen(
            [sys.executable, CHAPTER_1, *flags],
            env=os.environ | hub,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags, *_ in cases
    ]
    for run, (_, what, remedy) in zip(runs, cases, strict=True):
        output, _ = run.communicate(timeout=120)
        assert run.returncode == 1, output
        assert_one_sentence(output, what)
        assert_one_sentence(output, remedy)
    server.shutdown()
    for run, what in zip(no_network, ("model", "data"), strict=True):
        assert run.wait() == 1
        assert_one_sentence(run.output, f"somebody/{what}: check")
        assert_one_sentence(run.output, "network")
