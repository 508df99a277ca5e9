"""Chapter 3 trains what chapter 1 trains, with every rank holding its share of it and no more."""

import json
import re
import shutil

import pytest
import torch
from helpers.assertions import (
    OFF,
    assert_all_skip_update_3,
    assert_one_sentence,
    assert_same_checkpoint,
    assert_same_folder,
    assert_same_losses,
    exact,
    tensors_of,
    told,
)
from helpers.models import CONVERTED_MODELS, CONVERTED_SIZE, LLAMA, save_weights, write_model
from helpers.runner import CHAPTER_3, in_step, patches
from helpers.trainer import resume
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

pytestmark = pytest.mark.rest

CHAPTER = CHAPTER_3


@pytest.mark.parametrize(("flag", "gathers", "scatters"), [("", 6, 3), ("no-", 1, 1)])
def test_collectives_with_three_micro_batches(train, tmp_path, flag, gathers, scatters):
    """How often a layer is gathered, and its gradients are scattered: exercise 3, in step 2."""
    layers = 2
    folder = write_model(tmp_path / "model", **LLAMA | {"num_hidden_layers": layers})
    layer = AutoModel.from_config(AutoConfig.from_pretrained(folder)).layers[0]
    size = sum(4 * p.numel() for p in layer.parameters())  # bytes in fp32
    flags = ["-m", folder, "-b", 2, "--gradient-accumulation-steps", 3, "--max-steps", 2]
    flags += ["--dtype", "fp32", "--eval-freq", 0, f"--{flag}reshard-after-forward"]
    done = train(*flags, before=patches("collectives"))
    for rank in done.run.ranks:
        (seen,) = re.findall("^seen (.*)", rank.output, re.MULTILINE)
        seen = json.loads(seen)
        assert seen[f"all-gather {size}"] == layers * gathers
        assert seen[f"reduce-scatter {size}"] == layers * scatters


def test_bf16_is_gathered_and_fp32_is_reduced(trainer, train, pretrained):
    """A sum of bf16 numbers in bf16 would lose digits, and more of them on more ranks."""
    flags = ["-m", pretrained, "--no-from-scratch", "--max-steps", 3, "--eval-freq", 0]
    flags += ["--dtype", "bf16"]
    ddp = trainer(*flags, "-b", 4, name="ddp", processes=2)
    fsdp = train(*flags, "-b", 4, name="fsdp", before=patches("types_of_messages"))
    assert fsdp.column("loss") == pytest.approx(ddp.column("loss"), rel=5e-3)
    assert told(fsdp, "reduce_scatter ") == [["torch.float32"]] * 2
    assert told(fsdp, "all_gather ") == [["torch.bfloat16"]] * 2
    for shares in told(fsdp, "bf16 numbers "):
        assert len(shares) == 3
        assert max(map(float, shares)) < 0.5


# A name of the Hub, which Transformers merges with others when it reads them
HUB_NAMES = {"mixtral": {"model.layers.1.block_sparse_moe.experts.3.w1.weight"}}


