"""Attention, its gradients, and their NumPy kernels."""

from foreplan.ops.attention import gradient, ops, packed

__all__ = ["gradient", "ops", "packed"]
