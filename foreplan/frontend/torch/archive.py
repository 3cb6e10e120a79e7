"""Files of `torch.export.save`: what in one could run is refused, and PyTorch reads the rest."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import ModelError, UnsupportedError
from foreplan.frontend.onnx.foreign import told_by_bytes
from foreplan.frontend.torch.exporting import cause, torch_here

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_AGAIN = "export the module again, and write it with torch.export.save(program, 'model.pt2')"
# What a graph calls. PyTorch's reader takes any name in torch, math or operator for a function.
_CALLED = re.compile(r"torch\.ops(\.\w+){2,3}|_operator\.getitem")
_NAMED = re.compile(r"[\w.]*", re.ASCII)  # PyTorch's reader writes names into Python code, and compiles it
# Keys of PyTorch's trees that make their reader import a module, and of objects that are no tensors.
_REFUSED = ("__enum__", "default_factory_module", "as_custom_obj")
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # by which PyTorch's reader leaves pickles of code alone


def read_program(path: Path) -> torch.export.ExportedProgram:
    """The program in a file of `torch.export.save`.

    What it calls, its names, shapes and trees are looked at before PyTorch reads the file, so that nothing in it runs:
    PyTorch's reader evaluates expressions of shapes, writes names into code, imports modules that trees name, reads
    pickles, and loads compiled models.

    Raises:
        ModelError: the file cannot be read, or is another one, damaged, of another version, or holds what could run.
        UnsupportedError: the program has axes without a fixed extent.
    """
    torch = torch_here()
    try:
        with open(path, "rb") as file:
            begins = file.read(4)
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    if begins != b"PK\3\4":
        raise ModelError(
            f"{str(path)!r} is no exported program, but {told_by_bytes(path) or f'damaged, or another file; {_AGAIN}'}"
        )
    documents = _checked(path)
    written = documents["models/model.json"].get("torch_version", "of an unknown version")
    try:
        with _weights_only(), _quietly():
            program: Any = torch.export.load(str(path))
    except Exception as error:  # another project's code may raise anything
        raise ModelError(
            f"PyTorch {torch.__version__} cannot load {str(path)!r}, which PyTorch {written} wrote: {cause(error)}; "
            "if it has types or operators of another package, import that in Python, and give the program to "
            f"foreplan.from_torch; or {_AGAIN}"
        ) from error
    for name, fixed in _fixed(documents.get("data/weights/model_weights_config.json")):
        if fixed and isinstance(program.state_dict.get(name), torch.nn.Parameter):
            program.state_dict[name].requires_grad_(False)  # as the file has it, which PyTorch 2.9 forgets
    return program


def _fixed(document: Any) -> Iterator[tuple[str, bool]]:
    """Whether each weight of a file is one that is not trained."""
    config = document.get("config") if isinstance(document, dict) else None
    for name, entry in config.items() if isinstance(config, dict) else ():
        meta = entry.get("tensor_meta") if isinstance(entry, dict) else None
        yield name, isinstance(meta, dict) and meta.get("requires_grad") is False


def _checked(path: Path) -> dict[str, Any]:
    """The documents of a file, looked at by PyTorch's own reader of archives, which sees what the program's will."""
    import torch

    shown = repr(str(path))
    try:
        archive = torch._C.PyTorchFileReader(str(path))
        names = archive.get_all_records()
        with zipfile.ZipFile(path) as members:
            packed = sum(each.file_size for each in members.infolist()) > os.path.getsize(path)
        read = [] if packed else [name for name in names if name.endswith(".json")]
        documents = {name: json.loads(archive.get_record(name)) for name in read}
    except Exception as error:  # whatever PyTorch, zipfile and json raise at bytes that they did not write
        if told := _told(path):
            raise ModelError(f"{shown} is no exported program, but {told}") from None
        raise ModelError(f"{shown} is a damaged archive ({cause(error)}); {_AGAIN}") from None
    _check_kind(path, names)
    if packed:
        raise ModelError(f"{shown} holds more than its own bytes: no file of torch.export.save does; {_AGAIN}")
    for document in documents.values():
        _check_parts(shown, document)
    return documents


def _check_kind(path: Path, names: list[str]) -> None:
    """Whether the records are those of one program."""
    shown = repr(str(path))
    if any(name.startswith("data/aotinductor/") for name in names):
        raise ModelError(
            f"{shown} is a package of AOTInductor: compiled code of a model, which cannot be trained; give the program "
            "that it was made of, written with torch.export.save(program, 'model.pt2')"
        )
    if "models/model.json" not in names:
        if told := _told(path):
            raise ModelError(f"{shown} is no exported program, but {told}")
        models = [name for name in names if name.startswith("models/")]
        raise ModelError(
            f"{shown} holds {len(models)} programs, and none that torch.export.save writes; {_AGAIN}"
            if models
            else f"{shown} is an archive of PyTorch without a program; {_AGAIN}"
        )
    pickles = [name for name in names if re.search(r"/(custom|opaque)_obj_|/(weights|constants)/[^/]*\.pt$", name)]
    if pickles:
        raise ModelError(
            f"{shown} has the pickle {pickles[0]!r}, which runs code when it is read: it is of an old PyTorch, or has "
            "objects that are no tensors. Load it in Python if you trust it (torch.export.load), and give the program "
            "to foreplan.from_torch"
        )


def _told(path: Path) -> str:
    """What another file is; empty for one that looks like a program, or like nothing that is known."""
    told = told_by_bytes(path)
    return "" if "exported program" in told else told


def _check_parts(shown: str, document: Any) -> None:
    """Refuse a program of which PyTorch's reader would run something."""
    pending: list[tuple[Any, int]] = [(document, 0)]
    while pending:
        part, inside = pending.pop()
        if isinstance(part, list):
            pending += [(each, inside) for each in part]
        elif isinstance(part, str) and part[:1] in ("{", "[", '"') and inside < 8:  # trees are JSON within JSON
            with contextlib.suppress(ValueError, RecursionError):
                pending.append((json.loads(part), inside + 1))
        elif isinstance(part, dict):
            if "expr_str" in part:
                raise UnsupportedError(
                    f"{shown} has axes without a fixed extent, and a plan is for one shape: export the module without "
                    "dynamic_shapes, on an example of the shapes of a step"
                )
            refused = _refused(part, inside)
            if refused is not None:
                raise ModelError(
                    f"{shown} is refused: it has {refused[:80]!r}, by which reading it could run code. Load it in "
                    "Python if you trust it (torch.export.load), and give the program to foreplan.from_torch"
                )
            pending += [(each, inside) for each in part.values()]


def _refused(part: dict[str, Any], inside: int) -> str | None:
    """What of one object of a file could run, or is no program's; inside: of how many texts the object is a part."""
    called = [part.get("target") if "inputs" in part else None, part.get("as_operator")]
    named = [] if inside else [part.get("name"), part.get("as_name")]
    found = [
        *(str(each) for each in called if each is not None and not _CALLED.fullmatch(str(each))),
        *(str(each) for each in named if each is not None and not _NAMED.fullmatch(str(each))),
        *(key for key in _REFUSED if key in part),
        *(["use_pickle"] if part.get("use_pickle") else []),
    ]
    return found[0] if found else None


@contextlib.contextmanager
def _weights_only() -> Iterator[None]:
    """While the body runs, `torch.load` reads tensors and plain data alone, whatever it is asked for."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without what PyTorch writes to standard error of a file that it cannot read: the error says it."""
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
