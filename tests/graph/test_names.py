"""Names that are taken, and free ones like them."""

from __future__ import annotations

from foreplan.graph.names import Names


class _Counted(set[str]):
    asked = 0

    def __contains__(self, name: object) -> bool:
        self.asked += 1
        return super().__contains__(name)


def test_newcomers_are_numbered() -> None:
    names = Names(["conv", "conv.2"])
    assert [names.claim("conv") for _ in range(3)] == ["conv.1", "conv.3", "conv.4"]
    assert names.free("relu") == names.free("relu") == "relu"
    names.take(["relu"])
    assert names.claim("relu") == "relu.1"


def test_many_of_one_name_are_told_apart_in_few_looks() -> None:
    """A recurrent layer's steps all make nodes of one name; import took the square of their number."""
    names = Names()
    names._taken = looked = _Counted()
    found = {names.claim("step") for _ in range(1000)}
    assert len(found) == 1000
    assert looked.asked <= 3000
