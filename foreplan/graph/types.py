"""Element types and tensor types: what a value is before it has any bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foreplan.base.errors import ShapeError
from foreplan.graph.blocks import Blocks

Shape = tuple[int, ...]
MOST_AXES = 64  # of an array of NumPy, which inputs and outputs are


@dataclass(frozen=True)
class DType:
    """An element type: its name as NumPy or ml_dtypes writes it, bytes an element, and its category.

    The category is `float`, `int`, `uint`, `bool`, or `storage`: elements of such a type are kept and moved, and
    computed with only after `foreplan.ops.storage.decoded`.
    """

    name: str
    itemsize: int
    category: str

    @cached_property
    def numpy(self) -> np.dtype:
        """The NumPy dtype (bfloat16 and storage types come from ml_dtypes, imported on first use)."""
        if self.name == "bfloat16" or self.is_storage:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.name))
        return np.dtype(self.name)

    @property
    def is_float(self) -> bool:
        """Whether gradients can flow through values of this type."""
        return self.category == "float"

    @property
    def is_storage(self) -> bool:
        """Whether elements are only kept and moved: one lies in a byte of its own, in the lowest bits."""
        return self.category == "storage"

    @property
    def wide(self) -> DType:
        """The type in which sums of such elements are taken: float32 for narrower floats, else the type itself."""
        return FLOAT32 if self.is_float and self.itemsize < FLOAT32.itemsize else self

    @property
    def is_narrow(self) -> bool:
        """Whether sums of such elements are taken in a wider type."""
        return self.wide != self

    @cached_property
    def largest(self) -> float:
        """The largest finite number of a float type."""
        if self.name != "bfloat16":
            return float(np.finfo(self.numpy).max)
        import ml_dtypes

        return float(ml_dtypes.finfo(self.numpy).max)

    def overflows(self, array: np.ndarray) -> np.ndarray:
        """Where finite numbers of an array would become infinite in a float type."""
        with np.errstate(all="ignore"):
            return np.isfinite(array) & np.isinf(array.astype(self.numpy))

    def holds(self, number: float) -> bool:
        """Whether a number is one of this type's; floats take any, rounded."""
        if self.is_float:
            return True
        if not math.isfinite(number) or number != int(number):
            return False
        bits = 1 if self.category == "bool" else 8 * self.itemsize
        return -(1 << bits - 1) <= number < 1 << bits - 1 if self.category == "int" else 0 <= number < 1 << bits

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"DType({self.name})"


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("float64", 8, "float"),
        DType("float32", 4, "float"),
        DType("float16", 2, "float"),
        DType("bfloat16", 2, "float"),
        DType("int64", 8, "int"),
        DType("int32", 4, "int"),
        DType("int16", 2, "int"),
        DType("int8", 1, "int"),
        DType("uint64", 8, "uint"),
        DType("uint32", 4, "uint"),
        DType("uint16", 2, "uint"),
        DType("uint8", 1, "uint"),
        DType("bool", 1, "bool"),
        DType("float8_e4m3fn", 1, "storage"),
        DType("float8_e4m3fnuz", 1, "storage"),
        DType("float8_e5m2", 1, "storage"),
        DType("float8_e5m2fnuz", 1, "storage"),
        DType("float8_e8m0fnu", 1, "storage"),
        DType("float4_e2m1fn", 1, "storage"),
        DType("int4", 1, "storage"),
        DType("uint4", 1, "storage"),
        DType("int2", 1, "storage"),
        DType("uint2", 1, "storage"),
    )
}
_OF_NUMPY = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16" and not dtype.is_storage}
FLOAT32, FLOAT64, INT64, INT32, BOOL = (DTYPES[n] for n in ("float32", "float64", "int64", "int32", "bool"))


