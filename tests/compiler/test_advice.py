"""What to try next where a step does not fit: what there is to try, and nothing that its mode does not have."""

from __future__ import annotations

from typing import Any

import pytest

import foreplan as fp
from foreplan.planner import Problem
from tests.profile import pick
from tests.runtime.micro_batches import perceptron

BATCH = "a smaller batch or shorter sequences"
PARTS = "a smaller batch (accumulate=k takes k of them a step) or shorter sequences"
STATE = "an optimizer with less state"
REMAT = "recomputing activations (remat='auto')"
OFFLOAD = "copying activations to host memory (offload=True)"
OTHERS = (("numpy", "auto"), ("cpu:threads=1", "off"), ("cpu:threads=1", "auto"), ("cuda:h100", "auto"))
LOSS, SGD, ADAM = {"loss": fp.losses.cross_entropy}, fp.optim.SGD(0.1), fp.optim.Adam()


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [BATCH]),
        ({"precision": "bf16"}, [BATCH]),
        ({**LOSS}, [BATCH, OFFLOAD]),
        ({**LOSS, "optimizer": SGD}, [PARTS, OFFLOAD]),
        ({**LOSS, "optimizer": fp.optim.SGD(0.1, clip_norm=1.0)}, [PARTS, OFFLOAD]),
        ({**LOSS, "optimizer": ADAM}, [PARTS, STATE, OFFLOAD]),
        ({**LOSS, "optimizer": ADAM, "accumulate": 2}, [PARTS, STATE, OFFLOAD]),
        ({**LOSS, "optimizer": SGD, "accumulate": 2}, [PARTS, OFFLOAD]),
        ({**LOSS, "optimizer": ADAM, "offload": True}, [PARTS, STATE]),
        ({**LOSS, "optimizer": ADAM, "precision": "fp16"}, [PARTS, STATE, OFFLOAD]),
    ],
)
@pytest.mark.parametrize(("target", "remat"), [("numpy", "off"), ("cuda:h100", "off"), *pick((), (), OTHERS)])
def test_advice_fits_the_mode(options: dict[str, Any], wanted: list[str], target: str, remat: str) -> None:
    with pytest.raises(fp.DoesNotFitError) as found:
        fp.compile(perceptron(8), **options, target=target, budget=64, remat=remat)
    *advice, budget = found.value.advice
    expected = [each for each in wanted if each != OFFLOAD or target == "cuda:h100"]  # else it is the same memory
    assert advice == [*([REMAT] if remat == "off" else []), *expected]
    assert budget.startswith("a budget of ") and "or more, the least found" in budget
    lines = str(found.value).split("try next:\n")[1].splitlines()
    assert lines == [f"  - {line}" for line in found.value.advice]


def test_the_update_after_micro_batches_is_told_of_nothing_that_changes_a_batch_alone() -> None:
    step = fp.compile(perceptron(8), **LOSS, optimizer=ADAM, accumulate=2)
    assert step.update is not None
    with pytest.raises(fp.DoesNotFitError) as found:
        fp.plan(step.update.program, budget=64)
    assert found.value.advice[:-1] == (STATE,)


def test_a_bare_problem_is_told_what_numbers_can_tell() -> None:
    program = fp.lower(perceptron(8))
    problem = Problem(program.values, program.actions, program.regions)
    for remat in ("off", "auto"):
        with pytest.raises(fp.DoesNotFitError) as found:
            fp.plan(problem, budget=64, remat=remat)
        assert found.value.advice[:-1] == ((REMAT,) if remat == "off" else ())
