"""One step of several ranks: each has samples of its own, and all come to the same weights."""

from foreplan.passes.ranks.gradient_uses import GradientUses, uses_of_gradients
from foreplan.passes.ranks.loss import MeanOfAll, ShareOfMean
from foreplan.passes.ranks.overlap import Beside, OverlapExchanges, always
from foreplan.passes.ranks.returned_gradients import SumGradients
from foreplan.passes.ranks.setting import ALONE, Ranks
from foreplan.passes.ranks.sharding import DifferentiateInParts, Sharding
from foreplan.passes.ranks.storage import WHOLE, Held, LayOutWeights, Storage
from foreplan.passes.ranks.sync_norm import SyncBatchNorm
from foreplan.passes.ranks.weight_views import Phase, by_pass

__all__ = [
    "ALONE",
    "WHOLE",
    "Beside",
    "DifferentiateInParts",
    "LayOutWeights",
    "Held",
    "Phase",
    "Ranks",
    "Sharding",
    "Storage",
    "GradientUses",
    "always",
    "by_pass",
    "MeanOfAll",
    "OverlapExchanges",
    "ShareOfMean",
    "SumGradients",
    "SyncBatchNorm",
    "uses_of_gradients",
]
