"""Drawn models whose roles are known: no name, no layout, no function and no branch around them changes a role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.frontend.onnx import from_onnx
from foreplan.frontend.onnx.places import is_round
from foreplan.frontend.onnx.tables import table_like
from foreplan.graph import Kind
from tests.frontend.onnx import tables
from tests.profile import pick

Rng = np.random.Generator
WIDTH = 6


@dataclass
class Part:
    """A small model of one input, whose constants are either learned or not.

    Attributes:
        learned: constant → whether it is a parameter.
    """

    rng: Rng
    shape: tuple[int, ...] = (2, 5, WIDTH)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    learned: dict[str, bool] = field(default_factory=dict)

    def constant(self, array: object, learned: bool) -> str:
        """A constant in float32, a single number with no axis or with some; integers as they are."""
        name, made = f"c{len(self.constants)}", np.asarray(array)
        if made.dtype.kind == "f":
            made = made.astype(np.float16 if made.dtype == np.float16 else np.float32)
            self.learned[name] = learned
        if not made.ndim and made.dtype.kind == "f":
            made = made.reshape([(), (1,), (1, 1)][int(self.rng.integers(3))])
        self.constants[name] = made
        return self.cast(name) if made.dtype == np.float16 else name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.normal(size=shape) / np.sqrt(shape[0]), True)

    def number(self, number: float) -> str:
        return self.constant(np.float64(number), False)

    def cast(self, name: str) -> str:
        return self("Cast", name, to=TensorProto.FLOAT)

    def __call__(self, op: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names[0]


def dense(p: Part, x: str) -> str:
    made = p.weight(WIDTH, WIDTH)
    product = p("MatMul", x, made if p.rng.random() < 0.5 else p("Transpose", made, perm=[1, 0]))
    return p("Add", *p.rng.permutation([product, p.weight(WIDTH)]))


def column(p: Part, x: str) -> str:
    """A head of one column, whose bias is one number."""
    return p("Add", p("MatMul", x, p.weight(WIDTH, 1)), p.constant(np.float32([p.rng.normal()]), True))


def norm(p: Part, x: str) -> str:
    off = p("Sub", x, p("ReduceMean", x, axes=[-1]))
    square = p("Pow", off, p.number(2)) if p.rng.random() < 0.7 else p("Mul", off, off)
    safe = p(
        "Add", *p.rng.permutation([p("ReduceMean", square, axes=[-1]), p.number(p.rng.choice([1e-5, 1e-6, 1e-3]))])
    )
    match int(p.rng.integers(3)):
        case 0:
            unit = p("Div", off, p("Sqrt", safe))
        case 1:
            unit = p("Div", off, p("Pow", safe, p.number(0.5)))
        case _:
            unit = p("Mul", off, p("Reciprocal", p("Sqrt", safe)))
    return p("Add", p("Mul", unit, p.weight(WIDTH)), p.weight(WIDTH))


def gelu(p: Part, x: str) -> str:
    scaled = p("Div", x, p.number(2**0.5)) if p.rng.random() < 0.5 else p("Mul", x, p.number(0.5**0.5))
    inner = p("Mul", x, p("Add", p("Erf", scaled), p.number(1)))
    return p("Mul", inner, p.number(0.5)) if p.rng.random() < 0.5 else p("Div", inner, p.number(2))


def gelu_of_tanh(p: Part, x: str) -> str:
    cubed = p("Add", x, p("Mul", p("Pow", x, p.number(3)), p.number(0.044715)))
    waved = p("Tanh", p("Mul", cubed, p.number((2 / np.pi) ** 0.5)))
    return p("Mul", p("Mul", x, p("Add", waved, p.number(1))), p.number(0.5))


def hard_swish(p: Part, x: str) -> str:
    gate = p("Clip", p("Add", x, p.number(3)), *(p.constant(np.float32(v), False) for v in (0, 6)))
    p.constants.update({name: p.constants[name].reshape(()) for name in p.nodes[-1].input[1:]})
    return p("Div", p("Mul", x, gate), p.number(6))


def decibels(p: Part, x: str) -> str:
    power = p("Add", p("Pow", x, p.number(2)), p.number(1e-6))
    return p("Mul", p("Log", p("Max", power, p.number(1e-8))), p.number(10 / np.log(10)))


def slope(p: Part, x: str) -> str:
    return p("PRelu", x, p.constant(np.full(1, p.rng.choice([0.25, p.rng.normal()])), True))


def table_of_product(p: Part, x: str) -> str:
    """A transform, and a layer behind it."""
    made = p.rng.choice(list(tables.MATRICES))
    table = np.squeeze(tables.shaped(p.rng, tables.MATRICES[str(made)](p.rng)))
    p.shape = (2, len(table))
    return p("MatMul", p("MatMul", x, p.constant(table, False)), p.weight(table.shape[1], 3))


def kernels(p: Part, x: str) -> str:
    """A transform as a convolution, and a layer behind it."""
    made = tables.constant_q(p.rng) if p.rng.random() < 0.3 else tables.fourier(p.rng)
    bias = [p.constant(np.zeros(len(made)), False)] if p.rng.random() < 0.5 else []
    p.shape, one = (1, 1, made.shape[1] + 8), p.constant(made[:, None].astype(np.float32), False)
    return p("Conv", p("Conv", x, one, *bias, strides=[4]), p.weight(3, len(made), 1), p.weight(3))


def windowed(p: Part, x: str) -> str:
    table = tables.window(p.rng, int(p.rng.integers(16, 300)))
    p.shape = (2, len(table))
    return p("MatMul", p("Mul", x, p.constant(table, False)), p.weight(len(table), 3))


def positions(p: Part, x: str) -> str:
    table = [tables.sinusoids, tables.grid_of_sinusoids][int(p.rng.integers(2))](p.rng)
    p.shape = (2, *table.shape)
    return p("MatMul", p("Add", x, p.constant(table.astype(np.float32), False)), p.weight(table.shape[1], 3))


def learned_positions(p: Part, x: str) -> str:
    table = p.constant(p.rng.normal(size=(1, 5, WIDTH)) * 0.02, True)
    return p("Add", x, table)


def recurrent(p: Part, x: str) -> str:
    op, gates, states = [("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)][int(p.rng.integers(3))]
    zeros = [p.constant(np.zeros((1, 5, 4)), False) for _ in range(states)]
    if p.rng.random() < 0.5:
        zeros = [p.constant(np.zeros((1, 1, 4)), False)] * states
        to = p.constant(np.array([1, 5, 4]), False)
        zeros = [p("Expand", each, to) for each in zeros]
    weights = [p.weight(1, gates * 4, WIDTH), p.weight(1, gates * 4, 4), p.weight(1, 8 * gates)]
    return p(op, x, *weights, "", *zeros, outputs=2, hidden_size=4)


PARTS: list[Callable[[Part, str], str]] = [
    dense, column, norm, gelu, gelu_of_tanh, hard_swish, decibels, slope, table_of_product, kernels, windowed,
    positions, learned_positions, recurrent,
]  # fmt: skip
# Names as tools write them, none of which tells a role: of Paddle's converter, of TensorFlow's, of a module's path.
STYLES: dict[str, Callable[[Rng, int], str]] = {
    "letters": lambda rng, i: f"v{i}",
    "numbers": lambda rng, i: str(400 + i),
    "paths": lambda rng, i: f"net.{rng.choice(['blocks', 'encoder', 'x'])}.{i}.{rng.choice(['t', 'inner', 'k'])}",
    "paddle": lambda rng, i: f"p2o.helper.constant.{i}",
    "tensorflow": lambda rng, i: f"model/{rng.choice(['dense', 'stack'])}_{i}/Op{rng.choice(['', ';model/x'])}:0",
    "inlined": lambda rng, i: f"If_0_else_branch__Inline_{i}__k.{i}",
}


def drawn(part: Callable[[Part, str], str], seed: int, style: str) -> tuple[onnx.ModelProto, dict[str, bool]]:
    """A model of one part, perhaps within a function or a branch, and whether each constant is a parameter."""
    rng = np.random.default_rng((seed, PARTS.index(part)))
    p = Part(rng)
    y = part(p, "x")
    half = bool(rng.random() < 0.3) and not any(node.op_type == "Cast" for node in p.nodes)
    if half:  # a model in float16, whose numbers have few digits
        p.constants = {k: a.astype(np.float16) if a.dtype == np.float32 else a for k, a in p.constants.items()}
    of = np.random.default_rng((seed, list(STYLES).index(style)))
    names = {name: STYLES[style](of, i) for i, name in enumerate(p.constants)}
    around = int(rng.integers(4))
    inner = list(names) if around == 1 else list(names.values())
    if around != 1:
        for node in p.nodes:
            node.input[:] = [names.get(name, name) for name in node.input]
    nodes, functions, more = p.nodes, [], []
    if around == 1:
        imports = [helper.make_opsetid("", 17)]
        functions = [helper.make_function("own", "Part", ["x", *inner], [y], p.nodes, imports)]
        nodes = [helper.make_node("Part", ["x", *names.values()], [y], domain="own")]
    elif around == 2:
        bodies = {
            which: helper.make_graph(p.nodes if which == "then" else [helper.make_node("Neg", ["x"], ["n"])], which, [],
                                     [onnx.ValueInfoProto(name=y if which == "then" else "n")])
            for which in ("then", "else")
        }  # fmt: skip
        nodes = [helper.make_node("If", ["yes"], ["out"], then_branch=bodies["then"], else_branch=bodies["else"])]
        y, more = "out", [numpy_helper.from_array(np.array(True), "yes")]
    held = [numpy_helper.from_array(array, names[name]) for name, array in p.constants.items()]
    if around == 3:  # Constants in place of initializers
        nodes = [*(helper.make_node("Constant", [], [each.name], value=each) for each in held), *nodes]
        held = []
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT16 if half else TensorProto.FLOAT, p.shape)
    graph = helper.make_graph(nodes, "g", [info], [onnx.ValueInfoProto(name=y)], [*held, *more])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    proto = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=8)
    return proto, {names[name]: learned for name, learned in p.learned.items()}


@pytest.mark.parametrize("seed", range(pick(1, 3, 100)))
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_no_name_and_no_scope_changes_a_role(part: Callable[[Part, str], str], seed: int) -> None:
    for style in STYLES:
        proto, learned = drawn(part, seed, style)
        found = {value.name for value in from_onnx(proto).parameters}
        assert found == {name for name, trained in learned.items() if trained}, style


@pytest.mark.parametrize("seed", range(pick(3, 10, 300)))
@pytest.mark.parametrize("kind", [*tables.MATRICES, "resampling", "places"])
def test_tables_are_told_by_their_numbers(kind: str, seed: int) -> None:
    """In any layout; in float16, whose rounding hides some of the slowest waves, in 98 of 100."""
    rng = np.random.default_rng(seed)
    if kind == "resampling":
        table = tables.resampling(rng)[:, None].astype(np.float32)
    elif kind == "places":
        table = tables.places(rng).astype(np.float32)
    else:
        table = tables.shaped(rng, tables.MATRICES[kind](rng)).astype(np.float32)  # as rounded before
    assert table_like(numpy_helper.from_array(table, "t"), None)


def test_what_training_leaves_is_no_table() -> None:
    for seed in range(pick(100, 200, 20_000)):
        tensor = numpy_helper.from_array(tables.learned(np.random.default_rng(seed)), "t")
        assert not table_like(tensor, None), seed


@pytest.mark.parametrize("name", ["s4.A", "mixer.A_log", "mixer.A_imag", "att.time_decay", "att.time_mix_k"])
def test_parameters_of_a_module_that_begin_with_curves_are_trained(name: str) -> None:
    """HiPPO (Gu and others, 2020), S4D and Mamba, RWKV: fresh, they keep a rule as tables do."""
    n = np.arange(64)
    begins = {
        "s4.A": -np.tril(np.sqrt(np.outer(2 * n + 1, 2 * n + 1)), -1) - np.diag(n + 1),
        "mixer.A_log": np.log(np.tile(n + 1, (64, 1))),
        "mixer.A_imag": np.pi * np.tile(n, (64, 1)),
        "att.time_decay": -5 + 8 * (n / 63) ** 1.5,
        "att.time_mix_k": (n / 64) ** 0.7,
    }
    held = [numpy_helper.from_array(begins[name].astype(np.float32), name)]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", name], ["y"])], "g",
        [helper.make_tensor_value_info("x", 1, (2, 64, 64))], [onnx.ValueInfoProto(name="y")], held,
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    proto.producer_name = "pytorch"
    assert [value.name for value in from_onnx(proto).parameters] == [name]


def test_numbers_of_formulas_and_numbers_that_were_learned() -> None:
    formulas = [0, 1, 0.5, 6, 1e-5, 3e-4, 2**0.5, 64**-0.5, 120**-0.5, 1 / 6, np.log(10), 10 / np.log(10), np.log(2)]
    formulas += [np.pi, np.pi / 512, 1 / 255, 32768, -1e4, np.log(1 / 0.07), 1 / 0.07, (2 / np.pi) ** 0.5]
    assert all(is_round(float(np.float32(number))) for number in formulas)
    drawn = np.random.default_rng(0).normal(1, 0.3, 2000).astype(np.float32)
    assert np.mean([is_round(float(number)) for number in drawn]) < 0.02


def scalars(names: dict[str, str], numbers: dict[str, float], producer: str = "") -> fp.Graph:
    """y = x · scale / divisor + shift, behind a layer."""
    p = Part(np.random.default_rng(0))
    x = p("MatMul", "x", p.weight(WIDTH, WIDTH))
    for op, which in (("Mul", "scale"), ("Div", "divisor"), ("Add", "shift")):
        x = p(op, x, which)
    nodes = p.nodes
    for node in nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
    held = [numpy_helper.from_array(np.float32([number]), names[which]) for which, number in numbers.items()]
    held += [numpy_helper.from_array(array, name) for name, array in p.constants.items()]
    info = helper.make_tensor_value_info("x", 1, p.shape)
    graph = helper.make_graph(nodes, "g", [info], [onnx.ValueInfoProto(name=x)], held)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    proto.producer_name = producer
    return from_onnx(proto)


def trained(graph: fp.Graph) -> set[str]:
    return {value.name for value in graph.stored if value.kind is Kind.PARAMETER} - {"c0"}


def test_of_one_number_that_use_does_not_tell_the_name_decides_and_a_note_says_so() -> None:
    learned = {"scale": 1.0173529, "divisor": 0.7135921, "shift": -0.1273918}
    plain = {"scale": 1.0, "divisor": 0.07, "shift": 0.0}
    for numbers in (learned, plain):
        paddle = {"scale": "lab_0.w_0", "divisor": "head.temperature", "shift": "lab_0.w_1"}
        graph = scalars(paddle, numbers)
        assert trained(graph) == set(paddle.values())
        assert any("seem to be learned: trained" in note and "'lab_0.w_0'" in note for note in graph.notes)
        literal = {which: f"p2o.helper.constant.{i}" for i, which in enumerate(numbers)}
        graph = scalars(literal, numbers)
        assert not trained(graph)
        assert any("not trained" in note for note in graph.notes) == (numbers is learned)
        letters = {which: f"v{i}" for i, which in enumerate(numbers)}
        graph = scalars(letters, numbers)
        assert not trained(graph)
        assert any("not trained" in note for note in graph.notes) == (numbers is learned)
        sure = {"scale": "logit_scale", "divisor": "temperature", "shift": "logit_bias"}
        assert trained(scalars(sure, numbers)) == set(sure.values())
        module = {"scale": "alpha", "divisor": "divide", "shift": "move"}
        graph = scalars(module, numbers, "pytorch")
        assert trained(graph) == set(module.values()) and not graph.notes


@pytest.mark.parametrize("name", ["v1", "net.m", "12"])
def test_means_that_people_wrote_are_constants(name: str) -> None:
    """Of images, as of ImageNet, and weights beside them that a person wrote by hand."""
    nodes = [helper.make_node("Sub", ["x", name], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    held = {name: np.float32([[[0.485], [0.456], [0.406]]]), "w": np.float32([[0.1, 0.2], [0.3, 0.5]])}
    tensors = [numpy_helper.from_array(array, each) for each, array in held.items()]
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3, 2))
    graph = helper.make_graph(nodes, "g", [info], [onnx.ValueInfoProto(name="y")], tensors)
    found = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [value.name for value in found.parameters] == ["w"]


@pytest.mark.parametrize("names", [("state", "R"), ("lstm.h0", "lstm.r"), ("7", "8")])
def test_zeros_that_are_taken_apart_for_a_state_are_constants(names: tuple[str, str]) -> None:
    """PyTorch's exporter gathers the states of layers from one tensor."""
    zeros, recurrence = names
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", [zeros, "first"], ["h"], axis=0),
        helper.make_node("GRU", ["x", "W", recurrence, "", "", "h"], ["", "y"], hidden_size=4),
    ]
    held = {zeros: np.zeros((2, 5, 4)), "W": rng.normal(size=(1, 12, 6)), recurrence: rng.normal(size=(1, 12, 4))}
    tensors = [numpy_helper.from_array(array.astype(np.float32), each) for each, array in held.items()]
    tensors.append(numpy_helper.from_array(np.array([1]), "first"))
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 5, 6))
    graph = helper.make_graph(nodes, "g", [info], [onnx.ValueInfoProto(name="y")], tensors)
    found = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert {value.name for value in found.parameters} == {"W", recurrence}


