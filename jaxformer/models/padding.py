"""A warning for rows that look padded but have no segment ids."""

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

# Equal tokens at the edge of a row that count as padding; text rarely begins or ends like this.
LEAST_RUN = 3


def warn_of_padding(
    name: str, tokens: Any, segment_ids: Any, sides: str = "left right", level: int = 3
) -> None:
    """Warns if one token id occurs in runs at one of the `sides` of rows [B, T] and nowhere else,
    and there are no segment ids, so that it is read as text. `name` is the argument of the rows,
    and `level` the stacklevel of the warning. Under a transform of JAX the values of the rows are
    not known, and there is no warning."""
    if segment_ids is not None or tokens is None or isinstance(tokens, jax.core.Tracer):
        return
    rows = np.asarray(tokens)
    if rows.ndim != 2 or rows.shape[1] <= LEAST_RUN:
        return
    for side in sides.split():
        seen = rows if side == "left" else rows[:, ::-1]
        for token in np.unique(seen[:, 0]):
            runs = np.cumprod(seen == token, axis=1).sum(axis=1)  # [B]
            padded = (runs >= LEAST_RUN) & (runs < rows.shape[1])
            if padded.any() and runs.sum() == (rows == token).sum():
                ids = "segment_ids" if name != "source" else "source_segment_ids"
                warnings.warn(
                    f"{name} has the token {token} in runs at the {side} of {padded.sum()} of"
                    f" {len(rows)} rows. If it is padding, give {ids}, of the same shape, with 0 on"
                    " padding and 1 elsewhere: without them it is read as text.",
                    stacklevel=level,
                )
                return


def warn_of_padded_batch(batch: Mapping[str, Any], family: str) -> None:
    """`warn_of_padding` for a batch of a loss. Padding after the text of a decoder is harmless if
    its weights are 0, because no token before it sees it, and gets no warning."""
    tokens, weights = batch.get("tokens"), batch.get("weights")
    sides = "left right"
    if family != "encoder" and weights is not None and not isinstance(weights, jax.core.Tracer):
        unweighted = np.asarray(weights)
        if unweighted.ndim == 2 and not unweighted[:, -1].all():
            sides = "left"
    warn_of_padding("tokens", tokens, batch.get("segment_ids"), sides, level=4)
    source, source_ids = batch.get("source"), batch.get("source_segment_ids")
    warn_of_padding("source", source, source_ids, level=4)
