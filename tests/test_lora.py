"""Chapter 17 keeps no more than A and B need. PEFT opens what it has trained."""

import json
import re
import shutil
import sys
from types import SimpleNamespace

import peft
import pytest
import torch
from helpers.assertions import assert_same_model, exact, whole_state
from helpers.chapters import damaged
from helpers.models import DEMO_TEMPLATE, write_weights
from helpers.plain_loops import flags_for
from helpers.runner import CHAPTER_17, load, patches
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

README = CHAPTER_17.with_name("README.md").read_text()
# Transformers does not save a changed config of this kind, since it lacks `do_sample`.
SAMPLING = {"temperature": 0.9, "top_p": 0.6}


@pytest.fixture(scope="module")
def lora():
    return load(CHAPTER_17)


def test_the_demo_names_the_demo_before_it(lora, monkeypatch):
    monkeypatch.setitem(lora.DEMO, "model_name", "none")
    monkeypatch.setattr(sys, "argv", ["train-llm.py", "--demo"])
    with pytest.raises(SystemExit, match="first run the demo of chapter 3"):
        lora.parse_args()


def test_what_is_refused(lora, tmp_path, monkeypatch):
    base = write_weights(tmp_path / "base", "llama")
    monkeypatch.setattr(sys, "argv", ["train-llm.py", "-m", str(base), "--from-scratch"])
    with pytest.raises(SystemExit, match="adapters need pretrained weights"):
        lora.parse_args()
    (base / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", sys.argv[:3])
    with pytest.raises(SystemExit, match="has adapters: first merge them"):
        lora.parse_args()
    (base / "adapter_config.json").unlink()
    monkeypatch.chdir(tmp_path)
    for targets, sentence in {
        "none": "error: --lora-targets none: Target modules none not found",
        "[": "error: --lora-targets [: unterminated character set",
        ".*embed_tokens": "error: --lora-targets: embeddings, and a head tied to them",
        ".*(q_proj|lm_head)": "error: --lora-targets: embeddings, and a head tied to them",
    }.items():
        args = SimpleNamespace(lora_rank=2, lora_alpha=2, lora_targets=targets, seed=0)
        args.model_name = "base"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        with pytest.raises(SystemExit, match=re.escape(sentence)):
            lora.add_adapters(model, args)
    args.lora_targets = ".*q_proj"
    lora.add_adapters(model := AutoModelForCausalLM.from_pretrained(base), args)
    assert model.peft_config["default"].base_model_name_or_path == str(base)

    # The hash of a base is that of a copy, and changes with one matrix.
    before = lora.hash_of_base(base)
    assert lora.hash_of_base(shutil.copytree(base, tmp_path / "copy")) == before
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(weights, base / "model.safetensors", {"format": "pt"})  # of the same size
    assert lora.hash_of_base(base) != before


def python_of_the_readme(begin: str, run) -> str:
    """A block of code, for this run's folder."""
    [code] = re.findall(f"^```python\n({begin}.*?)^```", README, re.DOTALL | re.MULTILINE)
    return code.replace("outputs/mine", str(run.folder))


def assert_opens(run, base) -> None:
    """PEFT, Transformers and the merged copy of the README compute the same logits."""
    ids = torch.arange(40)[None] * 5
    final = run.folder / "final"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = model(ids).logits
    expected = peft.PeftModel.from_pretrained(model, final)(ids).logits
    assert (expected - without).abs().max() > 1e-3
    names = {}
    exec(python_of_the_readme("from transformers", run), names)
    torch.testing.assert_close(names["model"](ids).logits, expected)
    exec(python_of_the_readme("import torch", run), {})
    merged = AutoModelForCausalLM.from_pretrained(run.folder / "merged")
    torch.testing.assert_close(merged(ids).logits, expected)
    for folder in (final, run.folder / "merged"):
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings == settings | SAMPLING | {"eos_token_id": [5, 0]}
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "merged")
    assert tokenizer.chat_template == DEMO_TEMPLATE.read_text()


@pytest.mark.rest
def test_types_bytes_and_final(trainer, tmp_path, rows_of_conversations):
    base = write_weights(tmp_path / "llama", "llama")
    (base / "generation_config.json").write_text(json.dumps(SAMPLING | {"eos_token_id": 5}))
    flags = [*flags_for(base, rows_of_conversations()), "--lr", 1e-3, "--dtype", "bf16"]
    flags += ["-b", 2, "--gradient-accumulation-steps", 3, "--max-steps", 6, "--eval-freq", 3]
    flags += ["--ckpt-freq", 3, "--keep-checkpoints", 9]

    def train(name, script=CHAPTER_17):
        return trainer(
            *flags, name=name, script=script, processes=2, before=patches("bytes_of_adapters")
        )

    run = train("run")
    adapters = load_file(run.folder / "final" / "adapter_model.safetensors")
    count = sum(x.numel() for x in adapters.values())
    weights = load_file(base / "model.safetensors")
    root = sum(x.numel() for name, x in weights.items() if ".layers." not in name)
    layers = sum(x.numel() for x in weights.values()) - root
    # Layers are gathered twice in bf16, and the root, with the tied embeddings, once. The first
    # step also has the probe of chapter 16, and the step after an evaluation has its passes.
    sent = 3 * (4 * layers + 8 * count + 2 * root)
    for rank in run.run.ranks:
        steps = re.findall(r"^step (\d+) (\d+) (torch.*)$", rank.output, re.MULTILINE)
        assert len(steps) == 6
        assert {kinds for _, _, kinds in steps} == {"torch.bfloat16 torch.float32"}
        assert {int(moments) for _, moments, _ in steps} == {8 * count // 2}
        assert {int(steps[n][0]) for n in (1, 2, 4, 5)} == {sent}

    names = [n for n in whole_state(run.folder / "step-00000003") if n.startswith("model.")]
    assert len(names) == len(adapters)
    assert all(".lora_" in name for name in names)
    # Frozen weights in fp32 give the same numbers, if A begins with the same rounded ones.
    options = 'options = {"dtype": DTYPES[args.dtype], "attn_implementation": args.attention}\n'
    in_fp32 = options.replace("DTYPES[args.dtype]", "torch.float32")
    next_lines = ("    with torch.device", "    if args.from_scratch")  # in two functions
    whole = {options + line: in_fp32 + line for line in next_lines}
    whole["parameter.data.float()"] = "parameter.data.bfloat16().float()"
    in_fp32 = train("fp32", damaged(CHAPTER_17, tmp_path, whole))
    assert exact(in_fp32.records) == exact(run.records)
    assert_same_model(in_fp32, run)
    assert_opens(run, base)


def test_what_a_merge_in_bf16_loses():
    """The table of the README."""
    rows = re.findall(r"^\| (0\.\d+) of W \| (\d+)% \|$", README, re.MULTILINE)
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(1024, 1024)).bfloat16().float()
    change = torch.randn(1024, 16) @ torch.randn(16, 1024)
    change *= weights.norm() / change.norm()
    for size, lost in rows:
        scaled = float(size) * change
        error = (weights + scaled).bfloat16().float() - weights - scaled
        assert 100 * error.norm() / scaled.norm() == pytest.approx(float(lost), abs=1)
    assert len(rows) == 3
