"""The arguments of every command, and how they are read. Nothing here imports JAX, so that --help
and the message of a mistake come at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from jaxformer.config.adapter import Quantization
from jaxformer.config.config_file import read_config
from jaxformer.config.run import ObjectiveName, RunConfig
from jaxformer.config.settings import choices
from jaxformer.config.train import Weights
from jaxformer.files import ConfigError, located, store_of
from jaxformer.runs.config import parse_arguments

# Options of `sample` of which one alone can be used. A beam search draws nothing.
APART = (
    ("prompts", "chat"),
    ("prompts", "beams"),
    ("prompts", "n"),
    ("chat", "n"),
    ("beams", "temperature"),
    ("beams", "top_k"),
    ("beams", "top_p"),
    ("beams", "min_p"),
)
QUANTIZATIONS = "{" + ",".join(choices(Quantization)) + "}"
ConfigArgumentsT = TypeVar("ConfigArgumentsT", bound="ConfigArguments")
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
OptionalPath = Annotated[Path | None, tyro.conf.arg(metavar="PATH")]
OptionalText = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT")]
OptionalFloat = Annotated[float | None, tyro.conf.arg(metavar="FLOAT")]


@dataclass(frozen=True, kw_only=True)
class ConfigArguments:
    """`reads_weights` says whether the command needs the weights of the model of run.init_from."""

    reads_weights: ClassVar[bool] = True
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """Config file, for example configs/quickstart.py, FILE.py:NAME for another config of a file, or
    the config.json of a run. `CONFIG --help` lists the settings, which `--section.field VALUE`
    overrides."""


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    step: OptionalInt = None
    """Step of the checkpoint of a run to load. If not given, the newest checkpoint is loaded."""
    weights: Weights = "auto"
    """Weights of a run: those trained, or their average (train.ema, schedule-free optimizers); auto
    is the average where the run keeps one."""


@dataclass(frozen=True, kw_only=True)
class ModelArguments(StepArguments):
    path: RunPath
    """Run directory, or a directory with a Hugging Face model or an adapter of peft."""
    quantize: Annotated[Quantization | None, tyro.conf.arg(metavar=QUANTIZATIONS)] = None
    """Quantize the matrices of the blocks while the model is loaded: int8 takes a byte a weight,
    also in the table of tokens and the head (int8_blocks: not there), nf4 0.56 bytes, nf4_double
    0.52."""

    @property
    def model(self) -> dict[str, Any]:
        """The arguments of `open_model`."""
        return {name: getattr(self, name) for name in ("path", "step", "quantize", "weights")}


@dataclass(frozen=True, kw_only=True)
class TrainArguments(ConfigArguments):
    """Trains the model of a config. The same command continues an interrupted run."""


@dataclass(frozen=True, kw_only=True)
class PlanArguments(ConfigArguments):
    """Prints the parameters, memory and products of a run, whether it fits, and the least time of
    its steps. Needs no accelerator and no data; makes no array."""

    reads_weights: ClassVar[bool] = False
    device: str = ""
    """Kind of device: h100, h200, a100, b200, v5e, v5p, v6e, cpu and others. If empty, that of
    --compile, or of this machine."""
    devices: int = 0
    """Number of devices; 0 uses those of this machine, or the product of the sizes of the mesh."""
    json: bool = False
    """Print JSON instead of text."""
    compile: Annotated[str, tyro.conf.arg(metavar="TARGET")] = ""
    """Also compile the step for a topology by its real compiler, as in v5e:4x4 or h100:1x8, and
    print what that says. Needs the extra plan-tpu or plan-gpu."""


@dataclass(frozen=True, kw_only=True)
class ShapesArguments(ConfigArguments):
    """Prints every sublayer and product of the forward pass in the order of computation: the shapes
    of what it reads and makes, its parameters, and the FLOPs of its products for one batch of the
    run. Read from a trace of the program; makes no array and needs no data."""

    reads_weights: ClassVar[bool] = False
    json: bool = False
    """Print JSON instead of text."""


@dataclass(frozen=True, kw_only=True)
class SampleArguments(ModelArguments):
    """Continues a prompt (decoder), or writes the target of a source (encoder-decoder). Rules that
    are not given are as generation_config.json of the model says."""

    prompt: OptionalText = None
    """Text to continue, or source. If not given, a decoder starts a new text."""
    prompts: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File with a prompt a line, or .jsonl with {"prompt": ...} a line, whose texts are printed as
    lines of JSON in its order."""
    rows: int = 8
    """With --prompts: number of texts that are written at a time."""
    chat: bool = False
    """Read the prompt as the turn of a user, in the chat template of the tokenizer, and write the
    answer. Without --prompt, each line of standard input is a turn of one conversation."""
    system: str = ""
    """With --chat: the message of the system before the conversation."""
    tools: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """With --chat: JSON that the chat template reads, a list of functions, or an object with the
    lists "tools" and "documents"."""
    max_new_tokens: int = 256
    """Maximum number of new tokens."""
    temperature: OptionalFloat = None
    """Sampling temperature; 0 is greedy. Where neither the command nor the model states one: 0.7,
    and with --chat greedy."""
    top_k: OptionalInt = None
    """Sample from the k most likely tokens; 0 samples from all."""
    top_p: OptionalFloat = None
    """Sample from the most likely tokens whose probabilities add up to this."""
    min_p: OptionalFloat = None
    """Sample from tokens with at least this share of the largest probability. Where neither the
    command nor the model states this, top_k or top_p: 0.05."""
    repetition_penalty: OptionalFloat = None
    """Divide the logits of tokens of the text and the prompt by this, where they are above 0, and
    multiply them with it below 0."""
    no_repeat_ngram_size: OptionalInt = None
    """Write no sequence of so many tokens twice."""
    stop_strings: Annotated[tuple[str, ...], tyro.conf.arg(metavar="TEXT ...")] = ()
    """End the text before the first of these texts."""
    beams: int = 0
    """Beam width; 0 samples instead."""
    length_penalty: float = 0.6
    """Length penalty of the beam search; 0 prefers short texts."""
    n: int = 1
    """Number of texts to write for the prompt, which is read once."""
    seed: OptionalInt = None
    """Random seed. If not given, each call samples another text."""

    def check(self) -> None:
        """Raises ConfigError for values that are out of range or do not go together."""
        for pair in APART:
            unused = [
                getattr(self, name) in (None, 0, getattr(SampleArguments, name)) for name in pair
            ]
            if not any(unused):
                first, second = pair
                raise ConfigError(f"--{first} and --{second} do not go together: use one of them.")
        if self.system and not self.chat:
            raise ConfigError("--system is a message of a conversation: add --chat.")
        if self.tools is not None and not self.chat:
            raise ConfigError("--tools are for the chat template: add --chat.")
        for name in ("n", "rows", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1.")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed {self.seed} must be a whole number of 64 bits.")


