"""Decoders in which some layers have a recurrent state instead of the keys of all tokens."""

from dataclasses import dataclass

from jaxformer.config.model import ModelConfig
from jaxformer.interop.experts import (
    EXPERT_BLOCKS,
    EXPERT_PARAMETERS,
    QWEN_ROWS,
    read_sparse_layers,
    routed,
    written_sparse_layers,
)
from jaxformer.interop.family import INV_FREQ, decoder_like
from jaxformer.interop.fields import (
    FLAG,
    FULL,
    Choice,
    ConfigFields,
    Constant,
    Key,
    KeyMapping,
    KeyRule,
    Keys,
    letters,
)
from jaxformer.interop.hf_config import HFConfig
from jaxformer.interop.llama import ATTENTION_BIAS, HEAD_NORM, LAYER, SILU, SIZES_OF_ALL
from jaxformer.interop.rope import RopeKeys
from jaxformer.interop.tensor_table import (
    BY_HEAD,
    LINEAR,
    TAPS,
    TensorRow,
    by_groups,
    linear,
    norm,
    with_rows,
)
from jaxformer.layers.pattern import layer_configs

LINEAR_ATTENTION = "linear_attention"
DELTA = "blocks.delta."


def leaves(names: str) -> tuple[str, ...]:
    """Return the paths of these leaves of a recurrent layer, whose names are separated by
    spaces."""
    return tuple(f"{DELTA}{name}" for name in names.split())


@dataclass(frozen=True)
class RecurrentLayers(KeyMapping):
    """Which layers are recurrent, by `layer_types`, and the keys of these layers; without
    `layer_types` all are but every full_attention_interval-th."""

    rows: tuple[KeyMapping, ...]

    def read(self, hf: HFConfig) -> ConfigFields:
        layers = hf.whole("num_hidden_layers")
        interval = hf.whole("full_attention_interval", 4)
        kinds = hf.get("layer_types")
        if kinds is None:
            recurrent = [(i + 1) % interval != 0 for i in range(layers)]
        elif len(kinds) != layers or not {*kinds} <= {FULL, LINEAR_ATTENTION}:
            raise hf.unsupported("layer_types", kinds, [f"{layers} of", FULL, LINEAR_ATTENTION])
        else:
            recurrent = [kind == LINEAR_ATTENTION for kind in kinds]
        fields: ConfigFields = {"layer_pattern": letters(recurrent, "d", "m")}
        for row in self.rows:
            fields |= row.read(hf)
        # Where no layer is recurrent, none reads these.
        if not any(recurrent):
            return {}
        return fields

    def write(self, config: ModelConfig) -> Keys:
        layers = layer_configs(config, config.n_layers)
        kinds = [LINEAR_ATTENTION if layer.mixer == "delta" else FULL for layer in layers]
        keys: Keys = {"layer_types": kinds}
        for row in self.rows:
            keys |= row.write(config)
        return keys


DELTA_KEYS = (
    Key("linear_num_value_heads", "recurrent.heads", 32),
    Key("linear_num_key_heads", "recurrent.key_heads", 16),
    Key("linear_key_head_dim", "recurrent.key_dim", 128),
    Key("linear_value_head_dim", "recurrent.value_dim", 128),
    Key("linear_conv_kernel_dim", "recurrent.convolution", 4),
)

# Qwen3-Next (2025): three layers of four are recurrent, the others have gated attention; experts,
# of which the shared one has a gate.
QWEN3_NEXT_ROWS = (
    *with_rows(
        QWEN_ROWS,
        *linear(
            LAYER + "self_attn.q_proj", ("blocks.attention.q", "blocks.attention.gate"), BY_HEAD
        ),
    ),
    *(
        TensorRow(
            f"{LAYER}mlp.shared_expert.{name}_proj.weight", f"{EXPERT_BLOCKS}shared.{name}", LINEAR
        )
        for name in ("gate", "up", "down")
    ),
    TensorRow(LAYER + "mlp.shared_expert_gate.weight", f"{EXPERT_BLOCKS}shared_gate", LINEAR),
    *norm(LAYER + "input_layernorm", "blocks.delta_norm"),
    TensorRow(LAYER + "linear_attn.conv1d.weight", leaves("q_taps k_taps v_taps"), TAPS),
    TensorRow(LAYER + "linear_attn.dt_bias", f"{DELTA}step_bias"),
    TensorRow(LAYER + "linear_attn.A_log", f"{DELTA}log_speed"),
    TensorRow(LAYER + "linear_attn.norm.weight", f"{DELTA}norm"),
    TensorRow(LAYER + "linear_attn.out_proj.weight", f"{DELTA}out", LINEAR),
)


def qwen3_next_rows(config: ModelConfig) -> tuple[TensorRow, ...]:
    """Return the tensors, in which the heads that share a key are below one another."""
    groups = by_groups(config.recurrent_key_heads)
    return (
        *QWEN3_NEXT_ROWS,
        TensorRow(LAYER + "linear_attn.in_proj_qkvz.weight", leaves("q k v gate"), groups),
        TensorRow(LAYER + "linear_attn.in_proj_ba.weight", leaves("rate decay"), groups),
    )


QWEN3_NEXT = decoder_like(
    "qwen3_next",
    "Qwen3Next",
    qwen3_next_rows,
    (
        *SIZES_OF_ALL,
        Key("moe_intermediate_size", "experts.d_ff", 512),
        Key("shared_expert_intermediate_size", "experts.shared_ff", 512),
        Constant({"experts.shared_gate": True, "attention.output_gate": True, "norm": "rms1p"}),
        *routed("num_experts"),
        KeyRule(read_sparse_layers, written_sparse_layers),
        Choice("norm_topk_prob", "experts.renormalize", FLAG, True),
        HEAD_NORM,
        SILU,
        RopeKeys(fraction=("partial_rotary_factor", 0.25)),
        ATTENTION_BIAS,
        RecurrentLayers(DELTA_KEYS),
    ),
    module_rows=EXPERT_PARAMETERS,
    # What predicts further tokens.
    ignored=(INV_FREQ, r"^mtp\."),
)
