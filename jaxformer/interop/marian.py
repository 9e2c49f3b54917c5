"""Marian (arXiv:1804.00344): sinusoidal positions, sines before cosines."""

import dataclasses

from jaxformer.interop.bart import BART, shared_fields
from jaxformer.interop.fields import AliasKey, Constant, FixedKey

MARIAN = dataclasses.replace(
    BART,
    model_type="marian",
    architectures={"MarianMTModel": {}},
    bases=("MarianModel",),
    fields=(
        *shared_fields(58101),
        Constant(positions="sinusoidal", sinusoid_order="half"),
        FixedKey("share_encoder_decoder_embeddings", (True,)),
        AliasKey("decoder_vocab_size", "vocab_size", "vocab_size", checked=True),
        FixedKey("normalize_embedding", (False,)),
    ),
    ignored=(r"(en|de)coder\.embed_positions\.weight$",),
)
