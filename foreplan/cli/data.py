"""Arrays for the commands that run a model: read from .npz files, and cut into batches."""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from foreplan.base.errors import InputError, UsageError
from foreplan.cli.array_file import ArrayFile, Header

if TYPE_CHECKING:
    import numpy as np

    from foreplan.lower.program import Program

Arrays = Mapping[str, "np.ndarray"]


def read_arrays(path: str) -> ArrayFile:
    """The arrays of an .npz file, by name; each is read when it is asked for. Nothing in the file is executed.

    Raises:
        UsageError: the file is not there, cannot be read, or is no .npz file of plain arrays.
    """
    try:
        with open(path, "rb") as file:
            if file.read(6) == b"\x93NUMPY":
                raise UsageError(f"{path!r} holds one array without a name: write it with numpy.savez(path, x=array)")
            return ArrayFile(path, file.seek(0, os.SEEK_END))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path!r}: {error.strerror or error}") from None
    except Exception as error:  # whatever zipfile, tokenize and NumPy raise at bytes that they did not write
        no_zip = "it holds pickled objects, or is no NumPy file at all"
        reason = no_zip if isinstance(error, zipfile.BadZipFile) else str(error) or type(error).__name__
        raise UsageError(
            f"{path!r} is not an .npz file of plain arrays ({reason}): write one with numpy.savez(path, x=array)"
        ) from None


def read_array(path: str) -> np.ndarray:
    """The array of an .npy file. Nothing in the file is executed.

    Raises:
        UsageError: the file is not there, cannot be read, or is no .npy file of a plain array.
    """
    import numpy as np

    try:
        with open(path, "rb") as file:
            Header.of(file, os.fstat(file.fileno()).st_size)
            file.seek(0)
            return np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"cannot read {path!r}: {error.strerror or error}") from None
    except Exception:  # whatever NumPy raises at bytes that it did not write
        raise UsageError(f"{path!r} is no .npy file of a plain array: write one with numpy.save(path, array)") from None


def write_arrays(path: str, arrays: Arrays) -> None:
    """Write an .npz file that `numpy.load` reads; deterministic bytes.

    Raises:
        ForeplanError: the file cannot be written; see `open_atomically`.
    """
    import numpy as np

    from foreplan.base.files import open_atomically

    with open_atomically(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            # The fixed date of ZipInfo keeps the file the same from run to run.
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)


def samples_in(program: Program, arrays: ArrayFile, path: str) -> tuple[int, int]:
    """How many samples a data file has and how many of them a step takes: leading axes of arrays and of inputs.

    Every sample is checked here, so that no wrong one stops a run that has come a long way.

    Raises:
        InputError: an array is missing, has other extents or elements than its input takes, or another number of
            samples.
    """
    from foreplan.graph import TensorType
    from foreplan.runtime.inputs import check_elements

    slots = program.required_inputs
    wanted = ", ".join(f"{slot.name}: {slot.operand.type}" for slot in slots)
    if missing := [slot.name for slot in slots if slot.name not in arrays]:
        raise InputError(f"{path!r} has no array {missing[0]!r}; a step takes {wanted}")
    if foreign := sorted(set(arrays) - {slot.name for slot in slots}):
        raise InputError(f"{path!r} has an array {foreign[0]!r} that no input takes; a step takes {wanted}")
    batches = {slot.operand.type.shape[:1] for slot in slots}
    if len(batches) != 1 or batches == {()}:
        raise InputError(f"the inputs have no common leading axis to cut samples along: {wanted}")
    counts: dict[str, int] = {}
    for slot in slots:
        shape, want = arrays.headers[slot.name].shape, slot.operand.type
        if len(shape) != want.rank or shape[1:] != want.shape[1:]:
            sample = TensorType(want.dtype, want.shape[1:])
            raise InputError(f"{path!r}: each sample of {slot.name!r} must be {sample}, and is {list(shape[1:])}")
        counts[slot.name] = shape[0]
    if len(set(counts.values())) != 1:
        raise InputError(f"{path!r}: the arrays have different numbers of samples: {counts}")
    if not all(counts.values()):
        raise InputError(f"{path!r} has no samples: its arrays are empty")
    for slot in slots:
        try:
            check_elements(slot, arrays[slot.name])
        except InputError as error:
            raise InputError(f"{path!r}: {error}") from None
    return next(iter(counts.values())), next(iter(batches))[0]


def epoch(
    program: Program,
    arrays: Arrays,
    samples: int,
    step: int,
    seed: int,
    number: int,
    accumulate: int = 1,
    place: tuple[int, int] = (0, 1),
) -> Iterator[Mapping[str, np.ndarray]]:
    """What each step of an epoch takes, in an order of samples that depends on the seed and the epoch's number alone; a
    rest that fills no step is left out of this epoch.

    Args:
        program: what takes them.
        arrays: all samples.
        samples: how many there are.
        step: how many a step takes, all micro-batches and ranks together.
        seed: of the order.
        number: of the epoch.
        accumulate: micro-batches of a step; more than 1 are cut along a further leading axis.
        place: this rank, and how many there are: each takes its share of every step.
    """
    import numpy as np

    order = np.random.default_rng([seed, number]).permutation(samples)
    names = [slot.name for slot in program.required_inputs]
    for start in range(0, samples - step + 1, step):
        # Sorted within the step, for reading in order: a batch is a set.
        rank, ranks = place
        chosen = np.sort(order[start : start + step])[rank * step // ranks : (rank + 1) * step // ranks]
        yield {name: arrays[name][chosen if accumulate == 1 else chosen.reshape(accumulate, -1)] for name in names}


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying in the middle of a step; the second one is not held back.

    Yields:
        A list that holds the number of the signal as soon as there was one.
    """
    import signal

    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def max_rss_bytes() -> int:
    """The most memory this process has had resident, in bytes (Linux counts in KiB)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
