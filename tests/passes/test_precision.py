"""What is narrow in bfloat16, and what is not: text in, text out; and gradients beside those of float32."""

from __future__ import annotations

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.graph import DType, Fill, Graph, GraphBuilder, Kind, TensorType, parse_graph
from foreplan.graph.types import DTYPES, FLOAT32
from foreplan.ops.expr import Arg, call, cast, derivative, relu
from foreplan.ops.map import convert, rounded, without_rounding
from foreplan.ops.matmul import MatMul, matmul
from foreplan.ops.reduce import reduce
from foreplan.ops.shape import reshape
from foreplan.passes import narrow_type, simplified, wide_gradients, wide_maps, with_precision
from tests.ops.check import evaluate
from tests.passes.steps import training_step

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
NARROW = [
    "%x/bfloat16: bfloat16[2,3,4,4] = map(exprs=('bfloat16(a0)',)) [%x]",
    "%w/bfloat16: bfloat16[8,3,3,3] = map(exprs=('bfloat16(a0)',)) [%w]",
    "%c: bfloat16[2,8,4,4] = conv(strides=(1, 1), pads=((1, 1), (1, 1)), dilations=(1, 1)) "
    "[%x/bfloat16, %w/bfloat16, %bias]",
    "%n: bfloat16[2,8,4,4], %m: float32[8], %v: float32[8] = batch_norm_train(epsilon=1e-05) [%c, %scale, %shift]",
    "%r: bfloat16[2,8,4,4] = map(exprs=('bfloat16(relu(float32(a0)))',)) [%n]",
    "%p: bfloat16[2,8] = reduce(how='mean', axes=(2, 3)) [%r]",
    "%out/bfloat16: bfloat16[10,8] = map(exprs=('bfloat16(a0)',)) [%out]",
    "%l: bfloat16[2,10] = matmul(transpose_b=True) [%p, %out/bfloat16]",
    "%e: float32[2], %lse: float32[2] = cross_entropy(axis=1) [%l, %target]",
    "%loss: float32[] = reduce(how='mean', axes=(0,)) [%e]",
]


def test_a_small_network() -> None:
    graph = parse_graph(MODEL)
    narrow = with_precision(graph, BF16)
    assert nodes(narrow) == NARROW
    assert (narrow.inputs, narrow.stored) == (graph.inputs, graph.stored)


def test_float32_is_the_graph_itself() -> None:
    graph = parse_graph(MODEL)
    assert with_precision(graph, FLOAT32) is graph
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


def test_what_a_user_gets_is_float32() -> None:
    graph = parse_graph(
        """graph %g
input %x: float32[4,8]
parameter %w: float32[8,8] = fill(0.5)
%hidden: float32[4,8] = matmul() [%x, %w] as %hidden
%last: float32[4,8] = matmul() [%hidden, %w] as %last
%soft: float32[4,8] = softmax(axis=1) [%hidden] as %soft
output %hidden = %hidden
output %last = %last
output %soft = %soft
"""
    )
    assert nodes(with_precision(graph, BF16)) == [
        "%x/bfloat16: bfloat16[4,8] = map(exprs=('bfloat16(a0)',)) [%x]",
        "%w/bfloat16: bfloat16[8,8] = map(exprs=('bfloat16(a0)',)) [%w]",
        "%hidden: bfloat16[4,8] = matmul() [%x/bfloat16, %w/bfloat16]",
        "%hidden/float32: float32[4,8] = map(exprs=('float32(a0)',)) [%hidden]",
        "%w/bfloat16.1: bfloat16[8,8] = map(exprs=('bfloat16(a0)',)) [%w]",
        "%last: float32[4,8] = matmul(wide=True) [%hidden, %w/bfloat16.1]",  # nobody needs it narrow
        "%soft: float32[4,8] = softmax(axis=1) [%hidden/float32]",
    ]


def test_a_loss_of_ones_own_is_float32_from_its_softmax_on() -> None:
    graph = parse_graph(
        """graph %g
input %x: float32[4,8]
input %target: float32[4,8]
parameter %w: float32[8,8] = fill(0.5)
%l: float32[4,8] = matmul() [%x, %w] as %l
%p: float32[4,8] = log_softmax(axis=1) [%l] as %p
%t: float32[4,8] = map(exprs=('(a0 * a1)',)) [%p, %target] as %t
%loss: float32[] = reduce(how='sum', axes=(0, 1)) [%t] as %loss
loss %loss
"""
    )
    found = types(with_precision(graph, BF16))
    assert {name: found[name] for name in "lpt"} == dict.fromkeys("lpt", "float32")
    assert found["x/bfloat16"] == found["w/bfloat16"] == "bfloat16"


