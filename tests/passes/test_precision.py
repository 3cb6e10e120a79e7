"""What is narrow in bfloat16, beside the texts of `with_precision/`: whole steps, and gradients beside float32's."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.graph import DType, Graph, Kind, parse_graph
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops.expr import Arg, call, cast, derivative, relu
from foreplan.ops.map import rounded, without_rounding
from foreplan.passes import narrow_type, simplified
from tests.ops.check import evaluate
from tests.passes.steps import training_step
from tests.passes.texts import FOLDER, cases_of

BF16 = DTYPES["bfloat16"]
UNIT = 2.0**-8  # the most that one rounding to bfloat16 changes a number by, beside its size


def nodes(graph: Graph) -> list[str]:
    return [line.partition(" as %")[0] for line in graph.as_text().splitlines() if " as %" in line]


def types(graph: Graph) -> dict[str, str]:
    return {value.name: str(value.dtype) for node in graph.nodes for value in node.outputs}


MODEL = """graph %g
input %x: float32[2,3,4,4]
input %target: int64[2]
parameter %w: float32[8,3,3,3] = fill(0.5)
parameter %bias: float32[8] = fill(0.0)
parameter %scale: float32[8] = fill(1.0)
parameter %shift: float32[8] = fill(0.0)
parameter %out: float32[10,8] = fill(0.1)
%c: float32[2,8,4,4] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) [%x, %w, %bias] as %c
%n: float32[2,8,4,4], %m: float32[8], %v: float32[8] = batch_norm_train(epsilon=1e-05) [%c, %scale, %shift] as %n
%r: float32[2,8,4,4] = map(exprs=('relu(a0)',)) [%n] as %r
%p: float32[2,8] = reduce(how='mean', axes=(2, 3)) [%r] as %p
%l: float32[2,10] = matmul(transpose_b=True) [%p, %out] as %l
%e: float32[2], %lse: float32[2] = cross_entropy(axis=1) [%l, %target] as %e
%loss: float32[] = reduce(how='mean', axes=(0,)) [%e] as %loss
loss %loss
"""


def test_names_of_types() -> None:
    assert narrow_type("float32") == FLOAT32 and narrow_type("bf16") == BF16
    with pytest.raises(UsageError, match="no precision 'half'; choose one of float32, bf16"):
        narrow_type("half")


def test_its_backward_pass_is_narrow_and_its_weights_gradients_are_wide() -> None:
    step = training_step(parse_graph(MODEL), dtype=BF16)
    found = types(step)
    assert {str(value.dtype) for value in step.gradients.values()} == {"float32"}
    assert found["c/grad/conv_weight_grad"] == "float32"
    assert found["l/grad/matmul"] == "float32"
    assert found["c/grad/reduce"] == "float32"
    assert found["r/grad/map"] == found["e/grad/cross_entropy_grad"] == found["l/grad/matmul.1"] == "bfloat16"
    conversions = [line for line in nodes(step) if "map(exprs=('float32(a0)',))" in line]
    assert not conversions
    (mask,) = [line for line in nodes(step) if line.startswith("~%r/grad/map")]
    assert "'bfloat16(where((float32(a0) > 0), float32(a1), 0.0))'" in mask  # asks its output, in float32
    assert "[%r, " in mask


TIED, TABLE = (
    next(case.before for file in FOLDER.glob("with_precision/*.txt") for case in cases_of(file) if title in case.title)
    for title in ("with two readers", "Rows of a table")
)


def test_angles_are_float32_however_many_turns_they_are() -> None:
    """A step of 999 times a frequency is hundreds of turns: rounded to bfloat16 it is another angle."""

    def model(x: fp.Tensor, steps: fp.Tensor) -> fp.Tensor:
        angles = steps.astype("float32").reshape(-1, 1) * np.array([1.0, 0.1], np.float32)
        times = fp.nn.concat([np.sin(angles), np.cos(angles)])
        return x + fp.nn.linear(times, 3, name="times")

    graph = fp.trace(model, fp.spec((2, 3)), fp.spec(2, "int64"))
    given = {"x": np.zeros((2, 3), np.float32), "steps": np.array([3, 987])}
    exact, narrow = (
        next(iter(fp.compile(graph, precision=precision).bind().step(given).outputs.values()))
        for precision in ("float32", "bf16")
    )
    np.testing.assert_allclose(narrow, exact, atol=4 * UNIT * np.abs(exact).max())


def test_a_parameter_with_two_readers_is_converted_once_and_its_gradients_are_added_in_float32() -> None:
    step = training_step(parse_graph(TIED), dtype=BF16)
    lines = nodes(step)
    assert sum("('bfloat16(a0)',)) [%w]" in line for line in lines) == 1
    gradient = step.gradients["w"]
    added = step.producer[gradient]
    assert added.op.name == "matmul" and len(added.inputs) == 3  # one product, added to the other, both in float32
    assert {str(added.inputs[2].dtype), str(gradient.dtype)} == {"float32"}


def test_the_gradient_of_a_table_is_added_up_in_float32() -> None:
    step = training_step(parse_graph(TABLE), dtype=BF16)
    assert types(step)["rows/grad/scatter_add"] == "float32"


def gradients(graph: Graph, dtype: DType, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    step = training_step(graph, dtype=dtype)
    found = evaluate(step, inputs, hard=False)
    return {name: found[value] for name, value in step.gradients.items()}


CONCATENATED = """graph %g
input %x: float32[2,3,8,8]
parameter %w: float32[32,3,3,3] = uniform(low=-1.0, high=1.0)
parameter %u: float32[32,32,1,1] = uniform(low=-1.0, high=1.0)
parameter %v: float32[8,64,3,3] = uniform(low=-1.0, high=1.0)
%a: float32[2,32,8,8] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) [%x, %w] as %a
%b: float32[2,32,8,8] = map(exprs=('tanh(a0)',)) [%a] as %b
%c: float32[2,32,8,8] = conv(strides=(1, 1), pads=((0, 0), (0, 0)), dilations=(1, 1)) [%b, %u] as %c
%j: float32[2,64,8,8] = concat(axis=1) [%b, %c] as %j
%d: float32[2,8,8,8] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) [%j, %v] as %d
%t: float32[2,8,8,8] = map(exprs=('tanh((a0 * 0.05))',)) [%d] as %t
%loss: float32[] = reduce(how='sum', axes=(0, 1, 2, 3)) [%t] as %loss
loss %loss
"""


@pytest.mark.parametrize("text", [TIED, CONCATENATED], ids=["tied", "concatenated"])
def test_gradients_are_those_of_float32_but_for_roundings(text: str) -> None:
    """Each of some ten roundings on the way, independent of each other, adds up to 2^-8 of the size."""
    graph = simplified(parse_graph(text))
    shape = graph.inputs[0].shape
    inputs = {"x": np.random.default_rng(0).standard_normal(shape).astype(np.float32)}
    exact, found = gradients(graph, FLOAT32, inputs), gradients(graph, BF16, inputs)
    for name, gradient in exact.items():
        assert found[name].dtype == np.float32
        assert np.linalg.norm(found[name] - gradient) <= 4 * UNIT * np.linalg.norm(gradient)


def test_parts_of_a_weight_have_wide_gradients() -> None:
    """The two parts of a convolution over concatenated channels: their gradients are joined in float32."""
    step = training_step(simplified(parse_graph(CONCATENATED)), dtype=BF16)
    made = [node for node in step.nodes if node.op.name == "conv_weight_grad"]
    assert len(made) == 4
    assert {str(node.outputs[0].dtype) for node in made} == {"float32"}


def test_expressions() -> None:
    x, y = Arg(0), Arg(1)
    (found,) = rounded([x * y], [BF16, FLOAT32], [BF16])
    assert str(found) == "bfloat16((float32(a0) * a1))"
    (found,) = rounded([call("ne", x, 0.0)], [BF16], [DTYPES["bool"]])
    assert str(found) == "ne(float32(a0), 0.0)"
    assert str(without_rounding(cast(cast(x * 2.0, BF16), FLOAT32) + y, [FLOAT32, FLOAT32])) == "((a0 * 2.0) + a1)"
    flows = derivative(cast(relu(cast(x, FLOAT32)), BF16), Arg(1), Arg(2))
    assert str(flows[0]) == "(where((a2 > 0), 1.0, 0.0) * a1)"  # from the rounded output, as from any other


def test_micro_batches_add_up_in_float32() -> None:
    graph = fp.models.build("mlp:batch=8,width=32,layers=2")
    halves = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.5), accumulate=2, precision="bf16")
    whole = fp.compile(
        fp.models.build("mlp:batch=16,width=32,layers=2"), fp.losses.cross_entropy, fp.optim.SGD(0.5), precision="bf16"
    )
    kept = [slot for slot in halves.program.stored if slot.kind is Kind.ACCUMULATOR]
    assert kept and {str(slot.operand.type.dtype) for slot in kept} == {"float32"}
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((2, 8, 784)).astype(np.float32), rng.integers(0, 10, (2, 8))
    one, two = whole.bind(seed=1), halves.bind(seed=1)
    start = {name: np.array(one.parameters[name]) for name in one.parameters}
    one.step({"x": x.reshape(16, 784), "target": target.reshape(16)})
    two.step({"x": x, "target": target})
    for name, before in start.items():
        change = np.linalg.norm(one.parameters[name] - before)
        assert np.linalg.norm(one.parameters[name] - two.parameters[name]) <= 2 * UNIT * change
