"""Tools that look at models and runs: nothing imports them but the command line."""

import re
from collections.abc import Mapping
from importlib.resources import files


def filled_page(name: str, content: Mapping[str, str]) -> str:
    """The HTML page in the file `name` of `pages/`, in which each {{slot}} is `content[slot]`, or
    else the text of the file of that name, such as a script."""
    folder = files(__name__).joinpath("pages")

    def text_of(slot: str) -> str:
        return content[slot] if slot in content else folder.joinpath(slot).read_text("utf-8")

    return re.sub("{{(.+?)}}", lambda slot: text_of(slot[1]), text_of(name))
