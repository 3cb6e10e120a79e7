"""cuDNN's plans of attention as kernels: which the plan of a step chooses, and what of them is in its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import nn
from foreplan.graph import Graph, Op, Window
from foreplan.graph.types import DTYPES, tensor_type
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.ops.attention.packed import PackedAttentionGrad
from foreplan.runtime.cuda import table
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.kernels import cudnn_attention
from foreplan.runtime.cuda.kernels.cudnn_conv import WORD
from foreplan.runtime.cuda.launch import Arithmetic, Execute, input_at, output_at, workspace_at
from foreplan.runtime.cuda.libraries import cudnn_sdpa
from foreplan.runtime.cuda.libraries.cudnn import CudnnPlan
from foreplan.runtime.cuda.target import CudaTarget
from foreplan.runtime.kernel import Refused
from tests.gpu.check import expected, run_kernel, type_of, with_cudnn
from tests.gpu.compiled import needs_gcc
from tests.kernels import attention_operands

H100 = device_named("h100")


def model() -> Graph:
    """A small GPT-2, whose scores take 0.5 MiB a block."""
    return fp.models.gpt2_small(batch=1, seq=256, layers=2, width=256, heads=4, vocabulary=1000)


def candidates(target: str = "cuda:h100", precision: str = "bf16", **options: Any) -> dict[str, set[tuple[str, int]]]:
    """Kernels by their first words, with their workspaces, of each op of attention in a training step."""
    step = fp.differentiate(model(), fp.losses.cross_entropy, fp.optim.AdamW(1e-3), precision=precision)
    program = fp.lower(step, target, **options)
    found: dict[str, set[tuple[str, int]]] = {"attention": set(), "packed_attention_grad": set()}
    for call, action in zip(program.calls, program.actions):
        if call.op.name in found:
            found[call.op.name].add((call.kernel.split(" ")[0], action.workspace))
    return found


@with_cudnn
def test_kernels_are_within_the_cap() -> None:
    ours, scores = ("launches", 4 * 256 * 4), 4 * 256 * 256 * 2
    free, least = (candidates(workspace=size) for size in ("unlimited", 0))
    ((_, most),) = free["packed_attention_grad"] - {ours}
    assert scores <= most <= 1.1 * scores and free["packed_attention_grad"] == {("cudnn", most), ours}
    # Without scratch memory, cuDNN has no gradient, and ours takes a number a query.
    assert least == {"attention": {("cudnn", 0)}, "packed_attention_grad": {ours}}


@with_cudnn
@pytest.mark.parametrize(("target", "precision"), [("cuda:h100,tf32", "float32"), ("cuda:t4", "fp16")])
def test_float32_and_older_cards_have_kernels_of_ours(target: str, precision: str) -> None:
    assert {name for found in candidates(target, precision).values() for name, _ in found} == {"launches"}


@with_cudnn
def test_what_is_chosen_is_in_the_file_and_needs_no_cudnn_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = fp.compile(model(), fp.losses.cross_entropy, fp.optim.AdamW(1e-3), target="cuda:h100", precision="bf16")
    used = [step.program.calls[s.action] for s in step.plan.steps]
    assert all(call.payload for call in used if "attention" in call.op.name)
    assert "concat" not in {call.op.name for call in used}
    step.save(tmp_path / "step.plan")
    table._ways.cache_clear()
    monkeypatch.setattr(cudnn_sdpa, "missing", lambda: "it is not there")
    read = fp.load_plan(tmp_path / "step.plan")
    table._ways.cache_clear()
    assert read.plan == step.plan
    target = CudaTarget("h100")
    for s in step.plan.steps:
        call = read.program.calls[s.action]
        assert call.payload == step.program.calls[s.action].payload
        if call.payload:
            windows = [[x.window for x in operands] for operands in (call.inputs, call.outputs)]
            kernel = table.kernel_named(call.op, call.kernel, call.payload, *windows, target.device)
            assert kernel is not None and kernel.workspace == read.program.actions[s.action].workspace
            (run,) = kernel.instructions
            assert isinstance(run, Execute) and run.blob == call.payload[WORD:] and run.nbytes == kernel.workspace


MASKS = {
    "a key for all": ((2, 1, 1, 24), False),
    "of heads, causal": ((1, 2, 20, 24), True),
    "all": ((2, 2, 20, 24), False),
}


@with_cudnn
@needs_gcc
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [name if name == "a key for all" else pytest.param(name, marks=pytest.mark.slow) for name in MASKS]
)
def test_masks(case: str, dtype: str) -> None:
    """By the operations that are in the plans: padding, keys that are hidden, and queries that read no key at all."""
    shape, causal = MASKS[case]
    rng = np.random.default_rng(0)
    mask = np.where(rng.random(shape) < 0.3, -np.inf, rng.standard_normal(shape))
    mask[0, ..., 3:6] = -10000
    mask[-1, :, 0] = -np.inf  # every key of the last item, or of its first query
    given = [x.astype(ml_dtypes.bfloat16) for x in attention_operands(rng, (2, 2, 2, 20, 24, 16, 16), True)]
    given.append(mask.astype(DTYPES[dtype].numpy))
    forward, backward = Attention(0.3, causal, True), AttentionGrad(0.3, causal, True)
    results = expected(forward, given)
    assert not results[0][-1, 0].any() and results[0][0, -1].all()
    g = rng.standard_normal(results[0].shape).astype(ml_dtypes.bfloat16)
    for op, inputs in ((forward, given), (backward, [*given[:3], *results, g, given[3]])):
        for result, *_ in by_plans(op, inputs):
            assert not result[-1, 0].any()


def by_plans(op: Op, inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """What each plan of cuDNN's gives, by the operations in it: near what the op gives."""
    wanted, every = expected(op, inputs), []
    reads, writes = ([Window.dense(type_of(x)) for x in arrays] for arrays in (inputs, wanted))
    kernels = {name: x for name, x in table.kernels_for(op, reads, writes, H100).items() if x.payload}
    assert kernels
    for name, kernel in kernels.items():
        again = table.kernel_named(op, name, kernel.payload, reads, writes, H100)
        assert again is not None and again.instructions == kernel.instructions
        found = run_kernel(kernel, reads, writes, inputs, op=op)
        for ours, theirs in zip(found, wanted, strict=True):
            error = np.linalg.norm(ours.astype(np.float64) - theirs)
            assert error <= (1e-5 if theirs.dtype == np.float32 else 1e-2) * np.linalg.norm(theirs.astype(float))
        every.append(found)
    return every


