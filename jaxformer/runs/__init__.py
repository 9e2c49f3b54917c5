"""Runs: what turns the settings of a run into functions, and claims its directory."""