def test_constants_of_a_paddle_file_stay_and_the_loss_falls() -> None:
    """Exponent, eps, the root of 2: trained, they give NaN in the second step."""
    rng = np.random.default_rng(0)
    p = Part(rng, shape=(4, 8))
    x = p("MatMul", "x", p.constant(rng.normal(size=(8, 8)), True))
    off = p("Sub", x, p("ReduceMean", x, axes=[-1]))
    safe = p("Add", p("ReduceMean", p("Pow", off, p.number(2)), axes=[-1]), p.number(1e-5))
    z = p("Div", off, p("Sqrt", safe))
    y = p("Mul", p("Mul", z, p("Add", p("Erf", p("Div", z, p.number(2**0.5))), p.number(1))), p.number(0.5))
    names = {name: f"p2o.helper.constant.{i}" for i, name in enumerate(p.constants)} | {"c0": "linear_0.w_0"}
    for node in p.nodes:
        node.input[:] = [names.get(name, name) for name in node.input]
    held = [numpy_helper.from_array(array, names[name]) for name, array in p.constants.items()]
    info = helper.make_tensor_value_info("x", 1, (4, 8))
    graph = helper.make_graph(p.nodes, "g", [info], [onnx.ValueInfoProto(name=y)], held)
    imported = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [value.name for value in imported.parameters] == ["linear_0.w_0"]
    session = fp.compile(imported, fp.losses.mse, fp.optim.Adam(1e-3), target="numpy").bind()
    batch = {"x": (0.01 + 1e-3 * rng.normal(size=(4, 8))).astype(np.float32), "target": np.zeros((4, 8), np.float32)}
    losses = [float(session.step(batch).loss) for _ in range(4)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    frozen = {"optimizer": fp.optim.Adam(1e-3), "target": "numpy", "freeze": ["p2o.helper.constant.*"]}
    fp.compile(imported, fp.losses.mse, **frozen)  # to freeze what is a constant anyway is no mistake
    with pytest.raises(fp.UsageError, match=r"no weight of the model is called 'p2o\.helper\.weight'"):
        fp.compile(imported, fp.losses.mse, **{**frozen, "freeze": ["p2o.helper.weight"]})
