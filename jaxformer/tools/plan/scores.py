"""The scores of attention that a mask leaves to be computed."""


def visible_pairs(length: int, window: int = 0, causal: bool = True) -> int:
    """The pairs of a query and a key that it sees, of the length^2 pairs of a row of one text.

    `window` is the number of tokens that a query sees, with itself, to the left (to both sides
    where the mask is not causal); 0: all.
    """
    reach = min(window or length, length)
    one_side = reach * (reach + 1) // 2 + (length - reach) * reach  # with the query itself
    return one_side if causal else 2 * one_side - length
