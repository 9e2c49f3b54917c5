"""The words of jaxformer: every setting of a run, as frozen dataclasses that check themselves.

The comment behind a field is its help text on the command line. Configs are hashable, so a
`ModelConfig` can be a static argument of `jax.jit`.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxformer.config_model import ModelConfig
from jaxformer.settings import (
    Bounds,
    ConfigError,
    Count,
    Fraction,
    Natural,
    NonNegative,
    Rate,
    Section,
    TableAt,
    divisors,
)

__all__ = [
    "ConfigError",
    "DataConfig",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveName",
    "OptimizerConfig",
    "RunConfig",
    "RunSettings",
    "TokenizerConfig",
    "TrainConfig",
    "flat",
]


@dataclass(frozen=True)
class RunSettings(Section):
    """Where a run lives and where its randomness starts."""

    section = "run"

    dir: str = "runs/default"
    """Run directory; the same command continues what it holds."""
    init_from: str = ""
    """A run to begin from: its parameters where they fit this model, new ones where the head is
    another."""
    seed: Natural = 1337
    """Of the initial values, the order of the data and dropout."""
    compilation_cache: str = "~/.cache/jaxformer/xla"
    """Compiled programs kept between runs; empty turns it off."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Shown on the terminal; auto: a bar where there is one."""
    sample_prompt: str = ""
    """Start of the sample printed at the end; empty starts from an end-of-text token."""
    sample_tokens: Natural = 128
    """Length of that sample; 0 prints none."""


Packing = Literal["stream", "documents", "best_fit"]
WordPatternName = Literal["gpt2", "llama3"]
Undecodable = Literal["refuse", "replace", "skip"]
Malformed = Literal["refuse", "skip"]
ObjectiveName = Annotated[
    Literal["auto", "causal", "masked", "spans", "prefix", "pairs", "answers", "classes", "tags"],
    TableAt("jaxformer.objectives.OBJECTIVES"),
]

OptimizerName = Annotated[
    Literal["adamw", "adafactor", "lion", "sgd", "muon"],
    TableAt("jaxformer.optim.OPTIMIZERS"),
]
Schedule = Annotated[
    Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"],
    TableAt("jaxformer.optim.SCHEDULES"),
]


def named_sources(text: str) -> list[str]:
    """The sources that data.train or data.validation names: apart by ';', unless all of it is a
    path that exists."""
    return (
        [text]
        if os.path.exists(text)
        else [spec.strip() for spec in text.split(";") if spec.strip()]
    )


@dataclass(frozen=True)
class DataConfig(Section):
    """The text, and how it becomes sequences."""

    section = "data"

    train: str = "stdlib"
    """A file, directory, glob, token ids, 'train.{de,en}', '-', 'datasets:NAME', stdlib; more by
    ';'."""
    weights: str = ""
    """Shares of several sources, as in '0.7 0.3'; from step 1000 on others: '0.7 0.3; 1000: 0.5
    0.5'."""
    epochs: str = ""
    """In place of weights: how often each source is read while the others are, as in '1 4'."""
    validation: str = ""
    """Likewise; empty holds out a part of data.train that training never sees."""
    validation_fraction: Annotated[float, Bounds(0, 1)] = 0.1
    """The part held out where data.validation is empty."""
    sequence_length: Count = 256
    """Tokens of one row of a batch."""
    length_warmup: str = ""
    """Shorter rows at first, as in '64; 500: 128; 1000: 256': as many tokens a step, in more rows.

    """
    packing: Packing = "stream"
    """Rows cut from one stream; documents kept apart by segment ids; or best_fit, none cut."""
    objective: ObjectiveName = "auto"
    """What is learnt of the data; auto: causal, masked or spans, as the model's family has it."""
    source_length: Natural = 0
    """Tokens of one row of sources for an encoder-decoder; 0 means as many as sequence_length."""
    text_field: str = "text"
    """The field of a .jsonl or .tsv record, or the column of a .parquet file, that holds the text.

    """
    pair_field: str = ""
    """The field of a second text to classify beside the first, where there is one."""
    source_field: str = "source"
    """The field of what is given: the source of a pair, the question of an answer."""
    target_field: str = "target"
    """The field of what is to be written: the target of a pair, the answer."""
    label_field: str = "label"
    """The field of a text's class, or of the list of its words' tags."""
    noise_density: Annotated[float, Bounds(0, 1)] = 0.15
    """The part of the tokens that masked and spans hide."""
    span_length: Annotated[float, Bounds(1)] = 3.0
    """Mean length of a hidden span."""
    mask_units: Literal["tokens", "words"] = "tokens"
    """What masked hides at a time: single tokens, or whole words."""
    undecodable: Undecodable = "refuse"
    """Bytes that are not UTF-8; skip leaves the document out."""
    malformed: Malformed = "refuse"
    """Records that are not JSON, or lack the field."""
    cache_dir: str = "~/.cache/jaxformer/data"
    """Where tokenized text is kept and found again."""
    prefetch: Natural = 2
    """Batches prepared ahead on a thread; 0 prepares each when it is asked for."""


