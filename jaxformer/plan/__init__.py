"""What a run costs, before it runs: planned from its settings, or read from compiled programs."""
