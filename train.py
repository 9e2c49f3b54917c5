"""Trains a model: `python train.py CONFIG [--section.field value ...]`. The same line again
continues the run."""

import sys

from jaxformer.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