@pytest.mark.parametrize("family", CONVERTED_MODELS)
def test_families_from_scratch_and_pretrained(trainer, train, family, tmp_path):
    """As chapter 1 to the last place of a random weight, on 3 ranks, which divide nothing here.

    Transformers renames tensors of the first family, merges tensors of the second, and transposes
    matrices of the third one. Other families: test_matrix.py
    """
    folder = write_model(tmp_path / "model", model_type=family, **CONVERTED_MODELS[family])
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    flags = ["--max-steps", 3, "--lr", 1e-3]
    single = trainer(*flags, "-m", folder, "-b", 6, name="single")
    file = tmp_path / "logits"
    options = {"processes": 3, "before": patches("shards"), "env": {"LOGITS": str(file)}}
    fsdp = train(*flags, "-m", folder, "-b", 2, name="fsdp", **options)
    assert_same_losses(single, fsdp, 3, **OFF)

    # From scratch, chapter 1 ignores this file, so it is not in final/
    generation = [run.folder / "final" / "generation_config.json" for run in (single, fsdp)]
    assert "max_new_tokens" not in generation[0].read_text()
    assert generation[0].read_text() == generation[1].read_text()

    # What final/ holds is the sharded model, which is chapter 1's, also by the names of tensors
    names = [tensors_of(run.folder / "final").keys() for run in (single, fsdp)]
    assert names[0] == names[1]
    final = AutoModelForCausalLM.from_pretrained(fsdp.folder / "final").eval()
    with torch.no_grad():
        logits = final(torch.arange(32)[None] * 7).logits
    torch.testing.assert_close(logits, torch.load(file))
    expected = AutoModelForCausalLM.from_pretrained(single.folder / "final")
    saved, expected_config = final.config.to_dict(), expected.config.to_dict()
    differ = dict.fromkeys(["_name_or_path", "architectures"])  # this config.json names no class
    assert saved | differ == expected_config | differ
    for a, b in zip(final.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

    # It is trained further, from one file; and from many, in bf16, without the head's prefix
    many = tmp_path / "many"
    head = AutoModel if family == "gpt2" else AutoModelForCausalLM
    weights = head.from_pretrained(fsdp.folder / "final", dtype=torch.bfloat16)
    weights.save_pretrained(many, max_shard_size="20KB")
    (many / "generation_config.json").write_text('{"max_new_tokens": 7}')
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, many)
    assert len([*many.glob("*.safetensors")]) > 2
    for number, source in enumerate((fsdp.folder / "final", many)):
        flags = ["-m", source, "--no-from-scratch", "--max-steps", 1, "--lr", 0]
        small = patches("small_files") if source == many else ""
        single = trainer(*flags, "-b", 6, name=f"single-{number}", before=small)
        before = small + patches("shards")
        fsdp = train(*flags, "-b", 3, name=f"fsdp-{number}", before=before)
        assert_same_losses(single, fsdp, 1, **OFF)
        # A learning rate of 0 leaves the weights that were read
        assert_same_folder(single.folder / "final", fsdp.folder / "final")
        assert HUB_NAMES.get(family, set()) <= tensors_of(fsdp.folder / "final").keys()
    index = json.loads((fsdp.folder / "final" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(fsdp.folder / "final").keys()
    for name in ("final", "step-00000001"):
        generation = json.loads((fsdp.folder / name / "generation_config.json").read_text())
        assert generation["max_new_tokens"] == 7


def test_final_has_the_prefix_of_the_files(trainer, train, tmp_path):
    """A text model in the files of a model with images: chapter 1 keeps their names of weights."""
    shape = CONVERTED_SIZE | {
        "model_type": "qwen3_5_text",
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    folder = write_model(tmp_path / "model", **shape, layer_types=["full_attention"] * 2)
    save_weights(folder, torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors = {n.replace("model.", "model.language_model.", 1): x for n, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    flags = ["-m", folder, "--no-from-scratch", "--lr", 1e-3]
    for steps in (1, 2):
        single = trainer(*flags, "--max-steps", steps, "-b", 4, name="single")
        fsdp = train(*flags, "--max-steps", steps, "-b", 2, name="fsdp")
        assert_same_losses(single, fsdp, steps, **OFF)
        assert tensors_of(single.folder / "final").keys() == tensors.keys()
        finals = [AutoModelForCausalLM.from_pretrained(r.folder / "final") for r in (single, fsdp)]
        for a, b in zip(finals[0].parameters(), finals[1].parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert "Continuing from" in fsdp.output


def test_only_rank_0_holds_the_whole_model(train, tmp_path):
    """In CPU memory, while it is loaded. The other ranks never have more than their shards."""
    shape = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24}
    folder = write_model(tmp_path / "large", **shape | {"num_attention_heads": 8})
    save_weights(folder, torch.bfloat16, max_shard_size="60MB")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    whole = 4 * model.num_parameters()
    assert whole > 400e6
    flags = ["-m", folder, "-b", 1, "--no-from-scratch"]
    result = train(*flags, processes=4, before=patches("loading_peak"))
    for (taken,) in told(result, "loading took")[1:]:
        print(f"{int(taken) / whole:.2f} of the model")
        assert whole / 4 < int(taken) < whole / 2


def test_resume_on_any_number_of_ranks(train, dropout_model):
    """The losses of an undisturbed run; on as many ranks everything, bit for bit."""
    flags = ["--max-steps", 12, "--eval-freq", 6, "--ckpt-freq", 4, "--keep-checkpoints", 9]
    flags += ["--log-freq", 3]
    two = ["-b", 3, "--gradient-accumulation-steps", 2]
    origin = train(*flags, *two, name="origin")
    for processes, size, accumulation in ((1, 6, 2), (3, 4, 1), (4, 3, 1)):
        split = ["-b", size, "--gradient-accumulation-steps", accumulation]
        options = {"name": f"on-{processes}", "processes": processes}
        # 4 and 8 are logged because they are saved
        resume(origin, train, 4, *flags, *split, near=6, **options)

    flags += ["-m", dropout_model, *two]
    origin = train(*flags, name="dropout")
    resumed = resume(origin, train, 4, *flags, name="same")
    for name in ("step-00000008", "step-00000012"):
        assert_same_checkpoint(resumed.folder / name, origin.folder / name)
    # Another decay is applied. Chapter 1: test_resume.py
    decay = 'print("decay", *[g["weight_decay"] for g in arguments[0].param_groups])'
    flags += ["--max-steps", 13, "--weight-decay", 0.5]
    resumed = train(*flags, name="same", before=in_step(1, decay))
    assert "note: weight_decay was 0.01, and is 0.5 now" in resumed.output
    assert "decay 0.5 0.0" in resumed.output
    origin = train(*flags, name="dropout")
    assert exact(resumed.records) == exact(origin.records)


def test_a_rank_that_does_not_see_the_folder(train):
    """Say rank 1 is on a node with a disk of its own: the run ends at the first save."""
    before = "import os, pathlib\nif os.environ['RANK'] == '1':\n"
    before += "    there = os.path.exists\n"
    before += (
        "    pathlib.Path.exists = lambda p: not p.name.startswith('incomplete') and there(p)\n"
    )
    run = train("--max-steps", 2, "--ckpt-freq", 1, before=before, status=1)
    assert_one_sentence(run.output, "error: not all ranks see")
    assert run.checkpoints == []


def test_a_gradient_scaler_sees_all_shards(train):
    """Scaling changes nothing, and a step that one rank must skip is skipped by all."""
    flags = ["--max-steps", 5, "--eval-freq", 0, "--max-grad-norm", 0]
    plain = train(*flags, "--max-steps", 2, name="plain")
    scaled = train(*flags, name="scaled", before=patches("infinite_gradient"), status=1)
    assert scaled.column("loss")[:1] == plain.column("loss")[:1]
    assert_all_skip_update_3(scaled)
