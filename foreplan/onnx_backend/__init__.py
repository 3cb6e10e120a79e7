"""foreplan as a backend of the onnx package: `prepare(model).run(inputs)`.

    from foreplan.onnx_backend import Backend

    outputs = Backend.prepare(onnx.load("model.onnx"), "CPU").run([x])

A model is compiled at its first run, when the shapes of its inputs are known. Inputs that decide shapes, such as axes
or a number of steps given as data, are bound by value: other values compile the model again.

Source: `onnx.backend.base` of the onnx package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend as Base
from onnx.backend.base import BackendRep, namedtupledict

from foreplan.base.errors import ForeplanError, InputError, ShapeError, UnsupportedError, UsageError, ValueNeededError
from foreplan.compiler.api import compile
from foreplan.frontend.onnx.load import NEWEST_OPSET, load_model
from foreplan.frontend.onnx.model import import_model
from foreplan.frontend.onnx.shapes import user_inputs
from foreplan.graph import Graph
from foreplan.lower.targets import target_named
from foreplan.runtime.session import Session

DEVICES = {"CPU": "cpu", "CUDA": "cuda"}  # ONNX's names of devices → targets
FEW = 64  # floats
Arrays = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]


class Prepared(BackendRep):
    """A model that runs on arrays.

    Attributes:
        target: what it is compiled for.
        bound: the values of the inputs that the last run has bound when it compiled.
    """

    def __init__(self, model: onnx.ModelProto, target: str) -> None:
        self.target = target
        self.bound: Arrays = {}
        self._model = model
        infos = user_inputs(model.graph)
        self._inputs = [info.name for info in infos]
        self._optional = {info.name for info in infos if info.type.HasField("optional_type")}
        self._outputs = [info.name for info in model.graph.output]
        self._session: Session | None = None
        self._shapes: Shapes = {}
        self._imported: Graph | None = None
        with contextlib.suppress(ShapeError, ValueNeededError):  # what a run gives may decide
            self._imported = import_model(load_model(model), None)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One run.

        Args:
            inputs: arrays in the order of the model's inputs, or by name, or the only one.
            kwargs: none.

        Returns:
            A named tuple of the model's outputs, in its order.

        Raises:
            UsageError: there are more inputs than the model has, or unknown options.
            InputError: an input is missing.
            UnsupportedError: an optional input is missing.
            ForeplanError: the model cannot be compiled for these inputs; says what and where.
        """
        if kwargs:
            raise UsageError(f"run has no option {next(iter(kwargs))!r}")
        given = self._named(inputs)
        shapes = {name: array.shape for name, array in given.items()}
        same = all(np.array_equal(given[name], array) for name, array in self.bound.items())
        if self._session is None or shapes != self._shapes or not same:
            self._session = None
            self._session, self._shapes = compile(self._graph(given, shapes), target=self.target).bind(), shapes
        found = self._session.step({name: array for name, array in given.items() if name not in self.bound}).outputs
        return namedtupledict("Outputs", self._outputs)(*(found[name] for name in self._outputs))

    def _named(self, inputs: Any) -> Arrays:
        if isinstance(inputs, Mapping):
            found = {str(name): np.asarray(array) for name, array in inputs.items()}
        else:
            listed = inputs if isinstance(inputs, Sequence) else [inputs]
            if len(listed) > len(self._inputs):
                raise UsageError(f"the model has {len(self._inputs)} inputs, and {len(listed)} are given")
            found = {name: np.asarray(array) for name, array in zip(self._inputs, listed)}
        missing = [name for name in self._inputs if name not in found]
        if empty := [name for name in missing if name in self._optional]:
            raise UnsupportedError(f"input {empty[0]!r} is an empty optional; export the model without that input")
        if missing:
            raise InputError(f"the input {missing[0]!r} is missing; the model takes {', '.join(self._inputs)}")
        return found

    def _graph(self, given: Arrays, shapes: Shapes) -> Graph:
        """The model for inputs of these shapes; those that its shapes depend on are bound by value."""
        self.bound = {}
        if self._imported is not None and shapes == {value.name: value.shape for value in self._imported.inputs}:
            return self._imported
        while True:
            try:
                return import_model(load_model(self._model), shapes, None, self.bound)
            except ValueNeededError as error:
                if not error.inputs or not all(_may_decide(given[name]) for name in error.inputs):
                    raise
                self.bound |= {name: given[name] for name in error.inputs}


