"""Records of the settings of a model that belong together, each with its rules.

`ModelConfig(experts=Experts(n=8, per_token=2))` in Python is `--model.experts.n 8
--model.experts.per_token 2` on the command line. What depends on other settings of the model too is
in `jaxformer.config.rules`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxformer.config.settings import (
    AutoRate,
    Bounds,
    Count,
    Factor,
    Fraction,
    Letters,
    Natural,
    NonNegative,
    PerRun,
    Section,
    Volatile,
    Width,
    divisors,
)
from jaxformer.config.variants import (
    AttentionKernel,
    EmbeddingName,
    ExpertKernel,
    HeadName,
    RopeScaling,
)


@dataclass(frozen=True)
class Rope(Section):
    """Rotary position embeddings of positions=rope (arXiv:2104.09864)."""

    section = "model.rope"

    theta: Annotated[float, Bounds(1)] = 10_000.0
    """Base of the RoPE frequencies."""
    pairing: Literal["half", "interleaved"] = "half"
    """Dimensions that RoPE rotates together: half (i, i + H/2), interleaved (2i, 2i + 1)."""
    fraction: Fraction = 1.0
    """Fraction of the width of a head that RoPE rotates, from its first dimension."""
    window_theta: NonNegative = 0.0
    """RoPE base of layers with a window, which then have no scaling; 0 uses theta."""
    pattern: Annotated[str, Letters("pn", "p (positions) and n (none), as in 'ppn'")] = "p"
    """Pattern repeated over the layers: p rotates queries and keys, n has no positions (NoPE)."""
    scaling: RopeScaling = "none"
    """Method by which RoPE is extended beyond the length it was trained at."""
    factor: Annotated[float, Bounds(1)] = 1.0
    """Factor by which the context is extended."""
    original_length: Natural = 0
    """Length in tokens that RoPE was trained at; 0 uses model.max_length."""
    slow: NonNegative = 1.0
    """yarn, llama3: frequencies with fewer rotations over the original length are fully scaled."""
    fast: NonNegative = 0.0
    """yarn, llama3: frequencies with more rotations over the original length are not scaled; 0 uses
    32 for yarn and 4 for llama3."""
    truncate: bool = True
    """yarn: widen the range of the partly scaled frequencies to whole indices of pairs."""
    short_factor: str = ""
    """longrope: divisor of the frequency of each pair, for example '1 1.5', in sequences of at most
    the original length."""
    long_factor: str = ""
    """longrope: divisor of the frequency of each pair in longer sequences."""
    attention_factor: NonNegative = 0.0
    """yarn, longrope: factor of the rotated queries and keys; 0 uses 1 + 0.1 ln(factor), or
    sqrt(1 + ln(factor) / ln(original_length))."""

    @property
    def fast_rotations(self) -> float:
        """Return the rotations over the original length from which frequencies are not scaled."""
        if self.fast:
            return self.fast
        return 4.0 if self.scaling == "llama3" else 32.0

    @property
    def factors(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """LongRoPE's divisors of the frequencies, for short and for long sequences."""
        return numbers_of(self.short_factor), numbers_of(self.long_factor)

    def conflicts(self) -> list[str]:
        problems = []
        if 0 < self.window_theta < 1:
            problems.append(f"window_theta={self.window_theta:g} must be at least 1, or 0.")
        if (self.factor != 1) == (self.scaling == "none"):
            problems.append(
                f"factor={self.factor:g} with model.rope.scaling={self.scaling!r}: set both, the"
                " factor above 1."
            )
        fast, slow = self.fast_rotations, self.slow
        if self.scaling == "yarn" and not (fast > slow > 0 and self.theta > 1):
            problems.append(
                f"scaling='yarn' needs model.rope.fast={fast:g} above model.rope.slow={slow:g},"
                f" that above 0, and model.rope.theta={self.theta:g} above 1."
            )
        return problems


