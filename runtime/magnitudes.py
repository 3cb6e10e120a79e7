"""The magnitudes of adapters (DoRA) in a session: the norms of the weights that the session holds, until they are
trained, loaded or assigned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import numpy as np

from foreplan.graph.adapter import Adapter, adapters_in
from foreplan.lower.program import Slot
from foreplan.runtime.engine import Place


def adapters_with_magnitudes(stored: Collection[Slot]) -> tuple[Adapter, ...]:
    """The adapters among stored values that have magnitudes."""
    found = adapters_in([(slot.name, slot.init) for slot in stored], {slot.name for slot in stored})
    return tuple(each for each in found if each.magnitude is not None)


def write_norms(adapters: Iterable[Adapter], places: Mapping[str, Place]) -> None:
    """Let the magnitudes be the norms of the weights."""
    for each in adapters:
        assert each.magnitude is not None
        places[each.magnitude].fill(partial(_copy, each.norms(places[each.weight].read())))


def at_norms(adapters: Iterable[Adapter], places: Mapping[str, Place]) -> list[Adapter]:
    """The adapters whose magnitudes are the norms of the weights, as `write_norms` left them."""
    found = []
    for each in adapters:
        assert each.magnitude is not None
        magnitude, norms = places[each.magnitude].read(), each.norms(places[each.weight].read())
        was, wanted = magnitude.reshape(-1), norms.astype(magnitude.dtype)
        if ((was == wanted) | ((was != was) & (wanted != wanted))).all():  # of weights without content: not a number
            found.append(each)
    return found


def _copy(norms: np.ndarray, out: np.ndarray) -> None:
    out[...] = norms.reshape(out.shape)
