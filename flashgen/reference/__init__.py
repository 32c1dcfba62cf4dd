"""The reference: float64 attention, gradients, caches, and the cases every kernel must pass."""
