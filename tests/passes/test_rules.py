"""What ranks do not compute parts of, and why."""

from __future__ import annotations

import re

import pytest

from foreplan.graph import GraphBuilder, Node, Op
from foreplan.graph.shard import Shard
from foreplan.graph.types import FLOAT32, TensorType, as_dtype
from foreplan.ops.conv.ops import Conv
from foreplan.ops.index import Gather
from foreplan.ops.loss import CrossEntropy
from foreplan.ops.matmul import MatMul
from foreplan.ops.reduce import Reduce
from foreplan.passes.tensor.rules import Known, StaysWhole, possible_shards, shards_of

INT64 = as_dtype("int64")


def node_of(op: Op, *shapes: tuple[int, ...], integers: int = -1) -> Node:
    """A node that reads inputs of these shapes; one of them may be of integers."""
    b = GraphBuilder()
    b.node(op, *(b.input(f"x{i}", TensorType(INT64 if i == integers else FLOAT32, x)) for i, x in enumerate(shapes)))
    (node,) = b.nodes
    return node


IMAGE = node_of(Conv((1, 1), ((1, 1), (1, 1)), (1, 1)), (2, 4, 8, 8), (6, 4, 3, 3))
WORDS = node_of(Gather(axis=0), (12, 4), (5,), integers=1)
CLASSES = node_of(CrossEntropy(axis=1), (6, 12), (6,), integers=1)
PRODUCT = node_of(MatMul(), (6, 12), (12, 10))
TOTAL = node_of(Reduce("max", (1,)), (6, 12))


@pytest.mark.parametrize(
    ("node", "index", "shard", "told"),
    [
        (WORDS, 0, Shard(2, 0, 2), "gather of float32[12,4] needs neighbours along axis 0"),
        (CLASSES, 0, Shard(2, 1, 3), "cross_entropy of float32[6,12] needs neighbours along axis 1"),
        (
            PRODUCT,
            1,
            Shard(4, 1),
            "4 ranks do not divide the 10 elements along axis 1 of float32[12,10] (2 or 5 would)",
        ),
        (PRODUCT, 1, Shard(5, 1, 4), "5 ranks do not divide"),
        (TOTAL, 0, Shard(2, 1), "max of reduce needs the whole of axis 1"),
    ],
)
def test_what_stays_whole(node: Node, index: int, shard: Shard, told: str) -> None:
    with pytest.raises(StaysWhole, match=re.escape(told)):
        shards_of(Known(node, index, False, shard))


def test_convolutions_could_have_parts_and_stay_whole() -> None:
    known = Known(IMAGE, 1, False, Shard(2, 0))
    assert possible_shards(known).outputs == (Shard(2, 1),)
    with pytest.raises(StaysWhole, match="conv needs the whole of"):
        shards_of(known)
