"""The header that stands in for CUDA: what it lets pass, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from foreplan.ops.map import Map
from foreplan.runtime.cuda.launch import Clear, Copy, Launch, LaunchKernel, Source, input_at, output_at, workspace_at
from tests.gpu import check, compiled
from tests.gpu.binder import Bound
from tests.gpu.compiled import needs_gcc

pytestmark = needs_gcc
KERNELS = """
struct Arguments { const float* x; float* y; long long count; double factor; };

extern "C" __global__ void reversed_blocks(const Arguments a) {
    __shared__ float tile[64];
    const long long first = blockIdx.x * 64LL;
    tile[threadIdx.x] = first + threadIdx.x < a.count ? a.x[first + threadIdx.x] : 0;
    __syncthreads();
    if (first + threadIdx.x < a.count) a.y[first + threadIdx.x] = tile[63 - threadIdx.x] * static_cast<float>(a.factor);
}

extern "C" __global__ void sums_of_warps(const Arguments a) {
    float x = a.x[threadIdx.x];
    for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    const float next = __shfl_down_sync(~0u, a.x[threadIdx.x], 1), third = __shfl_sync(~0u, a.x[threadIdx.x], 3);
    const unsigned positive = __ballot_sync(~0u, a.x[threadIdx.x] > 0);
    float* y = a.y + 4 * threadIdx.x;
    y[0] = x, y[1] = next, y[2] = third, y[3] = static_cast<float>(__ffs(positive));
}

extern "C" __global__ void all_write_at_once(const Arguments a) {
    __shared__ float last;
    last = static_cast<float>(threadIdx.x);
    __syncthreads();
    a.y[threadIdx.x] = last;
}

extern "C" __global__ void reads_the_neighbour(const Arguments a) {
    __shared__ float tile[64];
    tile[threadIdx.x] = a.x[threadIdx.x];
    a.y[threadIdx.x] = tile[(threadIdx.x + 1) % 64];
}

extern "C" __global__ void some_wait(const Arguments a) {
    if (threadIdx.x < 32) __syncthreads();
    a.y[threadIdx.x] = 1;
}

extern "C" __global__ void wait_at_two_places(const Arguments a) {
    if (threadIdx.x % 2) {
        __syncthreads();
    } else {
        a.y[threadIdx.x] = 1;
        __syncthreads();
    }
}

extern "C" __global__ void part_of_a_warp_shuffles(const Arguments a) {
    if (threadIdx.x % 32 < 7) a.y[threadIdx.x] = __shfl_xor_sync(~0u, a.x[threadIdx.x], 1);
}
"""


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "kernels.cu").write_text(KERNELS)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    monkeypatch.setattr(compiled, "_cache", lambda: tmp_path)
    compiled.function.cache_clear()
    yield
    compiled.function.cache_clear()


def run(entry: str, x: np.ndarray, size: int, reverse: bool = False, blocks: int = 1, threads: int = 64) -> np.ndarray:
    arguments = (input_at(0), output_at(0), x.size, 2.0)
    launch = Launch(Source("kernels.cu"), entry, (blocks, 1, 1), (threads, 1, 1), arguments)
    y = np.full(size, np.nan, np.float32)
    Bound(LaunchKernel((launch,)), [x], [y], np.zeros(0, np.uint8), reverse)()
    return y


X = np.random.default_rng(0).standard_normal(200).astype(np.float32)


@pytest.mark.parametrize("reverse", [False, True])
def test_blocks_threads_shared_memory_and_barriers(reverse: bool) -> None:
    wanted = np.zeros(256, np.float32)
    wanted[:200] = X
    wanted = 2 * wanted.reshape(4, 64)[:, ::-1].reshape(-1)[:200]
    np.testing.assert_array_equal(run("reversed_blocks", X, 200, reverse, blocks=4), wanted)


@pytest.mark.parametrize("reverse", [False, True])
def test_warps_exchange_what_they_have(reverse: bool) -> None:
    found = run("sums_of_warps", X, 4 * 64, reverse).reshape(64, 4)
    for warp in (0, 32):
        own = X[warp : warp + 32]
        np.testing.assert_allclose(found[warp : warp + 32, 0], own.sum(dtype=np.float64), rtol=1e-5)
        assert len(set(found[warp : warp + 32, 0])) == 1
        np.testing.assert_array_equal(found[warp : warp + 31, 1], own[1:])
        np.testing.assert_array_equal(found[warp : warp + 32, 2], own[3])
        assert (found[warp : warp + 32, 3] == 1 + np.argmax(own > 0)).all()


@pytest.mark.parametrize("entry", ["all_write_at_once", "reads_the_neighbour"])
def test_what_depends_on_the_order_of_threads_shows(entry: str) -> None:
    forward, reverse = (run(entry, X, 64, order) for order in (False, True))
    assert forward.tobytes() != reverse.tobytes()


def test_shared_memory_is_poison_at_first() -> None:
    assert np.isnan(run("reads_the_neighbour", X, 64)[0])


@pytest.mark.parametrize("entry", ["some_wait", "wait_at_two_places", "part_of_a_warp_shuffles"])
@pytest.mark.parametrize("reverse", [False, True])
def test_threads_that_part_ways_are_an_error(entry: str, reverse: bool) -> None:
    with pytest.raises(AssertionError, match=rf"{entry}: block \(0, 0, 0\): thread \d+ waits at line \d+"):
        run(entry, X, 64, reverse)
    assert np.isfinite(run("reversed_blocks", X, 64, reverse)).all()  # and nothing is left of it


def test_wrong_arguments_are_found() -> None:
    launch = Launch(Source("kernels.cu"), "some_wait", (1, 1, 1), (1, 1, 1), (input_at(0), output_at(0)))
    with pytest.raises(AssertionError, match="takes 32 bytes of arguments, and gets 16"):
        Bound(LaunchKernel((launch,)), [X], [X.copy()], np.zeros(0, np.uint8))()


def test_kernels_are_gathered_where_none_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    op = Map(("(a0 + a0)",))
    with check.gathering() as instructions:
        np.testing.assert_array_equal(check.run(op, [X])[0], X + X)
        assert list(check.results(op, [X])) == []
    assert len(instructions) == 2 and all(isinstance(each, Launch) for each in instructions)
    monkeypatch.setattr(check, "run_kernel", lambda *given: ["ran"])
    assert check.run(op, [X]) == ["ran"] and len(instructions) == 2


def test_copies_and_clears() -> None:
    y, workspace = np.ones(10, np.float32), np.full(64, 0xFF, np.uint8)
    instructions = (
        Copy(workspace_at(8), input_at(0, 4), 16),
        Copy(output_at(0), workspace_at(8), 16),
        Clear(output_at(0, 16), 8),
    )
    Bound(LaunchKernel(instructions, 64), [X], [y], workspace)()
    np.testing.assert_array_equal(y, [*X[1:5], 0, 0, 1, 1, 1, 1])
