"""The zoo in bfloat16 at small sizes: forward, gradients and ten training steps beside float32; planned as unplanned.

How far a gradient may be from float32's is told by the model itself. Where a batch norm has few items, or the input of
a ReLU is near zero, rounding weights and input once, with everything else in float32, changes it as much as anything.
So the images are not smaller: ResNet-101's last batch norms would have four items each, and then another BLAS alone
changes its losses in float32 by 8 %.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import foreplan as fp
from foreplan.graph.init import generator_for
from foreplan.planner import buffers, without_reuse
from foreplan.runtime.session import Session
from tests.profile import cases

UNIT = 2.0**-8  # the most that one rounding to bfloat16 changes a number by, beside its size
SMALL = {
    "conv_chain": "size=16",
    "mlp": "batch=16,width=32",
    "gpt2_small": "batch=2,seq=16,layers=2,width=32,heads=4,vocabulary=100",
    "vit_b16": "batch=2,size=32,layers=2,classes=7,width=32,heads=4,patch=8",
    "bert_base": "batch=2,seq=16,layers=2,width=32,heads=4,vocabulary=100",
    "unet": "batch=2,size=32,width=8",
    "resnet18": "batch=4,size=64,classes=10",
    "resnet50": "batch=4,size=64,classes=10",
    "resnet101": "batch=4,size=64,classes=10",
    "vgg16": "batch=2,size=32,classes=10,dropout=0.0",
    "mobilenet_v2": "batch=4,size=64,classes=10",
    "mixer_b16": "batch=2,size=32,layers=2,classes=7,width=32,patch=8",
    "ddpm_unet": "batch=2,size=16,width=16,groups=4",
    "dlrm": "batch=16,tables=4,rows=20,width=8,hidden=32",
    "efficientnet_b0": "batch=16,size=64,classes=10,width=0.25,depth=0.3",
    "convnext_tiny": "batch=2,size=64,blocks=1,classes=7,width=16,layer_scale=1.0",
    "swin_t": "batch=2,size=24,blocks=1,classes=7,width=16,heads=2,window=3,patch=1",
    "llama": "batch=2,seq=16,layers=2,width=32,heads=4,kv_heads=2,features=48,vocabulary=100",
    "t5_small": "batch=2,seq=16,decoder_seq=12,layers=1,width=32,heads=4,depth=8,features=48,vocabulary=100",
    "lstm_lm": "batch=2,seq=5,width=32,vocabulary=100",
}
NAMES = cases(
    SMALL,
    slow=("unet",),
    thorough=set(SMALL) - {"conv_chain", "mlp", "unet", "gpt2_small", "vit_b16", "mixer_b16", "dlrm"},
)
# Of like models one trains: of residual networks ResNet-50, of plain ones the chain, of inverted residuals
# EfficientNet, of encoders ViT.
TRAINED = [each for each in NAMES if each.id not in ("resnet18", "resnet101", "vgg16", "bert_base", "mobilenet_v2")]


def test_the_whole_zoo_is_here() -> None:
    assert set(SMALL) == set(fp.models.names())


@cache
def compiled(name: str, precision: str, optimizer: bool) -> fp.Compiled:
    graph = fp.models.build(f"{name}:{SMALL[name]}")
    rule = fp.optim.Nesterov(0.002) if optimizer else None
    return fp.compile(graph, fp.models.default_loss(name), rule, precision=precision, remat="auto" if rule else "off")


def inputs(step: fp.Compiled) -> dict[str, np.ndarray]:
    found = {}
    for slot in step.program.inputs:
        if slot.init is None:
            type, rng = slot.operand.type, generator_for(3, slot.name)
            found[slot.name] = (
                rng.standard_normal(type.shape).astype(np.float32)
                if type.dtype.is_float
                else rng.integers(0, slot.valid[1] + 1 if slot.valid else 2, type.shape)
            )
    return found


def bound(step: fp.Compiled, name: str) -> Session:
    """A session of a network that trains: the last scale of each residual block is small (Goyal et al., 2017)."""
    session = step.bind(seed=1)
    last = {"resnet18": "bn2.weight", "resnet50": "bn3.weight", "resnet101": "bn3.weight"}.get(name)
    for each in session.parameters:
        if last is not None and each.startswith("layer") and each.endswith(last):
            session.parameters[each] = np.full(session.parameters[each].shape, 0.1, np.float32)
    return session


def rounded(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32) if array.dtype == np.float32 else array


def distance(found: Any, exact: Any) -> float:
    """Of two sets of gradients, beside the size of the second."""
    square = sum(float(((found[k] - exact[k]).astype(np.float64) ** 2).sum()) for k in exact)
    return float(np.sqrt(square / sum(float((exact[k].astype(np.float64) ** 2).sum()) for k in exact)))


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_pass(name: str) -> None:
    """Results of some hundred roundings, most of which normalisations and sums make small again: at most 8 of them."""
    graph = fp.models.build(f"{name}:{SMALL[name]}")
    steps = [fp.compile(graph, precision=precision) for precision in ("float32", "bf16")]
    exact, found = (next(iter(bound(step, name).step(inputs(step)).outputs.values())) for step in steps)
    assert found.dtype == np.float32
    assert np.abs(found - exact).max() <= 8 * UNIT * np.abs(exact).max()


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients(name: str) -> None:
    """Within what one rounding of weights and input changes, three times over, and a few roundings more."""
    step = compiled(name, "float32", False)
    session, data = bound(step, name), inputs(step)
    exact = session.step(data)
    wanted = {k: np.array(x) for k, x in exact.gradients.items()}
    found = bound(compiled(name, "bf16", False), name).step(data)
    assert {x.dtype for x in found.gradients.values()} == {np.dtype(np.float32)}
    session = bound(step, name)
    for each in session.parameters:
        session.parameters[each] = rounded(np.array(session.parameters[each]))
    moved = distance(session.step({k: rounded(x) for k, x in data.items()}).gradients, wanted)
    assert distance(found.gradients, wanted) <= 3 * moved + 2 * UNIT
    assert abs(found.loss - exact.loss) <= 4 * UNIT * abs(exact.loss)


@pytest.mark.parametrize("name", TRAINED)
def test_ten_training_steps(name: str) -> None:
    """Losses fall, and as in float32: after each step, within a tenth of what training has gained by then."""
    runs = []
    for precision in ("float32", "bf16"):
        step = compiled(name, precision, True)
        session, data = bound(step, name), inputs(step)
        runs.append(np.array([float(session.step(data).loss) for _ in range(10)]))
    exact, found = runs
    assert exact[-1] < exact[0] and found[-1] < found[0]
    gained = np.maximum(np.abs(exact[0] - exact), UNIT * abs(exact[0]))
    assert (np.abs(found - exact) <= 0.1 * gained + UNIT * abs(exact[0])).all()


@pytest.mark.parametrize("name", cases(("mlp", "conv_chain", "gpt2_small", "unet"), thorough=("conv_chain", "unet")))
def test_ten_training_steps_in_float16(name: str) -> None:
    """Eight times as close as bfloat16."""
    runs = []
    for precision in ("float32", "fp16"):
        step = compiled(name, precision, True)
        session, data = bound(step, name), inputs(step)
        runs.append(np.array([float(session.step(data).loss) for _ in range(10)]))
    exact, found = runs
    assert found[-1] < found[0]
    assert (np.abs(found - exact) <= 0.1 * np.abs(exact[0] - exact) + UNIT / 8 * abs(exact[0])).all()


@pytest.mark.parametrize("name", TRAINED)
def test_a_planned_run_is_the_unplanned_one(name: str) -> None:
    step = compiled(name, "bf16", True)
    planned, apart = step.bind(seed=4), Session(step.program, without_reuse(step.plan, step.program), seed=4)
    data = inputs(step)
    for _ in range(2):
        assert planned.step(data).loss == apart.step(data).loss
    for each in planned.parameters:
        assert planned.parameters[each].tobytes() == apart.parameters[each].tobytes()


@pytest.mark.parametrize("name", ["unet", "gpt2_small"])
def test_with_poisoned_memory(name: str) -> None:
    step = compiled(name, "bf16", True)
    step.bind(poison=True).step(inputs(step))


@pytest.mark.parametrize(
    "options", [{"budget": 0.97, "remat": "auto"}, {"offload": True}, {"checkpoint": ["h.*"]}], ids=str
)
def test_with_recomputation_and_copies(options: dict[str, Any]) -> None:
    graph = fp.models.build("gpt2_small:batch=8,seq=32,layers=2,width=32,heads=4,vocabulary=100")
    plain, other = (
        fp.compile(graph, fp.losses.cross_entropy, fp.optim.Adam(1e-3), precision="bf16", **more)
        for more in ({}, options)
    )
    sessions, data = [step.bind(seed=4) for step in (plain, other)], inputs(plain)
    losses = [[session.step(data).loss for _ in range(2)] for session in sessions]
    assert losses[0] == losses[1]


@pytest.mark.whole_search
@pytest.mark.parametrize(
    ("target", "float32", "bf16", "less"),
    [("numpy", 33_746_688, 32_728_832, 65_536), ("cuda:h100", 35_062_784, 33_272_832, 137_984)],
)
def test_narrow_copies_of_weights_do_not_wait_at_the_peak(target: str, float32: int, bf16: int, less: int) -> None:
    """A step that is mostly weights takes less in bfloat16, although narrow copies come on top of float32 weights."""
    model = fp.models.build("gpt2_small:layers=4,width=256,heads=4,vocabulary=1000,seq=64,batch=1")
    arguments = (model, fp.losses.cross_entropy, fp.optim.Nesterov(0.1))
    wide = fp.compile(*arguments, target=target)
    narrow = fp.compile(*arguments, target=target, precision="bf16")
    # On a card the kernels of attention depend on NVIDIA's libraries; without them, it takes so much less.
    assert wide.arena_bytes <= float32 and bf16 - less <= narrow.arena_bytes <= bf16 < float32
    held = fp.compile(*arguments, target=target, precision="bf16", remat="off")
    copies = [value for value in held.program.values if value.name.endswith(".weight/bfloat16")]
    # Of four layers: queries, keys and values, what comes behind attention, and the two products of the MLP.
    blocks = sum(value.nbytes for value in copies if value.name.startswith("h."))
    assert blocks == 4 * (3 + 1 + 4 + 4) * 256 * 256 * 2
    assert held.arena_bytes > wide.arena_bytes
    program, plan = narrow.program, narrow.plan
    peak = program.actions[plan.steps[plan.certificate.peak_step].action]
    used = {*peak.reads, *peak.writes}
    waiting = [
        program.values[buffer.value].name
        for buffer in buffers(plan, program)
        if buffer.lower <= plan.certificate.peak_step < buffer.upper and buffer.value >= 0 and buffer.value not in used
    ]
    assert not [name for name in waiting if name.endswith(".weight/bfloat16")]
