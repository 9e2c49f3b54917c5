"""The Jinja environment in which chat templates are rendered, as transformers renders them: in a
sandbox, with its functions. The templates of a model are a stranger's code.

Only this file imports jinja2, which is an optional package.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Now = Callable[[], datetime.datetime]


class GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its content between the two `marks` of
    the environment, so that the places of what the assistant writes are known."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it of the class)
    found = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that begin with an underscore, which lead out of the
    sandbox."""

    def __init__(*given: Any, **named: Any) -> None:
        self, rest = given[0], given[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace has no {name!r}: take a name without underscore")


def compiled(text: str, marks: tuple[str, str], now: Now) -> tuple[jinja2.Template, bool]:
    """The template of a text, and whether it has generation blocks; `now` is the time that
    strftime_now shows. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.extend(marks=marks)
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise,
        strftime_now=lambda form: now().strftime(form),
        dict=lambda *given, **named: dict(*given, **named),
        namespace=Namespace,
    )
    template = environment.from_string(text)
    blocks = environment.extensions[GenerationBlocks.identifier]
    return template, isinstance(blocks, GenerationBlocks) and blocks.found


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