@dataclass(frozen=True, kw_only=True)
class ServeArguments(ModelArguments):
    """Serves a decoder by the API of OpenAI, /v1/chat/completions, /v1/completions and /v1/models,
    and a page to chat in. Needs the extra serve."""

    host: str = "127.0.0.1"
    """Address to bind to. With 0.0.0.0 other machines reach it: set an API key then."""
    port: int = 8000
    """Port to bind to; 0 takes a free one."""
    api_key: str = ""
    """Key that requests have to bring. If empty, that of the environment variable
    JAXFORMER_API_KEY, and without one any request is answered."""
    name: str = ""
    """Name of the model in requests. If empty, that of its directory or file."""
    rows: int = 8
    """Number of texts that are written at a time."""
    queue: int = 64
    """Number of texts that may wait for a row; further requests are refused with the status 429."""
    max_length: int = 0
    """Most tokens of a prompt and its text; 0: the context of the model."""
    max_bytes: int = 1 << 22
    """Most bytes of the body of a request."""
    timeout: float = 600.0
    """Seconds after which a request ends with the status 504."""

    def check(self) -> None:
        """Raises ConfigError for values that are out of range."""
        for name in ("rows", "max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 1.")
        for name in ("queue", "max_length"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name} {getattr(self, name)} must be at least 0.")
        if not 0 < self.timeout <= 10**6:
            raise ConfigError(f"--timeout {self.timeout} must be above 0, up to 1,000,000 seconds.")
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"--port {self.port} must be from 0 to 65535.")


