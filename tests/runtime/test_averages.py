"""Running averages of weights: the recurrence, who evaluates with them, and what files hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Kind
from foreplan.runtime.session import Session

MODEL = "mlp:batch=4,width=8,layers=1,inputs=5,classes=3"
EMA, RATE = 0.75, 0.5


def data(seed: int, *, times: int = 1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shape = (4,) if times == 1 else (times, 4)
    return {"x": rng.standard_normal((*shape, 5)).astype(np.float32), "target": rng.integers(0, 3, shape)}


def trained(target: str = "numpy", **options: object) -> Session:
    graph = fp.models.build(MODEL)
    optimizer = fp.optim.Momentum(RATE, ema=EMA)
    return fp.compile(graph, fp.losses.cross_entropy, optimizer, target=target, **options).bind(seed=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
def test_averages_follow_the_recurrence_and_are_counted(target: str, accumulate: int) -> None:
    session = trained(target, accumulate=accumulate)
    expected = dict(session.parameters)
    assert all((session.state_dict(ema=True)[name] == array).all() for name, array in expected.items())
    for t in range(4):
        session.step(data(t, times=accumulate))
        for name, p in session.parameters.items():
            expected[name] = EMA * expected[name] + (1 - EMA) * p if t else p
            np.testing.assert_allclose(session.state_dict(ema=True)[name], expected[name], rtol=1e-5, atol=1e-7)
    plain = fp.compile(fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.Momentum(RATE), target=target)
    own = [slot.operand.type.nbytes for slot in session.program.stored if slot.kind is Kind.PARAMETER]
    kept, without = (
        sum(slot.operand.type.nbytes for slot in program.stored if slot.kind is Kind.STATE)
        for program in (session.program, plain.program)
    )
    assert kept - without == sum(own)
    if target != "numpy" and accumulate == 1:  # whose kernels need no scratch memory: the arena grows by nothing else
        assert 0 <= session.plan.arena_bytes - plain.arena_bytes - sum(own) <= 64 * (len(own) + 1)


def test_sessions_that_share_weights_evaluate_with_averages() -> None:
    session = trained()
    evaluation = fp.compile(fp.models.build(MODEL)).bind(share=session)
    for t in range(3):
        session.step(data(t))
    x = {"x": data(9)["x"]}
    apart = fp.compile(fp.models.build(MODEL)).bind()
    apart.parameters.update(session.state_dict(ema=True))
    before, (name, array) = dict(session.parameters), next(iter(session.parameters.items()))
    plain = evaluation.step(x).outputs["logits"]
    with session.averaged():
        averaged = evaluation.step(x).outputs["logits"]
        assert (evaluation.parameters[name] != array).any()
        for call in (lambda: session.step(data(5)), lambda: session.save("nowhere"), lambda: session.load("nowhere")):
            with pytest.raises(fp.SessionError, match="leave the block"):
                call()
    np.testing.assert_array_equal(averaged, apart.step(x).outputs["logits"])
    assert (averaged != plain).any()
    np.testing.assert_array_equal(evaluation.step(x).outputs["logits"], plain)
    assert all((session.parameters[name] == array).all() for name, array in before.items())
    with pytest.raises(RuntimeError, match="mine"), session.averaged():
        raise RuntimeError("mine")
    assert all((session.parameters[name] == array).all() for name, array in before.items())
    session.step(data(6))


def test_files(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    session = trained()
    session.step(data(0))
    session.step(data(1))
    session.save(tmp_path / "all")
    session.save(tmp_path / "averages", ema=True)
    averages = session.state_dict(ema=True)
    found = load_file(tmp_path / "averages")
    assert found.keys() == averages.keys()
    assert all((found[name] == array).all() for name, array in averages.items())
    other = fp.compile(fp.models.build(MODEL)).bind()
    other.load(tmp_path / "averages")
    assert all((other.parameters[name] == array).all() for name, array in averages.items())
    again = trained()
    again.load(tmp_path / "all")
    for each in (session, again):
        each.step(data(2))
    assert all((again.stored[name] == session.stored[name]).all() for name in session.stored)
    session.load(tmp_path / "averages")
    assert all((session.parameters[name] == array).all() for name, array in averages.items())


def test_averages_of_narrow_weights_are_wide(tmp_path: Path) -> None:
    """A hundredth of a step would be lost in bfloat16."""
    graph = fp.trace(lambda x: (fp.nn.parameter("w", (3,), dtype="bfloat16") * x).sum(), fp.spec((3,), "bfloat16"))
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(1.0, ema=0.99), narrow_weights=True)
    session, x = step.bind(), {"x": np.ones(3).astype("bfloat16")}
    session.step(x)
    first = session.parameters["w"].astype(np.float64)
    session.step(x)
    np.testing.assert_allclose(session.stored["w/ema"], first - 0.01, rtol=1e-6)
    assert session.stored["w/ema"].dtype == np.float32
    assert session.state_dict(ema=True)["w"].dtype == session.parameters["w"].dtype
    with session.averaged():
        pass
    session.save(tmp_path / "w", ema=True)
    session.load(tmp_path / "w")


def test_a_step_without_averages_says_so(tmp_path: Path) -> None:
    session = fp.compile(fp.models.build(MODEL), fp.losses.cross_entropy, fp.optim.SGD(0.1)).bind()
    for call in (
        lambda: session.state_dict(ema=True),
        lambda: session.save(tmp_path / "w", ema=True),
        lambda: session.averaged().__enter__(),
    ):
        with pytest.raises(fp.SessionError, match=r"keeps no averages.*ema=0\.999"):
            call()
    assert not (tmp_path / "w").exists()
    with pytest.raises(fp.UsageError, match="True or False"):
        session.save(tmp_path / "w", ema=1)  # type: ignore[arg-type]
