"""Every link of a page leads somewhere, on GitHub: to a file and a heading that are there."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from page_blocks import FENCE, PAGES, ROOT

pytestmark = pytest.mark.docs

# The target behind a text or a picture; a title stands behind some.
LINK = re.compile(r"\]\(([^()\s]+)(?: \"[^\"]*\")?\)")
WORKFLOW = "../../actions/workflows/"  # of GitHub, which has them two levels above the front page
CODE = re.compile(r"`[^`\n]*`")
every_page = pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "docs/llms.txt"], ids=lambda page: str(page.relative_to(ROOT))
)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.MULTILINE):
        words = re.sub(r"<!--.*?-->", "", re.sub(r"\]\([^)]*\)", "", heading)).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = found[anchor] = found.get(anchor, -1) + 1
        anchors.add(f"{anchor}-{number}" if number else anchor)
    return anchors


def problems(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere. Those to other hosts are only read."""
    found = []
    for link in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        parts = urlsplit(link)
        if link.startswith(WORKFLOW):
            name = link.removeprefix(WORKFLOW).removesuffix("/badge.svg")
            if not (ROOT / ".github/workflows" / name).is_file():
                found.append(link)
            continue
        if parts.scheme:
            if parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc):
                found.append(link)
            continue
        file = (page.parent / parts.path).resolve() if parts.path else page
        if file != page and not (file.exists() and file.is_relative_to(ROOT)):
            found.append(link)
        elif parts.fragment and file.suffix == ".md":
            reached = text if file == page else file.read_text(encoding="utf-8")
            if parts.fragment not in anchors_of(reached):
                found.append(link)
    return found


@every_page
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert not problems(page, page.read_text(encoding="utf-8"))