def _may_decide(array: np.ndarray) -> bool:
    """Whether an input may decide shapes: integers and truth values do, and a few floats, such as a Resize's scales."""
    return array.dtype.kind in "iub" or array.size <= FEW


class Backend(Base):
    """foreplan as onnx's backend interface has it; devices are CPU, CUDA and foreplan's targets."""

    @classmethod
    def is_compatible(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether the model can be prepared; one whose shapes depend on inputs may still be refused by a run."""
        try:
            cls.prepare(model, device, **kwargs)
        except (ForeplanError, onnx.checker.ValidationError):
            return False
        return True

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        """A model for runs on one device. It is imported, to tell at once what is not supported.

        Raises:
            UsageError: there is no such device, or an option is unknown.
            ForeplanError: the model cannot be imported; says what and where.
            onnx.checker.ValidationError: it breaks a rule of ONNX.
        """
        if kwargs:
            raise UsageError(f"prepare has no option {next(iter(kwargs))!r}")
        target = target_of(device)
        super().prepare(model, device)
        return Prepared(model, target)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepare a model and run it once; see `prepare` and `Prepared.run`."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: onnx.NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype, tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run one node.

        Args:
            node: the node.
            inputs: arrays for its inputs that are not left out, in order.
            device: see `prepare`.
            outputs_info: element type and shape of each output; found by the node if it is not given.
            kwargs: `opset_version`, of the node's domain.
        """
        super().run_node(node, inputs, device, outputs_info, **kwargs)
        version = kwargs.pop("opset_version", min(NEWEST_OPSET, onnx.defs.onnx_opset_version()))
        names = list(dict.fromkeys(name for name in node.input if name))
        arrays = [np.asarray(array) for array in inputs]
        typed = onnx.helper.make_tensor_value_info
        numbered = onnx.helper.np_dtype_to_tensor_dtype
        given = [typed(name, numbered(array.dtype), array.shape) for name, array in zip(names, arrays, strict=True)]
        wanted = [name for name in node.output if name]
        gives = [onnx.ValueInfoProto(name=name) for name in wanted]
        if outputs_info is not None:
            gives = [typed(name, numbered(np.dtype(of)), shape) for name, (of, shape) in zip(wanted, outputs_info)]
        graph = onnx.helper.make_graph([node], node.op_type, given, gives)
        opset = onnx.helper.make_opsetid(node.domain, version)
        return Prepared(onnx.helper.make_model(graph, opset_imports=[opset]), target_of(device)).run(arrays)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether this machine can run on a device."""
        try:
            return _runs(target_of(device))
        except UsageError:
            return False


@cache
def _runs(target: str) -> bool:
    """Whether one node runs on a target."""
    try:
        Backend.run_node(onnx.helper.make_node("Neg", ["x"], ["y"]), [np.ones(1, np.float32)], target)
    except ForeplanError:
        return False
    return True


def target_of(device: str) -> str:
    """The target that a device names: `CPU`, `CUDA`, or a target such as `numpy` or `cpu:threads=2`.

    Raises:
        UsageError: there is no such device.
    """
    kind, _, number = device.partition(":")
    if kind not in DEVICES:
        target_named(device)
        return device
    if number not in ("", "0"):
        raise UsageError(f"foreplan runs on the first device, and {device!r} is another; set CUDA_VISIBLE_DEVICES")
    return DEVICES[kind]


is_compatible, prepare, supports_device = Backend.is_compatible, Backend.prepare, Backend.supports_device
run_model, run_node = Backend.run_model, Backend.run_node
