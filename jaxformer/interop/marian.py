"""Marian (arXiv:1804.00344): sinusoidal positions, sines before cosines."""

import dataclasses

from jaxformer.interop.bart import BART, fields
from jaxformer.interop.fields import Again, Fixed, Only

MARIAN = dataclasses.replace(
    BART,
    model_type="marian",
    architectures={"MarianMTModel": {}},
    bases=("MarianModel",),
    fields=(
        *fields(58101),
        Fixed(positions="sinusoidal", sinusoid_order="half"),
        Only("share_encoder_decoder_embeddings", (True,)),
        Again("decoder_vocab_size", "vocab_size", "vocab_size", checked=True),
        Only("normalize_embedding", (False,)),
    ),
    ignored=(r"(en|de)coder\.embed_positions\.weight$",),
)
