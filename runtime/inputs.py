"""A step's inputs: checked by name, shape, type and range before a byte is written; or made up for timing."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from foreplan.base.errors import InputError
from foreplan.graph import DType
from foreplan.graph.init import generator_for
from foreplan.lower.program import Program, Slot

_FEW = 64  # so few numbers are checked faster by Python than by NumPy


def check_inputs(
    slots: Mapping[str, Slot], given: Mapping[str, Any], micro_batches: int | None = None
) -> dict[str, np.ndarray]:
    """The given arrays by name, each one as an input slot takes it.

    Args:
        slots: the inputs, by name.
        given: arrays by name.
        micro_batches: extent of a further leading axis that every input without a default has; None: there is none.

    Raises:
        InputError: a name is unknown or missing, or an array has the wrong shape, type or values.
    """
    if type(given) is not dict and not isinstance(given, Mapping):
        example = f"{{{next(iter(slots), 'x')!r}: array}}"
        raise InputError(f"a step takes arrays by name, such as {example}, and got {type(given).__name__}")
    if not given.keys() <= slots.keys():
        unknown = [name for name in given if name not in slots]
        close = difflib.get_close_matches(str(unknown[0]), slots, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise InputError(f"there is no input {unknown[0]!r}{hint} The inputs are {', '.join(slots) or 'none'}.")
    if missing := [name for name, slot in slots.items() if slot.init is None and name not in given]:
        raise InputError(f"the input {missing[0]!r} ({slots[missing[0]].operand.type}) is missing")
    return {
        name: check_array(slot := slots[name], array, micro_batches if slot.init is None else None)
        for name, array in given.items()
    }


def smaller(program: Program, given: Any) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a batch that has fewer samples than a program takes, by name; None: it has as many, or is none."""
    if not isinstance(given, Mapping):
        return None
    shapes: dict[str, tuple[int, ...]] = {}
    shares = set[Fraction]()
    for slot in program.required_inputs:
        want = slot.operand.type.shape
        try:
            shape = shape_of(slot.name, given[slot.name])
        except (KeyError, InputError):
            return None
        changed = [(a, b) for a, b in zip(shape, want) if a != b]
        if len(shape) != len(want) or len(changed) > 1 or any(not 0 < a < b for a, b in changed):
            return None
        shares.update(Fraction(a, b) for a, b in changed)
        shapes[slot.name] = shape
    return shapes if len(shares) == 1 else None


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    """The shape of what was given as an array.

    Raises:
        InputError: it is none.
    """
    try:
        return tuple(int(extent) for extent in (array.shape if hasattr(array, "shape") else np.shape(array)))
    except Exception as error:  # another library's array may raise anything
        raise InputError(f"{name!r} cannot be made an array: {error}") from None


def micro_batch(slots: Mapping[str, Slot], arrays: Mapping[str, np.ndarray], index: int) -> dict[str, np.ndarray]:
    """The inputs of one micro-batch: slices of inputs with a leading axis for them, the others as they are."""
    return {name: array[index] if slots[name].init is None else array for name, array in arrays.items()}


