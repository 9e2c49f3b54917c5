"""`python -m jaxformer.lm_eval`."""

import sys

from jaxformer.lm_eval import main

sys.exit(main())
