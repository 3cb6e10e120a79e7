"""What a loss is: its further inputs, and the scalar that training minimises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from foreplan.base.units import listed
from foreplan.frontend.tracing.tensor import Tensor
from foreplan.frontend.tracing.tracer import fail
from foreplan.graph import TensorType


class Loss:
    """A loss that knows which inputs it needs beside the model's outputs.

    Called in a traced function with outputs and inputs, it gives a scalar tensor.

    Attributes:
        name: as people write it.
        reads: how many of the model's outputs it reads.
        further: names of its further inputs.
    """

    name: ClassVar[str]
    reads: ClassVar[int] = 1
    further: ClassVar[tuple[str, ...]] = ("target",)

    def inputs(self, *outputs: TensorType) -> dict[str, TensorType]:
        """The further inputs, by name, for outputs of these types."""
        return {}

    def __call__(self, *tensors: Tensor, **inputs: Tensor) -> Tensor:
        """The scalar."""
        raise NotImplementedError

    def arguments(self, tensors: Sequence[Tensor], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Outputs and then further inputs, which may be given by name.

        Raises:
            TraceError: there are too few or too many.
        """
        by_place = self.further[: max(0, len(tensors) - self.reads)]
        named = [name for name in self.further if name not in by_place]
        if len(tensors) - len(by_place) != self.reads or set(inputs) != set(named):
            outputs = "an output" if self.reads == 1 else f"{self.reads} outputs"
            wanted = listed([outputs, *(f"a {name}" for name in self.further)], 5)
            raise fail(f"losses.{self.name} takes {wanted}, and got {len(tensors) + len(inputs)} tensors")
        return [*tensors, *(inputs[name] for name in named)]
