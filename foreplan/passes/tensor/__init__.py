"""Products of which each rank computes a part, as in Megatron-LM: tensor parallelism."""

from foreplan.passes.tensor.split_products import split_products

__all__ = ["split_products"]
