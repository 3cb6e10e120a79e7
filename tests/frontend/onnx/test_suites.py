"""ONNX's own suites by `foreplan.onnx_backend`: prepare and run, on every engine of this machine.

Two lists hold what is expected to fail, each case under its reason: `as_is.txt`, the cases that pass only when small
inputs are made constants, and `refused.txt`, those that do not pass then either. A case that begins to work, or to be
refused, or to be refused for another reason, fails here. So the lists can only become shorter.
`python -m tests.frontend.onnx.test_suites` writes them anew.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from foreplan.base.errors import UnsupportedError
from foreplan.onnx_backend import Backend
from tests.frontend.onnx.suites import KINDS, Case, cases, forms
from tests.profile import few

AS_IS, REFUSED = (Path(__file__).with_name(name) for name in ("as_is.txt", "refused.txt"))
DEVICES = ("numpy", "cpu:threads=1")
PARTS = 60  # of the suite of nodes, so that processes can share it
# Their expected outputs hold numbers drawn by NumPy's generator, which no graph can draw again.
DRAWN = re.compile("test_(training_dropout(?!.*zero_ratio)|bernoulli|randomuniform|randomnormal)")
# The tolerance of a result that was computed in few bits: two units in the last place, as ONNX's runner has it.
COARSE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
# Their expected outputs hold what a transform in float32 left where exact results are zero: some units of the largest.
LEFT = re.compile("test_dft_inverse")


@dataclass(frozen=True)
class Verdict:
    """What becomes of a case.

    Attributes:
        as_is: why its file is refused as it is; empty: it passes.
        refused: why it is also refused with small inputs as constants; empty: it then passes.
        bound: whether inputs were bound by value to pass as it is.
    """

    as_is: str = ""
    refused: str = ""
    bound: bool = False


def _run(case: Case, model: onnx.ModelProto, feeds: dict[str, np.ndarray], expected: list[np.ndarray | None]) -> bool:
    """One form of a case on each engine against its expected outputs; whether inputs were bound by value.

    Raises:
        UnsupportedError: foreplan refuses it.
        AssertionError: an output differs.
    """
    given = {value.name: feeds[value.name] for value in model.graph.input if value.name in feeds}
    for device in DEVICES:
        prepared = Backend.prepare(model, device)
        outputs = prepared.run(given)
        for info, wanted, got in zip(model.graph.output, expected, outputs, strict=True):
            assert wanted is not None, f"{case.name}: a tensor stands for output {info.name!r}, which is none"
            where = f"{case.name} on {device}: output {info.name!r}"
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), where
            if DRAWN.match(case.name):
                continue
            rtol = max(case.rtol, COARSE.get(wanted.dtype.name, 0.0))
            if wanted.dtype.kind == "V" or wanted.dtype.name == "bfloat16":  # types of ml_dtypes
                got, wanted = got.astype(np.float32), wanted.astype(np.float32)
            atol = max(case.atol, 2.0**-23 * np.abs(wanted).max()) if LEFT.match(case.name) else case.atol
            np.testing.assert_allclose(got, wanted, rtol, atol, err_msg=where)
    return bool(prepared.bound)


def _reason(error: UnsupportedError) -> str:
    """What is refused, without the names of model, node and tensor. Every refusal names what to do, and a node's its
    opset.
    """
    assert "; " in str(error) and re.search(r"node '|(input|output|initializer|gives) '", str(error)), error
    assert "node '" not in str(error) or re.search(r"node '[^']*' \(\w+\).* opset \d+", str(error)), error
    text = re.sub(r"^model '[^']*': (node|input|output|initializer) '[^']*'", "", str(error)).removeprefix(": ")
    text = re.sub(r"^ \((\w+)\)( with opset \d+)?: ", r"\1: ", text).strip()
    return re.split(r"; | \(opset|, and | \(input ", text)[0]


def verdict(case: Case) -> Verdict:
    """What becomes of a case: as its file is, then with more and more inputs as constants.

    Raises:
        AssertionError: an output differs from the expected one.
        ForeplanError: of another kind than a refusal: that is a defect, as any other error is.
    """
    found = Verdict()
    for inputs, expected in case.data_sets:
        feeds = {info.name: x for info, x in zip(case.model.graph.input, inputs) if x is not None}
        whys = []
        for form in forms(case.model, feeds):
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    bound = _run(case, form, feeds, expected)
            except UnsupportedError as error:
                whys.append(_reason(error))
                continue
            found = Verdict(found.as_is or (whys or [""])[0], found.refused, found.bound or bound)
            break
        else:
            return Verdict(whys[0], whys[0])
    return found


def refusal(case: Case) -> str:
    """Why a case is refused in every form; nothing where it passes in one."""
    return verdict(case).refused


def _listed(file: Path) -> dict[str, str]:
    found, reason = {}, ""
    for line in file.read_text().splitlines():
        if line.startswith("  "):
            assert found.keys().isdisjoint(line.split()), line
            found |= dict.fromkeys(line.split(), reason)
        else:
            reason = line
    return found


def _check(part: tuple[Case, ...]) -> None:
    as_is, refused = _listed(AS_IS), _listed(REFUSED)
    wrong = []
    for case in part:
        found = verdict(case)
        listed = Verdict(as_is.get(case.name, refused.get(case.name, "")), refused.get(case.name, ""), found.bound)
        if found != listed:
            wrong.append(f"{case.name}: found {found}, listed {listed}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def nodes() -> tuple[Case, ...]:
    """ONNX's reference computes what some of them give."""
    return cases("node")


@pytest.mark.slow
@pytest.mark.parametrize("part", few(range(PARTS)))
def test_nodes_are_right_or_listed_as_refused(part: int, nodes: tuple[Case, ...]) -> None:
    _check(nodes[part::PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_models_are_right_or_listed_as_refused(kind: str) -> None:
    _check(cases(kind))


@pytest.mark.slow
def test_what_is_listed_exists() -> None:
    names = [case.name for kind in KINDS for case in cases(kind)]
    assert len(set(names)) == len(names) > 2000
    listed = [*_listed(AS_IS), *_listed(REFUSED)]
    assert set(listed) <= set(names)
    assert len(set(listed)) == len(listed)


def write() -> dict[str, tuple[int, int, int, int]]:
    """Write the lists anew.

    Returns:
        By suite: its cases, those that pass as they are without and with inputs bound by value, and those that pass
        as they are or with small inputs as constants.
    """
    lists: dict[Path, dict[str, list[str]]] = {AS_IS: defaultdict(list), REFUSED: defaultdict(list)}
    counts = {}
    for kind in KINDS:
        verdicts = {case.name: verdict(case) for case in cases(kind)}
        for name, found in verdicts.items():
            if found.refused:
                lists[REFUSED][found.refused].append(name)
            elif found.as_is:
                lists[AS_IS][found.as_is].append(name)
        passed = [found for found in verdicts.values() if not found.refused]
        alone = [found for found in passed if not found.as_is]
        counts[kind] = (len(verdicts), sum(not found.bound for found in alone), len(alone), len(passed))
    for file, reasons in lists.items():
        file.write_text("".join(f"{why}\n{_together(names)}\n" for why, names in sorted(reasons.items())))
    return counts


def _together(names: list[str]) -> str:
    """As many names to a line as it holds."""
    return textwrap.fill(
        " ".join(sorted(names)), 120, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


if __name__ == "__main__":
    print(write())
