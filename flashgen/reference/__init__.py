"""What is right: float64 attention, gradients, caches, and the cases every kernel must pass."""
