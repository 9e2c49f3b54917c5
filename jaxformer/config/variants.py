"""The names of the variants of a model. Most are the rows of an open table, to which code of your
own adds a row (`jaxformer.config.settings.TableAt`)."""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from jaxformer.config.settings import TableAt

Gated = Literal["swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "reglu", "glu"]
Activation = Annotated[
    Literal[Gated, "gelu", "gelu_tanh", "relu", "silu", "relu2", "tanh", "quick_gelu"],
    TableAt("jaxformer.layers.ffn.ACTIVATIONS"),
]
RopeScaling = Annotated[
    Literal["none", "linear", "dynamic", "yarn", "llama3", "longrope"],
    TableAt("jaxformer.layers.positions.FREQUENCIES"),
]
Normalization = Annotated[
    Literal["rms", "rms1p", "layer", "none"], TableAt("jaxformer.layers.norm.NORMS")
]
Initializer = Annotated[
    Literal["gpt2", "truncated_normal", "xavier", "fan_in"],
    TableAt("jaxformer.layers.linear.INITIALIZERS"),
]
Parametrization = Annotated[
    Literal["standard", "mup"], TableAt("jaxformer.models.transformer.PARAMETRIZATIONS")
]
AttentionKernel = Annotated[
    Literal["auto", "xla", "blocked", "ring", "cudnn", "tpu"],
    TableAt("jaxformer.layers.kernels.KERNELS"),
]

# The sublayers of a block: the one that reads other tokens, and the one that reads each by itself.
Mixer = Annotated[
    Literal["attention", "latent", "delta", "mamba2"], TableAt("jaxformer.layers.block.MIXERS")
]
# The letters of model.layer_pattern for the mixers that keep a state of a text.
RECURRENT = {"d": "delta", "s": "mamba2"}
FeedForward = Annotated[Literal["ffn", "experts"], TableAt("jaxformer.layers.block.FEED_FORWARDS")]
ExpertKernel = Annotated[
    Literal["auto", "xla", "loop", "ragged", "tpu", "gpu"],
    TableAt("jaxformer.layers.grouped.GROUPED_KERNELS"),
]

EmbeddingName = Annotated[Literal["tokens"], TableAt("jaxformer.layers.embed.EMBEDDINGS")]
HeadName = Annotated[
    Literal["auto", "language", "masked", "classes", "tags", "projection", "none"],
    TableAt("jaxformer.layers.head.HEADS"),
]
# Heads that an encoder may have beside that of model.head, which predict from the pooler whether
# the second of two texts follows the first. Each is the name of its setting and of its parameters.
SECOND_HEADS = ("next_sentence",)

# Activations of a gated feed-forward layer, down(act(gate x) * up x); a gated row of your own is
# added here too.
GATED = {*get_args(Gated)}
# The factor of the rotated queries and keys where model.rope.attention_factor is 0, of the scalings
# that have one; that of a scaling of your own is added here too.
ATTENTION_FACTORS: dict[str, Callable[[Any], float]] = {
    "yarn": lambda config: 0.1 * math.log(config.rope.factor) + 1,
    "longrope": lambda config: math.sqrt(
        1 + math.log(config.rope.factor) / math.log(config.original_length)
    ),
}
BIASED_SCORES = ("alibi", "t5", "disentangled")  # the positions that add a bias to the scores
# The parts of a layer that have a bias, for each value of model.bias.
BIASED = {
    bias: frozenset(parts.split())
    for bias, parts in {
        "none": "",
        "qkv": "qkv",
        "attention": "qkv out",
        "ffn": "ffn",
        "norm": "norm",
        "qkv_norm": "qkv norm",
        "ffn_norm": "ffn norm",
        "all_but_qkv": "out ffn norm",
        "all": "qkv out ffn norm",
    }.items()
}