@dataclass(frozen=True, kw_only=True)
class PredictArguments(ModelArguments):
    """Predicts the [MASK] tokens of a text, its class, or the tags of its words."""

    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")]
    """Text to read."""
    pair: str = ""
    """Second text of an encoder that reads two."""


@dataclass(frozen=True, kw_only=True)
class EmbedArguments(ModelArguments):
    """Prints the vector of each text, of length 1, as a line of JSON."""

    prompt: OptionalText = None
    """Text to read. If not given, each line of standard input is one."""
    pooling: Literal["auto", "mean", "first", "last"] = "auto"
    """What of a text its vector is; auto is what model.head.pooling says, or the mean."""


@dataclass(frozen=True, kw_only=True)
class SourceArguments:
    """What a run read, where it is elsewhere now."""

    train: Annotated[str, tyro.conf.arg(name="data.train")] = ""
    """Training text of the run, to be named where its config names a URL or the hub."""
    init_from: Annotated[str, tyro.conf.arg(name="run.init_from")] = ""
    """Model that the run began with and reads again, to be named where its config names a URL, or
    where it was moved."""
    cache_dir: Annotated[str, tyro.conf.arg(name="data.cache_dir")] = ""
    """Directory in which tokenized text is stored and found again. If empty, that of the
    environment variable JAXFORMER_DATA_CACHE, or else ~/.cache/jaxformer/data; never the one that
    the run names."""


@dataclass(frozen=True, kw_only=True)
class EvaluateArguments(SourceArguments, ModelArguments):
    """Prints the loss of a model, with perplexity and bits per byte or with accuracy; with
    --quantize also that of the quantized model, and with --beams the BLEU of its translations."""

    validation: Annotated[str, tyro.conf.arg(name="data.validation")] = ""
    """Text to evaluate on, as data.validation takes it. If empty, the held-out text of the run."""
    objective: Annotated[ObjectiveName, tyro.conf.arg(name="data.objective")] = "auto"
    """Objective of a Hugging Face model; auto selects pairs for an encoder-decoder, and the
    objective of its head otherwise."""
    beams: int = 0
    """Beam width for translating the sources, which are compared with the targets; 0 translates
    nothing."""
    length_penalty: float = 0.6
    """Length penalty of the beam search; 0 prefers short texts."""
    bleu_tokenizer: str = "13a"
    """Tokenizer of sacrebleu that splits translations and targets for BLEU, such as 13a, intl, zh,
    ja-mecab, ko-mecab or char."""
    output: OptionalPath = None
    """Text file for the translations, one per line."""


