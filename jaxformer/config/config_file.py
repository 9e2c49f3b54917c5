"""Configs from files, from the command line, and back from a run directory."""

import importlib.util
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from jaxformer.config.adapter import AdapterConfig
from jaxformer.config.model import ModelConfig
from jaxformer.config.run import DataConfig, RunConfig, TokenizerConfig, flat, from_json, suggestion
from jaxformer.config.settings import choices, step_range
from jaxformer.config.train import GRPOConfig
from jaxformer.files import ConfigError, located, read_text, store_of

BYTE_VOCABULARY = 257  # 256 bytes and the end-of-text token


def parse_fields(config: RunConfig, arguments: Sequence[str], program: str) -> RunConfig:
    """`config` with `--section.field value` arguments applied; its sections are not yet checked
    against each other. Exits with status 0 after --help, 2 after a mistake."""
    import tyro

    setting_names = {*flat(RunConfig()), "help"}
    # Before tyro, whose message does not say where a setting has moved, as `suggestion` does.
    for name in settings_in(arguments):
        if name not in setting_names:
            raise ConfigError(f"there is no setting {name}. {suggestion(name)}")
    with warnings.catch_warnings():
        # A default may be the name of an added row, which the annotated Literal lacks.
        warnings.filterwarnings("ignore", "The field .* is annotated with type .*Literal")
        return tyro.cli(
            RunConfig,
            prog=program,
            description="Settings of the config; the defaults shown are those of its file.",
            args=arguments,
            default=config,
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
            registry=_registry(),
        )


def settings_in(arguments: Sequence[str]) -> dict[str, str]:
    """Return the value of each `--section.field value` or `--section.field=value`; of a setting
    that is stated twice, the last one."""
    stated = {}
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            stated[name.replace("-", "_")] = value if equals else following
    return stated


