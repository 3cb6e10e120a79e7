"""oneDNN's primitives as foreplan uses them: described, asked for their scratch memory, and bound to addresses."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import partial

from foreplan.graph import TensorType, Window
from foreplan.graph.blocks import Blocks
from foreplan.runtime.cpu.onednn import library as c
from foreplan.runtime.cpu.onednn.layouts import stepped, swapped
from foreplan.runtime.cpu.onednn.library import Argument, Dims, library
from foreplan.runtime.cpu.threads import current_threads, threads_set_to
from foreplan.runtime.kernel import Run


class Description:
    """dnnl_memory_desc_t: shape, element type and layout of a tensor; the layout may be left to the primitive."""

    def __init__(self, handle: c_void_p, owned: bool = True) -> None:
        self.handle, self._owned = handle, owned

    @classmethod
    def of(cls, window: Window) -> Description:
        """A tensor that lies with these strides."""
        assert window.blocks is None, window
        found, size = c_void_p(), window.type.dtype.itemsize
        strides = Dims(*(step // size for step in window.strides))
        shape, kind = Dims(*window.shape), c.DATA_TYPES[window.type.dtype.name]
        library().functions.dnnl_memory_desc_create_with_strides(byref(found), len(window.shape), shape, kind, strides)
        return cls(found)

    @classmethod
    def chosen(cls, window: Window) -> Description:
        """A tensor of this shape, in whatever layout the primitive likes best."""
        found, kind = c_void_p(), c.DATA_TYPES[window.type.dtype.name]
        library().functions.dnnl_memory_desc_create_with_tag(
            byref(found), len(window.shape), Dims(*window.shape), kind, c.ANY
        )
        return cls(found)

    @property
    def nbytes(self) -> int:
        """Size of a tensor so described."""
        return int(library().functions.dnnl_memory_desc_get_size(self.handle)) if self.handle else 0

    @property
    def blocks(self) -> Blocks | None:
        """The layout in blocks, if it is one."""
        kind, rank, count = c_int(), c_int(), c_int()
        for query, number in ((c.MD_FORMAT_KIND, kind), (c.MD_RANK, rank), (c.MD_BLOCKS, count)):
            library().functions.dnnl_memory_desc_query(self.handle, query, byref(number))
        if kind.value != c.BLOCKED:
            return None
        shape, filled, steps = (self._numbers(q, rank.value) for q in (c.MD_DIMS, c.MD_PADDED_DIMS, c.MD_STRIDES))
        sizes, axes = (self._numbers(query, count.value) for query in (c.MD_BLOCK_SIZES, c.MD_BLOCK_AXES))
        each = [math.prod(size for size, a in zip(sizes, axes) if a == axis) for axis in range(rank.value)]
        counts = [extent // size for extent, size in zip(filled, each)]
        order, step = sorted(range(rank.value), key=lambda axis: (-steps[axis], axis)), math.prod(sizes)
        for axis in reversed(order):
            if counts[axis] > 1 and steps[axis] != step:
                return None
            step *= counts[axis]
        names = (chr(ord("A" if axis in axes else "a") + axis) for axis in order)
        inner = (f"{size}{chr(ord('a') + axis)}" for size, axis in zip(sizes, axes))
        return Blocks(tuple(shape), "".join((*names, *inner)))

    def _numbers(self, query: int, count: int) -> Sequence[int]:
        found = POINTER(c_int64)()
        library().functions.dnnl_memory_desc_query(self.handle, query, byref(found))
        return [found[i] for i in range(count)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Description):
            return NotImplemented
        return bool(library().functions.dnnl_memory_desc_equal(self.handle, other.handle))

    __hash__ = None  # type: ignore[assignment]

    def __del__(self) -> None:
        if self._owned and self.handle:
            library().functions.dnnl_memory_desc_destroy(self.handle)


@dataclass(frozen=True)
class After:
    """An operation on every element of a result before it is written.

    Attributes:
        function: `OLD` adds what was there; add, sub and mul take another tensor, of which one number may stand for
            many; relu multiplies what is not above 0 by it, so that NaN stays.
        other: how that tensor lies; for relu, one zero.
    """

    function: str
    other: Window | None = None


REFERENCE = "ref"  # in the names of loops over single numbers: NumPy takes a twentieth of the time of the large ones
# Depth-wise convolutions for processors without AVX2: added to a tensor, some of oneDNN 3.2 end the process.
ENDS_PROCESSES = "jit_dw:sse41"
# Convolutions on tile registers, among others: where no tap meets the image, some of oneDNN 3.2 end the process.
ENDS_PROCESSES_ON_ZEROS = "brgconv"
OLD = "old"
Following = Sequence[tuple[str, int]]  # functions, each with the index of the input that it takes beside the result
_FUNCTIONS = {"add": c.ADD, "sub": c.SUB, "mul": c.MUL}


def base_of(after: Following) -> int:
    """The input in the result's place, or copied there, to which the result is added; -1: none."""
    return next((index for function, index in after if function == OLD), -1)


