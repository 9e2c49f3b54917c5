"""Small GGUF files, written by the package gguf from random models of transformers as llama.cpp's
converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from pretrained import perturbed
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, doesn't it? 12345 and 6",
    "def f(x):\n        return x_1 + x_2\r\n\n  Grüße aus Köln für 你好 🙂",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
GEMMAS = ("gemma2", "gemma3")


def tiny(architecture: type, seed: int = 0, **settings: Any) -> torch.nn.Module:
    """A random model of two layers, whose widths K-quants divide."""
    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        vocab_size=400,
    )
    config = architecture.config_class(**sizes | settings)
    config._attn_implementation = "eager"
    with torch.device("cpu"):
        return perturbed(architecture(config), seed + 1)


def written(
    path: Path,
    architecture: str,
    model: torch.nn.Module,
    types: Mapping[str, str] = {},
    metadata: Mapping[str, Any] = {},
    tokenizer: str = "gpt2",
    pre: str = "qwen2",
    changed: Mapping[str, Any] = {},
) -> Path:
    """The file of a model, with `changed` metadata. `types` are those of tensors by their GGUF
    names, else F32; K-quants get random blocks, which the package cannot make of numbers."""
    known = architecture if architecture != "exaone" else "llama"
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, model.config)
    _write_tokenizer(writer, tokenizer, pre, model.config.vocab_size, architecture)
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        kind = gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind
        writer.add_key_value(key, value, kind)
    for key, value in changed.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)
    tensors = gguf_tensors(known, model)
    if hasattr(model, "rope_factors"):
        tensors["rope_freqs.weight"] = model.rope_factors
    for name, array in tensors.items():
        kind = gguf.GGMLQuantizationType[types.get(name, "F32")]
        writer.add_tensor(name, _stored(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(architecture: str, model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The tensors by their names in GGUF, as llama.cpp's converter changes them."""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    config, names = model.config, gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        projection = name.split(".")[-2]
        if architecture == "llama" and projection in heads:
            count = getattr(config, heads[projection])
            array = array.reshape(count, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        if architecture in ("gemma", *GEMMAS) and name.endswith("norm.weight"):
            array = array + 1
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def _stored(array: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    try:
        return gguf.quantize(np.ascontiguousarray(array), kind)
    except NotImplementedError:
        shape = gguf.quant_shape_to_byte_shape(array.shape, kind)
        # As float16, two such bytes are at most 0.13.
        return np.random.default_rng(array.size).integers(0, 0x30, shape).astype(np.uint8)


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None)
    width = head_dim or config.hidden_size // config.num_attention_heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    rope = config.rope_parameters
    writer.add_rope_freq_base(float(rope.get("full_attention", rope)["rope_theta"]))
    if writer.arch in GEMMAS:
        writer.add_sliding_window(config.sliding_window)
        caps = {"attn": config.attn_logit_softcapping, "final": config.final_logit_softcapping}
        for name, cap in caps.items():
            if cap:
                getattr(writer, f"add_{name}_logit_softcapping")(cap)
    else:
        writer.add_rope_dimension_count(width)


def _write_tokenizer(
    writer: gguf.GGUFWriter, kind: str, pre: str, size: int, architecture: str
) -> None:
    """A vocabulary trained on a text, filled up with unused tokens."""
    tokens, merges = trained_vocabulary(kind)
    types = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))
    tokens += [f"<unused{index}>" for index in range(size - len(tokens))]
    types += [5] * (size - len(types))
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges(merges)
    else:
        writer.add_token_scores([float(-index) for index in range(size)])
        writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


def trained_vocabulary(kind: str) -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges."""
    backend = Tokenizer(models.BPE())
    byte_level = kind == "gpt2"
    if byte_level:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), SPECIAL
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        alphabet, special = [], [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=360, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    vocab = backend.get_vocab()
    merges = json.loads(backend.to_str())["model"]["merges"]
    return sorted(vocab, key=vocab.__getitem__), [" ".join(pair) for pair in merges]
