"""One step of several ranks: each has samples of its own, and all come to the same weights."""

from foreplan.passes.ranks.buckets import reducing
from foreplan.passes.ranks.loss import mean_of_all, share_of_mean
from foreplan.passes.ranks.overlap import overlap_exchanges
from foreplan.passes.ranks.setting import ALONE, Ranks

__all__ = ["ALONE", "Ranks", "mean_of_all", "overlap_exchanges", "reducing", "share_of_mean"]
