"""Convolution, its gradients, and their NumPy kernels."""

from foreplan.ops.conv import mapped, ops

__all__ = ["mapped", "ops"]
