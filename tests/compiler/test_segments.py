"""Segments recomputed by hand, through the front door: bits, flops, and what is said of names that cannot be."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.lower.segments import find_segments
from foreplan.planner import without_reuse
from foreplan.runtime.session import Session
from tests.cli.shell import MODEL, answer, foreplan
from tests.profile import few

CHAIN = "mlp:batch=64,width=32,layers=4,inputs=16,classes=3"


def network() -> fp.Graph:
    """Blocks with all that makes recomputing delicate: running statistics, random masks, saved indices."""

    def block(x: fp.Tensor, i: int) -> fp.Tensor:
        with fp.nn.scope(f"block.{i}"):
            y = fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(x, 8, 3, padding=1, name="conv1"), name="norm1"))
            y = fp.nn.dropout(fp.nn.conv(y, 8, 3, padding=1, name="conv2"), 0.3)
            return fp.nn.relu(fp.nn.batch_norm(y, name="norm2") + x)

    def model(x: fp.Tensor) -> fp.Tensor:
        x = fp.nn.conv(x, 8, 3, padding=1, name="stem")
        for i in range(3):
            x = block(x, i)
        return fp.nn.linear(fp.nn.flatten(fp.nn.max_pool(x, 4)), 3, name="head")

    return fp.trace(model, fp.spec((8, 1, 16, 16)), name="network")


def batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(8, 1, 16, 16)).astype(np.float32), "target": rng.integers(0, 3, 8)}


def same(one: Session, other: Session) -> None:
    for seed in range(3):
        assert one.step(batch(seed)).loss == other.step(batch(seed)).loss
    for name in one.stored:
        assert one.stored[name].tobytes() == other.stored[name].tobytes(), name


@pytest.mark.parametrize(
    "entries", few([["block.*"], ["block"], ["block.0..block.1"], ["stem..head"], ["block.2", "loss"]], (0, 2, 4))
)
def test_recomputing_changes_no_bit(entries: list[str]) -> None:
    arguments = (network(), fp.losses.cross_entropy, fp.optim.Adam(1e-2))
    step = fp.compile(*arguments, checkpoint=entries)
    plain = fp.compile(*arguments, remat="off")
    twin = Session(step.program, without_reuse(step.plan, step.program), seed=4)
    same(step.bind(seed=4, poison=True), plain.bind(seed=4))
    same(step.bind(seed=4), twin)
    runs = Counter(s.action for s in step.plan.steps)
    inside = {index for segment in find_segments(step.program, entries) for index in segment.actions}
    assert max(runs.values()) == 2
    assert all(times == 1 or (i in inside and not step.program.actions[i].effect) for i, times in runs.items())
    if entries == ["block.*"]:
        assert step.plan.arena_bytes < plain.plan.arena_bytes


def test_what_is_computed_again_is_what_the_backward_pass_needs() -> None:
    compiled = fp.compile(
        fp.models.build(CHAIN),
        fp.losses.cross_entropy,
        fp.optim.SGD(0.1),
        checkpoint=["hidden0..relu.1", "hidden2..relu.3"],
    )
    runs = Counter(step.action for step in compiled.plan.steps)
    again = {compiled.program.actions[index].name for index, times in runs.items() if times == 2}
    # The second layer of each segment is not: its result is kept, as the next one's input.
    assert {name for name in again if "matmul" in name} == {"hidden0/matmul", "hidden2/matmul"}
    products = 2 * 64 * (16 * 32 + 32 * 32)
    element_wise = 2 * 2 * 64 * 32  # bias and ReLU, after each
    more = sum(compiled.program.actions[step.action].flops for step in compiled.plan.steps)
    more -= sum(compiled.program.actions[index].flops for index in runs)
    assert more == products + element_wise


@pytest.mark.parametrize("option", ["checkpoint", "recompute"])
def test_with_micro_batches(option: str) -> None:
    arguments = (network(), fp.losses.cross_entropy, fp.optim.SGD(0.1))
    plain = fp.compile(*arguments, remat="off", accumulate=2)
    step = fp.compile(*arguments, **{option: ["block.*"]}, accumulate=2)
    assert step.plan.arena_bytes < plain.plan.arena_bytes
    inputs = {name: np.stack([batch(0)[name], batch(1)[name]]) for name in batch(0)}
    one, other = step.bind(seed=1), plain.bind(seed=1)
    assert one.step(inputs).loss == other.step(inputs).loss
    for name in one.parameters:
        assert one.parameters[name].tobytes() == other.parameters[name].tobytes()


def test_a_plan_file_keeps_them(tmp_path) -> None:
    arguments = ("--checkpoint", "hidden0..relu.1", "--checkpoint", "hidden2..relu.3")
    figures = answer("estimate", CHAIN, *arguments)
    assert figures["extra_flops_ratio"] > 0
    foreplan("plan", CHAIN, *arguments, "-o", tmp_path / "a.plan")
    foreplan("verify", tmp_path / "a.plan")
    assert answer("estimate", tmp_path / "a.plan")["extra_flops_ratio"] == figures["extra_flops_ratio"]
    assert "decided on --checkpoint" in foreplan("view", tmp_path / "a.plan", *arguments, code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "hiden0"), "there are 'hidden"),
        (("--checkpoint", "hidden0", "--budget", "1GiB"), "give one"),
        (("--checkpoint", "hidden0", "--infer"), "this is inference"),
        (("--checkpoint", "out"), "'out' recomputes nothing"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], message: str) -> None:
    assert message in foreplan("estimate", MODEL, *arguments, code=2).stderr


def test_wrong_use_in_python() -> None:
    graph = fp.models.build(MODEL)
    with pytest.raises(UsageError, match=r"checkpoint=\['hidden0'\]"):
        fp.compile(graph, fp.losses.cross_entropy, checkpoint="hidden0")
    from foreplan.planner import Problem

    program = fp.lower(fp.differentiate(graph, fp.losses.cross_entropy))
    with pytest.raises(UsageError, match="give what `lower` returns"):
        fp.plan(Problem(program.values, program.actions, program.regions), checkpoint=["hidden0"])


def test_the_largest_batch_with_segments_recomputed() -> None:
    """The largest batch whose plan with these segments fits, as `estimate` has it: more than without, and one more is
    too many.
    """
    segments = ("--checkpoint", "hidden0..relu.1", "--checkpoint", "hidden2..relu.3")
    memory = answer("estimate", CHAIN, "--batch", 100, *segments)["arena_bytes"]
    found = answer("fit", CHAIN, "--memory", memory, *segments)
    assert found["batch"] >= 100
    same, more = (answer("estimate", CHAIN, "--batch", found["batch"] + n, *segments) for n in (0, 1))
    assert found["arena_bytes"] == same["arena_bytes"] <= memory < more["arena_bytes"]
    assert found["extra_flops_ratio"] == pytest.approx(same["extra_flops_ratio"]) and found["extra_flops_ratio"] > 0
    plain = answer("fit", CHAIN, "--memory", memory, "--max-extra-time", 0)
    assert plain["batch"] < found["batch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pareto",), "along the curve the planner chooses; leave it out, or see the one plan that it gives with"),
        (("fit", "--memory", "1GiB", "--max-extra-time", "5%"), "--max-extra-time limits what the planner chooses"),
        (("fit", "--memory", "1GiB", "--offload"), "offload lets the planner choose: give one"),
    ],
)
def test_where_segments_make_no_sense(arguments: tuple[str, ...], message: str) -> None:
    refused = foreplan(arguments[0], MODEL, *arguments[1:], "--checkpoint", "hidden0", code=2).stderr
    assert message in " ".join(refused.split())


@pytest.mark.slow
def test_figures_of_known_models() -> None:
    """Less than without, and no less than what must be kept: weights, momentum and every segment's result."""
    blocks = answer("estimate", "resnet50", "--checkpoint", "layer?.*")
    stages = answer("estimate", "resnet50", "--checkpoint", "layer?")
    plain = answer("estimate", "resnet50", "--remat", "off")
    assert blocks["arena_bytes"] < stages["arena_bytes"] < plain["arena_bytes"]
    # Twice the weights, the input, and the results of 16 blocks at batch 32: 256, 512, 1024 and 2048 channels.
    outputs = 32 * 4 * (3 * 256 * 56**2 + 4 * 512 * 28**2 + 6 * 1024 * 14**2 + 3 * 2048 * 7**2)
    weights = 2 * 4 * 25_557_032
    assert blocks["arena_bytes"] > weights + outputs
    assert 0.30 < blocks["extra_flops_ratio"] <= stages["extra_flops_ratio"] < 1 / 3


@pytest.mark.thorough
def test_figures_of_gpt() -> None:
    gpt = answer("estimate", "gpt2_small", "--checkpoint", "h.*")
    assert gpt["arena_bytes"] < 0.45 * answer("estimate", "gpt2_small", "--remat", "off")["arena_bytes"]
    assert gpt["arena_bytes"] > 12 * 4 * 1024 * 768 * 4 + 2 * 4 * 124_439_808