def as_dtype(dtype: DType | str | np.dtype | type) -> DType:
    """The DType meant by a name, a NumPy dtype or scalar type.

    Raises:
        ShapeError: foreplan has no such element type.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, np.dtype) and dtype in _OF_NUMPY:  # kernels ask at every call, and NumPy's names are slow
        return _OF_NUMPY[dtype]
    try:
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except (TypeError, ValueError, SyntaxError):  # NumPy reads some texts as Python does
        raise ShapeError(f"{dtype!r:.80} is no element type; choose one of {', '.join(DTYPES)}") from None
    if name not in DTYPES:
        raise ShapeError(f"there is no element type {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class TensorType:
    """An element type and a static shape; written `float32[32,3,224,224]`."""

    dtype: DType
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.shape) > MOST_AXES:
            raise ShapeError(f"a tensor has {len(self.shape)} axes, and NumPy's arrays have {MOST_AXES} at most")
        if min(self.shape, default=0) < 0:
            raise ShapeError(f"{self} has an axis of less than no elements")
        # Sums of a graph's sizes must stay within 64 bits, and no machine comes near.
        if math.prod(extent or 1 for extent in self.shape) > 1 << 50:
            raise ShapeError(f"{self} has more than 2**50 elements: no machine holds it, so check the sizes given")

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a dense copy."""
        return self.size * self.dtype.itemsize

    @cached_property
    def strides(self) -> Shape:
        """Bytes from one element to the next along each axis, of a dense copy in C order."""
        strides, step = [], self.dtype.itemsize
        for extent in reversed(self.shape):
            strides.append(step)
            step *= extent
        return tuple(reversed(strides))

    def with_shape(self, shape: Shape) -> TensorType:
        """The same element type in another shape."""
        return TensorType(self.dtype, tuple(shape))

    def with_dtype(self, dtype: DType | str) -> TensorType:
        """The same shape in another element type."""
        return TensorType(as_dtype(dtype), self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def tensor_type(text: str) -> TensorType:
    """The type written as `float32[3,4]`; the inverse of `str`.

    Raises:
        ShapeError: the text is not a tensor type.
    """
    name, bracket, rest = text.strip().partition("[")
    if not bracket or not rest.endswith("]"):
        raise ShapeError(f"{text!r} is not a tensor type; write one such as float32[32,10]")
    extents = [part.strip() for part in rest[:-1].split(",")] if rest != "]" else []
    if not all(part.isdigit() for part in extents):
        raise ShapeError(f"{text!r} has an extent that is not a whole number; write one such as float32[32,10]")
    return TensorType(as_dtype(name), tuple(int(part) for part in extents))


@dataclass(frozen=True)
class Window:
    """A tensor as it lies in memory.

    Attributes:
        type: element type and shape.
        strides: bytes from one element to the next along each axis.
        blocks: the blocks in which its elements lie, where strides do not say it; these are then those of C order.
    """

    type: TensorType
    strides: tuple[int, ...]
    blocks: Blocks | None = None

    @classmethod
    def dense(cls, type: TensorType) -> Window:
        """In C order without gaps."""
        return cls(type, type.strides)

    @property
    def shape(self) -> Shape:
        """Extents of its axes."""
        return self.type.shape

    def viewed(self, shape: Sequence[int], strides: Sequence[int]) -> Window:
        """Another view of the same bytes, which do not lie in blocks."""
        return Window(self.type.with_shape(tuple(shape)), tuple(strides))

    def broadcast(self, shape: Shape) -> Window:
        """The same elements repeated to a larger shape: strides are 0 along axes of one element or none."""
        lead = len(shape) - len(self.shape)
        strides = (0 if extent == 1 else step for extent, step in zip(self.shape, self.strides))
        return self.viewed(shape, (*[0] * lead, *strides))

    @cached_property
    def is_dense(self) -> bool:
        """Whether it lies in C order without gaps (the stride of an axis of extent 1 means nothing)."""
        steps = zip(self.shape, self.strides, self.type.strides)
        as_in_c = self.type.size <= 1 or all(extent == 1 or a == b for extent, a, b in steps)
        return as_in_c and self.blocks is None

    @cached_property
    def is_compact(self) -> bool:
        """Whether it lies without gaps, its axes in any order."""
        step = self.type.dtype.itemsize
        if self.blocks is not None or self.type.size <= 1:
            return self.blocks is None
        for stride, extent in sorted((s, e) for e, s in zip(self.shape, self.strides) if e != 1):
            if stride != step:
                return False
            step *= extent
        return True


def types_of(*arrays: np.ndarray) -> tuple[TensorType, ...]:
    """The tensor types of arrays."""
    return tuple(TensorType(as_dtype(array.dtype), array.shape) for array in arrays)


def broadcast_shapes(*shapes: Shape) -> Shape:
    """The common shape under NumPy's broadcasting rule.

    Raises:
        ShapeError: two extents differ and neither is 1.
    """
    if shapes and all(shape == shapes[0] for shape in shapes):
        return tuple(shapes[0])
    rank = max(map(len, shapes), default=0)
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    common = []
    for extents in zip(*aligned):
        wide = {extent for extent in extents if extent != 1}
        if len(wide) > 1:
            listed = " and ".join(str(list(shape)) for shape in shapes)
            raise ShapeError(f"the shapes {listed} do not broadcast: extents must be equal or 1 from the right")
        common.append(wide.pop() if wide else 1)
    return tuple(common)
