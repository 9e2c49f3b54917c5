"""A headless Chromium for tests of pages, which notes what a page asks for and complains of."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WANTED = (
    "the page is tested in a browser: apt-get install chromium (or put google-chrome on the path),"
    ' and pip install "jaxformer[test]" for playwright'
)
DESKTOP = {"viewport": {"width": 1400, "height": 1000}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}


def _missing() -> None:
    """Skips a test without a browser, but fails it in CI."""
    if os.environ.get("CI"):
        pytest.fail(WANTED)
    pytest.skip(WANTED)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of playwright; where there is none the test is skipped, or fails in CI."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        _missing()
    options = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


class View:
    """A page in a tab of its own, and what went wrong in it: messages of its console, errors, and
    requests for anything but itself."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        self.context = browser.new_context(**(options or DESKTOP))
        self.tab = self.context.new_page()
        self.complaints: list[str] = []
        self.tab.on("console", lambda message: self.complaints.append(message.text))
        self.tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.tab.on("request", self._asked)
        self.address = file.resolve().as_uri()
        self.tab.goto(self.address)

    def _asked(self, request: Any) -> None:
        if request.url != self.address and not request.url.startswith("data:"):
            self.complaints.append(f"asked for {request.url}")

    def text(self, selector: str) -> str:
        return str(self.tab.locator(selector).inner_text())

    def texts(self, selector: str) -> list[str]:
        return list(self.tab.locator(selector).all_inner_texts())

    def step(self) -> int:
        """The number of the step shown, from 0."""
        return int(self.tab.locator("#slider").input_value())

    def swipe(self, selector: str, across: int) -> None:
        """A finger that moves over an element, in pixels to the right. Returns after the page's
        listeners have run: sending the events does not wait for those that are passive."""
        self.tab.locator(selector).scroll_into_view_if_needed()
        area = self.tab.locator(selector).bounding_box()
        x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
        touch = self.context.new_cdp_session(self.tab)
        self.tab.evaluate("""() => {
            window.swiped = new Promise(resolve => {
                document.addEventListener("touchend", () => setTimeout(resolve), { once: true });
            });
        }""")
        places = [(x - across / 2 + across * part, y) for part in (0, 0.5, 1)]
        for kind, place in zip(("touchStart", "touchMove", "touchMove"), places, strict=True):
            points = [{"x": place[0], "y": place[1]}]
            touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        touch.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        self.tab.evaluate("window.swiped")

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(
            self.tab.evaluate("document.documentElement.scrollWidth - document.body.clientWidth")
        )

    def pixels(self, selector: str) -> list[list[int]]:
        """The colors of a canvas, as [red, green, blue, opacity], row by row."""
        script = """canvas => {
            const { width, height } = canvas, count = width * height;
            const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
            return Array.from({ length: count }, (_, i) => [...data.slice(4 * i, 4 * i + 4)]);
        }"""
        return list(self.tab.locator(selector).evaluate(script))
