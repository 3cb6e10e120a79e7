"""cuDNN's plans of attention for cards that are not there."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreplan.base import disk_cache
from foreplan.graph import Op, Window
from foreplan.graph.types import DTYPES, tensor_type
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.libraries import cudnn_sdpa, stand_in
from foreplan.runtime.cuda.libraries.cudnn import CudnnPlan
from foreplan.runtime.cuda.libraries.cudnn_sdpa import attention_plans
from tests.gpu.check import expected, type_of, with_cudnn
from tests.gpu.cudnn_graph import execute, written_by_cudnn
from tests.kernels import attention_operands

RNG = np.random.default_rng(0)
operands = partial(attention_operands, RNG)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def kept_by_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What cuDNN answers is kept for these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("kept")
        patch.setattr(disk_cache, "_folder", lambda: folder)
        cudnn_sdpa._answers.cache_clear()
        yield
        cudnn_sdpa._answers.cache_clear()


def windows_of(op: Op, inputs: Sequence[Window]) -> tuple[list[Window], list[Window]]:
    """Of an attention on such queries, keys and values, or of its gradient: all inputs and outputs."""
    types = [window.type for window in inputs]
    if isinstance(op, Attention):
        return list(inputs), [Window.dense(type) for type in op.infer(types)]
    assert isinstance(op, AttentionGrad)
    o, log_sums = Attention(op.scale, op.causal, op.heads_last).infer(types)
    return [*inputs, *map(Window.dense, (o, log_sums, o))], [Window.dense(type) for type in types]


def packed(batch: int, heads: int, kv_heads: int, positions: int, depth: int, dtype: str = "bfloat16") -> list[Window]:
    """Queries, keys and values side by side, as a product makes them."""
    row = (heads + 2 * kv_heads) * depth * 2
    return [
        Window(tensor_type(f"{dtype}[{batch},{positions},{count},{depth}]"), (positions * row, row, depth * 2, 2))
        for count in (heads, kv_heads, kv_heads)
    ]


def plans(op: Op, inputs: Sequence[Window], device: str = "h100", **options: Any) -> tuple[CudnnPlan, ...]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return attention_plans(op, *windows_of(op, inputs), device_named(device), **options)


@with_cudnn
@pytest.mark.parametrize("batch", [4, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (1, 16))])
def test_attention_of_gpt2_small(batch: int) -> None:
    inputs = packed(batch, 12, 12, 1024, 64)
    forward, backward = (plans(op(0.125, True, True), inputs) for op in (Attention, AttentionGrad))
    assert forward and backward
    assert forward[-1].workspace == 0 and forward[0].workspace <= 1024
    # What a deterministic gradient keeps of all scores, two bytes each, is the most of it.
    scores = batch * 12 * 1024 * 1024 * 2
    assert scores <= backward[0].workspace <= 1.01 * scores
    free = plans(AttentionGrad(0.125, True, True), inputs, deterministic=False)
    sums = batch * 12 * 1024 * 64 * 4  # of the gradients of queries, added to by everyone
    assert sums <= free[0].workspace <= 1.03 * sums


@with_cudnn
@pytest.mark.parametrize("device", ["a100", *(pytest.param(name, marks=pytest.mark.slow) for name in ("b200", "l4"))])
def test_other_cards(device: str) -> None:
    inputs = packed(2, 8, 2, 256, 64, "float16")
    for op in (Attention(0.125, True, True), AttentionGrad(0.125, True, True)):
        found = plans(op, inputs, device)
        assert found and all(plan.workspace % 256 == 0 and plan.blob for plan in found)


CASES: dict[str, tuple[tuple[int, ...], bool, bool, str]] = {
    "causal": ((2, 2, 2, 24, 24, 16, 16), True, True, "bfloat16"),
    "grouped, heads first": ((1, 6, 2, 20, 33, 8, 24), False, False, "float16"),
    "more queries than keys": ((1, 2, 1, 40, 9, 16, 16), True, True, "bfloat16"),
}


@with_cudnn
@pytest.mark.parametrize(
    "case", [name if name == "causal" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_plan_says_that_it_computes_what_the_op_does(case: str) -> None:
    """The operations and the layouts in it, run by NumPy: the log-sum-exp among the results."""
    sizes, causal, heads_last, dtype = CASES[case]
    forward = Attention(0.3, causal, heads_last)
    inputs = [x.astype(DTYPES[dtype].numpy) for x in operands(sizes, heads_last)]
    results = expected(forward, inputs)
    g = RNG.standard_normal(results[0].shape).astype(results[0].dtype)
    for op, given, wanted in (
        (forward, inputs, results),
        (
            AttentionGrad(0.3, causal, heads_last),
            [*inputs, *results, g],
            expected(AttentionGrad(0.3, causal, heads_last), [*inputs, *results, g]),
        ),
    ):
        found = plans(op, [Window.dense(type_of(x)) for x in inputs], deterministic="grouped" not in case)
        assert found
        arrays = [*(np.ascontiguousarray(x) for x in given), *(np.zeros(y.shape, y.dtype) for y in wanted)]
        for plan in found:
            execute(plan.blob, {i: x.reshape(-1) for i, x in enumerate(arrays, 1)})
            for ours, theirs in zip(arrays[len(given) :], wanted, strict=True):
                error = np.linalg.norm(ours.astype(np.float64) - theirs)
                assert error <= (1e-5 if theirs.dtype == np.float32 else 1e-2) * np.linalg.norm(theirs)


@with_cudnn
def test_views_are_read_where_they_lie() -> None:
    q, k, v = (x.astype(DTYPES["bfloat16"].numpy) for x in operands((2, 3, 3, 10, 10, 16, 16), True))
    whole = np.concatenate([q, k, v], axis=2)
    op, (found, *_) = Attention(0.3, True, True), plans(Attention(0.3, True, True), packed(2, 3, 3, 10, 16))
    o, log_sums = (np.zeros(y.shape, y.dtype) for y in expected(op, [q, k, v]))
    parts = [whole.reshape(-1)[start * 48 :] for start in range(3)]
    execute(found.blob, {i: x.reshape(-1) for i, x in enumerate([*parts, o, log_sums], 1)})
    np.testing.assert_allclose(log_sums, expected(op, [q, k, v])[1], rtol=1e-5)


@with_cudnn
def test_plans_are_kept_and_alike_from_run_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another process writes the same, but for bytes of kernels' arguments that cuDNN leaves as it finds them."""

    def but_for_arguments(plan: CudnnPlan) -> list[Any]:
        found = written_by_cudnn(plan.blob)
        for kernel in found["engine"]["payload"]["kernels"]:
            kernel["kernelParams"]["rawData"] = len(kernel["kernelParams"]["rawData"])
        return [plan.name, plan.workspace, len(plan.blob), found]

    op, inputs = AttentionGrad(0.125, True, True), packed(1, 2, 2, 128, 64)
    first = plans(op, inputs)
    assert first
    cudnn_sdpa._answers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(cudnn_sdpa, "_asked_elsewhere", lambda *_: pytest.fail("asked again"))
        assert plans(op, inputs) == first
    cudnn_sdpa._answers.cache_clear()
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path)
    assert [*map(but_for_arguments, plans(op, inputs))] == [*map(but_for_arguments, first)]
    cudnn_sdpa._answers.cache_clear()
    assert "memfd:libcuda" not in Path("/proc/self/maps").read_text(), "the stand-in is for another process"


