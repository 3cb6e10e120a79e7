"""Every function of scalar expressions, of numbers drawn by their bits, so that all exponents are equally likely."""

from __future__ import annotations

import pytest

from foreplan.graph import TensorType
from foreplan.graph.types import DTYPES
from foreplan.ops.expr import FUNCTIONS, Arg, Call
from foreplan.ops.map import Map
from tests.kernels import is_function_of
from tests.profile import pick
from tests.sweep.case import Case, Given
from tests.sweep.judges import JUDGES

COUNT, TOGETHER = pick(1000, 1500, 4000), 12


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("judge", ["numpy", "cpu", "cuda"])
def test_numbers_of_any_size(judge: str, dtype: str) -> None:
    JUDGES[judge].require()
    for arity in (1, 2):
        names = [n for n, f in FUNCTIONS.items() if f.arity == arity and is_function_of(n, DTYPES[dtype])]
        args = tuple(Arg(i) for i in range(arity))
        given = tuple(Given(TensorType(DTYPES[dtype], (COUNT,)), "patterns", seed) for seed in range(arity))
        for start in range(0, len(names), TOGETHER):
            exprs = tuple(str(Call(name, args)) for name in names[start : start + TOGETHER])
            assert JUDGES[judge].judge(Case(Map(exprs), given))
