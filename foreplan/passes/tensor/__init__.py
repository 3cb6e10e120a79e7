"""Products of which each rank computes a part, as in Megatron-LM: tensor parallelism, and sequence parallelism between
these products.
"""

from foreplan.passes.tensor.gather_again import gather_again
from foreplan.passes.tensor.split_products import SplitProducts

__all__ = ["gather_again", "SplitProducts"]
