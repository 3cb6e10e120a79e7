"""Layouts in blocks: where each element lies, there and back, and what is none."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.base.errors import ShapeError
from foreplan.graph.blocks import Blocks
from tests.profile import pick


def place_of(blocks: Blocks, indices: tuple[int, ...]) -> int:
    """Where an element lies, by counting: the quotient by all blocks of its axis is outer, the rest inner."""
    letters = [chr(ord("a") + i) for i in range(len(indices))]
    left, each = dict(zip(letters, indices)), dict.fromkeys(letters, 1)
    for size, letter in blocks.inner:
        each[letter] *= size
    outer = {x: left[x] // each[x] for x in letters}
    counts = {x: -(-extent // each[x]) for x, extent in zip(letters, blocks.shape)}
    rest = {x: left[x] % each[x] for x in letters}
    place = 0
    for letter in blocks.tag[: len(indices)].lower():
        place = place * counts[letter] + outer[letter]
    remaining = dict(each)
    for size, letter in blocks.inner:
        remaining[letter] //= size
        place = place * size + rest[letter] // remaining[letter]
        rest[letter] %= remaining[letter]
    return place


def drawn(rng: np.random.Generator) -> Blocks:
    shape = tuple(map(int, rng.integers(1, 8, rng.integers(1, 5))))
    letters = [chr(ord("a") + i) for i in range(len(shape))]
    inner = [(int(rng.integers(1, 5)), str(rng.choice(letters))) for _ in range(rng.integers(0, 4))]
    blocked = {letter for _, letter in inner}
    outer = [x.upper() if x in blocked else x for x in rng.permutation(letters)]
    return Blocks(shape, "".join(outer) + "".join(f"{size}{letter}" for size, letter in inner))


@pytest.mark.parametrize("seed", range(pick(10, 40, 400)))
def test_every_element_lies_where_its_tag_says_and_comes_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = drawn(rng)
    tensor = 1 + np.arange(blocks.elements, dtype=np.float32).reshape(blocks.shape)
    into = np.full(blocks.size, -1, np.float32)
    blocks.packed(tensor, into)
    wanted = np.zeros(blocks.size, np.float32)
    for indices in np.ndindex(*blocks.shape):
        wanted[place_of(blocks, indices)] = tensor[indices]
    assert (into == wanted).all()
    assert (blocks.unpacked(into) == tensor).all()
    assert Blocks.parsed(str(blocks)) == blocks
    if blocks.steps is None:
        assert max(sum(letter == x for _, x in blocks.inner) for letter in "abcd") > 1
        return
    copies, there = blocks.copies(tensor, np.full(blocks.size, -1, np.float32)), None
    for source, target in copies:
        target[...] = source
        there = target if target.base is None else target.base
    assert there is not None
    assert (there == into).all()
    assert len(copies) == blocks.copied
    for indices in np.ndindex(*blocks.shape):
        at = sum(i // size * outer + i % size * near for i, (size, outer, near) in zip(indices, blocks.steps))
        assert into[at] == tensor[indices]


def test_elements_are_counted_in_c_order_along_other_axes() -> None:
    blocks, into = Blocks((2, 3), "ab"), np.empty(6)
    blocks.packed(np.arange(6.0).reshape(1, 6), into)
    assert into.tolist() == list(range(6))
    assert Blocks((5, 3), "bA2a").size == 18


@pytest.mark.parametrize(
    "shape, tag",
    [((2,), "A0a"), ((0,), "a"), *(((2, 3), tag) for tag in ("", "a", "aa", "Ab", "ac", "ab2", "ab2a", "AB2a"))],
)
def test_what_is_no_tag_is_told(shape: tuple[int, ...], tag: str) -> None:
    with pytest.raises(ShapeError, match="no layout in blocks"):
        Blocks(shape, tag)


@pytest.mark.parametrize("text", ["", "ab", "2x:ab", "2,3:ab", "2x3"])
def test_what_is_no_layout_is_told(text: str) -> None:
    with pytest.raises(ShapeError, match="no layout in blocks"):
        Blocks.parsed(text)
