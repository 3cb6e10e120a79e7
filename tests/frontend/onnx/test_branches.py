"""Branches on conditions that are computed from data: forward as ONNX Runtime, gradients of the branch taken alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import foreplan as fp
from foreplan.base.errors import ModelError, ShapeError, UnsupportedError, ValueNeededError
from foreplan.frontend import from_onnx
from foreplan.graph.value import Kind
from tests.frontend.onnx.models import branch, by_onnxruntime, info, kinds, model, node, random, run
from tests.profile import pick

SHAPE, SIGNS = (2, 3), 3


def held(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


class Drawn:
    """Branches within branches. Branch k takes roots and logarithms of `p<k>`, whose sign its condition tells.

    So the one that is not taken gives NaN, and its derivatives are NaN and infinite.
    """

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.count = self.choices = 0

    def claim(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def steps(self, reads: list[str], signs: dict[int, bool]) -> tuple[list[Any], list[Any], str]:
        """Nodes and initializers of a body, and the tensor that it gives."""
        nodes: list[onnx.NodeProto] = []
        tensors: list[onnx.TensorProto] = []
        total = str(self.draw.choice(reads))
        for _ in range(2):
            kind = self.draw.choice(["root", "loop", *["choice"] * (self.choices < 3)])
            made = self.claim("t")
            if kind == "root" and signs:
                k = int(self.draw.choice(list(signs)))
                positive = f"p{k}" if signs[k] else f"n{k}"
                nodes.append(node(str(self.draw.choice(["Sqrt", "Log", "Reciprocal"])), positive, made))
            elif kind == "loop":
                carried, inputs = (
                    self.claim("s"),
                    (info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL)),
                )
                inner = [node("Identity", "go_in", "go"), node("Mul", f"{carried} {total}", made + "_")]
                body = branch("body", *inner, inputs=(*inputs, info(carried, SHAPE)), outputs=f"go {made}_")
                nodes.append(node("Loop", f"two yes {total}", made, body=body))
            elif kind == "choice":
                nodes.append(self.choice(made, [*reads, total], signs))
            else:
                nodes.append(node("Tanh", total, made))
            weight, new = self.claim("w"), self.claim("t")
            tensors.append(held(weight, self.draw.uniform(-0.8, 0.8, (3, 3)).astype(np.float32)))
            nodes += [node("Add", f"{total} {made}", new + "_"), node("MatMul", f"{new}_ {weight}", new)]
            total = new
        return nodes, tensors, total

    def choice(self, made: str, reads: list[str], signs: dict[int, bool]) -> onnx.NodeProto:
        k = int(self.draw.integers(SIGNS))
        self.choices += 1
        bodies = {}
        for name, positive in (("then_branch", True), ("else_branch", False)):
            nodes, tensors, given = self.steps(reads, {**signs, k: positive})
            bodies[name] = branch(name, *nodes, outputs=given)
            bodies[name].initializer.extend(tensors)
        return node("If", f"c{k}", made, name=self.claim("choice"), **bodies)

    def model(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The model, and the same whose conditions are inputs."""
        made, constants = [], {"two": np.array(2), "yes": np.array(True), "zero": np.zeros((), np.float32)}
        conditions = []
        for k in range(SIGNS):
            constants[f"v{k}"] = self.draw.uniform(0.5, 1.5, SHAPE).astype(np.float32)
            made += [node("Mul", f"x{k} v{k}", f"p{k}"), node("Neg", f"p{k}", f"n{k}")]
            conditions += [node("ReduceMin", f"x{k}", f"m{k}", keepdims=0), node("Greater", f"m{k} zero", f"c{k}")]
        first = self.choice("first", ["p0", "p1", "p2"], {})
        nodes, tensors, given = self.steps(["first", "p0"], {})
        last = [first, *nodes, node("Add", f"first {given}", "sum"), node("Softsign", "sum", "y")]
        inputs: dict[str, Any] = {f"x{k}": SHAPE for k in range(SIGNS)}
        found = model([*made, *conditions, *last], inputs, [], constants, opset=18)
        known = model([*made, *last], inputs, [], constants, opset=18)
        known.graph.input.extend(info(f"c{k}", (), TensorProto.BOOL) for k in range(SIGNS))
        for each in (found, known):
            each.graph.initializer.extend(tensors)
            each.graph.output.append(info("y", SHAPE))
        return found, known


