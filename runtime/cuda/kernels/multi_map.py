"""One map of many small tensors in one launch."""

from __future__ import annotations

from itertools import accumulate

from foreplan.base.units import ceil_div
from foreplan.graph import Op, Window
from foreplan.graph.op import Windows
from foreplan.ops.multi_map import MultiMap
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.kernels.expressions import statements
from foreplan.runtime.cuda.kernels.map import function
from foreplan.runtime.cuda.launch import LaunchKernel, Word, input_at, launch, output_at, stored
from foreplan.runtime.kernel import Refused, pairs_alike

THREADS = 128
MOST_BYTES = 4096  # of a kernel's arguments
LEAST_COMPUTE = 70  # compute capability 7.0: arguments stay where they are, and are indexed there


def multi_map(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, some blocks a tensor."""
    assert isinstance(op, MultiMap)
    results, shared = len(op.exprs), len(inputs) - op.own * op.count
    sizes = [op.results(outputs, t)[0].type.size for t in range(op.count)]
    blocks = list(accumulate(ceil_div(size, THREADS) for size in sizes))
    words: list[Word] = [*blocks, *sizes]
    words += [input_at(i) for i in range(op.own * op.count)]
    words += [output_at(i) for i in range(results * op.count)]
    words += [input_at(op.own * op.count + i) for i in range(shared)] or [0]
    if not blocks[-1] or 8 * len(words) > MOST_BYTES or device.compute < LEAST_COMPUTE:
        raise Refused(f"maps of {op.count} tensors at once")
    defines = (("TENSORS", op.count), ("OWN", op.own), ("RESULTS", results), ("SCALARS", shared))
    text = _compute(op, op.each(inputs)[0], op.results(outputs, 0))
    overwrites = tuple(
        (t * results + o, t * op.own + i)
        for t, given in enumerate(op.each(inputs))
        for o, i in pairs_alike(given[: op.own], op.results(outputs, t))
    )
    only = launch("multi_map.cu", "multi_map", blocks[-1], words, defines, threads=THREADS, generated=text)
    return LaunchKernel((only,), overwrites=overwrites)


def reads(op: Op, index: int, window: Window) -> Window:
    """In C order."""
    return Window.dense(window.type)


def _compute(op: MultiMap, inputs: Windows, outputs: Windows) -> str:
    """The function that computes one element."""
    places = [f"a.own[t][{k}], i" if k < op.own else f"a.scalars[{k - op.own}], 0" for k in range(len(inputs))]
    types = [stored(x.type.dtype) for x in inputs]
    given = [f"const auto a{k} = widened(element<{t}>({at}));" for k, (t, at) in enumerate(zip(types, places))]
    names = [f"r{k}" for k in range(len(outputs))]
    body = statements(op.map.parsed, [f"a{k}" for k in range(len(inputs))], [x.type.dtype for x in inputs], names)
    ends = []
    for k, y in enumerate(outputs):
        of = stored(y.type.dtype)
        ends.append(f"element<{of}>(a.results[t][{k}], i) = narrowed<{of}>(r{k});")
    return function("void compute(const Arguments& a, int t, i64 i)", [*given, *body, *ends])