@dataclass(frozen=True)
class RelativePositions(Section):
    """Tables of relative positions, of positions=t5 (arXiv:1910.10683) and disentangled
    (arXiv:2006.03654)."""

    section = "model.relative"

    buckets: Annotated[int, Bounds(4)] = 32
    """Number of buckets of T5's relative positions; of disentangled ones, on each side."""
    distance: Annotated[int, Bounds(2)] = 128
    """Distance in tokens from which all relative positions share the last bucket."""
    bias: Literal["stack", "layer"] = "stack"
    """Tables of T5's relative positions: one for all layers of a stack, or one for each (UMT5)."""


@dataclass(frozen=True)
class Attention(Section):
    """How queries, keys and values become the output of attention."""

    section = "model.attention"

    value_dim: Width = 0
    """Width of the values of a head; 0 uses model.head_dim."""
    scale: NonNegative = 0.0
    """Factor of the query-key products; 0 uses 1 / sqrt(head_dim)."""
    temperature: NonNegative = 0.0
    """Growth s of the scores with the position p of the query, whose factor is 1 + s ln(1 + floor(p
    / rope.original_length)) (Llama 4, Ministral 3)."""
    soft_cap: NonNegative = 0.0
    """Soft cap of the attention scores, cap * tanh(score / cap); 0 disables it."""
    sinks: bool = False
    """Learned attention-sink logit per head (no value)."""
    output_gate: bool = False
    """Multiply the output of each head by a sigmoid gate of the token, before the output matrix
    (arXiv:2505.06708)."""
    query_key_norm: Literal["none", "head", "width", "layer"] = "none"
    """Norm of queries and keys: none, RMS per head or over the whole width, or layer norm per head
    with a scale for each head (Command R+)."""
    dropout: PerRun[AutoRate] = "auto"
    """Dropout rate of attention weights; auto uses model.dropout. Fused kernels take none."""
    kernel: PerRun[Volatile[AttentionKernel]] = "auto"
    """Attention kernel; auto selects the fastest that supports the model in training, else xla."""
    max_segments: Volatile[Natural] = 0
    """Bound of the segment ids of a row, which cuDNN needs; 0: training takes it from the data."""


@dataclass(frozen=True)
class Latent(Section):
    """Latents of mixer=latent (multi-head latent attention, arXiv:2405.04434)."""

    section = "model.latent"

    kv_rank: Width = 0
    """Width of the latent of a token of mixer=latent, of which all keys and values are made."""
    query_rank: Width = 0
    """Width of the latent of queries of mixer=latent; 0 makes queries without one."""
    rope_head_dim: Width = 0
    """Number of last dimensions of a head of mixer=latent whose key all heads share; RoPE rotates
    these alone."""


