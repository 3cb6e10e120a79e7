"""Machine code by NVRTC: figures, errors, and that nothing is compiled twice."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreplan import kept
from foreplan.errors import TargetError
from foreplan.gpu import nvrtc
from foreplan.gpu.launch import Source
from foreplan.gpu.nvrtc import compiled, missing

# A thread's array that is written and read at places known at run time lies in memory; 256 floats are 1,024 bytes.
KERNEL = """
extern "C" __global__ void probe(float* x) {
    float row[256];
    for (int i = 0; i < 256; ++i) row[i] = x[i * threadIdx.x];
    row[static_cast<int>(x[1]) BEHIND] = x[2];
    x[0] = row[static_cast<int>(x[3]) BEHIND];
}
"""
needs_nvrtc = pytest.mark.skipif(bool(missing()), reason=missing())


def probe(behind: str) -> Source:
    return Source("types.cuh", (("BEHIND", behind),), KERNEL)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "_folder", lambda: tmp_path / "kept")
    compiled.cache_clear()
    yield tmp_path / "kept"
    compiled.cache_clear()


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    nvrtc._library.cache_clear()
    try:
        assert "foreplan[cuda13]" in missing() and "make setup-cuda" in missing()
        with pytest.raises(TargetError, match="cannot be loaded"):
            compiled(probe(""), "sm_90")
    finally:
        nvrtc._library.cache_clear()


@pytest.mark.cuda_wheels
@needs_nvrtc
def test_machine_code_and_its_figures() -> None:
    found = compiled(probe("& 255"), "sm_90")
    assert found.cubin.startswith(b"\x7fELF") and b"probe" in found.cubin
    assert found.stack_bytes == 1024
    assert 8 <= found.registers <= 255
    plain = compiled(probe("* 0"), "sm_90")
    assert plain.stack_bytes == plain.spill_bytes == 0
    assert plain.cubin != compiled(probe("* 0"), "sm_80").cubin


@pytest.mark.cuda_wheels
@needs_nvrtc
def test_registers_that_do_not_suffice_are_spilled() -> None:
    # 128 values that live at once, in threads that may have 64 registers each.
    text = """
    extern "C" __global__ void __launch_bounds__(1024) crowded(float* x) {
        float all[128];
    #pragma unroll
        for (int i = 0; i < 128; ++i) all[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
    #pragma unroll
        for (int i = 0; i < 128; ++i) x[i * 1024 + threadIdx.x] = all[i] * all[127 - i];
    }
    """
    found = compiled(Source("types.cuh", (), text), "sm_90")
    assert found.registers <= 64 and found.spill_bytes > 0 and found.stack_bytes > 0


@pytest.mark.cuda_wheels
@needs_nvrtc
def test_nothing_is_compiled_twice(nothing_kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled(probe("& 255"), "sm_90")
    compiled.cache_clear()
    (file,) = nothing_kept.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
        assert compiled(probe("& 255"), "sm_90") == first
    file.write_bytes(file.read_bytes()[:-1])
    compiled.cache_clear()
    assert compiled(probe("& 255"), "sm_90") == first
    compiled(probe("& 255"), "sm_80")
    monkeypatch.setattr(nvrtc, "sources_digest", lambda: "another file")
    compiled.cache_clear()
    compiled(probe("& 255"), "sm_90")
    assert len(list(nothing_kept.iterdir())) == 3


@pytest.mark.cuda_wheels
@needs_nvrtc
def test_errors_say_where() -> None:
    with pytest.raises(TargetError, match=r"does not compile types\.cuh(.|\n)*for types\.cuh\(\d+\).*undefined_name"):
        compiled(probe("+ undefined_name"), "sm_90")
    with pytest.raises(TargetError, match="does not compile"):
        compiled(probe(""), "sm_17")
