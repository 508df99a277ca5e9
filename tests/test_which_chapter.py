"""docs/which-chapter.md: its commands print the lines below them, and its answers are short."""

import re
import shlex
from copy import deepcopy

import pytest
from runner import CHAPTERS_BY_NUMBER, REPOSITORY, Run, outcome
from test_readme import MODELS, WHICH, page, parameters
from transformers import AutoConfig

TEXT = page(WHICH)
PRINTED = r"^```\n\.venv/bin/python (tools/\S+ [^\n]*)\n```\n\n```text\n(.*?)```$"
COMMANDS = re.findall(PRINTED, TEXT, re.MULTILINE | re.DOTALL)
LAUNCH = r"^(?:\.venv/bin/torchrun .*?|cd \S+ && \.\./\.venv/bin/python )"
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
    for name, config in MODELS.items():
        config = deepcopy(config)
        config.max_position_embeddings = 4096 if name == "Llama-2-7B" else 131072
        on_the_hub = name.replace("2-7B", "2-7b-hf")
        config.save_pretrained(folder / "meta-llama" / on_the_hub)
    return folder


def run(command: str, folder) -> str:
    tool, *flags = shlex.split(command)
    flags = [re.sub("^(meta-llama|allenai|Qwen)/", r"./\1/", flag) for flag in flags]
    status, output = outcome(folder, REPOSITORY / tool, *flags, cwd=folder)
    assert status == 0, output
    return output


def test_number_of_commands():
    assert len(COMMANDS) == 10


def check(command, expected, folder):
    output = run(command, folder)
    for line in expected.splitlines():
        assert line in output.splitlines(), output


def test_what_the_first_command_prints(folder):
    check(*COMMANDS[0], folder)


@pytest.mark.rest
@pytest.mark.parametrize("number", range(1, len(COMMANDS)))
def test_what_the_other_commands_print(folder, number):
    check(*COMMANDS[number], folder)


@pytest.mark.rest
def test_a_1b_on_one_node_and_on_two(folder):
    """The figures of the sentence below the first table."""
    command = "tools/estimate-scaling.py -m meta-llama/Llama-3.2-1B --devices {} -b 1 -s 8192"
    two = run(command.format("16") + " --link 0.125", folder)
    for method, seconds in (("PP", "17.2"), ("HSDP", "39.7")):
        (row,) = [line for line in two.splitlines() if line.startswith(f"| 2 | 16 | {method} ")]
        assert f"{float(row.split('|')[10]):.1f}" == seconds
        assert f"{seconds} s" in TEXT
    one = run(command.format("8"), folder)
    (row,) = [line for line in one.splitlines() if line.startswith("| 1 | 8 | DDP ")]
    assert f"{float(row.split('|')[10]):.2f} s" in TEXT


def seconds(output: str, method: str) -> float:
    """Of a step, in the first table of tools/estimate-scaling.py."""
    rows = [line.split("|") for line in output.splitlines() if f"| {method} |" in line]
    return float(rows[0][10])


@pytest.mark.rest
def test_slow_links_and_samples(folder):
    """The other figures of the first answer: 512 samples, and where a method overtakes another."""
    choose = "tools/estimate-scaling.py --choose -m meta-llama/Llama-{} --devices {} -s 8192 "
    choose += "--link 0.125 --global-batch-size 512 --no-trace"
    for model, devices in (("3.1-8B", 8), ("3.2-1B", 8), ("3.1-8B", 16), ("3.2-1B", 16)):
        output = run(choose.format(model, devices), folder)
        (best, *_) = re.findall(r"^\|(?:[^|]*\|){9} (\d+\.\d+) \|", output, re.MULTILINE)
        assert f"{float(best):.1f} s" in TEXT
    one = "tools/estimate-scaling.py --choose -m meta-llama/Llama-3.1-70B --devices 32 -s 8192 "
    for more in ("", "--devices-per-node 32"):  # of one data centre
        assert "| 212." in run(f"{one} --no-trace {more}", folder)
    assert "212 s on the 32 GPUs of one" in " ".join(TEXT.split())
    assert "| 678.061 |" in TEXT  # three times as long
    step = (
        "tools/estimate-scaling.py -m meta-llama/Llama-{} --devices {} -b 1 -s 8192 --link 0.125 "
    )
    step += "--gradient-accumulation-steps {}"
    for model, count in (("3.1-8B", 31), ("3.2-1B", 7)):
        before, after = (run(step.format(model, 16, n), folder) for n in (count - 1, count))
        assert seconds(before, "HSDP") > seconds(before, "PP")
        assert seconds(after, "HSDP") < seconds(after, "PP")
    text = " ".join(TEXT.split())
    assert f"from {31 * 16} samples (8B) or {7 * 16} (1B) on" in text
    assert "from about 3,300 (8B)" in text  # 206 × 16
    for count, is_faster in ((200, False), (212, True)):  # one node needs twice as many
        two = seconds(run(step.format("3.1-8B", 16, count), folder), "HSDP")
        one = seconds(run(step.format("3.1-8B", 8, 2 * count), folder), "FSDP")
        assert (two < one) == is_faster


