"""Arguments of the wrong type: a foreplan error at once that says what is expected, never a raw exception."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from onnx import TensorProto, helper

import foreplan as fp
from tests.runtime.micro_batches import compiled, data_for, perceptron

GRAPH = fp.models.build("mlp:batch=2,width=4,layers=1,inputs=3,classes=2")
LOSS, SGD = fp.losses.cross_entropy, fp.optim.SGD(0.1)


@cache
def step() -> fp.Compiled:
    return fp.compile(GRAPH, LOSS, SGD)


@cache
def session() -> fp.Session:
    return step().bind()


@cache
def program() -> fp.Problem:
    return fp.lower(GRAPH)


@cache
def plan() -> fp.Plan:
    return fp.plan(program())


def model() -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp.compile(GRAPH, target=None), "a target is one of numpy, cpu, cuda"),
        (lambda: fp.compile(GRAPH, target=5), "a target is one of"),
        (lambda: fp.compile(GRAPH, target=["cpu"]), "a target is one of"),
        (lambda: fp.compile(None), "a model must be a Graph"),
        (lambda: fp.compile("resnet50"), "a model must be a Graph"),
        (lambda: fp.compile(GRAPH, offload=1), "offload is True or False"),
        (lambda: fp.compile(GRAPH, prefetch="no"), "prefetch is True or False"),
        (lambda: fp.compile(GRAPH, tune=None), "tune is True or False"),
        (lambda: fp.compile(GRAPH, LOSS, SGD, accumulate=True), "accumulate must be a whole number of at least 1"),
        (lambda: fp.compile(GRAPH, LOSS, SGD, accumulate=2.0), "accumulate must be a whole number"),
        (lambda: fp.compile(GRAPH, LOSS, SGD, accumulate=0), "accumulate must be a whole number"),
        (lambda: fp.compile(GRAPH, passes=3), "passes changes a list of passes"),
        (lambda: fp.lower(GRAPH, passes=[3]), "passes changes a list of passes"),
        (lambda: fp.compile(GRAPH, outputs=[1]), "outputs takes a list of names"),
        (lambda: fp.compile(GRAPH, outputs=5), "outputs takes a list of names"),
        (lambda: fp.compile(GRAPH, LOSS, SGD, checkpoint=3), "checkpoint takes a list of names"),
        (lambda: fp.compile(GRAPH, precision=16), "there is no precision 16"),
        (lambda: fp.compile(GRAPH, precision=["bf16"]), "there is no precision"),
        (lambda: fp.compile(GRAPH, remat=None), "there is no remat None.*choose one of off, auto"),
        (lambda: fp.compile(GRAPH, 5, SGD), "is no loss; give one of"),
        (lambda: fp.compile(GRAPH, np.zeros(3), SGD), "is no loss; give one of"),
        (lambda: fp.compile(GRAPH, LOSS, 0.1), "the optimizer must be one such as"),
        (lambda: fp.compile(GRAPH, LOSS, fp.optim.SGD), "the optimizer must be one such as"),
        (lambda: step().bind(seed="a"), r"a seed must be a whole number from 0.*'a' \(str\)"),
        (lambda: step().bind(seed=1.5), "a seed must be a whole number"),
        (lambda: step().bind(seed=True), "a seed must be a whole number"),
        (lambda: step().bind(seed=1 << 63), "a seed must be a whole number"),
        (lambda: step().bind(threads="2"), "threads must be a whole number from 1 to 1024"),
        (lambda: step().bind(threads=1 << 40), "threads must be a whole number from 1 to 1024"),
        (lambda: step().bind(threads=True), "threads must be a whole number"),
        (lambda: step().bind(threads=0), "threads must be a whole number"),
        (lambda: step().bind(share=5), "share must be a Session.*bind"),
        (lambda: step().bind(share=step()), "share must be a Session"),
        (lambda: step().bind(poison="yes"), "poison is True or False"),
        (lambda: step().bind(capture=None), "capture is True or False"),
        (lambda: step().bind(weights=5), "takes the path of a file"),
        (lambda: step().bind().save(None), "save takes the path of a file"),
        (lambda: step().bind().load(None), "load takes the path of a file"),
        (lambda: step().bind().load("x", state=1), "state is True or False"),
        (lambda: step().save(None), "save takes the path of a file"),
        (lambda: step().save(7), "save takes the path of a file"),
        (lambda: step().save("x", kernels=1), "kernels is True or False"),
        (lambda: step().view(None), "view takes the path of a file"),
        (lambda: fp.load_plan(None), "load_plan takes the path of a file"),
        (lambda: fp.from_onnx(model(), batch="2"), "batch must be a whole number of at least 1"),
        (lambda: fp.from_onnx(model(), batch=2.0), "batch must be a whole number"),
        (lambda: fp.from_onnx(model(), batch=True), "batch must be a whole number"),
        (lambda: fp.from_onnx(model(), shapes=5), "shapes must be a mapping"),
        (lambda: fp.from_onnx(model(), shapes={"x": 5}), "the shape for input 'x' must be a tuple"),
        (lambda: fp.from_onnx(model(), shapes={"x": (2, "3")}), "an extent for input 'x' must be a whole number"),
        (lambda: fp.optim.SGD("fast"), "SGD: learning_rate must be in"),
        (lambda: fp.optim.SGD(True), "SGD: learning_rate must be in"),
        (lambda: fp.optim.SGD(10**400), "SGD: learning_rate must be in"),
        (lambda: fp.optim.Adam(beta1=None), "Adam: beta1 must be in"),
        (lambda: fp.optim.Adam(clip_norm="1"), "Adam: clip_norm must be in"),
        (lambda: fp.losses.CrossEntropy(ignore_index="a"), "ignore_index must be a whole number"),
        (lambda: fp.losses.CrossEntropy(axis=1.5), "axis must be a whole number"),
        (lambda: fp.losses.Huber(delta=0), "delta must be in"),
        (lambda: fp.losses.Huber(delta="1"), "delta must be in"),
        (lambda: fp.spec(None), "an extent must be a whole number"),
        (lambda: fp.spec((2, True)), "an extent must be a whole number"),
        (lambda: fp.spec((2, 3), [("a", "f4"), 5]), "write whole numbers"),
        (lambda: fp.trace(5), "trace takes a function"),
        (lambda: fp.plan(GRAPH), "what is planned must be a Problem.*lower"),
        (lambda: fp.lower(None), "what is lowered must be a Graph"),
        (lambda: fp.models.build(None), "a model's name must be a str"),
    ],
)  # fmt: skip
def test_an_argument_of_the_wrong_type_is_told_at_once(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(fp.UsageError, match=message):
        call()


def test_whole_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    for kind in (np.int64, np.int8, np.uint32):
        assert fp.compile(perceptron(8), LOSS, SGD, accumulate=kind(2)).accumulate == 2
        found = step().bind(seed=kind(3), threads=None, poison=np.bool_(False)).step(data_for(step(), 0))
        assert found.loss == step().bind(seed=3).step(data_for(step(), 0)).loss
        for graph in (fp.from_onnx(model(), batch=kind(2)), fp.from_onnx(model(), shapes={"x": (kind(2), 3)})):
            assert graph.inputs[0].shape == (2, 3)
        assert fp.spec((kind(2), 3)) == fp.spec((2, 3)) and fp.spec(kind(2)) == fp.spec(2)
    assert fp.optim.SGD(np.float32(0.5)) == fp.optim.SGD(Fraction(1, 2)) == fp.optim.SGD(0.5)
    assert compiled(perceptron(8), prefetch=np.bool_(True)).program.ahead


class Hostile:
    """It cannot be compared, as arrays cannot."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


