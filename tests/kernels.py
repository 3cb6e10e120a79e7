"""What tests of the CPU's kernels and of a card's share: ops, operands, what NumPy gives, and when results agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from foreplan.graph import DType, Op, TensorType, Window, as_dtype
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import BOOL, DTYPES, FLOAT32
from foreplan.ops.expr import FUNCTIONS
from foreplan.ops.map import Map
from tests.ops.check import type_of

UPDATE = Map(("(a0 - (a3 * (a1 + (0.9 * ((0.9 * a2) + a1)))))", "((0.9 * a2) + a1)"))
NORMAL = Map(("relu((((a0 - a1) * a2) + a3))",))

COMPUTED = [dtype for dtype in DTYPES.values() if not dtype.is_storage]  # element types that kernels compute with
NUMBERS = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -2.5, 2.0, 3.0, -7.25, 100.0, -30.0, 1e4, np.inf, -np.inf, np.nan]
WHOLE = [0, 1, 2, 3, 5, 7, 8, 31, 63, 100, 127]
RENAMED = {"and": "and_", "or": "or_", "not": "not_"}  # functions whose names Python has taken
OF_INTEGERS = ("bitand", "bitor", "bitxor", "bitnot", "shiftleft", "shiftright")
NOT_OF_TRUTHS = (
    "sub",
    "neg",
    "sign",
    "square",
    "pow",
    "floordiv",
    "mod",
    "fmod",
    "truncdiv",
    "shiftleft",
    "shiftright",
)


def numbers(dtype: DType) -> np.ndarray:
    """What functions of expressions are asked for: small numbers, large ones, and what is no number."""
    if dtype.is_float:
        return np.array(NUMBERS).astype(dtype.numpy)
    if dtype == BOOL:
        return np.array([False, True])
    whole = WHOLE if dtype.category == "uint" else [*WHOLE, *(-x for x in WHOLE)]
    info = np.iinfo(dtype.numpy)
    return np.array([*whole, info.max, info.min]).astype(dtype.numpy)


def is_function_of(name: str, dtype: DType) -> bool:
    """Whether an expression may call a function with such elements, and NumPy gives what the result's type is."""
    if dtype == BOOL:
        return name not in NOT_OF_TRUTHS and (name in OF_INTEGERS or FUNCTIONS[name].result != "same" or name == "max")
    if name == "round" and not dtype.is_float:
        return False  # NumPy gives floats
    return name not in OF_INTEGERS or not dtype.is_float


def normal(*shape: int, seed: int = 0, offset: float = 0.0) -> np.ndarray:
    """Elements of float32 that are drawn from a normal distribution: the same ones for a shape and a seed."""
    return np.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) + offset, np.float32)


def as_images(*arrays: np.ndarray) -> list[Window]:
    """Tensors as they lie best: those of four axes with their channels last."""
    return [channels_last(type_of(x)) if x.ndim == 4 else Window.dense(type_of(x)) for x in arrays]


def dense(*arrays: np.ndarray) -> list[Window]:
    """Tensors in C order."""
    return [Window.dense(type_of(x)) for x in arrays]


def layouts(*arrays: np.ndarray) -> list[list[Window]]:
    """Both ways in which tensors lie: images with their channels last, and all in C order."""
    return [as_images(*arrays), dense(*arrays)]


def drawn_windows(data: st.DataObject) -> list[Window]:
    """Three tensors of float32 that are broadcast to one shape, their axes in any order, with gaps or without."""
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 7, 17]), min_size=1, max_size=4), "shape"))
    windows = []
    for _ in range(3):
        own = [data.draw(st.sampled_from([extent, 1])) for extent in shape[data.draw(st.integers(0, len(shape) - 1)) :]]
        order = data.draw(st.permutations(range(len(own))))
        strides, step = [0] * len(own), 4 * data.draw(st.sampled_from([1, 1, 3]))
        for axis in order:
            strides[axis] = step
            step *= own[axis]
        windows.append(Window(TensorType(FLOAT32, tuple(own)), tuple(strides)))
    return windows


def packed(truth: np.ndarray) -> np.ndarray:
    """Bits in the order of memory: channels last of four axes, else in C order."""
    order = truth.transpose(0, 2, 3, 1) if truth.ndim == 4 else truth
    return np.packbits(order.reshape(-1), bitorder="little")


def attention_operands(rng: np.random.Generator, sizes: tuple[int, ...], heads_last: bool = False) -> list[np.ndarray]:
    """Queries, keys and values.

    Args:
        sizes: batch, query heads, key heads, queries, keys, depth, value depth.
    """
    batch, heads, shared, queries, keys, depth, value_depth = sizes
    shapes = (batch, heads, queries, depth), (batch, shared, keys, depth), (batch, shared, keys, value_depth)
    found = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return [np.ascontiguousarray(x.swapaxes(1, 2)) for x in found] if heads_last else found


def scratch(nbytes: int) -> np.ndarray:
    """Poisoned memory, 64 bytes aligned."""
    raw = np.full(nbytes + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def poisoned(type: TensorType) -> np.ndarray:
    """Memory that nobody has written: what a kernel leaves of it is NaN, or -1."""
    return np.full(type.nbytes, 0xFF, np.uint8).view(type.dtype.numpy).reshape(type.shape)


def expected(op: Op, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the reference kernel gives."""
    types = [type_of(x) for x in inputs]
    results = op.infer(types)
    outputs = [poisoned(type) for type in results]
    with np.errstate(all="ignore"):
        op.compute([np.asarray(x, order="C") for x in inputs], outputs, scratch(op.workspace(types, results)))
    return outputs


def assert_near(
    found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], rtol: float, atol: float, name: str = ""
) -> None:
    """Assert that results agree: floats nearly, anything else exactly."""
    for ours, theirs in zip(found, wanted, strict=True):
        dtype = as_dtype(theirs.dtype)
        if dtype.is_storage:  # codes, of which some are no number
            np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8), err_msg=name)
        elif dtype.is_float:
            ours, theirs = (x.astype(np.float64) for x in (ours, theirs))
            np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=name)
        else:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def differences(f: Callable[[np.ndarray], float], x: np.ndarray) -> np.ndarray:
    """The gradient of a function at x, by differences in float64."""
    found = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[at] = 1e-6
        found[at] = (f(x + step) - f(x - step)) / 2e-6
    return found
