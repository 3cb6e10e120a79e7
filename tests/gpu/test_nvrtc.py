"""Machine code of every kernel, for cards that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import foreplan as fp
from foreplan.base.errors import TargetError
from foreplan.frontend.losses import attach_loss
from foreplan.graph import TensorType
from foreplan.graph.types import DTYPES
from foreplan.ops.map import Map
from foreplan.runtime.cuda import launch
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.launch import FOLDER, Launch, Source
from foreplan.runtime.cuda.libraries import nvrtc
from foreplan.runtime.cuda.libraries.nvrtc import (
    CompilationError,
    Figures,
    Nvcc,
    Nvrtc,
    architecture_of,
    compiler,
    cubin,
    figures,
)
from foreplan.runtime.cuda.table import FAMILIES, kernel_for
from tests.gpu.card import OwnTarget
from tests.gpu.check import made
from tests.gpu.samples import launches
from tests.profile import pick
from tests.sweep.draws import drawn, emptied
from tests.sweep.judges import cuda
from tests.sweep.table import ENTRIES


def missing() -> str:
    """Why nothing can be compiled, or nothing."""
    try:
        compiler()
    except TargetError as error:
        return str(error)
    return ""


needs_compiler = pytest.mark.skipif(bool(missing()), reason=missing())
by_nvrtc = pytest.mark.skipif(
    not missing() and isinstance(compiler(), Nvcc),
    reason="needs NVRTC, as nvcc takes twenty minutes for all of it: make setup-cuda",
)
pytestmark = [pytest.mark.cuda_wheels, needs_compiler]
ARCHITECTURES = ["sm_80", "sm_90a", "sm_100"]
PLAIN = """
extern "C" __global__ void doubled(float* x) { x[threadIdx.x] *= 2; }
extern "C" __global__ void with_stack(float* x, int n) {
    float found[64];
    for (int i = 0; i < n; ++i) found[i * 7 % 64] = x[i];
    x[n] = found[n % 64];
}
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A translation unit of two kernels, one of which needs a stack."""
    (tmp_path / "plain.cu").write_text(PLAIN)
    monkeypatch.setattr(nvrtc, "FOLDER", tmp_path)
    return Source("plain.cu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_figures_are_read_from_the_machine_code(source: Source, architecture: str) -> None:
    found = figures(compiler().compile(source, architecture))
    assert found["doubled"].stack == 0 and found["with_stack"].stack == 256
    assert 4 <= found["doubled"].registers <= 16 < found["with_stack"].registers <= 32


def test_what_cannot_be_compiled_says_why(source: Source) -> None:
    with pytest.raises(CompilationError, match=r"sm_90(.|\n)*undefined"):
        compiler().compile(replace(source, generated="__global__ void broken() { undefined(); }"), "sm_90")


@pytest.fixture
def without_a_path(tmp_path: Path) -> Path:
    """A folder with a copy of NVRTC that, like that of CUDA 13.0's wheel, looks for no library beside it."""
    found = compiler()
    if not isinstance(found, Nvrtc):
        pytest.skip("needs NVRTC, and only nvcc is here: make setup-cuda")
    whole = Path(found.path).read_bytes()
    assert whole.count(b"$ORIGIN") <= 1  # that wheel itself has none
    (tmp_path / Path(found.path).name).write_bytes(whole.replace(b"$ORIGIN", b"/no/one"))
    return tmp_path


