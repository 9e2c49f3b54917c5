"""The table of parameters: one `Spec` for each leaf. All else about parameters is derived from it.

A layer states its leaves once, as a nested dict of `Spec`. Initial values, shapes, shardings,
counts, FLOPs and the weight-decay mask are tree maps over that table.
"""

import difflib
import fnmatch
import functools
import math
import re
import string
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxformer.arrays.exact import by_tiles, is_exact
from jaxformer.arrays.sharding import (
    ACTIVATION_RULES,
    BATCH_AXES,
    Axes,
    activation,
    constrain,
    explicit_axes,
    free_axes,
    gathered,
    platform,
)
from jaxformer.files import ConfigError

Params = dict[str, Any]
Specs = dict[str, Any]
InitFunction = Callable[[jax.Array, "Spec"], jax.Array]


@dataclass(frozen=True)
class Spec:
    """One leaf: its shape, the name of each axis, its initial value, and the axes it contracts.

    `trainable`: whether it learns. `lookup`: its rows are taken by an index, not multiplied.
    `reads`: the sequence that it is applied to. `active`: how often it is applied to a token on
    average: below 1 for the experts that a token is routed to, above 1 in layers that share it.
    `sign_rate`: where it is above 0, a
    step moves each number so far against the sign of its gradient, whatever the optimizer.
    `quantizable`: whether quantization may round it. It may not round a router, in which a small
    error sends a token to another expert.
    `base_fans`: its fan-in and fan-out in the model of `model.mup_base`, from which its initial
    scale and the factor of its learning rate follow; None in other parametrizations.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: InitFunction
    inputs: tuple[str, ...] = ()
    trainable: bool = True
    lookup: bool = False
    reads: Literal["tokens", "source"] = "tokens"
    dtype: str = "float32"
    active: float = 1.0
    sign_rate: float = 0.0
    quantizable: bool = True
    base_fans: tuple[int, int] | None = None

    @property
    def batch(self) -> tuple[str, ...]:
        """Return those of its axes that count weights beside each other. What concerns a single
        weight, such as its fan-in or its blocks of 4 bits, leaves them out."""
        return tuple(axis for axis in self.axes if axis in BATCH_AXES)

    @property
    def is_stacked(self) -> bool:
        """Return whether it has a leading axis of layers."""
        return "layers" in self.batch

    @property
    def is_matrix(self) -> bool:
        return bool(self.inputs)

    @property
    def fan_in(self) -> int:
        return self._size(self.inputs)

    @property
    def fan_out(self) -> int:
        return self._size(set(self.axes) - {*self.inputs, *self.batch})

    @property
    def scale_fans(self) -> tuple[int, int]:
        """Return the fan-in and fan-out by which an initializer scales."""
        return self.base_fans or (self.fan_in, self.fan_out)

    @property
    def growth(self) -> tuple[float, float]:
        """Return how many times its fan-in and its fan-out are those of `base_fans`; 1 without
        them."""
        base_in, base_out = self.scale_fans
        return self.fan_in / base_in, self.fan_out / base_out

    def _size(self, axes: Collection[str]) -> int:
        """Return the product of the lengths of these axes."""
        lengths = zip(self.axes, self.shape, strict=True)
        return math.prod(length for axis, length in lengths if axis in axes)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["axes"])
@dataclass(frozen=True)
class NamedAxes:
    """An array of an optimizer's state that has not the shape of a parameter, with the name of each
    axis: it is sharded by these as parameters are. None is an axis that is not divided."""

    value: jax.Array
    axes: tuple[str | None, ...]


@runtime_checkable
class RowGroups(Protocol):
    """Rows in groups, each of which is multiplied by a matrix of its own (`layers/grouped.py`)."""

    def product(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """Map x [M, D], w [E, D, F] -> [M, F]: the rows of group e times w[e]."""


@runtime_checkable
class CustomLeaf(Protocol):
    """A weight that is no array: a pytree node that is used wherever a weight is.

    `shape` is that of the array it stands for, whether its parts are arrays or `Spec`s, in a stack
    with its leading axis. `astype` gives the leaf that products in this dtype read: cast, or not.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    def contract(
        self,
        equation: str,
        x: jax.Array,
        *,
        to: Axes | None,
        dtype: Any,
        groups: "RowGroups | None" = None,
    ) -> jax.Array:
        """Contract as `contract(equation, x, w)` does the array it stands for. Only in the place of
        the weights of experts does it get `groups`, and a leaf for other weights need not take
        them."""

    def lookup(self, index: Any, to: Axes) -> jax.Array:
        """Look up as `lookup(table, index, to)` does in the array it stands for."""

    def astype(self, dtype: Any) -> "CustomLeaf": ...


