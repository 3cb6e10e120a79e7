"""Maps that read the same, drawn and in recurrent layers: beside the texts of `join_maps/`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import parse_graph
from foreplan.lower.loop import lower_body
from foreplan.lower.targets import target_named
from foreplan.ops.loop import Loop
from foreplan.ops.map import Map
from foreplan.passes.join_maps import join_maps
from tests.passes.texts import hold_same
from tests.profile import pick


@pytest.mark.parametrize("seed", range(pick(20, 40, 1000)))
def test_drawn_maps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, text = ["x", "y"], "graph %g\ninput %x: float32[2,3]\ninput %y: float32[2,3]\n"
    for i in range(int(rng.integers(2, 12))):
        read = [names[int(k)] for k in rng.integers(0, len(names), 2)]
        expr = rng.choice(["a0 * a1", "sigmoid(a0) + a1", "a0 - tanh(a1)"])
        text += f"%v{i}: float32[2,3] = map(exprs=('{expr}',)) [%{read[0]}, %{read[1]}] as %v{i}\n"
        names.append(f"v{i}")
    count = len(names) - 2
    returned = {f"v{int(k)}" for k in rng.integers(0, count, 3)} | {f"v{count - 1}"}
    graph = parse_graph(text + "".join(f"output %{name} = %{name}\n" for name in sorted(returned)))
    after = join_maps(graph)
    hold_same(graph, after, rng, far=0.0)
    assert sum(len(node.outputs) for node in after.nodes) <= count


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_gates_of_a_recurrent_layer_have_their_gradients_from_one_map(kind: str) -> None:
    layers: dict[str, Any] = {"gru": fp.nn.gru, "lstm": fp.nn.lstm}
    graph = fp.trace(lambda x: layers[kind](x, 8, name="layer")[0], fp.spec((3, 5, 4)))
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), target="numpy").graph
    _, backward = (node.op for node in step.nodes if isinstance(node.op, Loop))
    calls = [call.op for call in lower_body(backward, target_named("numpy")).program.calls]
    several = [len(op.exprs) for op in calls if isinstance(op, Map) and len(op.exprs) > 1]
    assert several == [5]
    assert max(len(op.exprs) for op in calls if isinstance(op, Map)) == 5