def made_up(program: Program, seed: int = 0, accumulate: int = 1) -> dict[str, np.ndarray]:
    """Inputs for timing, of all micro-batches of a step: normal floats, integers in the range that the model takes."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for slot in program.required_inputs:
        want = slot.operand.type
        shape = want.shape if accumulate == 1 else (accumulate, *want.shape)
        if want.dtype.is_float:
            arrays[slot.name] = rng.standard_normal(shape, dtype=np.float32).astype(want.dtype.numpy)
        else:
            low, high = (0, 1) if slot.valid is None else (max(0, slot.valid[0]), slot.valid[1])
            arrays[slot.name] = rng.integers(low, high, shape, endpoint=True).astype(want.dtype.numpy)
    return arrays


def check_array(slot: Slot, given: Any, micro_batches: int | None = None) -> np.ndarray:
    """One array as its slot takes it, with a further leading axis where there are micro-batches.

    Raises:
        InputError: wrong shape, a type that does not convert safely, or a value out of range.
    """
    want = slot.operand.type.shape
    array = given if type(given) is np.ndarray else _array(slot.name, given)
    if micro_batches is not None:
        want = (micro_batches, *want)
    if array.shape != want:
        has, of = array.shape, "" if micro_batches is None else f", {micro_batches} micro-batches,"
        hint = f": write .reshape({', '.join(map(str, want))})" if of and array.size == math.prod(want) else ""
        if of and not hint and array.ndim == len(want) and all(a <= b for a, b in zip(array.shape, want)):
            hint = ": with micro-batches, leave a smaller batch out, or fill it up with other samples"
        raise InputError(f"{slot.name!r} must have the shape {list(want)}{of or ','} and has {list(has)}{hint}")
    check_elements(slot, array)
    if slot.init is not None and slot.is_rate and (array.dtype.kind == "b" or not 0.0 <= array < math.inf):
        raise InputError(f"{slot.name!r} must be a number of 0 or more, and is {array}")
    return array


def _array(name: str, given: Any) -> np.ndarray:
    """Any object as an array, by NumPy or by DLPack.

    Raises:
        InputError: it is no array, or some elements are masked: the mask would be lost.
    """
    for part in given if isinstance(given, list | tuple) else (given,):
        if isinstance(part, np.ma.MaskedArray) and (count := np.ma.count_masked(part)):
            raise InputError(
                f"{name!r} has {count} masked elements, but a step ignores masks: write .filled(value), or give the "
                "mask as an input of the model"
            )
    try:
        array = np.from_dlpack(given) if _is_dlpack_alone(given) else np.asarray(given)
    except MemoryError:
        raise
    except Exception as error:  # another library's array may raise anything
        raise InputError(f"{name!r} cannot be made an array: {error}") from None
    if array.dtype == object and not array.ndim:
        if given is None:
            raise InputError(f"{name!r} must be an array and is None")
        how = next((f": write .{how}()" for how in ("toarray", "todense") if hasattr(given, how)), "")
        raise InputError(f"{name!r} is a {type(given).__name__}, not an array{how}")
    return array


def _is_dlpack_alone(given: Any) -> bool:
    """Whether it has DLPack's protocol and none of NumPy's."""
    own = ("__array__", "__array_interface__", "__array_struct__")
    return hasattr(given, "__dlpack__") and not any(hasattr(given, name) for name in own)


def check_elements(slot: Slot, array: np.ndarray) -> None:
    """Check an array's elements, whatever its shape, against its slot.

    Raises:
        InputError: a type that does not convert safely, or a value out of range.
    """
    want = slot.operand.type
    target = want.dtype.numpy
    if array.dtype != target:
        if array.dtype.names:
            fields, one = ", ".join(array.dtype.names), [array.dtype.names[0]]
            raise InputError(f"{slot.name!r} has fields ({fields}): give one of them, such as {one}")
        if array.dtype.kind not in "biuf" or not (
            np.can_cast(array.dtype, target, "same_kind") or (array.dtype.kind in "iu" and target.kind in "iu")
        ):
            raise InputError(
                f"{slot.name!r} must be {want.dtype}, and is {array.dtype}: convert it, .astype({str(want.dtype)!r})"
            )
        if target.kind in "iu" and array.size:
            info = np.iinfo(target)
            _check_range(slot.name, array, (int(info.min), int(info.max)), f"{want.dtype} holds")
        if want.dtype.is_float and array.size:
            _check_magnitude(slot.name, array, want.dtype)
    if slot.valid is not None and array.size:
        _check_range(slot.name, array, slot.valid, "the model takes")


def _check_magnitude(name: str, array: np.ndarray, dtype: DType) -> None:
    """Refuse finite numbers that would become infinite in a narrower type."""
    largest = dtype.largest
    if array.size <= _FEW:
        numbers = array.reshape(-1).tolist()
        held = all(-largest <= number <= largest for number in numbers)
    else:
        held = -largest <= float(array.min()) and float(array.max()) <= largest
    if held:
        return
    lost = dtype.overflows(array)  # the others may be infinite, no number, or round to the largest
    if lost.any():
        index = np.unravel_index(int(np.argmax(lost)), array.shape)
        at = f" at {[int(i) for i in index]}" if index else ""
        raise InputError(
            f"{name!r} holds {array[index]}{at}, and the largest number of {dtype} is {largest:.6g}: scale it, or "
            "give np.inf where infinity is meant"
        )


def _check_range(name: str, array: np.ndarray, valid: tuple[int, ...], what: str) -> None:
    low, high, *others = valid
    if array.size <= _FEW:  # every step comes here, and small ones should be fast
        numbers = array.reshape(-1).tolist()
        if low <= min(numbers) and max(numbers) <= high:
            return
    elif low <= array.min() and array.max() <= high:
        return
    wrong = (array < low) | (array > high)
    for other in others:
        wrong &= array != other
    if wrong.any():
        index = np.unravel_index(int(np.argmax(wrong)), array.shape)
        at = f" at {[int(i) for i in index]}" if index else ""
        also = "".join(f" or {other}" for other in others)
        raise InputError(f"{name!r} holds {array[index]}{at}, and {what} {low} to {high}{also}")


def empty(slot: Slot, leading: tuple[int, ...]) -> np.ndarray:
    """An array for a slot's content, with further axes before its own."""
    return np.empty((*leading, *slot.operand.type.shape), slot.operand.type.dtype.numpy)


def default_of(slot: Slot) -> np.ndarray:
    """The value of an input that is not given."""
    array = np.empty(slot.operand.type.shape, slot.operand.type.dtype.numpy)
    assert slot.init is not None
    slot.init.fill(array, generator_for(0, slot.name))
    return array
