"""Text goes on past the context from its newest part, and text that is cut there is said to be."""

import contextlib
import io
from pathlib import Path

import jax
import numpy as np
import pytest
from shapes import weights_and_tokens
from tiny_run import reference

import jaxformer as jf
from jaxformer.cli import main
from jaxformer.generation.decode import stream_tokens
from jaxformer.generation.slide import slide_tokens

KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return reference(tmp_path_factory)


def slid(params, config, prompt, count, **rules) -> list[int]:
    pieces = slide_tokens(params, config, prompt, count, key=KEY, **rules)
    return np.concatenate(list(pieces), axis=1)[0].tolist()


def windows(params, config, prompt, count, beginning=0) -> list[int]:
    """The rule written out: generate to the end of the context, keep three quarters, generate."""
    window, made = list(prompt), []
    while len(made) < count:
        n = min(count - len(made), config.max_length - len(window))
        # A greedy text repeats itself, which would be warned of as padding.
        rules = {"segment_ids": [[1] * len(window)], "temperature": 0}
        new = np.asarray(jf.generate(params, config, [window], n, **rules))[0].tolist()
        made += new
        window += new
        kept = int(0.75 * config.max_length)
        window = window[:beginning] + window[len(window) - kept + beginning :]
    return made


@pytest.mark.parametrize("name, beginning", [("llama", 0), ("gpt2", 2)])
def test_a_window_goes_on_from_its_newest_three_quarters(name: str, beginning: int) -> None:
    params, config, tokens = weights_and_tokens(name)
    prompt, count = tokens[0, :9].tolist(), 2 * config.max_length
    found = slid(params, config, prompt, count, temperature=0, beginning=beginning)
    assert len(found) == count
    assert found == windows(params, config, prompt, count, beginning)


def test_up_to_the_end_of_the_context_the_tokens_are_those_of_a_stream() -> None:
    params, config, tokens = weights_and_tokens("llama")
    prompt = tokens[0, :9].tolist()
    space = config.max_length - len(prompt)
    plain = np.concatenate(list(stream_tokens(params, config, [prompt], space, key=KEY)), axis=1)[0]
    found = slid(params, config, prompt, space + 21)
    assert found[:space] == plain.tolist() and len(found) == space + 21
    assert found == slid(params, config, prompt, space + 21)


def test_a_window_ends_at_an_end_token() -> None:
    params, config, tokens = weights_and_tokens("llama")
    prompt, count = tokens[0, :9].tolist(), 3 * config.max_length
    free = slid(params, config, prompt, count)
    space = config.max_length - len(prompt)
    end = next(token for token in free[space:] if token not in free[:space])
    found = slid(params, config, prompt, count, end_token=end)
    assert end in found and found[: found.index(end)] == free[: free.index(end)]
    assert len(found) - found.index(end) <= 8 and {*found[found.index(end) :]} == {end}


def test_nothing_to_write_and_a_model_that_answers_are_refused() -> None:
    params, config, tokens = weights_and_tokens("llama")
    with pytest.raises(jf.ConfigError, match="max_new_tokens=0"):
        slid(params, config, tokens[0, :9].tolist(), 0)
    other = jf.ModelConfig(vocab_size=9, family="encoder_decoder")
    with pytest.raises(jf.ConfigError, match=r"needs model.family='decoder'"):
        slid({}, other, [1], 5)


def written(*arguments: str) -> tuple[str, str]:
    """What `jaxformer sample` writes to stdout and to stderr."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        assert main(["sample", *arguments]) == 0
    return out.getvalue(), error.getvalue()


@pytest.fixture
def endless(trained: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The arguments of a sample by a model that never ends a text by itself."""
    from jaxformer.tokenizer import Tokenizer

    monkeypatch.setattr(Tokenizer, "end_tokens", property(lambda self: (10**6,)))
    return (str(trained[0]), "--prompt", "the cat", "--seed", "1")


def test_text_that_is_cut_at_the_context_is_said_to_be(endless: tuple[str, ...]) -> None:
    run = jf.load(endless[0])
    assert run.tokenizer is not None
    space = run.config.max_length - len(run.tokenizer.encode("the cat"))
    short, nothing = written(*endless, "--max_new_tokens", str(space))
    cut, said = written(*endless, "--max_new_tokens", "200")
    assert nothing == "" and cut == short
    assert all(part in said for part in ("200", f"{space} fit", "context of 48", "--beyond slide"))
    assert said.count("\n") == 1


def test_sliding_goes_on_seamlessly_from_where_the_text_is_cut(endless: tuple[str, ...]) -> None:
    cut, _ = written(*endless, "--max_new_tokens", "200")
    long, said = written(*endless, "--max_new_tokens", "200", "--beyond", "slide")
    assert said == "" and long.startswith(cut.rstrip("\n")) and len(long) > 2 * len(cut)


def test_the_command_refuses_to_slide_a_beam_search(endless: tuple[str, ...]) -> None:
    assert main(["sample", *endless, "--beams", "3", "--beyond", "slide"]) == 2
