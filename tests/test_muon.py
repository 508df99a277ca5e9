"""Chapter 18 makes the updates of torch.optim.Muon and torch.optim.AdamW, from shards."""

import re

import pytest
from conftest import (
    LLAMA,
    write_model,
)
from runner import CHAPTER_1, CHAPTER_18, REPOSITORY, Job

ADAMW = "torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.adam_beta2), fused=True)"


def with_torch_muon(folder):
    """A copy of chapter 1 with torch.optim.Muon and AdamW, in one process."""
    source = CHAPTER_1.read_text()
    assert source.count(f"optimizer = {ADAMW}\n") == 1
    script = folder / "with-torch-muon" / "train-llm.py"
    script.parent.mkdir(exist_ok=True)
    instead = "torch_muon.AdamWAndMuon(model, args.lr, args.adam_beta2, args.weight_decay)"
    source = source.replace(ADAMW, instead)
    script.write_text(source.replace("\nimport torch\n", "\nimport torch\nimport torch_muon\n"))
    return script


MUON = {"script": CHAPTER_18}

# Nothing divides by 3 or 4. On 4 ranks, one has nothing of the router, which has 5 rows.
UNEVEN = LLAMA | {"hidden_size": 28, "intermediate_size": 59, "num_attention_heads": 2}
UNEVEN |= {"head_dim": 14, "num_key_value_heads": 1, "tie_word_embeddings": False}
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
MIXTURE |= {"num_local_experts": 5, "num_experts_per_tok": 2}
MODELS = {"tied": LLAMA, "uneven": UNEVEN, "mixture": UNEVEN | MIXTURE}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.rest), 3, 4])
def test_bits_of_torch(tmp_path, ranks):
    """Equal gradients give equal weights, to the last bit: Newton-Schulz in bf16 and fp32, tied and
    untied, rows that do not divide, empty shards, experts, shards on the CPU."""
    folders = [write_model(tmp_path / name, **config) for name, config in MODELS.items()]
    job = Job(REPOSITORY / "tests" / "muon_alone.py", folders, tmp_path / "job", ranks)
    assert job.wait() == 0, job.output
    found = re.findall(r"^differences (\S+) (\S+) (.*)$", job.output, re.MULTILINE)
    assert len(found) == ranks * len(MODELS) * 4
    for of_muon, of_adamw, case in found:
        assert float(of_muon) == 0, case
        assert float(of_adamw) < 1e-6, case  # AdamW's kernel rounds the end of a tensor otherwise