@dataclass(frozen=True)
class Recurrent(Section):
    """State of mixer=delta (the gated delta rule, arXiv:2412.06464) and mamba2 (arXiv:2405.21060,
    whose queries and keys are C and B, and values X)."""

    section = "model.recurrent"

    heads: Width = 0
    """Number of heads, each with a state; 0 uses model.n_heads."""
    key_heads: Width = 0
    """Number of heads of queries and keys, each of which serves as many heads (the groups of
    mamba2); 0 uses heads."""
    key_dim: Width = 0
    """Width of queries and keys of a head, the rows of its state; 0 uses model.head_dim."""
    value_dim: Width = 0
    """Width of the values of a head, the columns of its state; 0 uses model.head_dim."""
    convolution: Annotated[int, Bounds(2)] = 4
    """Number of tokens that the convolution before queries, keys and values reads."""
    decay: Literal["head", "channel"] = "head"
    """Decay of the state of a head of mixer=delta: one, or one for each channel of its keys (Kimi
    Linear)."""
    rank: Width = 0
    """Width of the latents that the decay and the gate of mixer=delta are made of (Kimi Linear); 0
    has none."""
    gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the gate of the output of mixer=delta."""
    negative_eigenvalues: bool = False
    """Double the rate of mixer=delta, so that a token may reverse what stands under its key
    (arXiv:2411.12537)."""
    norm_eps: NonNegative = 0.0
    """Constant of the norm of the output of mixer=delta; 0 uses model.norm_eps."""
    norm_placement: Literal["auto", "pre"] = "auto"
    """Placement of the norms of the recurrent layers of model.layer_pattern; auto uses
    model.norm_placement."""
    chunk: Volatile[Count] = 64
    """Number of tokens that are computed at once, by products of matrices."""


@dataclass(frozen=True)
class Experts(Section):
    """Experts of feed_forward=experts and their router (arXiv:1701.06538)."""

    section = "model.experts"

    n: Natural = 0
    """Number of experts of feed_forward=experts."""
    per_token: Count = 2
    """Number of experts that each token is routed to (top-k)."""
    d_ff: Width = 0
    """Hidden width of an expert; 0 uses model.d_ff."""
    shared_ff: Width = 0
    """Hidden width of the shared expert, which every token passes; 0 has none."""
    shared_gate: bool = False
    """Multiply the output of the shared expert by a sigmoid gate of the token (Qwen)."""
    pattern: Annotated[str, Letters("ed", "e (experts) and d (dense), as in 'de'")] = "e"
    """Pattern repeated over the layers: e has experts, d a dense feed-forward (model.d_ff)."""
    dense_layers: Natural = 0
    """Number of first layers that have a dense feed-forward, whatever the pattern."""
    capacity: NonNegative = 0.0
    """Most tokens of a row that an expert takes, as a multiple of their mean; the others are
    dropped. 0 drops none."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts from the logits of the router."""
    renormalize: bool = True
    """Divide the scores of the experts of a token by their sum."""
    scale: NonNegative = 1.0
    """Factor of the weights of the experts."""
    router_bias: Literal["none", "learned", "balanced"] = "none"
    """Bias of the router: learned is added to its logits; balanced, to the scores by which experts
    are selected, and moves against their load."""
    groups: Count = 1
    """Number of groups of experts, of which each token selects some."""
    top_groups: Count = 1
    """Number of groups of experts that a token may select from."""
    balance_loss: NonNegative = 0.01
    """Weight of the load-balancing loss over the tokens of a microbatch."""
    z_loss: NonNegative = 0.001
    """Weight of the mean square of the log-sum-exp of the router's logits."""
    kernel: PerRun[Volatile[ExpertKernel]] = "auto"
    """Kernel of the products of experts; auto selects the fastest that is right on the device in
    training, else loop. xla multiplies all rows by all experts, for forward-mode derivatives."""

    def conflicts(self) -> list[str]:
        if not self.n:
            return []
        in_group = self.n // self.groups
        if self.shared_gate and not self.shared_ff:
            return ["shared_gate=True needs model.experts.shared_ff, the width of that expert."]
        if self.per_token > self.n:
            return [
                f"per_token={self.per_token} is above model.experts.n={self.n}: a token is routed"
                f" to each expert once at most, so choose 1 to {self.n}."
            ]
        if self.n % self.groups:
            return [
                f"n={self.n} is not divisible by model.experts.groups={self.groups}: choose one of"
                f" {divisors(self.n)} groups."
            ]
        if self.top_groups > self.groups:
            return [
                f"top_groups={self.top_groups} is above model.experts.groups={self.groups}:"
                f" choose 1 to {self.groups}."
            ]
        if self.groups > 1 and self.per_token > self.top_groups * in_group:
            return [
                f"per_token={self.per_token} is above the {in_group} experts of {self.top_groups}"
                " groups: raise model.experts.top_groups."
            ]
        return []


