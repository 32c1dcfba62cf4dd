"""Attention in torch operations: serves CPU tensors, and computes the oracle in float64."""