@with_cudnn
def test_what_a_plan_needs_is_asked_of_it_anew() -> None:
    """Read back in a process of its own: as much workspace, on a smaller H100, too; and just the op's tensors."""
    for op, count in ((Attention(0.125, True, True), 5), (AttentionGrad(0.125, True, True), 9)):
        plan = plans(op, packed(1, 2, 2, 128, 64))[0]
        code = (
            "import base64, dataclasses, json, sys\n"
            "from foreplan.runtime.cuda.libraries import stand_in\n"
            "from foreplan.runtime.cuda.libraries.cudnn import description, library, workspace_of\n"
            "from foreplan.runtime.cuda.device import device_named\n"
            "stand_in.load()\n"
            "blob, device = base64.b64decode(sys.stdin.read()), device_named('h100')\n"
            "properties = library().module.create_device_properties(description(device))\n"
            "graph = library().module.pygraph(device_property=properties, sm_version=90)\n"
            "graph.deserialize(bytearray(blob))\n"
            "smaller = dataclasses.replace(device, multiprocessors=114)\n"
            "needed = [workspace_of(blob, each) for each in (device, smaller)]\n"
            "print(json.dumps([*needed, graph._variant_pack_uids()]))\n"
        )
        record = plan.as_json()
        done = subprocess.run(
            [sys.executable, "-c", code], input=record[2], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert json.loads(done.stdout.splitlines()[-1]) == [plan.workspace, plan.workspace, list(range(1, count + 1))]


def refused(op: Op, inputs: Sequence[Window], device: str = "h100") -> bool:
    """Whether cuDNN is not even asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_sdpa, "missing", lambda: "")
        patch.setattr(cudnn_sdpa, "_answers", lambda *_: ("asked",))
        return not attention_plans(op, *windows_of(op, inputs), device_named(device))


def dense(*texts: str) -> list[Window]:
    return [Window.dense(tensor_type(text)) for text in texts]


def test_what_is_not_asked() -> None:
    narrow = dense(*["bfloat16[1,2,32,16]"] * 3)
    for op in (Attention(0.25), AttentionGrad(0.25)):
        assert not refused(op, narrow)
        assert refused(op, narrow, "t4")
        for dtype in ("float32", "float64"):
            assert refused(op, dense(*[f"{dtype}[1,2,32,16]"] * 3))
        assert refused(op, dense(*["bfloat16[1,2,32,12]"] * 3))  # rows of 24 bytes, no multiple of 16
        turned = Window(narrow[0].type, (2048, 1024, 2, 64))  # a row's elements are not side by side
        repeated = Window(narrow[0].type, (1024, 0, 32, 2))
        for odd in (turned, repeated):
            assert refused(op, [odd, *narrow[1:]])


def test_a_mask_is_asked_about_as_it_is_expanded() -> None:
    """To each query and key; not where rows of it do not begin at multiples of 16 bytes."""
    for keys, shape in ((32, "[1,1,1,32]"), (32, "[1,2,32,1]"), (30, "[1,1,1,30]")):
        q, k = tensor_type("bfloat16[1,2,32,16]"), tensor_type(f"bfloat16[1,2,{keys},16]")
        given = [Window.dense(type) for type in (q, k, k, tensor_type(f"float32{shape}"))]
        outputs = [Window.dense(type) for type in Attention(0.25).infer([x.type for x in given])]
        asked = cudnn_sdpa._question(Attention(0.25), given, outputs, True)
        assert (asked is None) == (keys == 30)
        if asked is not None:
            assert asked.mask is not None and len(asked.tensors) == 5
            assert asked.mask.shape == (1, given[3].shape[1], 32, 32) and asked.mask.dtype == "float32"


@with_cudnn
def test_what_cudnn_has_no_plan_for() -> None:
    for depth in (512, 24):
        found = plans(AttentionGrad(0.125, True), dense(*[f"bfloat16[1,2,64,{depth}]"] * 3))
        assert bool(found) == (depth == 24)


@with_cudnn
def test_where_cudnn_cannot_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attention is left to kernels of ours, which is said, and nothing of it is kept."""
    inputs = dense(*["bfloat16[1,3,48,16]"] * 3)
    windows = windows_of(Attention(0.25), inputs)
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.warns(UserWarning, match="run instead"):
        assert not attention_plans(Attention(0.25), *windows, device_named("h100"))
    assert not list(tmp_path.iterdir())
    cudnn_sdpa._answers.cache_clear()
    monkeypatch.setattr(cudnn_sdpa, "library_files", lambda name: [])
    cudnn_sdpa._nvrtc.cache_clear()
    with pytest.warns(UserWarning, match="no NVRTC of CUDA"):
        assert not attention_plans(Attention(0.25), *windows, device_named("h100"))
    cudnn_sdpa._answers.cache_clear()


@with_cudnn
def test_a_compiler_that_fails_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """cuDNN's engines for attention are compiled; that they could not be is told, and asked anew the next time."""
    inputs = dense(*["bfloat16[1,3,48,16]"] * 3)
    windows = windows_of(Attention(0.25), inputs)
    monkeypatch.setattr(disk_cache, "_folder", lambda: tmp_path)
    real = cudnn_sdpa.subprocess.run

    def without_nvrtc(command: list[str], **options: Any) -> Any:
        """NVRTC does not find what it compiles by, in the process that asks."""
        broken = (
            "from foreplan.runtime.cuda.libraries import cudnn_sdpa\nimport ctypes\ncudnn_sdpa.Nvrtc = ctypes.CDLL\n"
        )
        return real([*command[:-1], broken + command[-1]], **options)

    (tmp_path / "lib").mkdir()
    whole = Path(cudnn_sdpa._nvrtc().path)
    alone = tmp_path / "lib" / whole.name
    alone.write_bytes(whole.read_bytes().replace(b"$ORIGIN", b"/no/one"))
    nvrtc = type("Alone", (), {"path": str(alone), "version": "NVRTC"})
    with monkeypatch.context() as patch:
        patch.setattr(cudnn_sdpa.subprocess, "run", without_nvrtc)
        patch.setattr(cudnn_sdpa, "_nvrtc", lambda: nvrtc)
        cudnn_sdpa._answers.cache_clear()
        with pytest.warns(UserWarning, match="COMPILATION_FAILED"):
            assert not attention_plans(Attention(0.25), *windows, device_named("h100"))
    assert [file.name for file in tmp_path.iterdir()] == ["lib"]
    cudnn_sdpa._answers.cache_clear()
    assert attention_plans(Attention(0.25), *windows, device_named("h100"))


@pytest.mark.skipif(
    not stand_in.can_stand_in(),
    reason="needs Linux on x86-64, for which the stand-in for the driver's library is written",
)
def test_the_stand_in_is_found_by_the_name_of_the_drivers_library() -> None:
    """Whatever the process does with it, in one of its own: handles where they are asked for, else an error."""
    code = (
        "import ctypes\n"
        "from foreplan.runtime.cuda.libraries import stand_in\n"
        "stand_in.load()\n"
        "found = ctypes.CDLL('libcuda.so.1')\n"
        "made, text = ctypes.c_void_p(), ctypes.c_char_p()\n"
        "print(found.cuLibraryLoadData(ctypes.byref(made), b'', None, None, 0, None, None, 0), bool(made.value))\n"
        "made = ctypes.c_void_p()\n"
        "print(found.cuLibraryGetKernel(ctypes.byref(made), None, b'name'), bool(made.value))\n"
        "print(found.cuGetErrorString(1, ctypes.byref(text)), text.value)\n"
        "print(found.cuInit(0), found.cuDeviceGetCount(ctypes.byref(ctypes.c_int())), found.cuLibraryUnload(None))\n"
        "print(all(hasattr(found, name) for name in stand_in._FUNCTIONS), hasattr(found, 'cuMemAlloc_v2'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 True", "0 True", "0 b'?'", "100 100 0", "True False"]