@dataclass(frozen=True)
class Embedding(Section):
    """What a stack begins with: embedded tokens, positions and token types."""

    section = "model.embedding"

    kind: EmbeddingName = "tokens"
    """Embedding of the inputs, to which a stack adds embedded positions and token types."""
    source: Literal["shared", "separate"] = "shared"
    """Embedding of the source of an encoder-decoder: that of the target, or its own (T5Gemma)."""
    scale: Literal["none", "sqrt"] = "none"
    """Scale of the token embeddings: none, or sqrt(d_model)."""
    multiplier: Factor = 1.0
    """Factor of the token embeddings."""
    width: Width = 0
    """Width of the embeddings, which a matrix projects to d_model (ELECTRA), and of the rows of the
    masked head; 0 uses model.d_model."""
    norm: bool = False
    """Apply a norm to the embeddings."""
    token_types: Natural = 0
    """Number of token types with an embedding (2 in BERT); 0 has none."""
    positions: Literal["auto", "learned"] = "auto"
    """Positions that are added to the embeddings: auto, those of model.positions=learned or
    sinusoidal;
    learned, a table beside a scheme of the layers (MPNet)."""
    position_offset: Natural = 0
    """Learned or sinusoidal positions before the first token's (2 in RoBERTa, BART, NLLB)."""
    sinusoids: Literal["interleaved", "half", "half_closed"] = "interleaved"
    """Sinusoidal dimensions: sines and cosines interleaved, half with sines first, half_closed so
    with frequencies down to 1 / 10000, which the others leave out (fairseq, M2M100)."""


@dataclass(frozen=True)
class Head(Section):
    """What follows the last layer: the pooling, the output matrix and the logits."""

    section = "model.head"

    kind: PerRun[HeadName] = "auto"
    """Output head; auto selects language, or masked for an encoder; none has no matrix."""
    n_classes: PerRun[Natural] = 0
    """Number of classes of the heads classes and tags; 0 uses the classes found in the data."""
    width: Width = 0
    """Width of the vector of a row, of the head projection (CLIP); 0 uses model.d_model."""
    pooling: PerRun[Literal["auto", "first", "last", "mean"]] = "auto"
    """Token that the heads classes and projection read, or the mean of all; auto selects first in
    an encoder, last in a decoder. Vectors of texts (jf.embed, the objective contrastive) read the
    same, but auto is their mean."""
    class_layers: Literal["auto", "dense", "dense_norm"] = "auto"
    """Layers of the heads classes and tags before their matrix: dense, act(x W + b) with
    pooler_activation, dense_norm with a norm behind it (ModernBERT); auto is dense for classes of
    an encoder, and else none."""
    pooler: bool = False
    """Keep BERT's pooler in an encoder with any head; heads that read it always have it."""
    pooler_activation: Literal["tanh", "relu", "gelu"] = "tanh"
    """Activation of the pooler (relu in DistilBERT, gelu in ELECTRA)."""
    next_sentence: PerRun[bool] = False
    """Add a second head that predicts whether the second text follows the first (BERT)."""
    dense_bias: bool = True
    """Bias of the dense layer of the masked head and of the pooler (none in ModernBERT)."""
    bias: bool = False
    """Add a bias to the language head; the other heads always have one."""
    scale: Literal["none", "rsqrt"] = "none"
    """Scale of the input of the output layer: none, or rsqrt (1 / sqrt(d_model))."""
    divisor: Factor = 1.0
    """Divisor of the logits, before their soft cap."""
    soft_cap: NonNegative = 0.0
    """Soft cap of the logits, cap * tanh(logit / cap); 0 disables it."""


def names_of(text: str) -> tuple[str, ...]:
    """Return the names in a setting, which are separated by commas or spaces."""
    return tuple(text.replace(",", " ").split())


def numbers_of(text: str) -> tuple[float, ...]:
    """Return the numbers in a setting, which are separated by commas or spaces; none if one is not
    a number."""
    try:
        return tuple(map(float, names_of(text)))
    except ValueError:
        return ()