@dataclass(frozen=True)
class ConvertArguments(StepArguments):
    """Converts a run to a Hugging Face model directory, which transformers, vLLM and llama.cpp's
    converter read, or such a directory to a run; a GGUF file to such a directory; an adapter to
    peft's format, or with --merge to a whole Hugging Face model."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Run directory, a directory with a Hugging Face model or an adapter of peft, or a GGUF file
    (needs the package gguf)."""
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """Directory to write, which must be new or empty: an adapter of peft if the source has an
    adapter, a Hugging Face model if it is another run or a GGUF file, and a run otherwise."""
    merge: bool = False
    """Write the whole model of an adapter, each weight with what the adapter adds to it."""
    verify: bool = False
    """Compare the logits of both models on the same tokens (needs transformers)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the weights of the Hugging Face model."""
    architecture: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Architecture of the Hugging Face model, for example MistralForCausalLM. If not given, the
    simplest one that computes the same."""


@dataclass(frozen=True, kw_only=True)
class PrepareArguments(ConfigArguments):
    """Tokenizes the data of a config into data.cache_dir before training. Shards that an earlier
    call finished are kept."""

    reads_weights: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class TrainTokenizerArguments:
    """Trains a byte-level BPE. The ids are special tokens, then the 256 bytes, then merges in the
    order in which they are learned."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Text file, read as it is, or another source that data.train takes."""
    vocab_size: int
    """Number of entries, including special tokens and bytes."""
    output: Path
    """Directory for tokenizer.json."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Tokens at which the text is split and which are never merged."""
    pattern: str = "gpt2"
    """Rule by which text is split into words: gpt2, or llama3, which splits numbers into groups of
    three digits."""
    text_field: str = "text"
    """Field or column of the records that holds the text."""


@dataclass(frozen=True, kw_only=True)
class EncodeArguments:
    """Writes the token ids of a text to standard output or a file, and their number to standard
    error."""

    tokenizer: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TOKENIZER")]
    """tokenizer.json, a directory with one, or a run directory."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = Path("-")
    """UTF-8 text, plain, .gz or .zst; - is standard input."""
    output: OptionalPath = None
    """.npy file for the ids, uint16 or uint32, instead of standard output."""
    special_tokens: bool = False
    """Read names of special tokens in the text as these tokens, and add those with which the
    tokenizer begins and ends a text."""


@dataclass(frozen=True, kw_only=True)
class AttentionArguments(ModelArguments):
    """Writes an HTML page of the attention weights of each layer and head for one text: a walk
    through the model, with its sublayers, masks, beams, and the most likely next tokens at each
    step, by the output of the model and by that of each layer."""

    prompt: str
    """Text to read; for an encoder-decoder, the source."""
    target: OptionalText = None
    """Target of an encoder-decoder. If not given, the one that the model writes."""
    pair: str = ""
    """Second text of an encoder that reads two."""
    beams: int = 0
    """Beam width for writing the target; 0 is greedy. The page shows the beams of each step."""
    padding: int = 0
    """Tokens of padding behind the text that an encoder reads, to see them masked."""
    layers: tuple[int, ...] = ()
    """Layers to show, counted from 0. If not given, all."""
    output: Path = Path("attention.html")
    """File for the page, which needs no other files."""


@dataclass(frozen=True, kw_only=True)
class CompareArguments:
    """Draws the training and validation losses of runs over tokens, and prints a table of them with
    the settings in which they differ. Runs that differ in their seed alone share a line of the
    table and a color. Reads files only."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directories, or directories that runs are in."""
    output: Path = Path("compare.png")
    """File for the picture, a PNG."""


@dataclass(frozen=True, kw_only=True)
class MeshArguments:
    """Sizes of axes of the mesh, where they are not the run's."""

    data: OptionalInt = None
    """0 uses the devices that are left."""
    fsdp: OptionalInt = None
    expert: OptionalInt = None
    context: OptionalInt = None
    tensor: OptionalInt = None


@dataclass(frozen=True, kw_only=True)
class VerifyArguments(SourceArguments):
    """Verifies a run on any machine: that no line of its log, no checkpoint, tokenizer or data was
    altered, that some of its steps, done again, give the figures that were logged, and that its
    masks, kernels and mesh compute what they should. Writes nothing in the run directory. The exit
    status is 1 if something is not so."""

    path: RunPath
    """Run directory."""
    mesh: MeshArguments = field(default_factory=MeshArguments)
    validation: Annotated[str, tyro.conf.arg(name="data.validation")] = ""
    """Held-out text of the run, to be named where its config names a URL or the hub."""
    steps: int = 5
    """Number of steps that are done again, from the checkpoints nearest to them; 0 reads files
    only."""


