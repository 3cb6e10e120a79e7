"""Which parameters share a bucket, and the stored values that take their place where ranks hold parts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from foreplan.graph import Builder, Graph, Kind, Node, TensorType, Value
from foreplan.graph.flat import Flat, Member, laid_out
from foreplan.ops.collective import Group
from foreplan.ops.map import Map
from foreplan.passes.optimizer.rule import Optimizer, check_by_element
from foreplan.passes.ranks.setting import Ranks


@dataclass(frozen=True, eq=False)
class Bucket:
    """Weights that are stored as one value.

    Attributes:
        weights: the weights as the model has them, in their order.
        members: their places in the row.
        size: elements of the row.
        home: the stored value: the row, or this rank's part of it.
        group: the ranks that have parts of the row, or of what belongs to it.
        copies: of each weight, the narrow copy through which alone the forward pass reads it, so that this is gathered;
            none: weights are read themselves.
    """

    weights: tuple[Value, ...]
    members: tuple[Member, ...]
    size: int
    home: Value
    group: Group
    copies: tuple[Value, ...] = ()


def buckets_of(
    graph: Graph, trained: Collection[str], ranks: Ranks, optimizer: Optimizer, alone: Collection[Value] = ()
) -> tuple[Bucket, ...]:
    """The buckets of a forward graph, in the order of its weights. Each holds weights that are updated by one rule.
    With parameters in parts, frozen weights have buckets, too.

    Args:
        trained: names of the weights that have gradients: a bucket waits for all of its own.
        alone: weights that have a bucket of their own.

    Raises:
        UsageError: the optimizer needs whole tensors.
    """
    full = ranks.bucket(graph.parameters)
    copies = narrow_copies(graph) if ranks.shard == "parameters" else {}
    groups: dict[Any, list[Value]] = {}
    found: list[list[Value]] = []
    for value in graph.stored:
        if value.name in trained:
            key: Any = (value.dtype, *_rule(value, optimizer))
        elif value.kind is Kind.FROZEN and ranks.shard == "parameters":
            key = value.dtype
        else:
            continue
        key = (key, copies[value].dtype if value in copies else None, ranks.with_other_samples(value))
        if value in alone:
            found.append([value])
            continue
        group = groups.setdefault(key, [])
        group.append(value)
        if sum(each.type.nbytes for each in group) >= full:
            found.append(groups.pop(key))
    return tuple(made_bucket(i, group, ranks, copies) for i, group in enumerate((*found, *groups.values())))


def narrow_copies(graph: Graph) -> dict[Value, Value]:
    """By weight, its narrow copy, if nothing but that is read of it."""
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in set(node.inputs):
            readers.setdefault(value, []).append(node)
    found = {}
    results = set(graph.results)
    for value in (each for each in graph.stored if each not in results):
        some = readers.get(value, [])
        if len(some) != 1 or some[0].outputs[0] in results:
            continue
        node = some[0]
        dtype = node.outputs[0].dtype
        if dtype.is_narrow and node.op == Map((f"{dtype.name}(a0)",)):
            found[value] = node.outputs[0]
    return found


def _rule(value: Value, optimizer: Optimizer) -> tuple[Any, float]:
    rule, factor = optimizer.for_parameter(value.name, value.type)
    check_by_element(rule, value.name, "shard='none'")
    return rule, factor


def made_bucket(number: int, weights: list[Value], ranks: Ranks, copies: Mapping[Value, Value]) -> Bucket:
    """A new bucket of weights whose gradients the same ranks sum.

    Args:
        copies: narrow copies by weight; of all of these weights, or of none.
    """
    group = ranks.with_other_samples(weights[0])
    starts, size = laid_out([value.type for value in weights], group.ranks)
    members = tuple(
        Member(value.name, start, value.type, value.init, value.why)
        for value, start in zip(weights, starts)
        if value.init is not None
    )
    parts = group if ranks.shard == "parameters" and group.ranks > 1 else Group()
    type = TensorType(weights[0].dtype, (size // parts.ranks,))
    home = Value(f"bucket{number}", type, weights[0].kind, Flat(members, parts.ranks, parts.stride))
    narrow = tuple(copies[value] for value in weights if value in copies)
    return Bucket(tuple(weights), members, size, home, group, narrow)


def keep(b: Builder, values: Iterable[Value]) -> None:
    """Let a graph store values that were made before, if it does not yet."""
    new = [value for value in values if value not in b.stored]
    b.reserve(new, ())
    b.stored += new
