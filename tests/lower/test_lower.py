"""Lowering: which actions and values a graph becomes, and which rights they have."""

from __future__ import annotations

from foreplan.graph import parse_graph
from foreplan.lower import lower
from foreplan.lower.program import ARENA, PARAMETERS, STATE
from foreplan.ops.map import Map
from foreplan.ops.matmul import MatMul
from foreplan.planner import Category, Role, check_problem
from tests.lower.programs import actions, lowered


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


def test_calls_come_by_the_type_of_their_op() -> None:
    program = lowered(
        """input %x: float32[2,2]
%p: float32[2,2] = matmul() [%x, %x] as %p
%y: float32[2,2] = map(exprs=('exp(a0)',)) [%p] as %y
output %y = %y
"""
    )
    product, map = program.calls
    assert program.calls_of(Map) == (map,) and program.calls_of(Map, MatMul) == (product, map)
    assert product.of(MatMul) is product and product.of(Map) is None


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