def test_rows_of_a_table_are_rounded_where_they_are_added() -> None:
    graph = parse_graph(
        """graph %g
input %ids: int64[4]
parameter %table: float32[50,8] = fill(0.5)
parameter %places: float32[4,8] = fill(0.5)
%rows: float32[4,8] = gather() [%table, %ids] as %rows
%x: float32[4,8] = map(exprs=('(a0 + a1)',)) [%rows, %places] as %x
%n: float32[4,8], %m: float32[4], %r: float32[4] = layer_norm(axis=1, epsilon=1e-05) [%x] as %n
%loss: float32[] = reduce(how='mean', axes=(0, 1)) [%n] as %loss
loss %loss
"""
    )
    assert nodes(with_precision(graph, BF16)) == [
        "%rows: float32[4,8] = gather() [%table, %ids]",
        "%x: bfloat16[4,8] = map(exprs=('bfloat16((a0 + a1))',)) [%rows, %places]",
        "%n: bfloat16[4,8], %m: float32[4], %r: float32[4] = layer_norm(axis=1, epsilon=1e-05) [%x]",
        "%loss: float32[] = reduce(how='mean', axes=(0, 1), wide=True) [%n]",
    ]
    step = training_step(graph, dtype=BF16)
    assert types(step)["rows/grad/scatter_add"] == "float32"


def test_what_has_no_narrow_form_and_what_parameters_alone_make_is_float32() -> None:
    graph = parse_graph(
        """graph %g
input %x: float32[4,8]
parameter %v: float32[8,8] = fill(0.5)
%w: float32[8,8] = map(exprs=('(a0 / (1.0 + (a0 * a0)))',)) [%v] as %w
%a: float32[4,8] = matmul() [%x, %w] as %a
%s: float32[4,8] = cumsum(axis=1) [%a] as %s
%b: float32[4,8] = matmul() [%s, %w] as %b
%q: float32[4,8] = map(exprs=('float32(bfloat16(exp(a0)))',)) [%b] as %q
%c: float32[4,8] = matmul() [%q, %w] as %c
%t: float32[4,8] = map(exprs=('square((a0 - a1))',)) [%c, %x] as %t
%loss: float32[] = reduce(how='sum', axes=(0, 1)) [%t] as %loss
loss %loss
"""
    )
    narrow = with_precision(graph, BF16)
    found = types(narrow)
    assert (found["w"], found["s"], found["t"], found["loss"]) == ("float32",) * 4
    assert (found["b"], found["c"], found["q"]) == ("bfloat16", "float32", "bfloat16")
    assert found["a"] == "float32"  # a sum that goes on in float32 need not be rounded
    assert "'bfloat16(float32(bfloat16(exp(float32(a0)))))'" in as_text(narrow, "q")  # a user's own rounding stays


def as_text(graph: Graph, name: str) -> str:
    (found,) = [line for line in nodes(graph) if line.startswith(f"%{name}:")]
    return found


TIED = """graph %g
input %x: float32[4,8]
parameter %w: float32[8,8] = uniform(low=-1.0, high=1.0)
%a: float32[4,8] = matmul() [%x, %w] as %a
%b: float32[4,8] = map(exprs=('tanh(a0)',)) [%a] as %b
%c: float32[4,8] = matmul(transpose_b=True) [%b, %w] as %c
%t: float32[4,8] = map(exprs=('tanh(a0)',)) [%c] as %t
%loss: float32[] = reduce(how='sum', axes=(0, 1)) [%t] as %loss
loss %loss
"""


