"""The settings of a model: its family, its shape, its row of each table of variants, and a record
for each part that has settings of its own."""

import functools
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxformer.config.records import (
    Attention,
    Embedding,
    Experts,
    Head,
    Latent,
    Recurrent,
    RelativePositions,
    Rope,
)
from jaxformer.config.rules import model_conflicts, widths_of
from jaxformer.config.settings import (
    WIDTH_SETTING,
    Bounds,
    Count,
    Factor,
    Letters,
    Natural,
    NonNegative,
    PerRun,
    Rate,
    Section,
    Volatile,
    Width,
    with_settings,
)
from jaxformer.config.variants import (
    ATTENTION_FACTORS,
    BIASED,
    GATED,
    SECOND_HEADS,
    Activation,
    FeedForward,
    Initializer,
    Mixer,
    Normalization,
    Parametrization,
)


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of a transformer, and how it is computed."""

    section = "model"

    family: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """Architecture: decoder (GPT, Llama), encoder (BERT), or encoder_decoder (T5)."""
    vocab_size: Natural = 0
    """Number of tokens in the embedding table; 0 uses the size of the tokenizer."""
    d_model: Annotated[Count, WIDTH_SETTING] = 384
    """Width of the residual stream."""
    n_layers: Annotated[int, Bounds(1, most=10_000)] = 6
    """Number of blocks; for an encoder-decoder, of the decoder."""
    n_encoder_layers: Annotated[int, Bounds(0, most=10_000)] = 0
    """Number of blocks of the encoder of an encoder-decoder; 0 uses n_layers."""
    layer_groups: Natural = 0
    """Number of groups of consecutive layers that share one set of parameters (1 in ALBERT); 0: no
    layers share theirs."""
    mixer: Mixer = "attention"
    """Sublayer of a block in which tokens read other tokens of their sequence."""
    layer_pattern: Annotated[
        str, Letters("mds", "m (model.mixer), d (delta) and s (mamba2), as in 'dddm'")
    ] = "m"
    """Pattern repeated over the layers: m has model.mixer, d the mixer delta, s mamba2."""
    feed_forward: FeedForward = "ffn"
    """Sublayer of a block in which each token is transformed by itself."""
    n_heads: Annotated[Count, WIDTH_SETTING] = 6
    """Number of query heads."""
    n_kv_heads: Width = 0
    """Number of key and value heads: fewer than n_heads is GQA, 1 is MQA; 0 uses n_heads."""
    head_dim: Width = 0
    """Width of a head; 0 uses d_model / n_heads."""
    d_ff: Width = 0
    """Hidden width of the feed-forward layer; 0 uses 4 d_model (gated: 8/3, multiple of 64)."""
    max_length: Count = 2048
    """Maximum length of a sequence in tokens; also the size of the table of learned positions."""
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "t5", "disentangled", "none"] = (
        "rope"
    )
    """Positional scheme."""
    window: Natural = 0
    """Attention window in tokens, with the token itself (an encoder: on both sides); 0 has none."""
    window_pattern: Annotated[str, Letters("wf", "w (window) and f (full), as in 'wwf'")] = "w"
    """Pattern repeated over the layers: w has the window, f attends to the whole sequence."""
    source_window: Natural = 0
    """Window of the encoder of an encoder-decoder, on both sides; 0 uses window."""
    norm: Normalization = "rms"
    """Kind of normalization; rms1p multiplies by 1 + weight (Gemma)."""
    norm_placement: Literal["pre", "post", "sandwich", "output"] = "pre"
    """Placement of the norms: pre x + f(norm(x)), post norm(x + f(x)), sandwich x +
    norm(f(norm(x))), output x + norm(f(x))."""
    unnormed_layers: Natural = 0
    """Number of first layers whose mixer reads the residual stream without a norm before it (1 in
    ModernBERT, behind the norm of the embeddings)."""
    norm_eps: NonNegative = 1e-5
    """Constant added to the variance, or to the mean square, before the square root."""
    residual: Literal["sequential", "parallel", "parallel_shared"] = "sequential"
    """Input of the sublayers of a block: the output of the one before (sequential), or the same for
    all (parallel), also behind one norm for all (parallel_shared)."""
    residual_multiplier: Factor = 1.0
    """Factor of what each sublayer adds to the residual stream."""
    activation: Activation = "swiglu"
    """Activation of the feed-forward layer; swiglu, swiglu_clamped (gpt-oss), geglu, geglu_tanh,
    reglu and glu are gated."""
    bias: Literal[
        "none", "qkv", "attention", "ffn", "norm", "qkv_norm", "ffn_norm", "all_but_qkv", "all"
    ] = "none"
    """Where biases are used: none, qkv, attention (qkv and output), ffn, norm, qkv_norm, ffn_norm,
    all_but_qkv, all."""
    tied_head: bool = False
    """Use the embedding table as the output matrix."""
    dropout: PerRun[Rate] = 0.0
    """Dropout rate in training, of embeddings, attention weights and sublayer outputs."""
    init: Initializer = "gpt2"
    """Initialization: gpt2 N(0, 0.02), residual projections scaled; truncated_normal and xavier
    (uniform), variance 2 / (fan_in + fan_out); fan_in, variance 1 / fan_in."""
    parametrization: Parametrization = "standard"
    """How initial values and learning rates follow the width: standard, as model.init and the
    optimizer say; mup, so that what holds at the widths of model.mup_base holds at all widths."""
    mup_base: str = ""
    """Widths of the model at which the settings of parametrization=mup are found, as in 'd_model=64
    n_heads=4'; what it does not name is as here."""
    dtype: PerRun[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Dtype of the matrix products; auto selects bfloat16 on GPU and TPU, float32 on CPU."""
    exact: PerRun[Volatile[bool]] = False
    """Whether the logits of a text are the same bits whatever is beside it in the batch, in the row
    and in the cache (docs/exact.md); slower, and gradients stay as they are."""
    layer_loop: PerRun[Volatile[Literal["auto", "unroll", "scan"]]] = "auto"
    """scan compiles one layer for all, unroll compiles each and runs faster on CPU and GPU; auto
    scans on TPU, and experts or more than 40 layers on GPU."""
    remat: PerRun[Volatile[Literal["none", "names", "dots", "full"]]] = "none"
    """Recomputed in the backward pass: none, names (all but the points of model.saved), dots (all
    but matrix products), full (all but attention)."""
    saved: Volatile[str] = ""
    """Points kept by remat=names: none, or of latent q k v attention out gate up down normed
    hidden; empty: q to out."""
    offload: Volatile[str] = ""
    """Points, or input (that of a layer), that remat=names keeps in the memory of the host."""
    experts: Experts = field(default_factory=Experts)
    """Experts, of feed_forward=experts."""
    latent: Latent = field(default_factory=Latent)
    """Latents, of mixer=latent."""
    recurrent: Recurrent = field(default_factory=Recurrent)
    """State of a text, of mixer=delta and mamba2."""
    attention: Attention = field(default_factory=Attention)
    """How queries, keys and values become the output of attention."""
    rope: Rope = field(default_factory=Rope)
    """Rotation of queries and keys, of positions=rope."""
    relative: RelativePositions = field(default_factory=RelativePositions)
    """Tables of relative positions, of positions=t5 and disentangled."""
    embedding: Embedding = field(default_factory=Embedding)
    """Embeddings that a stack begins with."""
    head: Head = field(default_factory=Head)
    """Pooling, output matrix and logits."""

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def value_width(self) -> int:
        return self.attention.value_dim or self.head_width

    @property
    def recurrent_heads(self) -> int:
        return self.recurrent.heads or self.n_heads

    @property
    def recurrent_key_heads(self) -> int:
        return self.recurrent.key_heads or self.recurrent_heads

    @property
    def recurrent_key_width(self) -> int:
        return self.recurrent.key_dim or self.head_width

    @property
    def recurrent_value_width(self) -> int:
        return self.recurrent.value_dim or self.head_width

    @property
    def embedded_width(self) -> int:
        return self.embedding.width or self.d_model

    @property
    def base_model(self) -> "ModelConfig":
        """Return the model of mup_base, in the standard parametrization; without one, this
        model."""
        return _base_of(self) if self.mup_base else self

    @property
    def score_scale(self) -> float:
        """attention.scale, which with mup_base is that of its heads and falls as 1 / head_width;
        0 is 1 / sqrt(head_width)."""
        base = self.base_model.head_width
        if base == self.head_width:
            return self.attention.scale
        return (self.attention.scale or base**-0.5) * base / self.head_width

    @property
    def attention_dropout_rate(self) -> float:
        """Return the dropout rate of attention weights, "auto" resolved."""
        rate = self.attention.dropout
        return self.dropout if rate == "auto" else rate

    @property
    def has_dropout(self) -> bool:
        """Return whether training drops anything, so that a loss needs a key."""
        return bool(self.dropout or self.attention_dropout_rate)

    @property
    def encoder_layers(self) -> int:
        """Return the number of blocks with attention to both sides."""
        if self.family == "decoder":
            return 0
        if self.family == "encoder":
            return self.n_layers
        return self.n_encoder_layers or self.n_layers

    @property
    def layers_in_group(self) -> int:
        """Return the number of consecutive layers that share one set of parameters."""
        return self.n_layers // (self.layer_groups or self.n_layers)

    @property
    def biased(self) -> frozenset[str]:
        """Those of "qkv", "out" (of attention), "ffn" and "norm" that have a bias."""
        return BIASED[self.bias]

    @property
    def gated(self) -> bool:
        """Return whether the feed-forward has a gate."""
        return self.activation in GATED

    @property
    def ff_width(self) -> int:
        if self.d_ff:
            return self.d_ff
        if self.gated:
            # A gate is a third matrix: at 8/3 the layer has as many parameters as with two at 4.
            return -(-self.d_model * 8 // 3 // 64) * 64
        return 4 * self.d_model

    @property
    def expert_width(self) -> int:
        """Return the hidden width of an expert."""
        return self.experts.d_ff or self.ff_width

    @property
    def output(self) -> str:
        """Return the head, "auto" resolved."""
        if self.head.kind != "auto":
            return self.head.kind
        return "masked" if self.family == "encoder" else "language"

    @property
    def second_heads(self) -> tuple[str, ...]:
        """Return the heads beside that of `head`."""
        return tuple(name for name in SECOND_HEADS if getattr(self.head, name))

    @property
    def text_pooling(self) -> str:
        """Return the pooling of the vector of a text, "auto" resolved."""
        return "mean" if self.head.pooling == "auto" else self.head.pooling

    @property
    def pooled(self) -> str:
        """Return the pooling, "auto" resolved."""
        if self.head.pooling != "auto":
            return self.head.pooling
        return "first" if self.family == "encoder" else "last"

    @property
    def embedded_positions(self) -> str:
        """Return the positions that are added to the embeddings, if that scheme is one of those."""
        return "learned" if self.embedding.positions == "learned" else self.positions

    @property
    def rotated_width(self) -> int:
        """Dimensions of a head that RoPE rotates, in pairs: an odd number means one more."""
        return int((self.latent.rope_head_dim or self.head_width) * self.rope.fraction)

    @property
    def original_length(self) -> int:
        """Return the length that RoPE was trained at."""
        return self.rope.original_length or self.max_length

    @property
    def rope_scale(self) -> float:
        """Return the factor of rotated queries and keys (arXiv:2309.00071, 2402.13753)."""
        if self.rope.scaling not in ATTENTION_FACTORS:
            return 1.0
        return self.rope.attention_factor or ATTENTION_FACTORS[self.rope.scaling](self)

    def conflicts(self) -> list[str]:
        return model_conflicts(self)


@functools.lru_cache
def _base_of(config: ModelConfig) -> ModelConfig:
    """Raises ConfigError where the widths of mup_base are those of no model."""
    widths: dict[str, Any] = {**widths_of(config.mup_base)}
    return with_settings(config, {"parametrization": "standard", "mup_base": "", **widths})
