"""Random numbers from counters: the same bits as the NumPy kernel's, but for the last ones of normal numbers."""

from __future__ import annotations

import numpy as np

from foreplan.base.units import ceil_div
from foreplan.graph import Op
from foreplan.graph.op import Windows
from foreplan.ops.random import Random
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.launch import LaunchKernel, Word, for_each, input_at, output_at


def random(op: Op, inputs: Windows, outputs: Windows, device: Device) -> LaunchKernel:
    """One launch, a thread a counter."""
    assert isinstance(op, Random)
    (y,) = outputs
    if not y.type.size:
        return LaunchKernel(())
    wide = op.dtype.itemsize == 8 and op.distribution != "bernoulli"
    real = np.float64 if wide else np.float32
    first, second, below = op.mean, op.std, 0.0
    if op.distribution == "uniform":
        low, high = real(op.low), real(op.high)
        first, second, below = float(low), float(high - low), float(np.nextafter(high, low))
    plain = (op.low, op.high) == (0.0, 1.0) if op.distribution == "uniform" else (op.mean, op.std) == (0.0, 1.0)
    defines = (
        ("ELEMENT", op.dtype),
        ("REAL", "double" if wide else "float"),
        ("DISTRIBUTION", op.distribution.upper()),
    )
    words: list[Word] = [y.type.size, op.stream, round(op.p * 2**32), input_at(0), output_at(0)]
    words += [float(first), float(second), below, int(not plain)]
    counters = ceil_div(y.type.size, 2 if wide else 4)
    return LaunchKernel((for_each("random.cu", "random_numbers", counters, words, defines),))
