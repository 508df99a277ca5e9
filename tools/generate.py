"""Continues a prompt with a trained model.

    python tools/generate.py outputs/demo-single-gpu/final --prompt "def "
    python tools/generate.py outputs/my-run/step-00000500 --prompt "Once" --temperature 0
    python tools/generate.py Qwen/Qwen3-0.6B --prompt "The capital of France is"
    python tools/generate.py outputs/demo-chat/final --chat --prompt "What does a list do?"

The model is a run's `final/`, one of its `step-*` folders (not of chapters 14, 17, 22), or any
causal language model of Transformers, by folder or Hub id. Convert checkpoints of the format
`local` before.
"""

import argparse
import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from models import positive


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Continues a prompt with a trained model.")
    add = parser.add_argument
    add("model", help="a run's final/ or step-* folder, another folder, or a Hub id")
    add("--prompt", default="", help="the text to continue")
    add("--chat", action="store_true", help="answer, with the chat template")
    add("--template-options", type=yaml.safe_load, default={}, help="as of prepare-data.py --rows")
    add("--max-new-tokens", type=positive(int), default=200, help="[%(default)s]")
    add("--temperature", type=float, default=0.8, help="0: greedy [%(default)s]")
    add("--top-k", type=int, default=50, help="0: all tokens [%(default)s]")
    add("--seed", type=int, default=0, help="[%(default)s]")
    args = parser.parse_args()
    if min(args.temperature, args.top_k, args.seed) < 0:
        parser.error("--temperature, --top-k and --seed cannot be negative")
    return args


def refuse_parts(name: str | Path) -> None:
    """Exits for a checkpoint of chapters 14, 17 and 22, which has parts of matrices."""
    if not Path(name, "state.json").exists():
        return  # no checkpoint
    file = Path(name, "parameters.json")
    if not file.exists():
        sys.exit(f"error: {name} has no {file.name}: use the version of the scripts that wrote it")
    parameters = json.loads(file.read_text())
    for flag, chapter in {"density": 14, "lora_rank": 17}.items():
        if flag in parameters:
            parts = f"a checkpoint of chapter {chapter}, with B and A apart"
            sys.exit(f"error: {name} is {parts}: use the final/ of its run")


def load(name: str):
    """The tokenizer and the model, on the GPU if there is one. tools/perplexity.py uses it, too."""
    refuse_parts(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = load_weights(name)
    except (Exception, dcp.CheckpointException) as error:
        sys.exit(f"error: cannot load the model {name} ({error!r:.300})")
    if tokenizer.eos_token_id is None:
        sys.exit(f"error: the tokenizer of {name} has no end-of-text token")
    with suppress(OSError):  # of adapters: their own stop token is beside them
        model.generation_config = GenerationConfig.from_pretrained(name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return tokenizer, model.to(device).eval()  # no dropout


def load_weights(name: str):
    """The model on the CPU, of a Transformers folder, the Hub, or a sharded checkpoint."""
    if not Path(name, ".metadata").exists():
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
    tied = model.all_tied_weights_keys
    weights = {key: value for key, value in model.state_dict().items() if key not in tied}
    with warnings.catch_warnings(action="ignore"):  # that this is no distributed program
        dcp.load({"model": weights}, checkpoint_id=name)
    return model


def main() -> None:
    args = parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer, model = load(args.model)

    torch.manual_seed(args.seed)
    # Without a prompt the model starts a new document: after an end-of-text token.
    prompt = args.prompt or tokenizer.bos_token or tokenizer.eos_token
    if args.chat:
        # The template writes the begin-of-text token itself.
        messages = [{"role": "user", "content": args.prompt}]
        prompt = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **args.template_options
        )
    options = {"return_tensors": "pt", "add_special_tokens": not args.chat}
    inputs = tokenizer(prompt, **options).to(model.device)
    if args.prompt and inputs["input_ids"][0, -1] == tokenizer.eos_token_id:
        # Some tokenizers add an end-of-text token, and the model would begin another document.
        inputs = {name: ids[:, :-1] for name, ids in inputs.items()}
    sampling = {"do_sample": False}
    if args.temperature > 0:
        top_k = args.top_k or len(tokenizer)
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": top_k}
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    begin = inputs["input_ids"].shape[1] if args.chat else 0  # the answer alone
    print(tokenizer.decode(output[0, begin:], skip_special_tokens=True))


if __name__ == "__main__":
    main()
