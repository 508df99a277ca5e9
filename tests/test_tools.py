"""tools/: the tiny Llama comes out the same, and a run's folders write text."""

import filecmp
import platform
import shutil
import subprocess
import sys

import pytest
from conftest import TINY_LLAMA, assert_one_sentence
from runner import CHAPTER_3, REPOSITORY, outcome
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GENERATE = REPOSITORY / "tools" / "generate.py"


@pytest.mark.skipif(
    platform.python_version() != "3.11.7",
    reason="tiny-llama/ was made from the standard library of Python 3.11.7",
)
def test_tiny_llama_is_reproduced_byte_for_byte(tmp_path):
    command = [sys.executable, REPOSITORY / "tools" / "make-tiny-llama.py"]
    subprocess.run([*command, "--output-dir", tmp_path], check=True)
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(path.name for path in TINY_LLAMA.iterdir()) == names
    assert filecmp.cmpfiles(tmp_path, TINY_LLAMA, names, shallow=False)[0] == names


def test_tiny_llama():
    tokenizer = AutoTokenizer.from_pretrained(TINY_LLAMA)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY_LLAMA))
    assert 0.9e6 < model.num_parameters() < 1.1e6
    assert len(tokenizer) == model.config.vocab_size == 2048
    assert tokenizer.eos_token == "<|endoftext|>"
    for text in ["def f(x):\n\treturn x", "Größe 学习 🙂", "\x00\xff  "]:  # any text comes back
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def generate(folder, *arguments):
    return outcome(folder, GENERATE, *arguments)


@pytest.mark.rest
def test_generate(trainer, tmp_path):
    result = trainer("--max-steps", 2)
    short = ["--prompt", "def ", "--max-new-tokens", 8]
    for model in (result.folder / "final", result.folder / "step-00000002"):
        status, first = generate(tmp_path, model, *short, "--seed", 1)
        assert status == 0
        assert first.startswith("def ")
        assert generate(tmp_path, model, *short, "--seed", 1) == (0, first)
        assert generate(tmp_path, model, *short, "--seed", 2) != (0, first)
    # A sharded checkpoint, too; and not its last rank's part alone
    sharded = trainer("--max-steps", 2, name="fsdp", processes=3, script=CHAPTER_3).folder
    texts = [
        generate(tmp_path, sharded / name, *short, "--temperature", 0)
        for name in ("final", "step-00000002")
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] == 0
    shutil.copytree(sharded / "step-00000002", sharded / "damaged")
    (sharded / "damaged" / "__2_0.distcp").unlink()
    status, output = generate(tmp_path, sharded / "damaged", *short)
    assert status == 1
    assert_one_sentence(output, "cannot load the model")
    greedy = [generate(tmp_path, model, *short, "--temperature", 0, "--seed", i) for i in (1, 2)]
    assert greedy[0] == greedy[1]
    one = [generate(tmp_path, model, *short, "--top-k", 1, "--seed", i) for i in (1, 2)]
    assert one == greedy
    assert generate(tmp_path, model, "--max-new-tokens", 3)[0] == 0  # no prompt: a new document

    status, output = generate(tmp_path, tmp_path / "nothing", *short)
    assert status == 1
    assert_one_sentence(output, "nothing")
    status, output = generate(tmp_path, model, "--max-new-tokens", 0)
    assert status == 2
    assert_one_sentence(output, "--max-new-tokens")
    status, output = generate(tmp_path, model, "--temperature", -1)
    assert status == 2
    assert_one_sentence(output, "--temperature")


@pytest.mark.parametrize("tool", ["plot-runs.py", "side-by-side.py"])
def test_a_package_that_is_missing_is_named(tool):
    folder = REPOSITORY / "tools"
    code = "import runpy, sys; sys.modules |= {'matplotlib': None, 'pygments': None}; "
    code += f"sys.argv = ['tool', 'run']; sys.path.insert(0, {str(folder)!r}); "
    code += f"runpy.run_path({str(folder / tool)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert_one_sentence(result.stderr, '".[tools]"')
