"""The words of jaxformer: every setting of a run, as frozen dataclasses that check themselves.

The comment behind a field is its help text on the command line. Configs are hashable, so a `ModelConfig` can be a
static argument of `jax.jit`.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


class ConfigError(ValueError):
    """A setting or an input that cannot work; the message says what, where, what is allowed and what to do."""


@dataclass(frozen=True)
class Bounds:
    """The closed or half-open range of a number: low <= value, and value < below where that is given."""

    low: float
    below: float | None = None

    def __str__(self) -> str:
        return f"at least {self.low:g}" + ("" if self.below is None else f" and below {self.below:g}")

    def hold(self, value: float) -> bool:
        return math.isfinite(value) and value >= self.low and (self.below is None or value < self.below)


Count = Annotated[int, Bounds(1)]
Natural = Annotated[int, Bounds(0)]
Rate = Annotated[float, Bounds(0, 1)]
NonNegative = Annotated[float, Bounds(0)]


@dataclass(frozen=True)
class Section:
    """A group of settings. Construction raises ConfigError naming every field that is out of its type or range."""

    def __post_init__(self) -> None:
        problems = [*_field_problems(self), *([] if [*_field_problems(self)] else self.conflicts())]
        if problems:
            raise ConfigError("\n".join(f"{type(self).section}.{problem}" for problem in problems))

    section = "config"

    def conflicts(self) -> list[str]:
        """Messages about fields that are fine alone and impossible together."""
        return []


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of a decoder-only transformer, and how it is computed."""

    section = "model"

    vocab_size: Natural = 0  # Tokens in the embedding table; 0 takes the tokenizer's size when a run is loaded.
    d_model: Count = 384  # Width of the residual stream.
    n_layers: Count = 6  # Blocks.
    n_heads: Count = 6  # Query heads.
    n_kv_heads: Natural = 0  # Key and value heads (GQA; 1 is MQA); 0 means as many as n_heads.
    head_dim: Natural = 0  # Width of a head; 0 means d_model / n_heads.
    d_ff: Natural = 0  # Hidden width of the feed-forward; 0 means 4 d_model, or 8/3 d_model up to a multiple of 64 if gated.
    max_length: Count = 2048  # Most positions of a sequence; the size of the table of learned positions.
    positions: Literal["rope", "learned", "none"] = "rope"  # How a token knows where it is.
    rope_theta: Annotated[float, Bounds(1)] = 10_000.0  # Base of the RoPE frequencies.
    rope_pairing: Literal["half", "interleaved"] = "half"  # Which dimensions rotate together: (i, i + H/2) or (2i, 2i + 1).
    norm: Literal["rms", "layer", "none"] = "rms"  # Kind of normalisation.
    norm_placement: Literal["pre", "post"] = "pre"  # Before each sublayer (inside the residual) or after the sum.
    norm_eps: NonNegative = 1e-5  # Added to the variance, or the mean square, before its root.
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu", "silu", "relu2"] = "swiglu"  # Of the feed-forward.
    bias: Literal["none", "all"] = "none"  # Which linear layers and layer norms carry a bias.
    tied_head: bool = False  # Use the embedding table as the output layer too.
    dropout: Rate = 0.0  # Of the embedding, the attention weights and each sublayer's output, in training only.
    init: Literal["gpt2", "truncated_normal"] = "gpt2"  # N(0, 0.02) with scaled residuals, or variance 2/(d_in+d_out).
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # Of the products; auto: bfloat16 on GPU and TPU, else float32.
    layer_loop: Literal["unroll", "scan"] = "unroll"  # Scan compiles once for all layers; unrolled runs faster.
    remat: Literal["none", "dots", "full"] = "none"  # What the backward pass recomputes: nothing, all but products, all.
    attention_kernel: Literal["auto", "xla", "blocked", "cudnn", "tpu"] = "auto"  # auto: fastest in training, else plain.

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def ff_width(self) -> int:
        return self.d_ff or (-(-self.d_model * 8 // 3 // 64) * 64 if self.gated else 4 * self.d_model)

    def conflicts(self) -> list[str]:
        found = []
        if not self.head_dim and self.d_model % self.n_heads:
            found.append(
                f"d_model={self.d_model} is not divisible by model.n_heads={self.n_heads}: "
                f"choose heads that divide it ({_divisors(self.d_model)}), or set model.head_dim."
            )
        if self.n_heads % self.kv_heads:
            found.append(
                f"n_heads={self.n_heads} is not divisible by model.n_kv_heads={self.n_kv_heads}: "
                f"every key head serves the same number of query heads, so choose one of {_divisors(self.n_heads)}."
            )
        if self.positions == "rope" and not found and self.head_width % 2:
            found.append(
                f"head_dim={self.head_width} is odd, and RoPE rotates pairs: make it even, or change model.positions."
            )
        return found


@dataclass(frozen=True)
class RunSettings(Section):
    """Where a run lives and where its randomness starts."""

    section = "run"

    dir: str = "runs/default"  # Run directory; the same command continues what it holds.
    seed: Natural = 1337  # Of the initial values, the order of the data and dropout.
    compilation_cache: str = "~/.cache/jaxformer/xla"  # Compiled programs kept between runs; empty turns it off.
    progress: Literal["auto", "bar", "lines", "none"] = "auto"  # Shown on the terminal; auto: a bar where there is one.
    sample_prompt: str = ""  # Start of the sample printed at the end; empty starts from an end-of-text token.
    sample_tokens: Natural = 128  # Length of that sample; 0 prints none.


@dataclass(frozen=True)
class DataConfig(Section):
    """The text, and how it becomes sequences."""

    section = "data"

    train: str = "stdlib"  # A .txt or .jsonl file, plain, .gz or .zst, a glob of them, or a named source (stdlib).
    validation: str = ""  # Likewise; empty holds out a part of data.train that training never sees.
    validation_fraction: Annotated[float, Bounds(0, 1)] = 0.1  # The part held out where data.validation is empty.
    sequence_length: Count = 256  # Tokens of one row of a batch.
    packing: Literal["stream", "documents"] = "stream"  # Rows cut from one stream, or documents kept apart by segment ids.
    text_field: str = "text"  # The field of a .jsonl line that holds the document.
    cache_dir: str = "~/.cache/jaxformer/data"  # Where tokenized text is kept and found again.
    prefetch: Natural = 2  # Batches prepared ahead on a thread; 0 prepares each when it is asked for.


@dataclass(frozen=True)
class TokenizerConfig(Section):
    """How text becomes tokens."""

    section = "tokenizer"

    kind: Literal["bpe", "bytes", "characters"] = "bpe"  # Byte-level BPE trained on data.train, raw bytes, or characters.
    path: str = ""  # A tokenizer.json to use instead of making one.
    vocab_size: Annotated[int, Bounds(257)] = 4096  # Entries of a trained BPE, the end-of-text token counted in.
    training_bytes: Count = 20_000_000  # Bytes of data.train, spread evenly over it, that the BPE is trained on.


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The update rule and its schedule."""

    section = "optimizer"

    name: Literal["adamw", "adafactor", "lion", "sgd", "muon"] = "adamw"  # From optax; muon leaves non-matrices to AdamW.
    learning_rate: NonNegative = 1e-3  # At the top of the schedule.
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"  # After the warm-up.
    warmup_steps: Natural = 100  # Steps of linear warm-up from zero.
    decay_steps: Natural = 0  # Step at which the decay ends; 0 means train.steps.
    final_fraction: Annotated[float, Bounds(0, 1.000001)] = 0.1  # Learning rate at the end over that at the top.
    wsd_decay_fraction: Rate = 0.2  # Part of the steps that the wsd schedule spends decaying.
    weight_decay: NonNegative = 0.1  # Decoupled; times the learning rate.
    decay: Literal["matrices", "all"] = "matrices"  # Which parameters decay.
    b1: Rate = 0.9  # Decay of the first moment (AdamW, Lion, Muon and SGD's momentum).
    b2: Rate = 0.95  # Decay of the second moment.
    eps: NonNegative = 1e-8  # Added to the root of the second moment.
    clip_norm: NonNegative = 1.0  # Largest global norm of a gradient; 0 never clips.


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long, how much at once, and what is written on the way."""

    section = "train"

    steps: Count = 1000  # Optimizer steps of the whole run.
    batch_size: Count = 16  # Sequences per step, over all devices.
    microbatches: Count = 1  # Pieces a batch is computed in, one after the other, to save memory.
    label_smoothing: Rate = 0.0  # Weight of the uniform distribution in the targets.
    z_loss: NonNegative = 0.0  # Coefficient of the squared log-partition (1e-4 is usual).
    log_every: Count = 10  # Steps between lines of metrics.jsonl.
    eval_every: Natural = 200  # Steps between evaluations; 0 evaluates only at the end.
    eval_batches: Natural = 0  # Batches of an evaluation on the way; 0 reads all. The last evaluation always reads all.
    checkpoint_every: Natural = 200  # Steps between checkpoints; 0 saves only at the end.
    keep_checkpoints: Count = 2  # Newest checkpoints kept.

    def conflicts(self) -> list[str]:
        if self.batch_size % self.microbatches:
            return [
                f"batch_size={self.batch_size} is not divisible by train.microbatches={self.microbatches}: "
                f"choose one of {_divisors(self.batch_size)} microbatches."
            ]
        return []


@dataclass(frozen=True)
class MeshConfig(Section):
    """How devices are arranged; the product of the three is the number of devices."""

    section = "mesh"

    data: Natural = 0  # Copies of the model, each with its share of the batch; 0 takes the devices the others leave.
    fsdp: Count = 1  # Devices that share one copy's parameters and split its batch.
    tensor: Count = 1  # Devices that split heads, feed-forward width and vocabulary.


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. `jf.load_config` makes one from a file and checks the sections against each other."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


def _field_problems(section: Section) -> Iterator[str]:
    for name, hint in get_type_hints(type(section), include_extras=True).items():
        value: Any = getattr(section, name)
        bounds = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bounds)]
        kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                yield f"{name}={value!r} is not one of {', '.join(map(repr, get_args(kind)))}."
        elif not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) is not (kind is bool):
            yield f"{name}={value!r} is not of type {kind.__name__}."
        elif not all(bound.hold(value) for bound in bounds):
            yield f"{name}={value!r} must be {bounds[0]}."


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"model.n_layers": 6, ...}`: every field of a config by its dotted name."""
    out: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        out |= flat(value, f"{prefix}{entry.name}.") if dataclasses.is_dataclass(value) else {f"{prefix}{entry.name}": value}
    return out
