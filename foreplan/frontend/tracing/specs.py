"""A traced function's argument instead of an array: an element type and a static shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.base.arguments import shown, whole
from foreplan.base.errors import ShapeError, UsageError
from foreplan.graph import DType, TensorType, as_dtype


@dataclass(frozen=True)
class Spec:
    """The type of one input; made by `spec`.

    Attributes:
        type: element type and shape.
    """

    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return self.type.shape

    @property
    def dtype(self) -> np.dtype:
        """Element type, as NumPy's."""
        return self.type.dtype.numpy

    def __str__(self) -> str:
        return str(self.type)


def spec(shape: int | Sequence[int], dtype: DType | str | np.dtype | type = "float32") -> Spec:
    """The type of an input: `spec((32, 10))`, `spec(32, "int64")`.

    Args:
        shape: extents, none negative; one number is one axis, `()` a scalar.
        dtype: an element type or its name.

    Raises:
        UsageError: an extent is not a whole number, or foreplan has no such element type.
    """
    try:
        extents = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        return Spec(TensorType(as_dtype(dtype), tuple(whole("an extent", extent, 0) for extent in extents)))
    except (UsageError, ShapeError, TypeError, ValueError, SyntaxError) as error:
        raise UsageError(
            f"spec({shown(shape)}, {shown(dtype)}): {error}; shapes are static, write whole numbers such as (32, 10)"
        ) from None
