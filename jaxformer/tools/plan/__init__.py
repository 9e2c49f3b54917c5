"""What a run will need of its devices, and the least time it can take, before it starts."""
