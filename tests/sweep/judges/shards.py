"""Parts that ranks have of an op's tensors: computed rank by rank in float64, and joined or added, against the oracle's
results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np

from foreplan.graph import GraphBuilder
from foreplan.graph.shard import Shard
from foreplan.passes.tensor.reductions import means, summands
from foreplan.passes.tensor.rules import Known, Shards, StaysWhole, possible_shards
from tests.ops.check import type_of
from tests.sweep.bounds import complaint, expectation, widened
from tests.sweep.case import Case
from tests.sweep.judges.boxes import HINT
from tests.sweep.judges.numpy import outputs
from tests.sweep.table import ENTRIES

RANKS = (2, 3, 4)


def judge(case: Case) -> int:
    """Raise AssertionError where parts make something else than the whole; the number of cuts."""
    entry, arrays, rng = ENTRIES[case.op.name], widened(case.arrays()), Random(case.number)
    b = GraphBuilder()
    b.node(case.op, *(b.input(f"x{i}", type_of(x)) for i, x in enumerate(arrays)))
    (node,) = b.nodes
    if not node.outputs:
        return 0
    wanted = expectation(case.op, entry.oracle, entry.rule, arrays, "numpy")
    asked = 0
    for made, values in ((False, node.inputs), (True, node.outputs)):
        for index, value in enumerate(values):
            for axis, extent in enumerate(value.shape):
                fitting = [(n, m) for n in RANKS for m in range(1, extent + 1) if extent % (n * m) == 0]
                rng.shuffle(fitting)
                known, found = _first(Known(node, index, made, Shard(n, axis, m)) for n, m in fitting)
                if known is None or found is None or found.close not in (None, means, summands):
                    continue  # tests/ranks has other closings
                for i, (y, each) in enumerate(zip(_joined(found, arrays, known.shard.ranks), wanted, strict=True)):
                    wrong = complaint(y, each)
                    cut = f"{known.type} being cut {known.shard}"
                    assert wrong is None, f"output {i} of {found.op}, {cut}: {wrong}; {HINT}"
                asked += 1
    return asked


def _first(cuts: Iterable[Known]) -> tuple[Known, Shards] | tuple[None, None]:
    """The first cut that an op can compute with."""
    for known in cuts:
        try:
            return known, possible_shards(known)
        except StaysWhole:
            continue
    return None, None


def _joined(shards: Shards, arrays: Sequence[np.ndarray], ranks: int) -> list[np.ndarray]:
    """The whole outputs, made of those of all ranks."""
    own = []
    for rank in range(ranks):
        cuts = zip(arrays, shards.inputs, strict=True)
        given = [x if cut is None else np.ascontiguousarray(cut.take(x, rank)) for x, cut in cuts]
        own.append(outputs(shards.op, given))
    made = [list(each) for each in zip(*own)]
    if shards.close is None:
        return [ys[0] if cut is None else cut.join(ys) for cut, ys in zip(shards.outputs, made, strict=True)]
    with np.errstate(all="ignore"):
        if shards.close is means:
            made = [[y * (1 / ranks) for y in ys] for ys in made]
        return [np.add.reduce(ys, dtype=ys[0].dtype) for ys in made]
