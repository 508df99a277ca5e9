"""Chapter 21's weights, buffers and final/ against chapter 1's, bit for bit, for many families.

    torchrun --standalone --nproc-per-node 3 tests/helpers/scripts/families.py
    torchrun --nproc-per-node 2 tests/helpers/scripts/families.py --cpu-offload llama gpt2

Without names, these are all decoders of Transformers that chapter 3 takes and that become tiny
with the sizes below. Each gets random weights in bf16, in several files. Then it starts from these
files and from scratch, as chapter 21 and as chapter 1 start it, and is saved as both save it.
"""

import json
import logging
import shutil
import sys
import tempfile
import warnings
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.append(str(Path(__file__).resolve().parents[2]))
from helpers.runner import CHAPTERS_BY_NUMBER, load

SIZE = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZE |= {"num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0}
SIZE |= {"eos_token_id": 0, "pad_token_id": None}
# Only for configs that have these names
GROUPS = {
    32: "n_embd n_ctx d_model word_embed_proj_dim embedding_size lru_width",
    48: "ffn_dim n_inner d_ff ffn_hidden_size",
    64: "n_positions",
    100: "vocab_size_per_layer_input",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    16: "mamba_d_head mamba_head_dim chunk_size mamba_chunk_size sliding_window attention_window",
    8: "head_dim q_lora_rank kv_lora_rank v_head_dim linear_key_head_dim linear_value_head_dim"
    " global_head_dim mamba_d_state ssm_state_size index_head_dim swa_head_dim kv_channels",
    6: "num_experts num_local_experts n_routed_experts moe_num_experts",
    4: "n_head qk_rope_head_dim"
    " qk_nope_head_dim rotary_dim linear_num_value_heads num_heads laurel_rank state_size"
    " conv_kernel time_step_rank mamba_n_heads mamba_num_heads index_topk swa_num_attention_heads",
    3: "n_layer num_layers",
    2: "num_key_value_heads num_experts_per_tok linear_num_key_heads index_n_heads"
    " num_global_key_value_heads swa_num_key_value_heads num_query_groups mamba_expand",
    1: "n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups n_groups"
    " zero_expert_num moe_layer_start_index",
    0: "num_kv_shared_layers num_nextn_predict_layers",
}
MORE = {name: size for size, names in GROUPS.items() for name in names.split()}
LARGEST = 3_000_000  # parameters


def tiny_config(family: str):
    """A config of this family with these sizes. None if chapter 3 does not take it."""
    usual = AutoConfig.for_model(family)
    encodes = hasattr(type(usual), "is_decoder") and "gpt_neox" not in family
    if usual.get_text_config() is not usual or hasattr(usual, "decoder_layers"):
        return None
    values = SIZE | {name: size for name, size in MORE.items() if hasattr(usual, name)}
    if isinstance(getattr(usual, "layer_types", None), list):
        kinds = [*dict.fromkeys(usual.layer_types)][:3]
        values["layer_types"] = (kinds * 3)[:3]
    lists = [name for name in values if isinstance(getattr(usual, name, None), list | tuple)]
    for name in {*lists} - {"layer_types"}:
        del values[name]
    try:
        config = type(usual)(**values)
    except Exception:  # it makes layer_types itself
        values.pop("layer_types", None)
        config = type(usual)(**values)
    return None if encodes and not config.is_decoder else config


def tiny_configs(families) -> dict:
    """By family. Says which families are left out."""
    found = {}
    for family in families or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = tiny_config(family)
            if config is None:
                continue
            with torch.device("meta"):
                size = AutoModelForCausalLM.from_config(config).num_parameters()
            if size > LARGEST:
                raise ValueError(f"{size:,} parameters")
            found[family] = config
        except Exception as error:
            say("left out", family, f"{error!r:.100}")
    return found


def say(*words) -> None:
    if dist.get_rank() == 0:
        print(*words, flush=True)


def write(config, folder: Path) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.bfloat16().save_pretrained(folder, max_shard_size="30KB")


def same(a: dict, b: dict, what: str) -> list[str]:
    """What is wrong in `a`, if `b` is right."""
    wrong = [f"{what} {name} is only in one" for name in a.keys() ^ b.keys()]
    for name in a.keys() & b.keys():
        if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name]):
            wrong.append(f"{what} {name} differs")
    return wrong


def compare(chapter, chapter_1, folder: Path, flags: list) -> list[str]:
    """What differs from chapter 1: names of parameters, buffers, tensors of files, and settings."""
    sys.argv = ["train-llm.py", "-m", str(folder), "--seed", "5", "--dtype", "fp32", *flags]
    args = chapter.parse_args()
    plain = chapter_1.load_model(args, checkpoint=None)
    model = chapter.build_model(args, torch.device("cpu"), checkpoint=None)
    weights = {name: x.full_tensor().detach() for name, x in model.named_parameters()}
    wrong = same(weights, {name: x.detach() for name, x in plain.named_parameters()}, "weight")
    wrong += same(dict(model.named_buffers()), dict(plain.named_buffers()), "buffer")

    content = {"model": chapter.dcp_state.get_model_state_dict(model)}
    chapter.dcp.save(content, checkpoint_id=folder / "checkpoint")
    final, expected = folder / "final", folder / "expected"
    if dist.get_rank() == 0:
        model.save_pretrained(final, state_dict={})
    dist.barrier()
    chapter.save_layers(model, folder / "checkpoint", final)
    if dist.get_rank() == 0:
        plain.save_pretrained(expected)
        wrong += same(tensors_of(final), tensors_of(expected), "tensor of final/")
        wrong += [f"{name} differs" for name in settings(final) ^ settings(expected)]
        again, found = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
        wrong += [f"final/ lacks {name}" for name in found["missing_keys"]]
        wrong += same(again.state_dict(), plain.state_dict(), "reopened")
    dist.barrier()
    return wrong


def tensors_of(folder: Path) -> dict:
    return {n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}


def settings(folder: Path) -> set[tuple]:
    files = [folder / "config.json", folder / "generation_config.json"]
    return {(x.name, json.dumps(json.loads(x.read_text()))) for x in files if x.exists()}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable()  # of configs that do not take some size
    transformers.logging.disable_progress_bar()
    chapter, chapter_1 = (load(CHAPTERS_BY_NUMBER[number]) for number in ("21", "01"))
    chapter.say = lambda message: None
    dist.init_process_group("gloo")
    families = [name for name in sys.argv[1:] if not name.startswith("-")]
    flags = [flag for flag in sys.argv[1:] if flag.startswith("-")]
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    equal = 0
    configs = tiny_configs(families)
    for family, config in configs.items():
        for start in ("pretrained", "from scratch"):
            folder = Path(shared[0], family)
            if dist.get_rank() == 0:
                write(config, folder)
            dist.barrier()
            try:
                more = ["--from-scratch"] if start == "from scratch" else []
                found = compare(chapter, chapter_1, folder, [*flags, *more])
            except SystemExit as end:
                found = [f"ends: {end}"]
            except Exception as error:
                found = [f"{error!r:.300}"]
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, found)
            found = [*dict.fromkeys(chain(*of_ranks))]
            equal += not found
            say("same" if not found else "OTHER", family, start, *found[:4])
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
    say(f"{equal} of {2 * len(configs)} starts are the same")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
