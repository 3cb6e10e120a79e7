"""Which kernels an action may run, by what the target offers: operands, workspace, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from foreplan.base.errors import UnsupportedError
from foreplan.graph import Cost, Op, Window, parse_graph
from foreplan.lower import Candidate, DeviceProfile, lower
from foreplan.lower.target import named
from foreplan.ops.map import Map
from foreplan.runtime.numpy.target import NumpyTarget


def test_an_op_without_kernel_is_decomposed() -> None:
    class Small(NumpyTarget):
        def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
            return super().kernels(op, inputs, outputs) if op.name in ("map", "reduce") else ()

    graph = parse_graph(
        "graph %g\ninput %x: float32[2,3]\n%y: float32[2,3] = softmax(axis=1) [%x] as %y\noutput %y = %y\n"
    )
    assert {call.op.name for call in lower(graph).calls} == {"softmax"}
    small = lower(graph, Small())
    assert {call.op.name for call in small.calls} == {"map", "reduce"}
    assert {call.node.partition("/")[0] for call in small.calls} == {"y"}
    assert not any("'" in call.node for call in small.calls)


def test_operands_that_no_kernel_takes_as_they_lie_are_named() -> None:
    class Aligned(NumpyTarget):
        def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
            return [replace(kernel, alignment=16) for kernel in super().kernels(op, inputs, outputs)]

    text = """graph %g
input %x: float32[8]
%s: float32[4] = slice(starts=(%d,), shape=(4,), steps=(1,)) [%x] as %s
%y: float32[4] = map(exprs=('exp(a0)',)) [%s] as %exponential
output %y = %y
"""
    assert len(lower(parse_graph(text.replace("%d", "4")), Aligned()).calls) == 1
    with pytest.raises(UnsupportedError, match=r"target numpy has no kernel for map that takes .* from byte 4 on"):
        lower(parse_graph(text.replace("%d", "1")), Aligned())


def test_an_op_that_the_target_cannot_run_is_named() -> None:
    class Nothing(NumpyTarget):
        def kernels(self, *args: object) -> tuple[()]:
            return ()

    graph = parse_graph(
        "graph %g\ninput %x: float32[2]\n"
        "%y: float32[2] = map(exprs=('exp(a0)',)) [%x] as %exponential\noutput %y = %y\n"
    )
    with pytest.raises(UnsupportedError, match="exponential"):
        lower(graph, Nothing())


def test_an_op_that_decomposes_into_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing(NumpyTarget):
        def kernels(self, *args: object) -> tuple[()]:
            return ()

    monkeypatch.setattr(Map, "decompose", lambda op, b, inputs: [b.apply(op, *inputs)])
    graph = parse_graph(
        "graph %g\ninput %x: float32[2]\n"
        "%y: float32[2] = map(exprs=('exp(a0)',)) [%x] as %exponential\noutput %y = %y\n"
    )
    with pytest.raises(UnsupportedError, match=r"'exponential' .*: target numpy has no kernel for map"):
        lower(graph, Nothing())


@pytest.mark.parametrize(
    ("workspace", "kept"),
    [
        ("auto", ["huge", "large", "small", "none"]),
        ("unlimited", ["huge", "large", "little faster", "small", "none"]),
        ("100MiB", ["little faster", "small", "none"]),
        ("64MiB", ["small", "none"]),
        ("0", ["none"]),
    ],
)
def test_much_workspace_is_taken_where_it_is_much_faster(workspace: str, kept: list[str]) -> None:
    """Of 64 MiB or less, the fastest takes 90 ns; what needs more has to take less than 69.3."""
    mib = 1 << 20
    kinds = (("none", 0, 100), ("small", 64 * mib, 90), ("slower", 65 * mib, 95), ("little faster", 66 * mib, 70))
    kinds += (("large", 200 * mib, 69), ("huge", 3000 * mib, 10))

    class Several(NumpyTarget):
        def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
            return [Candidate(name, nbytes, (), nanoseconds=ns) for name, nbytes, ns in kinds]

    graph = parse_graph(
        "graph %g\ninput %x: float32[2]\n%y: float32[2] = map(exprs=('exp(a0)',)) [%x] as %y\noutput %y = %y\n"
    )
    assert [call.kernel for call in lower(graph, Several(), workspace=workspace).calls] == kept


def test_what_happens_once_has_one_kernel_the_fastest() -> None:
    """Candidates of an update would be two actions that both must run."""

    class Several(NumpyTarget):
        def kernels(self, op: Op, inputs: Sequence[Window], outputs: Sequence[Window]) -> Sequence[Candidate]:
            return [Candidate("slow", 0, ((0, 0),), nanoseconds=90), Candidate("fast", 64, ((0, 0),), nanoseconds=50)]

    graph = parse_graph(
        "graph %g\ninput %x: float32[2]\nparameter %w: float32[2] = fill(1.0)\n"
        "%y: float32[2] = map(exprs=('exp(a0)',)) [%x] as %y\n"
        "%n: float32[2] = map(exprs=('(a0 + a1)',)) [%w, %y] as %n\nupdate %w = %n\noutput %y = %y\n"
    )
    program = lower(graph, Several())
    assert [(call.node, call.kernel) for call in program.calls] == [("y", "fast"), ("y", "slow"), ("n", "fast")]
    assert [action.effect for action in program.actions] == [False, False, True]


def test_a_kernel_is_found_by_its_name_and_by_what_else_a_plan_has_of_it() -> None:
    kernels = [Candidate("a", 1, ()), Candidate("a", 2, (), payload=b"1"), Candidate("b", 3, (), payload=b"1")]
    found = [named(kernels, name, payload) for name, payload in (("a", b""), ("a", b"1"), ("b", b"1"), ("b", b""))]
    assert found == [*kernels, None] and named(kernels, "c", b"1") is None


def test_predicted_times_are_those_of_the_roofline() -> None:
    profile = DeviceProfile("a device", 10**9, 2 * 10**9, 4 * 10**9)
    assert [profile.nanoseconds(Cost(*cost)) for cost in ((30, 10), (1, 100), (50, 100), (0, 0))] == [30, 50, 50, 0]
    assert [profile.bus_nanoseconds(nbytes) for nbytes in (0, 100, 10**9)] == [0, 25, 250_000_000]
