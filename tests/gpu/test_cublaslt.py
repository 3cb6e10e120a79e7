"""cuBLASLt as we call it: beside its header; by functions that this declares, on host memory; and with no card."""

from __future__ import annotations

import ctypes
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import PlanError, TargetError
from foreplan.graph import Window
from foreplan.ops.conv.ops import ConvOp
from foreplan.ops.matmul import MatMul
from foreplan.ops.matmul_map import MatMulMap
from foreplan.runtime.cuda.engine import ready
from foreplan.runtime.cuda.kernels.lt import lt_kernels
from foreplan.runtime.cuda.launch import LaunchKernel, Multiply
from foreplan.runtime.cuda.libraries import cublaslt, driver, libraries
from foreplan.runtime.cuda.libraries.cublaslt import SIGNATURES, Cublaslt, Descriptor, Found, opened
from tests.gpu.binder import Bound
from tests.gpu.check import DEVICE, Memory, expected, laid_out, type_of
from tests.gpu.compiled import needs_gcc

SHIM = Path(__file__).parent / "shim"
STREAM = 7
RNG = np.random.default_rng(0)


def headers() -> list[str]:
    """Folders of wheels that have cuBLASLt's header."""
    return [str(found.parent) for folder in sys.path for found in Path(folder).glob("nvidia/*/include/cublasLt.h")]


def with_headers(test: Any) -> Any:
    missing = pytest.mark.skipif(not headers(), reason="the header of cuBLASLt is not installed: make setup-cuda")
    return pytest.mark.cuda_wheels(needs_gcc(missing(test)))


