"""What functions of the package remember from call to call."""

from __future__ import annotations

import sys
from functools import _lru_cache_wrapper


def forget() -> None:
    """Empty the cache of every function of a module of the package. The garbage collector does not know those that
    were there when tests were collected.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("foreplan"):
            for each in vars(module).values():
                if isinstance(each, _lru_cache_wrapper):
                    each.cache_clear()