def compiled_alone(folder: Path, path: str = "") -> str:
    """What a process gives that has that NVRTC, and programs on a path."""
    code = (
        "from foreplan.runtime.cuda.libraries import nvrtc\n"
        "from foreplan.runtime.cuda.launch import Source\n"
        f"nvrtc.library_files = lambda name: {[str(file) for file in folder.glob('libnvrtc.so*')]}\n"
        "nvrtc.kept, nvrtc.keep = (lambda name: None), (lambda name, code: None)\n"
        "one = Source('transpose.cu', (('ELEMENT', 'u32'), ('TILE', 32), ('ROWS', 8), ('RANK', 1)))\n"
        "try:\n"
        "    print(*nvrtc.figures(nvrtc.cubin(one, 'sm_90')), type(nvrtc.compiler()).__name__)\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    environment = os.environ | {"PATH": path}
    environment.pop("LD_LIBRARY_PATH", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


def test_nvrtc_finds_its_second_library_beside_it(without_a_path: Path) -> None:
    (second,) = Path(compiler().path).parent.glob("libnvrtc-builtins.so.*[0-9]")  # type: ignore[attr-defined]
    (without_a_path / second.name).symlink_to(second)
    assert compiled_alone(without_a_path) == "transpose Nvrtc"


def test_an_nvrtc_that_cannot_compile_says_which_library_is_missing(without_a_path: Path) -> None:
    said = compiled_alone(without_a_path)
    assert said.startswith("TargetError") and "libnvrtc-builtins.so" in said and "nvidia-cuda-nvrtc" in said


def test_nvcc_takes_the_place_of_an_nvrtc_that_cannot_compile(without_a_path: Path, tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" = -o ] && echo code > "$2"; shift; done; echo nvcc 1\n')
    nvcc.chmod(0o755)
    said = compiled_alone(without_a_path, f"{nvcc.parent}:/bin:/usr/bin")
    assert said.startswith("ValueError no machine code"), said  # what stands for a compiler has written something else
    nvcc.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    said = compiled_alone(without_a_path, str(nvcc.parent))
    assert said.startswith("TargetError") and "libnvrtc-builtins.so" in said and "broken" in said


def test_maps_round_products_and_sums_each_as_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = made(Map(("((a0 * a1) + a2)",)), [TensorType(DTYPES["float32"], (1000,))] * 3)[0].instructions
    assert isinstance(only, Launch)
    apart = compiler().compile(only.source, "sm_90")
    monkeypatch.setattr(launch, "MAPS", ())
    assert compiler().compile(only.source, "sm_90") != apart


def test_machine_code_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store: dict[str, bytes] = {}
    monkeypatch.setattr(nvrtc, "kept", store.get)
    monkeypatch.setattr(nvrtc, "keep", store.__setitem__)
    one = Source("transpose.cu", (("ELEMENT", "u32"), ("TILE", 32), ("ROWS", 8), ("RANK", 1)))
    cubin.cache_clear()
    code = cubin(one, "sm_80")
    monkeypatch.setattr(type(compiler()), "compile", None)
    cubin.cache_clear()
    assert cubin(one, "sm_80") == code and len(store) == 1
    with pytest.raises(TypeError):
        cubin(one, "sm_90")
    cubin.cache_clear()


def test_architectures() -> None:
    assert [architecture_of(device_named(name)) for name in ("a100", "h100")] == ["sm_80", "sm_90"]


def test_cards_without_bfloat16_round_to_it_all_the_same() -> None:
    type = TensorType(DTYPES["bfloat16"], (1000,))
    (only,) = made(Map(("(a0 * 2)",)), [type])[0].instructions
    assert isinstance(only, Launch)
    assert figures(cubin(only.source, "sm_75"))["map"].stack == 0


@pytest.mark.thorough
@by_nvrtc
def test_kernels_of_nothing_compile() -> None:
    """Of every op, some drawn cases with nothing along an axis: g++, which runs them elsewhere, takes more."""
    for name, entry in ENTRIES.items():
        sources: set[Source] = set()
        for number in range(pick(2, 6, 30) if name in FAMILIES else 0):
            rng = drawn(name, 1, number)
            for *_, kernel in cuda.kernels(emptied(entry.draw(rng), rng)):
                sources |= {each.source for each in kernel.instructions if isinstance(each, Launch)}
            if len(sources) > pick(0, 0, 2):
                break
        for source in sorted(sources, key=repr)[: pick(1, 1, 4)]:
            assert cubin(source, "sm_90")


def test_samples_are_of_every_file() -> None:
    assert {each.source.file for each in launches("float32")} == {file.name for file in FOLDER.glob("*.cu")}


def too_much(given: Sequence[Launch], architecture: str) -> dict[str, Figures]:
    """Kernels that need a stack, for spilled registers or anything else, or more registers than a block can have."""
    wrong: dict[str, Figures] = {}
    for each in given:
        found = figures(cubin(each.source, architecture))[each.entry]
        threads = each.block[0] * each.block[1] * each.block[2]
        if found.stack or found.registers * threads > 65_536:
            wrong[f"{each.entry} of {each.source.file} {dict(each.source.defines)}"] = found
    return wrong


# Each type for each architecture is compiled here or for the zoo.
@pytest.mark.thorough
@by_nvrtc
@pytest.mark.parametrize(
    ("dtype", "architecture"),
    [("float32", "sm_90a"), ("bfloat16", "sm_80"), ("float32", "sm_100"), ("bfloat16", "sm_100")],
)
def test_no_kernel_spills_or_needs_a_stack(dtype: str, architecture: str) -> None:
    assert not too_much(launches(dtype), architecture)


@pytest.mark.thorough
@by_nvrtc
def test_no_kernel_with_places_of_64_bits_spills_or_needs_a_stack() -> None:
    found = []
    for each in launches("float32"):
        defines = tuple((name, "u64" if name == "INDEX" else value) for name, value in each.source.defines)
        found.append(replace(each, source=replace(each.source, defines=defines)))
    assert not too_much(found, "sm_90a")


def launches_of_the_zoo(precision: str) -> list[Launch]:
    """What training steps of the zoo's models launch at their own sizes, one of each entry and source."""
    target, found = OwnTarget("h100"), []
    for name in fp.models.names():
        graph = fp.models.build(name)
        graph = attach_loss(graph, fp.models.default_loss(name), [next(iter(graph.outputs))])
        step = fp.differentiate(graph, None, fp.optim.Adam(1e-3), precision=precision)
        for call in fp.lower(step, target).calls:
            windows = ([operand.window for operand in operands] for operands in (call.inputs, call.outputs))
            kernel = kernel_for(call.op, *windows, target.device)
            assert kernel is not None
            found += [each for each in kernel.instructions if isinstance(each, Launch)]
    return list({(each.source, each.entry): each for each in found}.values())


@pytest.mark.thorough
@by_nvrtc
@pytest.mark.parametrize(("precision", "architecture"), [("float32", "sm_80"), ("bf16", "sm_90a")])
def test_no_kernel_of_the_zoo_spills_or_needs_a_stack(precision: str, architecture: str) -> None:
    found = launches_of_the_zoo(precision)
    assert len(found) > 80
    assert not too_much(found, architecture)
