"""The table of translations: foreplan's op → standard ONNX nodes. `foreplan.export.ops` fills it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from foreplan.graph import Op, TensorType

Types = Sequence[TensorType]
# (emitter, op, names of the inputs, their types) → names of the outputs.
Translation = Callable[[Any, Any, list[str], list[TensorType]], list[str]]
Applies = Callable[[Any, Types], bool]
_Translation = TypeVar("_Translation", bound=Translation)

_TRANSLATIONS: dict[type[Op], tuple[Translation, Applies]] = {}


def _always(op: Op, types: Types) -> bool:
    return True


def writes(*classes: type[Op], where: Applies = _always) -> Callable[[_Translation], _Translation]:
    """Make a translation of these ops known.

    Args:
        where: the uses of the op that it serves; others are decomposed first.
    """

    def known(translation: _Translation) -> _Translation:
        for cls in classes:
            assert cls not in _TRANSLATIONS, f"two translations of {cls.name}"
            _TRANSLATIONS[cls] = translation, where
        return translation

    return known


def translation_of(op: Op, types: Types) -> Translation | None:
    """How an op of inputs of these types is written; None: not by itself."""
    translation, applies = _TRANSLATIONS.get(type(op), (None, _always))
    return translation if applies(op, types) else None