def compile_cpp(text: str, *options: str) -> None:
    includes = [f"-I{folder}" for folder in (SHIM, headers()[0])]
    command = ["g++", "-std=c++17", "-O1", *includes, *options, "-x", "c++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


@with_headers
def test_names_and_numbers_are_the_headers() -> None:
    names = {name: value for name, value in vars(cublaslt).items() if name.startswith(("CUBLAS", "CUDA"))}
    assert len(names) == 24
    lines = ['#include "cublaslt.h"', *(f'static_assert({name} == {value}, "");' for name, value in names.items())]
    compile_cpp("\n".join(lines), "-fsyntax-only")


@with_headers
def test_structures_are_the_headers() -> None:
    theirs = "cublasLtMatmulHeuristicResult_t"
    facts = {f"sizeof({theirs})": ctypes.sizeof(Found), "sizeof(cublasLtMatmulAlgo_t)": 64}
    facts |= {f"offsetof({theirs}, {name})": getattr(Found, name).offset for name, _ in Found._fields_}
    lines = ['#include "cublaslt.h"', *(f'static_assert({what} == {number}, "");' for what, number in facts.items())]
    compile_cpp("\n".join(lines), "-fsyntax-only")


@with_headers
def test_functions_are_the_headers() -> None:
    """How many arguments each takes, and of each its size and whether it is a pointer."""
    lines = [
        '#include "cublaslt.h"',
        "#include <initializer_list>",
        "#include <type_traits>",
        "template <class... As> constexpr bool is(cublasStatus_t (*)(As...), std::initializer_list<int> wanted) {",
        "    const int sizes[] = {(std::is_pointer<As>::value ? 100 : 0) + static_cast<int>(sizeof(As))...};",
        "    if (wanted.size() != sizeof...(As)) return false;",
        "    for (unsigned i = 0; i < sizeof...(As); ++i)",
        "        if (wanted.begin()[i] != sizes[i]) return false;",
        "    return true;",
        "}",
    ]
    for name, arguments in SIGNATURES.items():
        pointers = [each is ctypes.c_void_p or hasattr(each, "contents") for each in arguments]
        sizes = [100 * pointer + ctypes.sizeof(each) for pointer, each in zip(pointers, arguments)]
        lines.append(f'static_assert(is({name}, {{{", ".join(map(str, sizes))}}}), "{name}");')
    compile_cpp("\n".join(lines), "-fsyntax-only")


@functools.lru_cache(maxsize=1)
def built(folder: Path) -> Path:
    path = folder / "libcublasLt.so.13"
    compile_cpp((SHIM / "cublaslt.cpp").read_text(), "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(path))
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cublaslt]:
    """What runs on host memory; all that was made of it is gone in the end."""
    found = Cublaslt(str(built(tmp_path_factory.mktemp("cublaslt"))))
    yield found
    gc.collect()
    assert found.library.shim_alive() == 0


def f32(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def card_with(library: Cublaslt) -> driver.CupyCard:
    """The card's own code, with no card."""
    card = object.__new__(driver.CupyCard)
    card.number, card.stream, card._products = 0, SimpleNamespace(ptr=STREAM), library  # type: ignore[misc]
    return card


def narrow(*shape: int) -> np.ndarray:
    return f32(*shape).astype(ml_dtypes.bfloat16)


CASES = {
    "plain": (MatMul(), f32(5, 7), f32(7, 6)),
    "transposed": (MatMul(True, True), f32(600, 5), f32(6, 600)),
    "one": (MatMul(), f32(1, 1), f32(1, 1)),
    "added to": (MatMul(False, True), f32(5, 600), f32(6, 600), f32(5, 6)),
    "batch": (MatMul(), f32(3, 5, 7), f32(3, 7, 6)),
    "batch added to": (MatMul(), f32(5, 7), f32(4, 7, 6), f32(4, 5, 6)),
    "two batches": (MatMul(), f32(2, 1, 5, 7), f32(3, 7, 6)),
    "bfloat16": (MatMul(), narrow(5, 7), narrow(7, 6)),
    "bias": (MatMulMap(("(a0 + a1)",), False, True), f32(5, 600), f32(6, 600), f32(6)),
    "bias added to": (MatMulMap(("(a2 + (a0 + a1))",)), f32(5, 7), f32(7, 6), f32(6), f32(5, 6)),
    "bias of bfloat16": (MatMulMap(("(a0 + a1)",)), narrow(5, 7), narrow(7, 6), narrow(6)),
    "wide": (MatMul(wide=True), narrow(5, 7), narrow(7, 6), f32(5, 6)),
}


@with_headers
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_products_on_host_memory(case: str, tf32: bool, library: Cublaslt) -> None:
    """Through the card's own code; the workspace is used to the last byte, and nothing around it."""
    op, *arrays = CASES[case]
    card, windows = card_with(library), [Window.dense(type_of(x)) for x in arrays]
    (wanted,), (type,) = expected(op, arrays), op.infer([x.type for x in windows])
    rounding = 2.0**-7 if wanted.dtype != np.float32 else 1e-5
    for kernel in lt_kernels(op, windows, [Window.dense(type)], DEVICE, tf32=tf32).values():
        places, result = [laid_out(w, x) for w, x in zip(windows, arrays)], laid_out(Window.dense(type))
        workspace = Memory(kernel.workspace, 0x7F)
        memories = [x for _, x in places], [result[1]], workspace.bytes
        before = [each for each in kernel.instructions if not isinstance(each, Multiply)]
        Bound(LaunchKernel(tuple(before)), *memories)()
        bound = Bound(LaunchKernel(()), *memories)
        own = [each for each in kernel.instructions if isinstance(each, Multiply)]
        calls = [ready(card, each, bound.address) for each in own]
        gc.collect()
        for _ in range(2):
            for call in calls:
                assert call is not None
                call()
        for memory in (*(memory for memory, _ in places), result[0], workspace):
            memory.check()
        assert (workspace.bytes[own[0].workspace.offset :][: own[0].nbytes] == 0xFF).all()
        atol = 1e-4 if wanted.dtype == np.float32 or len(arrays) == 2 else 2.0**-6  # NumPy's product is rounded before
        np.testing.assert_allclose(result[1].astype(float), wanted.astype(float), rtol=rounding, atol=atol)


def product_of(*shapes: tuple[int, int]) -> Multiply:
    windows = [Window.dense(type_of(f32(*shape))) for shape in shapes]
    (type,) = MatMul().infer([x.type for x in windows])
    (call,) = lt_kernels(MatMul(), windows, [Window.dense(type)], DEVICE)["cublaslt"].instructions
    assert isinstance(call, Multiply)
    return call


def test_a_plan_gives_it_convolutions_of_one_tap() -> None:
    """As products, forward and backward; those of more taps stay."""

    def model(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.conv(x, 64, 3, padding=1, name="nine"))
        x = fp.nn.relu(fp.nn.conv(x, 128, 1, bias=False, name="one"))
        return fp.nn.conv(x, 64, 3, padding=1, name="nine_more")

    step = fp.compile(fp.trace(model, fp.spec((8, 64, 28, 28))), target="cuda:h200", loss="mean")
    calls = [step.program.calls[planned.action] for planned in step.plan.steps]
    by = {call.node: call.kernel for call in calls if isinstance(call.op, ConvOp)}
    assert len(by) >= 4
    for node, kernel in by.items():
        assert kernel.startswith("cublaslt") == node.startswith("one"), (node, kernel)


@with_headers
def test_addresses_between_elements_that_move_together(library: Cublaslt) -> None:
    """Alignment is told as it is, up to 16 bytes: the same for a value that a plan moves by 16."""
    product, memory = product_of((5, 600), (600, 6)), Memory(1 << 20, 0)
    start = memory.bytes.ctypes.data
    places = (start + 4, start + 65536 + 8, start + 131072 + 16, start + 131072 + 16)
    library.multiplying(product, places, start + (1 << 19), STREAM)()
    library.multiplying(product, tuple(place + 16 for place in places), start + (1 << 19), STREAM)()


@with_headers
def test_what_cannot_be_used_is_passed_over(library: Cublaslt) -> None:
    """Algorithms that are refused, need more memory, leave out terms, or do not run here come before one that does."""
    product, places = product_of((5, 601), (601, 6)), Memory(1 << 20, 0)
    start = places.bytes.ctypes.data
    try:
        for count in range(cublaslt.CANDIDATES):
            library.library.shim_offers_first(count)
            library.multiplying(product, (start, start + 65536, *[start + 131072] * 2), start + (1 << 19), STREAM)()
        library.library.shim_offers_first(cublaslt.CANDIDATES)
        with pytest.raises(PlanError) as told:
            library.multiplying(product, (256, 512, 768, 768), 0, STREAM)
        for reason in ("no algorithm", "needs 1025", "leave out terms of sums in 600 parts", "Check .*NOT_SUPPORTED"):
            assert re.search(reason, str(told.value))
    finally:
        library.library.shim_offers_first(0)


@with_headers
def test_sums_are_not_split_where_every_split_leaves_out_terms(library: Cublaslt) -> None:
    """As cuBLASLt 13.1 offers for 1536 x 384 x 12544 in bfloat16 on Hopper: parts of 3 and 5 alone. Of 600 terms, 300
    parts are whole; 601 is prime.
    """
    memory = Memory(1 << 20, 0)
    start = memory.bytes.ctypes.data
    a, b, d = (memory.bytes[at : at + (1 << 16)].view(np.float32) for at in (0, 1 << 16, 1 << 17))
    try:
        library.library.shim_splits(1)
        for terms, parts in ((600, 300), (601, 1)):
            product = product_of((5, terms), (terms, 6))
            a[: 6 * terms], b[: 5 * terms] = RNG.integers(-8, 8, 6 * terms), RNG.integers(-8, 8, 5 * terms)
            call = library.multiplying(
                product, (start, start + 65536, *[start + 131072] * 2), start + (1 << 19), STREAM
            )
            call()
            algorithm = call.kept[2].algo  # type: ignore[attr-defined]
            assert cublaslt._setting(library, algorithm, cublaslt.CUBLASLT_ALGO_CONFIG_SPLITK_NUM) == parts
            left, right = b[: 5 * terms].reshape(5, terms), a[: 6 * terms].reshape(terms, 6)
            np.testing.assert_array_equal(d[:30].reshape(5, 6), left @ right)
    finally:
        library.library.shim_splits(0)


@with_headers
def test_what_it_cannot_do_is_told(library: Cublaslt) -> None:
    product, places = product_of((5, 600), (600, 6)), (256, 512, 768, 768)
    try:
        library.library.shim_needs_more(ctypes.c_uint64(1 << 20))
        with pytest.raises(
            PlanError, match=r"13\.2\.3 cannot multiply 6 x 5 x 600, float32 to float32 within 1024 .* needs 1049600, "
        ):
            library.multiplying(product, places, 0, STREAM)
    finally:
        library.library.shim_needs_more(ctypes.c_uint64(0))
    other = replace(product, b=replace(product.b, leading=1), batch=3)
    with pytest.raises(PlanError, match=r"float32, 3 times within .*NOT_SUPPORTED"):
        library.multiplying(other, places, 0, STREAM)
    with pytest.raises(RuntimeError, match=r"cublasLtMatmul of cuBLASLt 13\.2\.3: CUBLAS_STATUS_INVALID_VALUE"):
        library.multiplying(product, places, 0, STREAM + 1)()


@with_headers
def test_the_library_for_cupys_cuda_is_taken(library: Cublaslt, monkeypatch: pytest.MonkeyPatch) -> None:
    path = library.library._name
    monkeypatch.setattr(cublaslt, "library_files", lambda name: iter(["/no/such/library", path]))
    assert opened(13).version == "13.2.3"
    with pytest.raises(
        TargetError, match=r"not installed for CUDA 12: there is 13\.2\.3, for CUDA 13;.*foreplan\[cuda12"
    ):
        opened(12)
    monkeypatch.setattr(cublaslt, "library_files", lambda name: iter(()))
    with pytest.raises(TargetError, match=r"multiplies by cuBLASLt, which is not installed for CUDA 13: `pip install"):
        opened(13)


def test_files_of_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wheels first, the newest of a folder before others, whatever their folders are called; then a toolkit's."""
    wheels, toolkit = tmp_path / "wheels", tmp_path / "toolkit"
    files = [
        wheels / "nvidia" / "cu13" / "lib" / "libcublasLt.so.13",
        wheels / "nvidia" / "cublas" / "lib" / "libcublasLt.so.12",
        wheels / "nvidia" / "cublas" / "lib" / "libcublasLt.so.9",
        toolkit / "lib64" / "libcublasLt.so.13.1.2",
        toolkit / "lib64" / "libcublasLt.so.13",
    ]
    for file in (*files, wheels / "nvidia" / "cu13" / "lib" / "libcublas.so.13", toolkit / "lib64" / "libcublasLt.so"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(sys, "path", [str(wheels)])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(libraries.ctypes.util, "find_library", lambda name: f"lib{name}.so.11")
    found = list(libraries.library_files("cublasLt"))
    assert found[:5] == [str(file) for file in files] and found[-1] == "libcublasLt.so.11"


def installed() -> Cublaslt:
    for path in libraries.library_files("cublasLt"):
        return Cublaslt(path)
    return pytest.skip("cuBLASLt is not installed: make setup-cuda")


@pytest.mark.cuda_wheels
def test_cublaslt_takes_our_descriptions() -> None:
    """It checks the size of every attribute, and tells each back, without a card."""
    found = installed()
    assert found.cuda >= 12000 and found.version.split(".")[0] == str(found.cuda // 1000)
    product = product_of((5, 600), (600, 6))
    layout = cublaslt._layout(found, replace(product.a, stride=1 << 40), 3)
    kinds: tuple[tuple[int, type[Any], int], ...] = (
        (cublaslt.CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, ctypes.c_int32, 3),
        (cublaslt.CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, ctypes.c_int64, 1 << 40),
    )
    for attribute, kind, value in kinds:
        back, size = kind(), ctypes.c_size_t()
        get = found.library.cublasLtMatrixLayoutGetAttribute
        get.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        assert get(layout.pointer, attribute, ctypes.byref(back), ctypes.sizeof(back), ctypes.byref(size)) == 0
        assert back.value == value
    operation = Descriptor(found, "MatmulDesc", cublaslt.CUBLAS_COMPUTE_32F, cublaslt.CUDA_R_32F)
    operation.set(cublaslt.CUBLASLT_MATMUL_DESC_TRANSA, ctypes.c_int32(1))
    with pytest.raises(RuntimeError, match=r"SetAttribute of cuBLASLt .*: CUBLAS_STATUS_INVALID_VALUE"):
        operation.set(cublaslt.CUBLASLT_MATMUL_DESC_TRANSA, ctypes.c_int64(1))
    wanted = Descriptor(found, "MatmulPreference")
    wanted.set(cublaslt.CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64(1 << 25))
    wanted.set(cublaslt.CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32(2))
    for which in "ABCD":
        wanted.set(getattr(cublaslt, f"CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_{which}_BYTES"), ctypes.c_uint32(16))
