"""The phases and times of instructions, and how two plans lie on one axis."""

from __future__ import annotations

import foreplan as fp
from foreplan.planner.verify.verifier import verify
from foreplan.report.timeline import Phase, Timeline, aligned
from tests.views.small import many_lives, small


def test_a_step_of_three_instructions() -> None:
    line = Timeline.of(*small())
    assert line.names == ("forward", "backward", "update")
    assert line.phases == (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)
    assert line.edges.tolist() == [0, 0, 0, 0] and line.nanoseconds == 0


def test_copies_and_what_is_computed_again() -> None:
    problem, plan = many_lives()
    verify(plan, problem)
    line = Timeline.of(problem, plan)
    assert "".join(phase[0] for phase in line.phases) == "fcfcffrf"
    assert line.edges.tolist() == [0, 1000, 3000, 4000, 6000, 7000, 8000, 9000, 10000]


def test_running_statistics_are_forward_and_what_an_optimizer_keeps_is_update() -> None:
    graph = fp.models.build("resnet18:batch=1,size=32,classes=10")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Adam())
    line = Timeline.of(step.program, step.plan)
    kept = {step.program.calls[s.action].node: phase for s, phase in zip(step.plan.steps, line.phases)}
    assert {kept[name] for name in kept if name.endswith("/update")} == {Phase.UPDATE}
    assert {kept[name] for name in kept if name.startswith("bn1/batch_norm/map")} == {Phase.FORWARD}
    assert {kept[name] for name in kept if name.endswith("_grad")} == {Phase.BACKWARD}
    inference = fp.compile(fp.models.build("mlp:width=8,layers=1,batch=2"))
    assert set(Timeline.of(inference.program, inference.plan).phases) == {Phase.FORWARD}


def test_micro_batches_have_no_update_but_for_their_second_half() -> None:
    graph = fp.models.build("mlp:width=8,layers=1,batch=2")
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.1), accumulate=2)
    body = Timeline.of(step.program, step.plan).phases
    assert step.update is not None
    update = Timeline.of(step.update.program, step.update.plan).phases
    assert Phase.BACKWARD in body and Phase.UPDATE in update and Phase.FORWARD not in set(update[-3:])


def test_what_both_plans_run_in_one_order_is_aligned() -> None:
    assert aligned("abc", "abc").tolist() == [0, 1, 2, 3]
    assert aligned("abcd", "ad").tolist() == [0, 3, 4]
    # x lies between a and b; the second a is another instruction than the first.
    assert aligned("abc", "axbac").tolist() == [0, 0.5, 1, 1.5, 2, 3]
    assert aligned("abc", "xyz").tolist() == [0, 1, 2, 3]
    assert aligned("", "ab").tolist() == [0, 0, 0] and aligned("ab", "").tolist() == [2]


def test_the_longest_common_order_is_found() -> None:
    # Of d, a, b, c the last three keep their order.
    assert aligned("abcd", "dabc").tolist() == [0, 0, 1, 2, 4]
