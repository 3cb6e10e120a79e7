"""Counter-based random numbers, and dropout, whose mask consists of such numbers and so is never kept.

Every element is a pure function of (seed, step, stream, its own place). So it has the same bits for any blocks, at
every recomputation, and on any engine. The generator is Philox4x32-10 of Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011). Counter j makes the 32-bit words 4j … 4j+3:

    counter = (j, stream, step mod 2³², step div 2³²)      key = (seed mod 2³², seed div 2³²)

Which words an element reads:

    bernoulli              element e is word e < round(p · 2³²)
    uniform, up to 32 bit  element e is (word e >> 8) · 2⁻²⁴, scaled
    uniform, 64 bit        element e is (v >> 11) · 2⁻⁵³, scaled, with v = word 2e + 2³² · word 2e+1
    normal, up to 32 bit   elements 2i and 2i+1 are r·cos θ and r·sin θ (Box and Muller, 1958), scaled, where
                           r = sqrt(-2 ln(float(word 2i) · 2⁻³² + 2⁻³³)), θ = 2π · float(word 2i+1) · 2⁻³²
    normal, 64 bit         likewise, with the words in pairs as in uniform: r = sqrt(-2 ln((v >> 11) · 2⁻⁵³ + 2⁻⁵⁴))

Arithmetic is in float32 up to 32 bits. Integers and uniform numbers are the same on every engine, normal ones up to the
last bits of its logarithm, sine and cosine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph import Builder, DType, Op, TensorType, Value, View, register
from foreplan.graph.axes import ONE, Axes, Factors, Part
from foreplan.graph.op import Arrays, Cotangents, Training, Types, Values, coerce_dtype
from foreplan.graph.types import BOOL, DTYPES, FLOAT32, Shape
from foreplan.ops.blocks import Piece, carve, carve_bytes, iota
from foreplan.ops.expr import where
from foreplan.ops.map import elementwise
from foreplan.ops.shape import ViewOp

COUNTERS = 4 * 1024  # a block

STATE = TensorType(DTYPES["uint64"], (2,))

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_UINT32, _UINT64 = np.dtype(np.uint32), np.dtype(np.uint64)


def philox_pieces(counters: int) -> list[Piece]:
    """Scratch arrays that `philox4x32` needs."""
    return [((2, counters), _UINT32), ((2, 2, counters), _UINT64)]


def philox4x32(words: np.ndarray, key: tuple[int, int], scratch: Arrays) -> None:
    """Philox4x32-10: replace counters, uint32[n, 4], by the words they make.

    Args:
        words: counters on entry, random words on return.
        key: two 32-bit numbers.
        scratch: arrays of `philox_pieces`, for n counters or more.
    """
    n = len(words)
    c0, c2 = scratch[0][:, :n]
    old, new = scratch[1][:, :, :n]
    np.copyto(c0, words[:, 0])
    np.copyto(c2, words[:, 2])
    # Counter words 1 and 3 are always the low halves of the last products, and are read there.
    np.copyto(old[1], words[:, 1])
    np.copyto(old[0], words[:, 3])
    for turn in range(_ROUNDS):
        k0, k1 = ((k + turn * w) & 0xFFFFFFFF for k, w in zip(key, _WEYL))
        np.multiply(c0, _MULTIPLIERS[0], out=new[0])
        np.multiply(c2, _MULTIPLIERS[1], out=new[1])
        for c, k, product, last in ((c0, k0, new[1], old[1]), (c2, k1, new[0], old[0])):
            np.bitwise_xor(product.view(_UINT32)[1::2], last.view(_UINT32)[::2], out=c)
            np.bitwise_xor(c, np.uint32(k), out=c)
        old, new = new, old
    for i, half in enumerate((c0, old[1].view(_UINT32)[::2], c2, old[0].view(_UINT32)[::2])):
        np.copyto(words[:, i], half)


@register
@dataclass(frozen=True)
class Random(Op):
    """Independent random numbers from the state uint64[2] (seed, step), by the rules at the top of this file.

    Attributes:
        distribution: uniform on [low, high), normal with mean and std, or bernoulli: 1 with probability p.
        shape: of the output.
        dtype: of the output; floating-point for uniform and normal.
        stream: another stream gives other numbers from the same state.
        low: of uniform.
        high: of uniform.
        mean: of normal.
        std: of normal.
        p: of bernoulli.
    """

    name: ClassVar[str] = "random"
    is_random: ClassVar[bool] = True
    distribution: str
    shape: Shape
    dtype: DType = FLOAT32
    stream: int = 0
    low: float = 0.0
    high: float = 1.0
    mean: float = 0.0
    std: float = 1.0
    p: float = 0.5

    def __post_init__(self) -> None:
        coerce_dtype(self, "dtype")
        if self.distribution not in ("uniform", "normal", "bernoulli"):
            raise ValueError(f"distribution must be uniform, normal or bernoulli, and is {self.distribution!r}")
        if self.distribution != "bernoulli" and not self.dtype.is_float:
            raise ValueError(f"{self.distribution} numbers must be floating-point, and are {self.dtype}")
        if not 0 <= self.p <= 1 or not 0 <= self.stream < 1 << 32:
            raise ValueError(f"p must be in [0, 1] and stream in [0, 2**32), and they are {self.p} and {self.stream}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The shape and element type stated."""
        if inputs[0] != STATE:
            raise ShapeError(f"the state of random numbers must be {STATE}, and is {inputs[0]}")
        if self._words_an_element * math.prod(self.shape) > 1 << 34:
            raise ShapeError(f"{list(self.shape)} needs more numbers than a stream has; draw fewer elements")
        return (TensorType(self.dtype, self.shape),)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Each part is drawn by itself."""
        f = Factors()
        return f.axes([(ONE,)], [f.row("a", self.shape)])

    def part(self, part: Part) -> Op:
        """Of the part's shape."""
        return replace(self, shape=part.outputs[0])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The numbers depend on no parameter."""
        return [None]

    @property
    def _words_an_element(self) -> int:
        return 2 if self.distribution != "bernoulli" and self.dtype.itemsize == 8 else 1

    def flops(self, inputs: Types, outputs: Types) -> int:
        """Ten rounds of eight operations a counter, and the operations that turn words into numbers."""
        after = {"uniform": 4, "normal": 8, "bernoulli": 1}[self.distribution]
        return (20 * self._words_an_element + after) * outputs[0].size

    def workspace(self, inputs: Types, outputs: Types) -> int:
        """Counters, words and numbers of one block."""
        return carve_bytes(*self._pieces())

    def _pieces(self) -> list[Piece]:
        counters = min(COUNTERS, -(-math.prod(self.shape) * self._words_an_element // 4))
        count = 4 * counters // self._words_an_element
        real = np.dtype(np.float64 if self.dtype.itemsize == 8 else np.float32)
        numbers: dict[str, Piece] = {
            "uniform": ((count,), real),
            "normal": ((3, count // 2), real),
            "bernoulli": ((count,), BOOL.numpy),
        }
        return [((counters,), _UINT32), ((counters, 4), _UINT32), *philox_pieces(counters), numbers[self.distribution]]

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Block by block: counters, words, numbers."""
        seed, step = (int(x) for x in inputs[0])
        out = outputs[0].reshape(-1)
        first, words, *scratch, numbers = carve(workspace, *self._pieces())
        if not out.size:
            return
        iota(first)
        per_block = words.size // self._words_an_element
        write = {"uniform": self._uniform, "normal": self._normal, "bernoulli": self._bernoulli}[self.distribution]
        for start in range(0, out.size, per_block):
            np.add(first, np.uint32(start // per_block * len(first)), out=words[:, 0])
            words[:, 1] = self.stream
            words[:, 2] = step & 0xFFFFFFFF
            words[:, 3] = step >> 32
            philox4x32(words, (seed & 0xFFFFFFFF, seed >> 32), scratch)
            write(words.reshape(-1), numbers, out[start : start + per_block])

    def _bernoulli(self, words: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> None:
        threshold = round(self.p * 2**32)
        if threshold == 1 << 32:
            numbers.fill(True)
        else:
            np.less(words, np.uint32(threshold), out=numbers)
        np.copyto(out, numbers[: out.size])

    def _uniform(self, words: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> None:
        real = numbers.dtype.type
        integers, bits = _integers(words, numbers.dtype)
        np.right_shift(integers, integers.dtype.type(8 * integers.itemsize - bits), out=integers)
        np.copyto(numbers, integers, casting="unsafe")
        numbers *= real(2.0**-bits)
        if (self.low, self.high) != (0.0, 1.0):
            numbers *= real(self.high) - real(self.low)
            numbers += real(self.low)
            # Rounding may reach `high`, which is not in the interval.
            np.minimum(numbers, np.nextafter(real(self.high), real(self.low)), out=numbers)
        np.copyto(out, numbers[: out.size], casting="unsafe")

    def _normal(self, words: np.ndarray, numbers: np.ndarray, out: np.ndarray) -> None:
        real = numbers.dtype.type
        radius, angle, wave = numbers
        integers, bits = _integers(words, numbers.dtype)
        if bits == 53:
            np.right_shift(integers, np.uint64(11), out=integers)
        else:
            bits = 32
        np.copyto(radius, integers[::2], casting="unsafe")
        radius *= real(2.0**-bits)
        radius += real(2.0 ** -(bits + 1))
        np.log(radius, out=radius)
        radius *= real(-2.0)
        np.sqrt(radius, out=radius)
        np.copyto(angle, integers[1::2], casting="unsafe")
        angle *= real(2.0**-bits)
        angle *= real(2 * math.pi)
        for i, curve in enumerate((np.cos, np.sin)):
            curve(angle, out=wave)
            wave *= radius
            if (self.mean, self.std) != (0.0, 1.0):
                wave *= real(self.std)
                wave += real(self.mean)
            target = out[i::2]
            np.copyto(target, wave[: target.size], casting="unsafe")


def _integers(words: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, int]:
    """The words as the integers of each number, and how many of their upper bits a number holds."""
    return (words.view(_UINT64), 53) if dtype.itemsize == 8 else (words, 24)


@register
@dataclass(frozen=True)
class Dropout(ViewOp):
    """y = x. In training: zero with probability `ratio`, and x / (1 - ratio) otherwise.

    Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (JMLR 2014), with the
    scaling done in training.

    Attributes:
        ratio: probability of a zero.
        whole_items: whether one draw decides about all elements of an item, that is, of an index of the first axis
            (Huang et al., "Deep networks with stochastic depth", ECCV 2016).
    """

    name: ClassVar[str] = "dropout"
    moves: ClassVar[bool] = False  # in training it multiplies
    ratio: float = 0.5
    whole_items: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"ratio must be in [0, 1], and is {self.ratio}")

    def infer(self, inputs: Types) -> tuple[TensorType, ...]:
        """The input's type."""
        if not inputs[0].dtype.is_float:
            raise ShapeError(f"needs floating-point numbers, and got {inputs[0]}")
        return (inputs[0],)

    def indexing(self, inputs: Types, outputs: Types) -> Axes:
        """Element by element: in training it is another op."""
        f = Factors()
        x = f.row("a", inputs[0].shape)
        return f.axes([x], [x])

    def vjp(self, b: Builder, inputs: Values, outputs: Values, cotangents: Cotangents) -> Cotangents:
        """The cotangent itself: the training form is another op."""
        return [cotangents[0]]

    def view(self, input: TensorType, strides: tuple[int, ...]) -> View | None:
        """All of the input."""
        return View(0, strides)

    def compute(self, inputs: Arrays, outputs: Arrays, workspace: np.ndarray) -> None:
        """Copy."""
        np.copyto(outputs[0], inputs[0])

    def for_training(self, b: Builder, inputs: Values, training: Training) -> Values | None:
        """x / (1 - ratio) where a random bit is set, else 0; the bits are drawn again from the state when needed."""
        (x,) = inputs
        if not self.ratio:
            return [x]
        drawn = (*x.shape[:1], *[1] * (len(x.shape) - 1)) if self.whole_items else x.shape
        return [dropped(b, x, self.ratio, training.random_state(), training.next_stream(), drawn)[0]]


def random(
    b: Builder, state: Value, distribution: str, shape: Sequence[int], dtype: DType = FLOAT32, **attributes: float
) -> Value:
    """Random numbers from a state uint64[2]; the attributes are those of `Random`."""
    stream = int(attributes.pop("stream", 0))
    return b.apply(Random(distribution, tuple(shape), dtype, stream, **attributes), state)


def dropped(
    b: Builder, x: Value, ratio: float, state: Value, stream: int, shape: Shape | None = None
) -> tuple[Value, Value]:
    """(x / (1 - ratio) where a random bit is set and 0 elsewhere, the bits), drawn from a state uint64[2].

    The bits have the shape given, which broadcasts to x, or that of x.
    """
    drawn = x.shape if shape is None else shape
    mask = b.apply(Random("bernoulli", drawn, BOOL, stream, p=1 - ratio), state, name="dropout_mask")
    scale = 1 / (1 - ratio) if ratio < 1 else 0.0
    return elementwise(b, lambda x, m: where(m, x * scale, 0.0), x, mask), mask


def dropout(b: Builder, x: Value, ratio: float = 0.5, whole_items: bool = False) -> Value:
    """`x`, of which training drops the given share of the elements, or of the items."""
    return b.apply(Dropout(ratio, whole_items), x) if ratio else x
