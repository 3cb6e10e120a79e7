"""Which numbers a program takes as indices: the valid range of each input."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from foreplan.graph import parse_graph
from foreplan.lower import lower
from foreplan.lower.valid import with_valid
from tests.lower.programs import lowered


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
