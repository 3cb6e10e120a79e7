"""Instructions of cards' kernels run on the CPU, on NumPy memory."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import numpy as np

from foreplan.graph import Op, TensorType
from foreplan.graph.types import as_dtype
from foreplan.ops.attention.blocks import AttentionOp
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda.launch import (
    Address,
    Clear,
    Copy,
    Execute,
    Instruction,
    Launch,
    LaunchKernel,
    Matrix,
    Multiply,
)
from foreplan.runtime.cuda.libraries.cudnn import ADDING, UIDS
from tests.gpu.compiled import function
from tests.gpu.cudnn_graph import execute, memory_at


class Bound:
    """A kernel's instructions on NumPy memory."""

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
        self.op = op
        arrays = {"input": list(inputs), "output": list(outputs), "workspace": [workspace]}
        self.keep = arrays
        self.starts = {of: [array.ctypes.data for array in found] for of, found in arrays.items()}
        self.reverse = reverse
        self.ready = [self._ready(instruction) for instruction in kernel.instructions]

    def address(self, place: Address) -> int:
        return self.starts[place.of][place.index] + place.offset

    def _ready(self, instruction: Instruction) -> tuple[object, ...]:
        if isinstance(instruction, Launch):
            run, size = function(instruction.source, instruction.entry)
            words = [self.address(x) if isinstance(x, Address) else x for x in instruction.arguments]
            packed = b"".join(struct.pack("<d" if isinstance(x, float) else "<q", x) for x in words)
            assert size == len(packed), f"{instruction.entry} takes {size} bytes of arguments, and gets {len(packed)}"
            grid, block = ((ctypes.c_uint * 3)(*extents) for extents in (instruction.grid, instruction.block))
            return run, grid, block, packed, instruction.entry
        if isinstance(instruction, Copy):
            return "copy", self.address(instruction.target), self.address(instruction.source), instruction.nbytes
        if isinstance(instruction, Execute):
            return "execute", instruction
        if isinstance(instruction, Multiply):
            places = tuple(map(self.address, instruction.places))
            return "multiply", instruction, places, self.address(instruction.workspace)
        assert isinstance(instruction, Clear)
        return "clear", self.address(instruction.target), instruction.nbytes

    def __call__(self) -> None:
        for what, *rest in self.ready:
            if what == "copy":
                if rest[0] != rest[1]:
                    ctypes.memmove(*rest)
            elif what == "clear":
                ctypes.memset(rest[0], 0, rest[1])
            elif what == "execute":
                self.execute(*rest)
            elif what == "multiply":
                multiply(*rest)
            else:
                grid, block, packed, entry = rest
                assert callable(what)
                failed = what(grid, block, int(self.reverse), packed)
                assert failed is None, f"{entry}: {failed.decode()}"

    def execute(self, plan: Execute) -> None:
        """Attention by what the plan itself says; or a convolution by NumPy, whose result has the inputs' element type
        and lies as the output does; of a plan that adds, it is added to what lies there.
        """
        assert self.op is not None, "nothing stands in for cuDNN here"
        if isinstance(self.op, AttentionOp | PackedAttentionGrad):
            memory = memory_at(plan.blob, {uid: self.address(place) for uid, place in plan.operands})
            execute(plan.blob, memory)
            ctypes.memset(self.address(plan.workspace), 0xFF, plan.nbytes)
            return
        (a, b), y = self.keep["input"][:2], self.keep["output"][0]
        places = dict(plan.operands)
        first, second, last = (self.address(places[uid]) for uid in UIDS)
        assert first == a.ctypes.data
        if second != b.ctypes.data:  # a copy without gaps
            b = np.ndarray(b.shape, b.dtype, (ctypes.c_uint8 * b.nbytes).from_address(second))
        strides = [step // y.itemsize * a.itemsize for step in y.strides]
        span = sum((n - 1) * step for n, step in zip(y.shape, strides)) + a.itemsize
        bytes_there = (ctypes.c_uint8 * span).from_address(last)
        result = np.ndarray(y.shape, a.dtype, bytes_there, 0, strides)
        result[...] = convolved(self.op, a, b, result if ADDING in plan.blob else None)
        ctypes.memset(self.address(plan.workspace), 0xFF, plan.nbytes)


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


def multiply(product: Multiply, places: tuple[int, ...], workspace: int) -> None:
    """What cuBLASLt does, on host memory, with float64 sums; its workspace is left poisoned."""
    assert not product.nbytes or workspace % 256 == 0, "cuBLASLt wants its workspace so aligned"
    ctypes.memset(workspace, 0xFF, product.nbytes)
    for i in range(product.batch):
        a, b, c, d = (
            matrix_at(matrix, place, i) for matrix, place in zip((product.a, product.b, product.c, product.d), places)
        )
        left, right = a.T if product.transpose_a else a, b.T if product.transpose_b else b
        found = left.astype(np.float64) @ right.astype(np.float64)
        if product.adds:
            found += c.astype(np.float64)
        if product.bias is not None:
            assert places[4] % 16 == 0
            found += bias_at(places[4], product).astype(np.float64)[:, None]
        d[...] = found


def bias_at(place: int, product: Multiply) -> np.ndarray:
    """A number for each row of the result."""
    count, dtype = product.d.rows, product.d.dtype.numpy
    return np.ndarray(count, dtype, (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(place))


def matrix_at(matrix: Matrix, place: int, i: int) -> np.ndarray:
    """A matrix of a batch that begins at an address: its elements and nothing else."""
    item = matrix.dtype.itemsize
    assert matrix.leading >= matrix.rows
    span = ((matrix.columns - 1) * matrix.leading + matrix.rows) * item
    memory = (ctypes.c_uint8 * span).from_address(place + i * matrix.stride * item)
    return np.ndarray((matrix.rows, matrix.columns), matrix.dtype.numpy, memory, strides=(item, matrix.leading * item))
