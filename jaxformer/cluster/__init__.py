"""The process itself and the others of its run: signals, agreements, the roll call."""
