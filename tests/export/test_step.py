"""Training steps as ONNX files: one step in ONNX Runtime is one step of the session."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import foreplan as fp
from foreplan.base.errors import UnsupportedError
from foreplan.frontend.losses import attach_loss
from foreplan.graph import Uniform
from foreplan.runtime.inputs import made_up
from tests.export.runtime import near, opened, run

MODELS = {
    "mlp": "mlp:width=16,layers=2,batch=4,inputs=9",
    "vit": "vit_b16:batch=2,size=32,layers=1,width=32,heads=4,classes=10",
    "gpt2": "gpt2_small:batch=2,seq=16,layers=1,width=32,heads=4,vocabulary=100",
    "convolutions": "",
}


def convolutions(x):
    """Strides, groups, dilations, padding, the transposed one, batch statistics, both kinds of pooling."""
    y = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(x, 8, 3, stride=2, padding=1)))
    y = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(y, 8, 3, padding=1, groups=8)))
    y = fp.nn.relu(fp.nn.conv_transpose(y, 4, 3, stride=2, padding=1, output_padding=1))
    y = fp.nn.max_pool(fp.nn.conv(y, 6, 3, padding=2, dilation=2), 3, stride=2, padding=1)
    return fp.nn.linear(fp.nn.flatten(fp.nn.avg_pool(y, 2)), 5)


def trained(name, optimizer, **options):
    """A session with a few steps behind it, and its inputs."""
    model = fp.models.build(name) if name else fp.trace(convolutions, fp.spec((4, 3, 17, 20)))
    if model.loss is None:
        loss = fp.models.default_loss(name) if name else "cross_entropy"
        model = attach_loss(model, loss, [next(iter(model.outputs))])
    session = fp.compile(model, optimizer=optimizer, **options).bind(seed=1)
    inputs = made_up(session.program, 4)
    for _ in range(2):
        session.step(inputs)
    return session, inputs


@pytest.mark.parametrize("name", MODELS)
def test_one_step_in_onnx_runtime(name, tmp_path):
    session, inputs = trained(MODELS[name], fp.optim.Momentum(0.01))
    session.to_onnx(tmp_path / "step.onnx", "step")
    found = run(tmp_path / "step.onnx", inputs)
    result = session.step(inputs)
    assert found["loss"] == pytest.approx(result.loss, rel=1e-5)
    changed = [key for key in session.stored if not key.endswith("/velocity")]
    assert all(near(found[f"{key}/next"], session.stored[key], 2e-5) for key in changed)
    assert f"{next(iter(session.parameters))}/velocity/next" in found


BY_ROWS = [
    *(fp.optim.SGD(0.1), fp.optim.Momentum(0.1), fp.optim.Nesterov(0.1)),
    *(fp.optim.Adagrad(0.1, 0.5), fp.optim.SparseAdam(0.1, epsilon=0.1)),
]


@pytest.mark.parametrize("optimizer", BY_ROWS, ids=lambda each: type(each).__name__)
def test_rows_are_added_to_tables_in_onnx_runtime(optimizer, tmp_path):
    """The update of a table whose gradient is rows alone."""
    session, inputs = trained("dlrm:batch=4,dense=5,tables=3,rows=20,width=8,hidden=16", optimizer)
    session.to_onnx(tmp_path / "step.onnx", "step")
    before, found = dict(session.stored), run(tmp_path / "step.onnx", inputs)
    session.step(inputs)
    for i in range(3):
        name = f"emb_l.{i}.weight"
        assert (session.stored[name] != before[name]).any()
        assert near(found[f"{name}/next"], session.stored[name], 2e-5)


def test_the_update_is_the_formula_of_adamw(tmp_path):
    """Loshchilov and Hutter (2019), algorithm 2, with gradients of a linear model in NumPy."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 5)).astype(np.float32), rng.normal(size=(8, 2)).astype(np.float32)
    graph = fp.trace(lambda x: {"y": x @ fp.nn.parameter("w", (5, 2), Uniform(-1.0, 1.0))}, fp.spec((8, 5)))
    session = fp.compile(graph, fp.losses.mse, fp.optim.AdamW(0.1, weight_decay=0.2), outputs=["y"]).bind(seed=4)
    w = session.parameters["w"].astype(np.float64)
    session.to_onnx(tmp_path / "step.onnx", "step")
    found = run(tmp_path / "step.onnx", {"x": x, "target": y, "learning_rate": np.float32(0.05)})
    error = x @ w - y
    g = x.T @ (2 * error / error.size)
    moved = w - 0.05 * 0.2 * w - 0.05 * g / (np.abs(g) + 1e-8)
    assert found["loss"] == pytest.approx((error**2).mean(), rel=1e-5)
    assert near(found["y"], (x @ w).astype(np.float32)) and near(found["w/next"], moved.astype(np.float32))
    assert near(found["w/first_moment/next"], (0.1 * g).astype(np.float32)) and found["step/next"] == 1


