"""Compiling takes work, memory and text in proportion to the model, in every direction in which one can grow.

Work is counted in calls of functions, Python's and C's, so that no test depends on a clock.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import foreplan as fp
from foreplan.passes.base import Pass, Properties
from foreplan.passes.pipeline import Entries
from tests.remembered import forget

TIMES = 3  # for a model of twice the length, at most
WORK, TEXT, BYTES = 2_000, 500, 200_000  # and so much is nothing
ONE = np.float32(1)
Model = Callable[[Any], Any]


def _dense(y: Any, name: str, width: int = 8) -> Any:
    return fp.nn.linear(y, width, name=name)


def _normal(y: Any) -> Any:
    y = y - y.mean(axis=1, keepdims=True)
    return y / np.sqrt((y * y).mean(axis=1, keepdims=True) + np.float32(1e-5))


def _attention(y: Any, i: int) -> Any:
    q, k, v = (_dense(y, f"{name}{i}") for name in "qkv")
    return y + fp.nn.softmax(q @ np.transpose(k)) @ v


def _scan(y: Any, i: int) -> Any:
    return fp.scan(lambda c, x: (c * np.tanh(c + x), c), y[0], y)[1] + y


def _body(n: int) -> Model:
    def long(carry: Any, x: Any) -> Any:
        for _ in range(n):
            carry = carry + np.sin(carry)
        return carry, carry * x

    return lambda y: fp.scan(long, y[0], y)[1]


# A step of a chain: (what there is so far, its number) → what there is then.
STEPS: dict[str, Callable[[Any, int], Any]] = {
    "doubled": lambda y, i: y + y,
    "squared": lambda y, i: y * y,
    "euler": lambda y, i: y + np.float32(0.1) * np.sin(y),
    "swish": lambda y, i: y * (1 / (1 + np.exp(-y))),
    "chosen": lambda y, i: np.where(y > 0, y * np.float32(1.1), y - np.float32(0.1)),
    "other constants": lambda y, i: np.tanh(y * np.float32(1 + i) + np.float32(i)),
    "residual": lambda y, i: y + np.maximum(_dense(y, f"l{i}"), 0),
    "gated": lambda y, i: y + np.tanh(_dense(y, f"a{i}")) * fp.nn.sigmoid(_dense(y, f"b{i}")),
    "normalised": lambda y, i: y + _normal(y),
    "softmax": lambda y, i: y + fp.nn.softmax(y),
    "attention": _attention,
    "turned": lambda y, i: np.transpose(np.transpose(y).reshape(8, 4)).reshape(4, 8) + y,
    "rolled": lambda y, i: np.concatenate([y[:, 3:], y[:, :3]], axis=1) * np.float32(1.5),
    "dense net": lambda y, i: np.concatenate([y[:, :8], _dense(y, f"l{i}")], axis=1),
    "sorted": lambda y, i: np.sort(y, axis=1) + y,
    "loop": _scan,
}
# What has n of something else.
WIDE: dict[str, Callable[[int], Model]] = {
    "readers": lambda n: lambda y: sum(np.tanh(y * np.float32(i + 1)) for i in range(n)),
    "summed products": lambda n: lambda y: sum(_dense(y, f"l{i}") for i in range(n)),
    "concatenated products": lambda n: lambda y: np.concatenate([_dense(y, f"l{i}") for i in range(n)], axis=1),
    "slices": lambda n: lambda y: np.concatenate([np.sin(y[:, i % 7 :][:, :2]) for i in range(n)], axis=1),
    "outputs": lambda n: lambda y: tuple(_dense(y, f"l{i}") for i in range(n)),
    "steps in a loop": _body,
}
COSTLY = {"gated", "normalised", "attention", "softmax", "residual", "dense net", "loop", "outputs", "sorted"}


def _chain(step: Callable[[Any, int], Any]) -> Callable[[int], Model]:
    def of_length(n: int) -> Model:
        def model(y: Any) -> Any:
            for i in range(n):
                y = step(y, i)
            return y

        return model

    return of_length


MODELS = {name: _chain(step) for name, step in STEPS.items()} | WIDE


@dataclass
class Meter:
    """What a compile takes, by pass; what is no pass's is the `rest`."""

    calls: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)
    text: Counter[str] = field(default_factory=Counter)
    memory: bool = False
    _where: str = "rest"

    @contextmanager
    def on(self) -> Iterator[None]:
        """Calls are counted while the body runs, or bytes."""
        forget()
        if self.memory:
            tracemalloc.start()
        else:
            sys.setprofile(self._count)
        try:
            yield
        finally:
            sys.setprofile(None)
            if self.memory:
                self.peak["rest"] = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()

    def passes(self, entries: Entries) -> Entries:
        """All passes, each watched."""
        return tuple(replace(each, step=_Watched(each.step, self)) for each in entries)  # type: ignore[arg-type]

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.calls[self._where] += 1

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """While the body runs, a pass does."""
        before, self._where = self._where, name
        try:
            yield
        finally:
            self._where = before


