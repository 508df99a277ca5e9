"""docs/questions.md and docs/which-chapter.md: commands print the lines below them, and save."""

import re
import shlex

import datasets
import pyarrow.parquet
import pytest
from helpers.pages import WHICH, assert_flags_are_understood, page
from helpers.runner import CHAPTERS_BY_NUMBER, run_tool
from transformers import AutoConfig

TEXT = page("docs/questions.md") + page(WHICH)
PRINTED = r"^```\npython (tools/\S+ [^\n]*)\n```\n\n```text\n(.*?)```$"
COMMANDS = re.findall(PRINTED, TEXT, re.MULTILINE | re.DOTALL)
SENT = re.findall(r"^(?:torchrun|python) .*?(\d\d)-[\w-]+/train-llm\.py (.*)$", TEXT, re.M)
# Those that tools/models.json has not
LLAMA_2 = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA_2 |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}
OLMOE = {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16}
OLMOE |= {"num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8}
OLMOE |= {"vocab_size": 50304, "max_position_embeddings": 4096}
MODELS = {
    "meta-llama/Llama-2-7b-hf": AutoConfig.for_model("llama", **LLAMA_2),
    "allenai/OLMoE-1B-7B-0924": AutoConfig.for_model("olmoe", **OLMOE),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The configs of the models, under their names, since the Hub is out of reach."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        config.save_pretrained(folder / name)
    return folder


def run(command: str, folder) -> str:
    tool, *flags = shlex.split(command)
    flags = [f"./{flag}" if flag in MODELS else flag for flag in flags]
    return run_tool(folder, tool.removeprefix("tools/"), *flags, cwd=folder)


@pytest.mark.rest
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_what_the_commands_print(folder, number):
    command, printed = COMMANDS[number]
    output = run(command, folder)
    for line in printed.splitlines():
        assert line in output.splitlines(), output
    for flags in re.findall(r"train-llm\.py (.*)", output):
        assert flags.startswith("-e mine ")
        assert " -d data/texts " in flags


@pytest.mark.rest
def test_flags_of_the_command_lines():
    """All runs have a name, so that they save, but the one that only fills the cache."""
    assert len(SENT) > 12
    for chapter, flags in SENT:
        assert ("-e " in flags) != ("--device cpu" in flags), flags
        assert_flags_are_understood(CHAPTERS_BY_NUMBER[chapter], flags)


def test_own_dataset_becomes_a_file(tmp_path, monkeypatch):
    """The line of the page. A Dataset need not end at its length by itself."""

    class Texts:
        def __len__(self):
            return 3

        def __getitem__(self, number):
            assert number < 3
            return f"text {number}"

    monkeypatch.chdir(tmp_path)
    line = re.search(r"^datasets\.Dataset\..*?^\)$", TEXT, re.M | re.S)[0]
    eval(line, {"datasets": datasets, "mine": Texts()})
    texts = pyarrow.parquet.read_table("mine.parquet")["text"].to_pylist()
    assert texts == ["text 0", "text 1", "text 2"]