def test_steps_follow_one_another_by_their_inputs_and_outputs(tmp_path):
    session, inputs = trained(MODELS["mlp"], fp.optim.Adam(1e-3, clip_norm=0.5))
    session.to_onnx(tmp_path / "step.onnx", "step")
    first = run(tmp_path / "step.onnx", inputs)
    state = {name.removesuffix("/next"): array for name, array in first.items() if name.endswith("/next")}
    second = run(tmp_path / "step.onnx", {**inputs, **state})
    wanted = [session.step(inputs).loss for _ in range(2)]
    assert [first["loss"], second["loss"]] == pytest.approx(wanted, rel=1e-5) and wanted[0] != wanted[1]


def test_gradients_are_returned_where_nothing_is_updated(tmp_path):
    session, inputs = trained(MODELS["mlp"], None, freeze=["hidden0"])
    session.to_onnx(tmp_path / "step.onnx", "step")
    found, wanted = run(tmp_path / "step.onnx", inputs), session.step(inputs).gradients
    assert wanted and all(near(found[f"{name}/gradient"], wanted[name]) for name in wanted)
    given = [each.name for each in opened(tmp_path / "step.onnx").get_overridable_initializers()]
    assert not any(name.startswith("hidden0") for name in given)


def test_random_bits_are_refused_by_name(tmp_path):
    session, _ = trained("bert_base:batch=1,seq=4,layers=1,width=8,heads=2,vocabulary=9,dropout=0.1", None)
    with pytest.raises(UnsupportedError, match=r"dropout_mask.* draws random bits"):
        session.to_onnx(tmp_path / "step.onnx", "step")
    session.to_onnx(tmp_path / "model.onnx")


def test_a_step_in_float16_and_what_opset_18_does_not_take(tmp_path):
    """Weights stay float32; products are rounded to eleven bits."""
    session, inputs = trained(MODELS["mlp"], fp.optim.Momentum(0.01), precision="fp16")
    session.to_onnx(tmp_path / "step.onnx", "step")
    found = run(tmp_path / "step.onnx", inputs)
    assert found["loss"] == pytest.approx(session.step(inputs).loss, rel=2e-3)
    assert all(near(found[f"{name}/next"], array, 2e-3) for name, array in session.parameters.items())
    session, _ = trained(MODELS["convolutions"], None, precision="bf16")
    with pytest.raises(UnsupportedError, match=r"opset 18\) does not take it: .*Conv.*bfloat16"):
        session.to_onnx(tmp_path / "no.onnx", "step")


def test_the_file_says_where_the_plan_puts_what(tmp_path):
    """Offsets and lifetimes are those of the plan's steps, and the checker and ONNX Runtime take the file."""
    session, inputs = trained(MODELS["mlp"], fp.optim.Momentum(0.01))
    session.to_onnx(tmp_path / "step.onnx", "step")
    model = onnx.load(tmp_path / "step.onnx")
    onnx.checker.check_model(model, full_check=True)
    told = {
        each.name: {prop.key: prop.value for prop in each.metadata_props}
        for each in (*model.graph.value_info, *model.graph.input, *model.graph.output, *model.graph.node)
    }
    program, plan = session.program, session.plan
    seen = 0
    for number, step in enumerate(plan.steps):
        action = program.actions[step.action]
        for value, offset in zip(action.writes, step.writes):
            facts = told.get(program.values[value].name)
            if facts:
                seen += 1
                assert facts["plan.written"] == str(number) and facts["plan.offset"] == str(offset)
                assert int(facts["plan.bytes"]) == program.values[value].nbytes
    assert seen > len(plan.steps) / 2
    for each in (
        *model.graph.value_info,
        *model.graph.output,
    ):  # viewers show this, where they show no metadata of values
        if offset := told[each.name].get("plan.offset"):
            assert f"offset {offset}, written {told[each.name]['plan.written']}" in each.doc_string
    names = {program.actions[step.action].name: str(number) for number, step in enumerate(plan.steps)}
    for node in model.graph.node:  # which has the instruction of the longest name that it begins with
        scope = max((name for name in names if node.name.startswith(f"{name}/")), key=len, default="")
        assert told[node.name].get("plan.instruction") == names.get(scope), node.name
    assert "loss" in run(tmp_path / "step.onnx", inputs)
