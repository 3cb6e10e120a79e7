"""What a traced function is given instead of an array: an element type and a static shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreplan.errors import ShapeError, UsageError
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
    extents = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    for extent in extents:
        if isinstance(extent, bool) or not isinstance(extent, int | np.integer) or extent < 0:
            raise UsageError(
                f"spec({shape!r}): {extent!r} is not an extent; shapes are static, write whole numbers such as (32, 10)"
            )
    try:
        return Spec(TensorType(as_dtype(dtype), tuple(int(extent) for extent in extents)))
    except (ShapeError, TypeError) as error:
        raise UsageError(f"spec({shape!r}, {dtype!r}): {error}") from None