@pytest.mark.rest
def test_memory_in_the_answers(folder):
    """Figures of sentences, whose commands are not on the page."""
    bytes_on_cpus = 16 * parameters(MODELS["Llama-3.1-70B"])[0]
    assert f"1.1 TB: {bytes_on_cpus / 2 / 1e9:.0f} GB in each node" in TEXT
    choose = "tools/estimate-scaling.py --choose -m meta-llama/Llama-3.1-70B --devices 64 -s 8192 "
    output = run(choose + "--global-batch-size 256 --no-trace", folder)
    # It fits, so no line says why not. With checkpointing, it is slower than the first ten.
    assert "| tp8 pp4 dp2 |" not in output
    assert re.search(r"^\| tp8 pp8 \| 13 \| [^|]* \| no \|", output, re.MULTILINE), output
    memory = "tools/estimate-memory.py --activation-checkpointing -m meta-llama/Llama-"
    long = run(memory + "3.1-8B --devices 8 -b 1 -s 131072 --context-parallel 8", folder)
    text = " ".join(TEXT.split())
    assert f"needs {column(long, 'together', 'context parallel'):.0f} GB, traced (" in text
    card = run(memory + "2-7b-hf --devices 1 -b 1 -s 2048 --gpu-memory 24", folder)
    assert f"up to {column(card, 'largest batch', 'offload'):.0f} samples fit" in TEXT
    more = 8 * parameters(MODELS["Llama-3.1-70B"])[0] / 32
    assert f"add {more / 1e9:.0f} GB to the 61 GB of FSDP" in text
    centres = "tools/estimate-scaling.py -m meta-llama/Llama-3.1-70B --methods LOCAL -b 1 -s 8192 "
    centres += "--inner-steps 100 --devices 64 --devices-per-node 32 --link 0.03125 "
    centres += "--gradient-accumulation-steps 8 --activation-checkpointing"
    assert f"11 s per step: {seconds(run(centres, folder), 'LOCAL'):.0f} s" in TEXT
    olmoe = MIXTURES["allenai/OLMoE-1B-7B-0924"]
    limit = 3 * olmoe.num_experts * olmoe.intermediate_size // olmoe.num_experts_per_tok
    assert f"the first limit is {limit:,}" in TEXT


def column(output: str, row: str, name: str) -> float:
    """A number in the table of tools/estimate-memory.py."""
    lines = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in output.splitlines()
        if line.startswith("|")
    }
    names = [cell.strip() for cell in lines["GB per device"]]
    return float(lines[row][names.index(name)])


@pytest.mark.rest
def test_a_large_mixture_on_one_node(folder):
    """The figures on the page of chapter 12."""
    text = " ".join(page("12-expert-parallel/README.md").split())
    flags = "-m Qwen/Qwen3-30B-A3B --devices 8 -b 2 -s 4096 --activation-checkpointing"
    memory = run(f"tools/estimate-memory.py {flags} --expert-parallel 8", folder)
    scaling = run(f"tools/estimate-scaling.py {flags} --methods FSDP EP", folder)
    for method, name in (("FSDP", "FSDP"), ("EP", "expert parallel")):
        (row,) = [x for x in scaling.splitlines() if x.startswith(f"| 1 | 8 | {method} ")]
        together = column(memory, "together", name)
        efficiency = row.split("|")[-2].strip().replace("%", " %")
        assert re.search(rf"\b{together} GB\b.{{,60}} {efficiency}", text), (together, efficiency)


@pytest.mark.rest
def test_flags_of_the_command_lines(tmp_path):
    """Every flag is understood: all that is wrong is a flag added here."""
    sent = [(chapter, flags) for chapter, flags in SENT if chapter]
    assert len(sent) == 7
    for number, (chapter, flags) in enumerate(sent):
        script = CHAPTERS_BY_NUMBER[chapter[:2]]
        words = [*shlex.split(flags), "--log-freq", "none"]
        started = Run(script, words, tmp_path / str(number))
        assert started.wait() == 2
        assert "--log-freq" in started.output


def test_answers_have_at_most_150_words():
    answers, _, _ = TEXT.partition("\n## Which chapter\n")
    for answer in answers.split("\n## ")[1:]:
        words = re.sub("```.*?```", "", answer, flags=re.DOTALL).split()
        assert len(words) <= 150, (len(words), answer[:60])