Weight = jax.Array | CustomLeaf


def is_custom(node: Any) -> bool:
    """Return whether a node of the params is a `CustomLeaf`."""
    return hasattr(node, "contract")


def zeros(key: jax.Array, spec: Spec) -> jax.Array:
    return jnp.zeros(spec.shape)


def ones(key: jax.Array, spec: Spec) -> jax.Array:
    return jnp.ones(spec.shape)


def normal(std: float) -> InitFunction:
    return lambda key, spec: std * jax.random.normal(key, spec.shape)


def scaled(init: InitFunction, factor: float) -> InitFunction:
    return lambda key, spec: factor * init(key, spec)


def stack(specs: Specs, n: int) -> Specs:
    """Return the table of `n` equal layers: every leaf gets a leading "layers" axis."""
    return map_specs(lambda _, s: replace(s, shape=(n, *s.shape), axes=("layers", *s.axes)), specs)


def unstack(params: Params) -> list[Params]:
    """Return the params of each stacked layer.

    `lax.split` transposes to one concatenation; indexing would pad and add whole stacks.
    """
    leaves, treedef = jax.tree.flatten(params)
    n = len(leaves[0])
    split = [[piece[0] for piece in jax.lax.split(leaf, (1,) * n, axis=0)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, [pieces[i] for pieces in split]) for i in range(n)]


def map_specs(f: Callable[[str, Spec], Any], specs: Specs) -> dict[str, Any]:
    """Return `f(dotted path, spec)` of every row, in the nesting of the table and of its custom
    leaves."""

    def apply(path: Any, spec: Spec) -> Any:
        return f(dotted(path), spec)

    return jax.tree.map_with_path(apply, specs, is_leaf=_is_spec)  # type: ignore[no-any-return]


