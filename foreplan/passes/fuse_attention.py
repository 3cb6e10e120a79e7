"""Products with a softmax between them → `attention`, which never holds all scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from foreplan.graph import Builder, Graph, Node, Op, Value
from foreplan.ops.attention.ops import Attention
from foreplan.ops.evaluate import computed
from foreplan.ops.expr import Arg, Call, Const, Expr, substitute, used_args, where
from foreplan.ops.map import Map, elementwise
from foreplan.ops.matmul import MatMul
from foreplan.ops.shape import Reshape, Transpose, reshape, transpose
from foreplan.ops.softmax import Softmax
from foreplan.passes.base import Pass
from foreplan.passes.constants import Known
from foreplan.passes.rewrite import rewrite, rewrite_groups

SCORE_BYTES = 1 << 16  # of the smallest scores that are worth it
KNOWN_BYTES = 1 << 26  # of the largest mask that is looked at, to see whether it is causal
FAR = -1e9  # what is added to a score so large gives itself, and its exponential is 0 beside any other
LESS_FAR = -1e3  # its exponential is 0 only beside a score that is not as far
HEADS_AND_POSITIONS = (0, 2, 1, 3)  # exchanged
MOST_MAPS, MOST_TERMS = 64, 16  # between a product and its softmax, and that are added to the scores
WITHOUT_NAN = Map(("where(isnan(a0), 0.0, a0)",))
CHOSEN_WITHOUT_NAN, IS_NAN = Map(("where(a0, 0.0, a1)",)), Map(("isnan(a0)",))


@dataclass(frozen=True)
class _Term:
    """Something that is added to scores.

    Attributes:
        low: what takes the place of a score where the term hides a key; None: the term is just added.
    """

    expr: Expr
    low: float | None = None

    @property
    def is_exact(self) -> bool:
        """Whether adding it is exact, for a query that reads no key as well."""
        return self.low is None or self.low <= FAR

    def times(self, factor: float) -> _Term:
        return self if factor == 1 else _Term(self.expr * factor, None if self.low is None else self.low * factor)


@dataclass(frozen=True)
class _Scores:
    """factor · product + terms, over the arguments of an expression."""

    factor: float
    terms: tuple[_Term, ...] = ()

    def times(self, factor: float) -> _Scores:
        return _Scores(self.factor * factor, tuple(term.times(factor) for term in self.terms))


@dataclass(frozen=True)
class _Side:
    """Queries, keys or values: a value, and its axes in the order [(batch,) heads, positions, depth]."""

    value: Value
    perm: tuple[int, ...]


@dataclass(frozen=True)
class _Attention:
    """The nodes that become one.

    Attributes:
        last: the product with the values.
        inner: all other nodes that it takes the place of, the softmax first.
        sides: queries, keys and values.
        mask: what is added to scores, over `leaves`; None: nothing.
    """

    last: Node[MatMul]
    inner: tuple[Node, ...]
    sides: tuple[_Side, _Side, _Side]
    scale: float
    causal: bool
    mask: Expr | None
    leaves: tuple[Value, ...]


@dataclass(frozen=True)
class FuseAttention(Pass, requires=("forward", "plain ops"), ensures=("forward", "plain ops"), optional=True):
    """Let `attention` take the place of softmax(scale · q·kᵀ + mask)·v that is written out, as in most ONNX files.

    The scale may stand anywhere, on either side of the product. A mask is a term that maps add to scores, or a number
    of -1e9 or less that they put in the place of scores. A constant causal mask becomes `causal`, so that later keys
    are not looked at.

    Probabilities that are NaN may be set to 0, as PyTorch's exporter does for queries that read no key.

    Requires: a simplified forward graph. Ensures: the same results, up to the order of additions; a query that reads no
    key (all its scores are -inf, or below -3e38) gives zeros, and one whose scores are NaN gives NaN. Only where nobody
    else reads scores or probabilities, which have `least` bytes or more; not with dropout between.
    """

    least: int = SCORE_BYTES

    def _run(self, graph: Graph) -> Graph:
        masks = _Masks(graph)
        products = graph.nodes_of(MatMul)
        found = [each for node in products if (each := _attention_at(graph, masks, node, self.least)) is not None]
        if not found:
            return graph
        inner = {node for each in found for node in each.inner}
        groups: dict[Node, _Attention] = {each.last: each for each in found}
        return rewrite(rewrite_groups(graph, groups, inner, _fused), lambda b, node, inputs: None)


fuse_attention = FuseAttention()


def _attention_at(graph: Graph, masks: _Masks, last: Node[MatMul], least: int) -> _Attention | None:
    """The attention whose last product this is."""
    if not _is_plain(last):
        return None
    softmax, guard = _guarded(graph, last.inputs[0])
    rank = len(last.inputs[0].shape)
    if softmax is None or softmax.op.axis != rank - 1 or rank not in (3, 4):
        return None
    alone = graph.only_reader(last.inputs[0], MatMul) and set(graph.readers[softmax.outputs[0]]) <= {*guard, last}
    if not alone or softmax.outputs[0] in graph.returned or last.inputs[0].type.nbytes < least:
        return None
    leaves: list[Value] = []
    inner: list[Node] = [softmax]
    expr = _spelled_out(graph, softmax.inputs[0], leaves, inner)
    for i, value in enumerate(leaves):
        product = graph.made_by(value, MatMul)
        if product is None or value.type != softmax.outputs[0].type or not graph.only_reader(value, Op):
            continue
        if not _is_plain(product):
            continue
        scores = _as_scores(expr, i)
        if scores is not None:
            return _checked(graph, masks, last, product, scores, leaves, [*inner, *guard, product])
    return None


def _is_plain(product: Node[MatMul]) -> bool:
    """Whether a product is of two tensors, the first as it lies, and has their element type."""
    return not product.op.transpose_a and not product.op.wide and len(product.inputs) == 2


def _guarded(graph: Graph, value: Value) -> tuple[Node[Softmax] | None, list[Node]]:
    """What makes probabilities, and what sets those that are NaN to 0: one map, or two as an exporter writes them."""
    guard: list[Node] = []
    if made := graph.made_by(value, Map):
        asked = graph.made_by(made.inputs[0], Map)
        if made.op == WITHOUT_NAN:
            value, guard = made.inputs[0], [made]
        elif made.op == CHOSEN_WITHOUT_NAN and asked and asked.op == IS_NAN and asked.inputs[0] is made.inputs[1]:
            value, guard = made.inputs[1], [made, asked]
    return graph.made_by(value, Softmax), guard


def _spelled_out(graph: Graph, value: Value, leaves: list[Value], inner: list[Node]) -> Expr:
    """The input of a softmax as an expression over leaves: values that no map of the scores' shape makes."""
    node = graph.made_by(value, Map) if graph.only_reader(value, Op) and len(inner) < MOST_MAPS else None
    if node is not None and len(node.outputs) == 1 and value.type == inner[0].outputs[0].type:
        inner.append(node)
        (expr,) = node.op.parsed
        found = {each: _spelled_out(graph, each, leaves, inner) for each in dict.fromkeys(node.inputs)}
        return substitute(expr, [found[each] for each in node.inputs])
    if value not in leaves:
        leaves.append(value)
    return Arg(leaves.index(value))


