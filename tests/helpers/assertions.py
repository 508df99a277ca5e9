"""What tests find in the outputs and folders of runs, and what has to be equal."""

import json
import re
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.models import write_model
from helpers.runner import load
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def assert_one_sentence(output: str, part: str) -> None:
    """The output has a single error, on one line, and that line has `part` in it."""
    assert "Traceback" not in output, output
    errors = re.findall("^(?:[a-z-]+.py: )?error: .*", output, re.MULTILINE)
    assert len(errors) == 1, output
    assert part in errors[0], output


NOT_EXACT = ("tokens_per_second", "time/", "memory/")


def exact(records: list[dict]) -> list[dict]:
    """The records without what depends on the clock and the machine."""
    return [{k: v for k, v in r.items() if not k.startswith(NOT_EXACT)} for r in records]


def final_tensors(run) -> dict:
    files = run.folder.glob("final/*.safetensors")  # chapter 21 writes several
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_model(a, b) -> None:
    a, b = final_tensors(a), final_tensors(b)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_opens(run, reference=None) -> None:
    """Transformers opens `final/`: in fp32, in bf16, and from a copy that is stored in bf16."""

    def opened(folder, dtype):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True
        )
        assert not any(report.values()), report  # no tensor is missing or left over
        with torch.no_grad():
            return model, model(torch.arange(32)[None]).logits

    final, copy = run.folder / "final", run.folder / "stored-in-bf16"
    model, logits = opened(final, "auto")
    assert model.dtype == logits.dtype == torch.float32
    if reference:
        expected = opened(reference.folder / "final", "auto")[1]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    in_bf16, logits_in_bf16 = opened(final, torch.bfloat16)
    error = (logits_in_bf16.float() - logits).norm() / logits.norm()
    assert 0 < error < 0.03
    in_bf16.save_pretrained(copy)
    stored, again = opened(copy, "auto")
    assert stored.dtype == torch.bfloat16
    assert torch.equal(again, logits_in_bf16)


def assert_same_losses(a, b, logged_steps: int, grad_norm: float = 1e-5) -> None:
    """Equal but for the order in which fp32 numbers are added up."""
    for name, tolerance in (("loss", 1e-5), ("grad_norm", grad_norm), ("eval/loss", 1e-5)):
        assert b.column(name) == pytest.approx(a.column(name), rel=tolerance), name
    for name in ("step", "epoch", "learning_rate"):
        assert b.column(name) == a.column(name), name
    assert len(a.column("loss")) == logged_steps


OFF = {"grad_norm": 3e-5}


def told(result, what: str) -> list[list[str]]:
    """What each rank has told."""
    told = [re.findall(f"^{what}(.*)$", rank.output, re.MULTILINE) for rank in result.run.ranks]
    assert all(len(lines) == 1 for lines in told), result.output
    return [lines[0].split() for lines in told]


def tensors_of(folder) -> dict:
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def assert_same_folder(one, other) -> None:
    """The same configs; the same names, shapes and values of tensors, to the last bit."""
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    for file in one.glob("*config.json"):
        assert json.loads(file.read_text()) == json.loads((other / file.name).read_text())
    a, b = tensors_of(one), tensors_of(other)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def whole_state(checkpoint) -> dict:
    """All tensors of a sharded checkpoint, read without any process group."""
    reader = dcp.FileSystemReader(checkpoint)
    saved = reader.read_metadata().state_dict_metadata
    state = {n: torch.empty(m.size) for n, m in saved.items() if hasattr(m, "size")}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same_checkpoint(a, b) -> None:
    assert json.loads((a / "state.json").read_text())["samples"] > 0
    a, b = whole_state(a), whole_state(b)
    assert a.keys() == b.keys()
    assert any(name.endswith(".exp_avg") for name in a)
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_all_skip_update_3(run) -> None:
    for rank in run.run.ranks:
        scales = re.findall(r"^scale (\d) (.*)$", rank.output, re.MULTILINE)
        assert scales[:3] == [("1", "65536.0"), ("2", "65536.0"), ("3", "32768.0")]


def worst(expected: dict, found: dict) -> tuple[float, str]:
    """The largest relative error of the gradient of a parameter, and its name."""
    assert expected.keys() == found.keys()
    largest = max(g.norm() for g in expected.values())
    errors = {}
    for name, g in expected.items():  # a bias of keys may have no gradient but rounding
        errors[name] = ((found[name] - g).norm() / max(g.norm(), 1e-5 * largest)).item()
    return max((error, name) for name, error in errors.items())


def assert_synced(output: str, names: list[str]) -> None:
    """Each folder had all of its files, on the disk, when it got its name."""
    found = re.findall(r"^named (\S+) (\w+)$", output, re.MULTILINE)
    assert found == [(name, "True") for name in names]


def said(script, check: str, ranks: int, flags: list, monkeypatch) -> str:
    """What one of so many ranks says before it ends; nothing, if flags and model are right."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    monkeypatch.setattr(sys, "argv", ["train-llm.py", *map(str, flags)])
    chapter = load(script)
    try:
        getattr(chapter, check)(chapter.parse_args())
    except SystemExit as end:
        return str(end)
    return ""


def assert_said(script, check: str, case: tuple, folder, monkeypatch) -> None:
    """A case has the number of ranks, the model, flags, and a part of the sentence, or nothing."""
    ranks, config, flags, part = case
    flags = ["-m", write_model(folder / "m", **config), "-s", 32, *flags]
    sentence = said(script, check, ranks, flags, monkeypatch)
    assert part in sentence
    assert bool(part) == bool(sentence)
