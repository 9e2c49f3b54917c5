"""Optimizers: update rules and learning-rate schedules by name, on the table of parameters."""
