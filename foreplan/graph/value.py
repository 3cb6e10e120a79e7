"""Values: tensors in SSA form, every shape static."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from foreplan.graph.init import Initializer
from foreplan.graph.types import DType, Shape, TensorType


class Kind(StrEnum):
    """What a value is to the person who made the model."""

    INPUT = "input"  # given anew each step
    PARAMETER = "parameter"  # trained
    FROZEN = "frozen"  # a weight that training leaves as it is
    BUFFER = "buffer"  # kept by the model but not trained: running statistics
    STATE = "state"  # kept by the training step: momentum, step count, random seed
    ACCUMULATOR = "accumulator"  # a sum over the micro-batches of a step: zero before its first and after its last
    CONSTANT = "constant"  # never changes
    ACTIVATION = "activation"  # computed in the forward pass
    GRADIENT = "gradient"  # computed in the backward pass

    @property
    def is_stored(self) -> bool:
        """Whether a value of this kind keeps its bytes from one step to the next."""
        return self in _STORED

    @property
    def is_kept(self) -> bool:
        """Whether such a value is in every checkpoint: it is the model's own, or what training has come to."""
        return self in _KEPT

    @property
    def is_fixed(self) -> bool:
        """Whether no step changes a stored value of this kind."""
        return self in (Kind.CONSTANT, Kind.FROZEN)


_KEPT = frozenset({Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER, Kind.STATE})
_STORED = _KEPT | {Kind.ACCUMULATOR, Kind.CONSTANT}


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One tensor in SSA form, known by identity; `name` is unique within its graph.

    Attributes:
        init: the first content of a stored value; the default of an input that may be left out.
        why: for people, why a weight is trained, or is not; empty where the model itself says so.
    """

    name: str
    type: TensorType
    kind: Kind = Kind.ACTIVATION
    init: Initializer | None = None
    why: str = ""

    @property
    def shape(self) -> Shape:
        """Extent along each axis."""
        return self.type.shape

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.type.dtype

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"
