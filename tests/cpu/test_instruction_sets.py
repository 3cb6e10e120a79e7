"""oneDNN held to older instruction sets: right answers, and nothing left to its loops over single numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foreplan.graph import TensorType, Window
from foreplan.graph.types import FLOAT32
from foreplan.runtime.cpu.onednn import primitives
from foreplan.runtime.cpu.onednn.primitives import REFERENCE, After, Geometry
from foreplan.runtime.kernel import Refused
from tests.cpu.check import needs_onednn
from tests.profile import cases

pytestmark = needs_onednn()
ROOT = Path(__file__).resolve().parents[2]
SETS = {"SSE41": "SSE4.1", "AVX2": "AVX2", "DEFAULT": ""}  # and what the library then says


@pytest.mark.parametrize("name", cases(SETS, slow=("SSE41",), thorough=("AVX2", "DEFAULT")))
def test_a_small_net_of_each_family(name: str) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": name, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cpu.families"]
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
