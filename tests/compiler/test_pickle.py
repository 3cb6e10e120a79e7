"""What goes from one process to another by pickle, and what says that it does not."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend.losses import attach_loss
from tests.profile import few, values
from tests.remembered import forget
from tests.runtime.micro_batches import compiled, data_for, perceptron


def every_error() -> list[type[fp.ForeplanError]]:
    """All subclasses of the root, wherever in the package they are."""
    for module in pkgutil.walk_packages(fp.__path__, "foreplan."):
        if module.name != "foreplan.__main__":
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:  # what extends classes of PyTorch's is imported where that is
                if error.name != "torch":
                    raise
    found: list[type[fp.ForeplanError]] = [fp.ForeplanError]
    for kind in found:
        found += [each for each in kind.__subclasses__() if each.__module__.startswith("foreplan.")]
    return found


def made(kind: type[fp.ForeplanError]) -> fp.ForeplanError:
    """An error with something in each of its fields."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())
    named = {p.name: i + 1 for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY}
    error = kind("it is wrong", **named)
    error.add_note("and more")
    return error


def test_every_error_of_the_package_is_found() -> None:
    names = {kind.__name__ for kind in every_error()}
    exported = {name for name in fp.__all__ if name.endswith("Error")}
    assert exported | {"CompilationError", "DivergedError"} <= names


@pytest.mark.parametrize("how", [*range(pickle.HIGHEST_PROTOCOL + 1), "copy", "deepcopy"])
def test_all_errors_pickle_with_their_fields(how: int | str) -> None:
    for kind in every_error():
        error = made(kind)
        again = pickle.loads(pickle.dumps(error, how)) if isinstance(how, int) else getattr(copy, how)(error)
        assert type(again) is kind and str(again) == str(error) and again.args == error.args
        assert vars(again) == vars(error) and again.exit_code == error.exit_code


def refuse(budget: str) -> None:
    fp.compile(perceptron(8), budget=budget)


@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_a_pool_of_processes_gives_what_does_not_fit(start: str) -> None:
    with ProcessPoolExecutor(1, get_context(start)) as pool:
        error = pool.submit(refuse, "1KiB").exception(timeout=120)
    assert isinstance(error, fp.DoesNotFitError) and error.capacity == 1024 < error.needed
    assert error.plan.arena_bytes == error.needed and error.advice


TARGETS = ["numpy", "cpu:threads=1", "cuda:h100"]


@pytest.mark.parametrize(
    ("target", "model"),
    values(TARGETS, ["mlp", "lstm_lm:layers=2,width=16,seq=4,vocabulary=30,batch=2", "resnet18:batch=2,size=32"]),
)
def test_a_graph_compiles_alike_when_it_was_copied_or_caches_are_empty(target: str, model: str) -> None:
    graph = attach_loss(fp.models.build(model), fp.models.default_loss(model), [])
    given = pickle.dumps(graph)
    plan = fp.compile(graph, optimizer=fp.optim.SGD(0.1), target=target).plan
    assert fp.compile(pickle.loads(given), optimizer=fp.optim.SGD(0.1), target=target).plan == plan
    copied = copy.deepcopy(graph)
    forget()
    for each in (graph, copied):
        assert fp.compile(each, optimizer=fp.optim.SGD(0.1), target=target).plan == plan


@pytest.mark.parametrize(
    ("target", "options"),
    few(product(TARGETS, [{}, {"accumulate": 2}, {"precision": "bf16"}]), (0, 4, 8)),  # each of both once
)
def test_a_compiled_step_goes_to_another_process(target: str, options: dict[str, Any], tmp_path: Path) -> None:
    step = compiled(perceptron(8), target=target, **options)
    for again in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step)):
        assert again.plan == step.plan and again.graph.as_text() == step.graph.as_text()
        assert again.estimate() == step.estimate() and again.arena_bytes == step.arena_bytes
        for which, path in ((step, "one.plan"), (again, "other.plan")):
            which.save(tmp_path / path)
        assert (tmp_path / "one.plan").read_bytes() == (tmp_path / "other.plan").read_bytes()
        if not target.startswith("cuda"):
            batch = data_for(step, 0, (2,) if "accumulate" in options else ())
            assert again.bind().step(batch).loss == step.bind().step(batch).loss


def test_stages_and_what_a_user_gives_go_to_another_process() -> None:
    graph = perceptron(8)
    program = fp.lower(graph)
    for thing in (graph, program, fp.plan(program), fp.optim.AdamW(1e-2), fp.losses.cross_entropy, fp.spec((2, 3))):
        again = pickle.loads(pickle.dumps(thing))
        assert type(again) is type(thing) and str(again) == str(thing)
    assert fp.compile(pickle.loads(pickle.dumps(graph))).plan == fp.compile(graph).plan


def test_results_go_to_another_process() -> None:
    result = fp.compile(perceptron(8)).bind().step({"x": np.ones((8, 12), np.float32)})
    again = pickle.loads(pickle.dumps(result))
    assert again.outputs["logits"].tobytes() == result.outputs["logits"].tobytes()


@pytest.mark.parametrize("target", ["numpy", "cpu:threads=1"])
@pytest.mark.parametrize("make", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_says_at_once_that_it_cannot_be_copied(make: Any, target: str) -> None:
    session = fp.compile(perceptron(8), target=target).bind()
    for thing in (session, {"model": session}):
        if thing is not session and make is copy.copy:
            continue
        with pytest.raises(fp.SessionError, match=r"cannot be pickled or copied.*save.*bind.*load"):
            make(thing)
    with pytest.raises(fp.SessionError, match=r"cannot be pickled or copied.*dict\(session\.parameters\)"):
        make(session.parameters)
    assert session.step({"x": np.ones((8, 12), np.float32)}).outputs
