"""Activations kept, recomputed or copied to the host by name: bits, bytes, steps, and what is said of names that
cannot be."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import foreplan as fp
from foreplan.base.errors import DoesNotFitError, UsageError
from foreplan.compiler.compiled import Compiled
from foreplan.planner import Buffer, buffers, verify, without_reuse
from foreplan.runtime.session import Session
from tests.cli.shell import MODEL, answer, foreplan
from tests.compiler.test_segments import network, same
from tests.profile import few, pick

GPT = "gpt2_small:layers=3,width=64,heads=2,vocabulary=512,seq=64,batch=2"
RESNET = "resnet18:batch=2,size=32"
NAMED = ("--keep", "h.0", "--recompute", "h.*.mlp", "--to-host", "h.2.attn")
NESTEROV = fp.optim.Nesterov(0.1)
CHOICES: list[dict[str, Any]] = [
    {"recompute": ["block.*"]},
    {"recompute": ["block.0", "block.1"], "remat": "off"},
    {"recompute": ["stem/conv", "block.*/relu*"]},
    {"recompute": ["*"]},
    {"to_host": ["block"]},
    {"to_host": ["block.*/dropout"], "offload": True, "budget": 0.8},
    {"keep": ["block"], "budget": 0.96},
    {"keep": ["*"]},
    {"keep": ["block.1"], "recompute": ["block"], "to_host": ["stem"], "budget": 0.95},
]


def lives(step: Compiled) -> dict[str, list[Buffer]]:
    """The buffers of each value, by its name."""
    found: dict[str, list[Buffer]] = {}
    for buffer in buffers(step.plan, step.program):
        if buffer.value >= 0:
            found.setdefault(step.program.values[buffer.value].name, []).append(buffer)
    return found


def at(step: Compiled, value: int, reads: bool) -> list[int]:
    """The steps that read a value, or those that write it."""
    actions = step.program.actions
    every = [(i, actions[run.action]) for i, run in enumerate(step.plan.steps)]
    return [i for i, action in every if value in (action.reads if reads else action.writes)]


def check(step: Compiled) -> None:
    """What is kept is written once, and is there until its last use; what is made again is away between the forward
    and the backward pass.
    """
    program = step.program
    verify(step.plan, program)
    names = lives(step)
    assert program.loss is not None
    done = at(step, program.loss.operand.value, reads=False)[0]
    for v, value in enumerate(program.values):
        if value.kept:
            (write,) = at(step, v, reads=False)
            (buffer,) = names[value.name]
            assert buffer.lower <= write and buffer.upper >= max(at(step, v, reads=True), default=write)
        twin = value.copy_of
        if twin >= 0 and program.regions[value.region].on_device and at(step, v, reads=True):
            assert min(at(step, v, reads=False)) > done and min(buffer.lower for buffer in names[value.name]) > done
            first = at(step, twin, reads=True)  # behind the loss only by running statistics, which are no gradients
            assert all(program.actions[step.plan.steps[i].action].effect for i in first if i > done)
            before = [buffer for buffer in names.get(program.values[twin].name, []) if buffer.lower < done]
            assert all(buffer.upper <= max(first, default=buffer.upper) + 1 for buffer in before)


@pytest.mark.parametrize("chosen", few(CHOICES, (0, 2, 5, 8)), ids=str)
def test_no_bit_changes(chosen: dict[str, Any]) -> None:
    arguments = (network(), fp.losses.cross_entropy, fp.optim.Adam(1e-2))
    step = fp.compile(*arguments, fission="off", **chosen)
    plain = fp.compile(*arguments, remat="off", fission="off")
    check(step)
    same(step.bind(seed=4, poison=True), plain.bind(seed=4))
    same(step.bind(seed=4), Session(step.program, without_reuse(step.plan, step.program), seed=4))
    option = next(iter(chosen))
    assert any(note.startswith(f"{option} {chosen[option][0]!r}") for note in step.estimate()["notes"])


@pytest.mark.parametrize(
    ("model", "scope"), few([(GPT, "h.*"), (RESNET, "layer?.*"), (RESNET, "layer?"), (GPT, "h"), (GPT, "h.1")], (0, 1))
)
def test_recomputing_parts_and_nothing_else_is_what_segments_do(model: str, scope: str) -> None:
    """The planner for segments (`checkpoint`) shares no code with these values made again."""
    arguments = (fp.models.build(model), fp.losses.cross_entropy, NESTEROV)
    one, other = fp.compile(*arguments, recompute=[scope], remat="off"), fp.compile(*arguments, checkpoint=[scope])
    assert one.arena_bytes == other.arena_bytes
    assert one.estimate()["extra_flops_ratio"] == other.estimate()["extra_flops_ratio"] > 0
    # The planner may go on from there.
    assert fp.compile(*arguments, recompute=[scope]).arena_bytes <= one.arena_bytes


def test_bytes_of_a_chain() -> None:
    """Layers of one size, 64 KiB: what is recomputed or copied away is not there at the loss, where all is."""

    def model(x: fp.Tensor) -> fp.Tensor:
        for i in range(6):
            with fp.nn.scope(f"layer.{i}"):
                x = fp.nn.tanh(fp.nn.linear(x, 64, name="linear"))
        return x

    graph = fp.trace(model, fp.spec((256, 64)), name="chain")
    plain = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), remat="off")
    unit, parts = 256 * 64 * 4, [f"layer.{i}" for i in range(6)]
    assert all(lives(plain)[f"{part}/tanh/fused"][0].nbytes == unit for part in parts)
    for option in ("recompute", "to_host"):
        for count in (1, 2):
            step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), remat="off", **{option: parts[1 : 1 + count]})
            check(step)
            assert plain.arena_bytes - step.arena_bytes == count * unit, (option, count)
    away = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), remat="off", to_host=parts[:3])
    assert away.estimate()["host_bytes"] == 3 * unit
    # A budget that the planner meets by dropping one is not met if all of them are kept.
    budget = plain.arena_bytes - unit
    dropped = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), budget=budget, fission="off")
    assert dropped.arena_bytes <= budget
    with pytest.raises(DoesNotFitError) as refused:
        fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), budget=budget, keep=["layer"], fission="off")
    # At the peak five of the results are there; the gradient of the last has taken its bytes.
    assert "keeping less: what is kept by name holds 320.00 KiB there, and without it this" in str(refused.value)
    with pytest.raises(DoesNotFitError) as refused:
        fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), budget=64, keep=["layer"], fission="off")
    assert "keeping less" not in str(refused.value)


@settings(max_examples=pick(5, 12, 40), deadline=None)
@given(st.integers(0, 2**32))
@example(41041)  # nothing but the copy back reads the loss: the copy to the host could be planned after it
def test_random_networks(seed: int) -> None:
    """Layers that read any earlier ones, with names chosen at random for each option."""
    rng = random.Random(seed)
    graph = _drawn(rng)
    arguments = (graph, fp.losses.mean, fp.optim.Momentum(0.1))
    names = [f"part.{i}" for i in range(6)]
    chosen: dict[str, Any] = {}
    for option in ("keep", "recompute", "to_host"):
        if picked := [name for name in names if rng.random() < 0.3]:
            chosen[option] = picked
            names = [name for name in names if name not in picked]
    if rng.random() < 0.5:
        chosen["budget"] = rng.choice((0.7, 0.9, 1.2))
    try:
        step = fp.compile(*arguments, fission="off", **chosen)
    except UsageError as error:
        # The backward pass may read nothing of a part, and its operations may be fused into the next one.
        told = ("so it is dropped anyway", "it is stored", "nothing that the forward pass computes")
        assert any(each in str(error) for each in told)
        return
    except DoesNotFitError:
        return
    check(step)
    plain = fp.compile(*arguments, remat="off", fission="off")
    given_now = {"x": np.random.default_rng(seed).normal(size=(8, 4, 6, 6)).astype(np.float32)}
    one, other = step.bind(seed=1, poison=True), plain.bind(seed=1)
    for _ in range(2):
        assert one.step(given_now).loss == other.step(given_now).loss
    for name in one.stored:
        assert one.stored[name].tobytes() == other.stored[name].tobytes(), name


def _drawn(rng: random.Random) -> fp.Graph:
    def model(x: fp.Tensor) -> fp.Tensor:
        made = [fp.nn.conv(x, 6, 3, padding=1, name="stem")]
        for i in range(6):
            with fp.nn.scope(f"part.{i}"):
                made.append(_layer(rng, made))
        return sum(made[-2:], made[0])

    return fp.trace(model, fp.spec((8, 4, 6, 6)), name="drawn")


def _layer(rng: random.Random, made: Sequence[fp.Tensor]) -> fp.Tensor:
    x = rng.choice(made)
    kind = rng.randrange(5)
    if kind == 0:
        return fp.nn.relu(fp.nn.batch_norm(fp.nn.conv(x, 6, 3, padding=1, name="conv"), name="norm"))
    if kind == 1:
        return fp.nn.dropout(fp.nn.gelu(x), 0.2) + rng.choice(made)
    if kind == 2:
        return fp.nn.sigmoid(fp.nn.conv(x, 6, 1, name="conv")) * rng.choice(made)
    if kind == 3:
        return fp.nn.tanh(x + rng.choice(made))
    return fp.nn.relu(fp.nn.conv(np.concatenate([x, rng.choice(made)], axis=1), 6, 1, name="conv"))


def test_smaller_budgets_give_no_larger_plans() -> None:
    arguments = (fp.models.build(GPT), fp.losses.cross_entropy, NESTEROV)
    before = None
    for share in pick((0.95,), (0.98, 0.94), (1.0, 0.98, 0.95, 0.92)):
        step = fp.compile(*arguments, keep=["h.1"], recompute=["h.*.mlp"], budget=share)
        check(step)
        assert before is None or step.arena_bytes <= before
        before = step.arena_bytes


def test_the_more_exact_name_counts() -> None:
    arguments = (network(), fp.losses.cross_entropy)
    step = fp.compile(*arguments, recompute=["block"], keep=["block.1"])
    again = {step.program.actions[i].name.split("/")[0] for i in step.program.repeats}
    assert again and all(name.startswith(("block.0", "block.2")) for name in again)
    kept = {value.name[:7] for value in step.program.values if value.kept}
    assert kept == {"block.1"}


@pytest.mark.parametrize("target", ["cpu", "cuda:h100"])
def test_on_other_targets(target: str) -> None:
    arguments = (fp.models.build(GPT), fp.losses.cross_entropy, NESTEROV)
    step = fp.compile(*arguments, target=target, keep=["h.0"], recompute=["h.*.mlp"], to_host=["h.2.attn"])
    check(step)
    assert step.estimate()["host_bytes"] > 0 and step.program.repeats


@pytest.mark.parametrize("split", [(), {"h.*.mlp": 2}])
def test_a_plan_file_keeps_them(tmp_path: Any, split: Any) -> None:
    arguments = (fp.models.build(GPT), fp.losses.cross_entropy, NESTEROV)
    step = fp.compile(*arguments, keep=["h.0"], recompute=["h.*.mlp"], to_host=["h.2.attn"], split=split)
    step.save(tmp_path / "a.plan")
    loaded = fp.load_plan(tmp_path / "a.plan")
    assert loaded.program.digest == step.program.digest and loaded.options.to_json() == step.options.to_json()
    assert loaded.estimate()["extra_flops_ratio"] == step.estimate()["extra_flops_ratio"] > 0
    foreplan("verify", tmp_path / "a.plan")


def test_every_command_takes_them(tmp_path: Any) -> None:
    figures = answer("estimate", GPT, *NAMED)
    assert figures["host_bytes"] > 0 and figures["extra_flops_ratio"] > 0
    assert sum(note.startswith(("keep 'h.0': ", "recompute 'h.*.mlp': ")) for note in figures["notes"]) == 2
    plan = tmp_path / "a.plan"
    foreplan("plan", GPT, *NAMED, "-o", plan)
    assert "decided on --keep" in foreplan("view", plan, *NAMED, code=2).stderr


def test_commands_that_search_take_them() -> None:
    model, named = "mlp:width=16,layers=3,batch=32,inputs=8,classes=3", ("--keep", "relu.2", "--recompute", "relu.1")
    figures = answer("estimate", model, *named, "--fission", "off")
    points = answer("pareto", model, *named, "--fission", "off")["points"]
    assert min(point["extra_flops_ratio"] for point in points) > 0
    more = ("--memory", figures["arena_bytes"], "--batch", 32, "--fission", "off")
    assert answer("fit", model, *more, *named)["batch"] >= 32


@pytest.mark.thorough
def test_all_commands_take_them() -> None:
    figures = answer("estimate", GPT, *NAMED)
    points = answer("pareto", GPT, *NAMED)["points"]
    assert min(point["extra_flops_ratio"] for point in points) > 0
    found = answer("fit", GPT, "--memory", figures["arena_bytes"], "--batch", 2, *NAMED)
    assert found["batch"] >= 2
    assert "What the planner has done" in foreplan("explain", GPT, *NAMED).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keep", "hiden0"), "keep: nothing that the forward pass computes is in 'hiden0'; there are 'hidden0'"),
        (
            ("--recompute", "x"),
            "'x' cannot be recomputed: it is an input, which is there from the start",
        ),
        (("--to-host", "hidden0.weight"), "cannot be copied to the host: it is stored, and there from step to step"),
        (("--recompute", "out/matmul"), "the backward pass does not read it, so it is dropped anyway"),
        (("--keep", "hidden0", "--recompute", "hidden0"), "keep and recompute both mean"),
        (("--keep", "hidden?", "--to-host", "hidden*"), "which are equally exact: give one of them more of the name"),
        (("--keep", "hidden0", "--checkpoint", "hidden1"), "checkpoint says all that is recomputed"),
        (("--recompute", "hidden0", "--infer"), "this is inference"),
        (("--keep", ""), "keep: nothing that the forward pass computes is in ''"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], message: str) -> None:
    said = " ".join(foreplan("estimate", MODEL, *arguments, code=2).stderr.split())
    assert message in said


def test_wrong_use_in_python() -> None:
    graph = fp.models.build(MODEL)
    with pytest.raises(UsageError, match=r"keep=\['hidden0'\]"):
        fp.compile(graph, fp.losses.cross_entropy, keep="hidden0")
    with pytest.raises(UsageError, match="recompute takes a list of names"):
        fp.compile(graph, fp.losses.cross_entropy, recompute=[3])


def test_the_name_of_a_plan_on_disk_depends_on_them() -> None:
    arguments = (network(), fp.losses.cross_entropy)
    digests = [fp.compile(*arguments, **chosen).program.digest for chosen in (*CHOICES[:5], {}, {"keep": ["block"]})]
    assert Counter(digests).most_common(1)[0][1] == 1
