"""A dominant activation between two convolutions, beside the texts of `split_channels/`: in whole steps."""

from __future__ import annotations

import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from tests.passes.steps import training_step
from tests.passes.texts import FOLDER, cases_of


def made(graph: Graph) -> set[tuple[int, ...]]:
    return {value.shape for node in graph.nodes if not node.op.is_view for value in node.outputs}


def test_neither_the_activation_nor_its_gradient_is_ever_whole() -> None:
    graph = parse_graph(cases_of(FOLDER / "split_channels" / "dominant activations.txt")[0].before)
    after, before = training_step(graph), training_step(graph, left_out=("split_channels",))
    assert (2, 10, 6, 5) in made(before) and (2, 10, 6, 5) not in made(after)


@pytest.mark.thorough
def test_the_chain_fits_where_whole_operations_would_not() -> None:
    # The first convolution's output and its gradient take 1,024 MiB each, whole.
    step = fp.compile(fp.models.build("conv_chain"), loss=fp.losses.mean, optimizer=fp.optim.Nesterov(0.1), remat="off")
    flops = sum(step.program.actions[s.action].flops for s in step.plan.steps)
    found = fp.plan(step.program, budget="1100MiB")
    assert found.arena_bytes <= 1100 << 20
    assert sum(step.program.actions[s.action].flops for s in found.steps) <= 1.01 * flops
