"""Models in one GGUF file, as llama.cpp writes them: the metadata as the keys of a config.json, and
the tensors, dequantized, by the names that they have in a Hugging Face directory.

The package gguf reads the file and dequantizes. Here is what it leaves open: which metadata belong
to which key of transformers, the rows of queries and keys that llama.cpp's converter reorders, the
norms from which it takes the offset, and the names of what is not read.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer.files import ConfigError, first_of
from jaxformer.interop.tensor_files import Entry, TensorFiles

if TYPE_CHECKING:
    from gguf import GGUFReader

GGUF_SUFFIX = ".gguf"
GGUF_TYPES = [
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
]
LONGEST_ARRAY = 1 << 24  # entries of metadata: no vocabulary has as many
# What is raised by values of a wrong type or size in a stranger's file.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
GGUF_EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"

# Metadata below the name of the architecture, and their keys in a config.json.
DECODER_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL_METADATA = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA3_KEYS = GEMMA_KEYS | {"rope.freq_base_swa": "rope_local_base_freq"}
# Widths that have to be that of a head, and metadata that follow from the tensors.
HEAD_WIDTHS = ("rope.dimension_count", "attention.value_length")
IMPLIED_METADATA = ("vocab_size", "rope.scaling.finetuned")
SCALING_METADATA = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
GGUF_SCALINGS = ("linear", "yarn")
# The scaling of Llama 3.1 and later, of which a file has the factor of each frequency alone.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH_NAMES = GGUF_LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class GgufArchitecture(NamedTuple):
    """How the files of one `general.architecture` are read.

    `name` and `model_type` are those of transformers. `keys` are metadata beside those of every
    decoder, `layer_names` the names of the tensors of a layer. `permuted`: the two halves of each
    head of queries and keys alternate in a file. `norm_offset` is what norms have more than in
    transformers. `largest` is the number of layers of the model that divides scores by the root of
    the width for each head; the others of its family divide by that of the width of a head (0: all,
    and no key of transformers says so).
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = {}
    layer_names: Mapping[str, str] = GGUF_LAYER_NAMES
    permuted: bool = False
    norm_offset: float = 0.0
    largest: int = 0


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3"),
    "gemma": GgufArchitecture("GemmaForCausalLM", "gemma", norm_offset=1.0),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM", "gemma2", GEMMA_KEYS, SANDWICH_NAMES, norm_offset=1.0, largest=46
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM", "gemma3_text", GEMMA3_KEYS, SANDWICH_NAMES, norm_offset=1.0, largest=62
    ),
}


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix == GGUF_SUFFIX and path.is_file()


