"""Chapter 18 makes the updates of torch.optim.Muon and torch.optim.AdamW, from shards."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.assertions import assert_all_skip_update_3, told
from helpers.models import LLAMA, write_model
from helpers.pages import page, section
from helpers.runner import CHAPTER_18, REPOSITORY, SCRIPTS, Job, load, patches
from helpers.trainer import resume
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

CHAPTER = CHAPTER_18

# Nothing divides by 3 or 4. On 4 ranks, one has nothing of the router, which has 5 rows.
UNEVEN = LLAMA | {"hidden_size": 28, "intermediate_size": 59, "num_attention_heads": 2}
UNEVEN |= {"head_dim": 14, "num_key_value_heads": 1, "tie_word_embeddings": False}
MIXTURE = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
MIXTURE |= {"num_local_experts": 5, "num_experts_per_tok": 2}
MODELS = {"tied": LLAMA, "uneven": UNEVEN, "mixture": UNEVEN | MIXTURE}


@pytest.mark.parametrize(
    "ranks", [*(pytest.param(n, marks=pytest.mark.rest) for n in (1, 2, 3)), 4]
)
def test_bits_of_torch(tmp_path, ranks):
    """Equal gradients give equal weights, to the last bit: Newton-Schulz in bf16 and fp32, tied and
    untied, rows that do not divide, empty shards, experts, shards on the CPU."""
    folders = [write_model(tmp_path / name, **config) for name, config in MODELS.items()]
    job = Job(SCRIPTS / "muon_alone.py", folders, tmp_path / "job", ranks)
    assert job.wait() == 0, job.output
    found = re.findall(r"^differences (\S+) (\S+) (.*)$", job.output, re.MULTILINE)
    assert len(found) == ranks * len(MODELS) * 4
    for of_muon, of_adamw, case in found:
        assert float(of_muon) == 0, case
        assert float(of_adamw) < 1e-6, case  # AdamW's kernel rounds the end of a tensor otherwise


# -- The work, and the messages --------------------------------------------------------------------


def matrices_of(model: str) -> list:
    """The matrices of the layers, without memory."""
    config = load(REPOSITORY / "tools" / "models.py").load_config(model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    return [p for layer in layers for p in layer.parameters() if p.dim() == 2]


def busiest(by_owner: list, size_of) -> str:
    """The size of the busiest owner, divided by the mean."""
    sizes = [sum(map(size_of, owned)) for owned in by_owner]
    return f"{max(sizes) * len(sizes) / sum(sizes):.2f}"


def test_how_evenly():
    """The table of the record: the busiest rank on 8, 64 and 512 ranks."""
    chapter, text = load(CHAPTER_18), page("benchmarks/records/muon.md")
    for model in ("8B", "70B"):
        matrices = matrices_of(f"meta-llama/Llama-3.1-{model}")
        for ranks in (8, 64, 512):
            owners = chapter.choose_owners(matrices, ranks)
            in_turn = [matrices[rank::ranks] for rank in range(ranks)]
            cells = [busiest(owners, chapter.work_of), busiest(owners, torch.numel)]
            cells += [busiest(in_turn, chapter.work_of), owners.count([])]
            row = " | ".join(map(str, cells))
            assert f"| {ranks} | {row} |\n" in text


def test_owners_have_each_matrix_once():
    """Also with more ranks than matrices."""
    matrices = matrices_of(str(REPOSITORY / "models" / "tiny-llama"))
    for ranks in (1, 3, len(matrices) + 2):
        owners = load(CHAPTER_18).choose_owners(matrices, ranks)
        assert len(owners) == ranks
        assert sorted(id(m) for owned in owners for m in owned) == sorted(map(id, matrices))
        assert ranks <= len(matrices) or max(map(len, owners)) == 1


@pytest.mark.rest
def test_messages_and_work(train):
    """Two messages per update, in bf16, of this rank's shards and of the owned matrices. No matrix
    is made orthogonal twice, and the ranks have equally many."""
    flags = ["--max-steps", 2, "--eval-freq", 0, "--dtype", "bf16", "--ckpt-freq", 99, "-b", 2]
    run = train(*flags, before=patches("messages_of_muon"))
    # Of a layer: q, k, v, o of 32 x 32; gate, up, down of 32 x 64. Half of them on each rank.
    shards = 2 * (4 * 32 * 32 + 3 * 32 * 64) // 2
    matrices, owned = [], []
    for rank in range(2):
        words = told(run, "messages ")[rank]
        assert len(words) == 2 * 2 * 3
        there, back = words[:3], words[3:6]
        assert there[:2] == ["torch.bfloat16", str(shards)]
        assert back == ["torch.bfloat16", there[2], str(shards)]
        owned.append(int(there[2]))
        matrices.append(int(told(run, "matrices ")[rank][0]))
    assert owned == [shards, shards]
    assert matrices == [2 * 7, 2 * 7]


# -- Precision, and checkpoints --------------------------------------------------------------------


@pytest.mark.rest
def test_all_ranks_skip_an_update(train):
    """A gradient of rank 1 is infinite: nothing moves on any rank, and no rank waits."""
    flags = ["--max-steps", 5, "--eval-freq", 0, "--max-grad-norm", 0]
    run = train(*flags, before=patches("moved_parameters"), status=1)
    for rank in run.run.ranks:
        moved = re.findall(r"^moved (\d) (\d+)$", rank.output, re.MULTILINE)
        assert moved == [("1", "20"), ("2", "20"), ("3", "0")]
    assert_all_skip_update_3(run)


@pytest.mark.rest
def test_resume_on_other_ranks(train):
    """And what a checkpoint has: 4 bytes of momentum for a number of Muon, 8 for one of AdamW."""
    flags = ["--max-steps", 8, "--eval-freq", 4, "--ckpt-freq", 4, "--keep-checkpoints", 9]
    flags += ["--lr", 1e-3]
    two = ["-b", 3, "--gradient-accumulation-steps", 2]
    origin = train(*flags, *two, name="origin")
    for processes, size, accumulation in ((1, 6, 2), (3, 4, 1)):
        split = ["-b", size, "--gradient-accumulation-steps", accumulation]
        options = {"name": f"on-{processes}", "processes": processes}
        resume(origin, train, 4, *flags, *split, near=8, **options)
    metadata = dcp.FileSystemReader(origin.folder / "step-00000004").read_metadata()
    sizes = {}
    for name, tensor in metadata.state_dict_metadata.items():
        kind = name.rpartition(".")[2]
        if name.startswith("optimizer.state.") and kind != "step":
            sizes[kind] = sizes.get(kind, 0) + tensor.size.numel()
    others = 2048 * 32 + 5 * 32  # the tied embeddings and the norms
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert sizes == {"momentum": matrices, "exp_avg": others, "exp_avg_sq": others}


def test_the_estimate():
    """Llama-3.1-8B on 64 devices: bytes of both exchanges, and the time of Newton-Schulz."""
    tool = load(REPOSITORY / "tools" / "estimate-scaling.py")
    args = tool.parse_args(["--methods", "MUON", "-b", "1", "--devices", "64"])
    model, cluster = tool.load_model(args.model_name), tool.cluster_of(args, 8)
    fsdp, muon = (tool.estimate(method, model, 8, cluster, args) for method in ("FSDP", "MUON"))
    count, exchange = muon.counts["all-to-all, shards"]
    numbers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert (count, exchange.size) == (2, pytest.approx(2 * numbers / 64, rel=0.08))
    matrices = ((2, 4096, 4096), (2, 1024, 4096), (3, 4096, 14336))
    of_layer = sum(times * short**2 * (2 * long + short) for times, short, long in matrices)
    operations = 5 * 2 * 32 * of_layer
    more = muon.step - fsdp.step - 2 * exchange.time(cluster)
    assert more == pytest.approx(1.06 * operations / 64 / 400e12, rel=0.01)


@pytest.mark.rest
def test_costs(tmp_path):
    """The counted columns of the page: bytes, collectives and multiplications of four ways."""
    job = Job(SCRIPTS / "muon_costs.py", [], tmp_path / "job", 2)
    assert job.wait() == 0, job.output
    rows = re.findall(r"^update (\S+) (\d+) (\d+) (.*)$", job.output, re.MULTILINE)
    assert len(rows) == 4
    table = re.findall(r"^\| .*", section("more/18-muon/README.md", "What it costs"), re.MULTILINE)
    for (*counted, _), line in zip(rows, table[1:5], strict=True):
        _, two_ranks, _, collectives, multiplications, _, _ = line.split(" | ")
        assert counted == [two_ranks, collectives, multiplications]