@with_cudnn
@needs_gcc
@pytest.mark.parametrize("shared", [4, 2])
def test_packed_queries_keys_and_values(shared: int) -> None:
    """Each gradient is written where it lies in the whole; the whole is read where its parts lie."""
    rng, op = np.random.default_rng(0), PackedAttentionGrad(0.3, 4, shared, True)
    x = rng.standard_normal((2, 20, (4 + 2 * shared) * 16)).astype(ml_dtypes.bfloat16)
    o, lse = expected(Attention(0.3, True, True), op.unpacked_arrays(x))
    by_plans(op, [x, o, lse, rng.standard_normal(o.shape).astype(ml_dtypes.bfloat16)])


@with_cudnn
def test_parts_that_begin_between_multiples_of_16_bytes_are_left_to_kernels_of_ours() -> None:
    inputs = windows("bfloat16[1,1,36]", "bfloat16[1,1,1,12]", "float32[1,1,1]", "bfloat16[1,1,1,12]")
    op = PackedAttentionGrad(0.3, 1, 1)
    assert list(table.kernels_for(op, inputs, inputs[:1], H100)) == ["launches"]


def test_a_masks_gradient_is_left_to_kernels_of_ours() -> None:
    inputs = [*windows(*["bfloat16[2,64,3,16]"] * 4), *windows("float32[2,3,64]", "bfloat16[2,64,3,16]")]
    inputs += windows("float32[2,1,1,64]")
    op = AttentionGrad(0.25, False, True, True)
    outputs = [Window.dense(type) for type in op.infer([x.type for x in inputs])]
    assert not cudnn_sdpa.attention_plans(op, inputs, outputs, H100)


