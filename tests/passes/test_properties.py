"""Properties of graphs: each has a graph that lacks it, with what is said of that, and one that has it."""

from __future__ import annotations

from typing import get_args

import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from foreplan.lower import target_named
from foreplan.passes import differentiate
from foreplan.passes.base import Property
from foreplan.passes.missing_gradients import NOTHING
from foreplan.passes.properties import complaint, is_step
from tests.passes.texts import FOLDER, cases_of

LINEAR = parse_graph("""graph %g
input %x: float32[4,3]
parameter %w: float32[3,2] = fill(0.5)
%p: float32[4,2] = matmul() [%x, %w] as %p
%loss: float32[] = reduce(how='sum', axes=(0, 1)) [%p] as %loss
loss %loss
output %y = %p
""")
DEAD = parse_graph(
    LINEAR.as_text().replace("loss %loss", "%d: float32[4,2] = map(exprs=('exp(a0)',)) [%p] as %d\nloss %loss", 1)
)


def text(name: str, after: bool) -> Graph:
    """The first graph of a pass's texts, or what becomes of it."""
    case = next(case for file in sorted((FOLDER / name).glob("*.txt")) for case in cases_of(file) if case.after)
    return parse_graph(case.after if after else case.before)


def traced(function: object) -> Graph:
    return fp.trace(function, fp.spec((4, 3)))  # type: ignore[arg-type]


def dropped(x: fp.Tensor) -> fp.Tensor:
    return fp.nn.dropout(x, 0.5)


LACKING: dict[Property, tuple[Graph, str]] = {
    "forward": (differentiate(LINEAR), "it has what backward makes of 'w'"),
    "loss": (traced(lambda x: x * 2), "it has none"),
    "training form": (traced(dropped), "dropout is not in it"),
    "backward": (LINEAR, "it returns no gradient, and updates nothing by one"),
    "live": (DEAD, "nothing reads d"),
    "no loops": (traced(lambda x: fp.scan(lambda c, y: (c + y, c), x[0], x)[1]), "scan is one"),
    "no marks": (traced(lambda x: fp.stop_gradient(x) * x), "stop_gradient is one"),
    "no inner gradients": (traced(lambda x: fp.gradient((x * x).sum(), x)), "gradient is one"),
    "floating-point weights": (text("quantised_weights", after=False), "it has quantised weights"),
    "wide weights": (
        parse_graph(LINEAR.as_text().replace("float32", "bfloat16")),
        "%w: bfloat16[3,2] is not",
    ),
    "plain ops": (text("fuse_matmul_maps", after=True), "is one"),
    "kernels": (text("decompose", after=False), "there is none for "),
}


@pytest.mark.parametrize("wanted", get_args(Property))
def test_a_property(wanted: Property) -> None:
    graph, told = LACKING[wanted]
    machine = target_named("numpy")
    assert told in complaint(wanted, graph, machine)
    has = differentiate(LINEAR) if wanted == "backward" else LINEAR
    assert complaint(wanted, has, machine) == ""


def test_a_loop_takes_the_training_form_in_its_derivative() -> None:
    graph, _ = LACKING["no loops"]
    assert complaint("training form", graph) == ""
    assert complaint("kernels", LACKING["kernels"][0]) == "", "of no target"


def test_a_step_is_told_from_a_model() -> None:
    step = fp.differentiate(LINEAR, optimizer=fp.optim.SGD(0.1))
    assert is_step(step) and complaint("backward", step) == "" and not is_step(LINEAR)
    assert "backward makes of" in complaint("forward", step)


def test_a_step_that_trains_nothing_and_says_so_has_its_backward_pass() -> None:
    """Every gradient ends at a comparison."""
    compared = "%c: float32[4,2] = map(exprs=('float32(gt(a0, 0.0))',)) [%p] as %c\n%loss"
    text = LINEAR.as_text().replace("[%p] as %loss", "[%c] as %loss").replace("%loss", compared, 1)
    step = differentiate(parse_graph(text))
    assert not step.gradients and any(note.startswith(NOTHING) for note in step.notes)
    assert not complaint("backward", step)
