"""Measures the rates of runtime/cpu/prices.toml: one thread, each instruction set that this processor has.

    python benchmarks/cpu_rates.py [--only AVX2]

Each set is measured in a process of its own, in which oneDNN and foreplan's own code are held to it
(`ONEDNN_MAX_CPU_ISA`). A rate is the median over some products or convolutions: of the least time of each, what is left
when the predicted time of everything but arithmetic is taken off. Writes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from datetime import date

from foreplan.base import processor
from foreplan.graph import DType, Op, TensorType, Window, as_dtype
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import FLOAT32
from foreplan.ops.conv.ops import Conv, ConvWeightGrad
from foreplan.ops.matmul import MatMul
from foreplan.runtime.cpu import prices, table, tune
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.cpu.machine import this_machine
from foreplan.runtime.cpu.threads import set_threads

SETS = {"SSE41": "SSE41", "AVX": "AVX", "AVX2": "AVX2", "AVX512": "AVX512_CORE", "AVX512_BF16": "AVX512_CORE_BF16"}
SETS |= {"AMX": "DEFAULT"}  # and what oneDNN is told
PRODUCTS = ((512, 768, 768), (512, 3072, 768), (256, 1024, 1024), (1024, 1024, 1024), (3136, 256, 256))
SMALL = ((16, 64, 64), (32, 128, 64), (64, 128, 128), (8, 256, 256))
LARGE = (2048, 2048, 2048)
# Images, input and output channels, extent, taps.
CONVOLUTIONS = (
    (8, 64, 64, 56, 3), (8, 128, 128, 28, 3), (8, 256, 256, 14, 3), (8, 512, 512, 7, 3), (8, 256, 64, 56, 1),
    (8, 512, 128, 28, 1), (8, 256, 1024, 14, 1), (1, 64, 64, 224, 3), (1, 128, 256, 56, 3),
)  # fmt: skip
Case = tuple[Op, list[Window], list[Window]]
FREE = 1e9  # operations a nanosecond: arithmetic takes no time
NARROW = as_dtype("bfloat16")


def product(sizes: Sequence[int], dtype: DType) -> Case:
    rows, columns, depth = sizes
    types = [TensorType(dtype, (rows, depth)), TensorType(dtype, (depth, columns))]
    return MatMul(), list(map(Window.dense, types)), [Window.dense(TensorType(dtype, (rows, columns)))]


def convolution(sizes: Sequence[int], dtype: DType, gradient: bool) -> Case:
    n, inner, outer, extent, taps = sizes
    how = (1, 1), ((taps // 2, taps // 2),) * 2, (1, 1)
    x, w, y = (n, inner, extent, extent), (outer, inner, taps, taps), (n, outer, extent, extent)
    if not gradient:
        inputs = [channels_last(TensorType(dtype, x)), Window.dense(TensorType(dtype, w))]
        return Conv(*how), inputs, [channels_last(TensorType(dtype, y))]
    inputs = [channels_last(TensorType(dtype, shape)) for shape in (x, y)]
    return ConvWeightGrad(*how, kernel=(taps, taps)), inputs, [Window.dense(TensorType(FLOAT32, w))]


def rates_of(name: str, way: str, cases: Sequence[Case]) -> Iterator[tuple[float, float]]:
    """Of each case that such a kernel runs: operations a nanosecond of arithmetic, and of all of it.

    Args:
        name: of the rate, in `Rates`.
        way: of the kernels.
    """
    known = prices.rates()
    for op, inputs, outputs in cases:
        table._make.cache_clear()
        prices.rates = lambda: replace(known, **{name: FREE})  # type: ignore[assignment]
        try:
            kernel = table.kernels_for(op, inputs, outputs, 1).get(way)
        finally:
            prices.rates = lambda: known  # type: ignore[assignment]
        rest = getattr(kernel, "nanoseconds", None)
        if kernel is None or rest is None:
            continue
        operations = op.cost([x.type for x in inputs], [y.type for y in outputs]).flops
        taken = min(tune._seconds(op, kernel, inputs, outputs, 1) for _ in range(3)) * 1e9
        yield operations / max(taken - rest, taken / 2), operations / taken


def measured() -> dict[str, float | str]:
    """The rates of the instruction set that this process is held to."""
    set_threads(1)
    cases = {
        "product": ("onednn", [product(sizes, FLOAT32) for sizes in PRODUCTS]),
        "product_narrow": ("onednn", [product(sizes, NARROW) for sizes in PRODUCTS]),
        "direct": ("onednn", [convolution(sizes, FLOAT32, False) for sizes in CONVOLUTIONS]),
        "direct_narrow": ("onednn", [convolution(sizes, NARROW, False) for sizes in CONVOLUTIONS]),
        "weights": ("onednn", [convolution(sizes, FLOAT32, True) for sizes in CONVOLUTIONS]),
        "weights_narrow": ("onednn", [convolution(sizes, NARROW, True) for sizes in CONVOLUTIONS]),
        "tiles": ("tiles", [product(sizes, FLOAT32) for sizes in PRODUCTS]),
        "panels": ("panels", [product(sizes, FLOAT32) for sizes in PRODUCTS]),
        "vectors": ("vectors", [product(sizes, FLOAT32) for sizes in SMALL]),
    }
    found: dict[str, float | str] = {}
    for name, (way, some) in cases.items():
        rates = [rate for rate, _ in rates_of(name, way, some)]
        found[name] = rounded(statistics.median(rates)) if rates else 0
        print(name, [round(x) for x in rates], file=sys.stderr)
    large = [product(LARGE, FLOAT32)]
    ways = (("product", "onednn"), ("tiles", "tiles"), ("panels", "panels"))
    peak = max(rate for name, way in ways for _, rate in rates_of(name, way, large))
    machine = this_machine()
    told = f"{date.today():%d %B %Y}, oneDNN {machine.onednn} as {machine.instruction_set}, on {machine.model}"
    return {"measured": told, "peak": rounded(peak)} | found


def rounded(rate: float) -> float:
    """Three digits."""
    return float(f"{rate:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=SETS)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        print(json.dumps([processor.family(), level().name, measured()]))
        return
    known = prices.tomllib.loads(prices._FILE.read_text())
    for name in [options.only] if options.only else SETS:
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": SETS[name], "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--worker"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        family, found, rates = json.loads(done.stdout)
        if found == name:
            known.setdefault(family, {})[name] = rates
    lines = [
        "# Operations a nanosecond of one core, for each family of processors and level of instructions: see `Rates`"
    ]
    lines.append("# in prices.py. Written by benchmarks/cpu_rates.py.")
    for family, name in ((family, name) for family in sorted(known) for name in Level.__members__):
        if name in known[family]:
            lines += ["", f'["{family}".{name}]']
            lines += [f"{each.name} = {json.dumps(known[family][name][each.name])}" for each in fields(prices.Rates)]
    prices._FILE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
