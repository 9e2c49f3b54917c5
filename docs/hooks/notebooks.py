"""Notebooks without scripts of another host, and their tables of contents.

nbconvert adds scripts of MathJax and Mermaid from another host to each notebook. They are removed;
the formulas are written as MathML, which browsers show by themselves. mkdocs-jupyter makes the
table of contents of a text without code, in which some headings are lost and some lists are
headings; it is made of the headings of the page instead.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.toc import get_toc

SCRIPT = re.compile(r"<script\b([^>]*)>(.*?)</script>", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # of the templates of nbconvert
REMOTE = re.compile(r"https?://")
# Code has dollars of its own.
VERBATIM = re.compile(
    r"(<(?:pre|code|script|style|svg)\b.*?</(?:pre|code|script|style|svg)>)", re.DOTALL
)
DISPLAY = re.compile(r"\$\$(.+?)\$\$", re.DOTALL)
HEADING = re.compile(r'<h([1-6]) id="([^"]+)">(.*?)(?:<a class="anchor-link"|</h\1>)', re.DOTALL)
INLINE = re.compile(r"(?<![\\$\w])\$(?![\s$])([^$<>]+?)(?<![\s\\])\$(?![\w$])")


def on_page_content(content: str, page: Any, **_: Any) -> str:
    if not page.file.src_uri.startswith("tutorials/"):
        return content
    page.toc = get_toc(headings(content))
    parts = VERBATIM.split(COMMENT.sub("", SCRIPT.sub(_local, content)))
    parts[::2] = [_formulas(part) for part in parts[::2]]
    return "".join(parts)


def headings(content: str) -> list[dict[str, Any]]:
    """The headings of a page as mkdocs reads them: level, id, name and the headings below."""
    top: dict[str, Any] = {"level": 0, "children": []}
    above = [top]
    for level, name, text in HEADING.findall(content):
        plain = html.unescape(re.sub(r"<[^>]+>", "", text))
        found = {"level": int(level), "id": name, "name": plain, "children": []}
        while above[-1]["level"] >= found["level"]:
            above.pop()
        above[-1]["children"].append(found)
        above.append(found)
    return list(top["children"])


def _local(script: re.Match[str]) -> str:
    """A script that loads nothing from another host and configures none that does, or nothing."""
    attributes, code = script.groups()
    return "" if REMOTE.search(attributes + code) or "MathJax" in code else script[0]


def _formulas(text: str) -> str:
    text = DISPLAY.sub(lambda found: _mathml(found[1], "block"), text)
    return INLINE.sub(lambda found: _mathml(found[1], "inline"), text)


def _mathml(formula: str, display: str) -> str:
    return str(convert(html.unescape(formula).strip(), display=display))
