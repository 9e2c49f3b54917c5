"""`python -m jaxformer.tools.lm_eval`."""

import sys

from jaxformer.tools.lm_eval import main

sys.exit(main())
