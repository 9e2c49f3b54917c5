"""Text to batches beside its baselines: training a BPE, encoding, the memory of both, loading.
`python benchmarks/tokens.py`

Names of parts after it choose some of them. Each part prints its table and is one call of the
function that `PARTS` names.
"""

import argparse
import importlib

from pairing import add_smoke

PARTS = {
    "training": ("tokens_training", "training"),
    "memory": ("tokens_training", "memory"),
    "encoding": ("tokens_encoding", "encoding"),
    "iterable": ("tokens_encoding", "iterable"),
    "loader": ("tokens_loader", "loader"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all where none is named"
    )
    add_smoke(parser)
    options = parser.parse_args()
    chosen = options.parts or [*PARTS]
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"no part is called {unknown[0]}: take some of {', '.join(PARTS)}")
    for part in chosen:
        module, function = PARTS[part]
        getattr(importlib.import_module(module), function)(options.smoke)


if __name__ == "__main__":
    main()