WORDS = st.text("ab2.:=,é\x00", max_size=5)  # no path leads out of the folder
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.integers(), st.floats(), WORDS, st.binary(max_size=3),
    st.sampled_from([10**400, 1 << 63, np.int64(2), np.float32(0.5), np.bool_(True), np.nan, np.inf, 1j, "cpu"]),
    st.lists(st.one_of(st.integers(-2, 4), WORDS, st.none()), max_size=3),
    st.dictionaries(WORDS, st.integers(-2, 4), max_size=2),
    st.sampled_from([(2, 3), {1}, frozenset(), object, int, len, print, ..., GRAPH, LOSS, SGD]),
    st.sampled_from([program, plan, step]).map(lambda make: make()),
    st.builds(object), st.builds(Hostile), st.builds(lambda: np.zeros((2, 2))), st.builds(lambda: np.zeros(3, object)),
)  # fmt: skip
# What is right, so that one argument at a time is wrong; a function is called with all that it takes.
RIGHT: dict[str, Any] = {
    "graph": GRAPH, "model": model(), "loss": LOSS, "optimizer": SGD, "count": 2, "fn": lambda x: x, "name": "mlp",
    "specs": (fp.spec((2, 3)),), "shape": (2, 3), "batch": 2, "path": "/nowhere/at/all", "learning_rate": 0.1,
    "value": np.zeros(2), "through": np.zeros(2), "module": None, "rate": 0.1, "steps": 9, "power": 2.0, "every": 2,
    "function": lambda c, x: (c, x), "init": np.zeros(2), "boundaries": [3],
    "schedules": [fp.optim.constant(0.1), fp.optim.constant(0.2)], "weights": "head", "warmup": 2,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(fp, name)
    for name in fp.__all__
    if inspect.isfunction(getattr(fp, name)) and name not in ("trace", "verify")  # a user's function; the planner's own
}
FUNCTIONS |= {"lower": fp.lower, "build": fp.models.build}
FUNCTIONS |= {
    f"optim.{name}": getattr(fp.optim, name) for name in dir(fp.optim) if name not in ("Optimizer", "Schedule")
}
FUNCTIONS |= {
    f"losses.{name}": kind
    for name, kind in vars(fp.losses).items()
    if name in dir(fp.losses) and isinstance(kind, type) and inspect.signature(kind).parameters
}
METHODS: dict[str, Callable[[], Any]] = dict.fromkeys(("bind", "save", "view"), step)
METHODS |= dict.fromkeys(("step", "steps", "trace", "load", "state_dict"), session)


def test_the_net_holds_every_public_function() -> None:
    own = {name for name in fp.__all__ if callable(getattr(fp, name)) and not inspect.isclass(getattr(fp, name))}
    assert own - set(FUNCTIONS) == {"trace", "verify"}


@pytest.fixture(scope="module", autouse=True)
def torch_is_there() -> None:
    """Where it is installed, it is imported once, which takes a second."""
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401


@pytest.mark.parametrize("name", sorted([*FUNCTIONS, *METHODS]))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_a_wrong_argument_ends_in_an_error_of_ours_or_works(
    name: str, data: st.DataObject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where text is a path
    function = FUNCTIONS[name] if name in FUNCTIONS else getattr(METHODS[name](), name)
    right = RIGHT | {"problem": program(), "plan": plan()}
    parameters = {
        each.name: each
        for each in inspect.signature(function).parameters.values()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    }
    arguments = {key: right[key] for key, each in parameters.items() if each.default is each.empty and key in right}
    wrong = data.draw(st.sampled_from([key for key in parameters if key != "budget"]))
    arguments[wrong] = data.draw(VALUES)
    try:
        found = function(**arguments)
        if inspect.isgenerator(found):
            list(found)
    except fp.ForeplanError as error:
        assert str(error)