def onto(add: bool) -> tuple[After, ...]:
    """The operations after a result, which may first be added to the output's old content."""
    return (After(OLD),) if add else ()


def argument_of(number: int, function: str) -> int:
    """The argument for the other tensor of an operation, by its number."""
    return (number + 1) * c.AFTER | (c.WEIGHTS if function == "relu" else c.OTHER)


class Attributes:
    """dnnl_primitive_attr_t: scratch memory is the caller's; and the operations that follow.

    Attributes:
        descriptions: of the tensors that the operations which follow take, by argument.
    """

    def __init__(self, after: Sequence[After] = ()) -> None:
        functions = library().functions
        self.handle = c_void_p()
        self.descriptions = {
            argument_of(i, x.function): Description.of(x.other) for i, x in enumerate(after) if x.other
        }
        functions.dnnl_primitive_attr_create(byref(self.handle))
        functions.dnnl_primitive_attr_set_scratchpad_mode(self.handle, c.USER_SCRATCHPAD)
        if not after:
            return
        post = c_void_p()
        functions.dnnl_post_ops_create(byref(post))
        for i, x in enumerate(after):
            if x.function == OLD:
                functions.dnnl_post_ops_append_sum(post, 1.0, 0, 0)
            elif x.function == "relu":
                functions.dnnl_post_ops_append_prelu(post, 0)
            else:
                functions.dnnl_post_ops_append_binary(
                    post, _FUNCTIONS[x.function], self.descriptions[argument_of(i, x.function)].handle
                )
        functions.dnnl_primitive_attr_set_post_ops(self.handle, post)
        functions.dnnl_post_ops_destroy(post)

    def __del__(self) -> None:
        library().functions.dnnl_primitive_attr_destroy(self.handle)


class Primitive:
    """A primitive that was described (dnnl_primitive_desc_t), and made when it is first bound.

    Attributes:
        descriptions: of its arguments as it wants them, by argument; those that were given stand as given.
    """

    def __init__(
        self,
        create: Callable[..., object],
        *arguments: object,
        queries: Mapping[int, int],
        avoided: Sequence[str] = (REFERENCE,),
        called: Mapping[int, int] | None = None,
    ) -> None:
        """Describe it by one of oneDNN's functions, with these arguments. The `implementation` is the first that oneDNN
        offers whose name contains no avoided word.

        Args:
            called: oneDNN's arguments that have another name here, with this name.

        Raises:
            Refused: there is none.
        """
        functions = library().functions
        self.handle, self._made, self._threads = c_void_p(), c_void_p(), current_threads()
        handled = (Description, Attributes, Primitive)
        create(byref(self.handle), *(a.handle if isinstance(a, handled) else a for a in arguments))
        while any(name in self.implementation for name in avoided):
            functions.dnnl_primitive_desc_next_impl(self.handle)
        self.called = called or {}
        self.descriptions = {
            self.called.get(argument, argument): Description(
                c_void_p(functions.dnnl_primitive_desc_query_md(self.handle, query, 0)), owned=False
            )
            for argument, query in {**queries, c.SCRATCHPAD: c.QUERY_SCRATCHPAD}.items()
        }
        for attributes in (a for a in arguments if isinstance(a, Attributes)):
            self.descriptions.update(attributes.descriptions)

    @property
    def scratchpad(self) -> int:
        """Bytes of scratch memory that a run needs."""
        return self.descriptions[c.SCRATCHPAD].nbytes

    @property
    def implementation(self) -> str:
        """oneDNN's name for the code that runs."""
        text = c_char_p()
        library().functions.dnnl_primitive_desc_query(self.handle, c.QUERY_IMPLEMENTATION, 0, byref(text))
        return (text.value or b"").decode()

    def bind(self, addresses: Mapping[int, int]) -> Run:
        """A call that runs it on these addresses, by argument; the caller keeps the memory alive."""
        found = library()
        if not self._made:
            # For as many threads as it was described for: its scratch memory depends on them.
            with threads_set_to(self._threads):
                found.functions.dnnl_primitive_create(byref(self._made), self.handle)
        memories = _Memories(self, addresses)
        call = partial(
            found.functions.dnnl_primitive_execute, self._made, found.stream, len(addresses), memories.arguments
        )
        call.keep = memories  # type: ignore[attr-defined]
        return call

    def __del__(self) -> None:
        functions = library().functions
        if self._made:
            functions.dnnl_primitive_destroy(self._made)
        if self.handle:
            functions.dnnl_primitive_desc_destroy(self.handle)


