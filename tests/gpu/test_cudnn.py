"""cuDNN's plans for cards that are not there. Without cuDNN, only how its absence is told is tested."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import foreplan as fp
from foreplan.base.errors import TargetError
from foreplan.graph import Op, TensorType, Window
from foreplan.graph.layouts import channels_last
from foreplan.graph.types import tensor_type
from foreplan.ops.conv.ops import Conv, ConvDataGrad, ConvOp, ConvWeightGrad
from foreplan.runtime.cuda.device import device_named, devices
from foreplan.runtime.cuda.launch import Arithmetic
from foreplan.runtime.cuda.libraries import cudnn, cudnn_conv_plans
from foreplan.runtime.cuda.libraries.cudnn import CudnnPlan, library, missing, workspace_of
from foreplan.runtime.cuda.libraries.cudnn_conv_plans import convolution_plans
from tests.cache import kept_files
from tests.gpu.check import asking_anew, with_cudnn

MIB = 1 << 20
CAPS = (None, 64 * MIB, 0)
H100 = device_named("h100")
SAME = ((1, 1), ((1, 1), (1, 1)), (1, 1))  # strides, pads and dilations of 3 x 3 taps that keep the extent


nothing_kept = asking_anew(cudnn_conv_plans._answers)


def plans(op: Op, *types: str, lie: Any = channels_last, device: Any = H100, **options: Any) -> tuple[CudnnPlan, ...]:
    inputs = [tensor_type(text) for text in types]
    outputs = [lie(type) for type in op.infer(inputs)]
    return convolution_plans(op, [lie(type) for type in inputs], outputs, device, **options)


def triple(x: str, w: str, y: str, taps: int, extent: int) -> list[tuple[Op, str, str]]:
    """A convolution and its two gradients."""
    pad = ((taps // 2, taps // 2),) * 2
    how = ((1, 1), pad, (1, 1))
    return [
        (Conv(*how), x, w),
        (ConvDataGrad(*how, spatial=(extent, extent)), y, w),
        (ConvWeightGrad(*how, kernel=(taps, taps)), x, y),
    ]


@lru_cache(maxsize=1)
def convolutions_of_resnet50() -> list[tuple[ConvOp, tuple[TensorType, ...], tuple[TensorType, ...]]]:
    """Each kind once, of a whole training step."""
    model = fp.models.resnet50(batch=32)
    graph = fp.differentiate(model, loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.1))
    found = {
        (node.op, tuple(x.type for x in node.inputs[:2]), tuple(y.type for y in node.outputs))
        for node in graph.nodes
        if isinstance(node.op, ConvOp)
    }
    return sorted(found, key=repr)  # type: ignore[arg-type]


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    library.cache_clear()
    try:
        assert "foreplan[cuda13]" in missing() and "make setup-cuda" in missing()
        with pytest.raises(TargetError, match="not installed"):
            plans(Conv(*SAME), "float32[1,4,8,8]", "float32[4,4,3,3]")
    finally:
        library.cache_clear()


def test_a_card_is_described_to_cudnn() -> None:
    # The properties that cuDNN reads from a card itself, with an H100's values from deviceQuery.
    said = json.loads(cudnn.description(H100))
    expected = {
        "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
        "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536,
        "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0,
        "supportCoopLaunch": 1, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000, "l2CacheSize": 52428800,
        "cudaDeviceId": 0, "deviceVer": 900, "driverVer": 13000, "deviceName": "NVIDIA H100 80GB HBM3",
    }  # fmt: skip
    assert said == expected | {"totalGlobalMem": H100.memory_bytes}


@with_cudnn
@pytest.mark.parametrize(("dtype", "tf32"), [("float32", False), ("float32", True), ("bfloat16", False)])
def test_every_convolution_of_resnet50_has_a_plan_under_any_cap(dtype: str, tf32: bool) -> None:
    found = convolutions_of_resnet50()
    assert len(found) > 60
    for op, inputs, outputs in found:
        windows = [[channels_last(type.with_dtype(dtype)) for type in types] for types in (inputs, outputs)]
        offered = {cap: convolution_plans(op, *windows, H100, how=Arithmetic(tf32), cap=cap) for cap in CAPS}
        for cap, some in offered.items():
            assert some, (op, cap)
            sizes = [plan.workspace for plan in some]
            assert sizes == sorted(set(sizes), reverse=True) and all(size % 256 == 0 for size in sizes)
            assert cap is None or sizes[0] <= cap
        assert offered[0][0].workspace == 0
        first = offered[None][0]
        assert workspace_of(first.blob, H100) == first.workspace


@pytest.mark.parametrize(
    ("tile", "told", "needed"),
    [
        (0, 4718592, 11010511),
        (0, 294912, 8815327),
        (1, 294912, 4555487),
        (3, 4718592, 21496239),
        (3, 0, 17039839),
        (4, 294912, 8553127),
        (5, 294912, 2359975),
        (6, 0, 16777823),
        (7, 294912, 4555487),
        (7, 0, 4194463),
        (9, 1474560, 7963303),
    ],
)
def test_what_an_h100_was_seen_to_need_is_planned(tile: int, told: int, needed: int) -> None:
    """Of engines that split sums among multiprocessors: what cuDNN 9.19 told without the card, and with it."""
    knobs = '{"engine":{"engineId":65,"knobChoices":{"CUDNN_KNOB_TYPE_TILE_SIZE":%d,"CUDNN_KNOB_TYPE_WORKSPACE":%d}}}'
    most = cudnn.bounded(told, (knobs % (tile, 0)).encode(), H100)
    assert needed <= most <= told + 132 * (1 << 17) + 1280 and most % 256 == 0
    assert cudnn.bounded(told, (knobs % (tile, 1)).encode(), H100) == -(-told // 256) * 256
    assert cudnn.bounded(told, b'{"engine":{"engineId":0}}', H100) == -(-told // 256) * 256


@with_cudnn
def test_the_first_plan_under_a_cap_is_the_one_that_cudnn_would_choose() -> None:
    x, w, y = "float32[32,256,14,14]", "float32[256,256,3,3]", "float32[32,256,14,14]"
    module = library().module
    for op, a, b in triple(x, w, y, 3, 14):
        for cap in (1 << 40, 16 * MIB, MIB, 0):
            types = [tensor_type(a), tensor_type(b)]
            windows = [channels_last(type) for type in (*types, *op.infer(types))]
            question = cudnn_conv_plans._question(op, windows[:2], windows[2:], False, ())
            assert question is not None
            graph = cudnn_conv_plans._graph(question, H100)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([module.heur_mode.A, module.heur_mode.FALLBACK])
            notes = module.numerical_note
            graph.deselect_numeric_notes([notes.NONDETERMINISTIC, notes.REDUCED_PRECISION_REDUCTION])
            graph.deselect_behavior_notes([module.behavior_note.RUNTIME_COMPILATION])
            graph.deselect_workspace_greater_than(cap)
            graph.check_support()
            graph.build_plans(module.build_plan_policy.HEURISTICS_CHOICE)
            ours = convolution_plans(op, windows[:2], windows[2:], H100, how=Arithmetic(tf32=True), cap=cap)[0]
            blob = cudnn.uncounted(bytes(graph.serialize()))
            most = cudnn.bounded(int(graph.get_workspace_size()), blob, H100)
            assert ours.workspace <= cap
            if most <= cap:  # else cuDNN's own takes more on a card than it tells
                assert (ours.blob, ours.workspace) == (blob, most)


@with_cudnn
def test_the_widest_convolutions_of_the_chain() -> None:
    # 256 → 128 channels, and the others, on 1024 x 1024. Where tensors do not lie as an engine wants them, it copies
    # both images: 1,024 MiB and 512 MiB, and a little for the weights.
    channels = (1, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    for lie in (channels_last, Window.dense):
        for c, k in itertools.pairwise(channels):
            x, w, y = f"float32[1,{c},1024,1024]", f"float32[{k},{c},3,3]", f"float32[1,{k},1024,1024]"
            for op, a, b in triple(x, w, y, 3, 1024):
                sizes = {cap: plans(op, a, b, lie=lie, cap=cap)[0].workspace for cap in CAPS}
                assert sizes[0] == 0 and sizes[64 * MIB] <= 64 * MIB
                if (c, k) == (256, 128) and lie is Window.dense:
                    free = plans(op, a, b, lie=lie, how=Arithmetic(tf32=True))[0].workspace
                    assert 1536 * MIB < free < 1540 * MIB
                if (c, k) == (256, 128) and lie is channels_last and op.name != "conv_weight_grad":
                    assert 1536 * MIB < sizes[None] < 1540 * MIB


@with_cudnn
@pytest.mark.parametrize("name", list(devices()))
def test_every_card_has_plans(name: str) -> None:
    device = device_named(name)
    for op, a, b in triple("float32[8,32,16,16]", "float32[64,32,3,3]", "float32[8,64,16,16]", 3, 16):
        for dtype in ("float32", "float16", "bfloat16"):
            texts = [text.replace("float32", dtype) for text in (a, b)]
            some = plans(op, *texts, device=device, cap=0)
            assert bool(some) == (dtype == "float32" or dtype in dict(device.peaks))
            assert all(workspace_of(plan.blob, device) == 0 for plan in some)


@with_cudnn
def test_strict_float32_and_tensor_cores_are_different_choices() -> None:
    op, a, b = triple("float32[32,64,56,56]", "float32[64,64,3,3]", "float32[32,64,56,56]", 3, 56)[0]
    strict, fast = plans(op, a, b), plans(op, a, b, how=Arithmetic(tf32=True))
    assert strict[0].name != fast[0].name
    # On an H100, cuDNN prefers an engine with atomic additions for this data gradient in float32.
    op, a, b = triple("float32[32,512,7,7]", "float32[512,512,3,3]", "float32[32,512,7,7]", 3, 7)[1]
    assert plans(op, a, b, how=Arithmetic(deterministic=False))[0].name != plans(op, a, b)[0].name


@with_cudnn
@pytest.mark.parametrize("name", ["a100", "t4"])
def test_strict_accuracy_leaves_out_winograds_engines_alone(name: str) -> None:
    # cuDNN's engines 12 (forward) and 19 (gradient of data) have its note WINOGRAD.
    device, transforms = device_named(name), {"eng12", "eng19"}
    op, a, b = triple("float32[8,512,14,14]", "float32[512,512,3,3]", "float32[8,512,14,14]", 3, 14)[1]
    usual = [plan.name for plan in plans(op, a, b, device=device)]
    strict = [plan.name for plan in plans(op, a, b, device=device, how=Arithmetic(strict=True))]
    assert usual[0].split("_")[0] in transforms and strict
    assert [each for each in usual if each.split("_")[0] not in transforms] == strict


@with_cudnn
def test_other_geometries() -> None:
    bf16 = "bfloat16[{}]".format
    assert plans(Conv(*SAME, 64), bf16("8,64,28,28"), bf16("64,1,3,3"), cap=0)
    assert plans(Conv((2, 2), ((0, 1), (0, 1)), (1, 1)), "float32[8,16,28,28]", "float32[16,16,3,3]", cap=0)
    assert plans(Conv((1, 1), ((2, 2), (2, 2)), (2, 2)), "float32[8,16,28,28]", "float32[16,16,3,3]", cap=0)
    assert plans(Conv((1,), ((1, 1),), (1,)), "float32[8,16,100]", "float32[16,16,3]", lie=Window.dense, cap=0)
    volume = Conv((1,) * 3, ((1, 1),) * 3, (1,) * 3)
    assert plans(volume, "float32[2,8,9,9,9]", "float32[8,8,3,3,3]", lie=Window.dense, cap=0)
    # Half the channels of an image.
    x, w = tensor_type("float32[8,16,28,28]"), channels_last(tensor_type("float32[16,16,3,3]"))
    half = Window(x, channels_last(tensor_type("float32[8,32,28,28]")).strides)
    assert convolution_plans(Conv(*SAME), [half, w], [channels_last(x)], H100, cap=0)


@with_cudnn
@pytest.mark.filterwarnings("error")
def test_what_cudnn_has_no_plan_for() -> None:
    assert not plans(Conv(*SAME), "float64[8,16,28,28]", "float64[16,16,3,3]")
    assert not plans(Conv(*SAME), "float32[8,16,28,28]", "float32[16,16,3,3]", "float32[16]")
    assert not plans(Conv((1, 1), ((-1, 1), (1, 1)), (1, 1)), "float32[8,16,28,28]", "float32[16,16,3,3]")
    assert not plans(Conv((1,) * 4, ((1, 1),) * 4, (1,) * 4), "float32[2,8,5,5,5,5]", "float32[8,8,3,3,3,3]")
    x, w = tensor_type("float32[8,16,28,28]"), channels_last(tensor_type("float32[16,16,3,3]"))
    for strides in ((0, *x.strides[1:]), (4, 4, 16, 4)):  # broadcast, overlapping
        assert not convolution_plans(Conv(*SAME), [Window(x, strides), w], [channels_last(x)], H100)
    item = tensor_type("float32[8,16,14,28]")
    for strides in (
        (4, 32, 512, 14336),
        (25088, 1568, 4, 56),
        tuple(3 * step for step in item.strides),
    ):
        assert not convolution_plans(Conv(*SAME), [Window(item, strides), w], [channels_last(item)], H100)


@with_cudnn
def test_plans_are_kept_and_the_same_from_run_to_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    op, a, b = triple("float32[8,32,16,16]", "float32[64,32,3,3]", "float32[8,64,16,16]", 3, 16)[1]
    first = plans(op, a, b)
    cudnn_conv_plans._answers.cache_clear()
    (file,) = kept_files(tmp_path / "kept")
    with monkeypatch.context() as patch:
        patch.setattr(cudnn_conv_plans, "_ranked", lambda *_: pytest.fail("asked again"))
        assert plans(op, a, b) == first
    file.write_bytes(file.read_bytes()[:-1])
    cudnn_conv_plans._answers.cache_clear()
    assert plans(op, a, b) == first
    other = dataclasses.replace(H100, memory_bytes=H100.memory_bytes - 1)
    assert [plan.name for plan in plans(op, a, b, device=other)] == [plan.name for plan in first]
    code = (
        "from tests.gpu.test_cudnn import *\n"
        "cudnn.kept, cudnn.keep = (lambda name: None), (lambda name, content: None)\n"
        f"print(hashlib.sha256(plans({op!r}, {a!r}, {b!r})[0].blob).hexdigest())"
    )
    digests = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    }
    assert digests == {hashlib.sha256(first[0].blob).hexdigest()}


@with_cudnn
@pytest.mark.parametrize("status", ["INTERNAL_ERROR_HOST_ALLOCATION_FAILED", "SUBLIBRARY_LOADING_FAILED"])
def test_a_failure_is_no_answer(status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What cuDNN says of itself is told, and the question asked anew; what it says of the question is kept."""
    op, a, b = triple("float32[8,32,16,16]", "float32[64,32,3,3]", "float32[8,64,16,16]", 3, 16)[0]
    module = library().module

    def fails(said: str) -> Any:
        class Graph:
            def validate(self) -> None:
                raise module.cudnnGraphNotSupportedError(f"no engine: CUDNN_STATUS_NOT_SUPPORTED_SHAPE, {said}")

        return lambda *_: Graph()

    with monkeypatch.context() as patch:
        patch.setattr(cudnn_conv_plans, "_graph", fails(f"CUDNN_STATUS_{status}"))
        with pytest.warns(UserWarning, match=status):
            assert not plans(op, a, b)
    assert not (tmp_path / "kept").exists()
    cudnn_conv_plans._answers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(cudnn_conv_plans, "_graph", fails("CUDNN_STATUS_NOT_SUPPORTED_LAYOUT"))
        assert not plans(op, a, b)
    assert len(kept_files(tmp_path / "kept")) == 1


