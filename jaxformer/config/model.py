"""The settings of a model: its family, its shape, and its row of each table of variants."""

import functools
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from jaxformer.config.rules import model_conflicts, numbers_of, widths_of
from jaxformer.config.settings import (
    AutoRate,
    Bounds,
    Count,
    Factor,
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    Volatile,
)
from jaxformer.config.variants import (
    ATTENTION_FACTORS,
    BIASED,
    GATED,
    SECOND_HEADS,
    Activation,
    AttentionKernel,
    EmbeddingName,
    ExpertKernel,
    FeedForward,
    HeadName,
    Initializer,
    Mixer,
    Normalization,
    Parametrization,
    RopeScaling,
)


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of a transformer, and how it is computed."""

    section = "model"

    family: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """Architecture: decoder (GPT, Llama), encoder (BERT), or encoder_decoder (T5)."""
    vocab_size: Natural = 0
    """Number of tokens in the embedding table; 0 uses the size of the tokenizer."""
    d_model: Count = 384
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
    feed_forward: FeedForward = "ffn"
    """Sublayer of a block in which each token is transformed by itself."""
    n_heads: Count = 6
    """Number of query heads."""
    n_kv_heads: Natural = 0
    """Number of key and value heads: fewer than n_heads is GQA, 1 is MQA; 0 uses n_heads."""
    head_dim: Natural = 0
    """Width of a head; 0 uses d_model / n_heads."""
    value_dim: Natural = 0
    """Width of the values of a head; 0 uses head_dim."""
    kv_rank: Natural = 0
    """Width of the latent of a token of mixer=latent, of which all keys and values are made."""
    query_rank: Natural = 0
    """Width of the latent of queries of mixer=latent; 0 makes queries without one."""
    rope_head_dim: Natural = 0
    """Number of last dimensions of a head of mixer=latent whose key all heads share; RoPE rotates
    these alone."""
    d_ff: Natural = 0
    """Hidden width of the feed-forward layer; 0 uses 4 d_model (gated: 8/3, multiple of 64)."""
    n_experts: Natural = 0
    """Number of experts of feed_forward=experts."""
    experts_per_token: Count = 2
    """Number of experts that each token is routed to (top-k)."""
    expert_ff: Natural = 0
    """Hidden width of an expert; 0 uses d_ff."""
    shared_ff: Natural = 0
    """Hidden width of the shared expert, which every token passes; 0 has none."""
    expert_pattern: str = "e"
    """Pattern repeated over the layers: e has experts, d a dense feed-forward of width d_ff."""
    dense_layers: Natural = 0
    """Number of first layers that have a dense feed-forward, whatever the pattern."""
    expert_capacity: NonNegative = 0.0
    """Most tokens of a row that an expert takes, as a multiple of their mean; the others are
    dropped. 0 drops none."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts from the logits of the router."""
    router_renormalize: bool = True
    """Divide the scores of the experts of a token by their sum."""
    router_scale: NonNegative = 1.0
    """Factor of the weights of the experts."""
    router_bias: Literal["none", "learned", "balanced"] = "none"
    """Bias of the router: learned is added to its logits; balanced, to the scores by which experts
    are selected, and moves against their load."""
    router_groups: Count = 1
    """Number of groups of experts, of which each token selects some."""
    router_top_groups: Count = 1
    """Number of groups of experts that a token may select from."""
    router_balance_loss: NonNegative = 0.01
    """Weight of the load-balancing loss over the tokens of a microbatch."""
    router_z_loss: NonNegative = 0.001
    """Weight of the mean square of the log-sum-exp of the router's logits."""
    max_length: Count = 2048
    """Maximum length of a sequence in tokens; also the size of the table of learned positions."""
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "t5", "disentangled", "none"] = (
        "rope"
    )
    """Positional scheme."""
    position_embedding: Literal["auto", "learned"] = "auto"
    """Positions that are added to the embeddings: auto, those of positions=learned or sinusoidal;
    learned, a table beside a scheme of the layers (MPNet)."""
    position_pattern: str = "p"
    """Pattern repeated over the layers: p rotates queries and keys, n has no positions (NoPE)."""
    rope_theta: Annotated[float, Bounds(1)] = 10_000.0
    """Base of the RoPE frequencies."""
    rope_pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that RoPE rotates together: half (i, i + H/2), interleaved (2i, 2i + 1)."""
    rope_fraction: Fraction = 1.0
    """Fraction of the width of a head that RoPE rotates, from its first dimension."""
    rope_window_theta: NonNegative = 0.0
    """RoPE base of layers with a window, which then have no scaling; 0 uses rope_theta."""
    rope_scaling: RopeScaling = "none"
    """Method by which RoPE is extended beyond the length it was trained at."""
    rope_factor: Annotated[float, Bounds(1)] = 1.0
    """Factor by which the context is extended."""
    rope_original_length: Natural = 0
    """Length in tokens that RoPE was trained at; 0 uses max_length."""
    rope_slow: NonNegative = 1.0
    """yarn, llama3: frequencies with fewer rotations over the original length are fully scaled."""
    rope_fast: NonNegative = 0.0
    """yarn, llama3: frequencies with more rotations over the original length are not scaled; 0 uses
    32 for yarn and 4 for llama3."""
    rope_truncate: bool = True
    """yarn: widen the range of the partly scaled frequencies to whole indices of pairs."""
    rope_short_factor: str = ""
    """longrope: divisor of the frequency of each pair, for example '1 1.5', in sequences of at most
    the original length."""
    rope_long_factor: str = ""
    """longrope: divisor of the frequency of each pair in longer sequences."""
    rope_attention_factor: NonNegative = 0.0
    """yarn, longrope: factor of the rotated queries and keys; 0 uses 1 + 0.1 ln(rope_factor), or
    sqrt(1 + ln(rope_factor) / ln(rope_original_length))."""
    position_offset: Natural = 0
    """Learned or sinusoidal positions before the first token's (2 in RoBERTa, BART, NLLB)."""
    sinusoids: Literal["interleaved", "half", "half_closed"] = "interleaved"
    """Sinusoidal dimensions: sines and cosines interleaved, half with sines first, half_closed so
    with frequencies down to 1 / 10000, which the others leave out (fairseq, M2M100)."""
    relative_buckets: Annotated[int, Bounds(4)] = 32
    """Number of buckets of T5's relative positions; of disentangled ones, on each side."""
    relative_distance: Annotated[int, Bounds(2)] = 128
    """Distance in tokens from which all relative positions share the last bucket."""
    relative_bias: Literal["stack", "layer"] = "stack"
    """Tables of T5's relative positions: one for all layers of a stack, or one for each (UMT5)."""
    window: Natural = 0
    """Attention window in tokens, with the token itself (an encoder: on both sides); 0 has none."""
    window_pattern: str = "w"
    """Pattern repeated over the layers: w has the window, f attends to the whole sequence."""
    source_window: Natural = 0
    """Window of the encoder of an encoder-decoder, on both sides; 0 uses window."""
    attention_scale: NonNegative = 0.0
    """Factor of the query-key products; 0 uses 1 / sqrt(head_dim)."""
    attention_temperature: NonNegative = 0.0
    """Growth s of the scores with the position p of the query, whose factor is 1 + s ln(1 + floor(p
    / rope_original_length)) (Llama 4, Ministral 3)."""
    attention_soft_cap: NonNegative = 0.0
    """Soft cap of the attention scores, cap * tanh(score / cap); 0 disables it."""
    attention_sinks: bool = False
    """Learned attention-sink logit per head (no value)."""
    query_key_norm: Literal["none", "head", "width", "layer"] = "none"
    """Norm of queries and keys: none, RMS per head or over the whole width, or layer norm per head
    with a scale for each head (Command R+)."""
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
    embedding: EmbeddingName = "tokens"
    """Embedding of the inputs, to which a stack adds embedded positions and token types."""
    source_embedding: Literal["shared", "separate"] = "shared"
    """Embedding of the source of an encoder-decoder: that of the target, or its own (T5Gemma)."""
    embedding_scale: Literal["none", "sqrt"] = "none"
    """Scale of the token embeddings: none, or sqrt(d_model)."""
    embedding_multiplier: Factor = 1.0
    """Factor of the token embeddings."""
    embedding_width: Natural = 0
    """Width of the embeddings, which a matrix projects to d_model (ELECTRA), and of the rows of the
    masked head; 0 uses d_model."""
    embedding_norm: bool = False
    """Apply a norm to the embeddings."""
    token_types: Natural = 0
    """Number of token types with an embedding (2 in BERT); 0 has none."""
    head: HeadName = "auto"
    """Output head; auto selects language, or masked for an encoder; none has no matrix."""
    n_classes: Natural = 0
    """Number of classes of the heads classes and tags; 0 uses the classes found in the data."""
    projection_width: Natural = 0
    """Width of the vector of a row, of the head projection (CLIP); 0 uses d_model."""
    pooling: Literal["auto", "first", "last", "mean"] = "auto"
    """Token that the heads classes and projection read, or the mean of all; auto selects first in
    an encoder, last in a decoder. Vectors of texts (jf.embed, the objective contrastive) read the
    same, but auto is their mean."""
    class_head: Literal["auto", "dense", "dense_norm"] = "auto"
    """Layers of the heads classes and tags before their matrix: dense, act(x W + b) with
    pooler_activation, dense_norm with a norm behind it (ModernBERT); auto is dense for classes of
    an encoder, and else none."""
    pooler: bool = False
    """Keep BERT's pooler in an encoder with any head; heads that read it always have it."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the pooler (relu in DistilBERT, gelu in ELECTRA)."""
    next_sentence: bool = False
    """Add a second head that predicts whether the second text follows the first (BERT)."""
    tied_head: bool = False
    """Use the embedding table as the output matrix."""
    head_dense_bias: bool = True
    """Bias of the dense layer of the masked head and of the pooler (none in ModernBERT)."""
    head_bias: bool = False
    """Add a bias to the language head; the other heads always have one."""
    logit_scale: Literal["none", "rsqrt"] = "none"
    """Scale of the input of the output layer: none, or rsqrt (1 / sqrt(d_model))."""
    logit_divisor: Factor = 1.0
    """Divisor of the logits, before their soft cap."""
    logit_soft_cap: NonNegative = 0.0
    """Soft cap of the logits, cap * tanh(logit / cap); 0 disables it."""
    dropout: Rate = 0.0
    """Dropout rate in training, of embeddings, attention weights and sublayer outputs."""
    attention_dropout: AutoRate = "auto"
    """Dropout rate of attention weights; auto uses dropout. Fused kernels take no rate above 0."""
    init: Initializer = "gpt2"
    """Initialization: gpt2 N(0, 0.02), residual projections scaled; truncated_normal and xavier
    (uniform), variance 2 / (fan_in + fan_out); fan_in, variance 1 / fan_in."""
    parametrization: Parametrization = "standard"
    """How initial values and learning rates follow the width: standard, as model.init and the
    optimizer say; mup, so that what holds at the widths of model.mup_base holds at all widths."""
    mup_base: str = ""
    """Widths of the model at which the settings of parametrization=mup are found, as in 'd_model=64
    n_heads=4'; what it does not name is as here."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the matrix products; auto selects bfloat16 on GPU and TPU, float32 on CPU."""
    layer_loop: Volatile[Literal["auto", "unroll", "scan"]] = "auto"
    """scan compiles one layer for all, unroll compiles each and runs faster on CPU and GPU; auto
    scans on TPU, and experts or more than 40 layers on GPU."""
    remat: Volatile[Literal["none", "names", "dots", "full"]] = "none"
    """Recomputed in the backward pass: none, names (all but the points of model.saved), dots (all
    but matrix products), full (all but attention)."""
    saved: Volatile[str] = ""
    """Points kept by remat=names: none, or of latent q k v attention out gate up down; empty: q to
    out."""
    offload: Volatile[str] = ""
    """Points, or input (that of a layer), that remat=names keeps in the memory of the host."""
    attention_kernel: Volatile[AttentionKernel] = "auto"
    """Attention kernel; auto selects the fastest that supports the model in training, else xla."""
    expert_kernel: Volatile[ExpertKernel] = "auto"
    """Kernel of the products of experts; auto selects the fastest that is right on the device in
    training, else loop. xla multiplies all rows by all experts, for forward-mode derivatives."""
    max_segments: Volatile[Natural] = 0
    """Bound of the segment ids of a row, which cuDNN needs; 0: training takes it from the data."""

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
    def embedded_width(self) -> int:
        return self.embedding_width or self.d_model

    @property
    def base_model(self) -> "ModelConfig":
        """The model of mup_base, in the standard parametrization; without one, this model."""
        return _base_of(self) if self.mup_base else self

    @property
    def score_scale(self) -> float:
        """attention_scale, which with mup_base is that of its heads and falls as 1 / head_width;
        0 is 1 / sqrt(head_width)."""
        base = self.base_model.head_width
        if base == self.head_width:
            return self.attention_scale
        return (self.attention_scale or base**-0.5) * base / self.head_width

    @property
    def attention_dropout_rate(self) -> float:
        """The dropout rate of attention weights, "auto" resolved."""
        return self.dropout if self.attention_dropout == "auto" else self.attention_dropout

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything, so that a loss needs a key."""
        return bool(self.dropout or self.attention_dropout_rate)

    @property
    def encoder_layers(self) -> int:
        """Number of blocks with attention to both sides."""
        if self.family == "decoder":
            return 0
        return (self.family == "encoder_decoder" and self.n_encoder_layers) or self.n_layers

    @property
    def layers_in_group(self) -> int:
        """Number of consecutive layers that share one set of parameters."""
        return self.n_layers // (self.layer_groups or self.n_layers)

    @property
    def biased(self) -> frozenset[str]:
        """Those of "qkv", "out" (of attention), "ffn" and "norm" that have a bias."""
        return BIASED[self.bias]

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate."""
        return self.activation in GATED

    @property
    def ff_width(self) -> int:
        gated, plain = -(-self.d_model * 8 // 3 // 64) * 64, 4 * self.d_model
        return self.d_ff or (gated if self.gated else plain)

    @property
    def expert_width(self) -> int:
        """The hidden width of an expert."""
        return self.expert_ff or self.ff_width

    @property
    def output(self) -> str:
        """The head, "auto" resolved."""
        auto = "masked" if self.family == "encoder" else "language"
        return auto if self.head == "auto" else self.head

    @property
    def second_heads(self) -> tuple[str, ...]:
        """The heads beside that of `head`."""
        return tuple(name for name in SECOND_HEADS if getattr(self, name))

    @property
    def text_pooling(self) -> str:
        """The pooling of the vector of a text, "auto" resolved."""
        return "mean" if self.pooling == "auto" else self.pooling

    @property
    def pooled(self) -> str:
        """The pooling, "auto" resolved."""
        auto = "first" if self.family == "encoder" else "last"
        return auto if self.pooling == "auto" else self.pooling

    @property
    def embedded_positions(self) -> str:
        """The positions that are added to the embeddings, if that scheme is one of those."""
        return "learned" if self.position_embedding == "learned" else self.positions

    @property
    def rotated_width(self) -> int:
        """Dimensions of a head that RoPE rotates, in pairs: an odd number means one more."""
        return int((self.rope_head_dim or self.head_width) * self.rope_fraction)

    @property
    def original_length(self) -> int:
        """The length that RoPE was trained at."""
        return self.rope_original_length or self.max_length

    @property
    def fast_rotations(self) -> float:
        """The rotations over the original length from which frequencies are not scaled."""
        return self.rope_fast or (4.0 if self.rope_scaling == "llama3" else 32.0)

    @property
    def rope_scale(self) -> float:
        """The factor of rotated queries and keys (arXiv:2309.00071, 2402.13753)."""
        if self.rope_scaling not in ATTENTION_FACTORS:
            return 1.0
        return self.rope_attention_factor or ATTENTION_FACTORS[self.rope_scaling](self)

    @property
    def rope_factors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """LongRoPE's divisors of the frequencies, for short and for long sequences."""
        return numbers_of(self.rope_short_factor), numbers_of(self.rope_long_factor)

    def conflicts(self) -> list[str]:
        return model_conflicts(self)


@functools.lru_cache
def _base_of(config: ModelConfig) -> ModelConfig:
    """Raises ConfigError where the widths of mup_base are those of no model."""
    widths: dict[str, Any] = {**widths_of(config.mup_base)}
    return replace(config, parametrization="standard", mup_base="", **widths)
