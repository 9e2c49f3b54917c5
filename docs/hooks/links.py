"""Links to files outside docs/, and the pages of the site that are made of such files.

The pages are written for GitHub, where `../CONTRIBUTING.md` leads to a file. In the site such a
link leads to the page that is made of the file. A link to any other file of the repository leads to
its page on GitHub where the site is built there, and is plain text elsewhere, because the address
of a repository is not known to its files.
"""

import os
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Files of the repository that are pages of the site.
MADE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
ORIGINS = {page: origin for origin, page in MADE.items()}
FENCED = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
# A link may have a title, which is shown where the pointer is on it.
LINK = re.compile(r'(!?)\[([^\[\]]*)\]\(([^()\s]+)( "[^"]*")?\)')
# Pictures that are links, in a line of their own: they are for the front page of a repository.
BADGE = re.compile(r"^\[!\[.*\]\(.*\)\n", re.MULTILINE)
TEST_COMMENT = re.compile(r"[ \t]*<!-- docs-test: .*?-->", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    for origin, page in MADE.items():
        text = (ROOT / origin).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text with the links of the site, and without the comments that
    tests/architecture/test_docs_code.py reads; blocks of code stay as they are."""
    source = page.file.src_uri
    parts = FENCED.split(markdown)
    for i in range(0, len(parts), 2):
        text = BADGE.sub("", TEST_COMMENT.sub("", parts[i]))
        parts[i] = LINK.sub(lambda found: _link(found, source), text)
    return "".join(parts)


def _link(found: re.Match[str], page: str) -> str:
    image, text, target, title = found.groups(default="")
    path, mark, anchor = target.partition("#")
    if not path or ":" in path:  # within the page, or to another host
        return found[0]
    origin = ORIGINS.get(page, f"docs/{page}")
    named = normpath(join(dirname(origin), path))  # from the root of the repository
    if named in MADE or named.startswith("docs/"):
        reached = MADE.get(named, named.removeprefix("docs/"))
        return f"{image}[{text}]({relpath(reached, dirname(page) or '.')}{mark}{anchor})"
    if not (ROOT / named).exists():
        return found[0]  # which the strict build refuses
    base = repository()
    kind = "tree" if (ROOT / named).is_dir() else "blob"
    return f"[{text}]({base}/{kind}/{_commit()}/{named}{mark}{anchor}{title})" if base else text


def repository() -> str:
    """The address of the repository, which a workflow of GitHub knows; empty elsewhere."""
    name = os.environ.get("GITHUB_REPOSITORY", "")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else ""


def _commit() -> str:
    return os.environ.get("GITHUB_SHA") or "HEAD"