@dataclass(frozen=True)
class _Watched:
    """A pass that is measured. What it asks of its graph, such as readers, it finds itself: that is a copy."""

    step: Pass
    meter: Meter

    @property
    def name(self) -> str:
        return self.step.name

    @property
    def requires(self) -> Properties:
        return self.step.requires

    @property
    def ensures(self) -> Properties:
        return self.step.ensures

    def __call__(self, graph: fp.graph.Graph) -> fp.graph.Graph:
        own = replace(graph)
        with self.meter.within(self.name):
            made = self.step(own)
        if self.meter.memory:
            self.meter.text[self.name] = max(self.meter.text[self.name], len(made.as_text()))
        return graph if made is own else made


def _compiled(model: Model, target: str, trains: bool, meter: Meter) -> None:
    graph = fp.trace(lambda x: model(_dense(x, "first")), fp.spec((4, 8)))
    options: dict[str, Any] = {}
    if trains:
        options = {"loss": lambda *y: (y[0] * y[0]).mean(), "optimizer": fp.optim.SGD(0.1)}
    step = fp.compile(graph, target=target, passes=meter.passes, **options)
    meter.text["program"] = len(step.program.as_text())


def _measured(make: Callable[[int], Model], n: int, target: str, trains: bool, memory: bool = False) -> Meter:
    meter, model = Meter(memory=memory), make(n)
    with meter.on():
        _compiled(model, target, trains, meter)
    return meter


def _hold(*meters: Meter) -> None:
    """Of models each twice as long as the one before, a pass takes at most three times as much for twice the length.
    That is asked over two doublings, since at some length a pass may begin to have work.
    """
    for of, nothing in (("calls", WORK), ("text", TEXT), ("peak", BYTES)):
        for one, two in zip(meters, meters[2:]):
            before, after = getattr(one, of), getattr(two, of)
            grown = {name: (before[name], n) for name, n in after.items() if n > TIMES**2 * before[name] + nothing}
            assert not grown, f"{of} for four times the length: {grown}"


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", MODELS)
def test_work_is_in_proportion(name: str, trains: bool) -> None:
    _measured(MODELS[name], 2, "numpy", trains)  # what is made once in a process
    n = 12 if name in COSTLY else 24
    _hold(*(_measured(MODELS[name], length, "numpy", trains) for length in (n // 2, n, 2 * n)))


@pytest.mark.parametrize("name", sorted(set(MODELS) - COSTLY))
def test_work_of_training_is_in_proportion(name: str) -> None:
    _measured(MODELS[name], 2, "numpy", True)
    _hold(*(_measured(MODELS[name], n, "numpy", True) for n in (5, 10, 20)))


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("name", MODELS)
def test_work_and_memory_stay_in_proportion(name: str, target: str, trains: bool, memory: bool) -> None:
    _measured(MODELS[name], 2, target, trains, memory)
    _hold(*(_measured(MODELS[name], n, target, trains, memory) for n in (12, 24, 48, 96)))


def _onnx(
    nodes: list[onnx.NodeProto], result: str, functions: list[onnx.FunctionProto] | None = None
) -> onnx.ModelProto:
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", [4]), (result, [4]))
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    graph = helper.make_graph(nodes, "g", [x], [y])
    return helper.make_model(graph, opset_imports=opsets, functions=functions or [], ir_version=9)


def _written_chain(n: int, *ops: str) -> onnx.ModelProto:
    """y = op(op(y), y), n times."""
    nodes, y = [], "x"
    for i in range(n):
        made = y
        for k, op in enumerate(ops):
            inputs = [made, y] if op in ("Add", "Mul", "Max") else [made]
            made = f"y{i}.{k}"
            nodes.append(helper.make_node(op, inputs, [made]))
        y = made
    return _onnx(nodes, y)


def _functions(n: int) -> onnx.ModelProto:
    """A function that calls one that calls one, …; each adds to what it gets."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = []
    for i in range(n):
        inner = (
            helper.make_node(f"F{i - 1}", ["x"], ["a"], domain="own") if i else helper.make_node("Sin", ["x"], ["a"])
        )
        nodes = [inner, helper.make_node("Add", ["a", "x"], ["y"])]
        functions.append(helper.make_function("own", f"F{i}", ["x"], ["y"], nodes, opsets))
    return _onnx([helper.make_node(f"F{n - 1}", ["x"], ["y"], domain="own")], "y", functions)


FILES: dict[str, Callable[[int], onnx.ModelProto]] = {
    "doubled": lambda n: _written_chain(n, "Add"),
    "residual": lambda n: _written_chain(n, "Relu", "Add"),
    "gated": lambda n: _written_chain(n, "Sigmoid", "Mul"),
    "names": lambda n: _written_chain(n, "Identity"),
    "functions": _functions,
}


@pytest.mark.parametrize("name", FILES)
def test_work_of_files_is_in_proportion(name: str) -> None:
    def measured(n: int) -> Meter:
        meter, content = Meter(), FILES[name](n)
        with meter.on():
            fp.compile(fp.from_onnx(content), target="numpy", passes=meter.passes)
        return meter

    measured(2)
    _hold(*map(measured, (12, 24, 48)))


@pytest.mark.parametrize("n", [26, 80])
def test_a_doubled_number_is_what_it_is(n: int) -> None:
    session = fp.compile(fp.from_onnx(_written_chain(n, "Add")), target="numpy").bind()
    (y,) = session.step({"x": np.arange(4, dtype=np.float32)}).outputs.values()
    np.testing.assert_array_equal(y, np.arange(4, dtype=np.float32) * np.float32(2.0**n))