@lru_cache(maxsize=4096)
def _as_scores(expr: Expr, index: int) -> _Scores | None:
    """An expression as a multiple of the argument plus terms; None if it is something else."""
    if expr == Arg(index):
        return _Scores(1.0)
    if index not in used_args(expr):
        return _Scores(0.0, (_Term(expr),))
    assert isinstance(expr, Call)
    args = expr.args
    if expr.function in ("add", "sub"):
        one, other = (_as_scores(arg, index) for arg in args)
        if one is None or other is None or len(one.terms) + len(other.terms) > MOST_TERMS:
            return None
        other = other.times(1 if expr.function == "add" else -1)
        return _Scores(one.factor + other.factor, (*one.terms, *other.terms))
    if expr.function in ("mul", "div", "neg"):
        by = Const(-1.0) if expr.function == "neg" else args[1]
        scaled = args[0]
        if expr.function == "mul" and isinstance(scaled, Const):
            scaled, by = by, scaled
        scores = _as_scores(scaled, index)
        if scores is None or not isinstance(by, Const) or not by.value:
            return None
        return scores.times(1 / float(by.value) if expr.function == "div" else float(by.value))
    if expr.function == "where" and index not in used_args(args[0]):
        low, kept = (args[1], args[2]) if isinstance(args[1], Const) else (args[2], args[1])
        scores = _as_scores(kept, index)
        if scores is None or not isinstance(low, Const) or not float(low.value) <= LESS_FAR:
            return None
        hidden = where(args[0], low, 0.0) if low is args[1] else where(args[0], 0.0, low)
        return _Scores(scores.factor, (*scores.terms, _Term(hidden, float(low.value))))
    return None


def _checked(
    graph: Graph,
    masks: _Masks,
    last: Node[MatMul],
    product: Node[MatMul],
    scores: _Scores,
    leaves: Sequence[Value],
    inner: Sequence[Node],
) -> _Attention | None:
    """The attention, if the op can take its tensors."""
    shape = product.outputs[0].shape
    (q, k), v = product.inputs, last.inputs[1]
    if len({value.shape[:-2] for value in (q, k, v)}) > 1:
        return None
    mask: Expr | None = None
    causal, nodes, factor, hidden = False, list(inner), scores.factor, np.zeros(1)
    for term in scores.terms:
        array, is_causal = masks.content(term.expr, leaves, shape[-2:])
        if array is not None and not array.any():
            continue
        if array is not None:
            with np.errstate(over="ignore"):
                hidden = hidden + array
        if is_causal:
            causal = True
        elif not term.is_exact:
            return None
        else:
            mask = term.expr if mask is None else mask + term.expr
    nearest = hidden.max(-1)
    if ((nearest <= LESS_FAR) & (nearest > -np.inf)).any():
        return None  # a query that reads no key, which weighs all alike
    (q, of_q), (k, of_k) = (_without_factor(graph, value, nodes) for value in (q, k))
    factor *= of_q * of_k
    sides = _side(graph, q, False), _side(graph, k, not product.op.transpose_b), _side(graph, v, last.op.transpose_b)
    if not np.isfinite(factor) or not factor:
        return None
    return _Attention(last, tuple(nodes), sides, factor, causal, mask, tuple(leaves))


