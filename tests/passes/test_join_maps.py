"""Maps that read the same: joined where that is right, and with the same results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import Graph, parse_graph
from foreplan.lower.loop import lower_body
from foreplan.lower.targets import target_named
from foreplan.ops.loop import Loop
from foreplan.ops.map import Map
from foreplan.passes.join_maps import JOINED_BYTES, JOINED_INPUTS, join_maps
from tests.ops.check import evaluate
from tests.profile import pick

HEAD = """graph %g
input %x: float32[2,3]
input %y: float32[2,3]
"""


def maps(graph: Graph) -> list[int]:
    """The number of results of each map."""
    return [len(node.outputs) for node in graph.nodes if isinstance(node.op, Map)]


def joined(text: str) -> list[int]:
    """The maps of a graph of x and y behind the pass, which is checked to compute the same."""
    graph = parse_graph(HEAD + text)
    found = join_maps(graph)
    rng = np.random.default_rng(0)
    inputs = {value.name: rng.standard_normal(value.shape).astype(np.float32) for value in graph.inputs}
    old, new = evaluate(graph, inputs), evaluate(found, inputs)
    for name, value in graph.outputs.items():
        np.testing.assert_array_equal(new[found.outputs[name]], old[value], err_msg=name)
    return maps(found)


def line(name: str, expr: str, *read: str, shape: str = "2,3") -> str:
    return f"%{name}: float32[{shape}] = map(exprs=({expr!r},)) [{', '.join(f'%{each}' for each in read)}] as %{name}\n"


def test_maps_that_read_a_value_in_common_are_one() -> None:
    two = line("a", "sigmoid(a0)", "x") + line("b", "sigmoid(a1) * a0", "y", "x")
    assert joined(two + "output %a = %a\noutput %b = %b\n") == [2]
    apart = line("a", "sigmoid(a0)", "x") + line("b", "exp(a0)", "y")
    assert joined(apart + "output %a = %a\noutput %b = %b\n") == [1, 1]


def test_a_map_that_reads_what_another_makes_stays() -> None:
    """If somebody else reads that, too."""
    chain = line("a", "sigmoid(a0)", "x") + line("b", "a0 * a1", "x", "a")
    assert joined(chain + "output %a = %a\noutput %b = %b\n") == [1, 1]
    assert joined(chain + "output %b = %b\n") == [1]
    through = line("a", "sigmoid(a0)", "x") + "%s: float32[3,2] = transpose(perm=(1, 0)) [%a] as %s\n"
    through += "%t: float32[2,3] = transpose(perm=(1, 0)) [%s] as %t\n" + line("b", "a0 * a1", "x", "t")
    assert joined(through + "output %b = %b\n") == [1, 1]


def test_a_map_that_one_joined_map_alone_reads_is_a_part_of_it() -> None:
    parts = line("s", "a0 + a1", "x", "y") + line("a", "sigmoid(a0)", "s") + line("b", "exp(a0) * a1", "s", "x")
    assert joined(parts + "output %a = %a\noutput %b = %b\n") == [2]
    twice = line("r", "a0 * 2.0", "x") + line("s", "a0 + a1", "r", "y") + line("a", "a0 * a0 + a1", "s", "s")
    assert joined(twice + "output %a = %a\n") == [1]


def test_other_shapes_and_large_results_stay() -> None:
    rows = "input %z: float32[3]\n" + line("a", "a0 + 1.0", "z", shape="3") + line("b", "a0 * a1", "x", "z")
    assert joined(rows + "output %a = %a\noutput %b = %b\n") == [1, 1]
    for count, wanted in ((JOINED_BYTES // 4, [2]), (JOINED_BYTES // 4 + 1, [1, 1])):
        large = f"input %z: float32[{count}]\n" + line("a", "exp(a0)", "z", shape=f"{count}")
        large += line("b", "a0 + 1.0", "z", shape=f"{count}")
        assert joined(large + "output %a = %a\noutput %b = %b\n") == wanted


def test_a_map_takes_so_many_inputs_and_no_more() -> None:
    head = "".join(f"input %z{i}: float32[2,3]\n" for i in range(JOINED_INPUTS + 4))
    body = "".join(line(f"a{i}", "a0 * a1", "x", f"z{i}") for i in range(JOINED_INPUTS + 4))
    ends = "".join(f"output %a{i} = %a{i}\n" for i in range(JOINED_INPUTS + 4))
    assert joined(head + body + ends) == [JOINED_INPUTS - 1, 5]


def test_what_reads_a_new_content_stays_behind_what_reads_the_old_one() -> None:
    """One map of both would need a copy of the old content."""
    head = "graph %g\ninput %x: float32[2,3]\nstate %s: float32[2,3] = fill(1.0)\n"
    new = "%t: float32[3,2] = transpose(perm=(1, 0)) [%s] as %t\n%n: float32[2,3] = reshape(shape=(2, 3)) [%t] as %n\n"
    two = line("a", "a0 * a1", "x", "s") + line("b", "a0 - a1", "x", "n") + "output %a = %a\noutput %b = %b\n"
    assert maps(join_maps(parse_graph(head + new + two + "update %s = %n\n"))) == [1, 1]
    assert maps(join_maps(parse_graph(head + new + two))) == [2]


@pytest.mark.parametrize("seed", range(pick(20, 40, 1000)))
def test_drawn_maps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, text = ["x", "y"], ""
    for i in range(int(rng.integers(2, 12))):
        read = [names[int(k)] for k in rng.integers(0, len(names), 2)]
        text += line(f"v{i}", str(rng.choice(["a0 * a1", "sigmoid(a0) + a1", "a0 - tanh(a1)"])), *read)
        names.append(f"v{i}")
    count = len(names) - 2
    returned = {f"v{int(k)}" for k in rng.integers(0, count, 3)} | {f"v{count - 1}"}
    assert sum(joined(text + "".join(f"output %{name} = %{name}\n" for name in sorted(returned)))) <= count


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
