"""The array that traced functions see: NumPy's operators and methods, each of which adds nodes to the graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np

from foreplan.base.arguments import shown
from foreplan.frontend.tracing.methods import of_tensors
from foreplan.frontend.tracing.specs import Spec
from foreplan.frontend.tracing.tracer import Tracer, current, fail
from foreplan.graph import DType, Graph, Value
from foreplan.graph.types import FLOAT32

Scalar = bool | int | float
Axes = int | Sequence[int] | None
# What Python and NumPy raise for arguments that make no sense.
MISTAKES = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _operators(ufunc: np.ufunc) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An operator and its reflected form."""
    return lambda self, other: ufunc(self, other), lambda self, other: ufunc(other, self)


def _no_value(what: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise fail(f"{what} needs the values of a traced {self.value.type}, which do not exist yet; {instead}")

    return refuse


# NumPy's functions as tensors see them: they dispatch on any array-like, and their type stubs know arrays only.
_numpy: Any = np


class Tensor:
    """A value of the graph that is being traced, used as a NumPy array is.

    Operators, indexing, methods and NumPy's own functions (`np.exp(x)`, `np.where(c, x, 0)`) add nodes. Shapes are
    static, so `x.shape` holds plain integers and Python code may depend on them. Element types promote as foreplan's
    do: literals and float64 arrays, NumPy's default, take the element type of the tensors they meet.

    Attributes:
        tracer: the trace it belongs to.
        value: its value in the graph.
    """

    __slots__ = ("tracer", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: Tracer, value: Value) -> None:
        self.tracer = tracer
        self.value = value

    # Known while tracing

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """Element type, as NumPy's."""
        return self.value.dtype.numpy

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.value.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.value.type.size

    @property
    def spec(self) -> Spec:
        """Element type and shape, as `trace` takes them."""
        return Spec(self.value.type)

    def __len__(self) -> int:
        if not self.shape:
            raise fail("len() of a traced scalar; it has no axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Tensor({self.value.type} {self.value.name!r})"

    # Operators

    __add__, __radd__ = _operators(np.add)
    __sub__, __rsub__ = _operators(np.subtract)
    __mul__, __rmul__ = _operators(np.multiply)
    __truediv__, __rtruediv__ = _operators(np.true_divide)
    __floordiv__, __rfloordiv__ = _operators(np.floor_divide)
    __mod__, __rmod__ = _operators(np.remainder)
    __pow__, __rpow__ = _operators(np.power)
    __matmul__, __rmatmul__ = _operators(np.matmul)
    __and__, __rand__ = _operators(np.bitwise_and)
    __or__, __ror__ = _operators(np.bitwise_or)
    __xor__, __rxor__ = _operators(np.bitwise_xor)
    __lshift__, __rlshift__ = _operators(np.left_shift)
    __rshift__, __rrshift__ = _operators(np.right_shift)
    __lt__ = _operators(np.less)[0]
    __le__ = _operators(np.less_equal)[0]
    __gt__ = _operators(np.greater)[0]
    __ge__ = _operators(np.greater_equal)[0]

    def __eq__(self, other: Any) -> Any:
        return np.equal(self, other)

    def __ne__(self, other: Any) -> Any:
        return np.not_equal(self, other)

    def __neg__(self) -> Any:
        return np.negative(self)

    def __pos__(self) -> Tensor:
        return self

    def __abs__(self) -> Any:
        return np.absolute(self)

    def __invert__(self) -> Any:
        return np.invert(self)

    def __getitem__(self, key: Any) -> Tensor:
        found: Tensor = of_tensors("index")(self, key)
        return found

    def __call_graph__(self, graph: Graph, inputs: Sequence[Any], named: Mapping[str, Any], name: str) -> Any:
        return of_tensors("call")(self.tracer, graph, inputs, named, name)

    # Methods of arrays: the NumPy functions of the same names

    @property
    def T(self) -> Any:
        """All axes reversed."""
        return np.transpose(self)

    @property
    def mT(self) -> Any:
        """The last two axes exchanged."""
        return np.swapaxes(self, -1, -2)

    def reshape(self, *shape: int | Sequence[int]) -> Any:
        """The same elements in another shape; one extent may be -1."""
        return np.reshape(self, _unpacked(shape))

    def transpose(self, *axes: int | Sequence[int]) -> Any:
        """Axes in another order, reversed by default."""
        return np.transpose(self, _unpacked(axes) or None)

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """Two axes exchanged."""
        return np.swapaxes(self, axis1, axis2)

    def flatten(self) -> Any:
        """All elements along one axis."""
        return np.reshape(self, (-1,))

    def ravel(self) -> Any:
        """All elements along one axis."""
        return np.reshape(self, (-1,))

    def squeeze(self, axis: Axes = None) -> Any:
        """Axes of extent 1 dropped."""
        return np.squeeze(self, axis)

    def astype(self, dtype: DType | str | np.dtype | type, copy: bool = True) -> Tensor:
        """Elements converted to another type."""
        found: Tensor = of_tensors("convert")(self, dtype)
        return found

    def copy(self) -> Tensor:
        """The tensor itself: traced tensors never change."""
        return self

    def sum(self, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """Sum along axes."""
        return _numpy.sum(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def mean(self, axis: Axes = None, dtype: Any = None, keepdims: bool = False) -> Any:
        """Mean along axes."""
        return _numpy.mean(self, axis=axis, dtype=dtype, keepdims=keepdims)

    def prod(self, axis: Axes = None, keepdims: bool = False) -> Any:
        """Product along axes."""
        return _numpy.prod(self, axis=axis, keepdims=keepdims)

    def max(self, axis: Axes = None, keepdims: bool = False) -> Any:
        """Maximum along axes."""
        return _numpy.max(self, axis=axis, keepdims=keepdims)

    def min(self, axis: Axes = None, keepdims: bool = False) -> Any:
        """Minimum along axes."""
        return _numpy.min(self, axis=axis, keepdims=keepdims)

    def var(self, axis: Axes = None, ddof: int = 0, keepdims: bool = False) -> Any:
        """Variance along axes."""
        return _numpy.var(self, axis=axis, ddof=ddof, keepdims=keepdims)

    def std(self, axis: Axes = None, ddof: int = 0, keepdims: bool = False) -> Any:
        """Standard deviation along axes."""
        return _numpy.std(self, axis=axis, ddof=ddof, keepdims=keepdims)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Index of the maximum."""
        return _numpy.argmax(self, axis=axis, keepdims=keepdims)

    def argmin(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Index of the minimum."""
        return _numpy.argmin(self, axis=axis, keepdims=keepdims)

    def any(self, axis: Axes = None, keepdims: bool = False) -> Any:
        """Whether any element along axes is nonzero."""
        return _numpy.any(self, axis=_as_tuple(axis), keepdims=keepdims)

    def all(self, axis: Axes = None, keepdims: bool = False) -> Any:
        """Whether every element along axes is nonzero."""
        return _numpy.all(self, axis=_as_tuple(axis), keepdims=keepdims)

    def clip(self, min: Any = None, max: Any = None) -> Any:
        """Limited to [min, max]."""
        return np.clip(self, min, max)

    def cumsum(self, axis: int | None = None) -> Any:
        """Running sum along one axis."""
        return np.cumsum(self, axis=axis)

    def cumprod(self, axis: int | None = None) -> Any:
        """Running product along one axis."""
        return np.cumprod(self, axis=axis)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        """Elements with equal indices of two axes."""
        return np.diagonal(self, offset, axis1, axis2)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        """Sum along a diagonal."""
        return np.trace(self, offset, axis1, axis2)

    def argsort(self, axis: int | None = -1) -> Any:
        """Indices that sort along an axis."""
        return np.argsort(self, axis)

    def repeat(self, repeats: int, axis: int | None = None) -> Any:
        """Each element repeated."""
        return np.repeat(self, repeats, axis=axis)

    def take(self, indices: Any, axis: int | None = None) -> Any:
        """Elements at indices of one axis."""
        return np.take(self, indices, axis=axis)

    def dot(self, other: Any) -> Any:
        """Matrix product."""
        return np.dot(self, other)

    def round(self, decimals: int = 0) -> Any:
        """Rounded to the nearest, ties to even."""
        return np.round(self, decimals)

    # NumPy's dispatch

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return of_tensors("apply_ufunc")(ufunc, method, inputs, kwargs)
        except MISTAKES as error:
            raise fail(f"np.{ufunc.__name__} cannot be traced with these arguments: {error}") from error

    def __array_function__(self, func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        return of_tensors("apply_function")(func, args, kwargs)

    # Operations that need values

    __bool__ = _no_value("`if`, `while`, `and`, `or`, `not` or bool()", "choose element by element with np.where")
    __float__ = _no_value("float()", "keep it a tensor, and return it from the function to see it")
    __int__ = _no_value("int()", "keep it a tensor (x.astype('int64')), and return it from the function to see it")
    __index__ = _no_value("an index, range() or shape", "index with x[tensor] or np.take, and use x.shape for sizes")
    __complex__ = _no_value("complex()", "foreplan has no complex numbers")
    __array__ = _no_value("np.asarray() or a NumPy function", "use the tensor as it is, with NumPy's traced functions")
    __dlpack__ = _no_value("np.from_dlpack()", "use the tensor as it is, with NumPy's traced functions")
    item = _no_value(".item()", "return it from the function to see it")
    tolist = _no_value(".tolist()", "return it from the function to see it")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"a traced tensor has no attribute {name!r}")
        raise fail(f"x.{name} of arrays is not there for traced tensors; use NumPy's functions, such as np.sort(x)")

    def __iter__(self) -> Iterator[Any]:
        raise fail(
            f"a traced {self.value.type} is not iterated over: that would unroll the loop into the graph; "
            "compute on whole tensors, take pieces with x[0] or np.split, or loop over range(x.shape[0])"
        )

    def __contains__(self, item: Any) -> bool:
        raise fail("`in` needs the values of a traced tensor, which do not exist yet; use (x == item).any()")

    def __setitem__(self, key: Any, value: Any) -> None:
        raise fail("a traced tensor cannot be written into; make a new one with np.where or np.concatenate")


def _unpacked(given: tuple[Any, ...]) -> tuple[int, ...]:
    """The same arguments for `f(1, 2)` and `f((1, 2))`."""
    if len(given) == 1 and isinstance(given[0], Sequence | np.ndarray):
        return tuple(given[0])
    return () if given == (None,) else given


def _as_tuple(axis: Axes) -> int | tuple[int, ...] | None:
    return axis if axis is None or isinstance(axis, int) else tuple(axis)


def wrap(value: Value) -> Tensor:
    """A value of the current trace as the traced function sees it."""
    return Tensor(current(), value)


def is_scalar(x: Any) -> bool:
    """Whether `x` is a literal: a Python or NumPy number, or an array with no axes."""
    return isinstance(x, bool | int | float | np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0)


def literal(x: Any) -> Scalar:
    """A Python number from a literal.

    Raises:
        TraceError: it is complex, a string or an object.
    """
    number = x.item() if isinstance(x, np.generic | np.ndarray) else x
    if not isinstance(number, bool | int | float):
        raise fail(f"{x!r} is not a number that a graph can hold")
    return number


def as_tensor(x: Any, like: DType | None = None) -> Tensor:
    """`x` as a tensor of the current trace; arrays, lists and literals become constants.

    Args:
        x: a tensor, or anything that np.asarray takes.
        like: element type of literals, and of float64 arrays, if it is a float; float32 by default.

    Raises:
        TraceError: the tensor belongs to another trace, or the array holds what a graph cannot.
    """
    tracer = current()
    if isinstance(x, Tensor):
        if x.tracer is not tracer:
            raise fail(f"{x!r} belongs to another trace; pass it into this function as an input")
        return x
    try:
        array = np.asarray(x)
    except (ValueError, TypeError, OverflowError) as error:
        raise fail(f"{shown(x)} is no array: {error}") from None
    if array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        what = f"an array of {array.dtype}" if isinstance(x, np.ndarray) else shown(x)
        raise fail(f"{what} cannot be part of a graph, which takes tensors, arrays and numbers")
    if array.dtype == np.float64 or (like is not None and like.is_float and not isinstance(x, np.ndarray)):
        dtype = like if like is not None and like.is_float else FLOAT32
        note_infinite(array, dtype)
        with np.errstate(over="ignore"):
            array = array.astype(dtype.numpy)
    return Tensor(tracer, tracer.constant(array))


def note_infinite(array: np.ndarray, dtype: DType) -> None:
    """Tell the user of finite numbers that are infinite in the element type that they take."""
    if array.dtype.kind in "fiu" and (lost := dtype.overflows(array)).any():
        b = current().at()
        b.note(f"{array[lost].reshape(-1)[0]} in the function is beyond {dtype}, and counts as infinity ({b.source})")


def takes_tensors(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function with every argument that its signature calls a Tensor made one by `as_tensor`."""
    hints = function.__annotations__
    places = {name: i for i, name in enumerate(inspect.signature(function).parameters)}
    tensors = [(name, places[name]) for name in places if hints.get(name) in ("Tensor", "Tensor | None")]

    @functools.wraps(function)
    def with_tensors(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        given: list[Any] = list(args)
        for name, place in tensors:
            optional = hints[name] != "Tensor"
            if place < len(given) and not (optional and given[place] is None):
                given[place] = as_tensor(given[place])
            elif name in kwargs and not (optional and kwargs[name] is None):
                kwargs[name] = as_tensor(kwargs[name])
        return function(*given, **kwargs)

    return with_tensors


def common_float(*operands: Any) -> DType | None:
    """The element type that literals take among these operands: the widest float of the tensors, or None."""
    from foreplan.ops.expr import promote

    found: DType | None = None
    for x in operands:
        if isinstance(x, Tensor) and x.value.dtype.is_float:
            found = x.value.dtype if found is None else promote(found, x.value.dtype)
    return found
