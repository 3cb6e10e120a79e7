"""ONNX's own suites as a user runs them: import, compile, bind, step, on every engine of this machine.

What foreplan refuses stands in `refused.txt`, under the reason. A case that begins to work, or to be refused, or to be
refused for another reason, fails here; `python -m tests.frontend.onnx.test_suites` writes the list anew.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections import defaultdict
from pathlib import Path

import numpy as np
import onnx
import pytest

import foreplan as fp
from foreplan.errors import UnsupportedError
from tests.frontend.onnx.suites import KINDS, Case, cases, forms
from tests.profile import pick

REFUSED = Path(__file__).with_name("refused.txt")
TARGETS = ("numpy", "cpu:threads=1")
PARTS = 6  # of the suite of nodes, so that processes can share it
# Their expected outputs hold numbers drawn by NumPy's generator, which no graph can draw again.
DRAWN = re.compile("test_(training_dropout(?!.*zero_ratio)|bernoulli|randomuniform|randomnormal)")
# The tolerance of a result that was computed in few bits: two units in the last place, as ONNX's runner has it.
COARSE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}


def _run(case: Case, model: onnx.ModelProto, feeds: dict[str, np.ndarray], expected: list[np.ndarray | None]) -> None:
    """One form of a case on each engine against its expected outputs.

    Raises:
        UnsupportedError: foreplan refuses it.
        AssertionError: an output differs.
    """
    read = {value.name for value in model.graph.input}
    graph = fp.from_onnx(model, shapes={name: array.shape for name, array in feeds.items() if name in read})
    given = {value.name: feeds[value.name] for value in graph.inputs}
    for target in TARGETS:
        outputs = fp.compile(graph, target=target).bind().step(given).outputs
        for info, wanted in zip(model.graph.output, expected, strict=True):
            assert wanted is not None, f"{case.name}: a tensor stands for output {info.name!r}, which is none"
            got, where = outputs[info.name], f"{case.name} on {target}: output {info.name!r}"
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), where
            if DRAWN.match(case.name):
                continue
            rtol = max(case.rtol, COARSE.get(wanted.dtype.name, 0.0))
            if wanted.dtype.name == "bfloat16":
                got, wanted = got.astype(np.float32), wanted.astype(np.float32)
            np.testing.assert_allclose(got, wanted, rtol, case.atol, err_msg=where)


def _reason(error: UnsupportedError) -> str:
    """What is refused, without the names of model, node and tensor."""
    text = re.sub(r"^model '[^']*': (node|input|output|initializer) '[^']*'", "", str(error)).removeprefix(": ")
    text = re.sub(r"^ \((\w+)\)( with opset \d+)?: ", r"\1: ", text).strip()
    return re.split(r"; | \(opset|, and ", text)[0]


def refusal(case: Case) -> str:
    """Why a case is refused in every form; nothing where it passes in one.

    Raises:
        AssertionError: an output differs from the expected one.
        ForeplanError: of another kind than a refusal: that is a defect, as any other error is.
    """
    why = ""
    for inputs, expected in case.data_sets:
        feeds = {info.name: x for info, x in zip(case.model.graph.input, inputs) if x is not None}
        for form in forms(case.model, feeds):
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    _run(case, form, feeds, expected)
                break
            except UnsupportedError as error:
                why = why or _reason(error)
        else:
            return why
    return ""


def _listed() -> dict[str, str]:
    found, reason = {}, ""
    for line in REFUSED.read_text().splitlines():
        if line.startswith("  "):
            assert found.keys().isdisjoint(line.split()), line
            found |= dict.fromkeys(line.split(), reason)
        else:
            reason = line
    return found


def _check(part: tuple[Case, ...]) -> None:
    listed = _listed()
    wrong = [
        f"{case.name}: refused as {got or 'nothing: it works'!r}, listed as {listed.get(case.name, 'working')!r}"
        for case in part
        if (got := refusal(case)) != listed.get(case.name, "")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(pick(1, 1, PARTS)))
def test_nodes_are_right_or_listed_as_refused(part: int) -> None:
    _check(cases("node")[part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_models_are_right_or_listed_as_refused(kind: str) -> None:
    _check(cases(kind))


@pytest.mark.slow
def test_what_is_listed_exists() -> None:
    names = [case.name for kind in KINDS for case in cases(kind)]
    assert len(set(names)) == len(names) > 2000
    assert set(_listed()) <= set(names)


def _write() -> None:
    reasons = defaultdict(list)
    for kind in KINDS:
        for case in cases(kind):
            if why := refusal(case):
                reasons[why].append(case.name)
    REFUSED.write_text("".join(f"{why}\n{_together(names)}\n" for why, names in sorted(reasons.items())))


def _together(names: list[str]) -> str:
    """As many names to a line as it holds."""
    return textwrap.fill(
        " ".join(sorted(names)), 120, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


if __name__ == "__main__":
    _write()
