"""The row that defines a sublayer of a block.

A block loops over rows, and the code that counts, plans or shows a model reads the same rows. Each
file of a sublayer (`attention.py`, `ffn.py`) has its row at its end, and `block.py` the tables of
all rows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.typing import DTypeLike

from jaxformer.arrays.params import Params, Specs
from jaxformer.config.model import ModelConfig
from jaxformer.layers.cache import LayerCache
from jaxformer.layers.masks import AttentionMask
from jaxformer.layers.output import NOTHING, Output, Request


class EncoderOutput(NamedTuple):
    """The encoder's output [B, S, D] (None once the cache has its keys), and the mask to it."""

    x: jax.Array | None
    mask: AttentionMask


class Call(NamedTuple):
    """What a stack, a block and a sublayer read besides their input: the mask of the tokens, the
    layer's cache, the output of an encoder, the key of dropout (of a sublayer, of its own inside;
    None: nothing is dropped), and what is captured."""

    mask: AttentionMask
    cache: LayerCache | None = None
    source: EncoderOutput | None = None
    key: jax.Array | None = None
    request: Request = NOTHING


class Sizes(NamedTuple):
    """A microbatch on one device: rows of which it has `length` tokens, which attend to `keys`
    tokens each, the bytes of a number in the compute dtype, the devices among which tensor
    parallelism divides an axis, and the lanes that the last axis of an array fills.

    `context` is the number of devices that have the tokens of a row together. With `exchange`
    "heads" each has some heads of all tokens where attention is computed. `expert` is the number of
    devices that have different experts."""

    rows: int
    length: int
    keys: int
    number: int
    tensor: int = 1
    lanes: int = 1
    context: int = 1
    exchange: str = "none"
    expert: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    def share(self, length: int) -> float:
        """Return the length of an axis on one device."""
        # An axis that the devices do not divide is whole on each of them.
        return length / self.tensor if length % self.tensor == 0 else length

    def key_heads(self, heads: int, kv_heads: int) -> float:
        """Return the heads of keys in the tokens of a device, repeated until the devices that
        divide the query heads divide them too."""
        devices = self.tensor * (self.context if self.exchange == "heads" else 1)
        # As `exchange.repeated` does it: the least multiple of the key heads that they divide.
        repeated = kv_heads if heads % devices else math.lcm(kv_heads, devices)
        return self.share(repeated)

    def padded(self, width: int) -> int:
        """Return the width of a head as it is stored."""
        return -(-width // self.lanes) * self.lanes


class StoredArray(NamedTuple):
    """An array of a layer that its backward pass reads; `name` is that of the point in a block,
    `bytes` those of one device."""

    name: str
    bytes: float


class Sublayer(NamedTuple):
    """A row.

    Attributes:
      specs: config -> the table of its parameters.
      apply: (params, config, x [B, T, D], call) -> `Output`: [B, T, D], the cache of the layer as
        the sublayer leaves it, and captures, losses or metrics.
      product: the name of its last product, whose output joins the residual stream; a point of
        `model.remat`.
      stored: (config, sizes) -> the arrays that its backward pass reads, by the names of points.
      gradients: those of them whose gradients are alive at once in its backward pass.
      formula: config -> lines of text, for `jaxformer shapes` and the page of attention.
      scores: (config, keys) -> FLOPs a token of the forward pass that no parameter has, where a
        token attends to so many keys; 0 for most.
      draws: whether it drops out inside, and so needs a key of its own.
      start: (config, batch, slots, dtype) -> what a mixer keeps of a text before its first token, a
        pytree of arrays [batch, ...]: `Slots` for an entry of each token, which can be taken back,
        and arrays for a state, which cannot and so excludes speculation.
      reads_source: whether its keys are those of an encoder.
      in_order: whether it reads tokens in the order of their rows, and not by their positions.
      capture: the name of its output in `Request`; by default that of the sublayer.
    """

    specs: Callable[[ModelConfig], Specs]
    apply: Callable[[Params, ModelConfig, jax.Array, Call], Output]
    product: str
    stored: Callable[[ModelConfig, Sizes], list[StoredArray]]
    gradients: tuple[str, ...]
    formula: Callable[[ModelConfig], tuple[str, ...]]
    scores: Callable[[ModelConfig, int | float], int | float] = lambda config, keys: 0.0
    start: Callable[[ModelConfig, int, int, DTypeLike], Any] = lambda *sizes: ()
    draws: bool = False
    reads_source: bool = False
    in_order: bool = False
    capture: str = ""


def biased_text(config: ModelConfig, where: str, name: str = "b") -> str:
    """Return the bias of a product in a formula, where the config has one."""
    return f" + {name}" if where in config.biased else ""
