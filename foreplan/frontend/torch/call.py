"""One call of an ATen op, as its handler sees it: the tensors it reads, and what PyTorch says that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.torch.lines import Lines
from foreplan.frontend.tracing.elementwise import convert
from foreplan.frontend.tracing.tensor import Tensor, as_tensor
from foreplan.graph import Builder, DType, Value, as_dtype
from foreplan.ops.random import Random


def dtype_of(torch_dtype: Any, name: str = "") -> DType:
    """foreplan's element type for PyTorch's.

    Args:
        name: of what has it, as an error says it.

    Raises:
        UnsupportedError: it is complex.
    """
    if torch_dtype.is_complex:
        which = name and f"{name!r}: "
        raise UnsupportedError(
            f"{which}a {torch_dtype} tensor that is given, kept or returned: a graph holds real numbers; "
            "keep torch.view_as_real(z) [..., 2], and take torch.view_as_complex of it where it is used"
        )
    return as_dtype(str(torch_dtype).removeprefix("torch."))


class Source(Protocol):
    """What a program reads from beside its inputs."""

    tracer: Lines

    def is_stored(self, tensor: Any) -> bool:
        """Whether a known tensor is kept under a name of its own: a parameter, or a buffer that lasts, of floats."""

    def fold(self, tensor: Any) -> None:
        """A known tensor is computed with while importing."""

    def stored_tensor(self, tensor: Any) -> Tensor | None:
        """A parameter or lasting buffer of floats as a tensor of the graph; None for any other tensor."""

    def random_stream(self) -> tuple[Value, int]:
        """The state that all draws read, and a number that no other draw has."""


@dataclass(frozen=True)
class Call:
    """One op at one place of a program.

    Attributes:
        reader: of the program.
        name: of the op, such as `add_`.
        result: what PyTorch says of the result: a tensor without content, or a list of them.
        training: whether the program is that of training mode.
        written: what the handler gives arguments, by place, as their new content, besides what the op's name says.
    """

    reader: Source
    name: str
    result: Any
    training: bool
    written: dict[int, Any] = field(default_factory=dict)

    @property
    def b(self) -> Builder:
        """Where nodes are added."""
        return self.reader.tracer.at()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the only result."""
        return tuple(self.result.shape)

    @property
    def dtype(self) -> DType:
        """Of the only result."""
        return dtype_of(self.result.dtype)

    def wrap(self, value: Value) -> Tensor:
        """A value as handlers see it."""
        return Tensor(self.reader.tracer, value)

    def tensor(self, x: Any, dtype: DType | None = None) -> Tensor:
        """A tensor, array or number as a tensor, of an element type if one is given."""
        if isinstance(x, bool | int | float):
            x = np.asarray(x, None if dtype is None else dtype.numpy)
        found = as_tensor(x, as_dtype(x.dtype) if isinstance(x, np.ndarray) else dtype)
        return found if dtype is None else convert(found, dtype)

    def value(self, x: Any, dtype: DType | None = None) -> Value:
        """The same as a value of the graph."""
        return self.tensor(x, dtype).value

    def values(self, *xs: Any, dtype: DType | None = None) -> list[Value | None]:
        """Several; None stays None."""
        return [None if x is None else self.value(x, dtype) for x in xs]

    def by_mode(self, inference: Tensor, training: Tensor) -> Tensor:
        """What inference gives, and what training does; in the program of inference, what is written for training."""
        return self.reader.tracer.by_mode(inference, training) if self.training else training

    def random(self, distribution: str, shape: Sequence[int], dtype: DType, **attributes: float) -> Tensor:
        """Numbers that every step draws anew."""
        state, stream = self.reader.random_stream()
        return self.wrap(self.b.apply(Random(distribution, tuple(shape), dtype, stream, **attributes), state))
