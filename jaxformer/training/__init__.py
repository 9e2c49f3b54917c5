"""Training: the state, the step, checkpoints and the loop around them, for any loss over any
parameters."""
