"""Chapter 11 trains what chapter 1 trains, with the tokens of each sample split over a group."""

import re

import pytest
from helpers.assertions import assert_said, assert_same_checkpoint, told
from helpers.chapters import damaged
from helpers.models import FAR_LOOKING
from helpers.runner import CHAPTER_11, patches
from helpers.trainer import resume

CHAPTER = CHAPTER_11
TOKENS = ["--exchange", "tokens"]


# -- The same training -----------------------------------------------------------------------------


@pytest.mark.rest
@pytest.mark.parametrize("exchange", ["heads", "tokens"])
def test_dropout_and_resume(train, dropout_model, exchange):
    """Ranks of a group drop other activations, and a resumed run drops the same ones."""
    flags = ["-m", dropout_model, "-b", 2, "--max-steps", 4, "--eval-freq", 4, "--ckpt-freq", 2]
    flags += ["--context-parallel", 2, "--exchange", exchange]
    options = {"processes": 4, "before": patches("seeds_and_dropout")}
    origin = train(*flags, name="origin", **options)
    seeds = [seed for rank in told(origin, "seeds ") for seed in rank]
    assert len({*seeds}) == len(seeds) == 4 * 2
    assert len({mask for (mask,) in told(origin, "dropped ")}) == 4
    same = resume(origin, train, 2, *flags, **options)
    assert told(same, "seeds ") == told(origin, "seeds ")
    assert_same_checkpoint(*(run.folder / "step-00000004" for run in (origin, same)))


@pytest.mark.rest
def test_no_mask_is_built(train, tmp_path):
    """Transformers could take distant chunks for packed documents, and build a mask for them."""
    begin = "        outputs = []\n"
    tell = {begin: begin + "        say(f'mask {mask is not None}')\n"}
    script = damaged(CHAPTER_11, tmp_path, tell)
    run = train("--max-steps", 1, "--eval-freq", 0, *TOKENS, script=script)
    assert {*re.findall("^mask (.*)$", run.output, re.MULTILINE)} == {"False"}


# -- Wrong flags -----------------------------------------------------------------------------------

LLAMA = FAR_LOOKING | {"model_type": "llama"}
MISTRAL = FAR_LOOKING | {"model_type": "mistral", "sliding_window": 8}
FREQUENCIES = {"rope_type": "longrope", "factor": 1.0, "rope_theta": 1e4}
FREQUENCIES |= {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
CHECKED = {
    "half of the tokens": (4, LLAMA, ["-s", 36], "--seq-length must be a multiple of 8"),
    "kv heads": (8, LLAMA, [], "error: 4 kv heads cannot be shared equally: use --exchange"),
    "heads": (8, {"model_type": "gpt2", "n_head": 4}, [], "error: 4 kv heads cannot"),
    "tokens for more ranks than kv heads": (8, LLAMA, TOKENS, ""),
    "a window": (2, MISTRAL, TOKENS, "above the window of 8: use --exchange heads"),
    "a window with heads": (2, MISTRAL, [], ""),
    "a window as long as a sample": (2, MISTRAL | {"sliding_window": 32}, TOKENS, ""),
    "a family": (2, {"model_type": "lfm2"}, [], "error: lfm2 is none of gpt2"),
    "frequencies": (2, LLAMA | {"rope_parameters": FREQUENCIES}, [], "use chapter 3"),
    "one rank": (1, LLAMA, ["-s", 34], ""),
}


@pytest.mark.rest
@pytest.mark.parametrize("case", CHECKED)
def test_what_is_refused(tmp_path, monkeypatch, case):
    assert_said(CHAPTER_11, "check_model", CHECKED[case], tmp_path, monkeypatch)
