"""The trace in progress: the graph being built, the current line of the user's code, and the names of parameters."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

import foreplan.version
from foreplan.base.errors import ShapeError, TraceError
from foreplan.graph import Array, Builder, Graph, GraphBuilder, Initializer, TensorType, Value, as_dtype
from foreplan.graph.value import Kind

_CURRENT: ContextVar[Tracer | None] = ContextVar("foreplan_tracer", default=None)

_FOREPLAN, _NUMPY = (os.path.dirname(str(module.__file__)) + os.sep for module in (foreplan.version, np))
_MODELS_OWN = (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)
_MODELS = os.path.join(_FOREPLAN, "models") + os.sep


def _is_traced(path: str) -> bool:
    """Whether a file holds traced code: neither foreplan's nor NumPy's own, except foreplan's models."""
    return path.startswith(_MODELS) or not path.startswith((_FOREPLAN, _NUMPY))


def caller() -> str:
    """`file.py:line` of the innermost frame that is traced."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_traced(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _raised_at(error: BaseException) -> str:
    """`file.py:line` of the innermost traced frame that an error passed through."""
    found, entry = "", error.__traceback__
    while entry is not None:
        path = entry.tb_frame.f_code.co_filename
        if _is_traced(path):
            found = f"{os.path.basename(path)}:{entry.tb_lineno}"
        entry = entry.tb_next
    return found


def fail(message: str) -> TraceError:
    """An error to raise, with the user's line before the message."""
    return TraceError(f"{caller()}: {message}")


class Tracer:
    """One graph being built by running Python code.

    Attributes:
        parameters: results of `nn.parameter` and `nn.buffer`, and weights of graphs that were called, by full name.
        updates: of graphs that were called: stored value → its content for the next step, such as a random state.
        swapped: value → the value that it is with its last two axes exchanged, so that products can say "transposed".
    """

    def __init__(self, name: str, base: Graph | None = None) -> None:
        self._builder = GraphBuilder(name, base)
        self._path: list[str] = []
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], Value] = {}
        self._finished = False
        stored = [] if base is None else [value for value in base.stored if value.kind in _MODELS_OWN]
        self.parameters: dict[str, Value] = {value.name: value for value in stored}
        self._adopted: dict[tuple[Value, str], Value] = {(value, value.name): value for value in stored}
        self.swapped: dict[Value, Value] = {}
        self.updates: dict[Value, Value] = {}

    def at(self) -> Builder:
        """The builder, with new nodes attributed to the user's current line.

        Raises:
            TraceError: the trace is over.
        """
        if self._finished:
            raise fail(f"the trace of {self._builder.name!r} is over; its tensors cannot be used outside the function")
        self._builder.source = caller()
        return self._builder

    @contextmanager
    def active(self) -> Iterator[GraphBuilder]:
        """While the body runs, this is the trace that functions build in.

        Raises:
            ShapeError: errors of the body, with the user's line added if it is missing.
        """
        token = _CURRENT.set(self)
        try:
            yield self._builder
        except ShapeError as error:
            source = _raised_at(error)
            if source in str(error):
                raise
            raise ShapeError(f"{source}: {error}") from None
        finally:
            _CURRENT.reset(token)
            self._finished = True

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """While the body runs, names of parameters and nodes begin with `name`."""
        before = self._builder.scope
        self._path.append(name)
        self._builder.scope = ".".join(self._path) + "/"
        try:
            yield
        finally:
            self._path.pop()
            self._builder.scope = before

    def full_name(self, name: str) -> str:
        """A name behind the names of its scopes: `layer1.0.conv1.weight`."""
        return ".".join([*self._path, name])

    def numbered_name(self, kind: str) -> str:
        """A name for a layer without a given name: `linear0`, `linear1`, … within its scope."""
        full = self.full_name(kind)
        number = self._counts.get(full, 0)
        self._counts[full] = number + 1
        return f"{kind}{number}"

    def store(self, name: str, type: TensorType, kind: Kind, init: Initializer) -> Value:
        """A parameter or buffer under its full name.

        Raises:
            TraceError: the name is taken.
        """
        full = self.full_name(name)
        if full in self.parameters:
            raise fail(
                f"there is already a parameter {full!r}; give the layer another name or put it into a "
                f"nn.scope, or reuse the parameter with nn.shared({full!r})"
            )
        value = self.parameters[full] = self.at().store(full, type, kind, init)
        return value

    def adopt(self, value: Value) -> Value:
        """A stored value of a graph that is called, under its full name; the same one under the same name again.

        Raises:
            TraceError: another parameter has that name.
        """
        full = self.full_name(value.name)
        if (value, full) not in self._adopted:
            own = value.kind in _MODELS_OWN
            if own and full in self.parameters:
                raise fail(
                    f"there is already a parameter {full!r}, and the graph that is called has another one; call it "
                    "with a name of its own, such as graph(x, name='teacher')"
                )
            adopted = self._adopted[value, full] = self.at().adopt(value, full)
            if own:
                self.parameters[full] = adopted
        return self._adopted[value, full]

    def constant(self, array: np.ndarray) -> Value:
        """An array as a constant of the graph; equal arrays are stored once."""
        dense = np.ascontiguousarray(array).reshape(array.shape)
        key = (dense.dtype.name, dense.shape, hashlib.blake2b(dense.tobytes(), digest_size=16).digest())
        if key not in self._constants:
            type = TensorType(as_dtype(dense.dtype), dense.shape)
            name = self._builder.scope.replace("/", ".") + "constant"
            self._constants[key] = self.at().store(name, type, Kind.CONSTANT, Array(dense.copy()))
        return self._constants[key]


def current() -> Tracer:
    """The trace in progress.

    Raises:
        TraceError: nothing is being traced.
    """
    tracer = _CURRENT.get()
    if tracer is None:
        raise fail("nothing is being traced here; call this inside a function that is given to foreplan.trace")
    return tracer