class GgufFiles(TensorFiles):
    """The tensors of a GGUF file by their names in a Hugging Face directory; `metadata` are its own
    keys, and `values` those of the config.json that such a directory would have.

    The file is mapped into memory; a read dequantizes the rows that are asked for, as float32.
    ConfigError for an architecture, a metadata key, a tensor or a type that is not read, by name.
    """

    def __init__(self, path: Path) -> None:
        try:
            # A package of its own extra.
            from gguf import GGUFReader, GGUFValueType
        except ImportError:
            raise ConfigError(
                f"{path} needs the package gguf, which is not installed: pip install"
                " 'jaxformer[gguf]'."
            ) from None

        class BoundedReader(GGUFReader):
            """One that reads nothing beyond the end of the file, and makes no array that is longer
            than what is left of it."""

            def _get(
                self, offset: int, dtype: Any, count: int = 1, *order: Any, **keys: Any
            ) -> Any:
                if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
                    raise ValueError(f"at byte {offset} it states more than it holds")
                return super()._get(offset, dtype, count, *order, **keys)

            def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
                if raw_type == GGUFValueType.ARRAY:
                    kind = int(self._get(orig_offs, np.uint32)[0])
                    length = int(self._get(orig_offs + 4, np.uint64)[0])
                    if kind == GGUFValueType.ARRAY or length > LONGEST_ARRAY:
                        raise ValueError(
                            f"at byte {orig_offs} is an array of {length} entries of type {kind}"
                        )
                return super()._get_field_parts(orig_offs, raw_type)

        self.directory = path
        self.listing = path.name
        try:
            with np.errstate(over="ignore"):  # of a sum of offsets
                reader = BoundedReader(path)
            for tensor in reader.tensors:
                is_before = tensor.data_offset < reader.data_offset
                if is_before or tensor.data_offset % reader.alignment:
                    raise ValueError(f"{tensor.name} begins at byte {tensor.data_offset}")
            if reader.byte_order != "I":
                raise ConfigError(
                    f"{path} has the bytes of its numbers in the order of other machines."
                )
            self._read_names(reader, path)
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
        except (*MALFORMED, MemoryError) as error:
            raise ConfigError(
                f"{path} is not a valid GGUF file ({error}). Download it again."
            ) from None

    def _read_names(self, reader: "GGUFReader", path: Path) -> None:
        self.metadata = {key: field.contents() for key, field in reader.fields.items()}
        kind = self.metadata.get("general.type", "model")
        count = self.metadata.get("split.count", 1)
        architecture = self.metadata.get("general.architecture")
        if kind != "model":
            raise ConfigError(
                f"{path} has general.type={kind!r}, and only a model is read from GGUF."
            )
        if count > 1:
            raise ConfigError(
                f"{path} is one of {count} files of a model: join them with llama.cpp's"
                " llama-gguf-split --merge."
            )
        if architecture not in GGUF_ARCHITECTURES:
            raise ConfigError(
                f"{path} has general.architecture={architecture!r}; those that are read from GGUF"
                f" are {', '.join(GGUF_ARCHITECTURES)}. Where the same model is a Hugging Face"
                " directory, read that."
            )
        row = GGUF_ARCHITECTURES[architecture]
        self._tensors = {}
        unread = []
        for tensor in reader.tensors:
            name = None
            if match := GGUF_TENSOR.fullmatch(tensor.name):
                layer, stem, end = match.groups()
                names = GGUF_NAMES if layer is None else row.layer_names
                start = "" if layer is None else f"model.layers.{layer}."
                name = f"{start}{names[stem]}.{end}" if stem in names else None
            if name is None and tensor.name != ROPE_FACTORS:
                unread.append(tensor.name)
            elif tensor.tensor_type.name not in GGUF_TYPES:
                unread.append(f"{tensor.name} of type {tensor.tensor_type.name}")
            else:
                self._tensors[name or tensor.name] = tensor
        if unread:
            raise ConfigError(
                f"{path} has tensors of {architecture} that are not read: {first_of(unread)}. Types"
                f" that are read are {', '.join(GGUF_TYPES)}."
            )
        self.entries = {
            name: Entry(path.name, tuple(map(int, reversed(tensor.shape))), "F32")
            for name, tensor in self._tensors.items()
        }
        self._row = row
        self.values = self._config_keys(architecture)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        shape = self.entries[name].shape
        is_permuted = self._row.permuted and (".q_proj." in name or ".k_proj." in name)
        data = tensor.data[self._order(name, shape)[rows] if is_permuted else rows]
        if not len(data):
            return np.empty((0, *shape[1:]), np.float32)
        weights = np.asarray(dequantize(data, tensor.tensor_type), np.float32)
        return weights - self._row.norm_offset if name.endswith("norm.weight") else weights

    def _order(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """The rows of the file in the order of transformers: the first halves of the pairs that
        RoPE rotates in a head, then the second ones."""
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        heads = self.values[key]
        if shape[0] % (2 * heads):
            raise ConfigError(
                f"{self.directory}: {name} has {shape[0]} rows, which {heads} heads do not divide"
                " into pairs."
            )
        return np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _config_keys(self, architecture: str) -> dict[str, Any]:
        """The keys of the config.json that the metadata and tensors imply."""
        path = self.directory
        row = self._row
        start = f"{architecture}."
        stated = {
            key.removeprefix(start): value
            for key, value in self.metadata.items()
            if key.startswith(start)
        }
        keys = {**DECODER_KEYS, **OPTIONAL_METADATA, **row.keys}
        missing = [start + key for key in DECODER_KEYS if key not in stated]
        if missing or "model.embed_tokens.weight" not in self.entries:
            lacks = ", ".join(missing) or GGUF_EMBEDDING
            raise ConfigError(f"{path} lacks {lacks}: download it again.")
        values = {keys[key]: value for key, value in stated.items() if key in keys}
        heads = values["num_attention_heads"]
        unread = []
        if isinstance(heads, list):
            # A number for each layer.
            unread.append(f"{start}attention.head_count={str(heads)[:60]}")
            heads = 1
        head_width = values.setdefault("head_dim", values["hidden_size"] // max(1, heads))
        for key, value in stated.items():
            # Heads that are rotated in part are not read.
            is_width = key in HEAD_WIDTHS and value == head_width
            is_number = key in (*keys, *SCALING_METADATA) and not isinstance(value, list)
            if not (is_width or is_number or key in IMPLIED_METADATA):
                unread.append(f"{start}{key}={str(value)[:60]}")
        if unread:
            raise ConfigError(
                f"{path} has metadata that are not read: {first_of(unread, between=', ')}. Where"
                " the same model is a Hugging Face directory, read that."
            )
        if row.largest:
            is_largest = values["num_hidden_layers"] == row.largest
            scalar = values["hidden_size"] // heads if is_largest else head_width
            values["query_pre_attn_scalar"] = scalar
        return {
            "architectures": [row.name],
            "model_type": row.model_type,
            "vocab_size": self.entries["model.embed_tokens.weight"].shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.entries,
            "num_key_value_heads": heads,
            **values,
            "rope_scaling": self._scaling(stated, values),
        }

    def _scaling(
        self, stated: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """rope_scaling of the config.json, None where RoPE is not scaled."""
        scaling = {name: stated[key] for key, name in SCALING_METADATA.items() if key in stated}
        kind = scaling.get("rope_type", "none")
        if ROPE_FACTORS in self.entries:
            # By what each frequency is divided, as llama.cpp's converter writes it.
            factors = self.read(ROPE_FACTORS)
            del self.entries[ROPE_FACTORS]
            llama3: dict[str, Any] = LLAMA3_SCALING | {"factor": float(factors.max())}
            width = values["head_dim"]
            exponents = np.arange(0, width, 2, dtype=np.float32) / width
            wavelengths = 2 * math.pi * values.get("rope_theta", 10_000.0) ** exponents
            low = llama3["low_freq_factor"]
            high = llama3["high_freq_factor"]
            turns = llama3["original_max_position_embeddings"] / wavelengths
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            expected = 1 / ((1 - smooth) / llama3["factor"] + smooth)
            if kind == "none" and len(expected) == len(factors) and np.allclose(factors, expected):
                return llama3
            kind = f"{ROPE_FACTORS} of another scaling than that of Llama 3"
        if kind == "none":
            return None
        if kind not in GGUF_SCALINGS:
            raise ConfigError(
                f"{self.directory}: RoPE is scaled by {kind}, and scalings that are read from GGUF"
                f" are {', '.join(GGUF_SCALINGS)} and that of Llama 3."
            )
        return scaling
