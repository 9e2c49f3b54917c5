"""The documentation site builds without a warning and without a network, its reference has every
public name and every setting, and its code is not cut off."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import PHONE, View, chromium
from page_blocks import ROOT

import jaxformer as jf
from jaxformer.cli import COMMANDS
from jaxformer.config.run import RunConfig, flat

pytestmark = pytest.mark.docs

NOWHERE = "http://127.0.0.1:9"  # a proxy that refuses
QUIET = {"NO_MKDOCS_2_WARNING": "1"}  # on the future of mkdocs, not on the site


def build(target: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", target]
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    changes = {"PYTHONPATH": str(ROOT), "EXECUTE_NOTEBOOKS": "false", **QUIET, **proxies}
    return subprocess.run(
        line, cwd=ROOT, env=os.environ | changes, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(target)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr, done.stderr
    return target


class Read(HTMLParser):
    """The ids of a page, its links, and what it loads when it is shown."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.ids.add(found.get("id", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        shown = tag == "link" and found.get("rel") not in ("canonical", "prev", "next", "edit")
        if tag in ("script", "img", "iframe", "source", "video") or shown:
            self.loaded.append(found.get("src") or found.get("href") or "")


def ids_of(site: Path) -> set[str]:
    pages = (site / "reference").rglob("*.html")
    return {found for page in pages for found in Read(page.read_text(encoding="utf-8")).ids}


def test_the_reference_has_every_public_name_every_setting_and_every_command(site: Path) -> None:
    ids = ids_of(site)
    assert not [name for name in jf.__all__ if f"jaxformer.{name}" not in ids]
    assert not [name for name in jf.layers.__all__ if f"jaxformer.layers.{name}" not in ids]
    assert not [name for name in jf.tokenizer.__all__ if f"jaxformer.tokenizer.{name}" not in ids]
    assert not [name for name in flat(RunConfig()) if name not in ids]
    assert not [name for name in COMMANDS if f"jaxformer-{name}" not in ids]


def test_every_setting_has_its_default_and_its_help(site: Path) -> None:
    text = (site / "reference/settings/index.html").read_text(encoding="utf-8")
    rows = re.findall(r'<code id="([\w.]+)">.*?</tr>', text, flags=re.DOTALL)
    assert sorted(rows) == sorted(flat(RunConfig()))
    tables = text.partition('<h2 id="names-before')[0]  # without that of former names
    cells = [re.findall(r"<td>(.*?)</td>", row, re.DOTALL) for row in tables.split("<tr>")[1:]]
    assert not [row for row in cells if row and (len(row) != 5 or not row[2] or len(row[4]) < 10)]


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        remote = [link for link in Read(text).loaded if re.match(r"(https?:)?//", link)]
        assert not remote, f"{page}: {remote}"
        assert not re.search(r"import\s.*https?://", text), page
    for style in site.rglob("*.css"):
        assert not re.search(r"(url|@import)\s*\(?[\"']?https?://", style.read_text()), style


def test_every_link_within_the_site_leads_to_a_page_and_an_id(site: Path) -> None:
    """Those of notebooks too, which mkdocs does not check."""
    pages = {page.resolve(): Read(page.read_text("utf-8")) for page in site.rglob("*.html")}
    lost = []
    for page, read in pages.items():
        for link in read.links:
            parts = urlsplit(link)
            if parts.scheme or page.name == "404.html":  # whose links begin with the host
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            ids = pages[target].ids if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in ids):
                lost.append(f"{page.relative_to(site)}: {link}")
    assert not lost


def test_the_list_for_programs_leads_to_the_pages_as_text(site: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert links and not [link for link in links if not (site / link).is_file()]
    assert "| `run.dir`" in (site / "reference/settings.md").read_text(encoding="utf-8")


def test_formulas_of_notebooks_are_shown_without_a_script(site: Path) -> None:
    code = re.compile(r"<(style|script|pre|code)\b.*?</\1>", re.DOTALL)
    pages = [
        code.sub("", page.read_text(encoding="utf-8"))
        for page in (site / "tutorials").rglob("*.html")
    ]
    assert pages and all("<math" in page for page in pages)
    assert not [page for page in pages if "MathJax" in page or "$" in page or "<merror" in page]


def test_lists_and_tables_are_rendered_and_comments_of_tests_are_left_out(site: Path) -> None:
    """Markdown that GitHub shows as a list or table, and the site would show as text."""
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        body = re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
        assert "docs-test" not in body, page
        paragraphs = re.findall(r"<p>(.*?)</p>", body, flags=re.DOTALL)
        assert not [p for p in paragraphs if re.search(r"^(- |\d+\. |\|)", p, re.MULTILINE)], page


# Each block of code of a page: the columns of its longest line, the width that its lines take, the
# width that is seen without scrolling, and the width seen after scrolling to the right.
BLOCKS = """text => {
    const selector = ".md-content pre > code, .md-content .highlight-ipynb";
    return [...document.querySelectorAll(selector)].map(block => {
        const lines = block.querySelector("pre") ?? block;
        if (text) lines.textContent = text;
        const columns = lines.textContent.split("\\n").map(line => line.trimEnd().length);
        block.scrollLeft = block.scrollWidth;
        const reached = block.scrollLeft + block.clientWidth;
        return [Math.max(...columns), block.scrollWidth, block.clientWidth, reached];
    });
}"""


@pytest.mark.parametrize("name", ["training", "tutorials/attention"])
def test_code_of_100_columns_is_seen_in_a_window_of_1440_pixels_and_scrolls_on_a_phone(
    name: str, site: Path
) -> None:
    page = site / name / "index.html"
    with chromium() as browser:
        window = {"width": 1440 - 15, "height": 900}  # 15 pixels are the scrollbar
        tab = View(browser, page, viewport=window).tab
        for columns, width, seen, _ in tab.evaluate(BLOCKS):
            assert columns > 100 or width <= seen, f"{columns} columns"
        assert all(width <= seen for _, width, seen, _ in tab.evaluate(BLOCKS, "m" * 100))
        phone = View(browser, page, **PHONE)
        blocks = phone.tab.evaluate(BLOCKS, "m" * 100)
        assert blocks and all(seen < width == reached for _, width, seen, reached in blocks)
        assert phone.overflow() == 0