class _Memories:
    """Memory objects for the arguments of one call; they own no bytes. They keep their primitive alive."""

    def __init__(self, primitive: Primitive, addresses: Mapping[int, int]) -> None:
        self.primitive = primitive
        self.arguments = (Argument * len(addresses))()
        for place, (argument, address) in zip(self.arguments, addresses.items()):
            memory = c_void_p()
            library().functions.dnnl_memory_create(
                byref(memory), primitive.descriptions[argument].handle, library().engine, address
            )
            place.arg, place.memory = primitive.called.get(argument, argument), memory

    def __del__(self) -> None:
        for place in self.arguments:
            library().functions.dnnl_memory_destroy(place.memory)


def reorder(source: Description, target: Description, add: bool = False) -> Primitive:
    """A copy from one layout to another, or an addition to the latter. Arguments SRC, DST."""
    found = library()
    return Primitive(
        found.functions.dnnl_reorder_primitive_desc_create,
        source,
        found.engine,
        target,
        found.engine,
        Attributes(onto(add)),
        queries={c.SRC: c.QUERY_SRC, c.DST: c.QUERY_DST},
    )


def matmul(a: Window, b: Window, y: Window, after: Sequence[After] = ()) -> Primitive:
    """y = a·b, and the operations that follow; leading axes of a and b may be 1. Arguments SRC, WEIGHTS, DST.

    A product with a single column is transposed: oneDNN multiplies rows fast, but columns number by number.

    Raises:
        Refused: oneDNN has no such product.
    """
    found, turned = library(), y.shape[-1] == 1 and y.shape[-2] > 1
    if turned:
        a, b, y = swapped(b), swapped(a), swapped(y)
        after = [After(each.function, each.other and swapped(each.other)) for each in after]
    return Primitive(
        found.functions.dnnl_matmul_primitive_desc_create,
        found.engine,
        Description.of(stepped(a)),
        Description.of(stepped(b)),
        None,
        Description.of(stepped(y)),
        Attributes(after),
        queries={c.SRC: c.QUERY_SRC, c.WEIGHTS: c.QUERY_WEIGHTS, c.DST: c.QUERY_DST},
        called={c.SRC: c.WEIGHTS, c.WEIGHTS: c.SRC} if turned else {},
    )


def sum_of(x: Window) -> Primitive:
    """The sum of two tensors that lie alike. Arguments SRC, OTHER and DST, which may be either of them."""
    found, described = library(), Description.of(x)
    made = Primitive(
        found.functions.dnnl_binary_primitive_desc_create,
        found.engine,
        c.ADD,
        described,
        described,
        described,
        Attributes(),
        queries={c.SRC: c.QUERY_SRC, c.DST: c.QUERY_DST},
    )
    made.descriptions[c.OTHER] = described
    return made


