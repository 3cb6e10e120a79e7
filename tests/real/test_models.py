"""Trained models that packages ship: their outputs, what of them is trained, steps of training, and their export."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import ModelError, UnsupportedError
from foreplan.graph import Graph
from tests.oracle.peers import onnx
from tests.real.catalogue import FOLDER, Model, folder, models, packages
from tests.real.judge import judge, judged

TARGETS = ("numpy", "cpu:threads=1")


def listed(refused: bool = False) -> list[pytest.ParameterSet]:
    """The models, those that are not there skipped."""
    found = []
    for model in models().values():
        if bool(model.refused) is refused:
            gone = pytest.mark.skipif(not model.path.exists(), reason="not downloaded: `make setup-real`")
            found.append(pytest.param(model, id=model.name, marks=[gone, *[pytest.mark.thorough] * model.slow]))
    return found


@pytest.mark.skipif(not FOLDER.is_dir(), reason="not downloaded: `make setup-real`")
def test_what_was_downloaded_is_what_is_tried() -> None:
    """Else all else here would be skipped, and nobody would see it."""
    known = {folder(package): package for package in packages()}
    assert known.keys() >= set(FOLDER.iterdir())
    there = {package for path, package in known.items() if path.is_dir()}
    assert there and all(model.path.exists() for model in models().values() if model.package in there)


@pytest.fixture(scope="module", params=listed())
def model(request: pytest.FixtureRequest) -> Model:
    """One after the other: all tests of a model run in a row, and share what it gives in ONNX Runtime."""
    found: Model = request.param
    return found


@lru_cache(maxsize=1)
def imported(model: Model) -> Graph:
    feeds = model.feeds()
    values = {name: feeds.pop(name) for name in model.bind}
    return fp.from_onnx(model.path, {name: array.shape for name, array in feeds.items()}, values=values)


def given(model: Model, step: fp.Compiled) -> dict[str, np.ndarray]:
    read = {slot.name for slot in step.program.inputs}
    return {name: array for name, array in model.feeds().items() if name in read}


@pytest.mark.parametrize("target", TARGETS)
def test_its_outputs_are_those_of_onnx_runtime(model: Model, target: str) -> None:
    step = fp.compile(imported(model), target=target)
    assert not judged(model).differences(step.bind().step(given(model, step)).outputs)


def test_what_a_person_would_train_is_trained(model: Model) -> None:
    found = {value.name for value in imported(model).parameters}
    if model.trained is not None:
        found = {name for name in found if not model.is_open(name)}
        assert found - model.weights() == set(), "are constants"
        assert model.weights() - found == set(), "are weights"
    assert not {name for name in found if model.is_frozen(name)}


def training_step(model: Model, target: str) -> fp.Compiled:
    """Of Adam, on the first output of floats."""
    place = [value.dtype.is_float for value in imported(model).outputs.values()].index(True)

    def loss(*found: Any) -> Any:
        return np.mean(np.square(found[place] - 0.1))

    return fp.compile(imported(model), loss, fp.optim.Adam(1e-3), target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_three_steps_of_adam_keep_every_number_one(model: Model, target: str) -> None:
    if model.trained == ():
        with pytest.raises(ModelError, match="nothing can be trained"):
            training_step(model, target)
        return
    step = training_step(model, target)
    session = step.bind()
    before = {name: np.array(session.parameters[name]) for name in session.parameters}
    losses = [session.step(given(model, step)).loss for _ in range(3)]
    after = {name: np.asarray(session.parameters[name]) for name in session.parameters}
    assert np.isfinite(losses).all()
    assert not [name for name in after if np.isnan(after[name]).any()]
    assert [name for name in after if not np.array_equal(after[name], before[name])]


def test_weights_that_changed_are_written_where_they_belong(model: Model, tmp_path: Path) -> None:
    step = fp.compile(imported(model), target="numpy")
    session, rng = step.bind(), np.random.default_rng(1)
    for name in session.parameters:
        weight = np.asarray(session.parameters[name])
        session.parameters[name] = (weight * (1 + 0.02 * rng.random(weight.shape))).astype(weight.dtype)
    path, *_ = session.to_onnx(tmp_path / "written.onnx")
    found = session.step(given(model, step)).outputs
    assert not judge(onnx.load(str(path)), model.feeds()).differences(found)
    assert judged(model).differences(found) or not session.parameters


@pytest.mark.parametrize("other", listed(refused=True))
def test_what_it_lacks_is_named(other: Model) -> None:
    with pytest.raises(UnsupportedError, match=rf"node '\w+' \({other.refused}\w*\)"):
        imported(other)
