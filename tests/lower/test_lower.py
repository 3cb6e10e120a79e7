"""Lowering: which actions and values a graph becomes, and which rights they have."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foreplan.errors import UnsupportedError, UsageError
from foreplan.graph import Cost, Graph, Op, Window, parse_graph
from foreplan.lower import Candidate, DeviceProfile, Program, lower, target_named
from foreplan.lower.program import ARENA, PARAMETERS, STATE
from foreplan.lower.target import named
from foreplan.lower.valid import with_valid
from foreplan.planner import Category, Role, check_problem
from foreplan.runtime.numpy.target import NumpyTarget


def lowered(text: str) -> Program:
    program = lower(parse_graph("graph %g\n" + text))
    check_problem(program)
    return program


def actions(program: Program) -> list[str]:
    """Each action as `op: reads -> writes`, with the overwrites it may (?) or must (!) do."""
    names = [value.name for value in program.values]
    lines = []
    for action, call in zip(program.actions, program.calls):
        pairs = "".join(
            f" {names[action.writes[p.write]]}{'!' if p.required else '?'}{names[action.reads[p.read]]}"
            for p in action.overwrites
        )
        reads, writes = (" ".join(names[v] for v in ids) for ids in (action.reads, action.writes))
        lines.append(f"{call.op.name}: {reads} -> {writes}{pairs}{' effect' if action.effect else ''}")
    return lines


def test_values_have_regions_roles_and_categories() -> None:
    program = lowered(
        """input %x: float32[2,3]
parameter %w: float32[2,3] = fill(1.0)
buffer %mean: float32[2,3] = fill(0.0)
state %v: float32[2,3] = fill(0.0)
constant %k: float32[2,3] = fill(2.0)
%y: float32[2,3] = map(exprs=('((a0 * a1) + ((a2 * a3) - a4))',)) [%x, %w, %mean, %v, %k] as %y
output %out = %y
"""
    )
    found = {v.name: (v.region, v.role, v.category, v.nbytes) for v in program.values}
    assert found == {
        "x": (ARENA, Role.INPUT, Category.INPUTS, 24),
        "w": (PARAMETERS, Role.STORED, Category.PARAMETERS, 24),
        "mean": (PARAMETERS, Role.STORED, Category.PARAMETERS, 24),
        "v": (STATE, Role.STORED, Category.OPTIMIZER_STATE, 24),
        "k": (STATE, Role.STORED, Category.PARAMETERS, 24),
        "y": (ARENA, Role.OUTPUT, Category.OUTPUTS, 24),
    }


def test_the_count_of_updates_is_a_state_of_its_name() -> None:
    """`step`, or that with a number where a model has a `step` itself."""
    state = "state %{}: float32[] = fill(0.0)\n"
    assert lowered(state.format("v")).step_count is None
    for parameters, name in (("", "step"), ("parameter %step: float32[] = fill(0.0)\n", "step.1")):
        count = lowered(parameters + state.format("v") + state.format(name)).step_count
        assert count is not None and count.name == name


def test_views_are_windows_and_no_actions() -> None:
    program = lowered(
        """input %x: float32[2,3]
%t: float32[3,2] = transpose(perm=(1, 0)) [%x] as %t
%s: float32[2,1] = slice(starts=(0, 1), shape=(2, 1), steps=(2, 1)) [%t] as %s
%y: float32[2,1] = map(exprs=('exp(a0)',)) [%s] as %y
output %y = %y
"""
    )
    assert actions(program) == ["map: x -> y"]
    (operand,) = program.calls[0].inputs
    assert (operand.offset, operand.strides, str(operand.type)) == (12, (8, 12), "float32[2,1]")
    assert str(operand) == "v0+12:float32[2,1]/[8, 12]" and str(program.calls[0].outputs[0]) == "v1+0:float32[2,1]"


def test_a_window_without_gaps_is_a_tensor_in_c_order() -> None:
    """The step along an axis of extent 1 means nothing."""
    program = lowered(
        """input %x: float32[3,4]
%s: float32[1,4] = slice(starts=(0, 0), shape=(1, 4), steps=(2, 1)) [%x] as %s
%y: float32[1,4] = map(exprs=('exp(a0)',)) [%s] as %y
output %y = %y
"""
    )
    assert program.calls[0].inputs[0].strides == (16, 4)


def test_a_window_that_cannot_be_reshaped_is_copied_once() -> None:
    program = lowered(
        """input %x: float32[2,3]