def test_angles_are_float32_however_many_turns_they_are() -> None:
    """A step of 999 times a frequency is hundreds of turns: rounded to bfloat16 it is another angle."""

    def model(x: fp.Tensor, steps: fp.Tensor) -> fp.Tensor:
        angles = steps.astype("float32").reshape(-1, 1) * np.array([1.0, 0.1], np.float32)
        times = fp.nn.concat([np.sin(angles), np.cos(angles)])
        return x + fp.nn.linear(times, 3, name="times")

    graph = fp.trace(model, fp.spec((2, 3)), fp.spec(2, "int64"))
    found = types(with_precision(simplified(graph), BF16))
    assert [found[name] for name in ("cast", "mul")] == ["float32", "float32"]
    assert [found[name] for name in ("sin", "cos", "concat")] == ["bfloat16", "bfloat16", "bfloat16"]
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


def test_conversions_of_sums_are_taken_into_the_sums() -> None:
    b = GraphBuilder("g")
    x = b.input("x", TensorType(BF16, (4, 8)))
    b.kind = Kind.GRADIENT
    product = matmul(b, x, x, transpose_b=True)
    once = convert(b, reshape(b, product, (16,)), FLOAT32)
    shared = matmul(b, x, x, transpose_a=True)
    graph = b.finish({"once": once, "shared": convert(b, shared, FLOAT32), "narrow": shared})
    found = wide_gradients(graph)
    assert [str(value.dtype) for value in found.outputs.values()] == ["float32", "float32", "bfloat16"]
    assert [node.op.name for node in found.nodes] == ["matmul", "reshape", "matmul", "map"]
    assert "wide=True" in str(found.nodes[0].op) and "wide" not in str(found.nodes[2].op)


REDUCED = "~%{0}: bfloat16[8] = reduce(how='sum', axes=(0,)) [%x] as %{0}"
WIDENED = "~%{1}: float32[8] = map(exprs=('float32(a0)',)) [%{0}] as %{1}"
READ_NARROW = "~%{1}: bfloat16[8] = map(exprs=('(a0 * 2.0)',)) [%{0}] as %{1}"
SUM, WIDE = REDUCED.format("sum"), WIDENED.format("sum", "wide")
VIEW = "~%view: bfloat16[2,4] = reshape(shape=(2, 4)) [%sum] as %view"
WIDE_VIEW = "~%wide: float32[2,4] = map(exprs=('float32(a0)',)) [%view] as %wide"
SECOND = "~%second: bfloat16[8] = reshape(shape=(8,)) [%sum] as %second"
JOINED = "~%joined: bfloat16[16] = concat(axis=0) [%sum, %{0}] as %joined"
WIDE_JOINED = "~%wide: float32[16] = map(exprs=('float32(a0)',)) [%joined] as %wide"
PRODUCT = "~%sum: bfloat16[4,4] = matmul(transpose_b=True) [%x, %x{0}] as %sum"
WIDE_PRODUCT = "~%wide: float32[4,4] = map(exprs=('float32(a0)',)) [%sum] as %wide"


@pytest.mark.parametrize(
    ("lines", "goes"),
    [
        ([SUM, WIDE], True),
        ([SUM, WIDE, READ_NARROW.format("sum", "other")], False),
        ([SUM, VIEW, WIDE_VIEW], True),
        ([SUM, VIEW, WIDE_VIEW, WIDENED.format("sum", "more")], True),
        ([SUM, VIEW, WIDE_VIEW, READ_NARROW.format("sum", "other")], False),
        ([SUM, VIEW, WIDE_VIEW, READ_NARROW.format("view", "other").replace("[8]", "[2,4]")], False),
        ([SUM, VIEW, WIDE_VIEW, SECOND], True),
        ([SUM, VIEW, WIDE_VIEW, SECOND, WIDENED.format("second", "more")], True),
        ([SUM, VIEW, WIDE_VIEW, SECOND, READ_NARROW.format("second", "other")], False),
        (
            [SUM, VIEW, WIDE_VIEW, SECOND, WIDENED.format("second", "more"), READ_NARROW.format("second", "other")],
            False,
        ),
        ([SUM, REDUCED.format("more"), JOINED.format("more"), WIDE_JOINED], True),
        ([SUM, JOINED.format("given"), WIDE_JOINED], False),
        ([READ_NARROW.format("given", "sum"), WIDE], True),
        ([READ_NARROW.format("given", "sum").replace("~", ""), WIDE], False),  # forward: it rounds as the model says
        (
            ["~%sum: bfloat16[8], %more: bfloat16[8] = map(exprs=('(a0 * 2.0)', '(a0 * a0)')) [%given] as %sum", WIDE],
            False,
        ),
        ([PRODUCT.format(""), WIDE_PRODUCT], True),
        ([PRODUCT.format(", %square"), WIDE_PRODUCT], False),  # what it adds to is narrow
        (["~%sum: bfloat16[8] = softmax(axis=0) [%given] as %sum", WIDE], False),
    ],
)
def test_a_gradient_is_wide_from_its_sum_on_where_all_that_is_read_of_it_is_wide(lines: list[str], goes: bool) -> None:
    given = "input %x: bfloat16[4,8]\ninput %given: bfloat16[8]\ninput %square: bfloat16[4,4]"
    graph = parse_graph("\n".join(["graph %g", given, *lines, "output %wide = %wide", ""]))
    found = wide_gradients(graph)
    left = [line for line in nodes(found) if "map(exprs=('float32(a0)',))" in line]
    assert bool(left) is not goes
    rng = np.random.default_rng(0)
    inputs = {v.name: rng.integers(-8, 9, v.shape).astype(v.dtype.numpy) for v in graph.inputs}  # nothing is rounded
    before, after = (evaluate(g, inputs)[g.outputs["wide"]] for g in (graph, found))
    assert after.dtype == before.dtype == np.float32
    np.testing.assert_allclose(after, before, rtol=2.0**-8)
    if "softmax" not in lines[0]:
        np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("returned", ["view", "second"])
