"""The table of the rules of a token in docs/generation.md, from the rows that apply them.

`python docs/hooks/token_rules.py` writes the table again, between its marks in the page.
tests/generation/test_token_rules.py fails where the two differ.
"""

from pathlib import Path

from jaxformer.generation.token_rules import RULES, TokenRule

PAGE = Path(__file__).parents[2] / "docs" / "generation.md"
START, END = "<!-- rules: python docs/hooks/token_rules.py -->\n", "<!-- end of rules -->\n"
TESTS = {"end_token": "test_generate.py", "stop_strings": "test_stop_strings.py"}
HEADER = (
    "| rule | kind | off | values | what it does | source | test |\n|---|---|---|---|---|---|---|\n"
)


def row_of(rule: TokenRule) -> str:
    off = "" if rule.off is None else f"`{rule.off!r}`"
    cells = [f"`{rule.name}`", rule.kind, off, rule.must_be, rule.formula, rule.source]
    test = f"`tests/generation/{TESTS.get(rule.name, 'test_token_rules.py')}`"
    texts = [cell.replace("|", "\\|").replace("[c_i > 0]", "\\[c_i > 0\\]") for cell in cells]
    return f"| {' | '.join([*texts, test])} |\n"


def table() -> str:
    """The table with a row for each rule, in the order in which they are applied."""
    return HEADER + "".join(map(row_of, RULES))


def with_table(page: str) -> str:
    """The page with the table of this code between the marks. Raises ValueError without marks."""
    before, after = page.index(START) + len(START), page.index(END)
    return f"{page[:before]}\n{table()}\n{page[after:]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