def dotted(path: Any) -> str:
    """Return the path of a leaf as names joined by dots, as in "blocks.attention.q"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def is_target(path: str, target: str) -> bool:
    """Return whether a target names a leaf: by one of the names in its path, or by a pattern."""
    return target in path.split(".") or fnmatch.fnmatchcase(path, target)


def unknown_target(
    setting: str, target: str, paths: Collection[str], what: str, kinds: Collection[str] = ()
) -> ConfigError:
    """Return the error of a target that is none of `kinds`, and names none of the leaves of these
    paths, each of which is a `what`."""
    names = dict.fromkeys([*kinds, *(name for path in paths for name in path.split("."))])
    near = difflib.get_close_matches(target, [*names, *paths], 3)
    advice = ""
    if near:
        advice = f"Did you mean {' or '.join(near)}? "
    return ConfigError(
        f"{setting}: {target!r} fits no {what} of this model. {advice}The names are"
        f" {', '.join(names)}; a pattern fits whole paths, as in 'blocks.attention.[qv]'."
    )


def rows(specs: Specs, prefix: str = "") -> dict[str, Spec]:
    """Return the specs by dotted path, in the order of the table; in a custom leaf, in that of its
    tree."""
    specs_by_path: dict[str, Spec] = {}
    for name, entry in specs.items():
        path = prefix + name
        if isinstance(entry, dict):
            specs_by_path |= rows(entry, f"{path}.")
        elif _is_spec(entry):
            specs_by_path[path] = entry
        else:
            for path_in_leaf, spec in jax.tree.leaves_with_path(entry, is_leaf=_is_spec):
                specs_by_path[f"{path}.{dotted(path_in_leaf)}"] = spec
    return specs_by_path


def _is_spec(entry: Any) -> bool:
    return isinstance(entry, Spec)


def init_params(specs: Specs, key: jax.Array) -> Params:
    """Return the initial values. A leaf's randomness depends on the key and the leaf's path
    alone."""

    def start(path: str, spec: Spec) -> jax.Array:
        # CRC-32, since Python's hash of a string differs from process to process.
        leaf_key = jax.random.fold_in(key, zlib.crc32(path.encode()))
        return spec.init(leaf_key, spec).astype(spec.dtype)

    return map_specs(start, specs)


def count(specs: Specs) -> int:
    return sum(math.prod(spec.shape) for spec in rows(specs).values())


def check_params(specs: Specs, params: Any) -> None:
    """Raise ConfigError naming every leaf that is missing, extra or of another shape.

    A custom leaf counts by the shape that it stands for.
    """
    expected = _shapes(specs)
    shapes = _shapes(params)
    problems = []
    for path in expected | shapes:
        if path not in shapes:
            problems.append(f"{path}: missing, expected {expected[path]}")
        elif path not in expected:
            problems.append(f"{path}: {shapes[path]} is not in this model")
        elif shapes[path] != expected[path]:
            problems.append(f"{path}: {shapes[path]} instead of {expected[path]}")
    if problems:
        raise ConfigError("the parameters do not fit the config:\n  " + "\n  ".join(problems))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes by dotted path of a table or of params; a custom leaf has one path."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda node: _is_spec(node) or is_custom(node))
    return {dotted(path): tuple(np.shape(leaf)) for path, leaf in leaves}


def contract(
    equation: str,
    x: jax.Array,
    w: Any,
    *,
    to: Axes | None = None,
    dtype: Any = None,
    groups: RowGroups | None = None,
) -> jax.Array:
    """Return `einsum(equation, x, w)` of an activation and a weight, e.g. "BTD,DNH->BTNH", in x's
    dtype.

    `to` names the axes of the result where its placement has to be said; `dtype` is that of the
    result (default: x's). A product of matrices (see `product`) runs on flattened rows, because a
    CPU then transposes less in the backward pass: the small step of benchmarks/train_cpu.py is 1.11
    times as fast (0.99 to 1.22, 14 samples in turn) on two cores of an AMD EPYC with AVX-512. Other
    products, such as "EBD,EDF->EBF", are einsum's. A custom leaf contracts itself.

    With `groups` the rows of x are those of several matrices: the first axis of w, which is not in
    the result, counts the matrices, as in "MD,EDF->MF".

    Raises ValueError for an equation that does not fit the shapes.
    """
    if is_exact() and groups is None:
        left, right, _ = _letters(equation, x.shape, w.shape)
        lead = sum(letter not in right for letter in left)

        def rows(tile: jax.Array, w: Any) -> jax.Array:
            return contract(equation, tile, w, dtype=dtype)

        return constrain(by_tiles(rows, x, lead, w), to)
    if is_custom(w):
        # A leaf of somebody else need not know of groups.
        of_groups = {} if groups is None else {"groups": groups}
        return w.contract(equation, x, to=to, dtype=dtype, **of_groups)  # type: ignore[no-any-return]
    left, right, out = _letters(equation, x.shape, w.shape)
    if groups is not None:
        # Their kernels are of a device, so that nothing is placed here.
        return groups.product(x, w.astype(x.dtype)).astype(dtype or x.dtype)
    # A point for `model.remat`.
    w = checkpoint_name(w.astype(x.dtype), "weight")
    if explicit_axes():
        sizes = dict(zip(left + right, (*x.shape, *w.shape), strict=True))
        sharding = activation([sizes[letter] for letter in out], to) if to else None
        return jnp.einsum(
            equation, x, gathered(w), preferred_element_type=dtype, out_sharding=sharding
        )
    if dtype == jnp.float32 and x.dtype.itemsize == 2:
        y = wide_product(equation, x, w)
    else:
        y = product(equation, x, w, dtype)
    return constrain(y, to)


def product(equation: str, x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """Return `einsum(equation, x, w)` of two arrays of one dtype, in `dtype` (default: theirs).

    On a CPU a product of 16 bits and those of its derivatives are computed with float32 results,
    which are rounded: XLA has the instructions for bfloat16 of AVX-512 and AMX for these alone, and
    multiplies in float32 otherwise. Of 1,024 x 768 with 768 x 3,072 it takes 13 instead of 27 ms
    on two cores of an AMD EPYC with AVX-512 BF16, jax 0.10.2.
    """
    if not _is_narrow_on_cpu(x) or dtype not in (None, x.dtype) or explicit_axes():
        return _product(equation, x, w, dtype)
    if "..." in equation:
        leading = x.ndim - sum(map(str.isalpha, equation.partition(",")[0]))
        equation = equation.replace("...", string.ascii_lowercase[:leading])
    if any(equation.count(letter) == 1 for letter in re.sub("[^A-Za-z]", "", equation)):
        # The sum over an axis of one operand alone, whose derivative is no product.
        return _product(equation, x, w, dtype)
    left, right, _ = re.split(",|->", equation)
    if all(size == 1 for letter, size in zip(left, x.shape, strict=True) if letter not in right):
        # One row, as in decoding, takes several times as long by the instructions.
        return _product(equation, x, w, dtype)
    return NARROW_PRODUCT.bind(x, w, equation=equation)  # type: ignore[no-any-return]


def _is_narrow_on_cpu(x: jax.Array) -> bool:
    return x.dtype.itemsize == 2 and platform() == "cpu"


def _product(equation: str, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    if "..." in equation:
        return jnp.einsum(equation, x, w, preferred_element_type=dtype)
    left, right, out = _letters(equation, x.shape, w.shape)
    free_sizes = [size for letter, size in zip(left, x.shape, strict=True) if letter not in right]
    is_one_row = left[0] == out[:1] and left[0] not in right and math.prod(free_sizes) == 1
    if is_one_row and platform() == "gpu":
        # XLA multiplies one row by a sum of products, for which it may write an array of the size
        # of the matrix. Two rows it gives to the kernels of matrix products, and those of one x to
        # one kernel: compiled for an H200, a token of four layers of a Llama 1B moves 471 MiB
        # instead of 612, of which 461 are weights. The barrier keeps the second row.
        x = jax.lax.optimization_barrier(jnp.concatenate([x, x]))
        return _product(equation, x, w, dtype)[:1]
    # Rows of which the mesh divides the tokens cannot be flattened: the compiler would gather them.
    divides_tokens = any(free_axes().get(name, 1) > 1 for name in ACTIVATION_RULES["sequence"])
    # The axes that x and w share have to be last in x, first or last in w, and contracted.
    both = "".join(letter for letter in left if letter in right)
    free = "".join(letter for letter in left if letter not in right)
    others = "".join(letter for letter in right if letter not in left)
    # A product of two matrices, once axes are merged without moving a number.
    is_flat = left == free + both and right in (both + others, others + both)
    is_gradient = left == both + free and right == both + others
    if is_gradient and not is_flat and not divides_tokens and out == free + others:
        # The gradient of a weight: a sum over the rows of x [rows, columns] and w.
        shared = len(both)
        rows_of_x = x.reshape(math.prod(x.shape[:shared]), -1)
        rows_of_w = w.reshape(len(rows_of_x), -1)
        axis = 0
        if _is_narrow_on_cpu(x) and math.prod(free_axes().values()) == 1:
            # The instructions need x with its rows last, in memory too: a plain transpose is made
            # a part of the product.
            rows_of_x = with_layout_constraint(rows_of_x.T, Layout((0, 1)))
            axis = 1
        over_rows = (((axis,), (0,)), ((), ()))
        y = jax.lax.dot_general(rows_of_x, rows_of_w, over_rows, preferred_element_type=dtype)
        return y.reshape(*x.shape[shared:], *w.shape[shared:])
    if divides_tokens or not is_flat or out != free + others:
        return jnp.einsum(equation, x, w, preferred_element_type=dtype)
    # x [rows, inner] and w [inner, columns], or its transpose.
    shared = len(both)
    inner = math.prod(x.shape[x.ndim - shared :])
    transposed = right[0] not in left
    columns = w.shape[: w.ndim - shared] if transposed else w.shape[shared:]
    matrix = w.reshape(-1, inner) if transposed else w.reshape(inner, -1)
    numbers = (((1,), (int(transposed),)), ((), ()))
    y = jax.lax.dot_general(x.reshape(-1, inner), matrix, numbers, preferred_element_type=dtype)
    return y.reshape(*free_sizes, *columns)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def wide_product(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the product in float32 of operands of 16 bits. Its derivatives are products of such
    operands too: JAX would multiply the float32 gradient in float32, several times slower on
    accelerators. The axes "..." of an equation are those of einsum."""
    return product(equation, x, w, jnp.float32)


def _wide_derivative(
    equation: str, primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, Any]
) -> tuple[jax.Array, Any]:
    """Return the product, and its derivative in the direction of the tangents."""
    x, w = primals
    d_x, d_w = tangents
    terms = []
    if not isinstance(d_x, SymbolicZero):
        terms.append(product(equation, d_x, w))
    # The tangent of a weight that does not learn is zero.
    if not isinstance(d_w, SymbolicZero):
        terms.append(product(equation, x, d_w))
    y = wide_product(equation, x, w)
    if not terms:
        return y, jnp.zeros_like(y)
    # The transpose of this conversion makes the gradient 16 bits wide before it is multiplied.
    return y, sum(terms[1:], terms[0]).astype(jnp.float32)