%t: float32[3,2] = transpose(perm=(1, 0)) [%x] as %t
%r: float32[6] = reshape(shape=(6,)) [%t] as %r
%q: float32[2,3] = reshape(shape=(2, 3)) [%t] as %q
%y: float32[6] = map(exprs=('exp(a0)',)) [%r] as %y
%z: float32[2,3] = map(exprs=('exp(a0)',)) [%q] as %z
output %y = %y
output %z = %z
"""
    )
    assert actions(program) == ["map: x -> r/dense", "map: r/dense -> y y?r/dense", "map: r/dense -> z z?r/dense"]


def test_updates_overwrite_their_stored_value_in_place() -> None:
    program = lowered(
        """input %g: float32[4]
parameter %w: float32[4] = fill(1.0)
state %v: float32[4] = fill(0.0)
~%wn: float32[4], %vn: float32[4] = map(exprs=('(a0 - a1)', '(a2 + a1)')) [%w, %g, %v] as %update
update %w = %wn
update %v = %vn
"""
    )
    assert actions(program) == ["map: w g v -> wn vn wn!w vn!v effect"]
    assert [program.values[v].home for v in program.actions[0].writes] == [1, 2]


def test_an_update_whose_kernel_cannot_write_in_place_is_copied_home() -> None:
    program = lowered(
        """parameter %w: float32[4,4] = fill(1.0)
%p: float32[4,4] = matmul() [%w, %w] as %p
update %w = %p
"""
    )
    assert actions(program) == ["matmul: w -> p", "map: p -> w/next effect"]


def test_an_update_that_sees_the_old_content_in_two_ways_is_copied_home() -> None:
    program = lowered(
        """parameter %w: float32[4,4] = fill(1.0)
%t: float32[4,4] = transpose(perm=(1, 0)) [%w] as %t
%n: float32[4,4] = map(exprs=('(a0 + a1)',)) [%w, %t] as %n
update %w = %n
"""
    )
    assert actions(program) == ["map: w -> n", "map: n -> w/next effect"]


def test_an_update_waits_for_later_readers_of_the_old_content() -> None:
    program = lowered(
        """parameter %w: float32[4] = fill(1.0)
%n: float32[4] = map(exprs=('(a0 * 0.5)',)) [%w] as %n
%y: float32[4] = map(exprs=('exp(a0)',)) [%w] as %y
output %y = %y
update %w = %n
"""
    )
    assert actions(program) == ["map: w -> n", "map: w -> y", "map: n -> w/next effect"]


def test_two_values_can_be_swapped() -> None:
    program = lowered(
        """parameter %a: float32[4] = fill(1.0)
parameter %b: float32[4] = fill(2.0)
update %a = %b
update %b = %a
"""
    )
    assert [line for line in actions(program) if "effect" not in line] == ["map: b -> b/saved", "map: a -> a/saved"]
    assert [line for line in actions(program) if "effect" in line] == [
        "map: b/saved -> a/next effect",
        "map: a/saved -> b/next effect",
    ]


def test_a_returned_parameter_is_its_content_before_the_update() -> None:
    program = lowered(
        """parameter %w: float32[4] = fill(1.0)
%n: float32[4] = map(exprs=('(a0 * 0.5)',)) [%w] as %n
output %before = %w
output %after = %n
update %w = %n
"""
    )
    assert "map: w -> before/result" in actions(program)
    check_problem(program)


def test_no_right_to_overwrite_what_is_seen_in_another_way_too() -> None:
    program = lowered(
        """input %x: float32[2,2]
%t: float32[2,2] = transpose(perm=(1, 0)) [%x] as %t
%y: float32[2,2] = map(exprs=('(a0 + a1)',)) [%x, %t] as %y
output %y = %y
"""
    )
    assert actions(program) == ["map: x -> y"]


def test_no_right_to_overwrite_what_is_read_twice_unless_the_kernel_may_overwrite_either() -> None:
    program = lowered(
        """input %x: float32[2,2]
%h: float32[2,2] = map(exprs=('(2.0 * a0)',)) [%x] as %h
%m: float32[2,2] = matmul(transpose_a=False, transpose_b=False, wide=False) [%h, %h, %h] as %m
%y: float32[2,2] = map(exprs=('(a0 + a1)',)) [%m, %m] as %y
%z: float32[2,2] = matmul(transpose_a=False, transpose_b=False, wide=False) [%x, %x, %y] as %z
output %z = %z
"""
    )
    assert actions(program)[1:] == ["matmul: h -> m", "map: m -> y y?m", "matmul: x y -> z z?y"]


def test_what_is_joined_may_lie_in_its_place_if_it_is_one_stretch_and_aligned() -> None:
    program = lowered(
        """input %x: float32[1,16,4]
