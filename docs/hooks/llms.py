"""The pages as Markdown beside those of the site, for programs that read text.

llms.txt (https://llmstxt.org) lists the pages by their files. In the site each of these files lies
where the list says, with its links, tables and generated parts as the page has them.
"""

from pathlib import Path
from typing import Any

from links import MADE

TEXTS: dict[str, str] = {}  # by the path below the site


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.endswith(".md"):
        TEXTS[page.file.src_uri] = markdown
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    site = Path(config.site_dir)
    for name, text in TEXTS.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    index = site / "llms.txt"
    text = index.read_text(encoding="utf-8")
    for origin, name in MADE.items():
        text = text.replace(f"](../{origin})", f"]({name})")
    index.write_text(text, encoding="utf-8")