wide_product.defjvp(_wide_derivative, symbolic_zeros=True)


# `product` of 16 bits on a CPU, whose derivatives are such products too: JAX would multiply their
# float32 gradients in float32. A primitive and no custom derivative, since it has to be
# differentiated forward, backward, twice and in batches.
NARROW_PRODUCT = Primitive("narrow_product")


def _narrow_product(x: jax.Array, w: jax.Array, *, equation: str) -> jax.Array:
    return _product(equation, x, w, jnp.float32).astype(x.dtype)


@NARROW_PRODUCT.def_abstract_eval
def _shape_of_narrow(x: Any, w: Any, *, equation: str) -> Any:
    left, right, out = _letters(equation, x.shape, w.shape)
    sizes = dict(zip(left + right, (*x.shape, *w.shape), strict=True))
    return jax.core.ShapedArray([sizes[letter] for letter in out], x.dtype)


def _gradient_of_x(d_y: jax.Array, x: Any, w: jax.Array, *, equation: str) -> jax.Array:
    left, right, out = re.split(",|->", equation)
    return product(f"{out},{right}->{left}", d_y, w)


def _gradient_of_w(d_y: jax.Array, x: jax.Array, w: Any, *, equation: str) -> jax.Array:
    left, right, out = re.split(",|->", equation)
    # The operand with the first axes of w first, so that none is moved.
    if right[0] in left:
        return product(f"{left},{out}->{right}", x, d_y)
    return product(f"{out},{left}->{right}", d_y, x)