@with_cudnn
def test_what_does_not_lie_at_multiples_of_16_bytes_is_left_to_kernels_of_ours() -> None:
    def kernels(start: int) -> set[str]:
        def model(x: Any) -> Any:
            y = nn.layer_norm(x, name="norm")[:, :, :, start : start + 16]
            return nn.attention(y, y, y, causal=True)

        graph = fp.trace(model, fp.spec((1, 2, 48, 32)))
        program = fp.lower(fp.differentiate(graph, fp.losses.mse, fp.optim.SGD(0.1), precision="bf16"), "cuda:h100")
        return {call.kernel.split(" ")[0] for call in program.calls if call.op.name == "attention"}

    assert kernels(8) == {"cudnn"} and kernels(4) == {"launches"}


def windows(*texts: str) -> list[Window]:
    return [Window.dense(tensor_type(text)) for text in texts]


def made(op: Attention | AttentionGrad, plans: Sequence[CudnnPlan]) -> tuple[list[Any], list[Window], list[Window]]:
    """Kernels of such plans, with how their operands lie."""
    inputs = windows(*["bfloat16[2,64,3,16]"] * 3)
    outputs = [Window.dense(type) for type in Attention(0.25, True, True).infer([x.type for x in inputs])]
    if isinstance(op, AttentionGrad):
        inputs, outputs = [*inputs, *outputs, outputs[0]], list(inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn_attention, "attention_plans", lambda *_, **__: plans)
        found = cudnn_attention.attention_kernels(op, inputs, outputs, H100, Arithmetic())
    assert list(found) == [f"cudnn {plan.name}" for plan in plans]
    return list(found.values()), inputs, outputs


@pytest.mark.parametrize("op", [Attention(0.25, True, True), AttentionGrad(0.25, True, True)], ids=lambda op: op.name)
def test_tensors_are_numbered_through_inputs_and_outputs(op: Attention | AttentionGrad) -> None:
    kernels, inputs, outputs = made(op, [CudnnPlan("first", 512, b"a"), CudnnPlan("second", 0, b"b")])
    places = [*(input_at(i) for i in range(len(inputs))), *(output_at(i) for i in range(len(outputs)))]
    for kernel, (nbytes, blob) in zip(kernels, ((512, b"a"), (0, b"b")), strict=True):
        assert kernel.instructions == (Execute(blob, tuple(enumerate(places, 1)), workspace_at(), nbytes),)
        assert kernel.workspace == nbytes and kernel.alignment == 16 and not kernel.overwrites
        again = table.kernel_named(op, "cudnn any", kernel.payload, inputs, outputs, H100)
        assert again is not None and again.instructions == kernel.instructions
    assert kernels[0].nanoseconds < kernels[1].nanoseconds


def test_a_payload_that_is_none() -> None:
    inputs = windows(*["bfloat16[2,64,3,16]"] * 3)
    with pytest.raises(Refused):
        cudnn_attention.attention_kernel(Attention(0.25), bytes(WORD), inputs, inputs[:1])
    assert table.kernel_named(Attention(0.25), "cudnn any", b"", inputs, inputs[:1], H100) is None


def test_scratch_memory_costs_time() -> None:
    """An engine that keeps all scores is slower than one that does not, where memory is what it waits for."""
    op = AttentionGrad(0.25, True, True)
    (little,), *_ = made(op, [CudnnPlan("first", 0, b"a")])
    (much,), *_ = made(op, [CudnnPlan("first", 100 << 20, b"a")])
    assert much.nanoseconds - little.nanoseconds >= 0.9 * 2e9 * (100 << 20) / H100.bytes_per_second
