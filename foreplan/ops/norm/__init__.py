"""Normalisation, over a batch's channels and over rows, with its gradients."""

from foreplan.ops.norm import batch, masked, rows, sync

__all__ = ["batch", "masked", "rows", "sync"]
