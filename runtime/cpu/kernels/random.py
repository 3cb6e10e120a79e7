"""`random` as compiled loops: the numbers of `ops.random`, bit for bit, sixteen counters at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import llvmlite.ir as ir
import numpy as np

from foreplan.graph import DType, Op
from foreplan.graph.op import Arrays, Windows
from foreplan.graph.types import BOOL, FLOAT32
from foreplan.jit.builder import FLOAT, I32, I64
from foreplan.ops.random import Random
from foreplan.runtime.cpu.codegen.conversions import convert
from foreplan.runtime.cpu.codegen.lanes import Lanes, shuffled
from foreplan.runtime.cpu.codegen.llvm import compiled_as
from foreplan.runtime.cpu.codegen.loops import CONTIGUOUS, WIDTH, Memory, Operand, Place, Writer
from foreplan.runtime.cpu.kernel import LoopKernel
from foreplan.runtime.cpu.threads import current_threads, ranged
from foreplan.runtime.kernel import Refused, Run

UNIT = 1024  # elements that are one of a loop's parts
PART = 16 * 1024  # elements that are worth a thread
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def random(op: Op, inputs: Windows, outputs: Windows) -> LoopKernel:
    """The loop of random numbers in C order, compiled when it is first bound."""
    assert isinstance(op, Random)
    if op.distribution == "normal" or (op.distribution == "uniform" and op.dtype.itemsize == 8):
        raise Refused(f"{op.distribution} numbers of {op.dtype}")
    if op.distribution == "bernoulli":
        constants = [round(op.p * 2**32)]
    else:
        low, high = np.float32(op.low), np.float32(op.high)
        numbers = (high - low, low, np.nextafter(high, low)) if (low, high) != (0, 1) else (1, 0, 1)
        constants = [int(np.float32(number).view(np.int32)) for number in numbers]
    size = outputs[0].type.size

    def loops(inputs: Arrays, outputs: Arrays, scratch: Arrays) -> Run:
        table = [size, inputs[0].ctypes.data, outputs[0].ctypes.data, op.stream, *constants]
        loop = compiled_numbers(op.distribution, op.dtype)
        return ranged(loop, -(-size // UNIT), PART // UNIT, current_threads(), np.array(table, np.int64).tobytes())

    return LoopKernel(loops)


@cache
def compiled_numbers(distribution: str, dtype: DType) -> Callable[[int, int, bytes], None]:
    """A call of (start, stop, table) for units of `UNIT` elements.

    The table is int64: the number of elements, the addresses of the state and of the output, the stream; then for
    bernoulli the number of words that give 1, for uniform the bits of high - low, low, and the largest below high.
    """
    return compiled_as(("random", distribution, dtype), lambda: _Writer(distribution, dtype).written())


class _Writer(Writer):
    """Writes such a loop."""

    def __init__(self, distribution: str, dtype: DType) -> None:
        super().__init__()
        self.distribution, self.output = distribution, Operand(dtype, CONTIGUOUS)
        b = self.b
        self.size = self.entry(0)
        state = b.pointer(self.entry(1))
        seed, step = (b.load(b.gep(state, [i], source_etype=I64), align=8, typ=I64) for i in range(2))
        self.target = Place(b.pointer(self.entry(2)), None)
        self.key, self.step = self.halves(seed), self.halves(step)
        self.stream = b.trunc(self.entry(3), I32)
        self.constants = [self.entry(4 + i) for i in range(1 if distribution == "bernoulli" else 3)]

    def halves(self, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The lower and the upper 32 bits."""
        return self.b.trunc(x, I32), self.b.trunc(self.b.lshr(x, 32), I32)

    def write(self) -> None:
        """All of it."""
        b = self.b
        low, high = b.mul(self.start, UNIT), b.mul(self.stop, UNIT)
        high = b.least(high, self.size)
        end = b.and_(b.add(high, 4 * WIDTH - 1), -4 * WIDTH)
        with b.counted(low, end, 4 * WIDTH) as at:
            for i, words in enumerate(self.words(b.lshr(at, 2))):
                first = b.add(at, i * WIDTH)
                self.put(words, first, b.sub(high, first))
        b.ret_void()

    def put(self, words: ir.Value, at: ir.Value, left: ir.Value) -> None:
        """Make numbers of these words, and write as many as are left."""
        left = self.b.select(self.b.icmp_signed("<", left, 0), 0, left)
        e = Lanes(self.b, WIDTH)
        number = self.bernoulli(e, words) if self.distribution == "bernoulli" else self.uniform(e, words)
        Memory(e, at, left).write(self.output, self.target, 0, number)

    def bernoulli(self, e: Lanes, words: ir.Value) -> ir.Value:
        """1 where the word is below the threshold."""
        wide = e.b.zext(words, e.type(I64))
        return convert(e, e.b.icmp_signed("<", wide, e.splat(self.constants[0])), BOOL, self.output.dtype)

    def uniform(self, e: Lanes, words: ir.Value) -> ir.Value:
        """24 bits of the word as a fraction of the interval."""
        b = e.b
        x = b.uitofp(b.lshr(words, 8), e.type(FLOAT))
        x = b.fmul(x, 2.0**-24)
        scale, low, most = (e.splat(b.bitcast(b.trunc(number, I32), FLOAT)) for number in self.constants)
        x = b.fadd(b.fmul(x, scale), low)
        return convert(e, b.select(b.fcmp_ordered("<", most, x), most, x), FLOAT32, self.output.dtype)

    def words(self, counter: ir.Value) -> list[ir.Value]:
        """The words of sixteen counters from this one, sixteen words at a time."""
        e, b = Lanes(self.b, WIDTH), self.b
        first = e.splat(b.trunc(counter, I32))
        c0, c2 = b.add(first, e.constant(I32, list(range(WIDTH)))), e.splat(self.step[0])
        c1, c3 = e.splat(self.stream), e.splat(self.step[1])
        for turn in range(_ROUNDS):
            high0, low0 = self.product(e, c0, _MULTIPLIERS[0])
            high1, low1 = self.product(e, c2, _MULTIPLIERS[1])
            k0, k1 = (e.splat(b.add(key, ir.Constant(I32, turn * w & _MASK))) for key, w in zip(self.key, _WEYL))
            c0, c2 = b.xor(b.xor(high1, c1), k0), b.xor(b.xor(high0, c3), k1)
            c1, c3 = low1, low0
        halves = [shuffled(b, pair, list(range(2 * WIDTH))) for pair in ((c0, c1), (c2, c3))]
        order = [k * WIDTH + lane for lane in range(WIDTH) for k in range(4)]
        return [shuffled(b, halves, order[i : i + WIDTH]) for i in range(0, 4 * WIDTH, WIDTH)]

    def product(self, e: Lanes, x: ir.Value, factor: int) -> tuple[ir.Value, ir.Value]:
        """The upper and the lower 32 bits of a product."""
        b = e.b
        whole = b.mul(b.zext(x, e.type(I64)), factor)
        high = b.lshr(whole, 32)
        return b.trunc(high, e.type(I32)), b.trunc(whole, e.type(I32))
