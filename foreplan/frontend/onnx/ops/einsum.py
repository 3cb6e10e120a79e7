"""Einsum as diagonals, sums, transposes and one batched matrix product for each further operand."""

from __future__ import annotations

import math
from collections.abc import Sequence

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.graph import Builder, Value
from foreplan.ops.matmul import matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import Slice, broadcast_to, reshape, transpose


@translates("Einsum")
def _einsum(n: OnnxNode) -> Operand:
    operands = n.values()
    terms, result = _parse(n, n.text("equation"), [len(x.shape) for x in operands])
    sizes: dict[str, int] = {}
    for x, term in zip(operands, terms):
        for label, extent in zip(term, x.shape):
            known = sizes.setdefault(label, extent)
            if known != extent and 1 not in (known, extent):
                raise n.misshapen(f"the index {label!r} is {known} in one operand and {extent} in another")
            sizes[label] = max(known, extent)
    x, term = operands[0], terms[0]
    x, term = _diagonals(n.b, x, term)
    for i, (y, other) in enumerate(zip(operands[1:], terms[1:])):
        y, other = _diagonals(n.b, y, other)
        later = set(result).union(*terms[i + 2 :])
        x, term = _product(n.b, x, term, y, other, later)
    x, term = _sum_out(n.b, x, term, set(result))
    x = transpose(n.b, x, [term.index(label) for label in result])
    return broadcast_to(n.b, x, tuple(sizes[label] for label in result))


def _parse(n: OnnxNode, equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """One label an axis for each operand and for the result; the axes of an ellipsis get labels of their own."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    written = left.split(",")
    if len(written) != len(ranks):
        raise n.fail(f"the equation {equation!r} is for {len(written)} operands, and there are {len(ranks)}")
    widest = 0
    for term, rank in zip(written, ranks):
        named = len(term.replace("...", ""))
        if named > rank or (named < rank and "..." not in term):
            raise n.misshapen(f"the term {term!r} of {equation!r} does not fit an operand with {rank} axes")
        widest = max(widest, rank - named)
    spare = "".join(chr(0x100 + i) for i in range(widest))
    terms = []
    for term, rank in zip(written, ranks):
        count = rank - len(term.replace("...", ""))
        terms.append(term.replace("...", spare[len(spare) - count :]))
    if arrow:
        result = right.replace("...", spare)
    else:
        once = [label for label in "".join(terms) if label not in spare]
        result = spare + "".join(sorted(label for label in set(once) if once.count(label) == 1))
    if any(label not in "".join(terms) for label in result) or len(set(result)) != len(result):
        raise n.fail(f"the result of the equation {equation!r} has an index that no operand has, or one twice")
    return terms, result


def _diagonals(b: Builder, x: Value, term: str) -> tuple[Value, str]:
    """The operand with each index once: of an index that it has twice, the diagonal."""
    for label in dict.fromkeys(term):
        while term.count(label) > 1:
            first = term.index(label)
            second = term.index(label, first + 1)
            others = [i for i in range(len(term)) if i not in (first, second)]
            extent = x.shape[first]
            moved = transpose(b, x, (*others, first, second))
            lead = moved.shape[:-2]
            flat = reshape(b, moved, (*lead, extent * extent))
            steps = (*(1 for _ in lead), extent + 1)
            x = b.apply(Slice((0,) * len(steps), (*lead, extent), steps), flat)
            term = "".join(term[i] for i in others) + label
    return x, term


def _sum_out(b: Builder, x: Value, term: str, kept: set[str]) -> tuple[Value, str]:
    axes = [i for i, label in enumerate(term) if label not in kept]
    return reduce(b, "sum", x, axes) if axes else x, "".join(label for label in term if label in kept)


def _product(b: Builder, x: Value, left: str, y: Value, right: str, later: set[str]) -> tuple[Value, str]:
    """The two operands as one batched matrix product, summed over the indices that are not in `later`."""
    x, left = _sum_out(b, x, left, later | set(right))
    y, right = _sum_out(b, y, right, later | set(left))
    both = [label for label in left if label in right]
    batch = [label for label in both if label in later]
    inner = [label for label in both if label not in later]
    rows = [label for label in left if label not in right]
    columns = [label for label in right if label not in left]
    sizes = dict(zip(left, x.shape))
    for label, extent in zip(right, y.shape):
        sizes[label] = max(extent, sizes.get(label, 1))
    # Only inner indices of extent 1 are repeated to the other operand's extent; batch axes broadcast.
    x = broadcast_to(b, x, tuple(sizes[label] if label in inner else e for label, e in zip(left, x.shape)))
    y = broadcast_to(b, y, tuple(sizes[label] if label in inner else e for label, e in zip(right, y.shape)))
    x = transpose(b, x, [left.index(label) for label in (*batch, *rows, *inner)])
    y = transpose(b, y, [right.index(label) for label in (*batch, *inner, *columns)])
    size = {
        group: math.prod(sizes[label] for label in labels)
        for group, labels in (("r", rows), ("i", inner), ("c", columns))
    }
    x = reshape(b, x, (*x.shape[: len(batch)], size["r"], size["i"]))
    y = reshape(b, y, (*y.shape[: len(batch)], size["i"], size["c"]))
    product = matmul(b, x, y)
    labels = (*batch, *rows, *columns)
    return reshape(b, product, tuple(sizes[label] for label in labels)), "".join(labels)
