"""The rows of a config mapping: each reads keys of a config.json into fields of `ModelConfig`, and
writes them back.

A row that cannot state a config writes what comes nearest; reading it back and comparing shows the
difference.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jaxformer.config import ModelConfig
from jaxformer.interop.compare import bias_named
from jaxformer.interop.hf_config import HFConfig
from jaxformer.layers.pattern import layer_configs

Ours = dict[str, Any]

# Activations by the names that transformers has for them; of a gate likewise.
PLAIN = {
    **{
        "gelu": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
    },
    **{
        "swish": "silu",
        "relu2": "relu2",
        "tanh": "tanh",
        "gelu_python": "gelu",
        "gelu_fast": "gelu_tanh",
    },
    **{"gelu_accurate": "gelu_tanh", "gelu_python_tanh": "gelu_tanh"},
}
GATE_NAMES = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu", "relu": "reglu"}
GATED_NAMES = {name: GATE_NAMES[plain] for name, plain in PLAIN.items() if plain in GATE_NAMES} | {
    "sigmoid": "glu"
}


class KeyMapping(Protocol):
    """One row: `read` gives our fields, `write` their keys for a config that `resolved` has filled
    in."""

    def read(self, hf: HFConfig) -> Ours: ...

    def write(self, ours: ModelConfig) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Key:
    """A key that means what a field of ours means; `null` there is 0 here."""

    hf: str
    ours: str
    default: Any = None
    old: str = ""  # what older files call it

    def read(self, hf: HFConfig) -> Ours:
        value = hf.get(self.hf, hf.get(self.old, self.default) if self.old else self.default)
        if value is None:
            return {}
        typed = {entry.name: type(entry.default) for entry in dataclasses.fields(ModelConfig)}[
            self.ours
        ]
        whole = isinstance(value, int) and not isinstance(value, bool)
        return {self.ours: float(value) if typed is float and whole else value}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {self.hf: getattr(ours, self.ours)}


@dataclass(frozen=True)
class OptionalKey(Key):
    """A soft-cap, or another number, that is `null` where it is off."""

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {self.hf: getattr(ours, self.ours) or None}


@dataclass(frozen=True)
class Choice:
    """A key whose values are named otherwise here."""

    hf: str
    ours: str
    values: Mapping[Any, Any]
    default: Any

    def read(self, hf: HFConfig) -> Ours:
        value = hf.get(self.hf, self.default)
        if isinstance(value, (list, dict)) or value not in self.values:
            raise hf.unsupported(self.hf, value, self.values)
        return {self.ours: self.values[value]}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        wanted = getattr(ours, self.ours)
        named = [key for key, value in self.values.items() if value == wanted]
        return {self.hf: self.default if self.default in named or not named else named[0]}


@dataclass(frozen=True)
class FixedKey:
    """A key that has to have one value (the first given is written), since nothing here computes
    the others."""

    hf: str
    allowed: tuple[Any, ...]

    def read(self, hf: HFConfig) -> Ours:
        hf.only(self.hf, self.allowed)
        return {}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {self.hf: self.allowed[0]}


@dataclass(frozen=True)
class AliasKey:
    """A key that repeats `key`, which another row reads, or has to where it is `checked`."""

    hf: str
    key: str
    ours: str
    checked: bool = False

    def read(self, hf: HFConfig) -> Ours:
        stated = hf.get(self.hf)
        if self.checked and stated is not None:
            hf.only(self.hf, (hf.get(self.key, stated),))
        return {}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {self.hf: getattr(ours, self.ours)}


class ClassCount:
    """How many classes a head has: as many as id2label names, else num_labels."""

    def read(self, hf: HFConfig) -> Ours:
        labels = hf.get("id2label")
        return {"n_classes": len(labels) if labels else hf.get("num_labels", 2)}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {"num_labels": ours.n_classes} if ours.output in ("classes", "tags") else {}


@dataclass(frozen=True)
class IgnoredKeys:
    """Keys of a family that say nothing about its logits."""

    keys: tuple[str, ...]

    def read(self, hf: HFConfig) -> Ours:
        hf.asked.update(self.keys)
        return {}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {}


class Constant:
    """Fields of ours that the architecture always has."""

    def __init__(self, **ours: Any) -> None:
        self.ours = ours

    def read(self, hf: HFConfig) -> Ours:
        return dict(self.ours)

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Dropout:
    """Keys that all get our one rate; a run decides its own, so nothing is read."""

    keys: tuple[str, ...]

    def read(self, hf: HFConfig) -> Ours:
        hf.asked.update(self.keys)
        return {}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(self.keys, ours.dropout)


@dataclass(frozen=True)
class Biases:
    """Flags that each switch on biases; `always` are those without a flag."""

    flags: Mapping[str, tuple[frozenset[str], bool]]  # key -> (what carries a bias, the default)
    always: frozenset[str] = frozenset()

    def read(self, hf: HFConfig) -> Ours:
        carried = self.always.union(
            *(parts for key, (parts, default) in self.flags.items() if hf.flag(key, default))
        )
        return {"bias": bias_named(carried)}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {key: parts <= ours.biased for key, (parts, _) in self.flags.items()}


@dataclass(frozen=True)
class Tied:
    """Whether the output layer is the embedding; where a file has both and they differ,
    transformers 5 unties them too."""

    default: bool

    def read(self, hf: HFConfig) -> Ours:
        return {"tied_head": hf.flag("tie_word_embeddings", self.default)}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {"tie_word_embeddings": ours.tied_head}


class DivisibleHeads:
    """Heads have to divide the width, or transformers refuses the config, whatever a head's own
    width is."""

    def read(self, hf: HFConfig) -> Ours:
        width, heads = hf.get("hidden_size", 0), hf.get("num_attention_heads", 1)
        if isinstance(width, int) and isinstance(heads, int) and heads > 0 and width % heads:
            raise hf.unsupported(
                "num_attention_heads", heads, [f"a divisor of hidden_size={width}"]
            )
        return {}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Present:
    """A field of ours that follows from a tensor being there."""

    tensor: str
    ours: str

    def read(self, hf: HFConfig) -> Ours:
        return {self.ours: self.tensor in hf.names}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Scale:
    """The whole number whose inverse root scales the products of queries and keys."""

    hf: str
    default: float

    def read(self, hf: HFConfig) -> Ours:
        return {"attention_scale": hf.get(self.hf, self.default) ** -0.5}

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        return {self.hf: round(ours.attention_scale**-2)}


FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Windows:
    """Layers that see a window and layers that see all, by `layer_types` or by what stood for it
    before there was that key.

    Every `every`-th layer sees all (0: none does), or as the key `period` has it.
    """

    default_layers: int
    every: int = 0
    period: str = ""
    kinds: bool = True  # the architecture reads layer_types
    # use_sliding_window has to be on, and max_window_layers tells where the windows begin
    switch: bool = False

    def read(self, hf: HFConfig) -> Ours:
        layers, window = hf.get("num_hidden_layers", self.default_layers), self._window(hf)
        kinds = hf.get("layer_types") if self.kinds else None
        each = hf.get(self.period, self.every) if self.period else self.every
        first = hf.get("max_window_layers", 28) if self.switch else 0
        if kinds is not None and (len(kinds) != layers or not {*kinds} <= {FULL, SLIDING}):
            raise hf.unsupported("layer_types", kinds, [f"{layers} of", FULL, SLIDING])
        if kinds is not None:
            pattern = "".join("w" if kind == SLIDING else "f" for kind in kinds)
        else:
            pattern = "".join(
                "f" if (each and (i + 1) % each == 0) or i < first else "w" for i in range(layers)
            )
        return {"window": window, "window_pattern": pattern} if window and "w" in pattern else {}

    def _window(self, hf: HFConfig) -> int:
        window = hf.get("sliding_window", 4096) or 0
        return window if not self.switch or hf.flag("use_sliding_window", False) else 0

    def write(self, ours: ModelConfig) -> dict[str, Any]:
        layers = layer_configs(ours, ours.n_layers)
        kinds = [SLIDING if layer.window else FULL for layer in layers]
        keys: dict[str, Any] = {"sliding_window": ours.window or None} | (
            {"layer_types": kinds} if self.kinds else {}
        )
        return keys | (
            {"use_sliding_window": bool(ours.window), "max_window_layers": ours.n_layers}
            if self.switch
            else {}
        )