@dataclass(frozen=True)
class TokenizerConfig(Section):
    """How text becomes tokens."""

    section = "tokenizer"

    kind: Literal["bpe", "bytes", "characters"] = "bpe"
    """Byte-level BPE trained on data.train, raw bytes, or characters."""
    path: str = ""
    """A tokenizer.json to use instead of making one."""
    vocab_size: Annotated[int, Bounds(257)] = 4096
    """Entries of a trained BPE, special tokens counted in."""
    pattern: WordPatternName = "gpt2"
    """How a trained BPE parts text into words: as GPT-2's, or as Llama 3's, numbers by 3 digits."""
    training_bytes: Count = 20_000_000
    """Bytes of data.train, spread evenly over it, that the BPE is trained on."""


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The update rule and its schedule."""

    section = "optimizer"

    name: OptimizerName = "adamw"
    """From optax; muon leaves non-matrices to AdamW."""
    learning_rate: NonNegative = 1e-3
    """At the top of the schedule."""
    schedule: Schedule = "cosine"
    """After the warm-up."""
    warmup_steps: Natural = 100
    """Steps of linear warm-up from zero."""
    decay_steps: Natural = 0
    """Step at which the decay ends; 0 means train.steps."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end over that at the top."""
    wsd_decay_fraction: Rate = 0.2
    """Part of the steps that the wsd schedule spends decaying."""
    weight_decay: NonNegative = 0.1
    """Decoupled; times the learning rate."""
    decay: Literal["matrices", "all"] = "matrices"
    """Which parameters decay."""
    b1: Rate = 0.9
    """Decay of the first moment (AdamW, Lion, Muon and SGD's momentum)."""
    b2: Rate = 0.95
    """Decay of the second moment."""
    eps: NonNegative = 1e-8
    """Added to the root of the second moment."""
    clip_norm: NonNegative = 1.0
    """Largest global norm of a gradient; 0 never clips."""


@dataclass(frozen=True)
class TrainConfig(Section):
    """How long, how much at once, and what is written on the way."""

    section = "train"

    steps: Count = 1000
    """Optimizer steps of the whole run."""
    batch_size: Count = 16
    """Sequences per step, over all devices."""
    microbatches: Count = 1
    """Pieces a batch is computed in, one after the other, to save memory."""
    label_smoothing: Rate = 0.0
    """Weight of the uniform distribution in the targets."""
    z_loss: NonNegative = 0.0
    """Coefficient of the squared log-partition (1e-4 is usual)."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: Natural = 200
    """Steps between evaluations; 0 evaluates only at the end."""
    eval_batches: Natural = 0
    """Batches of an evaluation on the way; 0 reads all. The last evaluation always reads all."""
    checkpoint_every: Natural = 200
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept."""

    def conflicts(self) -> list[str]:
        if self.batch_size % self.microbatches:
            return [
                f"batch_size={self.batch_size} is not divisible by"
                f" train.microbatches={self.microbatches}: choose one of"
                f" {divisors(self.batch_size)} microbatches."
            ]
        return []


@dataclass(frozen=True)
class MeshConfig(Section):
    """How devices are arranged; the product of the three is the number of devices."""

    section = "mesh"

    data: Natural = 0
    """Copies of the model, each with its share of the batch; 0 takes the devices the others leave.

    """
    fsdp: Count = 1
    """Devices that share one copy's parameters and split its batch."""
    tensor: Count = 1
    """Devices that split heads, feed-forward width and vocabulary."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. `jf.load_config` makes one from a file and checks the sections against
    each other."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """`{"model.n_layers": 6, ...}`: every field of a config by its dotted name."""
    out: dict[str, Any] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        out |= (
            flat(value, f"{prefix}{entry.name}.")
            if dataclasses.is_dataclass(value)
            else {f"{prefix}{entry.name}": value}
        )
    return out
