"""Models in one GGUF file, as llama.cpp writes them: the metadata as the keys of a config.json, and
the tensors, dequantized, by the names that they have in a Hugging Face directory.

The package gguf dequantizes. Here are the head of the file, which metadata belong to which key of
transformers, the rows of queries and keys that llama.cpp's converter reorders, the norms from which
it takes the offset, and the names of what is not read.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxformer.files import ConfigError, first_of
from jaxformer.interop.tensor_files import Entry, TensorFiles

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

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
GGUF_VERSIONS = (2, 3)
# Types of metadata, by which `struct` and numpy name numbers too.
NUMBER_KINDS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT_KIND = 8
ARRAY_KIND = 9
ROWS_AT_A_TIME = 128
LONGEST_ARRAY = 1 << 24  # entries of metadata: no vocabulary has as many
# What is raised by values of a wrong type or size in a stranger's file.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)
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
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",
}
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
GGUF_TENSOR = re.compile(r"(blk\.\d+\.)?(\w+)(\.weight|\.bias)")
# The keys of the heads whose two halves alternate in the rows of a module, as by llama.cpp's
# converter of Llama.
ALTERNATING_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


class GgufArchitecture(NamedTuple):
    """How the files of one `general.architecture` are read.

    `name` and `model_type` are those of transformers. `keys` are metadata beside those of every
    decoder, `layer_names` the names of the tensors of a layer. `alternating` are modules whose rows
    have another order. `norm_offset` is what norms have more than in transformers. `largest` is the
    number of layers of the model that divides scores by the root of the width for each head; the
    others of its family divide by that of the width of a head (0: all, and no key of transformers
    says so).
    """

    name: str
    model_type: str
    keys: Mapping[str, str] = {}
    layer_names: Mapping[str, str] = GGUF_LAYER_NAMES
    alternating: Mapping[str, str] = {}
    norm_offset: float = 0.0
    largest: int = 0


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", alternating=ALTERNATING_HEADS),
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


class StoredTensor(NamedTuple):
    """A tensor of a file: its shape in transformers, the type of its numbers, and their bytes,
    uint8 [..., blocks of a row, bytes of a block]. A block of most types is one number."""

    shape: tuple[int, ...]
    kind: "GGMLQuantizationType"
    data: np.ndarray


class GgufHead:
    """What a GGUF file says before its numbers: the `metadata` by their keys, and the `tensors` by
    their names. Raises one of MALFORMED for what is none, or states more than it holds."""

    def __init__(self, content: mmap.mmap) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self.content = content
        self.at = 4
        if content[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("I")
        if version not in GGUF_VERSIONS:
            # Also where the bytes of all numbers are in the order of other machines.
            raise ValueError(f"its version is {version}, and those that are read are 2 and 3")
        tensor_count = self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(self._number("Q")):
            key = self._text()
            if key in self.metadata:
                raise ValueError(f"it has {key} twice")
            self.metadata[key] = self._value(self._number("I"))
        alignment = self.metadata.get("general.alignment", 32)
        described: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name = self._text()
            if name in described:
                raise ValueError(f"it has the tensor {name} twice")
            axes = self._take(f"{self._number('I')}Q")
            described[name] = (axes[::-1], self._number("I"), self._number("Q"))
        start = -(-self.at // alignment) * alignment
        self.tensors: dict[str, StoredTensor] = {}
        for name, (shape, number, offset) in described.items():
            kind = GGMLQuantizationType(number)
            block, block_bytes = GGML_QUANT_SIZES[kind]
            is_whole = shape[-1] % block == 0 and (block == 1 or len(shape) > 1)
            if offset % alignment or not is_whole:
                raise ValueError(f"{name}: its {shape} numbers begin at byte {offset}")
            stored = (*shape[:-1], shape[-1] // block, block_bytes)
            data = np.frombuffer(content, np.uint8, math.prod(stored), start + offset)
            self.tensors[name] = StoredTensor(shape, kind, data.reshape(stored))

    def _take(self, form: str) -> tuple[Any, ...]:
        """The next numbers, which `struct` describes."""
        found = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found

    def _number(self, form: str) -> Any:
        return self._take(form)[0]

    def _text(self) -> str:
        end = self._number("Q") + self.at
        if end > len(self.content):
            raise ValueError(f"a text at byte {self.at} ends at byte {end}")
        found = self.content[self.at : end]
        self.at = end
        return found.decode()

    def _value(self, kind: int) -> Any:
        if kind == TEXT_KIND:
            return self._text()
        if kind != ARRAY_KIND:
            return self._number(NUMBER_KINDS[kind])
        entry, length = self._take("IQ")
        if length > LONGEST_ARRAY:
            raise ValueError(f"an array of {length} entries before byte {self.at}")
        if entry == TEXT_KIND:
            return [self._text() for _ in range(length)]
        return [*self._take(f"{length}{NUMBER_KINDS[entry]}")]


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
            # A package of its own extra. Its reader is not used: it takes 3.4 s for the vocabulary
            # of SmolLM2 instead of 0.06 s, and makes room for whatever a stranger's file states.
            import gguf  # noqa: F401
        except ImportError:
            raise ConfigError(
                f"{path} needs the package gguf, which is not installed: pip install"
                " 'jaxformer[gguf]'."
            ) from None
        self.directory = path
        self.listing = path.name
        try:
            with path.open("rb") as file:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_names(GgufHead(content), path)
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
        except (*MALFORMED, MemoryError) as error:
            raise ConfigError(
                f"{path} is not a valid GGUF file ({error}). Download it again."
            ) from None

    def _read_names(self, head: GgufHead, path: Path) -> None:
        self.metadata = head.metadata
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
        for name_in_file, tensor in head.tensors.items():
            name = ""
            if match := GGUF_TENSOR.fullmatch(name_in_file):
                layer, stem, end = match.groups(default="")
                names = row.layer_names if layer else GGUF_NAMES
                if stem in names:
                    name = layer.replace("blk", "model.layers") + names[stem] + end
            if not name:
                unread.append(name_in_file)
            elif tensor.kind.name not in GGUF_TYPES:
                unread.append(f"{name_in_file} of type {tensor.kind.name}")
            else:
                self._tensors[name] = tensor
        if unread:
            raise ConfigError(
                f"{path} has tensors of {architecture} that are not read: {first_of(unread)}. Types"
                f" that are read are {', '.join(GGUF_TYPES)}."
            )
        self.entries = {
            name: Entry(path.name, tensor.shape, "F32") for name, tensor in self._tensors.items()
        }
        self._row = row
        self.values = self._config_keys(architecture)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        shape = self.entries[name].shape
        data = tensor.data[rows]
        module = name.split(".")[-2]
        if module in self._row.alternating:
            heads = self.values[self._row.alternating[module]]
            if shape[0] % (2 * heads):
                raise ConfigError(
                    f"{self.directory}: {name} has {shape[0]} rows, which {heads} heads do not"
                    " divide into pairs."
                )
            # As in transformers the first halves of the pairs that RoPE rotates in a head, then
            # the second ones.
            order = np.arange(shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            data = tensor.data[order[rows]]
        weights = np.empty((len(data), *shape[1:]), np.float32)
        # A few rows at a time, since gguf has each number twice before it returns: room for a whole
        # tensor is given back to the system and cleared anew, which takes as long as the numbers.
        for at in range(0, len(data), ROWS_AT_A_TIME):
            some = slice(at, at + ROWS_AT_A_TIME)
            blocks = data[some]
            numbers = dequantize(blocks.reshape(len(blocks), -1), tensor.kind)
            weights[some] = numbers.reshape(len(blocks), *shape[1:])
        if name.endswith("norm.weight"):
            weights -= self._row.norm_offset
        return weights

    def _config_keys(self, architecture: str) -> dict[str, Any]:
        """The keys of the config.json that the metadata and tensors imply."""
        path = self.directory
        row = self._row
        start = f"{architecture}."
        stated = {}
        for key, value in self.metadata.items():
            if key.startswith(start):
                stated[key.removeprefix(start)] = value
        missing = sorted(DECODER_KEYS.keys() - stated.keys())
        if "model.embed_tokens.weight" not in self.entries:
            missing.append(GGUF_EMBEDDING)
        if missing:
            raise ConfigError(
                f"{path} lacks {', '.join(missing)} of {architecture}: download it again."
            )
        unread = []
        # A number for each layer.
        if isinstance(stated["attention.head_count"], list):
            unread.append(f"{start}attention.head_count={str(stated['attention.head_count'])[:60]}")
            stated["attention.head_count"] = 1
        heads = stated["attention.head_count"]
        head_width = stated.get("attention.key_length")
        if head_width is None:
            head_width = stated["embedding_length"] // max(1, heads)
        keys = {**DECODER_KEYS, **OPTIONAL_METADATA, **row.keys}
        values = {"num_key_value_heads": heads, "head_dim": head_width}
        for key, value in stated.items():
            if key in keys and not isinstance(value, list):
                values[keys[key]] = value
            elif key in HEAD_WIDTHS and value == head_width:
                continue
            # Heads that are rotated in part are not read.
            elif key not in (*SCALING_METADATA, *IMPLIED_METADATA):
                unread.append(f"{start}{key}={str(value)[:60]}")
        if unread:
            raise ConfigError(
                f"{path} has metadata that are not read: {first_of(unread, between=', ')}. Where"
                " the same model is a Hugging Face directory, read that."
            )
        if row.largest:
            values["query_pre_attn_scalar"] = head_width
            if values["num_hidden_layers"] == row.largest:
                values["query_pre_attn_scalar"] = values["hidden_size"] // heads
        return {
            "architectures": [row.name],
            "model_type": row.model_type,
            "vocab_size": self.entries["model.embed_tokens.weight"].shape[0],
            "tie_word_embeddings": "lm_head.weight" not in self.entries,
            **values,
            "rope_scaling": self._scaling(stated, values),
        }

    def _scaling(
        self, stated: Mapping[str, Any], values: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """rope_scaling of the config.json, None where RoPE is not scaled."""
        scaling = {}
        for key, name in SCALING_METADATA.items():
            if key in stated:
                scaling[name] = stated[key]
        kind = scaling.get("rope_type", "none")
        if ROPE_FACTORS in self.entries:
            # By what each frequency is divided, as llama.cpp's converter writes it.
            factors = self.read(ROPE_FACTORS)
            del self.entries[ROPE_FACTORS]
            llama3 = LLAMA3_SCALING | {"factor": float(factors.max())}
            # As the layer computes them, by numpy: a tokenizer is read without JAX.
            width = values["head_dim"]
            exponents = np.arange(0, width, 2, dtype=np.float32) / width
            wavelengths = 2 * math.pi * values.get("rope_theta", 10_000.0) ** exponents
            low = llama3["low_freq_factor"]
            high = llama3["high_freq_factor"]
            turns = llama3["original_max_position_embeddings"] / wavelengths
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            expected = 1 / ((1 - smooth) / llama3["factor"] + smooth)
            is_llama3 = expected.shape == factors.shape and np.allclose(factors, expected)
            if kind == "none" and is_llama3:
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
