"""Every kernel for cards that a case has, run on this processor: ours, compiled by g++ with a header that stands in for
CUDA, and cuBLASLt's calls. As the case lies, in C order and with channels last, each legal overwrite; threads forward
and in reverse, memory poisoned and everything around it watched (`tests.gpu.check.run`).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.runtime.cuda.kernels import lt
from foreplan.runtime.cuda.kernels.cudnn_conv import CUDNN
from foreplan.runtime.cuda.launch import LaunchKernel
from foreplan.runtime.cuda.table import FAMILIES, OWN, family_of, kernel_for
from tests.gpu.check import DEVICE, by_cublaslt, run_kernel
from tests.gpu.compiled import compile_launched
from tests.sweep.bounds import Expected, Rule, Smooth, Sums, complaint, expectation
from tests.sweep.case import Case
from tests.sweep.judges.cpu import _in_order, _layouts, _put_bits_in_order, _with_bits_in_order
from tests.sweep.table import ENTRIES, Entry

IMAGES = (4,)  # numbers of axes of images whose masks are in the order of channels last


def serves(entry: Entry, name: str) -> bool:
    """Whether the engine has kernels for an op."""
    return name in FAMILIES


def require() -> None:
    """Skip where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("kernels are run on the CPU through g++: install it")


Lying = tuple[Sequence[Window], Sequence[Window], str, LaunchKernel]  # how inputs and outputs lie, and a kernel by name


def compile_kernels(chosen: Iterable[Lying]) -> None:
    """Compile many kernels, which takes a fraction of what it takes one by one."""
    compile_launched(each for *_, kernel in chosen for each in kernel.instructions)


def judge(case: Case, chosen: Iterable[Lying]) -> int:
    """Raise AssertionError where a kernel's result is further off than it may be; give how many kernels there are."""
    arrays = case.arrays()
    given = list(_with_bits_in_order(case, arrays, IMAGES))
    if case.op.name == "masked_batch_norm_grad":
        given[4] = _in_order(arrays[4], case.types[0].shape, IMAGES)
    wanted: dict[Rule, list[Expected]] = {}
    count = 0
    for reads, writes, name, kernel in chosen:
        entry = ENTRIES[case.op.name]
        rule = entry.rule
        if name != OWN and isinstance(rule, Smooth):
            rule = replace(rule, narrow=True)
        if isinstance(rule, Sums):
            by_cudnn, added_to = (
                name.startswith(CUDNN),
                name.startswith(lt.CUBLASLT) and len(arrays) > case.op.accumulates > 0,
            )
            rule = replace(rule, rounded=by_cudnn or added_to, flushed=by_cudnn)
        if rule not in wanted:
            wanted[rule] = expectation(case.op, entry.oracle, rule, arrays, "cuda")
            _put_bits_in_order(case, wanted[rule], IMAGES)
        for over in (None, *kernel.overwrites):
            behind = _behind(case, kernel, reads) if over is None else ()
            with np.errstate(all="ignore"):
                found = run_kernel(kernel, reads, writes, given, over, behind)
            for i, (y, each) in enumerate(zip(found, wanted[rule], strict=True)):
                wrong = complaint(y, each)
                assert wrong is None, f"output {i} by {name}, {reads}, {over}: {wrong}"
        count += 1
    return count


def _behind(case: Case, kernel: LaunchKernel, reads: Sequence[Window]) -> list[int]:
    """By how many elements inputs begin behind an aligned address, each by its own, as far as the kernel allows it."""
    drawn = [(case.number >> 2 * i) % 4 for i in range(len(reads))]
    return [n if n * x.type.dtype.itemsize % kernel.alignment == 0 else 0 for n, x in zip(drawn, reads)]


def lying(case: Case) -> Iterator[tuple[list[Window], list[Window]]]:
    """Ways in which inputs, as they are read, and outputs lie."""
    results, family = case.op.infer(case.types), family_of(case.op)
    assert family is not None
    for windows in _layouts(case):
        reads = [family.reads(case.op, i, window) for i, window in enumerate(windows)]
        yield reads, list(family.layout(case.op, reads, results))


def kernels(case: Case) -> Iterator[Lying]:
    """All kernels but cuDNN's."""
    for reads, writes in lying(case):
        own = kernel_for(case.op, reads, writes, DEVICE)
        own_too = {} if own is None else {OWN: own}
        for name, kernel in (own_too | by_cublaslt(case.op, reads, writes)).items():
            yield reads, writes, name, kernel
