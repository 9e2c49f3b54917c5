"""The encoder-only family (BERT): the stack of a decoder, with attention to both sides."""

import functools

from jaxformer.models import decoder

specs = decoder.specs
hidden = functools.partial(decoder.hidden, causal=False)
