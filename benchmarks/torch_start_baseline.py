"""The transformers side of the comparison of starts: `make` writes a model of random weights with
a tokenizer, `write` is the script that a user would have, from the import to the text."""

import argparse
from pathlib import Path
from typing import Any

NEW_TOKENS = 8


def make(directory: Path, shape: dict[str, Any]) -> None:
    """A Llama of a shape in the files of Hugging Face, with a tokenizer of bytes."""
    import tokenizers
    import torch
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<|endoftext|>"])}
    bytes_only = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bytes_only.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = tokenizers.decoders.ByteLevel()
    end = {"eos_token": "<|endoftext|>"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, **end, clean_up_tokenization_spaces=False
    ).save_pretrained(directory)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(tie_word_embeddings=True, **shape)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def write(directory: Path, prompt: str) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tokens = tokenizer(prompt, return_tensors="pt")
    made = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(tokenizer.decode(made[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("make", "write"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prompt", default="Once upon a time")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    for name in (*sizes, "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
        parser.add_argument(f"--{name}", type=int, default=0)
    options = vars(parser.parse_args())
    action, directory, prompt = (options.pop(name) for name in ("action", "directory", "prompt"))
    if action == "make":
        make(directory, options)
    else:
        write(directory, prompt)


if __name__ == "__main__":
    main()
