"""Tables of every setting, command and architecture of Hugging Face, from the code that has them.

`<!-- settings -->`, `<!-- moved -->`, `<!-- commands -->` and `<!-- architectures -->` in a page
stand for them.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from jaxformer.cli import COMMANDS
from jaxformer.config import RunConfig
from jaxformer.config.run import MOVED
from jaxformer.config.settings import VOLATILE, Bounds, choices

HEADER = "| setting | values | default | may change | meaning |\n|---|---|---|---|---|\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    for table in (settings, moved, commands, architectures):
        mark = f"<!-- {table.__name__} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, table())
    return markdown


def settings() -> str:
    """A section with a table for each section of RunConfig."""
    sections = dataclasses.fields(RunConfig)
    return "\n".join(_section(entry.name, entry.default_factory) for entry in sections)


def moved() -> str:
    """A table of the settings of a model that had other names before there were records."""
    rows = "".join(f"| `model.{old}` | `model.{new}` |\n" for old, new in MOVED.items())
    return f"| before | now |\n|---|---|\n{rows}"


def _section(name: str, kind: Any) -> str:
    text = plain(" ".join((kind.__doc__ or "").split()))
    return f"## {name}\n\n{text}\n\n{HEADER}" + "\n".join(_rows(name, kind)) + "\n"


def _rows(name: str, kind: Any) -> list[str]:
    """The rows of a section, and behind them those of its records."""
    helps, hints = field_texts(kind), get_type_hints(kind, include_extras=True)
    lines = []
    for entry in dataclasses.fields(kind):
        hint, full = hints[entry.name], f"{name}.{entry.name}"
        if dataclasses.is_dataclass(hint):
            lines += _rows(full, hint)
            continue
        changes = "yes" if VOLATILE in getattr(hint, "__metadata__", ()) else ""
        cells = [
            f"`{full}`{{#{full}}}",
            _values(hint),
            f"`{entry.default!r}`",
            changes,
            plain(helps[entry.name]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def field_texts(kind: type) -> dict[str, str]:
    """The docstring below each field of a dataclass, which the command line shows as its help."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, following in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(following, ast.Expr):
            continue
        if isinstance(field.target, ast.Name) and isinstance(following.value, ast.Constant):
            texts[field.target.id] = " ".join(str(following.value.value).split())
    return texts


def _values(hint: Any) -> str:
    """The values of a setting: its names, or its type and range."""
    return ", ".join(_parts(hint))


def _parts(hint: Any) -> Iterator[str]:
    bounds = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Bounds)]
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(kind) is Annotated:  # as in Volatile[Count]
        yield from _parts(kind)
    elif get_origin(kind) is Literal:
        yield from (f"`{name}`" for name in choices(hint))
    elif get_origin(kind) in (Union, UnionType):
        number, names = get_args(kind)
        yield from (f"`{name}`" for name in get_args(names))
        yield " ".join([f"or {number.__name__}", *map(str, bounds)])
    else:
        yield " ".join([f"`{kind.__name__}`", *map(str, bounds)])


def commands() -> str:
    """A row for each command of `jaxformer`."""
    lines = [
        f"| `jaxformer {name}`{{#jaxformer-{name}}} | `{given}` | {plain(purpose)} |"
        for name, (given, purpose) in COMMANDS.items()
    ]
    return "| command | arguments | what it does |\n|---|---|---|\n" + "\n".join(lines)


def architectures() -> str:
    """A row for each family of transformers that is read and written."""
    from jaxformer.interop.architectures import HF_FAMILIES

    lines = [
        f"| `{family.model_type}` | {', '.join(f'`{name}`' for name in family.architectures)} |"
        for family in HF_FAMILIES
    ]
    return "| model type | architectures |\n|---|---|\n" + "\n".join(lines)


def plain(text: str) -> str:
    """A text whose characters have no meaning in a table of Markdown."""
    return re.sub(r"([\\`*_{}\[\]|#])", r"\\\1", text).replace("<", "&lt;")
