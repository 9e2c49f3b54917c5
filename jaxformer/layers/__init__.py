"""The layers, each a pure function; those named here also serve in somebody else's model."""

from jaxformer.layers.dot_product import dot_product_attention
from jaxformer.layers.ffn import swiglu
from jaxformer.layers.norm import layer_norm, rms_norm
from jaxformer.layers.positions import rope

__all__ = ["dot_product_attention", "layer_norm", "rms_norm", "rope", "swiglu"]
