"""Settings: the frozen dataclasses of a model and of a run, their rules, and the files that hold
them."""