%a: float32[1,16,4] = map(exprs=('(a0 + 1.0)',)) [%x] as %a
%odd: float32[1,1,4] = reduce(how='sum', axes=(1,), keepdims=True) [%x] as %odd
%y: float32[1,50,4] = concat(axis=1) [%a, %x, %odd, %a, %odd] as %y
%z: float32[1,33,4] = concat(axis=1) [%x, %a, %odd] as %z
%rows: float32[1,33,8] = concat(axis=2) [%z, %z] as %rows
output %y = %y
output %z = %z
"""
    )
    names = [value.name for value in program.values]
    found = {
        names[action.writes[part.write]] + " " + names[action.reads[part.read]]: part.offset
        for action in program.actions
        for part in action.parts
    }
    # Not the step's input, nor what is joined twice, nor what would begin in the midst of 64 bytes, nor columns.
    assert found == {"z a": 256, "z odd": 512}


def test_valid_ranges_reach_inputs_through_views() -> None:
    program = lowered(
        """input %ids: int64[2,3]
parameter %table: float32[7,4] = fill(1.0)
%flat: int64[6] = reshape(shape=(6,)) [%ids] as %flat
%rows: float32[6,4] = gather() [%table, %flat] as %rows
output %rows = %rows
"""
    )
    (slot,) = program.inputs
    assert slot.valid == (-7, 6)


def test_an_input_that_is_computed_with_may_be_anything() -> None:
    program = lowered(
        """input %i: int64[2]
input %d: float32[7,1]
%j: int64[2] = map(exprs=('(a0 + 5)',)) [%i] as %j
%y: float32[2,1] = gather(axis=0) [%d, %j] as %y
output %y = %y
"""
    )
    assert [slot.valid for slot in program.inputs] == [None, None]


@example([("entropy", 3, 5), ("gather", 6, 0)], False)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("gather"), st.integers(1, 6), st.just(0)),
            st.tuples(st.just("entropy"), st.integers(1, 6), st.sampled_from([-100, -2, 3, 5, 9])),
            st.tuples(st.just("scatter"), st.integers(1, 6), st.just(0)),
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_a_valid_index_is_one_that_every_reader_takes(readers: list[tuple[str, int, int]], copied: bool) -> None:
    """Held against what each reader takes by itself, number by number."""
    lines = ["input %i: int64[2]", "input %u: float32[2,3]", "output %u = %u"]
    lines += ["%j: int64[2] = map(exprs=('a0',)) [%i] as %j"] if copied else []
    for k, (kind, n, ignored) in enumerate(readers):
        i = "j" if copied and k % 2 else "i"
        lines += {
            "gather": [f"input %d{k}: int64[{n},3]", f"%y{k}: int64[2,3] = gather(axis=0) [%d{k}, %{i}] as %y{k}"],
            "scatter": [f"%y{k}: float32[{n},3] = scatter_add(shape=({n}, 3), axis=0) [%{i}, %u] as %y{k}"],
            "entropy": [
                f"input %d{k}: float32[2,{n}]",
                f"%y{k}: float32[2], %z{k}: float32[2] = "
                f"cross_entropy(axis=1, ignore_index={ignored}) [%d{k}, %{i}] as %y{k}",
            ],
        }[kind]
        lines.append(f"output %y{k} = %y{k}")
    program = lowered("\n".join(sorted(lines, key=lambda line: (line[0] == "o", line[0] == "%"))) + "\n")
    slots = {slot.name: slot.valid for slot in program.inputs}
    assert {name for name, valid in slots.items() if valid is not None} == ({"i"} if readers else set())

    def takes(kind: str, n: int, ignored: int, index: int) -> bool:
        return 0 <= index < n or index == ignored if kind == "entropy" else -n <= index < n

    low, high, *others = slots["i"] or (-200, 200)
    for index in range(-120, 20):
        assert (low <= index <= high or index in others) == all(takes(*reader, index) for reader in readers)


def test_valid_ranges_reach_inputs_through_copies_to_the_host_and_back() -> None:
    """As a plan file is read, whose program has them: one copy makes what the other reads."""
    graph = parse_graph(
        """graph %g
