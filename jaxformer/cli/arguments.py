"""What the commands share: arguments, how these are read, and checks of what they name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from jaxformer.config.adapter import Quantization
from jaxformer.config.run import RunConfig
from jaxformer.files import ConfigError

ArgumentsT = TypeVar("ArgumentsT")
ConfigArgumentsT = TypeVar("ConfigArgumentsT", bound="ConfigArguments")


@dataclass(frozen=True, kw_only=True)
class ConfigArguments:
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """Config file, for example configs/quickstart.py, FILE.py:NAME for another config of a file, or
    the config.json of a run. `CONFIG --help` lists the settings, which `--section.field VALUE`
    overrides."""


@dataclass(frozen=True, kw_only=True)
class StepArguments:
    step: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Step of the checkpoint of a run to load. If not given, the newest checkpoint is loaded."""


@dataclass(frozen=True, kw_only=True)
class ModelArguments(StepArguments):
    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory, or a directory with a Hugging Face model or an adapter of peft."""
    quantize: Annotated[Quantization | None, tyro.conf.arg(metavar="{int8,nf4,nf4_double}")] = None
    """Quantize the matrices of the blocks while the model is loaded: int8 takes a byte a weight,
    nf4 0.56 bytes, nf4_double 0.52."""


TYPE_RULES = tyro.constructors.ConstructorRegistry()


@TYPE_RULES.primitive_rule
def _paths(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
    """Refuses an empty path: `Path("")` would be the current directory."""
    if info.type is not Path:
        return None

    def path_of(texts: list[str]) -> Path:
        if not texts[0].strip():
            raise ValueError("the path is empty: name a file or a directory.")
        return Path(texts[0])

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=path_of,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda path: [str(path)],
    )


# How tyro reads the arguments of every command.
OPTIONS: dict[str, Any] = {
    "use_underscores": True,
    "config": (tyro.conf.FlagCreatePairsOff,),
    "registry": TYPE_RULES,
}


def parse(kind: type[ArgumentsT], command: str, arguments: Sequence[str]) -> ArgumentsT:
    """The arguments of a command. Exits with status 0 after --help, 2 after a mistake."""
    return tyro.cli(kind, prog=f"jaxformer {command}", args=arguments, **OPTIONS)


def parse_with_config(
    kind: type[ConfigArgumentsT], program: str, arguments: Sequence[str], weights: bool = True
) -> tuple[ConfigArgumentsT, RunConfig]:
    """The arguments of a command, and its config with the overrides among them. Exits as `parse`
    does. A command with weights=False does without the weights of the model of run.init_from."""
    from jaxformer.config.config_file import read_config
    from jaxformer.runs.config import parse_arguments

    # After the name of a config, --help lists its settings.
    names_config = bool(arguments) and not arguments[0].startswith("-")
    options = OPTIONS | {"add_help": not names_config, "return_unknown_args": True}
    args, overrides = tyro.cli(kind, prog=program, args=arguments, **options)
    program = f"{program} {args.config}"
    return args, parse_arguments(read_config(args.config), overrides, program, weights)


def check_output(path: Path | None) -> None:
    """Raises ConfigError where the directory of an output file does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        folder = path.absolute().parent
        raise ConfigError(f"{path} cannot be written: the directory {folder} does not exist.")
