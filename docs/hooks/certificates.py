"""The table of checks in docs/certificates.md, and the list of what they do not prove, from the
code that runs them.

`python docs/hooks/certificates.py` writes both again, between their marks in the page.
tests/tools/test_certificate.py fails where the two differ.
"""

from pathlib import Path

from jaxformer.tools.certificate.checks import CHECKS, NOT_PROVEN, Check

PAGE = Path(__file__).parents[2] / "docs" / "certificates.md"
COMMAND = "python docs/hooks/certificates.py"
HEADER = "| check | what it proves | how | the test breaks |\n|---|---|---|---|\n"


def row_of(check: Check) -> str:
    cells = (check.name, check.proves, check.how, check.broken)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |\n"


def blocks() -> dict[str, str]:
    """What stands between the marks of each name."""
    return {
        "checks": HEADER + "".join(map(row_of, CHECKS)),
        "not proven": "".join(f"- {text}\n" for text in NOT_PROVEN),
    }


def with_tables(page: str) -> str:
    """The page with the texts of this code between the marks. Raises ValueError without marks."""
    for name, text in blocks().items():
        start, end = f"<!-- {name}: {COMMAND} -->\n", f"<!-- end of {name} -->\n"
        before, after = page.index(start) + len(start), page.index(end)
        page = f"{page[:before]}\n{text}\n{page[after:]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
