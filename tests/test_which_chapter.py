"""docs/which-chapter.md: its commands print the lines below them."""

import json
import re
import shlex

import pyarrow.parquet
import pytest
from conftest import REAL_MODELS
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, outcome
from test_readme import WHICH, assert_flags_are_understood, page
from transformers import AutoConfig

TEXT = page(WHICH)
PRINTED = r"^```\npython (tools/\S+ [^\n]*)\n```\n\n```text\n(.*?)```$"
COMMANDS = re.findall(PRINTED, TEXT, re.MULTILINE | re.DOTALL)
LAUNCH = r"^(?:torchrun .*?|cd \S+ && python )"
SENT = re.findall(LAUNCH + r"(\d\d-\S+/)?train-llm\.py (.*)$", TEXT, re.M)


EIGHT_CHOSEN = {"num_experts_per_tok": 8, "tie_word_embeddings": False}
MIXTURES = {
    "allenai/OLMoE-1B-7B-0924": AutoConfig.for_model(
        "olmoe",
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=64,
        vocab_size=50304,
        max_position_embeddings=4096,
        **EIGHT_CHOSEN,
    ),
    "Qwen/Qwen3-30B-A3B": AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        **EIGHT_CHOSEN,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The configs of the models, under their names, since the Hub is out of reach."""
    folder = tmp_path_factory.mktemp("models")
    for name, config in MIXTURES.items():
        config.save_pretrained(folder / name)
    for name, config in REAL_MODELS.items():
        on_the_hub = name.replace("2-7B", "2-7b-hf")
        config.save_pretrained(folder / "meta-llama" / on_the_hub)
    return folder


def run(command: str, folder) -> str:
    tool, *flags = shlex.split(command)
    flags = [re.sub("^(meta-llama|allenai|Qwen)/", r"./\1/", flag) for flag in flags]
    status, output = outcome(folder, REPOSITORY / tool, *flags, cwd=folder)
    assert status == 0, output
    return output


@pytest.mark.rest
@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_what_the_commands_print(folder, number):
    command, printed = COMMANDS[number]
    output = run(command, folder)
    for line in printed.splitlines():
        assert line in output.splitlines(), output


@pytest.mark.rest
def test_flags_of_the_command_lines(tmp_path):
    sent = [(chapter, flags) for chapter, flags in SENT if chapter]
    assert len(sent) > 9
    for number, (chapter, flags) in enumerate(sent):
        script = CHAPTERS_BY_NUMBER[chapter[:2]]
        assert_flags_are_understood(script, flags, tmp_path / str(number))


def test_two_corpora_are_mixed(tmp_path, monkeypatch):
    """The lines of the page, in a folder with two corpora."""
    for name in ("web", "code"):
        rows = (json.dumps({"text": f"{name} {number}"}) for number in range(1000))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"## Two corpora.*?```python\n(.*?)```", TEXT, re.DOTALL)[1], {})
    texts = pyarrow.parquet.read_table("mixed.parquet")["text"].to_pylist()
    assert 0.66 < sum("web" in text for text in texts) / len(texts) < 0.74