@with_cudnn
def test_a_plan_is_read_on_other_cards_of_its_compute_capability_and_with_other_drivers() -> None:
    op, a, b = triple("bfloat16[8,32,16,16]", "bfloat16[64,32,3,3]", "bfloat16[8,64,16,16]", 3, 16)[2]
    first = plans(op, a, b)[0]
    smaller = dataclasses.replace(H100, multiprocessors=114, shared_bytes_per_block=H100.shared_bytes_per_block - 1024)
    assert workspace_of(first.blob, smaller) == first.workspace
    for version in (9000, 12080, 13010, 130000):
        described = cudnn.description(H100).replace('"driverVer":13000', f'"driverVer":{version}')

        def read(blob: bytes, described: str = described) -> int:
            graph = library().module.pygraph(
                device_property=library().module.create_device_properties(described), sm_version=90
            )
            graph.deserialize(bytearray(blob))
            return int(graph.get_workspace_size())

        with pytest.raises(Exception, match="ARCH_MISMATCH"):
            read(first.blob)
        moved = cudnn.on_card(first.blob, described)
        assert read(moved) <= first.workspace
        assert cudnn.on_card(moved, cudnn.description(H100)) == cudnn.on_card(first.blob, cudnn.description(H100))
    with pytest.raises(TargetError, match="does not take this plan"):
        workspace_of(first.blob, device_named("a100"))


@with_cudnn
def test_a_damaged_plan_is_refused() -> None:
    op, a, b = triple("float32[8,32,16,16]", "float32[64,32,3,3]", "float32[8,64,16,16]", 3, 16)[0]
    blob = plans(op, a, b)[0].blob
    for damaged in (b"", blob[: len(blob) // 2], blob.replace(b'"engineId"', b'"engineXX"')):
        with pytest.raises(TargetError, match="does not take this plan"):
            workspace_of(damaged, H100)
