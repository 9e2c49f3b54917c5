"""README.zh.md is README.md in Chinese: both have the same headings, paragraphs, tables, code
blocks and links, with the same names and figures in each of them.

Other tests check that the commands, tests and files that README.md names exist. They need not read
README.zh.md, because it names the same ones. A failure prints which lines differ, and is repaired
in the README that was not changed.
"""

import difflib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE_BLOCK = re.compile(r"(^```.*?^```[ ]*$)", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
# At blank lines, and before a row of a table, a heading and an item.
PIECE_BREAK = re.compile(r"\n\s*\n|\n(?=\||#|- )")
CODE_SPAN = re.compile(r"`[^`]+`")
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s]+(?: \"\w+\")?)\)")
# English spells these numbers out where Chinese has digits. One to three are left out, because
# "one" and "two" are often no figures.
NUMBER_WORDS = {
    **{"four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"},
    **{"eleven": "11", "twelve": "12", "thirteen": "13", "fourteen": "14", "fifteen": "15"},
    **{"sixteen": "16", "seventeen": "17", "eighteen": "18", "nineteen": "19", "twenty": "20"},
}
FIGURE = re.compile(rf"\d+(?:[.,]\d+)*|\b(?:{'|'.join(NUMBER_WORDS)})\b", re.IGNORECASE)


def outline(text: str) -> list[str]:
    """The lines of code of a page, and a summary of each heading, paragraph, item and row."""
    lines = []
    for i, section in enumerate(CODE_BLOCK.split(text)):
        if i % 2:  # a code block; the text between two of them has an even index
            lines += [f"code: {line}" for line in section.splitlines()]
        else:
            pieces = PIECE_BREAK.split(COMMENT.sub("", section))
            lines += [summary(piece.strip()) for piece in pieces if piece.strip()]
    return lines


def summary(piece: str) -> str:
    """The kind of a heading, paragraph, item or row and what a translation leaves as it is: the
    targets of its links in their order, and its code spans and figures in sorted order."""
    code_spans = sorted(CODE_SPAN.findall(piece))
    prose = CODE_SPAN.sub("", piece)
    links = [f"{mark}({target})" for mark, _, target in LINK.findall(prose)]
    figures = [figure.lower() for figure in FIGURE.findall(LINK.sub(r"\2", prose))]
    figures = sorted(NUMBER_WORDS.get(figure, figure) for figure in figures)
    columns = prose.count("|") - 1
    if piece.startswith("#"):
        kind = f"heading of level {len(piece) - len(piece.lstrip('#'))}"
    elif re.fullmatch(r"\|[-:| ]+\|", piece):
        kind = f"table of {columns} columns"
    elif piece.startswith("|"):
        kind = f"row of {columns} columns"
    else:
        kind = "item" if piece.startswith("- ") else "paragraph"
    return " ".join([f"{kind}:", *links, *code_spans, *figures])


def differences(english: str, chinese: str) -> list[str]:
    """The lines of the outlines that only one of the texts has, as `diff` shows them; none where
    the texts agree."""
    names = ("README.md", "README.zh.md")
    return list(difflib.unified_diff(outline(english), outline(chinese), *names, n=0, lineterm=""))


def first_line_and_rest(name: str) -> tuple[str, str]:
    first, _, rest = (ROOT / name).read_text(encoding="utf-8").partition("\n")
    return first, rest


def test_the_first_line_of_each_readme_links_to_the_other() -> None:
    assert "[中文](README.zh.md)" in first_line_and_rest("README.md")[0]
    assert "[English](README.md)" in first_line_and_rest("README.zh.md")[0]


def test_both_readmes_have_the_same_commands_tables_links_names_and_figures() -> None:
    english, chinese = (first_line_and_rest(name)[1] for name in ("README.md", "README.zh.md"))
    lines = differences(english, chinese)
    assert not lines, "\n".join(lines)
