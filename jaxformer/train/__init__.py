"""Training: the state, the step, and the loop around it."""
