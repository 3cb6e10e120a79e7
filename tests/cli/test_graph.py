"""`foreplan graph`: the graph of a step, and what each pass makes of it."""

from __future__ import annotations

import pytest

import foreplan as fp
from foreplan.graph.text import parse_graph
from foreplan.passes import KNOWN, Stage
from tests.cli.shell import answer, foreplan

MODEL = "mlp:width=8,batch=2"


def test_it_prints_the_graph_that_is_compiled() -> None:
    printed = foreplan("graph", MODEL, "--optimizer", "sgd", "--loss", "mean").stdout
    step = fp.compile(fp.models.build(MODEL), fp.losses.mean, fp.optim.SGD(0.01))
    assert parse_graph(printed).as_text() == printed
    lowered = {node.name for node in parse_graph(printed).nodes if not node.op.is_view}
    assert lowered <= {call.node for call in step.program.calls} and len(lowered) > 30


def test_it_prints_the_update_of_micro_batches_too() -> None:
    body, update = foreplan("graph", MODEL, "--accumulate", 2).stdout.split("# the update after the micro-batches\n")
    assert "learning_rate" in update and "learning_rate" not in body
    assert parse_graph(update).updates and parse_graph(body).updates


def test_print_after_shows_a_pass_each_time_that_it_runs() -> None:
    shown = foreplan("graph", MODEL, "--print-after", "fuse_maps").stdout
    assert shown.count("# after fuse_maps (forward, ") == shown.count("# after fuse_maps (training, ") == 1
    every = foreplan("graph", MODEL, "--print-after", "all").stdout
    first = next(line for line in every.splitlines() if line.startswith("# after "))
    assert first.startswith("# after quantised_weights")
    assert every.count("# after ") == len(answer("graph", MODEL)["passes"])


def test_without_leaves_a_pass_out() -> None:
    usual, less = answer("graph", MODEL), answer("graph", MODEL, "--without", "fuse_maps")
    assert "fuse_maps" in {each["name"] for each in usual["passes"]} - {each["name"] for each in less["passes"]}
    assert less["nodes"] > usual["nodes"]


def test_time_lists_every_pass_and_the_sum() -> None:
    lines = foreplan("graph", MODEL, "--time").stdout.splitlines()
    assert lines[0].split() == ["pass", "stage", "time", "nodes"] and lines[-1].startswith("all ")
    stages = [str(each) for each in Stage]
    assert all(line.split()[0] in KNOWN and line.split()[1] in stages for line in lines[1:-1])


@pytest.mark.parametrize("flag", ["--print-after", "--without"])
def test_a_wrong_name_is_told_with_the_names_there_are(flag: str) -> None:
    assert "there is no pass 'fuse'; the passes are accumulate" in foreplan("graph", MODEL, flag, "fuse", code=2).stderr


def test_what_nothing_works_without_stays() -> None:
    error = foreplan("graph", MODEL, "--without", "differentiate", code=2).stderr
    assert "nothing works without the pass 'differentiate'" in error


def test_a_plan_has_no_graph(tmp_path) -> None:
    foreplan("plan", MODEL, "-o", tmp_path / "x.plan")
    assert "give the model instead" in foreplan("graph", tmp_path / "x.plan", code=2).stderr