def _side(graph: Graph, value: Value, turned: bool) -> _Side:
    """A value, or what it is transposed from.

    Args:
        turned: its last two axes are depth and positions.
    """
    perm = tuple(range(len(value.shape)))
    while (found := _transposed(graph, value)) is not None:
        value, of_value = found
        perm = tuple(of_value[axis] for axis in perm)
    return _Side(value, (*perm[:-2], perm[-1], perm[-2]) if turned else perm)


def _transposed(graph: Graph, value: Value) -> tuple[Value, tuple[int, ...]] | None:
    """What a value is transposed from, and how; perhaps as one batch of matrices, of all axes but the last two."""
    if node := graph.made_by(value, Transpose):
        return node.inputs[0], node.op.perm
    split = graph.made_by(value, Reshape)
    turn = graph.made_by(split.inputs[0], Transpose) if split else None
    merged = graph.made_by(turn.inputs[0], Reshape) if turn else None
    if turn is None or merged is None or turn.op.perm != (0, 2, 1):
        return None
    (whole,), rank = merged.inputs, len(value.shape)
    if (
        whole.shape != (*value.shape[:-2], value.shape[-1], value.shape[-2])
        or whole.shape[-2:] != merged.outputs[0].shape[1:]
    ):
        return None
    return whole, (*range(rank - 2), rank - 1, rank - 2)


def _without_factor(graph: Graph, value: Value, nodes: list[Node]) -> tuple[Value, float]:
    """The value that a side of the product is a multiple of, or the side itself, and the factor."""
    node = graph.made_by(value, Map)
    if node is None or len(node.inputs) != 1 or not graph.only_reader(value, Op):
        return value, 1.0
    scores = _as_scores(node.op.parsed[0], 0) if node.inputs[0].type == value.type else None
    if scores is None or scores.terms or len(node.outputs) > 1:
        return value, 1.0
    nodes.append(node)
    return node.inputs[0], scores.factor


def _over(expr: Expr, leaves: Sequence[Value]) -> tuple[Expr, list[Value]]:
    """An expression over only those leaves that it uses."""
    used = used_args(expr)
    return substitute(expr, [Arg(used.index(i)) if i in used else Arg(0) for i in range(len(leaves))]), [
        leaves[i] for i in used
    ]


class _Masks:
    """Terms of masks that constants alone determine, each computed once for all layers."""

    def __init__(self, graph: Graph) -> None:
        self._known = Known(graph, KNOWN_BYTES)
        self._found: dict[tuple[Expr, tuple[Value, ...], tuple[int, ...]], tuple[np.ndarray, bool]] = {}

    def content(self, term: Expr, leaves: Sequence[Value], shape: tuple[int, ...]) -> tuple[np.ndarray | None, bool]:
        """A term, None if something else decides it; and whether it is the causal mask of scores of a shape."""
        expr, used = _over(term, leaves)
        if not self._known.decided.issuperset(used):
            return None, False
        key = expr, tuple(used), shape
        if key not in self._found:
            arrays = [self._known.array(value) for value in used] or [np.zeros((), np.float32)]  # of a number, any
            (array,) = computed(Map((str(expr),)), arrays)
            self._found[key] = array, _is_causal(array, shape)
        return self._found[key]


def _is_causal(mask: np.ndarray, shape: Sequence[int]) -> bool:
    """Whether a query i reads keys 0 … i, in all batches and heads: nothing is added to their scores, and much is taken
    from all others.
    """
    if mask.shape[-2:] != tuple(shape):
        return False
    ahead = np.arange(shape[1]) > np.arange(shape[0])[:, None]
    return bool((mask[..., ~ahead] == 0).all() and (mask[..., ahead] <= LESS_FAR).all())


def _fused(b: Builder, found: _Attention, now: Mapping[Value, Value]) -> list[Value]:
    """The attention, with heads behind positions where the queries' heads were brought before them."""
    q, k, v = found.sides
    behind = q.perm == HEADS_AND_POSITIONS
    rank, tensors = len(q.perm), []
    for side in (q, k, v):
        perm = [side.perm[axis] for axis in HEADS_AND_POSITIONS] if behind else side.perm
        x = transpose(b, now.get(side.value, side.value), perm)
        tensors.append(reshape(b, x, (*[1] * (4 - rank), *x.shape)))
    if found.mask is not None:
        expr, leaves = _over(found.mask, found.leaves)
        mask = elementwise(b, expr, *(now.get(leaf, leaf) for leaf in leaves), dtype=q.value.dtype)
        tensors.append(reshape(b, mask, (*[1] * (4 - len(mask.shape)), *mask.shape)))
    o, _ = b.node(Attention(found.scale, found.causal, behind), *tensors, name=f"{found.inner[0].name}/attention")
    o = transpose(b, o, HEADS_AND_POSITIONS) if behind else o
    return [reshape(b, o, found.last.outputs[0].shape)]
