"""The settings of a model: its family, its shape, and which row of each table of variants it
uses."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.settings import (
    Bounds,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    TableAt,
    divisors,
)

Positions = Literal["rope", "learned", "sinusoidal", "alibi", "t5", "none"]
Activation = Annotated[
    Literal[
        "swiglu",
        "geglu",
        "geglu_tanh",
        "reglu",
        "glu",
        "gelu",
        "gelu_tanh",
        "relu",
        "silu",
        "relu2",
        "tanh",
    ],
    TableAt("jaxformer.layers.ffn.ACTIVATIONS"),
]
RopeScaling = Annotated[
    Literal["none", "linear", "dynamic", "yarn", "llama3"],
    TableAt("jaxformer.layers.positions.FREQUENCIES"),
]
Normalization = Annotated[
    Literal["rms", "rms1p", "layer", "none"],
    TableAt("jaxformer.layers.norm.NORMS"),
]
NormPlacement = Literal["pre", "post", "sandwich", "output"]
Head = Literal["auto", "language", "masked", "classes", "tags", "none"]
Biased = Literal["none", "qkv", "attention", "ffn", "ffn_norm", "all"]
Initializer = Annotated[
    Literal["gpt2", "truncated_normal", "xavier", "fan_in"],
    TableAt("jaxformer.layers.linear.INITIALIZERS"),
]
AttentionKernel = Annotated[
    Literal["auto", "xla", "blocked", "cudnn", "tpu"], TableAt("jaxformer.layers.kernels.KERNELS")
]

# The activations of a gated feed-forward, down(act(gate x) * up x); add the name of a gated row of
# your own here too.
GATED = {"swiglu", "geglu", "geglu_tanh", "reglu", "glu"}

BIASED: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "qkv": frozenset({"qkv"}),
    "attention": frozenset({"qkv", "out"}),
    "ffn": frozenset({"ffn"}),
    "ffn_norm": frozenset({"ffn", "norm"}),
    "all": frozenset({"qkv", "out", "ffn", "norm"}),
}


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of a transformer, and how it is computed."""

    section = "model"

    family: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """GPT and Llama; BERT; the original and T5."""
    vocab_size: Natural = 0
    """Tokens in the embedding table; 0 takes the tokenizer's size when a run is loaded."""
    d_model: Count = 384
    """Width of the residual stream."""
    n_layers: Count = 6
    """Blocks; of an encoder-decoder those of the decoder."""
    n_encoder_layers: Natural = 0
    """Blocks of an encoder-decoder's encoder; 0 means as many as n_layers."""
    n_heads: Count = 6
    """Query heads."""
    n_kv_heads: Natural = 0
    """Key and value heads (GQA; 1 is MQA); 0 means as many as n_heads."""
    head_dim: Natural = 0
    """Width of a head; 0 means d_model / n_heads."""
    value_dim: Natural = 0
    """Width of a head's values; 0 means head_dim."""
    d_ff: Natural = 0
    """Hidden width of the feed-forward; 0 means 4 d_model, or 8/3 d_model up to a multiple of 64 if
    gated."""
    max_length: Count = 2048
    """Most positions of a sequence; the size of the table of learned positions."""
    positions: Positions = "rope"
    """How a token knows where it is."""
    rope_theta: Annotated[float, Bounds(1)] = 10_000.0
    """Base of the RoPE frequencies."""
    rope_pairing: Literal["half", "interleaved"] = "half"
    """Which dimensions rotate together: (i, i + H/2) or (2i, 2i + 1)."""
    rope_fraction: Fraction = 1.0
    """Part of a head's width that rotates, from its start."""
    rope_window_theta: NonNegative = 0.0
    """Base in layers with a window, which are not stretched; 0 turns all layers alike."""
    rope_scaling: RopeScaling = "none"
    """How RoPE is stretched past its length."""
    rope_factor: Annotated[float, Bounds(1)] = 1.0
    """By how much it is stretched."""
    rope_original_length: Natural = 0
    """The length it was trained at; 0 means max_length."""
    rope_low_frequency: Annotated[float, Bounds(0)] = (
        1.0  # llama3: turns within that length below which all is stretched.
    )
    rope_high_frequency: Annotated[float, Bounds(0)] = 4.0  # llama3: turns above which nothing is.
    rope_beta_fast: Annotated[float, Bounds(0)] = (
        32.0  # yarn: turns above which nothing is stretched.
    )
    rope_beta_slow: Annotated[float, Bounds(0)] = 1.0  # yarn: turns below which all is.
    rope_attention_factor: NonNegative = (
        0.0  # yarn: scale of the rotated queries and keys; 0 means 1 + ln(factor) / 10.
    )
    position_offset: Natural = 0
    """Rows of the table of learned positions before that of the first token (RoBERTa, BART: 2)."""
    sinusoid_order: Literal["interleaved", "half"] = "interleaved"
    """Sines and cosines in turn, or all sines first."""
    relative_buckets: Annotated[int, Bounds(4)] = 32
    """Rows of the table of T5's relative positions."""
    relative_distance: Annotated[int, Bounds(2)] = 128
    """Distance from which on all share one of its rows."""
    window: Natural = 0
    """How many tokens back a token sees (both ways in an encoder), itself counted in; 0 means all.

    """
    window_pattern: str = "w"
    """Which layers have the window, repeated over them: w has it, f sees the full sequence."""
    attention_scale: NonNegative = 0.0
    """Factor of the products of queries and keys; 0 means 1 / sqrt(head_dim)."""
    attention_soft_cap: NonNegative = 0.0
    """Scores s become cap tanh(s / cap); 0 leaves them."""
    attention_sinks: bool = False
    """A learnt score a head that takes attention and gives nothing."""
    query_key_norm: Literal["none", "head", "width"] = "none"
    """RMS norm of queries and keys, by heads or all heads as one."""
    norm: Normalization = "rms"
    """Kind of normalisation; rms1p scales by 1 + weight (Gemma)."""
    norm_placement: NormPlacement = (
        "pre"  # x + f(n(x)); post n(x + f(x)); sandwich x + n(f(n(x))); output x + n(f(x)).
    )
    norm_eps: NonNegative = 1e-5
    """Added to the variance, or the mean square, before its root."""
    residual: Literal["sequential", "parallel"] = "sequential"
    """A sublayer reads the sum so far, or all read the same."""
    activation: Activation = "swiglu"
    """Of the feed-forward; those that end in glu, and geglu_tanh, are gated."""
    bias: Biased = "none"
    """Which linear layers carry a bias, and layer norms: of queries to values, and so on."""
    embedding_scale: Literal["none", "sqrt"] = "none"
    """Token embeddings are multiplied by sqrt(d_model), or not."""
    embedding_norm: bool = False
    """A norm behind the embedding."""
    token_types: Natural = 0
    """Kinds of tokens with an embedding of their own (BERT: 2); 0 has none."""
    head: Head = "auto"
    """What is put out; auto: language, in an encoder masked; none: the residual stream itself."""
    n_classes: Natural = 0
    """Classes of the heads classes and tags; 0 takes those found in the data when a run is loaded.

    """
    pooling: Literal["auto", "first", "last", "mean"] = "auto"
    """What the head classes reads; auto: first, a decoder's last."""
    pooler: bool = False
    """An encoder keeps BERT's pooler under any head; the heads that read it have it anyway."""
    next_sentence: bool = False
    """A second head that tells whether the second text follows the first (BERT)."""
    tied_head: bool = False
    """Use the embedding table as the output layer too."""
    head_bias: bool = False
    """A bias of the language head; the other heads have one anyway."""
    logit_scale: Literal["none", "rsqrt"] = "none"
    """What the output layer reads is divided by sqrt(d_model), or not."""
    logit_soft_cap: NonNegative = 0.0
    """Logits l become cap tanh(l / cap); 0 leaves them."""
    dropout: Rate = 0.0
    """Of the embedding, the attention weights and each sublayer's output, in training only."""
    init: Initializer = "gpt2"
    """N(0, 0.02) with scaled residuals; variance 2/(d_in+d_out), cut or uniform; or 1/d_in."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the products; auto: bfloat16 on GPU and TPU, else float32."""
    layer_loop: Literal["unroll", "scan"] = "unroll"
    """Scan compiles once for all layers; unrolled runs faster."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes: nothing, all but products, all."""
    attention_kernel: AttentionKernel = "auto"  # auto: fastest in training, else plain.

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def value_width(self) -> int:
        return self.value_dim or self.head_width

    @property
    def encoder_layers(self) -> int:
        """Blocks that see both sides."""
        return {"decoder": 0, "encoder": self.n_layers}.get(
            self.family, self.n_encoder_layers or self.n_layers
        )

    @property
    def biased(self) -> frozenset[str]:
        """What carries a bias, of "qkv", "out" (of attention), "ffn" and "norm"."""
        return BIASED[self.bias]

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation in GATED

    @property
    def ff_width(self) -> int:
        return self.d_ff or (
            -(-self.d_model * 8 // 3 // 64) * 64 if self.gated else 4 * self.d_model
        )

    @property
    def output(self) -> str:
        """The head, "auto" resolved."""
        return (
            self.head
            if self.head != "auto"
            else "masked"
            if self.family == "encoder"
            else "language"
        )

    @property
    def pooled(self) -> str:
        """The pooling, "auto" resolved."""
        return (
            self.pooling
            if self.pooling != "auto"
            else "first"
            if self.family == "encoder"
            else "last"
        )

    @property
    def rotated_width(self) -> int:
        """Dimensions of a head that RoPE turns; they turn in pairs, so an odd number takes one more
        with it."""
        return int(self.head_width * self.rope_fraction)

    @property
    def original_length(self) -> int:
        """The length that RoPE is stretched from."""
        return self.rope_original_length or self.max_length

    @property
    def rope_scale(self) -> float:
        """What rotated queries and keys are multiplied by (YaRN, arXiv:2309.00071)."""
        return (
            self.rope_attention_factor or 0.1 * math.log(self.rope_factor) + 1
            if self.rope_scaling == "yarn"
            else 1.0
        )

    def conflicts(self) -> list[str]:
        found = []
        if not self.head_dim and self.d_model % self.n_heads:
            found.append(
                f"d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}: "
                f"choose heads that divide it ({divisors(self.d_model)}), or set model.head_dim."
            )
        if self.n_heads % self.kv_heads:
            found.append(
                f"n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.n_kv_heads}:"
                " every key head serves the same number of query heads, so choose one of"
                f" {divisors(self.n_heads)}."
            )
        turns = 0 < self.rotated_width <= self.head_width // 2 * 2
        if self.positions == "rope" and not found and not turns:
            found.append(
                f"head_dim={self.head_width} is odd, or model.rope_fraction={self.rope_fraction:g}"
                " of it is nothing, and RoPE turns pairs: make it even and the fraction larger, or"
                " change model.positions."
            )
        return found + [
            message for broken, message in self._refused() + self._refused_positions() if broken
        ]

    def _refused(self) -> list[tuple[bool, str]]:
        """Combinations of family, head and block that make no sense, each with its reason."""
        family, output = self.family, self.output
        return [
            (
                family == "encoder" and output == "language",
                (
                    "head='language' needs model.family 'decoder' or 'encoder_decoder': an encoder"
                    " sees the next token."
                ),
            ),
            (
                family != "encoder" and (output == "masked" or self.next_sentence),
                (
                    "head='masked' and model.next_sentence need model.family='encoder': a decoder"
                    " sees one side only."
                ),
            ),
            (
                family == "encoder_decoder" and output != "language",
                (
                    f"head={output!r} needs model.family 'encoder' or 'decoder': an encoder-decoder"
                    " writes its answer as text."
                ),
            ),
            (
                family == "decoder" and self.pooling == "first",
                (
                    "pooling='first' needs model.family='encoder': a decoder's first token sees"
                    " itself alone."
                ),
            ),
            (
                family != "encoder_decoder" and self.n_encoder_layers > 0,
                (
                    f"n_encoder_layers={self.n_encoder_layers} needs"
                    " model.family='encoder_decoder'; set model.n_layers."
                ),
            ),
            (
                self.residual == "parallel" and self.norm_placement == "post",
                (
                    "residual='parallel' has one sum for all sublayers, so norm_placement='post'"
                    " has no place: use another."
                ),
            ),
            (
                family != "encoder" and self.pooler,
                (
                    "pooler=True needs model.family='encoder': a pooler reads the first token,"
                    " which must see them all."
                ),
            ),
            (
                self.head_bias and output != "language",
                (
                    f"head_bias=True is for the language head, and the head {output!r} has a bias"
                    " anyway: leave it out."
                ),
            ),
        ]

    def _refused_positions(self) -> list[tuple[bool, str]]:
        """The same of positions and windows."""
        return [
            (
                not self.window_pattern or not set(self.window_pattern) <= {"w", "f"},
                (
                    f"window_pattern={self.window_pattern!r} must be letters w (window) and f"
                    " (full), as in 'wwf'."
                ),
            ),
            (
                self.position_offset > 0 and self.positions != "learned",
                (
                    f"position_offset={self.position_offset} needs model.positions='learned', and"
                    f" they are {self.positions!r}."
                ),
            ),
            (
                self.rope_window_theta > 0
                and (self.positions != "rope" or not self.window or self.rope_window_theta < 1),
                (
                    f"rope_window_theta={self.rope_window_theta:g} must be at least 1, and needs"
                    " model.positions='rope' and a model.window."
                ),
            ),
            (
                self.rope_scaling != "none" and self.positions != "rope",
                (
                    f"rope_scaling={self.rope_scaling!r} needs model.positions='rope', and they are"
                    f" {self.positions!r}."
                ),
            ),
            (
                (self.rope_factor != 1) == (self.rope_scaling == "none"),
                (
                    f"rope_factor={self.rope_factor:g} with rope_scaling={self.rope_scaling!r}: set"
                    " both, the factor above 1."
                ),
            ),
            (
                self.rope_scaling == "yarn"
                and not (self.rope_beta_fast > self.rope_beta_slow > 0 and self.rope_theta > 1),
                (
                    f"rope_scaling='yarn' needs model.rope_beta_fast={self.rope_beta_fast:g} above"
                    f" model.rope_beta_slow={self.rope_beta_slow:g}, that above 0, and"
                    f" model.rope_theta={self.rope_theta:g} above 1."
                ),
            ),
            (
                self.positions == "t5" and self.relative_distance <= self.relative_buckets // 2,
                (
                    f"relative_distance={self.relative_distance} must be above half of"
                    f" model.relative_buckets={self.relative_buckets}: that many distances have a"
                    " row of their own."
                ),
            ),
        ]
