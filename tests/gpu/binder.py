"""Instructions of cards' kernels run on the CPU, on NumPy memory."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from foreplan.graph import Op, TensorType
from foreplan.graph.types import as_dtype
from foreplan.ops.attention.blocks import AttentionOp
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda.engine import ready
from foreplan.runtime.cuda.launch import Address, Execute, LaunchKernel
from foreplan.runtime.cuda.libraries.cudnn import ADDING, UIDS
from tests.gpu.card import FakeCard
from tests.gpu.cudnn_graph import execute, memory_at


class Bound:
    """A kernel's instructions on NumPy memory, by a card that is not there."""

    def __init__(
        self,
        kernel: LaunchKernel,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        workspace: np.ndarray,
        reverse: bool = False,
        op: Op | None = None,
    ) -> None:
        """With an op, NumPy runs it, of its first two inputs, in the place of a plan of cuDNN's."""
        self.op, self.card = op, FakeCard(reverse)
        self.keep = {"input": list(inputs), "output": list(outputs), "workspace": [workspace]}
        for each in kernel.instructions:
            if isinstance(each, Execute):
                self.card.plans[each.blob] = each.nbytes, partial(self.execute, each)
        calls = [ready(self.card, each, self.address) for each in kernel.instructions]
        self.calls = [call for call in calls if call is not None]

    def address(self, place: Address) -> int:
        return int(self.keep[place.of][place.index].ctypes.data) + place.offset

    def __call__(self) -> None:
        for call in self.calls:
            call()
        self.card.synchronize()

    def execute(self, plan: Execute, places: Mapping[int, int], workspace: int) -> None:
        """Attention by what the plan itself says; or a convolution by NumPy, whose result has the inputs' element type
        and lies as the output does; of a plan that adds, it is added to what lies there.
        """
        assert self.op is not None, "nothing stands in for cuDNN here"
        if isinstance(self.op, AttentionOp | PackedAttentionGrad):
            execute(plan.blob, memory_at(plan.blob, places))
        else:
            (a, b), y = self.keep["input"][:2], self.keep["output"][0]
            first, second, last = (places[uid] for uid in UIDS)
            assert first == a.ctypes.data
            if second != b.ctypes.data:  # a copy without gaps
                b = np.ndarray(b.shape, b.dtype, (ctypes.c_uint8 * b.nbytes).from_address(second))
            strides = [step // y.itemsize * a.itemsize for step in y.strides]
            span = sum((n - 1) * step for n, step in zip(y.shape, strides)) + a.itemsize
            bytes_there = (ctypes.c_uint8 * span).from_address(last)
            result = np.ndarray(y.shape, a.dtype, bytes_there, 0, strides)
            result[...] = convolved(self.op, a, b, result if ADDING in plan.blob else None)
        ctypes.memset(workspace, 0xFF, plan.nbytes)


def convolved(op: Op, a: np.ndarray, b: np.ndarray, there: np.ndarray | None) -> np.ndarray:
    """What a plan of cuDNN's gives, by the op's NumPy kernel.

    Args:
        there: what lies where the result goes, if the plan adds to it.
    """
    given = [np.ascontiguousarray(x) for x in (a, b, there) if x is not None]
    types = [TensorType(as_dtype(x.dtype), x.shape) for x in given]
    (type,) = op.infer(types)
    found = np.zeros(type.shape, type.dtype.numpy)
    op.compute(given, [found], np.zeros(op.workspace(types, (type,)), np.uint8))
    return found