def _batched_narrow(
    operands: tuple[jax.Array, jax.Array], axes: tuple[int | None, ...], *, equation: str
) -> tuple[jax.Array, int]:
    batch = next(letter for letter in string.ascii_letters if letter not in equation)
    letters = re.split(",|->", equation)
    arrays = []
    for i, (array, axis) in enumerate(zip(operands, axes, strict=True)):
        if axis is not None:
            array = jnp.moveaxis(array, axis, 0)
            letters[i] = batch + letters[i]
        arrays.append(array)
    return product(f"{letters[0]},{letters[1]}->{batch}{letters[2]}", *arrays), 0


NARROW_PRODUCT.def_impl(jax.jit(_narrow_product, static_argnames="equation"))
mlir.register_lowering(NARROW_PRODUCT, mlir.lower_fun(_narrow_product, multiple_results=False))
ad.defbilinear(NARROW_PRODUCT, _gradient_of_x, _gradient_of_w)
batching.primitive_batchers[NARROW_PRODUCT] = _batched_narrow


def _letters(equation: str, x: tuple[int, ...], w: tuple[int, ...]) -> tuple[str, str, str]:
    """Return the axes of x, of w and of the result; ValueError where they do not fit these
    shapes."""
    match = re.fullmatch(r"([A-Za-z]+),([A-Za-z]+)->([A-Za-z]*)", equation)
    left, right, out = match.groups() if match else ("", "", "")
    sizes = dict(zip(left + right, (*x, *w), strict=False))
    fits = (
        [sizes.get(letter) for letter in left] == [*x]
        and [sizes.get(letter) for letter in right] == [*w]
        and set(out) <= sizes.keys()
        and all(len(set(letters)) == len(letters) for letters in (left, right, out))
    )
    if not fits:
        raise ValueError(
            f"contract: {equation!r} does not fit the shapes {list(x)} and {list(w)}: each axis has"
            " a letter, once in a part, and a shared one has one length, as in 'BTD,DF->BTF'."
        )
    return left, right, out


def lookup(table: Any, index: Any, to: Axes) -> jax.Array:
    """Return the rows of a table [V, W] at an int index [...], as [..., W]; `to` names the axes of
    the result."""
    if is_custom(table):
        return table.lookup(index, to)  # type: ignore[no-any-return]
    if explicit_axes():
        sharding = activation((*index.shape, table.shape[-1]), to)
        return gathered(table).at[index].get(out_sharding=sharding)
    if to[-1]:
        return constrain(constrain(table, (None, to[-1]))[index], to)
    # A device looks up its columns of the rows of all tokens of its replica; the result is then
    # exchanged, first along the sequence, so that the device has all columns of its own tokens. In
    # this way neither the table nor its gradient is ever gathered on one device.
    everywhere = ("replica", *[None] * len(to[1:-1]))
    looked_up = constrain(table, (None, "column"))[constrain(index, everywhere)]
    by_columns = constrain(looked_up, (*everywhere, "column"))
    of_sequence = constrain(by_columns, ("replica", *to[1:-1], "column_of_rows"))
    return constrain(of_sequence, to)
