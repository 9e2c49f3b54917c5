"""`python -m jaxformer`: the same commands as `jaxformer`."""

import sys

from jaxformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
