from __future__ import annotations

from pathlib import Path

import pytest

from foreplan.base.errors import DoesNotFitError, PlanError, UsageError
from foreplan.planner import Interval, place_intervals, read_intervals, write_intervals

GOOD = "id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\nd,9,21,4\ne,0,21,4\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "in.csv"
    path.write_text(text)
    return path


def test_read_place_write_and_read_again(tmp_path: Path) -> None:
    intervals = read_intervals(write(tmp_path, GOOD))
    assert intervals[1] == Interval("b", 3, 9, 4)
    placement = place_intervals(intervals)
    assert placement.height == placement.lower_bound == 12
    out = tmp_path / "out.csv"
    write_intervals(out, intervals, placement.offsets)
    assert out.read_text().splitlines()[0] == "id,lower,upper,size,offset"
    again = read_intervals(out)
    assert [interval.offset for interval in again] == list(placement.offsets)
    assert list(place_intervals(again).offsets) == list(placement.offsets)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.csv", "out.csv"]


def test_columns_in_any_order_with_alignment_and_some_offsets(tmp_path: Path) -> None:
    text = "size,id,upper,lower,alignment,offset\n10,a,5,0,16,\n10,b,5,0,,32\n10,c,5,0,16,-1\n\n"
    intervals = read_intervals(write(tmp_path, text))
    assert intervals[1] == Interval("b", 0, 5, 10, 1, 32)
    placement = place_intervals(intervals)
    assert placement.offsets[1] == 32 and sorted(placement.offsets) == [0, 16, 32]
    write_intervals(tmp_path / "out.csv", intervals, placement.offsets)
    assert read_intervals(tmp_path / "out.csv")[0].alignment == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: the header must name the columns id,lower,upper,size"),
        ("id,lower,size\n", "line 1: the header"),
        ("id,lower,upper,size,colour\n", "line 1: the header"),
        ("id,lower,upper,size\na,0,1,4\nb,0,1\n", "line 3: 3 fields for 4 columns"),
        ("id,lower,upper,size\na,0,1,4\na,0,1,4\n", "line 3: id 'a' is there twice"),
        ("id,lower,upper,size\na,0,x,4\n", "line 2: upper must be an integer, got 'x'"),
        ("id,lower,upper,size\na,3,3,4\n", "line 2: lower 3 must be below upper 3"),
        ("id,lower,upper,size\na,0,1,-4\n", "line 2: size -4"),
        ("id,lower,upper,size,alignment\na,0,1,4,3\n", "line 2: alignment 3"),
        ("id,lower,upper,size,alignment,offset\na,0,1,4,4,2\n", "line 2: alignment 4 .* offset 2"),
        ("id,lower,upper,size\na,0,1,99999999999999999999999\n", r"2\*\*60"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_intervals(write(tmp_path, text))


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_intervals(tmp_path / "in.csv") == read_intervals(write(tmp_path, GOOD))


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing.csv: No such file"):
        read_intervals(tmp_path / "missing.csv")
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"id,lower,upper,size\n\xff\xfe,0,1,2\n")
    with pytest.raises(UsageError, match="not a CSV file in UTF-8"):
        read_intervals(binary)
    with pytest.raises(UsageError, match="No such file"):
        write_intervals(tmp_path / "no" / "out.csv", [], [])


def test_capacity() -> None:
    intervals = [Interval("a", 0, 2, 6), Interval("b", 1, 3, 6)]
    assert place_intervals(intervals, 12).height == 12
    with pytest.raises(DoesNotFitError, match=r"12 bytes.*allowed are 11 bytes.*so no placement fits") as caught:
        place_intervals(intervals, 11)
    assert (caught.value.needed, caught.value.capacity, caught.value.lower_bound) == (12, 11, 12)


def test_given_offsets_that_overlap() -> None:
    with pytest.raises(PlanError, match="overlap"):
        place_intervals([Interval("a", 0, 2, 6, 1, 0), Interval("b", 1, 3, 6, 1, 5)])
