"""What the page of attention shows step by step is what the model computes: masks, the logit lens
and beams; what does not fit is refused."""

import base64
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from families import SIZES
from family_runs import TOKENIZER, page_data, printed, write_run
from products import slow_but
from shapes import forward
from test_inspect import VARIANTS, case, inspect, maps_of
from test_inspect import forward as logits_of_case

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.config.settings import with_settings

Capture = pytest.CaptureFixture[str]


# what the model computes


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder", "sinks, window"))
def test_a_key_has_weight_where_the_mask_lets_it_be_seen_and_nowhere_else(name: str) -> None:
    params, config, batch = case(name)
    maps, masks = maps_of(params, config, **batch), jf.attention_masks(config, **batch)
    kinds = {kind for kind in ("encoder", "decoder", "cross") if getattr(maps, kind) is not None}
    assert {*masks} == kinds
    for kind in kinds:
        weights = np.asarray(getattr(maps, kind))  # [L, B, N, T, S]
        seen = np.broadcast_to(np.asarray(masks[kind])[:, :, None], weights.shape)
        np.testing.assert_array_equal(weights > 0, seen)


def test_the_masks_of_some_layers_are_those_of_all() -> None:
    _, config, batch = case("sinks, window")
    every, second = (
        jf.attention_masks(config, **batch),
        jf.attention_masks(config, layers=[1], **batch),
    )
    np.testing.assert_array_equal(every["decoder"][1:], second["decoder"])
    assert (every["decoder"][0] != every["decoder"][1]).any()


@pytest.mark.parametrize("name", slow_but(VARIANTS, "encoder-decoder", "scanned"))
def test_the_lens_of_the_last_layer_gives_the_logits_of_the_model(name: str) -> None:
    params, config, batch = case(name)
    found = inspect(params, config, batch["tokens"], ("residual",), **_rest(batch))
    stack = "encoder" if config.family == "encoder" else "decoder"
    residuals = [found.values[f"{stack}.{layer}.residual"] for layer in range(config.n_layers)]
    wanted = logits_of_case(params, config, **batch)
    first, last = (jf.logit_lens(params, config, residuals[layer]) for layer in (0, -1))
    np.testing.assert_allclose(last, wanted, atol=1e-4)
    assert np.abs(np.asarray(first) - wanted).max() > 0.1


def _rest(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "tokens"}


def test_a_lens_without_logits_of_each_token_is_refused() -> None:
    config = with_settings(jf.ModelConfig(), {**SIZES, "head.kind": "classes", "head.n_classes": 3})
    with pytest.raises(jf.ConfigError, match=r"model\.head\.kind is 'classes'"):
        jf.logit_lens({}, config, np.zeros((1, 2, 32)))


# the command


def bits_of(packed: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """The masks [L, queries, keys] of a page."""
    rows = [np.frombuffer(base64.b64decode(text), np.uint8) for text in packed["bits"]]
    size = int(np.prod(shape))
    different = np.array([np.unpackbits(row)[:size].reshape(shape) for row in rows], bool)
    return different[packed["layers"]]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("walk") / "run", "encoder_decoder")


@pytest.mark.slow
def test_the_command_writes_the_beams_that_found_the_target(
    translator: Path, tmp_path: Path, capsys: Capture
) -> None:
    page = tmp_path / "page.html"
    printed(capsys, "attention", translator, "--prompt", "a dog", "--beams", 3, "--output", page)
    data, model, end = page_data(page), jf.load(translator), TOKENIZER.end_token
    target = data["tokens"]["target"]
    assert len(data["beams"]) == len(target) and 1 <= len(data["beams"][0]) <= 6
    way = [next((each for each in step if each["leads"]), None) for step in data["beams"]]
    written = [each["token"] for each in way if each is not None]
    assert written[: len(target) - 1] == target[1:]
    # The log-probability of each text on the way is that of the model.
    source = np.array([[*TOKENIZER.encode("a dog"), end]])
    found = jf.beam_search(
        model.params, model.config, [[end]], 63, source=source, beams=3, keep=1,
        end_token=TOKENIZER.end_tokens, vocab_size=TOKENIZER.vocab_size,
    )  # fmt: skip
    best = np.asarray(found.tokens[0, 0])
    row = np.array([[end, *best]])
    logits = forward(model.params, model.config, row, source=source)[0, :, : TOKENIZER.vocab_size]
    logs = np.cumsum(np.asarray(jax.nn.log_softmax(logits, axis=-1))[range(len(best)), best])
    for each, log in zip(way, logs, strict=False):
        if each is not None:
            assert abs(each["log_probability"] - log) < 1e-3
    states = {each["state"] for step in data["beams"] for each in step}
    assert "kept" in states and "dropped" in states
    for step in data["beams"]:
        assert sum(each["state"] == "kept" for each in step) <= 3


def test_the_command_writes_masks_lens_and_stages_with_padding(
    translator: Path, tmp_path: Path, capsys: Capture
) -> None:
    page = tmp_path / "page.html"
    line = ["attention", translator, "--prompt", "the cat", "--target", "a dog", "--output", page]
    printed(capsys, *line, "--padding", 2)
    data = page_data(page)
    length = len(data["tokens"]["source"])
    assert data["tokens"]["source"][-2:] == ["[padding]"] * 2
    for kind, packed in data["masks"].items():
        weights = data["maps"][kind]["weights"]
        seen = bits_of(packed, weights.shape[2:])
        assert seen.shape == (1, *weights.shape[2:])
        assert not (weights * ~seen[:, None]).any()
        wanted = np.ones(weights.shape[2:], bool)
        if kind == "decoder":
            wanted = np.tril(wanted)
        elif kind == "cross":
            wanted[:, length - 2 :] = False
        else:  # a row of padding reads nothing that is real
            wanted[:, length - 2 :] = wanted[length - 2 :] = False
        np.testing.assert_array_equal(seen[0], wanted)
    assert len(data["lens"]) == 1
    for own, candidates in zip(data["lens"][-1], data["candidates"], strict=True):
        np.testing.assert_allclose([s for _, s in own], [s for _, s in candidates], atol=1e-5)
    assert {stage["part"] for stage in data["stages"]} == {"encoder", "decoder", "output"}
    assert data["beams"] == [] and data["symbols"]["S"]


REFUSED = {  # what is asked beside the prompt, and words of the message
    "--padding -1": "--padding -1 must be 0 or more",
    "--padding 80": "only 64 fit on a page",
    "--beams 2 --target b": "leave one out",
}


def test_what_the_page_cannot_show_is_refused(
    translator: Path, tmp_path: Path, capsys: Capture
) -> None:
    decoder, page = write_run(tmp_path / "run", "decoder"), tmp_path / "page.html"
    cases = [(translator, asked, said) for asked, said in REFUSED.items()]
    cases += [(decoder, "--padding 2", "--padding 2 must be 0 or more, and needs an encoder")]
    for run, asked, said in cases:
        line = ["attention", str(run), "--prompt", "a", "--output", str(page), *asked.split()]
        assert main(line) == 2
        assert said in capsys.readouterr().err and not page.exists()
