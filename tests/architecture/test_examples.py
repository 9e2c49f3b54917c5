"""The examples run as they stand, in few lines, and the page of plain JAX computes what the library
does."""

import ast
import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_architecture import Function, code_lines, docstring_lines

import jaxformer as jf

FOLDER = Path(__file__).parents[2] / "examples"


def docstrings(path):
    """Numbers of the lines of all docstrings."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {
        line
        for node in nodes
        if isinstance(node, (ast.Module, ast.ClassDef, Function))
        for line in docstring_lines(node)
    }


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name, most", [("own_loss", 40), ("own_model", 40)])
def test_an_example_is_short_trains_and_is_resumed_bitwise(name, most, tmp_path, monkeypatch):
    module = example(name)
    assert len(code_lines(FOLDER / f"{name}.py") - docstrings(FOLDER / f"{name}.py")) < most
    whole = module.main(str(tmp_path / "whole"))
    fit = jf.fit

    def half(step, state, batches, *, steps, **rest):
        return fit(
            step, state, batches, steps=steps if "checkpoints" not in rest else steps // 2, **rest
        )

    monkeypatch.setattr(jf, "fit", half)
    assert int(module.main(str(tmp_path / "parts")).step) * 2 == int(whole.step)
    monkeypatch.setattr(jf, "fit", fit)
    jax.tree.map(np.testing.assert_array_equal, module.main(str(tmp_path / "parts")), whole)


def test_one_page_of_plain_jax_equals_the_library():
    page = example("one_page")
    assert len((FOLDER / "one_page.py").read_text().splitlines()) <= 120
    params = jf.init(page.CONFIG, jax.random.key(1))
    params = jax.tree.map(
        lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params
    )
    batch = jax.tree.map(jnp.asarray, page.Batches()[0])
    expected = jf.forward(params, page.CONFIG, batch["tokens"])
    np.testing.assert_allclose(
        page.forward(params, batch["tokens"]), expected, atol=2e-5 * float(expected.std())
    )
    losses = [page.loss, jf.loss_of("causal", page.CONFIG)]
    (found, grads), (wanted, wanted_grads) = (
        jax.jit(jax.value_and_grad(lambda p, loss=loss: loss(p, batch, None)["loss"][0]))(params)
        for loss in losses
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max())),
        grads,
        wanted_grads,
    )


def test_one_page_learns():
    assert example("one_page").main(steps=30) < 4.5
