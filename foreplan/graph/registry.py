"""The ops by name, and ops read from text."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from foreplan.base.errors import ModelError
from foreplan.graph.literal import check_arguments, literal_call
from foreplan.graph.op import Op

_REGISTRY: dict[str, type[Op]] = {}
OpClass = TypeVar("OpClass", bound=type[Op])


def register(cls: OpClass) -> OpClass:
    """Make an op known by its name, for reading graphs and plans back from text."""
    if cls.name in _REGISTRY:
        raise ValueError(f"two ops are named {cls.name!r}")
    _REGISTRY[cls.name] = cls
    return cls


def registered_ops() -> dict[str, type[Op]]:
    """Every op by name, in the order of declaration."""
    return dict(_REGISTRY)


def op_named(name: str, **attributes: Any) -> Op:
    """The op of that name with these attributes.

    Raises:
        ModelError: no such op, or it has no such attribute, or one of another type.
    """
    if name not in _REGISTRY:
        raise ModelError(f"there is no op {name!r}")
    cls = _REGISTRY[name]
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(set(attributes) - known):
        raise ModelError(f"the op {name} has no attribute {unknown[0]!r}; it has {', '.join(sorted(known)) or 'none'}")
    try:
        check_arguments(cls, attributes)
        return cls(**attributes)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the op {name} cannot be made with {attributes}: {error}") from None


def parse_op(text: str) -> Op:
    """The op written as `op_text` writes it; attributes are literals, nothing is evaluated.

    Raises:
        ModelError: the text is no op.
    """
    try:
        call = literal_call(text)
        if call.arguments:
            raise ValueError("its attributes have no names")
    except ValueError as error:
        raise ModelError(f"{text!r:.200} is not an op: {error}") from None
    return op_named(call.name, **call.keywords)
