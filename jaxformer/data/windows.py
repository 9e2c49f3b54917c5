"""Random windows: rows that begin anywhere in a text, drawn independently of each other."""

import sys
from typing import Any

import numpy as np

from jaxformer.config.run import DataConfig
from jaxformer.data.rows import NumpyBatch, TextRows
from jaxformer.data.store import TokenStore
from jaxformer.files import ConfigError


class WindowRows(TextRows):
    """Row i reads the T + 1 tokens from place i of the store on, of which all but the last predict
    the next one.

    A run draws its rows with replacement, from all places at which a whole window begins. Its
    length in epochs counts tokens: an epoch is as many windows as the store has rows.
    """

    def __init__(self, store: TokenStore, data: DataConfig) -> None:
        super().__init__(store, data.sequence_length + 1, data.sequence_length)

    @property
    def numbers(self) -> int:
        return max(0, self.tokens - self.window + 1)

    def row(self, index: int, rng: np.random.Generator) -> NumpyBatch:
        window = self.store.read(int(index), int(index) + self.window)
        weights = self.weights(int(index), self.window - 1)
        return {"tokens": window[:-1], "targets": window[1:], "weights": weights}

    def order(self, seed: int, batch_size: int) -> Any:
        """The places of the windows of a run, as an endless grain dataset: entry
        `step * batch_size + row` is that of a row of a step."""
        import grain

        places = self.numbers
        drawn = grain.MapDataset.range(sys.maxsize)
        return drawn.map(lambda number: window_start(seed, int(number), places))


def check_windows(data: DataConfig, objective: str, of_text: bool) -> None:
    """Raises ConfigError where data.order=random asks for windows of anything but one stream of
    text: of records, of rows with segments, or of rows that an objective makes otherwise."""
    if not of_text or data.packing != "stream":
        raise ConfigError(
            "data.order=random draws windows of one stream of text, for data.objective=causal with"
            f" data.packing=stream, and here are data.objective={objective} and"
            f" data.packing={data.packing}: set data.order=epochs, or change these two."
        )


def window_start(seed: int, number: int, places: int) -> int:
    """Where window `number` of a sequence of random windows begins: any of the `places` 0 to
    places - 1, each as likely, independently of the other windows.

    Drawn by Philox, a counter-based generator (Salmon et al. 2011, "Parallel random numbers: as
    easy as 1, 2, 3"): `seed` is its key and `number` its counter, both at least 0, so that any
    window is computed alone, in any order and by any process.
    """
    # A window may take several numbers of the generator, which counts them in its lowest 64 bits.
    generator = np.random.Philox(key=seed, counter=number << 64)
    return int(np.random.Generator(generator).integers(places))