@dataclass(frozen=True)
class Geometry:
    """Attributes of a convolution.

    Attributes:
        strides, dilations: elements, an entry a spatial axis (a dilation of 1 leaves no gaps).
        low, high: zeros around each spatial axis.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]

    @property
    def arguments(self) -> tuple[ctypes.Array[ctypes.c_int64], ...]:
        """As oneDNN takes them, where a dilation of 0 leaves no gaps."""
        gaps = tuple(step - 1 for step in self.dilations)
        return tuple(Dims(*entries) for entries in (self.strides, gaps, self.low, self.high))

    def reaches(self, extents: Sequence[int], taps: Sequence[int], results: Sequence[int]) -> bool:
        """Whether along each axis some tap of some result meets the image, and not the zeros around it."""
        return all(
            any(0 <= i * stride - low + tap * dilation < extent for i in range(count) for tap in range(size))
            for stride, low, dilation, extent, size, count in zip(
                self.strides, self.low, self.dilations, extents, taps, results, strict=True
            )
        )


def convolution(
    x: Window,
    w: Window,
    y: Window,
    geometry: Geometry,
    bias: Window | None = None,
    after: Sequence[After] = (),
    avoided: Sequence[str] = (REFERENCE,),
) -> Primitive:
    """y = x * w (+ bias), and what follows. Arguments SRC, WEIGHTS (in the layout that it chooses), BIAS, DST.

    Raises:
        Refused: oneDNN has no such convolution.
    """
    queries = {c.SRC: c.QUERY_SRC, c.WEIGHTS: c.QUERY_WEIGHTS, c.DST: c.QUERY_DST}
    found = library()
    if any(each.function == OLD for each in after):
        avoided = (*avoided, ENDS_PROCESSES)
    axes = len(geometry.strides)
    if not geometry.reaches(x.shape[2:], w.shape[-axes:], y.shape[2:]):
        avoided = (*avoided, ENDS_PROCESSES_ON_ZEROS)
    made = Primitive(
        found.functions.dnnl_convolution_forward_primitive_desc_create,
        found.engine,
        c.FORWARD,
        c.DIRECT,
        Description.of(x),
        Description.chosen(w),
        Description.of(bias) if bias else None,
        Description.of(y),
        *geometry.arguments,
        Attributes(after),
        queries=queries,
        avoided=avoided,
    )
    if bias:
        made.descriptions[c.BIAS] = Description.of(bias)
    return made


def convolution_data_gradient(g: Window, w: Window, dx: Window, geometry: Geometry) -> Primitive:
    """The gradient of a convolution's data. Arguments DIFF_DST, WEIGHTS (in the layout that it chooses), DIFF_SRC.

    Raises:
        Refused: oneDNN has no such convolution.
    """
    found, hint = library(), _hint(dx, w, g, geometry)
    depthwise = len(w.shape) > len(g.shape) and w.shape[1:3] == (1, 1)
    return Primitive(
        found.functions.dnnl_convolution_backward_data_primitive_desc_create,
        found.engine,
        c.DIRECT,
        Description.of(dx),
        Description.chosen(w),
        Description.of(g),
        *geometry.arguments,
        hint,
        Attributes(),
        queries={c.DIFF_DST: c.QUERY_DIFF_DST, c.WEIGHTS: c.QUERY_WEIGHTS, c.DIFF_SRC: c.QUERY_DIFF_SRC},
        # The second computes one product a channel, and is tens of times as slow as the next ones.
        avoided=(REFERENCE, "brgconv_strided") if depthwise else (REFERENCE,),
    )


def convolution_weight_gradient(x: Window, g: Window, dw: Window, geometry: Geometry) -> Primitive:
    """The gradient of a convolution's weights. Arguments SRC, DIFF_DST, DIFF_WEIGHTS (in the layout that it chooses).

    Raises:
        Refused: oneDNN has no such convolution.
    """
    found, hint = library(), _hint(x, dw, g, geometry)
    return Primitive(
        found.functions.dnnl_convolution_backward_weights_primitive_desc_create,
        found.engine,
        c.DIRECT,
        Description.of(x),
        Description.chosen(dw),
        None,
        Description.of(g),
        *geometry.arguments,
        hint,
        Attributes(),
        queries={c.SRC: c.QUERY_SRC, c.DIFF_DST: c.QUERY_DIFF_DST, c.DIFF_WEIGHTS: c.QUERY_DIFF_WEIGHTS},
    )


def _hint(x: Window, w: Window, y: Window, geometry: Geometry) -> Primitive:
    """The forward convolution of a gradient, which oneDNN needs as a hint; it never runs. If the data are narrow, so
    are the weights.
    """
    return convolution(x, Window.dense(TensorType(x.type.dtype, w.shape)), y, geometry, avoided=())