input %ids: int64[8192]
parameter %d: float32[7,1] = fill(1.0)
parameter %w: float32[8192,1] = fill(1.0)
%j: int64[8192] = map(exprs=('a0',)) [%ids] as %j
~%rows: float32[8192,1] = gather(axis=0) [%d, %j] as %rows
gradient %w = %rows
"""
    )
    program = lower(graph, offload=True)
    assert [call.node for call in program.calls] == ["j", "rows", "j/offload", "j/fetch"]
    assert [slot.valid for slot in with_valid(program).inputs] == [(-7, 6)]


def test_only_large_activations_that_backward_reads_may_go_to_the_host() -> None:
    """Not what is given, returned, stored or smaller than 64 KiB."""
    graph = parse_graph(
        """graph %g
input %x: float32[16384]
input %z: float32[16383]
parameter %w: float32[16384] = fill(1.0)
parameter %v: float32[16383] = fill(1.0)
%first: float32[16384], %h: float32[16384] = map(exprs=('(a0 * 2.0)', 'exp(a0)')) [%x] as %h
%k: float32[16383] = map(exprs=('exp(a0)',)) [%z] as %k
%o: float32[16384] = map(exprs=('tanh(a0)',)) [%h] as %o
%only: float32[16384] = map(exprs=('sin(a0)',)) [%first] as %only
%last: float32[16384] = map(exprs=('cos(a0)',)) [%only] as %last
~%gw: float32[16384] = map(exprs=('(a0 * ((a1 * a2) + a3))',)) [%x, %h, %o, %w] as %gw
~%gv: float32[16383] = map(exprs=('(a0 + a1)',)) [%k, %v] as %gv
output %o = %o
output %last = %last
gradient %w = %gw
gradient %v = %gv
"""
    )
    program = lower(graph, offload=True)
    check_problem(program)
    assert actions(program)[7:] == ["map: h -> h/host", "map: h/host -> h"]


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


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="choose one of numpy"):
        lower(Graph("g", (), (), (), {}), "abacus")


@pytest.mark.parametrize(
    "target", ["numpy:threads=2", "cpu:cores=2", "cpu:threads", "cpu:threads=", "cpu:threads=two", "cpu:threads=²"]
)
def test_an_option_that_a_target_does_not_have_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match="has no option"):
        target_named(target)


def test_the_target_cpu_takes_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 6} if process == 0 else {0})
    assert [target_named(text).name for text in ("cpu", "cpu:threads=2")] == ["cpu:threads=3", "cpu:threads=2"]


def test_a_loss_has_its_name_and_a_program_that_needs_no_note_has_none() -> None:
    program = lowered(
        """input %x: float32[2]
%y: float32[] = reduce(how='sum', axes=(0,)) [%x] as %y
loss %y
"""
    )
    assert program.loss is not None and program.loss.name == "loss"
    assert [call.kernel for call in program.calls] == ["reference"]
    assert program.notes == ()


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


def test_every_value_of_a_program_has_a_name_of_its_own() -> None:
    """Also where one node has two operands copied."""
    program = lowered(
        """input %x: float32[2,3,4]
input %z: float32[5,2,4]
%a: float32[4,3,2] = transpose(perm=(2, 1, 0)) [%x] as %a
%b: float32[4,2,5] = transpose(perm=(2, 1, 0)) [%z] as %b
%y: float32[4,3,5] = matmul() [%a, %b] as %y
output %y = %y
"""
    )
    assert [value.name for value in program.values] == ["x", "z", "y/dense", "y/dense.1", "y"]


def test_a_kernel_is_found_by_its_name_and_by_what_else_a_plan_has_of_it() -> None:
    kernels = [Candidate("a", 1, ()), Candidate("a", 2, (), payload=b"1"), Candidate("b", 3, (), payload=b"1")]
    found = [named(kernels, name, payload) for name, payload in (("a", b""), ("a", b"1"), ("b", b"1"), ("b", b""))]
    assert found == [*kernels, None] and named(kernels, "c", b"1") is None


def test_predicted_times_are_those_of_the_roofline() -> None:
    profile = DeviceProfile("a device", 10**9, 2 * 10**9, 4 * 10**9)
    assert [profile.nanoseconds(Cost(*cost)) for cost in ((30, 10), (1, 100), (50, 100), (0, 0))] == [30, 50, 50, 0]
    assert [profile.bus_nanoseconds(nbytes) for nbytes in (0, 100, 10**9)] == [0, 25, 250_000_000]