def after_a_step(graph: Any, target: str, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a step of plain descent adds to each weight."""
    session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.5), target=target).bind()
    before = {name: session.parameters[name].copy() for name, kind in kinds(graph).items() if kind is Kind.PARAMETER}
    session.step({**given, "target": np.zeros(SHAPE, np.float32)})
    return {name: session.parameters[name] - start for name, start in before.items()}


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize("seed", range(pick(1, 2, 4)))
def test_drawn_branches_give_and_train_what_the_taken_ones_do(seed: int, target: str) -> None:
    """Beside ONNX Runtime, and beside the same model whose conditions are known: it has the taken branches alone."""
    proto, known = Drawn(seed).model()
    graph = from_onnx(proto)
    draw = np.random.default_rng(seed)
    signs = draw.integers(0, 2, SIGNS)
    x = {f"x{k}": draw.uniform(0.3, 1.5, SHAPE).astype(np.float32) * (1 if s else -1) for k, s in enumerate(signs)}
    expected = by_onnxruntime(proto, **x)["y"]
    assert np.isfinite(expected).all()
    compiled = fp.compile(graph, target=target).bind()
    np.testing.assert_allclose(compiled.step(x).outputs["y"], expected, rtol=1e-5, atol=1e-6)
    alone = from_onnx(known, values={f"c{k}": bool(s) for k, s in enumerate(signs)})
    wanted, got = after_a_step(alone, target, x), after_a_step(graph, target, x)
    for name, change in got.items():
        same = wanted.get(name.replace("/then/", "/").replace("/else/", "/"))
        np.testing.assert_allclose(change, 0 if same is None else same, rtol=1e-4, atol=1e-6, err_msg=name)
    assert max(np.abs(change).max() for change in got.values()) > 1e-3


def choosing(then: onnx.GraphProto, other: onnx.GraphProto, outputs: str, **inputs: Any) -> onnx.ModelProto:
    """A model that takes the first branch where the sum of x is positive."""
    nodes = [
        node("ReduceSum", "x", "s", keepdims=1),
        node("Greater", "s zero", "c"),
        node("If", "c", outputs, "choice", then_branch=then, else_branch=other),
    ]
    constants = {"zero": np.zeros(1, np.float32), "two": np.array([2.0], np.float32)}
    found = model(nodes, {"x": (2, 3), **inputs}, [], constants)
    found.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs.split())
    return found


def as_onnxruntime(proto: onnx.ModelProto, **inputs: np.ndarray) -> None:
    """Both branches are taken, by x and by its opposite."""
    graph = from_onnx(proto)
    for x in (np.abs(inputs["x"]), -np.abs(inputs["x"])):
        given = {**inputs, "x": x}
        got, expected = run(graph, **given), by_onnxruntime(proto, **given)
        for name, wanted in expected.items():
            assert got[name].dtype == wanted.dtype
            np.testing.assert_allclose(got[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_condition_within_a_branch_and_outputs_of_several_types() -> None:
    inner = [
        node("Sqrt", "x", "root"),
        node("ReduceMax", "root", "m", keepdims=0),
        node("Less", "m two", "small"),
        node(
            "If",
            "small",
            "a",
            "inner",
            then_branch=branch("t", node("Add", "root two", "ta"), outputs="ta"),
            else_branch=branch("e", node("Mul", "root two", "ea"), outputs="ea"),
        ),
        node("ArgMax", "root", "i", axis=1),
        node("IsNaN", "x", "n"),
    ]
    other = [node("Exp", "x", "b"), node("ArgMin", "x", "j", axis=1), node("Less", "x b", "l")]
    then, other_branch = branch("then", *inner, outputs="a i n"), branch("else", *other, outputs="b j l")
    for each in (then, other_branch):
        each.output[1].type.tensor_type.elem_type = TensorProto.INT64
        each.output[2].type.tensor_type.elem_type = TensorProto.BOOL
    proto = choosing(then, other_branch, "y where flags")
    for scale in (0.1, 30.0):
        as_onnxruntime(proto, x=scale * random(2, 3))


def test_a_branch_may_give_what_it_captures_and_a_loop_or_what_it_holds() -> None:
    kept = helper.make_graph([], "else", [], [info("k", (2, 3))], [held("k", random(2, 3))])
    body = branch(
        "body",
        node("Identity", "go_in", "go"),
        node("Mul", "h two", "h_out"),
        inputs=(info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL), info("h", (2, 3))),
        outputs="go h_out",
    )
    constants = [
        node("Constant", "", "n", value=held("", np.array(3))),
        node("Constant", "", "yes", value=held("", np.array(True))),
    ]
    then = branch("then", *constants, node("Loop", "n yes z", "t", "loop", body=body), outputs="t")
    as_onnxruntime(choosing(then, kept, "y", z=(2, 3)), x=random(2, 3), z=random(2, 3, seed=1))
    captured = branch("then", node("Identity", "z", "t"), outputs="t")
    as_onnxruntime(choosing(captured, kept, "y", z=(2, 3)), x=random(2, 3), z=random(2, 3, seed=1))


def test_branches_may_give_sequences_of_one_length() -> None:
    def halves(name: str, first: str, second: str) -> onnx.GraphProto:
        made = node("SequenceConstruct", f"{first} {second}", name)
        return helper.make_graph(
            [made], name, [], [helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None)]
        )

    proto = choosing(halves("t", "x", "z"), halves("e", "z", "x"), "pair", z=(2, 3))
    proto.graph.node.extend([node("SequenceAt", "pair place", "y")])
    proto.graph.initializer.append(held("place", np.array(1)))
    del proto.graph.output[:]
    proto.graph.output.append(info("y", (2, 3)))
    as_onnxruntime(proto, x=random(2, 3), z=random(2, 3, seed=1))


def test_branches_that_give_the_same_numbers_leave_them_known() -> None:
    """A target shape, as exporters write it in both branches."""
    then, other = (
        branch(name, node("Constant", "", name, value=held("", np.array([3, 2]))), outputs=name) for name in "te"
    )
    for each in (then, other):
        each.output[0].type.tensor_type.elem_type = TensorProto.INT64
    proto = choosing(then, other, "shape")
    proto.graph.node.append(node("Reshape", "x shape", "y"))
    proto.graph.output[0].CopyFrom(info("y", (3, 2)))
    as_onnxruntime(proto, x=random(2, 3))


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (node("ReduceSum", "x", "t"), r"give float32\[1,1\] and float32\[2,3\] as output 0"),
        (node("Cast", "x", "t", to=TensorProto.INT32), r"give int32\[2,3\] and float32\[2,3\] as output 0"),
        (node("NonZero", "x", "t"), r"cannot: .*\(NonZero\)"),
        (node("MatMul", "x x", "t"), r"cannot: .*\(MatMul\)"),
    ],
)
def test_branches_that_cannot_both_be_computed_are_refused(then: onnx.NodeProto, told: str) -> None:
    """The way out is true: no tool can fold what is computed from data."""
    proto = choosing(branch("then", then, outputs="t"), branch("else", node("Neg", "x", "e"), outputs="e"), "y")
    told = rf"node 'choice' \(If\).*computed from data \(input 'x'\), so both branches.*but they {told}"
    with pytest.raises(ValueNeededError, match=told) as caught:
        from_onnx(proto)
    assert caught.value.inputs == ("x",)
    assert "write the branch that is meant in the place of the node" in str(caught.value)
    assert "values=" not in str(caught.value) and "fold" not in str(caught.value)
    nodes = [node("Equal", "rate fast", "c"), proto.graph.node[2]]
    proto = model(nodes, {"x": (2, 3), "rate": ()}, ["y"], {"fast": np.array(16000)})
    proto.graph.input[1].CopyFrom(info("rate", (), TensorProto.INT64))
    with pytest.raises(ValueNeededError, match=r"values=\{'rate': …\} \(--values rate=…\)"):
        from_onnx(proto)
    assert from_onnx(proto, values={"rate": 8000}).outputs["y"].shape == (2, 3)


def test_a_condition_is_one_truth_value() -> None:
    same = branch("same", node("Neg", "x", "t"), outputs="t")
    nodes = [node("Greater", "x zero", "c"), node("If", "c", "y", "choice", then_branch=same, else_branch=same)]
    with pytest.raises(ShapeError, match=r"node 'choice' \(If\).*one truth value, and is bool\[2,3\]"):
        from_onnx(model(nodes, {"x": (2, 3)}, ["y"], {"zero": np.zeros(1, np.float32)}))
    more = branch("more", node("Neg", "x", "t"), node("Exp", "x", "u"), outputs="t u")
    with pytest.raises(ModelError, match="must give as many tensors, and give 1 and 2"):
        from_onnx(choosing(same, more, "y"))


def test_the_note_says_how_to_choose_a_branch_once() -> None:
    proto = choosing(
        branch("t", node("Exp", "x", "t"), outputs="t"), branch("e", node("Neg", "x", "e"), outputs="e"), "y"
    )
    (note,) = from_onnx(proto).notes
    assert "node 'choice' (If): its condition is computed from data" in note and "values=" not in note
    nodes = [node("Equal", "rate fast", "c"), *proto.graph.node[2:]]
    proto = model(nodes, {"x": (2, 3), "rate": ()}, ["y"], {"fast": np.array(16000)})
    proto.graph.input[1].CopyFrom(info("rate", (), TensorProto.INT64))
    (note,) = from_onnx(proto).notes
    assert "values={'rate': …} (--values rate=…)" in note
    chosen = from_onnx(proto, values={"rate": 8000})
    assert [each.op.name for each in chosen.nodes] == ["map"] and not chosen.notes


def test_random_numbers_in_a_branch() -> None:
    """ONNX Runtime draws others, so their moments are compared: noise where the branch is taken, x elsewhere."""
    then = branch("t", node("RandomNormalLike", "x", "t", mean=5.0), outputs="t")
    proto = choosing(then, branch("e", node("Identity", "x", "e"), outputs="e"), "y", z=(2, 3))
    proto.graph.input[0].CopyFrom(info("x", (40, 50)))
    session = fp.compile(from_onnx(proto), target="numpy").bind()
    x, z = np.abs(random(40, 50)), random(2, 3)
    one, other = (session.step({"x": x, "z": z}).outputs["y"].copy() for _ in range(2))
    assert abs(one.mean() - 5) < 0.1 and abs(one.std() - 1) < 0.1 and (one != other).all()
    np.testing.assert_array_equal(session.step({"x": -x, "z": z}).outputs["y"], -x)


@pytest.mark.parametrize("training", [0, 1])
def test_statistics_in_a_branch_that_is_not_taken_stay(training: int) -> None:
    """With training_mode they follow the batches that take the branch. Without it they stay, which a note says."""
    x = random(4, 3) * 3
    outputs = "t m v" if training else "t"
    norm = node("BatchNormalization", "x gain bias mean var", outputs, "norm", training_mode=training)
    proto = choosing(branch("t", norm, outputs="t"), branch("e", node("Exp", "x", "e"), outputs="e"), "y")
    proto.graph.input[0].CopyFrom(info("x", (4, 3)))
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    for name, array in {"gain": ones, "bias": zeros, "mean": zeros, "var": ones}.items():
        proto.graph.initializer.append(held(name, array))
    graph = from_onnx(proto)
    assert any("keeps its running statistics" in note for note in graph.notes) == (not training)
    session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.1), target="numpy").bind()
    for given in (-np.abs(x), np.abs(x)):
        session.step({"x": given, "target": np.zeros((4, 3), np.float32)})
        followed = 0.1 * given.mean(0) if training and given.sum() > 0 else zeros
        np.testing.assert_allclose(session.stored["mean"], followed, rtol=1e-5, atol=1e-6)


def until_small(steps: int, known: bool) -> onnx.ModelProto:
    """h becomes sqrt(h·w − 0.28) while its least element is above 0.3: behind that there is no such root."""
    nodes = [
        node("Mul", "h w", "scaled"),
        node("Sub", "scaled less", "inside"),
        node("Sqrt", "inside", "h_out"),
        node("ReduceMin", "h_out", "least", keepdims=0),
        node("Identity", "go_in", "go") if known else node("Greater", "least limit", "go"),
    ]
    inputs = (info("i", (), TensorProto.INT64), info("go_in", (), TensorProto.BOOL), info("h", SHAPE))
    loop = node("Loop", "n yes x", "y", "loop", body=branch("body", *nodes, inputs=inputs, outputs="go h_out"))
    constants = {"n": np.array(steps), "yes": np.array(True), "w": np.array([0.9, 0.8, 1.0], np.float32)}
    constants |= {"limit": np.array(0.3, np.float32), "less": np.array([0.28], np.float32)}
    proto = model([loop], {"x": SHAPE}, ["y"], constants)
    proto.graph.output[0].CopyFrom(info("y", SHAPE))
    return proto


@pytest.mark.parametrize("size", [0.6, 1.0, 1.6])
def test_a_loop_that_data_end_gives_and_trains_what_its_steps_do(size: float) -> None:
    """Beside ONNX Runtime, and beside the loop of as many steps; NaN of the steps behind the end reaches nothing."""
    x = (size * np.linspace(0.9, 1.1, 6).reshape(SHAPE)).astype(np.float32)
    proto = until_small(9, known=False)
    expected = by_onnxruntime(proto, x=x)["y"]
    (steps,) = [
        n for n in range(1, 10) if np.array_equal(by_onnxruntime(until_small(n, known=True), x=x)["y"], expected)
    ]
    graph = from_onnx(proto)
    assert any("data end it" in note for note in graph.notes) and steps < 9
    assert np.isnan(by_onnxruntime(until_small(steps + 1, known=True), x=x)["y"]).any()
    np.testing.assert_allclose(run(graph, x=x)["y"], expected, rtol=1e-5)
    changes = []
    for each in (graph, from_onnx(until_small(steps, known=True))):
        session = fp.compile(each, fp.losses.mse, fp.optim.SGD(0.5), target="numpy", train=["w"]).bind()
        before = session.parameters["w"].copy()
        session.step({"x": x, "target": np.zeros(SHAPE, np.float32)})
        changes.append(session.parameters["w"] - before)
    np.testing.assert_allclose(changes[0], changes[1], rtol=1e-4)
    assert np.abs(changes[1]).min() > 1e-3


def test_a_loop_that_data_end_has_few_steps_and_one_type() -> None:
    for steps, told in ((1 << 40, "the condition that its body gives is computed from data"), (3, None)):
        proto = until_small(steps, known=False)
        if told is None:  # a state that grows
            proto.graph.node[0].attribute[0].g.node.append(node("Concat", "h_out h_out", "twice", axis=0))
            proto.graph.node[0].attribute[0].g.output[1].name, told = "twice", "changes its type or shape"
        with pytest.raises(UnsupportedError, match=rf"node 'loop' \(Loop\).*{told}"):
            from_onnx(proto)
