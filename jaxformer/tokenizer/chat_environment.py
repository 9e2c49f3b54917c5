"""The Jinja environment in which chat templates are rendered as transformers renders them: in a
sandbox, with its functions. The templates of a model are untrusted code, so a process with bounds
(`BoundedProcess`) runs this file, and `answer` answers its questions.

Only this file imports jinja2, which is an optional package.
"""

import datetime
import functools
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxformer.cluster.bounded import OutOfBounds

LONGEST_RENDERED = 1 << 26  # characters of a text that a template writes
LONGEST_ERROR = 1000  # characters of the message of an error


class GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its content between the two `marks` of
    the environment, which show what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  (Jinja reads it from the class)
    is_used = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{begin}{caller()}{end}"


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Compiles the `template` of a question, and renders it.

    `marks` are put around what it writes in generation blocks, and `day` is what strftime_now
    shows, null for today. Without `rendering` the answer has `blocks`, which says whether the
    template has generation blocks, or the error `wrong`. With it (`messages`, `beside` with the
    tools and the documents, the `names` of special tokens, and `cuts`) the answer has `texts`: for
    each cut [count, prompt] that of the first `count` messages, with the beginning of an answer if
    `prompt`. They end where the template refuses the messages, for `refused`.
    """
    try:
        template, has_blocks = compiled(
            question["template"], tuple(question["marks"]), question["day"]
        )
    except jinja2.TemplateSyntaxError as error:
        return {"wrong": f"line {error.lineno}: {error.message}"}
    # `serve` names the bound that these exceed.
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # from Python's parser, as for a number with too many digits
        return {"wrong": _message(error).partition(";")[0]}
    rendering = question["rendering"]
    texts = list[str]()
    if rendering is None:
        return {"blocks": has_blocks}
    for count, prompt in rendering["cuts"]:
        try:
            text = template.render(
                messages=rendering["messages"][:count],
                **rendering["beside"],
                add_generation_prompt=prompt,
                **rendering["names"],
            )
        except MemoryError:
            raise
        except Exception as error:  # raised by the template itself, or by whatever it calls
            return {"texts": texts, "refused": _message(error)}
        if len(text) > LONGEST_RENDERED:
            raise OutOfBounds(f"writes more than {LONGEST_RENDERED:,} characters")
        texts.append(text)
    return {"texts": texts}


def _message(error: Exception) -> str:
    text = str(error).strip().rstrip(".") or type(error).__name__
    return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."


@functools.lru_cache(maxsize=16)
def compiled(text: str, marks: tuple[str, str], day: str | None) -> tuple[jinja2.Template, bool]:
    """Return the template of a text, and whether it has generation blocks. strftime_now shows
    `day`, None for today. Raises jinja2.TemplateSyntaxError."""

    def strftime_now(format: str) -> str:
        now = datetime.datetime.fromisoformat(day) if day else datetime.datetime.now()
        return now.strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.extend(marks=marks)
    # JSON without the escapes that Jinja's own filter makes for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals.update(raise_exception=_raise, strftime_now=strftime_now)
    template = environment.from_string(text)
    blocks = environment.extensions[GenerationBlocks.identifier]
    return template, isinstance(blocks, GenerationBlocks) and blocks.is_used


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