@dataclass(frozen=True, kw_only=True)
class DoctorArguments(ConfigArguments):
    """Checks what a run needs before it runs: versions, devices, directories and disk space, data,
    the attention kernel, memory, and one step. Writes nothing in the run directory. The exit status
    is 1 if there is a problem."""


# What each command reads, by the names of `COMMANDS`; lm_eval reads its own.
ARGUMENTS: dict[str, type | dict[str, Callable[..., Any]]] = {
    "train": TrainArguments,
    "plan": PlanArguments,
    "shapes": ShapesArguments,
    "sample": SampleArguments,
    "serve": ServeArguments,
    "predict": PredictArguments,
    "embed": EmbedArguments,
    "evaluate": EvaluateArguments,
    "convert": ConvertArguments,
    "prepare": PrepareArguments,
    "tokenizer": {"train": TrainTokenizerArguments, "encode": EncodeArguments},
    "attention": AttentionArguments,
    "compare": CompareArguments,
    "verify": VerifyArguments,
    "doctor": DoctorArguments,
}


TYPE_RULES = tyro.constructors.ConstructorRegistry()


@TYPE_RULES.primitive_rule
def _paths(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Refuses an empty path: `Path("")` would be the current directory."""
    if info.type is not Path:
        return None

    def path_of(texts: list[str]) -> Path:
        if not texts[0].strip():
            raise ValueError("the path is empty: name a file or a directory.")
        return located(texts[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=path_of,
        is_instance=lambda value: hasattr(value, "parents"),  # a path of a disk or of a URL
        str_from_instance=lambda path: [str(path)],
    )


# How tyro reads the arguments of every command.
OPTIONS: dict[str, Any] = {
    "use_underscores": True,
    "config": (tyro.conf.FlagCreatePairsOff,),
    "registry": TYPE_RULES,
}


def parse(command: str, arguments: Sequence[str]) -> tuple[Any, ...]:
    """What `run` of a command takes: its arguments, and of one that reads a config that config too.
    Exits with status 0 after --help, 2 after a mistake."""
    if command not in ARGUMENTS:
        return (arguments,)
    kind = ARGUMENTS[command]
    program = f"jaxformer {command}"
    if command == "train":
        program = "train.py"
    options = OPTIONS | {"prog": program, "args": arguments}
    if isinstance(kind, dict):
        description = "Trains a tokenizer, or encodes a text."
        return (tyro.extras.subcommand_cli_from_dict(kind, description=description, **options),)
    if issubclass(kind, ConfigArguments):
        return parse_with_config(kind, program, arguments, kind.reads_weights)
    return (tyro.cli(kind, **options),)


def parse_with_config(
    kind: type[ConfigArgumentsT], program: str, arguments: Sequence[str], weights: bool = True
) -> tuple[ConfigArgumentsT, RunConfig]:
    """The arguments of a command, and its config with the overrides among them. Exits as `parse`
    does. A command with weights=False does without the weights of the model of run.init_from."""
    # After the name of a config, --help lists its settings.
    names_config = bool(arguments) and not arguments[0].startswith("-")
    options = OPTIONS | {"add_help": not names_config, "return_unknown_args": True}
    args, overrides = tyro.cli(kind, prog=program, args=arguments, **options)
    program = f"{program} {args.config}"
    return args, parse_arguments(read_config(args.config), overrides, program, weights)


def check_output(path: Path | None) -> None:
    """Raises ConfigError where the directory of an output file does not exist."""
    if path is None:
        return
    folder = path.absolute().parent
    if store_of(folder).lacks_folder():
        raise ConfigError(f"{path} cannot be written: the directory {folder} does not exist.")
