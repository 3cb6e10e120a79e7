"""What an op says of itself and passes build on: that it moves elements, what its narrow form is, that it keeps the
precision of what it reads or can leave a sum wide, and which inputs get a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.graph import DType, GraphBuilder, Op
from foreplan.graph.types import DTYPES, FLOAT32, types_of
from tests.ops.check import evaluate, type_of
from tests.sweep.bounds import Expected, complaint, expectation, unit
from tests.sweep.case import Case
from tests.sweep.draws import STRANGE
from tests.sweep.judges.gradient import FIRST_ONLY
from tests.sweep.judges.numpy import outputs
from tests.sweep.table import ENTRIES

Arrays = Sequence[np.ndarray]


def judge(case: Case) -> int:
    """Raise AssertionError where the op is something else than it says."""
    inputs = tuple(replace(x, values="normal") if x.values in STRANGE else x for x in case.inputs)
    op, arrays = case.op, replace(case, inputs=inputs).arrays()
    if op.wide_form == op:  # what it says is of its other form
        op, arrays = replace(op, wide=False), arrays[: op.accumulates or None]  # type: ignore[call-arg]
    narrow = DTYPES[("bfloat16", "float16")[case.number % 2]]
    if op.moves:
        _judge_moves(op, arrays)
    if op.keeps_precision:
        made = op.infer(types_of(*_as(arrays, [narrow] * len(arrays))))
        assert all(y.dtype == narrow for y in made if y.dtype.is_float), f"{op} makes {made} of {narrow}"
        _judge_rounded(op, arrays, [narrow] * len(arrays))
    assert op.narrow or not op.wide_at_end, f"{op} has no narrow form"
    if op.narrow:
        assert not op.keeps_precision, f"{op} has a narrow form, and the precision of what it reads"
        types, base = types_of(*arrays), op.accumulates
        first = types[: op.narrow]
        assert len(first) == op.narrow and all(x.dtype.is_float for x in first), f"{op} has no such narrow inputs"
        count = op.narrow + (0 < base < len(types) and types[base] == op.infer(types)[0])
        _judge_rounded(op, arrays, [narrow if i < count else FLOAT32 for i in range(len(arrays))])
    if op.wide_form is not None:
        _judge_wide(op, arrays[: op.accumulates or None], narrow)
    if type(op).vjp is not Op.vjp:
        _judge_reached(op, arrays)
    return 1


def _as(arrays: Arrays, dtypes: Sequence[DType]) -> list[np.ndarray]:
    """Floats in other types."""
    return [x.astype(d.numpy) if type_of(x).dtype.is_float else x for x, d in zip(arrays, dtypes, strict=True)]


def _judge_moves(op: Op, arrays: Arrays) -> None:
    """Other elements in the places of the inputs' stand in the places of the outputs' that these made."""
    types = types_of(*arrays)
    if any(y.dtype not in [x.dtype for x in types] for y in op.infer(types)):  # the same bytes, read as others
        assert [y.tobytes() for y in outputs(op, arrays)] == [x.tobytes() for x in arrays], f"{op} changes bytes"
        return
    chooses = [op.valid_range(i, types) is not None for i in range(len(arrays))]
    sizes = [0 if chosen else x.size for chosen, x in zip(chooses, arrays)]
    ends, rng = np.cumsum([0, *sizes]), np.random.default_rng(sum(sizes))
    places = np.arange(ends[-1])

    def made(elements: np.ndarray) -> list[np.ndarray]:
        own = np.split(elements, ends[1:-1])
        return outputs(op, [x if chosen else y.reshape(x.shape) for x, y, chosen in zip(arrays, own, chooses)])

    others = rng.permutation(places) * 0.5 + 0.25
    for at, y in zip(made(places.astype(np.float64)), made(others), strict=True):
        assert np.isin(at, places).all(), f"{op} gives what is no element of an input"
        assert (y == others[at.astype(int)]).all(), f"{op} chooses elements by what they are"


def _judge_rounded(op: Op, arrays: Arrays, dtypes: Sequence[DType]) -> None:
    """Results of narrow inputs are those of the same numbers in float32, rounded once."""
    given = _as(arrays, dtypes)
    for i, (y, each) in enumerate(zip(outputs(op, given), _in_float32(op, given), strict=True)):
        wrong = complaint(y, _rounded(each, type_of(y).dtype))
        assert wrong is None, f"output {i} of {op} of {', '.join(map(str, types_of(*given)))}: {wrong}"


def _judge_wide(op: Op, arrays: Arrays, narrow: DType) -> None:
    """The sum is left as wide as it was taken in; nothing else is."""
    given = _as(arrays, [narrow] * len(arrays))
    types, wide = types_of(*given), op.wide_form
    assert wide is not None and wide.wide_sum(types) is None
    index = op.wide_sum(types)
    changed = [i for i, (y, other) in enumerate(zip(op.infer(types), wide.infer(types), strict=True)) if y != other]
    assert changed == ([] if index is None else [index]), f"{wide} has other outputs {changed} than {op}, not {index}"
    wanted = _in_float32(wide, given)
    for i, (y, each) in enumerate(zip(outputs(wide, given), wanted, strict=True)):
        assert i != index or type_of(y).dtype == FLOAT32, f"the sum of {wide} is {type_of(y)}"
        wrong = complaint(y, each if i == index else _rounded(each, type_of(y).dtype))
        assert wrong is None, f"output {i} of {wide}: {wrong}"
    _judge_rounded(op, arrays, [narrow] * len(arrays))


def _in_float32(op: Op, arrays: Arrays) -> list[Expected]:
    """What the op gives for the same numbers in float32."""
    entry, given = ENTRIES[op.name], _as(arrays, [FLOAT32] * len(arrays))
    return expectation(op, entry.oracle, entry.rule, given, "numpy")


def _rounded(each: Expected, dtype: DType) -> Expected:
    """What is expected of a result that is rounded to a type once."""
    if not dtype.is_narrow:
        return each
    with np.errstate(all="ignore"):
        reach = np.abs(each.values) + each.allowed
        step = unit(dtype) * reach + float(np.finfo(np.float32).tiny if dtype.name == "bfloat16" else 2.0**-25)
        open = each.open | (reach >= 65504.0 * (1 - unit(dtype)) if dtype.name == "float16" else False)
    return replace(each, type=each.type.with_dtype(dtype), allowed=each.allowed + step, open=open)


def _judge_reached(op: Op, arrays: Arrays) -> None:
    """The derivative gives gradients of the inputs that it is said to give them of, and of no others."""
    b = GraphBuilder()
    inputs = [b.input(f"x{i}", type_of(x)) for i, x in enumerate(arrays)]
    made = b.node(op, *inputs)
    said = {value.name for value in op.reached(inputs)}
    counted = made[:1] if op.name in FIRST_ONLY else made
    cotangents = [b.input(f"g{i}", y.type) if y in counted and y.dtype.is_float else None for i, y in enumerate(made)]
    if not any(cotangents):
        return
    try:
        flows = op.vjp(b, inputs, made, cotangents)
    except UnsupportedError:
        return
    found = {x.name: flow for x, flow in zip(inputs, flows, strict=True) if flow is not None}
    assert said <= found.keys(), f"{op} gives no gradient of {sorted(said - found.keys())}"
    rest = {name: flow for name, flow in found.items() if name not in said}
    if rest:
        graph = b.finish(rest)
        given = {x.name: array for x, array in zip(inputs, arrays)}
        rng = np.random.default_rng(0)
        given |= {g.name: rng.standard_normal(g.shape).astype(g.dtype.numpy) for g in cotangents if g is not None}
        values = evaluate(graph, given, hard=False)
        wrong = [name for name, flow in rest.items() if np.nan_to_num(values[flow], posinf=0.0, neginf=0.0).any()]
        assert not wrong, f"{op} gives gradients of {wrong}, too"
