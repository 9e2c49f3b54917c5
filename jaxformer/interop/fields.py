"""The rows of a config mapping: each reads keys of a config.json into fields of `ModelConfig`, and
writes them back.

A row that cannot express a config writes the nearest value. Reading it back and comparing shows the
difference.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import flat, with_settings
from jaxformer.config.variants import BIASED
from jaxformer.interop.hf_config import HFConfig
from jaxformer.layers.head import total_divisor
from jaxformer.layers.pattern import layer_configs

ConfigFields = dict[str, Any]  # of ModelConfig
Keys = dict[str, Any]  # of a config.json
MOST_LAYERS = 10_000  # as in ModelConfig
TYPES = {name: type(default) for name, default in flat(ModelConfig()).items()}


def by_hf_name(names: Mapping[str, str]) -> dict[str, str]:
    """Return the value here of each name in transformers, from the names of each value here."""
    values: dict[str, str] = {}
    for value, group in names.items():
        values |= dict.fromkeys(group.split(), value)
    return values


PLAIN = by_hf_name(
    {
        "gelu": "gelu gelu_python",
        "gelu_tanh": "gelu_new gelu_pytorch_tanh gelu_fast gelu_accurate gelu_python_tanh",
        "relu": "relu",
        "silu": "silu swish",
        "relu2": "relu2",
        "tanh": "tanh",
        "quick_gelu": "quick_gelu",
    }
)
# The gated activation here whose gate has a plain one.
GATE_NAMES = {"gelu": "geglu", "gelu_tanh": "geglu_tanh", "silu": "swiglu", "relu": "reglu"}
GATED_NAMES = {"sigmoid": "glu"}
for _name, _plain in PLAIN.items():
    if _plain in GATE_NAMES:
        GATED_NAMES[_name] = GATE_NAMES[_plain]


# The property that has the value of a field whose default follows from others.
FOLLOWING = {
    "n_kv_heads": "kv_heads",
    "head_dim": "head_width",
    "attention.value_dim": "value_width",
    "embedding.width": "embedded_width",
    "d_ff": "ff_width",
    "experts.d_ff": "expert_width",
    "n_encoder_layers": "encoder_layers",
    "recurrent.heads": "recurrent_heads",
    "recurrent.key_heads": "recurrent_key_heads",
    "recurrent.key_dim": "recurrent_key_width",
    "recurrent.value_dim": "recurrent_value_width",
    "rope.original_length": "original_length",
    "rope.attention_factor": "rope_scale",
    "rope.fast": "rope.fast_rotations",
}


def with_factors(config: ModelConfig) -> ModelConfig:
    """Return the config with the factors of its scores and logits as numbers, those that follow
    from muP too."""
    return with_settings(
        config,
        {
            "attention.scale": config.score_scale or config.head_width**-0.5,
            "head.divisor": total_divisor(config),
            "parametrization": "standard",
            "mup_base": "",
        },
    )


def value_of(config: ModelConfig, field: str) -> Any:
    """Return the value of a field, or what a default stands for."""
    return attrgetter(FOLLOWING.get(field, field))(config)


def letters(flags: Iterable[object], yes: str, no: str) -> str:
    """Return the pattern of layers: `yes` where the flag of a layer is true, and else `no`."""
    return "".join(yes if flag else no for flag in flags)


class KeyMapping:
    """One row: `read` gives fields of a `ModelConfig`; `write` gives keys, of a config with numbers
    for its factors (`with_factors`)."""

    def read(self, hf: HFConfig) -> ConfigFields:
        return {}

    def write(self, config: ModelConfig) -> Keys:
        return {}


@dataclass(frozen=True)
class KeyRule(KeyMapping):
    """A row by its two functions."""

    reads: Callable[[HFConfig], ConfigFields]
    writes: Callable[[ModelConfig], Keys] = lambda config: {}

    def read(self, hf: HFConfig) -> ConfigFields:
        return self.reads(hf)

    def write(self, config: ModelConfig) -> Keys:
        return self.writes(config)


@dataclass(frozen=True)
class Key(KeyMapping):
    """A key with the meaning of a field."""

    hf: str
    field: str
    default: Any = None
    instead: str = ""  # the key that is read where there is none, as in older files
    needed: bool = False  # every file has it
    may_be_null: ClassVar[bool] = False

    def read(self, hf: HFConfig) -> ConfigFields:
        value = hf.get(self.hf)
        if value is None and self.instead:
            value = hf.get(self.instead)
        if value is None and (self.instead or self.hf not in hf.values):
            value = self.default
        if value is None:
            if self.needed:
                raise hf.unsupported(self.hf, None, ["a number"])
            if self.default is not None and not self.may_be_null:
                raise hf.unsupported(self.hf, None, [self.default])
            return {}
        if type(value) is int and TYPES[self.field] is float:
            value = float(value)
        return {self.field: value}

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: value_of(config, self.field)}


# The keys that a field usually has.
USUAL_KEYS = by_hf_name(
    {
        "vocab_size": "vocab_size",
        "d_model": "d_model hidden_size n_embd dim",
        "n_layers": "n_layers num_hidden_layers n_layer num_layers decoder_layers",
        "n_heads": "n_heads num_attention_heads n_head num_heads encoder_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim d_kv",
        "d_ff": (
            "d_ff intermediate_size n_inner ffn_dim ffn_hidden_size hidden_dim encoder_ffn_dim"
        ),
        "max_length": "max_position_embeddings n_positions max_seq_len seq_length",
        "norm_eps": "norm_eps layer_norm_eps layer_norm_epsilon norm_epsilon rms_norm_eps",
        "embedding.token_types": "type_vocab_size",
    }
)


# What every config.json says of most families.
SIZES = "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size"


def keys(needed: str = "", /, **defaults: float | None) -> tuple[Key, ...]:
    """Return keys with their usual fields: those that a file has to have, separated by spaces, and
    others with their defaults in transformers."""
    every_file = [Key(hf, USUAL_KEYS[hf], needed=True) for hf in needed.split()]
    return (*every_file, *(Key(hf, USUAL_KEYS[hf], default) for hf, default in defaults.items()))


class OptionalKey(Key):
    """A number that is `null` where it is 0 here, such as a soft cap."""

    may_be_null = True

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: attrgetter(self.field)(config) or None}


@dataclass(frozen=True)
class Choice(KeyMapping):
    """A key whose values have other names here."""

    hf: str
    field: str
    values: Mapping[Any, Any]
    default: Any

    def read(self, hf: HFConfig) -> ConfigFields:
        value = hf.get(self.hf, self.default)
        # Which are in no table: they have no hash.
        if isinstance(value, (list, dict)) or value not in self.values:
            raise hf.unsupported(self.hf, value, self.values)
        return {self.field: self.values[value]}

    def write(self, config: ModelConfig) -> Keys:
        setting = attrgetter(self.field)(config)
        names = [name for name, value in self.values.items() if value == setting]
        # Of several names of a setting the default is written, which every reader knows.
        if names and self.default not in names:
            return {self.hf: names[0]}
        return {self.hf: self.default}


@dataclass(frozen=True)
class FixedKey(KeyMapping):
    """A key with one supported value, or several with the same meaning; the first is written."""

    hf: str
    allowed: tuple[Any, ...]

    def read(self, hf: HFConfig) -> ConfigFields:
        hf.only(self.hf, self.allowed)
        return {}

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: self.allowed[0]}


def fixed(**values: Any) -> tuple[FixedKey, ...]:
    """Return keys with one supported value each."""
    return tuple(FixedKey(hf, (value,)) for hf, value in values.items())


@dataclass(frozen=True)
class AliasKey(KeyMapping):
    """A key that repeats `key`, which another row reads; where `checked`, they have to agree."""

    hf: str
    key: str
    field: str
    checked: bool = False

    def read(self, hf: HFConfig) -> ConfigFields:
        value = hf.get(self.hf)
        if self.checked and value is not None:
            hf.only(self.hf, (hf.get(self.key, value),))
        return {}

    def write(self, config: ModelConfig) -> Keys:
        return {self.hf: value_of(config, self.field)}


class ClassCount(KeyMapping):
    """The number of classes of a head: the length of id2label, else num_labels."""

    def read(self, hf: HFConfig) -> ConfigFields:
        labels = hf.get("id2label")
        if labels:
            return {"head.n_classes": len(labels)}
        return {"head.n_classes": hf.number("num_labels", 2)}

    def write(self, config: ModelConfig) -> Keys:
        if config.output not in ("classes", "tags"):
            return {}
        return {"num_labels": config.head.n_classes}


@dataclass(frozen=True)
class IgnoredKeys(KeyMapping):
    """Keys of a family that do not change its logits, separated by spaces. `written` are those that
    are written, with the same value always."""

    keys: str
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def read(self, hf: HFConfig) -> ConfigFields:
        hf.keys_read.update(self.keys.split())
        return {}

    def write(self, config: ModelConfig) -> Keys:
        return dict(self.written)


ATTENTION_RATES = {"attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"}


class Dropout(IgnoredKeys):
    """The keys of dropout rates, ATTENTION_RATES those of attention weights alone. They are not
    read: a run sets its own rates."""

    def write(self, config: ModelConfig) -> Keys:
        rates = dict.fromkeys(self.keys.split(), config.dropout)
        for key in rates.keys() & ATTENTION_RATES:
            rates[key] = config.attention_dropout_rate
        return rates


class Constant(KeyMapping):
    """ConfigFields with the same value in every model of the family."""

    def __init__(self, fields: ConfigFields) -> None:
        self.fields = fields

    def read(self, hf: HFConfig) -> ConfigFields:
        return dict(self.fields)


@dataclass(frozen=True)
class Biases(KeyMapping):
    """Flags that each add biases. `flags` maps a key to the parts with a bias and the key's
    default; `always` are the parts that have one without a flag."""

    flags: Mapping[str, tuple[frozenset[str], bool]]
    always: frozenset[str] = frozenset()

    def read(self, hf: HFConfig) -> ConfigFields:
        parts = set(self.always)
        for key, (added, default) in self.flags.items():
            if hf.flag(key, default):
                parts |= added
        # RMS norms have no bias, so where no name is exact, one with theirs is as good.
        names = {biased: name for name, biased in BIASED.items()}
        return {"bias": names.get(frozenset(parts)) or names[frozenset({*parts, "norm"})]}

    def write(self, config: ModelConfig) -> Keys:
        return {key: parts <= config.biased for key, (parts, _) in self.flags.items()}


FLAG = {True: True, False: False}


def tied(default: bool) -> Choice:
    """Return whether the output layer is the embedding. Where a file has both and they differ, they
    are read as untied, as in transformers 5."""
    return Choice("tie_word_embeddings", "tied_head", FLAG, default)


class DivisibleHeads(KeyMapping):
    """The number of heads has to divide the width, whatever head_dim is: transformers refuses
    other configs."""

    def read(self, hf: HFConfig) -> ConfigFields:
        width = hf.number("hidden_size")
        heads = hf.positive("num_attention_heads")
        # A directory that transformers refuses is no export, though the model runs here.
        if width % heads:
            allowed = f"a divisor of hidden_size={width}"
            raise hf.unsupported("num_attention_heads", heads, [allowed])
        return {}


@dataclass(frozen=True)
class Present(KeyMapping):
    """A field that is True where the files have a tensor. Where it is not known what they have, it
    is True for the architectures `of`, which have that tensor in transformers."""

    tensor: str
    field: str
    of: tuple[str, ...]

    def read(self, hf: HFConfig) -> ConfigFields:
        if hf.names is not None:
            return {self.field: self.tensor in hf.names}
        architectures = hf.get("architectures") or []
        return {self.field: not {*self.of}.isdisjoint(architectures)}


@dataclass(frozen=True)
class KeyTable(KeyMapping):
    """A key that is a table of keys, which rows of its own read."""

    hf: str
    rows: Sequence[KeyMapping]

    def read(self, hf: HFConfig) -> ConfigFields:
        # With the architectures beside the table, which messages name.
        names = hf.values.keys() & {"architectures", "model_type"}
        entries = HFConfig(hf.table(self.hf) | {key: hf.values[key] for key in names})
        table_fields: ConfigFields = {}
        for row in self.rows:
            table_fields |= row.read(entries)
        # In a table nothing is a key of another program: what is not read is refused.
        for key in entries.unknown():
            raise hf.unsupported(f"{self.hf}.{key}", entries.values[key], [None])
        return table_fields

    def write(self, config: ModelConfig) -> Keys:
        table: Keys = {}
        for row in self.rows:
            table |= row.write(config)
        return {self.hf: table}


FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Windows(KeyMapping):
    """Which layers have a window: by `layer_types`, or by the keys that files had before it.

    Without `layer_types` every `every`-th layer has none (0: all have one); the key `period`
    overrides `every`. With `switch`, use_sliding_window has to be true, and the first
    max_window_layers layers have no window.
    """

    every: int = 0
    period: str = ""
    kinds: bool = True  # the architecture reads layer_types
    switch: bool = False
    default_window: int | None = 4096

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.whole("num_hidden_layers")
        # Before a list of so many layers is made.
        if layers > MOST_LAYERS:
            raise hf.unsupported("num_hidden_layers", layers, [f"1 to {MOST_LAYERS}"])
        window = self.window(hf)
        is_full = self.usual_full_layers(hf, layers)
        kinds = None
        if self.kinds:
            kinds = hf.get("layer_types")
        if kinds is not None:
            if len(kinds) != layers or not {*kinds} <= {FULL, SLIDING}:
                raise hf.unsupported("layer_types", kinds, [f"{layers} of", FULL, SLIDING])
            is_full = [kind == FULL for kind in kinds]
        if not window or all(is_full):
            # The base of layers with a window is that of no layer then.
            return {"rope.window_theta": 0.0}
        return {"window": window, "window_pattern": letters(is_full, "f", "w")}

    def window(self, hf: HFConfig) -> int:
        """Return the width of the window; 0 where no layer has one."""
        width = hf.get("sliding_window", self.default_window)
        if self.switch and not hf.flag("use_sliding_window", False):
            return 0
        return width or 0

    def usual_full_layers(self, hf: HFConfig, layers: int) -> list[bool]:
        """Return which layers have no window where layer_types does not say it."""
        every: float = self.every
        if self.period:
            every = hf.number(self.period, every)
        first: float = 0
        if self.switch:
            first = hf.number("max_window_layers", 28)
        return [i < first or bool(every and (i + 1) % every == 0) for i in range(layers)]

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        keys: Keys = {"sliding_window": config.window or None}
        if self.kinds:
            # Where all layers are full, transformers needs a number beside layer_types too.
            if not self.switch:
                keys["sliding_window"] = config.window or self.default_window
            keys["layer_types"] = [SLIDING if layer.window else FULL for layer in layers]
        if self.switch:
            keys["use_sliding_window"] = bool(config.window)
            keys["max_window_layers"] = config.n_layers
        return keys


@dataclass(frozen=True)
class RotatedLayers(Windows):
    """Which layers have positions: those with 1 in no_rope_layers, or all but every
    no_rope_layer_interval-th. Without `layer_types` all others have the window, if there is one."""

    def read(self, hf: HFConfig) -> ConfigFields:
        windows = super().read(hf)
        if SLIDING in (hf.get("layer_types") or []) and not hf.flag("use_sliding_window", False):
            # Kernels of transformers differ in whether they then apply the window.
            raise hf.unsupported("use_sliding_window", False, [True])
        rotated = self.usual_full_layers(hf, hf.whole("num_hidden_layers"))
        return windows | {"rope.pattern": letters(rotated, "p", "n")}

    def usual_full_layers(self, hf: HFConfig, layers: int) -> list[bool]:
        every = hf.whole("no_rope_layer_interval", 4)
        flags = hf.get("no_rope_layers")
        if flags is None:
            return [(i + 1) % every != 0 for i in range(layers)]
        is_list = isinstance(flags, list) and len(flags) >= layers
        if not is_list or not all(flag in (0, 1) for flag in flags):
            raise hf.unsupported("no_rope_layers", flags, [f"{layers} of 0 and 1"])
        return [bool(flag) for flag in flags[:layers]]

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        flags = [int(layer.positions == "rope") for layer in layers]
        return super().write(config) | {"no_rope_layers": flags}
