"""ONNX's own tests of every operator: what imports must be right, and what passed once must go on passing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from foreplan.errors import ForeplanError, UnsupportedError
from foreplan.frontend import from_onnx
from tests.ops.check import evaluate

PASSING = Path(__file__).with_name("passing.txt")
# Their expected outputs hold numbers drawn by NumPy's generator, which no graph can draw again.
DRAWN = ("test_training_dropout", "test_bernoulli", "test_randomuniform", "test_randomnormal")
# The tolerance of a result that was computed in few bits: two units in the last place, as ONNX's runner has it.
COARSE = {"float16": 2.0**-9, "bfloat16": 2.0**-6}


def _array(item: object) -> np.ndarray | None:
    if isinstance(item, onnx.TensorProto):
        item = numpy_helper.to_array(item)
    array = None if item is None or isinstance(item, list) else np.asarray(item)
    return None if array is None or array.dtype.kind in "OSU" else array


def _with_constants(model: onnx.ModelProto, feeds: dict[str, np.ndarray], names: set[str]) -> onnx.ModelProto:
    """The model with some of its inputs made initializers: shapes, axes and bounds must be known at import."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    left = [value for value in model.graph.input if value.name not in names]
    del changed.graph.input[:]
    changed.graph.input.extend(left)
    changed.graph.initializer.extend(numpy_helper.from_array(feeds[name], name) for name in sorted(names))
    return changed


def _forms(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Iterator[onnx.ModelProto]:
    """The model as it is, then with more and more of its inputs known."""
    yield model
    later = list(feeds)[1:]
    integers = {name for name in feeds if feeds[name].dtype.kind in "iub"}
    small = {name for name in later if feeds[name].size <= 8}
    for names in (integers & set(later), (integers & set(later)) | small, integers, integers | small):
        yield _with_constants(model, feeds, names)


def _check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], expected: list[np.ndarray], case: object) -> None:
    read = {value.name for value in model.graph.input}
    graph = from_onnx(model, shapes={name: array.shape for name, array in feeds.items() if name in read})
    found = evaluate(graph, {value.name: feeds[value.name] for value in graph.inputs}, hard=False)
    for output, wanted in zip(model.graph.output, expected):
        got = found[graph.outputs[output.name]]
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), output.name
        rtol = max(case.rtol, COARSE.get(wanted.dtype.name, 0.0))  # type: ignore[attr-defined]
        if wanted.dtype.name == "bfloat16":
            got, wanted = got.astype(np.float32), wanted.astype(np.float32)
        np.testing.assert_allclose(got, wanted, rtol, case.atol, err_msg=output.name)  # type: ignore[attr-defined]


def _try(case: object) -> str:
    """`passed`, `refused`, or what is wrong."""
    model = case.model  # type: ignore[attr-defined]
    for inputs, outputs in case.data_sets:  # type: ignore[attr-defined]
        arrays, expected = [_array(item) for item in inputs], [_array(item) for item in outputs]
        if any(array is None for array in (*arrays, *expected)):
            return "refused"  # sequences, optionals and strings
        feeds = {value.name: array for value, array in zip(model.graph.input, arrays)}
        for form in _forms(model, feeds):  # type: ignore[arg-type]
            try:
                _check(form, feeds, expected, case)  # type: ignore[arg-type]
                break
            except UnsupportedError:
                continue
            except (AssertionError, ForeplanError) as error:
                return f"{type(error).__name__}: {error}"
        else:
            return "refused"
    return "passed"


@pytest.mark.slow
def test_every_node_test_that_imports_is_right_and_none_is_lost() -> None:
    from onnx.backend.test.loader import load_model_tests

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        cases = [case for case in load_model_tests(kind="node") if not case.name.startswith(DRAWN)]
        results = {case.name: _try(case) for case in cases}
    wrong = {name: result for name, result in results.items() if result not in ("passed", "refused")}
    assert not wrong, "\n\n".join(f"{name}: {result}" for name, result in sorted(wrong.items()))
    listed = PASSING.read_text().split()
    assert listed == sorted(listed)
    lost = [name for name in listed if results.get(name, "passed") != "passed"]
    assert not lost, f"{len(lost)} tests that passed are refused now: {lost[:10]}"
    new = sorted(name for name, result in results.items() if result == "passed" and name not in set(listed))
    assert not new, f"{len(new)} tests pass that are not listed in {PASSING.name}; add them: {new[:10]}"
