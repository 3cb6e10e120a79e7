"""The front door from Python: what it takes, and what it says to arguments that it does not."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import foreplan as fp


def network(x):
    return fp.nn.linear(fp.nn.relu(fp.nn.linear(x, 8, name="a")), 3, name="b")


def two_heads(x):
    h = fp.nn.relu(fp.nn.linear(x, 8, name="a"))
    return fp.nn.linear(h, 3, name="classes"), fp.nn.linear(h, 1, name="value")


GRAPH = fp.trace(network, fp.spec((4, 6)))
X, LABELS = np.random.default_rng(0).standard_normal((4, 6), dtype=np.float32), np.array([0, 1, 2, 0])
SGD = fp.optim.SGD(0.1)


def test_a_loss_with_inputs_of_its_own():
    def weighted(output, target=fp.spec((4, 3)), weight=fp.spec(())):  # noqa: B008
        return weight * np.mean((output - target) ** 2)

    session = fp.compile(GRAPH, loss=weighted, optimizer=SGD).bind()
    (output,) = fp.compile(GRAPH).bind(share=session).step({"x": X}).outputs.values()
    target = np.ones((4, 3), np.float32)
    losses = [session.step({"x": X, "target": target, "weight": 2}).loss for _ in range(5)]
    assert losses[0] == pytest.approx(2 * ((output - 1) ** 2).mean(), rel=1e-5)
    assert losses == sorted(losses, reverse=True)


def test_a_loss_of_two_outputs():
    def loss(classes, value, target=fp.spec((4,), "int64")):  # noqa: B008
        return fp.losses.cross_entropy(classes, target) + np.mean(value * value)

    graph = fp.trace(two_heads, fp.spec((4, 6)))
    session = fp.compile(graph, loss=loss, optimizer=SGD).bind()
    classes, value = fp.compile(graph).bind(share=session).step({"x": X}).outputs.values()
    log_sum = np.log(np.exp(classes).sum(1))
    expected = (log_sum - classes[np.arange(4), LABELS]).mean() + (value**2).mean()
    assert session.step({"x": X, "target": LABELS}).loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp.compile("model.onnx"), "must be a Graph, and is 'model.onnx'"),
        (lambda: fp.compile(network), "must be a Graph"),
        (lambda: fp.differentiate(None, "mse"), "must be a Graph"),
        (lambda: fp.compile(GRAPH, loss="mse", optimizer="sgd"), "optimizer must be one such as"),
        (lambda: fp.compile(GRAPH, loss="mse", optimizer=fp.optim.SGD), "optimizer must be one such as"),
        (lambda: fp.compile(GRAPH, outputs="output"), r"outputs=\['output'\]"),
        (lambda: fp.compile(GRAPH, outputs=["nope"]), "no output 'nope'. Its outputs are output"),
        (lambda: fp.compile(GRAPH, loss="mse", outputs="output"), r"outputs=\['output'\]"),
        (lambda: fp.compile(GRAPH, budget=[]), "a budget is bytes"),
        (lambda: fp.compile(GRAPH, loss=3), "3 \\(int\\) is no loss"),
        (lambda: fp.compile(GRAPH).bind(threads=0), "threads must be a whole number from 1 to 1024"),
        (lambda: fp.optim.SGD("0.1"), "learning_rate must be in"),
        (lambda: fp.models.build("mlp:batch=2,batch=3"), "given twice"),
        (lambda: fp.models.build("MLP"), "did you mean 'mlp'"),
        (lambda: fp.models.build("gpt2"), "did you mean 'gpt2_small'"),
    ],
)
def test_arguments_that_cannot_be_meant(call, message):
    with pytest.raises(fp.UsageError, match=message):
        call()


@pytest.mark.parametrize("inputs", [[X], X, {"x": [[1], [1, 2]]}, {"x": None}, {3: X}, {"x": "text"}])
def test_inputs_that_are_none(inputs):
    with pytest.raises(fp.InputError):
        fp.compile(GRAPH).bind().step(inputs)


def test_a_wrong_loss_is_told_with_the_users_line():
    with pytest.raises(fp.TraceError, match=r"^test_api\.py:\d+: the loss function gives .*floating-point scalar"):
        fp.compile(GRAPH, loss=lambda output: output * 2)


def test_numbers_of_numpy_are_numbers():
    rates = [fp.optim.Nesterov(np.float32(0.5), momentum=np.float64(0.5)), fp.optim.Nesterov(0.5, momentum=0.5)]
    first, second = (fp.compile(GRAPH, loss="mse", optimizer=rate) for rate in rates)
    assert first.plan == second.plan


def test_what_is_returned_may_be_an_input_or_a_parameter(tmp_path):
    step = fp.compile(GRAPH, loss="mse", optimizer=SGD, outputs=["a.weight", "x"])
    step.save(tmp_path / "step.plan")
    for compiled in (step, fp.load_plan(tmp_path / "step.plan")):
        outputs = compiled.bind().step({"x": X, "target": np.zeros((4, 3), np.float32)}).outputs
        np.testing.assert_array_equal(outputs["x"], X)
        assert outputs["a.weight"].shape == (8, 6)


def test_the_collector_runs_again_however_compiling_ends() -> None:
    fp.compile(GRAPH)
    assert gc.isenabled()
    with pytest.raises(fp.UsageError):
        fp.compile(GRAPH, optimizer=SGD)
    assert gc.isenabled()
    gc.disable()
    try:
        fp.compile(GRAPH)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_a_notebook_shows_is_one_line() -> None:
    graph = fp.models.build("mlp:width=8,batch=4,inputs=6,classes=3")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Adam())
    session = step.bind()
    names = {repr(each) for each in (graph, step, step.program, step.plan, step.memory, step.weights, session)}
    assert len(names) == 7
    for text in names:
        assert "\n" not in text and len(text) < 120 and text.startswith("<") and " at 0x" not in text


def test_a_step_is_compiled_as_it_is() -> None:
    """Not differentiated once more; and what was asked of the model is asked where the step is made."""
    graph = fp.models.build("mlp:batch=3,width=8,layers=2,inputs=6,classes=4")
    step = fp.differentiate(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1))
    made = fp.compile(step, target="numpy")
    assert made.program.digest == fp.lower(step, "numpy").digest and made.graph is step
    with pytest.raises(fp.UsageError, match="optimizer is for a model, and graph 'mlp' has its backward pass already"):
        fp.compile(step, optimizer=fp.optim.SGD(0.1))
    with pytest.raises(fp.UsageError, match="precision is for a model"):
        fp.compile(fp.differentiate(graph, fp.losses.cross_entropy), precision="bf16")
