"""What op tests share: run one kernel under hard conditions, evaluate a graph node by node, check a vjp by differences.

Kernels are run the way a planned step runs them: outputs and workspace hold garbage, the workspace has exactly the
bytes that were asked for between guard bytes, inputs are read-only, every declared overwrite and every accepted stride
pattern is tried.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, Fill, Graph, GraphBuilder, Kind, Node, Op, TensorType, Value, as_dtype
from foreplan.graph.init import generator_for
from foreplan.graph.op import op_text
from foreplan.graph.registry import parse_op
from foreplan.graph.types import tensor_type
from foreplan.ops.map import elementwise
from tests.profile import pick

GUARD = 64  # bytes on either side of outputs and workspace, whose content must survive


def type_of(array: np.ndarray) -> TensorType:
    """The tensor type of an array."""
    return TensorType(as_dtype(array.dtype), array.shape)


class _Memory:
    """Bytes at a 64-byte boundary, filled with one byte, with guards on both sides."""

    def __init__(self, nbytes: int, fill: int) -> None:
        raw = np.full(nbytes + 2 * GUARD + 64, 0xA5, np.uint8)
        start = (-raw.ctypes.data) % 64 + GUARD
        self.raw, self.start, self.nbytes = raw, start, nbytes
        self.bytes = raw[start : start + nbytes]
        self.bytes[...] = fill

    def array(self, type: TensorType) -> np.ndarray:
        return self.bytes[: type.nbytes].view(type.dtype.numpy).reshape(type.shape)

    def check(self, what: str, op: Op) -> None:
        guards = self.raw[: self.start].tobytes() + self.raw[self.start + self.nbytes :].tobytes()
        assert guards.count(0xA5) == len(guards), f"{what} of {op}: wrote outside its bytes"


def _run(op: Op, inputs: Sequence[np.ndarray], fill: int, pairs: Sequence[tuple[int, int]] = ()) -> list[np.ndarray]:
    """One call of the kernel; `pairs` (output, input) share their bytes."""
    if _is_composite(op):
        return decomposed(op, *inputs, hard=False)
    types = [type_of(x) for x in inputs]
    out_types = op.infer(types)
    taken = dict(pairs)
    arrays: list[np.ndarray] = []
    memories: dict[int, _Memory] = {}
    for i, x in enumerate(inputs):
        if i in taken.values():
            memories[i] = _Memory(types[i].nbytes, fill)
            array = memories[i].array(types[i])
            array[...] = x
        else:
            array = x.view()
            array.flags.writeable = False
        arrays.append(array)
    own = {o: _Memory(type.nbytes, fill) for o, type in enumerate(out_types) if o not in taken}
    outputs = [(memories[taken[o]] if o in taken else own[o]).array(type) for o, type in enumerate(out_types)]
    workspace = _Memory(op.workspace(types, out_types), fill)
    before = [x.tobytes() for x in inputs]
    with np.errstate(all="ignore"):
        op.compute(arrays, outputs, workspace.bytes)
    workspace.check("workspace", op)
    for memory in (*own.values(), *memories.values()):
        memory.check("an output", op)
    assert [x.tobytes() for x in inputs] == before, f"{op}: changed an input"
    return outputs


def _is_composite(op: Op) -> bool:
    return type(op).compute is Op.compute


def _same_bits(op: Op, got: Sequence[np.ndarray], expected: Sequence[np.ndarray], what: str) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert a.tobytes() == b.tobytes(), f"{op}: output {i} differs {what}"


def _strided_windows(x: np.ndarray) -> Iterator[np.ndarray]:
    """Places for the same content in other layouts: axes in other orders, gaps between rows and elements, walked
    backward. One that cannot be written has it.
    """
    zeros = np.zeros(x.shape, x.dtype)
    if x.ndim >= 2:
        for one, other in ((-1, -2), (0, -1), (0, 1)):
            yield np.zeros(x.swapaxes(one, other).shape, x.dtype).swapaxes(one, other)
    for axis in range(x.ndim):
        before = (slice(None),) * axis
        wide = np.zeros([extent + 3 * (i == axis) for i, extent in enumerate(x.shape)], x.dtype)
        yield wide[(*before, slice(1, 1 + x.shape[axis]))]
        gaps = np.zeros([extent * (1 + (i == axis)) for i, extent in enumerate(x.shape)], x.dtype)
        yield gaps[(*before, slice(None, None, 2))]
        yield np.flip(zeros, axis)
        if x.shape[axis] > 1 and (x == x.take([0], axis)).all():
            yield np.broadcast_to(x.take([0], axis), x.shape)


def decomposed(op: Op, *arrays: np.ndarray, hard: bool = True) -> list[np.ndarray]:
    """The outputs of one op by its decomposition."""
    graph = _decomposition(op, tuple(map(type_of, arrays)))
    found = evaluate(graph, {f"x{i}": x for i, x in enumerate(arrays)}, hard=hard)
    return [found[value] for value in graph.outputs.values()]


@lru_cache(maxsize=16)  # differences evaluate one again and again
def _decomposition(op: Op, types: tuple[TensorType, ...]) -> Graph:
    b = GraphBuilder()
    values = [b.input(f"x{i}", type) for i, type in enumerate(types)]
    made = op.decompose(b, values)
    assert made is not None
    assert [value.type for value in made] == list(op.infer([value.type for value in values]))
    return b.finish({f"y{i}": value for i, value in enumerate(made)})


def built(build: Callable[..., Value | Sequence[Value]], *arrays: np.ndarray) -> list[np.ndarray]:
    """What a graph gives that is built of inputs with this content.

    Args:
        build: from (builder, a value an array) to one value or several.
    """
    b = GraphBuilder()
    made = build(b, *(b.input(f"x{i}", type_of(x)) for i, x in enumerate(arrays)))
    values = [made] if isinstance(made, Value) else list(made)
    graph = b.finish({f"y{i}": value for i, value in enumerate(values)})
    found = evaluate(graph, {f"x{i}": x for i, x in enumerate(arrays)})
    return [found[value] for value in values]


def refused(told: str, op: Op, *types: str) -> None:
    """Assert that an op takes no inputs of these types, and what it says."""
    with pytest.raises(ShapeError, match=told):
        op.infer([tensor_type(text) for text in types])


def run_op(op: Op, *arrays: np.ndarray, hard: bool = True) -> list[np.ndarray]:
    """The outputs of one op, after checking that its declaration holds; of a composite one by its decomposition; by one
    plain call if not `hard`.

    Its text form reads back; it writes every output byte whatever was there and whatever the workspace held; it
    writes nothing else; each legal overwrite, and all together, give the same bits; accepted strides give the same
    result up to rounding (exactly for integers).
    """
    inputs = [np.asarray(x, order="C") for x in arrays]
    if not hard:
        return _run(op, inputs, 0xFF)
    types = [type_of(x) for x in inputs]
    assert parse_op(op_text(op)) == op
    if _is_composite(op):
        return decomposed(op, *inputs)
    out_types = op.infer(types)
    cost = op.cost(types, out_types)
    assert isinstance(cost.flops, int) and isinstance(cost.nbytes, int) and min(cost.flops, cost.nbytes) >= 0
    assert isinstance(op.workspace(types, out_types), int)
    expected = _run(op, inputs, 0xFF)
    _same_bits(op, _run(op, inputs, 0x00), expected, "with what memory held before")
    together: dict[int, int] = {}
    for output, read in op.overwrites(types, out_types):
        assert out_types[output].nbytes <= types[read].nbytes, f"{op}: output {output} is larger than input {read}"
        _same_bits(op, _run(op, inputs, 0xFF, [(output, read)]), expected, f"when it takes the bytes of input {read}")
        if output not in together and read not in together.values():
            together[output] = read
    if len(together) > 1:
        _same_bits(op, _run(op, inputs, 0xFF, list(together.items())), expected, f"when all of {together} overlap")
    for i, x in enumerate(inputs):
        for window in _strided_windows(x) if x.size else ():
            if window.strides == x.strides or not op.accepts_strides(i, types[i], window.strides):
                continue
            if window.flags.writeable:
                window[...] = x
            for got, wanted in zip(_run(op, [*inputs[:i], window, *inputs[i + 1 :]], 0xFF), expected, strict=True):
                if got.tobytes() == wanted.tobytes():
                    continue
                where = f"{op}: input {i} with strides {window.strides}"
                if (dtype := as_dtype(wanted.dtype)).is_float:
                    got, wanted = (x.astype(np.float64) if dtype.is_narrow else x for x in (got, wanted))
                    scale = np.abs(wanted[np.isfinite(wanted)]).max(initial=1.0)
                    # Narrow results are rounded once, from float32 sums: at most to a neighbour of the other one.
                    tolerance = (1 if dtype.is_narrow else 64) * float(ml_dtypes.finfo(dtype.numpy).eps)
                    np.testing.assert_allclose(got, wanted, tolerance, tolerance * scale, err_msg=where)
                else:
                    np.testing.assert_array_equal(got, wanted, err_msg=where)
    return expected


def allocated_bytes(op: Op, *arrays: np.ndarray) -> int:
    """The most bytes that Python and NumPy held at once, over what they held before, while the kernel ran."""
    types = [type_of(x) for x in arrays]
    out_types = op.infer(types)
    outputs = [_Memory(type.nbytes, 0).array(type) for type in out_types]
    workspace = _Memory(op.workspace(types, out_types), 0)
    op.compute(arrays, outputs, workspace.bytes)  # what is cached on first use is not counted
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        op.compute(arrays, outputs, workspace.bytes)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def evaluate(
    graph: Graph, inputs: Mapping[str, np.ndarray], stored: Mapping[str, np.ndarray] | None = None, *, hard: bool = True
) -> dict[Value, np.ndarray]:
    """Every value of a graph, each node run by `run_op` (by one plain call if not `hard`).

    Stored values that are not given are filled by their initialisers.
    """
    found: dict[Value, np.ndarray] = {}
    for value in (*graph.inputs, *graph.stored):
        given = inputs if value.kind is Kind.INPUT else stored or {}
        if value.name in given:
            array = np.asarray(given[value.name])
            assert type_of(array) == value.type, f"{value!r} was given {type_of(array)}"
        else:
            assert value.init is not None, f"{value!r} was not given"
            array = np.empty(value.shape, value.dtype.numpy)
            value.init.fill(array, generator_for(0, value.name))
        found[value] = array
    for node in graph.nodes:
        arrays = [found[value] for value in node.inputs]
        found.update(zip(node.outputs, run_op(node.op, *arrays, hard=hard), strict=True))
        if hard and node.op.is_view:
            _check_view(node, np.asarray(arrays[0], order="C"), found[node.outputs[0]])
    return found


def _check_view(node: Node, x: np.ndarray, y: np.ndarray) -> None:
    view = node.op.view(type_of(x), x.strides)
    assert view is not None, f"{node.op} has no view of a dense input"
    if y.size:
        raw = x.reshape(-1).view(np.uint8)
        window = np.ndarray(y.shape, y.dtype, raw, view.offset, view.strides)
        assert window.tobytes() == y.tobytes(), node


def pull_back(
    b: Builder, nodes: Sequence[Node], cotangents: Mapping[Value, Value], wrt: Sequence[Value]
) -> list[Value | None]:
    """Append the reverse pass over `nodes` and return the cotangent of each value of `wrt` (None: none flows)."""
    wanted = set(wrt)
    for node in nodes:
        if any(value in wanted for value in node.inputs):
            wanted.update(value for value in node.outputs if value.dtype.is_float)
    b.kind, b.wanted = Kind.GRADIENT, wanted
    flows = dict(cotangents)
    for node in reversed(nodes):
        incoming = [flows.get(value) for value in node.outputs]
        if not any(value in wanted for value in node.outputs) or all(flow is None for flow in incoming):
            continue
        outgoing = node.op.vjp(b, node.inputs, node.outputs, incoming)
        assert len(outgoing) == len(node.inputs), f"{node.op}: {len(outgoing)} cotangents of {len(node.inputs)} inputs"
        for value, flow in zip(node.inputs, outgoing):
            if flow is None:
                continue
            assert flow.type == value.type, f"{node.op}: the cotangent of {value!r} is {flow!r}"
            flows[value] = elementwise(b, lambda x, y: x + y, flows[value], flow) if value in flows else flow
    return [flows.get(value) for value in wrt]


def check_vjp(
    build: Callable[..., Value | Sequence[Value]],
    *arrays: np.ndarray,
    wrt: Sequence[int] | None = None,
    tol: float = 1e-6,
    step: float = 1e-5,
    seed: int = 0,
    samples: int = pick(12, 24, 64),
) -> list[np.ndarray]:
    """Compare the gradients that the ops' vjps give with central differences, in float64.

    Args:
        build: from (builder, a value an array) to one value or several; float outputs get random cotangents.
        arrays: inputs; floating-point ones are converted to float64.
        wrt: indices of the inputs to differentiate by, all floating-point ones by default; each is asked for alone too.
        tol: allowed error, relative to the largest gradient element of the input.
        step: of the differences.
        seed: of the cotangents and of the choice of elements where there are many.
        samples: elements of each input that are tried at most.

    Returns:
        The gradients, one an index of `wrt`.
    """
    arrays = tuple(x.astype(np.float64) if np.asarray(x).dtype.kind == "f" else np.asarray(x) for x in arrays)
    wrt = [i for i, x in enumerate(arrays) if x.dtype.kind == "f"] if wrt is None else list(wrt)
    rng = np.random.default_rng(seed)

    def start() -> tuple[Builder, list[Value], list[Value]]:
        b = GraphBuilder("check")
        values = [b.input(f"x{i}", type_of(np.asarray(x))) for i, x in enumerate(arrays)]
        made = build(b, *values)
        outputs = [made] if isinstance(made, Value) else list(made)
        return b, values, [value for value in outputs if value.dtype.is_float]

    def feed(at: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        return {f"x{i}": x for i, x in enumerate(at)}

    b, _, outputs = start()
    forward = b.finish({f"y{i}": value for i, value in enumerate(outputs)})
    evaluate(forward, feed(arrays))
    weights = [rng.standard_normal(value.shape) for value in outputs]

    def gradients(indices: Sequence[int], hard: bool) -> list[np.ndarray]:
        b, values, outputs = start()
        nodes = list(b.nodes)
        cots = {value: b.input(f"cotangent{i}", value.type) for i, value in enumerate(outputs)}
        found = pull_back(b, nodes, cots, [values[i] for i in indices])
        b.kind = Kind.ACTIVATION
        results = {f"g{n}": value for n, value in enumerate(found) if value is not None}
        graph = b.finish(results)
        read = {value for node in graph.nodes for value in node.inputs} | set(results.values())
        for node in graph.nodes[len(nodes) :]:
            assert not read.isdisjoint(node.outputs), f"{node.op} is built for inputs {indices}, and nobody reads it"
        inputs = feed(arrays) | {cots[value].name: weight for value, weight in zip(outputs, weights)}
        at = evaluate(graph, inputs, hard=hard)
        return [np.zeros(arrays[i].shape) if v is None else at[v] for i, v in zip(indices, found)]

    def objective(at: Sequence[np.ndarray]) -> float:
        found = evaluate(forward, feed(at), hard=False)
        return float(sum((weight * found[value]).sum() for weight, value in zip(weights, outputs)))

    found = gradients(wrt, hard=True)
    for n, i in enumerate(wrt):
        if len(wrt) > 1:
            np.testing.assert_allclose(
                gradients([i], hard=False)[0], found[n], 1e-10, 1e-12, err_msg=f"input {i} asked for alone"
            )
        size = arrays[i].size
        chosen = range(size) if size <= samples else rng.choice(size, samples, replace=False)
        scale = max(1.0, float(np.abs(found[n]).max(initial=0.0)))
        for flat in chosen:
            sides = []
            for sign in (1, -1):
                moved = arrays[i].copy()
                moved.reshape(-1)[flat] += sign * step
                sides.append(objective([*arrays[:i], moved, *arrays[i + 1 :]]))
            difference = (sides[0] - sides[1]) / (2 * step)
            got = float(found[n].reshape(-1)[flat])
            where = np.unravel_index(flat, arrays[i].shape)
            assert abs(difference - got) <= tol * scale, f"input {i} at {where}: vjp {got}, differences {difference}"
    return found


def constant(b: Builder, name: str, value: float, shape: tuple[int, ...] = (), dtype: str = "float64") -> Value:
    """A stored constant with one number everywhere."""
    return b.store(name, TensorType(as_dtype(dtype), shape), Kind.CONSTANT, Fill(value))