def _registry() -> Any:
    """Return the rules by which tyro accepts, as values of a setting, the rows added to its
    table."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def named(info: Any) -> Any:
        # tyro widens the type to Union[Literal, str] where the default is an added name.
        allowed: tuple[str, ...] = ()
        for member in (info.type, *get_args(info.type)):
            # tyro reads a number or a word by itself.
            if member in (int, float):
                return None
            if get_origin(member) is Literal:
                allowed = choices(member)
        if not allowed:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(allowed) + "}",
            instance_from_str=lambda words: words[0],
            is_instance=lambda value: value in allowed,
            str_from_instance=lambda value: [value],
            choices=allowed,
        )

    return registry


def read_config(path: str | Path) -> RunConfig:
    """Return the config as its file states it; its sections are not yet checked against each
    other."""
    file, _, name = str(path).rpartition(":")
    # The path has no colon, or a colon that is part of it.
    source = located(path)
    if file and name.isidentifier() and not source.exists():
        source = source.with_name(Path(file).name)
    else:
        file = str(path)
        name = ""
    if not source.is_file():
        raise ConfigError(
            f"config {file}: no such file. Give a Python file that defines `config`, as in"
            " configs/quickstart.py."
        )
    if source.suffix == ".json":
        return from_json(read_text(source), str(source))
    if source.suffix != ".py" or not store_of(source).reads_in_place:
        raise ConfigError(f"config {file} must be a Python file (.py) or the config.json of a run.")
    # A config may import modules that lie beside it, such as one that adds rows to a table.
    sys.path.insert(0, str(source.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"jaxformer_config_{source.stem}", source)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except ConfigError as error:
        raise ConfigError(f"config {file}: {error}") from error
    except Exception as error:
        line = getattr(error, "lineno", "?")
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(source):
                line = frame.lineno
        message = f"config {file}, line {line}: {type(error).__name__}: {error}"
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            message += f". {suggestion(unknown[1])}"
        raise ConfigError(message) from error
    finally:
        sys.path.remove(str(source.parent))
    config = getattr(module, name or "config", None)
    if not isinstance(config, RunConfig):
        configs = [key for key, value in vars(module).items() if isinstance(value, RunConfig)]
        raise ConfigError(
            f"config {file} defines no RunConfig named {name or 'config'!r}; it defines"
            f" {configs or 'none'}."
        )
    return config


def known_vocabulary(tokenizer: TokenizerConfig) -> int:
    """Return the number of tokens of the tokenizer that is made for a text; 0 where only the text
    or an existing tokenizer says it."""
    sizes = {"bpe": tokenizer.vocab_size, "bytes": BYTE_VOCABULARY}
    return 0 if tokenizer.path else sizes.get(tokenizer.kind, 0)


def check(config: RunConfig) -> RunConfig:
    """`config`, or ConfigError where two sections contradict each other."""
    model, data, tokenizer = config.model, config.data, config.tokenizer
    problems = []
    if data.sequence_length > model.max_length:
        problems.append(
            f"data.sequence_length={data.sequence_length} exceeds"
            f" model.max_length={model.max_length}: raise model.max_length, or shorten the"
            " sequences."
        )
    traced = step_range(config.run.profile, "run.profile")
    if traced and traced[-1] > config.train.steps:
        problems.append(
            f"run.profile={config.run.profile!r} names step {traced[-1]}, and the run has"
            f" train.steps={config.train.steps}: name steps of the run."
        )
    warmup = config.optimizer.warmup_steps
    end = config.optimizer.decay_steps
    steps = config.train.steps
    if warmup > steps and end <= warmup:
        problems.append(
            f"optimizer.warmup_steps={warmup} is longer than the run, train.steps={steps}, which"
            " would never reach optimizer.learning_rate: use fewer warm-up steps or more steps, or"
            " set optimizer.decay_steps to the last step of the longer run that this one begins."
        )
    if 0 < end <= warmup < steps:
        problems.append(
            f"optimizer.decay_steps={end} is the step at which the decay ends, and"
            f" optimizer.warmup_steps={warmup} lasts until then or longer: end the decay later, or"
            " the warm-up earlier."
        )
    trained = tokenizer.kind == "bpe" and not tokenizer.path
    if trained and 0 < model.vocab_size < tokenizer.vocab_size:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size} exceeds"
            f" model.vocab_size={model.vocab_size}: raise model.vocab_size, or set it to 0 to use"
            " the size of the tokenizer."
        )
    if config.adapter.kind != "none" and not config.run.init_from:
        problems.append(
            f"adapter.kind={config.adapter.kind!r} trains an adapter on top of a model: set"
            " run.init_from to its directory."
        )
    if tokenizer.added and not config.run.init_from:
        problems.append(
            f"tokenizer.add_tokens={tokenizer.add_tokens!r} adds tokens to a model that there is:"
            " set run.init_from to its directory, or leave it out."
        )
    grpo = config.grpo
    if data.objective != "grpo" and grpo != GRPOConfig():
        problems.append(
            f"grpo.reward={grpo.reward!r} and the other settings of grpo are read by"
            f" data.objective=grpo, and here is data.objective={data.objective}: set that, or leave"
            " them out."
        )
    if data.objective == "grpo":
        source_length = data.source_length or data.sequence_length
        if source_length + grpo.new_tokens > data.sequence_length:
            problems.append(
                f"a prompt of data.source_length={source_length} tokens and an answer of"
                f" grpo.new_tokens={grpo.new_tokens} do not fit into a row of"
                f" data.sequence_length={data.sequence_length}: lower one of the first two, or"
                " raise the last."
            )
        if config.train.batch_size % grpo.group:
            problems.append(
                f"train.batch_size={config.train.batch_size} answers do not divide into groups of"
                f" grpo.group={grpo.group}: make it a multiple of that."
            )
    problems += _virtual_problems(config.adapter, model, data)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _virtual_problems(
    adapter: AdapterConfig, model: ModelConfig, data: DataConfig
) -> Iterator[str]:
    """Yield a message for each row that learned positions do not reach behind virtual tokens."""
    if adapter.kind not in ("prompt", "prefix") or model.embedded_positions != "learned":
        return
    lengths = {"data.sequence_length": data.sequence_length}
    if model.family == "encoder_decoder":
        source = {"data.source_length": data.source_length or data.sequence_length}
        # The virtual tokens of a prompt are before the source only, those of a prefix before both.
        lengths = source if adapter.kind == "prompt" else lengths | source
    for name, length in lengths.items():
        if length <= model.max_length < length + adapter.tokens:
            yield (
                f"{name}={length} behind adapter.tokens={adapter.tokens} virtual tokens exceeds the"
                f" learned positions of model.max_length={model.max_length}: set it to at most"
                f" {model.max_length - adapter.tokens}, or use fewer virtual tokens."
            )
