"""Weights in the blocks that their kernels read: the same answers, the same weights, and the bytes of blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import PlanError, SessionError, UsageError
from foreplan.base.units import align_up
from foreplan.frontend import Tensor, nn
from foreplan.graph import Normal
from foreplan.graph.blocks import Blocks
from foreplan.ops.loop import Loop
from foreplan.runtime.cpu.instructions import Level, level
from foreplan.runtime.inputs import made_up
from foreplan.runtime.loop import PlannedLoop, loop_of
from foreplan.runtime.plancheck import check_program
from tests.cpu.check import needs_onednn
from tests.cpu.families import NETS, built
from tests.profile import cases, pick
from tests.runtime.test_planfile import reseal

pytestmark = needs_onednn()
IMAGES = "mobilenet_v2:batch=1,size=32,classes=5"
Arrays = dict[str, np.ndarray]


def convolved(rng: np.random.Generator) -> fp.Graph:
    """Convolutions of any geometry, one behind the other, with what may follow one in its epilogue."""
    axes = int(rng.integers(1, 4))
    channels, extents = int(rng.integers(1, 40)), tuple(map(int, rng.integers(5, 12, axes)))

    def model(x: Tensor) -> Tensor:
        for i in range(int(rng.integers(1, 4))):
            groups = int(rng.choice([1, 1, 2, x.shape[1]]))
            groups = groups if x.shape[1] % groups == 0 else 1
            features = groups * int(rng.integers(1, 1 + 40 // groups)) if groups < x.shape[1] else x.shape[1]
            taps = tuple(map(int, rng.choice([1, 1, 2, 3], axes))) if rng.random() < 0.6 else (1,) * axes
            taps = tuple(map(min, taps, x.shape[2:]))
            stride = tuple(map(int, rng.integers(1, 3, axes)))
            bias, pads = bool(rng.integers(2)), tuple(map(int, rng.integers(0, 2, axes)))
            y = nn.conv(x, features, taps, stride, pads, groups, bias=bias, name=f"conv{i}")
            if rng.random() < 0.5:
                y = nn.batch_norm(y, name=f"norm{i}")
            if y.shape == x.shape and rng.random() < 0.5:
                y = x + y
            x = nn.relu(y) if rng.random() < 0.7 else y
        return x

    return fp.trace(model, fp.spec((int(rng.integers(1, 4)), channels, *extents)), name="convolved")


def multiplied(rng: np.random.Generator) -> fp.Graph:
    """Products with weights as they are and transposed, of any number of rows; some weights are read twice."""
    rows = tuple(map(int, rng.integers(1, (30, 200)[: int(rng.integers(1, 3))])))

    def model(x: Tensor) -> Tensor:
        for i in range(int(rng.integers(1, 4))):
            width = int(rng.integers(1, 500))
            if rng.random() < 0.4:
                w = nn.parameter(f"w{i}", (x.shape[-1], width), Normal(0.2))
                y = x @ w
                y = y + nn.relu(x * 0.5) @ w if rng.random() < 0.3 else y
            else:
                y = nn.linear(x, width, bias=bool(rng.integers(2)), name=f"linear{i}")
            if rng.random() < 0.5:
                y = nn.gelu(y)
            x = x + y if y.shape == x.shape else y
        return x

    return fp.trace(model, fp.spec((*rows, int(rng.integers(1, 500)))), name="multiplied")


def inputs_of(step: fp.Compiled, seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {x.name: rng.normal(size=x.operand.type.shape).astype(np.float32) for x in step.program.inputs}


def in_blocks(step: fp.Compiled) -> dict[str, Blocks]:
    return {x.name: x.operand.blocks for x in step.program.stored if x.operand.blocks is not None}


def outputs_of(session: fp.Session, data: Arrays) -> np.ndarray:
    (found,) = session.step(data).outputs.values()
    return found


@pytest.mark.parametrize("seed", range(pick(3, 8, 300)))
@pytest.mark.parametrize("drawn", [convolved, multiplied])
def test_answers_and_weights_are_those_of_weights_in_order(drawn: Any, seed: int) -> None:
    graph, threads = drawn(np.random.default_rng(seed)), 1 + seed % 2
    target = f"cpu:threads={threads}"
    plain, packed = (fp.compile(graph, target=target, prepack=prepack) for prepack in (False, True))
    first, other, reference = plain.bind(seed=1), packed.bind(seed=1, poison=True), fp.compile(graph, target="numpy")
    data = inputs_of(plain, seed)
    wanted = outputs_of(reference.bind(seed=1), data)
    near = 2e-5 * max(1, float(np.abs(wanted).max()))
    assert np.abs(outputs_of(other, data) - wanted).max(initial=0) < near
    assert set(other.parameters) == set(first.parameters)
    for name in first.parameters:
        assert (other.parameters[name] == first.parameters[name]).all(), name
        other.parameters[name] = first.parameters[name] * 2
        assert (other.parameters[name] == first.parameters[name] * 2).all(), name


def test_weights_lie_in_blocks_and_take_the_bytes_of_these() -> None:
    graph = fp.models.build(IMAGES)
    plain, packed = (fp.compile(graph, target="cpu:threads=1", prepack=prepack) for prepack in (False, True))
    blocks, types = in_blocks(packed), {x.name: x.operand.type for x in plain.program.stored}
    assert blocks
    sizes = {v.name: v.nbytes for v in packed.program.values}
    for name, each in blocks.items():
        assert sizes[name] == 4 * each.size >= types[name].nbytes
    more = sum(align_up(4 * each.size, 64) - align_up(types[name].nbytes, 64) for name, each in blocks.items())
    stored = [sum(align_up(x.operand.nbytes, 64) for x in each.program.stored) for each in (packed, plain)]
    assert stored[0] - stored[1] == more
    (note,) = (note for note in packed.program.notes if note.startswith("prepack"))
    assert note.startswith(f"prepack: {len(blocks)} weights lie in the blocks that their kernels read")


@pytest.mark.parametrize("seed", range(pick(2, 5, 40)))
@pytest.mark.parametrize("axis", [0, 1])
def test_lookups_read_rows_of_a_table_in_blocks(axis: int, seed: int) -> None:
    """Where the product repays it; columns are read in order alone."""
    rng = np.random.default_rng(seed)
    rows, width, words = (int(rng.integers(*some)) for some in ((1500, 3000), (100, 800), (17, 60)))
    rows, width = (2048, 768) if seed == 0 else (rows, width)

    def model(x: Tensor) -> Tensor:
        table = nn.parameter("table", (rows, width), Normal(0.2))
        read = table[x] if axis == 0 else table[:, x].T
        return nn.linear(read, width, name="between") @ table.T

    graph = fp.trace(model, fp.spec((words,), "int64"), name="tied")
    step = fp.compile(graph, target="cpu:threads=1", prepack=True)
    if axis:
        assert "table" not in in_blocks(step)
    elif level() >= Level.AVX2 and seed == 0:
        assert "table" in in_blocks(step)
    data = {step.program.inputs[0].name: rng.integers(-rows if axis == 0 else -width, min(rows, width), words)}
    wanted = outputs_of(fp.compile(graph, target="numpy").bind(seed=1), data)
    found = outputs_of(step.bind(seed=1, poison=True), data)
    assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_checkpoints_hold_weights_in_order(tmp_path: Path) -> None:
    graph = fp.models.build(IMAGES)
    plain, packed = (fp.compile(graph, target="cpu:threads=1", prepack=prepack) for prepack in (False, True))
    assert in_blocks(packed)
    first, other = plain.bind(seed=1), packed.bind(seed=2)
    first.save(tmp_path / "plain.safetensors")
    other.load(tmp_path / "plain.safetensors")
    other.save(tmp_path / "packed.safetensors")
    assert (tmp_path / "plain.safetensors").read_bytes() == (tmp_path / "packed.safetensors").read_bytes()
    data = inputs_of(plain, 1)
    wanted = outputs_of(first, data)
    assert np.abs(outputs_of(other, data) - wanted).max() < 1e-4 * np.abs(wanted).max()


def planned(tmp_path: Path) -> tuple[fp.Compiled, Path]:
    step = fp.compile(fp.models.build(IMAGES), target="cpu:threads=1", prepack=True)
    step.save(tmp_path / "step.plan")
    return step, tmp_path / "step.plan"


def test_a_plan_file_keeps_blocks(tmp_path: Path) -> None:
    step, path = planned(tmp_path)
    read, data = fp.load_plan(path), inputs_of(step, 1)
    assert in_blocks(read) == in_blocks(step)
    assert read.options.prepack
    assert read.program.as_text() == step.program.as_text()
    assert (outputs_of(read.bind(seed=1), data) == outputs_of(step.bind(seed=1), data)).all()


def test_blocks_that_no_kernel_reads_are_refused(tmp_path: Path) -> None:
    step, path = planned(tmp_path)
    blocks = next(iter(in_blocks(step).values()))
    shape, letters = str(blocks).partition(":")[0], "abcdefgh"[: len(blocks.shape)]
    for other, error in (
        (f"{shape}:{letters[::-1]}", "bytes|has no kernel"),
        (f"{shape}x2:{letters}{'abcdefgh'[len(letters)]}", "another number of elements"),
        ("AB16a", "no layout in blocks"),
    ):
        text = path.read_text()
        assert text.count(json.dumps(str(blocks))) > 1
        changed = tmp_path / "changed.plan"
        changed.write_text(reseal(text.replace(json.dumps(str(blocks)), json.dumps(other))))
        with pytest.raises(PlanError, match=error):
            fp.load_plan(changed)


def test_whoever_reads_a_weight_in_blocks_says_so(tmp_path: Path) -> None:
    step, _ = planned(tmp_path)
    name = next(iter(in_blocks(step)))
    (slot,) = (x for x in step.program.stored if x.name == name)
    plain = replace(slot.operand, blocks=None)
    others = tuple(replace(x, operand=plain) if x.name == name else x for x in step.program.stored)
    with pytest.raises(PlanError):
        check_program(replace(step.program, stored=others), step.plan)
    calls = tuple(
        replace(call, inputs=tuple(plain if x == slot.operand else x for x in call.inputs))
        for call in step.program.calls
    )
    with pytest.raises(PlanError):
        check_program(replace(step.program, calls=calls), step.plan)


def test_a_session_that_trains_shares_no_weights_in_blocks() -> None:
    graph = built("images of 2 axes")
    training = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="cpu:threads=1").bind()
    with pytest.raises(SessionError, match=r"in the blocks .*compile it without prepack"):
        fp.compile(graph, target="cpu:threads=1", prepack=True).bind(share=training)
    first = fp.compile(graph, target="cpu:threads=1", prepack=True).bind()
    second = fp.compile(graph, target="cpu:threads=1", prepack=True).bind(share=first)
    data = inputs_of(fp.compile(graph, target="cpu:threads=1"), 1)
    assert (outputs_of(first, data) == outputs_of(second, data)).all()


def test_a_step_that_trains_packs_nothing() -> None:
    with pytest.raises(UsageError, match="prepack is for weights that never change"):
        fp.compile(fp.models.build("mlp"), fp.losses.cross_entropy, fp.optim.SGD(0.1), prepack=True)


@pytest.mark.parametrize("target", ["numpy", "cuda:h100"])
def test_other_targets_say_that_they_pack_nothing(target: str) -> None:
    step = fp.compile(fp.models.build("mlp"), target=target, prepack=True)
    assert not in_blocks(step)
    assert any(note.startswith("prepack: no kernel") for note in step.program.notes)


def looped(width: int, items: int, steps: int, target: str) -> fp.Compiled:
    """A recurrent layer that is trained: its weights are read in every step of two loops."""

    def cell(h: Any, x: Any) -> Any:
        h = np.tanh(nn.linear(h, width, name="state") + x)
        return h, h

    def model(x: Tensor) -> Tensor:
        return nn.linear(fp.scan(cell, np.zeros((items, width)), nn.linear(x, width, name="in"))[0], 3, name="head")

    graph = fp.trace(model, fp.spec((steps, items, 8)), name="looped")
    return fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.1), target=target)


def loops_of(step: fp.Compiled) -> list[PlannedLoop]:
    calls = (step.program.calls[each.action] for each in step.plan.steps)
    return [loop_of(call.op, step.program.target, call.payload) for call in calls if isinstance(call.op, Loop)]


@pytest.mark.parametrize("seed", range(pick(2, 6, 60)))
def test_loops_pack_what_every_step_reads_once(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    width, items, steps = (int(rng.integers(*some)) for some in ((20, 400), (4, 80), (2, 9)))
    width, items = (384, 32) if seed == 0 else (width, items)
    step = looped(width, items, steps, f"cpu:threads={1 + seed % 2}")
    packed = [loop for loop in loops_of(step) if loop.in_blocks]
    assert packed or seed or level() < Level.AVX2
    for loop in packed:
        ends = sum(align_up(nbytes, 64) for _, nbytes in loop.in_blocks.values())
        assert loop.workspace <= align_up(loop.plan.heights[-1], 64) + ends
    x = rng.normal(size=(steps, items, 8)).astype(np.float32)
    data = {"x": x, "target": rng.integers(0, 3, items)}
    step.save(tmp_path / "step.plan")
    sessions = [
        step.bind(seed=1, poison=True),
        fp.load_plan(tmp_path / "step.plan").bind(seed=1),
        looped(width, items, steps, "numpy").bind(seed=1),
    ]
    for _ in range(3):
        poisoned, read, numpys = (float(session.step(data).loss or 0.0) for session in sessions)
        assert poisoned == read
        assert abs(poisoned - numpys) < 1e-5 * abs(numpys)


@pytest.mark.parametrize("name", cases(NETS, thorough=("resnet50", "vgg16")))
def test_small_nets_answer_as_before(name: str) -> None:
    graph = built(name)
    plain, packed = (fp.compile(graph, target="cpu:threads=1", prepack=prepack) for prepack in (False, True))
    assert {x.name: x.operand.type for x in plain.program.stored} == {
        x.name: x.operand.type for x in packed.program.stored
    }
    data = made_up(plain.program)
    wanted, found = (step.bind(seed=1).step(data).outputs for step in (plain, packed))
    for key, array in wanted.items():
        assert np.abs(found[key] - array).max() < 2e-4 * np.abs(array).max()
