"""Parameters of the model being traced. They have names within scopes, and initialisers that a session runs later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np

from foreplan.base.arguments import instance, listed, shown, whole
from foreplan.base.errors import ShapeError, UsageError
from foreplan.frontend.tracing.tensor import Tensor, wrap
from foreplan.frontend.tracing.tracer import current, fail
from foreplan.graph import Array, DType, Fill, Initializer, Normal, TensorType, Uniform, as_dtype
from foreplan.graph.value import Kind

Init = Initializer | np.ndarray | float
_LONGEST = 1 << 50  # extent of a tensor


def scope(name: str | int) -> AbstractContextManager[None]:
    """Within `with nn.scope("layer1"):` the names of parameters begin with `layer1.`; scopes nest."""
    return current().scope(str(name))


def parameter(
    name: str, shape: int | Sequence[int], init: Init = 0.0, dtype: DType | str | np.dtype | type = "float32"
) -> Tensor:
    """A trained tensor, called by its name within the scopes around it.

    Args:
        name: such as `weight`; it must be new.
        shape: extents; one number for one axis.
        init: an initialiser, one number for all elements, or an array of this shape.
        dtype: element type.

    Raises:
        TraceError: the name is taken, or nothing is being traced.
        ShapeError: the array given has another shape.
        UsageError: an extent is not a whole number, or `init` is nothing of the kind.
    """
    return _store(name, shape, init, dtype, Kind.PARAMETER)


def buffer(
    name: str, shape: int | Sequence[int], init: Init = 0.0, dtype: DType | str | np.dtype | type = "float32"
) -> Tensor:
    """A tensor that the model keeps but does not train, such as a running statistic; arguments as in `parameter`."""
    return _store(name, shape, init, dtype, Kind.BUFFER)


def shared(name: str) -> Tensor:
    """The parameter or buffer that was made under this full name, to use it again: `x @ nn.shared("wte.weight").T`.

    Raises:
        TraceError: none has this name.
    """
    made = current().parameters
    if instance("the name of a parameter", name, str, "such as 'wte.weight'") not in made:
        raise fail(f"there is no parameter {name!r} yet; there are {', '.join(made) or 'none'}")
    return wrap(made[name])


def _store(
    name: str, shape: int | Sequence[int], init: Init, dtype: DType | str | np.dtype | type, kind: Kind
) -> Tensor:
    instance("the name of a parameter", name, str, "such as 'weight'")
    sizes = [shape] if isinstance(shape, int | np.integer) else listed(f"the shape of the parameter {name!r}", shape)
    extents = tuple(whole(f"an extent of the parameter {name!r}", extent, 0) for extent in sizes)
    type = TensorType(as_dtype(dtype), extents)
    if isinstance(init, np.ndarray):
        if init.shape != extents:
            raise ShapeError(
                f"the parameter {name!r} has the shape {list(extents)}, but its array has {list(init.shape)}"
            )
        too_large = type.dtype.overflows(init) if type.dtype.is_float and init.dtype.kind in "fiu" else np.zeros(())
        if too_large.any():
            raise UsageError(
                f"the content of the parameter {name!r} is too large: it holds {init[too_large][0]}, and the largest "
                f"number of {type.dtype} is {type.dtype.largest:.6g}"
            )
        init = Array(np.array(init, dtype=type.dtype.numpy))
    elif isinstance(init, int | float | np.number):
        try:
            init = Fill(float(init))
        except OverflowError:
            raise UsageError(f"the content of the parameter {name!r} is too large: {shown(init)}") from None
        if type.dtype.is_float and type.dtype.overflows(np.asarray(init.value)):
            raise UsageError(f"the content of the parameter {name!r} is too large for {type.dtype}: {init.value}")
    elif not hasattr(init, "fill"):
        raise UsageError(
            f"the content of the parameter {name!r} must be an initialiser, a number or an array, and is {shown(init)}"
        )
    return wrap(current().store(name, type, kind, init))


def layer(name: str, kind: str) -> AbstractContextManager[None]:
    """The scope of one layer's parameters. A layer without a name is named by its kind and a number.

    Raises:
        UsageError: the name is no text.
    """
    if not isinstance(name, str):
        raise UsageError(f"the name of a layer is a text, and is {shown(name)}")
    return scope(name or current().numbered_name(kind))


def float_dtype(x: Tensor) -> DType:
    """The element type that a layer's parameters take from its input."""
    return x.value.dtype if x.value.dtype.is_float else as_dtype("float32")


def kaiming_normal_fan_out(shape: Sequence[int]) -> Normal:
    """N(0, 2 / fan_out) for the weight [K, C/groups, *R] of a convolution before a ReLU (He et al. 2015, eq. 14).

    Raises:
        UsageError: it is no shape of such a weight.
    """
    extents = [whole("an extent of the weight", extent, 0, _LONGEST) for extent in listed("the weight's shape", shape)]
    if len(extents) < 2:
        raise UsageError(f"the weight of a convolution is [K, C/groups, *R], and has the shape {extents}")
    fan_out = extents[0] * math.prod(extents[2:])
    return Normal(math.sqrt(2.0 / fan_out) if fan_out else 0.0)


def uniform_fan_in(fan_in: int) -> Uniform:
    """U(±1 / √fan_in), from which PyTorch draws weights and biases of linear layers and convolutions.

    Raises:
        UsageError: it is no whole number of at least 0.
    """
    fan_in = whole("fan_in", fan_in, 0, _LONGEST)
    bound = 1.0 / math.sqrt(fan_in) if fan_in else 0.0
    return Uniform(-bound, bound)


def xavier_uniform(fan_in: int, fan_out: int) -> Uniform:
    """U(±√(6 / (fan_in + fan_out))) (Glorot and Bengio 2010, eq. 16); 0 for a weight without elements.

    Raises:
        UsageError: a fan is not a whole number of at least 0.
    """
    fans = whole("fan_in", fan_in, 0, _LONGEST) + whole("fan_out", fan_out, 0, _LONGEST)
    bound = math.sqrt(6.0 / fans) if fans else 0.0
    return Uniform(-bound, bound)
