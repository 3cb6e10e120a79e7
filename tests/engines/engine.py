"""The engines with kernels of their own, as the tests of this folder know them: each case runs on every one of them.

A case is written once, in float32. Marked `bfloat16`, it runs in that type too: tensors are rounded to it, and a result
has to be what NumPy's kernel gives in float32 on the same numbers, rounded. `of_type` gives engines of other types.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from foreplan.graph import DType, Op, Window, as_dtype
from foreplan.graph.types import FLOAT32
from foreplan.ops.index import ScatterAdd
from foreplan.ops.norm.rows import LayerNorm, LayerNormGrad, RMSNorm, RMSNormGrad
from tests.cpu import check as cpu
from tests.gpu import check as gpu
from tests.kernels import assert_near, expected
from tests.ops.check import type_of
from tests.profile import pick
from tests.sweep.judges import JUDGES

Windows = Sequence[Window] | None
Results = Iterator[tuple[str, list[np.ndarray]]]

BFLOAT16 = as_dtype("bfloat16")
# Of each type, how far numbers lie apart at most, beside their size; rounding errs by half as much.
ULPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}
TINY = 1e-6
# Of the cases of a test, those that run on the card that is not there, and those that run in bfloat16 too.
SHARE_OF_CUDA, SHARE_OF_NARROW = pick((0.2, 0.1), (0.3, 0.15), (1.0, 1.0))


@dataclass(frozen=True)
class Slack:
    """How far results of a type may be from those of float32, or of float64, on the same numbers.

    Attributes:
        ulps: of a result of that type, in units in its last place.
        exact: of any result, beside the largest, as where sums are taken in another order: of narrow types.
        rounded: likewise, in units of the type, as what is multiplied or added to is rounded to it.
    """

    ulps: float = 0.5
    exact: float = 1e-5
    rounded: float = 0.0


# Probabilities, and gradients of scores, are rounded before they are multiplied.
PROBABILITIES = ("attention", "attention_grad", "packed_attention_grad", "linear_cross_entropy")
# Means of products are taken away, or sums of them: what orders of sums differ by counts more.
CENTRED = ("batch_norm_grad", "layer_norm_grad", "rms_norm_grad", "softmax_grad", "log_softmax_grad")
SLACK = dict.fromkeys(PROBABILITIES, Slack(rounded=1.0)) | dict.fromkeys(CENTRED, Slack(exact=1e-4))
# A product is rounded before what it is added to, and may cancel with it.
ADDED = Slack(ulps=1.0, rounded=0.5)


def slack_of(op: Op, inputs: Sequence[np.ndarray], kernel: str) -> Slack:
    """What a kernel of an op on such inputs is allowed."""
    if op.name == "linear_cross_entropy" and kernel.startswith("cublaslt"):  # logits are rounded themselves
        h, w = map(widened, inputs[:2])
        return Slack(rounded=1 + float(np.abs(h @ w.T).max()) / 2)
    products = op.name == "matmul" or op.name.startswith("conv")
    adds = len(inputs) > 2 and inputs[2].dtype != np.float32
    return ADDED if products and (adds or op.name == "conv_map") else SLACK.get(op.name, Slack())


def wide_inputs(op: Op, inputs: Sequence[np.ndarray]) -> set[int]:
    """The inputs that stay float32 in training: statistics, scales and biases, which have fewer axes than other inputs
    but for those named here; and what a wide sum is added to.
    """
    if op.name in ("matmul", "conv_weight_grad"):
        return {2} if op.wide else set()  # type: ignore[attr-defined]
    if op.name == "packed_attention_grad":
        return {2}
    if isinstance(op, ScatterAdd):
        return set()
    if isinstance(op, LayerNorm | RMSNorm | LayerNormGrad | RMSNormGrad):
        return set(range(1, getattr(op, "g", len(inputs))))
    rank = next(x.ndim for x in inputs if x.dtype.kind == "f")
    return {i for i, x in enumerate(inputs) if x.ndim < rank}


@dataclass(frozen=True)
class Engine:
    """How an engine's kernels are run, in poisoned memory whose surroundings are watched.

    Attributes:
        name: the engine's.
        results: what every kernel of an op gives, by its name; of an op, its inputs, `windows` (how they lie) and
            `over` (an output and the input whose bytes it takes).
        first: what the first of them gives.
        dtype: of tensors.
    """

    name: str
    results: Callable[..., Results]
    first: Callable[..., list[np.ndarray]]
    dtype: DType = FLOAT32

    @property
    def narrow(self) -> bool:
        """Whether tensors are of less than float32."""
        return self.dtype.is_narrow

    def check(
        self,
        op: Op,
        *inputs: np.ndarray,
        rtol: float = 1e-5,
        atol: float = 1e-5,
        windows: Windows = None,
        over: tuple[int, int] | None = None,
        wide: Iterable[int] = (),
    ) -> None:
        """Assert that every kernel gives what NumPy's does.

        Args:
            rtol: of results in float32, as `atol`; those of other types have the `slack_of` their op.
            wide: inputs that stay float32, beside the `wide_inputs`.
        """
        given, windows = self.given(op, inputs, windows, wide)
        found = list(self.results(op, given, windows, over))
        wanted = expected(op, [widened(x) for x in given] if self.narrow else given) if found else []
        for name, results in found:
            if self.dtype == FLOAT32:
                assert_near(results, wanted, rtol, atol, name)
            else:
                assert_rounded(results, wanted, self.dtype, slack_of(op, given, name), name)

    def run(
        self, op: Op, inputs: Sequence[np.ndarray], windows: Windows = None, over: tuple[int, int] | None = None
    ) -> list[np.ndarray]:
        """What the first kernel gives."""
        given, windows = self.given(op, inputs, windows)
        found = self.first(op, given, windows, over)
        return [widened(y) for y in found] if self.narrow else found

    def check_over(self, op: Op, given: Sequence[np.ndarray], *over: tuple[int, int] | None, **more: float) -> None:
        """Assert it for each way in which an output takes an input's bytes; None: in its own."""
        for each in over:
            self.check(op, *given, over=each, **more)

    def check_lying(self, op: Op, *given: np.ndarray, ways: Sequence[Windows], **more: float) -> None:
        """Assert it for each way in which inputs lie; None: in C order."""
        for windows in ways:
            self.check(op, *given, windows=windows, **more)

    def given(
        self, op: Op, inputs: Sequence[np.ndarray], windows: Windows = None, wide: Iterable[int] = ()
    ) -> tuple[list[np.ndarray], Windows]:
        """Inputs of the engine's type, and how these lie."""
        if self.dtype == FLOAT32:
            return list(inputs), windows
        wide = wide_inputs(op, inputs).union(wide) if self.narrow else ()
        given = [x if i in wide or x.dtype != np.float32 else x.astype(self.dtype.numpy) for i, x in enumerate(inputs)]
        if windows is None:
            return given, None
        return given, [x if x.type == type_of(y) else self.of_elements(x) for x, y in zip(windows, given)]

    def of_elements(self, window: Window) -> Window:
        """The same order of elements of this engine's type."""
        assert window.type.dtype == FLOAT32
        size = self.dtype.itemsize
        return Window(window.type.with_dtype(self.dtype), tuple(step * size // 4 for step in window.strides))


def widened(array: np.ndarray) -> np.ndarray:
    """The same numbers in float32, of narrower ones; others as they are."""
    return array.astype(np.float32) if as_dtype(array.dtype).is_narrow else array


def assert_rounded(
    found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], dtype: DType, slack: Slack, name: str
) -> None:
    """Assert that results are those of float32 or float64, rounded to a type."""
    ulp, exact = ULPS[dtype.name], 1.0 if dtype.is_narrow else ULPS["float64"] / ULPS["float32"]
    for ours, theirs in zip(found, wanted, strict=True):
        if not as_dtype(theirs.dtype).is_float:
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
            continue
        relative = slack.ulps * ulp if ours.dtype == dtype.numpy else 0.0
        ours, theirs = (y.astype(np.float64) for y in (ours, theirs))
        largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
        absolute = TINY * exact + max(slack.exact * exact, slack.rounded * ulp) * largest
        np.testing.assert_allclose(ours, theirs, rtol=relative, atol=absolute, err_msg=name)


ENGINES = {each.name: each for each in (Engine("cpu", cpu.results, cpu.run), Engine("cuda", gpu.results, gpu.run))}


def of_type(name: str, dtype: str) -> Engine:
    """An engine on tensors of another type."""
    return replace(ENGINES[name], dtype=as_dtype(dtype))


NARROW = {name: of_type(name, "bfloat16") for name in ENGINES}


def label(engine: Engine) -> str:
    """Its name and, but for float32, its type."""
    return engine.name if engine.dtype == FLOAT32 else f"{engine.name} {engine.dtype}"


def in_both_types(name: str) -> pytest.MarkDecorator:
    """Run a test of one engine's own ways in float32 and in bfloat16."""
    return pytest.mark.parametrize("engine", [ENGINES[name], NARROW[name]], ids=label)


def require(name: str) -> None:
    """Skip where an engine's kernels cannot run: without oneDNN, or without a compiler that stands in for CUDA's."""
    JUDGES[name].require()


def with_engines(metafunc: pytest.Metafunc, names: Iterable[str] = tuple(ENGINES)) -> None:
    """Run a test that asks for `engine` on each of these; in bfloat16 too, where it is marked so."""
    if "engine" not in metafunc.fixturenames:
        return
    types = (ENGINES, NARROW) if metafunc.definition.get_closest_marker("bfloat16") else (ENGINES,)
    found = [engines[name] for engines in types for name in names]
    metafunc.parametrize("engine", found, indirect=True, ids=label)


def in_shares(metafunc: pytest.Metafunc) -> None:
    """Of a test's cases on `cuda` or in bfloat16, keep those that the profile asks for: as good as evenly spread,
    whatever the parameters are. The first is kept, and on `cpu` all in float32 are.
    """
    places: Counter[str] = Counter()
    kept = []
    for case in metafunc._calls:
        engine = case.params.get("engine")
        if isinstance(engine, Engine) and (engine.narrow or engine.name == "cuda"):
            spread = places[label(engine)] * 0.6180339887 % 1  # multiples of the golden ratio fill [0, 1) evenly
            places[label(engine)] += 1
            if spread >= (SHARE_OF_NARROW if engine.narrow else SHARE_OF_CUDA):
                continue
        kept.append(case)
    metafunc._calls[:] = kept
