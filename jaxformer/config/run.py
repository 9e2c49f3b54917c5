"""Every setting of a run, as frozen dataclasses that validate themselves.

The docstring below a field is its help text on the command line. Configs are hashable, so a
`ModelConfig` can be a static argument of `jax.jit`.
"""

import dataclasses
import difflib
import json
import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.settings import (
    Bounds,
    Count,
    Natural,
    Section,
    TableAt,
    Volatile,
    dotted,
    flat,
    parts_of,
    with_settings,
)
from jaxformer.config.train import (
    DistillConfig,
    GRPOConfig,
    LaunchConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from jaxformer.files import ConfigError, parse_object

# Of config.json. To be raised when a setting is renamed or removed, or means something else than
# before.
VERSION = 4
# The names that some settings of records of a model had up to version 3, before there were records;
# the others had "_" for the dot.
FORMER_NAMES = {
    "rope.pattern": "position_pattern",
    "experts.n": "n_experts",
    "experts.d_ff": "expert_ff",
    "experts.shared_ff": "shared_ff",
    "experts.pattern": "expert_pattern",
    "experts.dense_layers": "dense_layers",
    "experts.capacity": "expert_capacity",
    "experts.router": "router",
    "experts.renormalize": "router_renormalize",
    "experts.scale": "router_scale",
    "experts.router_bias": "router_bias",
    "experts.groups": "router_groups",
    "experts.top_groups": "router_top_groups",
    "experts.balance_loss": "router_balance_loss",
    "experts.z_loss": "router_z_loss",
    "experts.kernel": "expert_kernel",
    "latent.kv_rank": "kv_rank",
    "latent.query_rank": "query_rank",
    "latent.rope_head_dim": "rope_head_dim",
    "attention.value_dim": "value_dim",
    "attention.query_key_norm": "query_key_norm",
    "attention.max_segments": "max_segments",
    "embedding.kind": "embedding",
    "embedding.source": "source_embedding",
    "embedding.token_types": "token_types",
    "embedding.positions": "position_embedding",
    "embedding.position_offset": "position_offset",
    "embedding.sinusoids": "sinusoids",
    "head.kind": "head",
    "head.n_classes": "n_classes",
    "head.width": "projection_width",
    "head.pooling": "pooling",
    "head.class_layers": "class_head",
    "head.pooler": "pooler",
    "head.pooler_activation": "pooler_activation",
    "head.next_sentence": "next_sentence",
    "head.scale": "logit_scale",
    "head.divisor": "logit_divisor",
    "head.soft_cap": "logit_soft_cap",
}
# Files of version 3 are read by it, and an old name is answered with the new one.
MOVED = {
    FORMER_NAMES.get(name, name.replace(".", "_")): name
    for name in flat(ModelConfig())
    if "." in name
}

TrackerName = Annotated[
    Literal["auto", "tensorboard", "wandb", "trackio", "none"],
    TableAt("jaxformer.report.trackers.TRACKERS"),
]


@dataclass(frozen=True)
class RunSettings(Section):
    """Directory, seed and terminal output of a run."""

    section = "run"

    dir: Volatile[str] = "runs/default"
    """Directory of the run, or a URL such as gs://bucket/run or s3://bucket/run. The same command
    continues the run that it holds."""
    init_from: str = ""
    """Directory, or URL, of a run or of a Hugging Face model from which the run takes its
    parameters, model settings and tokenizer. A different head is initialized anew; experts are
    copies of a dense feed-forward."""
    restart: Volatile[bool] = False
    """Begin anew in a directory that holds a run. Its files are kept, in before-1/ or the next free
    number there. Leave it out of the command that continues."""
    seed: Annotated[int, Bounds(0, most=2**32 - 1)] = 1337
    """Seed of the initial parameters, the order of the data and dropout."""
    compilation_cache: Volatile[str] = "~/.cache/jaxformer/xla"
    """Directory in which XLA keeps compiled programs between runs; empty turns the cache off."""
    progress: Volatile[Literal["auto", "bar", "lines", "none"]] = "auto"
    """Display during training; auto selects a bar in a terminal, and lines otherwise."""
    tracker: Volatile[TrackerName] = "auto"
    """Where metrics go beside metrics.jsonl; auto is TensorBoard, if tensorboardX is installed."""
    profile: Volatile[str] = ""
    """Steps to trace into the run directory, as in 10:13 for 10, 11 and 12; empty traces none."""
    export_every: Volatile[Natural] = 0
    """Steps after which the model, or its adapter, is written into hf/STEP of the run directory as
    files of Hugging Face, also at the end: train.checkpoint_every or a multiple; 0 writes none."""
    sample_prompt: Volatile[str] = ""
    """Prompt of the sample that is printed at the end; empty starts from an end-of-text token."""
    sample_tokens: Volatile[Natural] = 128
    """Length of that sample in tokens; 0 prints no sample."""


Packing = Literal["stream", "documents", "best_fit"]
WordPatternName = Literal["gpt2", "llama3"]
Malformed = Literal["refuse", "replace", "skip"]
TextObjective = Literal["causal", "mlm", "span_corruption", "prefix"]
RecordObjective = Literal["seq2seq", "sft", "classes", "token_classification", "contrastive"]
PreferenceObjective = Literal["dpo", "ipo", "orpo", "simpo", "kto", "grpo"]
ObjectiveName = Annotated[
    Literal["auto", TextObjective, RecordObjective, PreferenceObjective],
    TableAt("jaxformer.runs.objectives.OBJECTIVES"),
]


def named_sources(text: str) -> list[str]:
    """Return the sources of data.train or data.validation, which are separated by ';'. A path that
    exists is one source."""
    if os.path.exists(text):
        return [text]
    return parts_of(text, ";")


@dataclass(frozen=True)
class DataConfig(Section):
    """Data, and how it is turned into sequences."""

    section = "data"

    train: Volatile[str] = "stdlib"
    """Training data: a file, directory or glob, token ids (.npy, .bin), 'train.{de,en}',
    'datasets:NAME', or stdlib; a URL such as 's3://bucket/corpus/*.jsonl.zst' names files in a
    bucket. Separate several sources by ';'."""
    weights: str = ""
    """Sampling weights of several sources, for example '0.7 0.3'. Weights may change at a step:
    '0.7 0.3; 1000: 0.5 0.5' changes them at step 1000."""
    validation: Volatile[str] = ""
    """Validation data, in the same forms as data.train; empty holds out a part of data.train."""
    validation_fraction: Annotated[float, Bounds(0, 1)] = 0.1
    """Fraction of data.train that is held out if data.validation is empty."""
    sequence_length: Count = 256
    """Length of a row of a batch in tokens."""
    packing: Packing = "stream"
    """How documents fill rows: stream cuts rows from one token stream; documents does so too, but
    separates documents by segment ids; best_fit cuts no document that fits into a row."""
    order: Literal["epochs", "text", "random"] = "epochs"
    """Order of training rows: epochs reads every row once before any again, each time in a new
    order; text reads them as the text has them, and trains while it is tokenized; random draws
    windows that begin anywhere in the text, independently of each other."""
    objective: ObjectiveName = "auto"
    """Training objective; auto selects the first that model.family and model.head can learn, and
    sft for records that are chats."""
    source_length: Natural = 0
    """Length of the source of an encoder-decoder, or of a prompt of grpo, in tokens; 0 uses
    data.sequence_length."""
    text_field: str = "text"
    """Field of a .jsonl or .tsv record, or column of a .parquet file, that holds the text."""
    pair_field: str = ""
    """Field of a second text that is classified together with the first; empty if there is none."""
    source_field: str = "source"
    """Field of the input: the source of a pair, the question of an instruction, or the anchor of
    contrastive."""
    target_field: str = "target"
    """Field of the output: the target of a pair, the answer to an instruction, the text that
    contrastive brings near its anchor, or what the rewards of grpo compare answers with; grpo reads
    none where it is empty."""
    negatives_field: str = ""
    """Field of texts that do not belong to an anchor of contrastive, a text or a list of them;
    several fields are joined by +, as in negative_1+negative_2. Empty if there is none."""
    negatives: Natural = 0
    """Most negatives that are read of a record, the first ones; 0 is the number of the fields that
    data.negatives_field names."""
    label_field: str = "label"
    """Field of a text's class, or of the list of tags of its words."""
    messages_field: str = ""
    """Field of a conversation, a list of messages with role and content, that the objective sft
    reads in place of source and target; several are joined by +, as in prompt+completion. Empty if
    there is none."""
    cut: Literal["prompt", "end"] = "prompt"
    """What an example of sft that is longer than a row loses: prompt cuts the beginning of its
    prompt, down to half a row, and then the end; end cuts the end alone, and so, after a long
    prompt, the answer."""
    bos: Literal["auto", "always", "never"] = "auto"
    """Whether each document of a text that a decoder learns begins with the tokenizer's BOS: auto
    follows the template of the tokenizer, as prompts do. Token ids of your own stay as they are."""
    noise_density: Annotated[float, Bounds(0, 1)] = 0.15
    """Fraction of the tokens that the objectives mlm and span_corruption corrupt."""
    span_length: Annotated[float, Bounds(1, most=1e6)] = 3.0
    """Mean length of a corrupted span in tokens."""
    mask_units: Literal["tokens", "words"] = "tokens"
    """Unit that the objective mlm chooses, hides, replaces or keeps: single tokens, or whole words.
    """
    malformed: Malformed = "refuse"
    """Handling of records that are not valid JSON or lack a field, and of bytes that are not UTF-8:
    refuse stops with a message, skip omits the record or document, replace omits records too, but
    inserts U+FFFD for such bytes."""
    cache_dir: Volatile[str] = "~/.cache/jaxformer/data"
    """Directory in which tokenized text is stored and found again; the URL of one in a bucket is
    shared by all machines that name it."""

    @property
    def n_negatives(self) -> int:
        """Return the number of texts of a row of contrastive beside its pair."""
        if not self.negatives_field:
            return 0
        return self.negatives or len(self.negatives_field.split("+"))

    def conflicts(self) -> list[str]:
        if self.negatives and not self.negatives_field:
            return [
                f"negatives={self.negatives} is how many are read of data.negatives_field, which is"
                " empty: name the field, or leave it out."
            ]
        return []


@dataclass(frozen=True)
class TokenizerConfig(Section):
    """How text is split into tokens."""

    section = "tokenizer"

    kind: Literal["bpe", "bytes", "characters"] = "bpe"
    """Tokenizer that is made if tokenizer.path is empty: a byte-level BPE trained on data.train,
    raw bytes, or characters."""
    path: Volatile[str] = ""
    """Existing tokenizer to use: a tokenizer.json, or a directory with one or with GPT-2's
    vocab.json and merges.txt, also by a URL such as gs://bucket/tokenizer."""
    vocab_size: Annotated[int, Bounds(257, most=0x110000)] = 4096
    """Number of entries of a trained BPE, including special tokens."""
    chat_template: Volatile[str] = ""
    """File, or URL, of a chat template in Jinja, in place of the tokenizer's own; empty keeps that.
    """
    add_tokens: str = ""
    """Special tokens, separated by commas, that a run with run.init_from adds to the tokenizer and
    the vocabulary of that model, as in "<|im_start|>,<|im_end|>"."""
    pattern: WordPatternName = "gpt2"
    """Rule by which a trained BPE splits text into words: gpt2, or llama3 (numbers in groups of 3
    digits)."""
    training_bytes: Annotated[int, Bounds(1, most=2**53)] = 20_000_000
    """Number of bytes of data.train on which the BPE is trained: evenly spread, but its first ones
    where data.order=text reads the text while it trains."""

    @property
    def added(self) -> tuple[str, ...]:
        """Return the names of `add_tokens`."""
        return tuple(parts_of(self.add_tokens))

    def conflicts(self) -> list[str]:
        repeated = sorted({name for name in self.added if self.added.count(name) > 1})
        if not repeated:
            return []
        return [f"add_tokens={self.add_tokens!r} has {', '.join(repeated)} twice: name it once."]


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. `jf.load_config` makes one from a file and checks the sections against
    each other."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


def suggestion(unknown: str) -> str:
    """Return a sentence that names the settings that an unknown `section.field` may stand for."""
    section, _, name = unknown.rpartition(".")
    if section in ("", "model") and name in MOVED:
        return f"It is model.{MOVED[name]} now."
    # "section.field" to "field", of every setting.
    fields = {setting: setting.rpartition(".")[2] for setting in flat(RunConfig())}
    nearest = difflib.get_close_matches(name, fields.values(), 1)
    if nearest:
        similar = [setting for setting, last in fields.items() if last == nearest[0]]
        return f"Did you mean {' or '.join(similar)}?"
    sections = [entry.name for entry in dataclasses.fields(RunConfig)]
    if section in sections:
        of_section = [setting for setting in fields if setting.startswith(f"{section}.")]
        return f"The settings of {section} are {', '.join(of_section)}."
    return f"Settings are named section.field; the sections are {', '.join(sections)}."


def to_json(config: RunConfig) -> str:
    """All settings of a run by section, after the version of their layout."""
    return json.dumps({"version": VERSION} | dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, where: str) -> RunConfig:
    """Return the settings that `to_json` wrote; `where` names the file in a ConfigError.

    A file of another version is refused. Settings that the file lacks have their defaults.

    run.compilation_cache keeps its default: the writer of the file must not choose the directory
    from which this machine loads compiled programs, or in which it stores them.
    """
    written = parse_object(text, where, "give the config.json of a run")
    version = written.pop("version", 1)
    if type(version) is not int or version not in (3, VERSION):
        raise ConfigError(
            f"{where} was written by another version of jaxformer: its version is {version!r}, and"
            f" this one reads versions 3 and {VERSION}. Read it with the jaxformer that wrote it,"
            " whose `jaxformer convert` writes a Hugging Face directory that this one takes too."
        )
    model = written.get("model")
    if version == 3 and isinstance(model, dict):
        written["model"] = {MOVED.get(name, name): value for name, value in model.items()}
    stated = dotted(written)
    settings = flat(RunConfig())
    lines = ""
    for name in stated:
        if name not in settings:
            lines += f"\n  {name}: {suggestion(name)}"
    if lines:
        raise ConfigError(f"{where} has settings that this jaxformer does not know:{lines}")
    stated.pop("run.compilation_cache", None)
    try:
        return with_settings(RunConfig(), stated)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
