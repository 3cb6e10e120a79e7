from __future__ import annotations

import pytest

from foreplan.base.errors import PlanError
from foreplan.planner.memory.alias_sets import AliasSets, merge
from foreplan.planner.memory.liveness import live_ranges
from tests.planner.texts import problem


def alias_sets(text: str, **options: bool) -> tuple[AliasSets, dict[str, int]]:
    """Of the actions in their order, and of each value its set."""
    asked = problem(text)
    order = range(len(asked.actions))
    ranges = live_ranges(asked, order)
    found = merge(asked, order, ranges, **options)
    return found, {asked.values[v].name: found.of[i] for i, v in enumerate(ranges.values)}


def test_a_chain_of_in_place_actions_shares_bytes() -> None:
    text = """
        f: x 256 input -> a 256 align=256 | a?x
        g: a -> b 256 | b?a
        h: b -> y 64 output
    """
    found, of = alias_sets(text)
    assert of["x"] == of["a"] == of["b"] != of["y"]
    assert (found.lower[0], found.upper[0], found.nbytes[0], found.alignment[0]) == (-1, 3, 256, 256)
    found, of = alias_sets(text, optional=False)
    assert len(set(of.values())) == 4


def test_what_is_read_later_or_kept_is_not_overwritten() -> None:
    _, of = alias_sets(
        """
        w 64 stored; f: x 64 input -> a 64 | a?x
        g: x, a -> b 64 output | b?x b?a
        h: w -> c 64 output @persistent | c?w
        i: b -> d 64 output | d?b
        """
    )
    assert of["b"] == of["x"]  # not `a`: listed second
    assert len({of["w"], of["c"], of["a"], of["b"], of["d"]}) == 5


def test_the_largest_write_gets_a_read_that_could_serve_two() -> None:
    _, of = alias_sets("f: x 256 input -> small 192, large 256 | small?x large?x; g: small, large -> y 64 output")
    assert of["large"] == of["x"] != of["small"]


@pytest.mark.parametrize("later", [0, 3])
def test_a_small_write_does_not_hold_a_large_buffer_for_long(later: int) -> None:
    text = "mask: x 4096 input -> mask 64 | mask?x"
    text += "".join(f"; other{i}: -> o{i} 64 output" for i in range(later)) + "; use: mask -> y 64 output" * bool(later)
    _, of = alias_sets(text)
    assert (of["mask"] == of["x"]) == (later == 0)


def test_next_contents_lie_at_home_and_required_overwrites_are_taken() -> None:
    found, of = alias_sets(
        """
        w 64 stored; v 64 stored
        a: v -> a 64
        b: w, a -> b 64 | b!a
        update w: w, b -> w' 64 output home=w | w'?w w'?b
        set v: w' -> v' 64 output home=v
        """,
        optional=False,
    )
    assert of["w'"] == of["w"] and of["v'"] == of["v"] and of["b"] == of["a"] != of["w"]
    assert found.stored[of["w"]] == 0 and found.stored[of["a"]] == -1


def test_a_required_overwrite_of_what_is_needed_is_an_error() -> None:
    with pytest.raises(PlanError, match="must overwrite 'x', which is needed later"):
        alias_sets("f: x 64 input -> a 64 | a!x; g: x, a -> y 64 output")
