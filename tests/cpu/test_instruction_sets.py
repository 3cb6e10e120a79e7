"""oneDNN and foreplan's own code held to older instruction sets: right answers, and no loops over single numbers.

What this machine's own instruction set decides, other tests of this folder see; those that products and convolutions
depend on most run here once more for older ones, in a process of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.graph import TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.lower.fallbacks import fallbacks
from foreplan.ops.conv.ops import Conv
from foreplan.ops.matmul import MatMul
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import REFERENCE, After, Geometry, Primitive
from foreplan.runtime.cpu.table import _make
from foreplan.runtime.kernel import Refused
from tests.cpu.check import needs_onednn, run
from tests.engines.engine import NARROW
from tests.kernels import normal
from tests.profile import few

pytestmark = needs_onednn()
ROOT = Path(__file__).resolve().parents[2]
SETS = {"SSE41": "SSE4.1", "AVX2": "AVX2", "AVX512_CORE": "AVX-512", "DEFAULT": ""}  # and what the library then says
DRAWN = (  # ops whose kernels are of oneDNN's products and convolutions
    "attention", "attention_grad", "conv", "conv_data_grad", "conv_map", "conv_weight_grad", "linear_cross_entropy",
    "matmul", "matmul_map", "packed_attention_grad",
)  # fmt: skip
STEPS = ("mlp", "conv_chain", "gpt2_small", "vit_b16")
ENGINE = "tests/cpu/test_engine.py::test_"
RUN_AGAIN = [
    "tests/cpu/test_blocked.py",
    "tests/cpu/test_vectors.py",
    "tests/cpu/test_parts.py",
    "tests/cpu/test_prepack.py",
    "tests/cpu/test_product_parts.py",
    *(f"tests/engines/test_{name}.py" for name in ("attention", "contraction", "convolution", "linear_cross_entropy")),
    *(f"tests/sweep/test_ops.py::test_drawn_cases[cpu-{name}]" for name in DRAWN),
    *(f"{ENGINE}a_step_gives_what_numpy_gives[{model}-training-1]" for model in STEPS),
    *(f"{ENGINE}nothing_of_a_bfloat16_step_falls_back[{model}-training-1]" for model in STEPS),
    *(f"{ENGINE}a_bfloat16_step_is_as_near_to_float32_as_numpys[{model}]" for model in STEPS),
]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["AVX2", "AVX512_CORE", "AVX", "SSE41"])
def test_kernels_and_steps_in_both_types(name: str) -> None:
    """Drawn ops, steps beside NumPy's, and bits by one thread and by several."""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": name, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not cuda", *RUN_AGAIN]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture
def without_narrow_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """oneDNN as it is on a processor without AVX-512: it refuses products and convolutions of bfloat16."""

    def refusing(make: Callable[..., Primitive]) -> Callable[..., Primitive]:
        def made(*windows: Window, **options: Any) -> Primitive:
            if windows[0].type.dtype.is_narrow:
                raise Refused("bfloat16")
            return make(*windows, **options)

        return made

    for name in ("matmul", "convolution", "convolution_data_gradient", "convolution_weight_gradient"):
        monkeypatch.setattr(primitives, name, refusing(getattr(primitives, name)))
    _make.cache_clear()
    yield
    _make.cache_clear()


@pytest.mark.parametrize(
    ("op", "given"),
    [
        (MatMul(), [normal(30, 40), normal(40, 50)]),
        (Conv((1, 1), ((1, 1), (1, 1)), (1, 1), 1), [normal(2, 20, 9, 8), normal(24, 20, 3, 3)]),
    ],
    ids=["matmul", "conv"],
)
def test_bfloat16_without_onednns_kernels_is_rounded_once(
    op: MatMul | Conv, given: list[np.ndarray], without_narrow_kernels: None
) -> None:
    narrow = NARROW["cpu"].given(op, given)[0]
    (found,), (wanted,) = run(op, narrow), run(op, [x.astype(np.float32) for x in narrow])
    np.testing.assert_array_equal(found, wanted.astype(found.dtype))


def test_bfloat16_without_onednns_kernels_is_noted(without_narrow_kernels: None) -> None:
    step = fp.compile(fp.models.build("mlp:width=32,batch=4"), target="cpu:threads=1", precision="bf16")
    assert not fallbacks(step.program)
    (note,) = (note for note in step.program.notes if "bfloat16" in note)
    assert "in float32" in note and " matmul" in note


FEW = ["mlp:width=32,batch=4", "images of 1 axis"]


@pytest.mark.parametrize(("name", "nets"), few([("SSE41", FEW), *((name, []) for name in SETS)]))
def test_a_small_net_of_each_family(name: str, nets: list[str]) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": name, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cpu.families", *nets]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    if found["instruction set"] != (SETS[name] or found["instruction set"]):
        pytest.skip(f"needs a processor with {SETS[name]}; this one has no more than {found['instruction set']}")
    for net, told in found["nets"].items():
        assert not [each for each in told["bound"] if REFERENCE in each], net
        assert not told["numpy"], net  # a note would say so
        assert told["far"] < 1e-4, net


def test_what_onednn_has_a_reference_alone_for_is_refused() -> None:
    x, w, y = (Window.dense(TensorType(FLOAT32, shape)) for shape in ((1, 4, 8, 8), (4, 4, 1, 1), (1, 4, 8, 8)))
    whole = Window.dense(TensorType(FLOAT32, (1, 4, 8, 1)))  # one number a row, which only the reference adds
    geometry = Geometry((1, 1), (1, 1), (0, 0), (0, 0))
    after = [After("add", whole)]
    assert REFERENCE in primitives.convolution(x, w, y, geometry, after=after, avoided=()).implementation
    with pytest.raises(Refused):
        primitives.convolution(x, w, y, geometry, after=after)