@pytest.mark.parametrize("more", [[], [WIDENED.format("second", "more")]], ids=["", "read"])
def test_a_view_that_is_returned_narrow_keeps_its_sum_narrow(returned: str, more: list[str]) -> None:
    lines = ["graph %g", "input %x: bfloat16[4,8]", SUM, VIEW, WIDE_VIEW, SECOND, *more]
    graph = parse_graph("\n".join([*lines, "output %wide = %wide", f"output %narrow = %{returned}", ""]))
    assert nodes(wide_gradients(graph)) == nodes(graph)


def test_maps_of_gradients_are_computed_in_float32() -> None:
    graph = parse_graph(
        """graph %g
input %x: bfloat16[8]
input %y: float32[8]
input %bits: uint8[1]
~%a: bfloat16[8] = map(exprs=('(a0 * (a0 + 1.0))',)) [%x] as %a
~%b: float32[8] = map(exprs=('(float32(bfloat16((a1 * 2.0))) + a0)',)) [%x, %y] as %b
%c: bfloat16[8] = map(exprs=('(a0 + 1.0)',)) [%x] as %c
~%d: bfloat16[8] = masked_map(exprs=('where(a0, (a1 * (a1 + 1.0)), 0.0)',)) [%bits, %x] as %d
output %a = %a
output %b = %b
output %c = %c
output %d = %d
"""
    )
    assert nodes(wide_maps(graph)) == [
        "~%a: bfloat16[8] = map(exprs=('bfloat16((float32(a0) * (float32(a0) + 1.0)))',)) [%x]",
        "~%b: float32[8] = map(exprs=('((a1 * 2.0) + float32(a0))',)) [%x, %y]",
        "%c: bfloat16[8] = map(exprs=('(a0 + 1.0)',)) [%x]",  # the model's own
        "~%d: bfloat16[8] = masked_map(exprs=('bfloat16(where(a0, (float32(a1) * (float32(a1) + 1.0)), 0.0))',)) "
        "[%bits, %x]",
    ]


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


@pytest.mark.parametrize("returned", [True, False])
def test_what_a_wide_product_is_added_to_is_wide(returned: bool) -> None:
    """A sum of products that nothing narrow reads: an optimizer's, a result."""
    b = GraphBuilder("sum of products")
    x = b.input("x", TensorType(FLOAT32, (3, 4)))
    w = b.store("w", TensorType(FLOAT32, (4, 2)), Kind.PARAMETER, Fill(1.0))
    first = b.apply(MatMul(), x, w)
    both = b.apply(MatMul(), x, w, first)
    graph = b.finish({"y": both} if returned else {}, loss=reduce(b, "mean", both))
    session = fp.compile(graph, optimizer=fp.optim.SGD(0.5), precision="bf16").bind()
    result = session.step({"x": np.full((3, 4), 0.25, np.float32)})
    assert result.loss == 2.0
