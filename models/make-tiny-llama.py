"""Makes `models/tiny-llama/`: config and tokenizer of a Llama of a million parameters, no weights.

    python models/make-tiny-llama.py [--output-dir DIR]

The tokenizer is a byte-level BPE trained on the source of the Python standard library, the text
that `--demo` trains on. The folder in the repository was made with Python 3.11.7 and the versions
in `constraints.txt`, and those reproduce it byte for byte. Another Python has another standard
library, and so another tokenizer.
"""

import argparse
import json
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

REPOSITORY = Path(__file__).resolve().parents[1]
END_OF_TEXT = "<|endoftext|>"  # token 0: special tokens come first
VOCAB_SIZE = 2048

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "use_cache": True,
}

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
}


def train_tokenizer(files: list[Path]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens: any text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=REPOSITORY / "models" / "tiny-llama")
    args = parser.parse_args()

    # Modules that begin with a letter: `_sysconfigdata_*.py` differs from machine to machine.
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    # Written by hand, not by `save_pretrained`, which adds the version of Transformers.
    for name, content in [("config", CONFIG), ("tokenizer_config", TOKENIZER_CONFIG)]:
        path = args.output_dir / f"{name}.json"
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(files)
    path = args.output_dir / "tokenizer.json"
    path.write_text(tokenizer.to_str() + "\n", encoding="utf-8")
    print(f"{args.output_dir}: {tokenizer.get_vocab_size()} tokens from {len(files)} files")


if __name__ == "__main__":
    main()
