"""One step of several ranks: each has samples of its own, and all come to the same weights."""

from foreplan.passes.ranks.homes import Phase, by_pass
from foreplan.passes.ranks.loss import mean_of_all, share_of_mean
from foreplan.passes.ranks.overlap import Beside, always, overlap_exchanges
from foreplan.passes.ranks.returned import sum_gradients
from foreplan.passes.ranks.setting import ALONE, Ranks
from foreplan.passes.ranks.sharding import Sharding
from foreplan.passes.ranks.storage import WHOLE, Held, Storage
from foreplan.passes.ranks.sync_norm import sync_batch_norm
from foreplan.passes.ranks.uses import Uses, uses_of_gradients

__all__ = [
    "ALONE",
    "WHOLE",
    "Beside",
    "Held",
    "Phase",
    "Ranks",
    "Sharding",
    "Storage",
    "Uses",
    "always",
    "by_pass",
    "mean_of_all",
    "overlap_exchanges",
    "share_of_mean",
    "sum_gradients",
    "sync_batch_norm",
    "uses_of_gradients",
]
