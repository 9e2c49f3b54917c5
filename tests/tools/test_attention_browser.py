"""The page of attention in a browser: steps, stages, masks, beams and the logit lens by pointer,
keyboard and touch, at the widths of a desktop and of a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESKTOP, PHONE, View, chromium
from family_runs import printed, write_run
from walked_page import LENS, MASKS, example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(example(), encoding="utf-8")
    return path


@pytest.fixture
def view(browser: Any, file: Path) -> Iterator[View]:
    yield from opened(browser, file, **DESKTOP)


@pytest.fixture
def phone(browser: Any, file: Path) -> Iterator[View]:
    yield from opened(browser, file, **PHONE)


def opened(browser: Any, file: Path, **options: Any) -> Iterator[View]:
    """A page, which must have had nothing to complain of when it is closed."""
    found = View(browser, file, **options)
    yield found
    assert not found.complaints
    found.context.close()


def test_buttons_and_keys_step_forwards_and_backwards_within_the_target(view: View) -> None:
    press = view.tab.keyboard.press
    assert view.step() == 0 and view.tab.locator("#back").is_disabled()
    view.tab.click("#on")
    assert view.step() == 1 and view.text("#place") == "2 of 5: “The”"
    press("ArrowRight")
    press(".")
    assert view.step() == 3
    press("ArrowLeft")
    assert view.step() == 2 and "·狗 (1/2)" in view.text("#place")
    press("End")
    press("ArrowRight")
    assert view.step() == 4 and view.tab.locator("#on").is_disabled()
    press("Home")
    press(",")
    assert view.step() == 0
    view.tab.locator("#slider").focus()
    press("ArrowRight")
    assert view.step() == 1


def test_a_stage_tells_its_formula_and_the_shapes_of_the_step(view: View) -> None:
    names = view.texts("#parts .part h3")
    assert names == ["Encoder", "Decoder", "Output"]
    assert view.tab.locator("#stage").is_hidden()
    stage = view.tab.locator("button.stage[title='decoder.0.cross']")
    stage.click()
    assert stage.get_attribute("aria-pressed") == "true"
    said = view.text("#stage")
    assert "softmax(Q Kᵀ / √H + mask)" in said and "[B, S, D] [B, T, D]" in said
    assert "[1, 4, 16] [1, 1, 16]" in said and "T tokens (so far 1)" in said
    view.tab.keyboard.press("ArrowRight")
    assert "[1, 4, 16] [1, 2, 16]" in view.text("#stage")
    view.tab.locator("button.stage[title='encoder.0.attention']").click()
    assert "[1, 4, 16]" in view.text("#stage") and "Encoder self" in view.text("#name")
    head = view.tab.locator("button.stage[title='head']")
    head.focus()
    view.tab.keyboard.press("Enter")
    assert "[1, 2, 50]" in view.text("#stage")
    view.tab.keyboard.press("Enter")
    assert view.tab.locator("#stage").is_hidden()


def test_the_masks_drawn_are_those_given(view: View) -> None:
    seen, hidden = (
        view.tab.evaluate(f"rgb('--{name}')") for name in ("seen", "unseen")
    )  # of the theme
    assert seen != hidden
    for kind, masks in MASKS.items():
        for layer, mask in enumerate(masks):
            view.tab.check(f"input[value={kind}]", force=True)
            view.tab.click(f"#grid [data-place='{layer} 0']")
            view.tab.keyboard.press("End")
            canvas = f"canvas[data-mask={kind}]"
            drawn = np.array(view.pixels(canvas)).reshape(*mask.shape, 4)
            np.testing.assert_array_equal(drawn, np.where(mask[..., None], seen, hidden))
            label = view.tab.locator(canvas).get_attribute("aria-label")
            query = view.tab.evaluate(f"queryOf('{kind}')")
            assert f"may attend to {mask[query].sum()} of" in label


def test_beams_show_the_texts_scores_and_fates_of_the_step(view: View) -> None:
    rows = [row.split("\t") for row in view.texts("#ranking tr")]
    assert rows[0] == ["so far", "next", "log p", "", "score"]
    assert [[cell.strip() for cell in row] for row in rows[1:]] == [
        ["", "The", "-0.250", "kept", ""],
        ["", "A", "-1.500", "kept", ""],
        ["", "<s>", "-4.125", "finished", "-3.750"],
        ["", "</b>", "-6.000", "dropped", ""],
    ]
    assert view.texts("#ranking .leads .token") == ["The"]
    view.tab.keyboard.press("ArrowRight")
    assert view.texts("#ranking .token") == ["word1"]
    view.tab.keyboard.press("End")
    assert view.texts("#ranking tr") == [] and "chose nothing" in view.text("#searched")


def test_the_lens_shows_the_texts_and_probabilities_of_each_layer(view: View) -> None:
    for step in range(5):
        assert view.step() == step and view.texts("#lens th") == ["layer 0", "layer 1"]
        given = [cell for layer in LENS for cell in layer[step]]
        found = [text.rsplit(": ", 1) for text in titles(view, "#lens td")]
        assert [text for text, _ in found] == [text.replace(" ", "·") for text, _ in given]
        np.testing.assert_allclose(
            [float(share) for _, share in found], [share for _, share in given], atol=1e-6
        )
        marked = {text.rsplit(": ", 1)[0] for text in titles(view, "#lens td.next")}
        assert marked == ({["The", "·\\xe7"][step]} if step < 2 else set())
        view.tab.keyboard.press("ArrowRight")


def titles(view: View, selector: str) -> list[str]:
    return [each.get_attribute("title") for each in view.tab.locator(selector).all()]


def test_tokens_of_one_character_are_a_group_and_keep_their_own_weights(view: View) -> None:
    cross = view.tab.locator(".strip", has_text="Cross-attention")
    assert cross.locator(".group").all_inner_texts() == ["你\n1\n2"]
    row = view.tab.evaluate("[...rowOf('cross', 0)]")
    told = [each.get_attribute("title") for each in cross.locator(".tokens span[title]").all()]
    assert [text.rsplit(": ", 1)[1] for text in told] == view.tab.evaluate(
        "row => row.map(exact)", row
    )
    assert told[1].startswith("<s> → 你 (2/2) \\xbd\\xa0: ")
    assert view.tab.evaluate("SPANS.target.map(({ text }) => text)") == ["<s>", "The", "·狗", "."]
    assert view.tab.evaluate("MAPS.cross.shape") == [2, 3, 5, 4]


def test_a_phone_scrolls_only_downwards_and_is_stepped_by_touch(phone: View) -> None:
    assert phone.overflow() <= 0
    # Otherwise a browser may treat a swipe to the right as a navigation back, and leave the page.
    behavior = "getComputedStyle(document.documentElement).overscrollBehaviorX"
    assert phone.tab.evaluate(behavior) == "none"
    phone.tab.locator("#on").tap()
    assert phone.step() == 1
    phone.swipe("#overview #says", -120)
    assert phone.step() == 2
    phone.swipe("#overview #says", 120)
    assert phone.step() == 1
    phone.tab.locator("button.stage[title='decoder.0.attention']").tap()
    assert "Q Kᵀ" in phone.text("#stage") and phone.overflow() <= 0
    large = phone.tab.locator("#large")
    left, top, cell = phone.tab.evaluate("[frame.left, frame.top, frame.cell]")
    assert cell >= 18
    large.tap(position={"x": left + cell / 2, "y": top + 3.5 * cell})
    assert phone.step() == 3 and phone.text("#tip").startswith("·狗 (2/2) \\x8b\\x97 → <s>: ")
    for name in ("back", "on"):
        size = phone.tab.locator(f"#{name}").bounding_box()
        assert size["width"] >= 44 and size["height"] >= 44


def test_every_control_has_a_name_and_shows_its_focus(view: View) -> None:
    unnamed = """() => {
        const controls = "button, input, select, canvas[role], [role=region], [tabindex='0']";
        const named = each => each.getAttribute("aria-label") || each.textContent.trim()
            || each.labels?.length;
        return [...document.querySelectorAll(controls)].filter(each => !named(each)
            && !each.closest("[hidden]")).map(each => each.outerHTML);
    }"""
    assert view.tab.evaluate(unnamed) == []
    for _ in range(12):
        view.tab.keyboard.press("Tab")
        ring = view.tab.evaluate("""() => {
            const here = document.activeElement, around = here.parentElement ?? here;
            return [here, around].map(each => getComputedStyle(each).outlineStyle);
        }""")
        assert {*ring} != {"none"}


@pytest.mark.parametrize("name", ["decoder", "classes"])
def test_a_page_of_one_stack_has_no_stage_that_its_model_lacks(
    browser: Any, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = write_run(tmp_path / "run", name), tmp_path / "page.html"
    printed(capsys, "attention", run, "--prompt", "the cat 狗 sees", "--output", path)
    for view in opened(browser, path, **DESKTOP):
        parts = ["Decoder" if name == "decoder" else "Encoder", "Output"]
        assert view.texts("#parts .part h3") == parts
        assert view.tab.locator("canvas[data-mask]").count() == 1
        assert view.tab.locator("#beams").is_hidden()
        assert view.tab.locator("#lenses").is_hidden() == (name == "classes")
        view.tab.keyboard.press("ArrowRight")
        view.tab.locator(".stage").first.click()
        assert view.step() == 1 and view.tab.locator("#stage").is_visible()
        assert "狗" in "".join(view.texts(".tokens .group"))
