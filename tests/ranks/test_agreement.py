"""What ranks do otherwise than one another is an error on all of them, which names each rank and what it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp
from foreplan.runtime.world.agreement import agree, together
from tests.ranks.differences import MODEL, batch_for, errors_of, stages_of, step_of
from tests.ranks.threads import Thread, run


def said_by_all(errors: list[str], *texts: str) -> None:
    """Check that all ranks say the same, and what."""
    assert len(set(errors)) == 1, errors
    assert all(text in errors[0] for text in texts), errors[0]


def test_facts_that_are_the_same_pass() -> None:
    run(3, lambda world: agree(world, "facts", {"a": 1, "b": "x", "c": None if world.rank else 2}))


@pytest.mark.parametrize("odd", range(3))
def test_a_difference_names_the_rank_and_both_values(odd: int) -> None:
    errors = errors_of(3, lambda world: agree(world, "the options", {"--lr": 0.1 + (world.rank == odd), "--steps": 5}))
    others = " and ".join(str(rank) for rank in range(3) if rank != odd)
    said_by_all(errors, "ranks differ in the options", f"1.1 on rank {odd}")
    assert "--steps" not in errors[0] and f"0.1 on ranks {others.replace(' and ', ', ')}" in errors[0]


def test_many_differences_are_counted() -> None:
    errors = errors_of(2, lambda world: agree(world, "the options", {f"o{i}": world.rank for i in range(40)}))
    said_by_all(errors, "o5 is 0 on rank 0, and 1 on rank 1; and 34 further ones")


def test_a_fact_that_one_rank_lacks() -> None:
    errors = errors_of(2, lambda world: agree(world, "the options", {"--resume": "a file"} if world.rank else {}))
    said_by_all(errors, "--resume is nothing on rank 0, and a file on rank 1")


def test_where_one_fails_all_fail() -> None:
    def job(world: Thread) -> None:
        with together(world, "a load"):
            if world.rank == 1:
                raise fp.UsageError("it cannot be read")

    assert errors_of(3, job) == [
        "rank 1 failed: it cannot be read",
        "it cannot be read",
        "rank 1 failed: it cannot be read",
    ]


def test_calls_in_another_order_are_told_apart() -> None:
    errors = errors_of(2, lambda world: world.gather(1, f"call {world.rank}"))
    said_by_all(errors, "rank 0 has come to call 0, and rank 1 to call 1")


@pytest.mark.parametrize("change", ["seed", "model", "learning rate", "version"])
def test_steps_that_are_bound(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By seed, by digest, and by the versions of what runs them."""
    steps = [step_of(2), step_of(2)]
    seeds = [0, 0]
    if change == "seed":
        seeds[1] = 7
    elif change == "learning rate":
        steps[1] = step_of(2, lr=0.2)
    elif change == "model":
        steps[1] = replace(steps[1], program=replace(steps[1].program, model="another"))
    else:
        from foreplan.runtime.world import same_step

        versions = iter([{"numpy": "2.0"}, {"numpy": "2.4"}])
        monkeypatch.setattr(same_step, "versions_here", lambda: next(versions))
    errors = errors_of(2, lambda world: steps[world.rank].bind(seed=seeds[world.rank]))
    said = {"seed": "the seed is 0 on rank 0, and 7 on rank 1", "version": "the version of numpy is 2."}
    said["learning rate"] = "the default of 'learning_rate' is fill(0.1) on rank 0, and fill(0.2) on rank 1"
    said_by_all(errors, "ranks differ in the step that they bind", said.get(change, "the step is "))


def test_weights_of_a_model_file_that_is_another_on_one_rank(tmp_path: Path) -> None:
    """The graph is the same, and only the file's weights differ."""
    rng = np.random.default_rng(0)
    for rank in range(2):
        net = lambda x: fp.nn.linear(x, 3, name="out")  # noqa: E731
        session = fp.compile(fp.trace(net, fp.spec((4, 5))), target="numpy").bind()
        session.parameters["out.weight"] = rng.standard_normal(session.parameters["out.weight"].shape, np.float32)
        session.to_onnx(tmp_path / f"{rank}.onnx", "graph")

    def job(world: Thread) -> None:
        model = fp.from_onnx(tmp_path / f"{world.rank}.onnx")
        fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy", ranks=2).bind()

    errors = errors_of(2, job)
    assert len(set(errors)) == 1 and "out.weight" in errors[0], errors[0]


WEIGHT = "hidden0.weight"
SHARDS = ("none", "state", "parameters")


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("change", ["steps", "content", "lacking", "damaged"])
def test_checkpoints(tmp_path: Path, shard: str, change: str) -> None:
    """Of other steps, of the same step with other content, or none: whatever each rank keeps of them."""
    step, paths = step_of(2, shard=shard), [tmp_path / f"{rank}.safetensors" for rank in range(2)]

    def write(world: Thread) -> None:
        session, batch = step.bind(), batch_for(step, world.rank)
        for path, steps in zip(paths, (1, 1 + (change == "steps"))):
            for _ in range(steps - session.steps_done):
                session.step(batch)
            if change == "content" and path is paths[1]:
                session.parameters[WEIGHT] = session.parameters[WEIGHT] * 2
            session.save(path)

    run(2, write)
    if change == "lacking":
        paths[1].unlink()
    elif change == "damaged":
        paths[1].write_bytes(paths[1].read_bytes()[:-100])

    def read(world: Thread) -> None:
        session = step.bind()
        try:
            session.load(paths[world.rank])
        finally:
            if world.rank == 0:  # whose file is whole, and read
                with pytest.raises(fp.SessionError, match="interrupted"):
                    session.step(batch_for(step))

    errors = errors_of(2, read)
    if change in ("lacking", "damaged"):
        assert errors[0] == f"rank 1 failed: {errors[1]}" and "1.safetensors" in errors[1]
    else:
        said = {
            "steps": "the number of steps is 1 on rank 0, and 2 on rank 1",
            "content": f"the checksum of {WEIGHT!r} is ",
        }
        said_by_all(errors, said[change])


HALVES = {"decay": {"accumulate": 2}, "micro-batches": {"accumulate": 4}}


@pytest.mark.parametrize("change", HALVES)
def test_the_update_behind_micro_batches(change: str) -> None:
    """The body that runs for each is the same on both."""
    model, loss = fp.models.build(MODEL), fp.losses.cross_entropy

    def job(world: Thread) -> None:
        options: Any = {"accumulate": 2} | (HALVES[change] if world.rank else {})
        optimizer = fp.optim.AdamW(0.1, weight_decay=0.2 if world.rank and change == "decay" else 0.1)
        fp.compile(model, loss, optimizer, target="numpy", ranks=2, **options).bind()

    said = {"decay": "the update is ", "micro-batches": "the number of micro-batches is 2 on rank 0, and 4 on rank 1"}
    said_by_all(errors_of(2, job), said[change])


KINDS: dict[str, Any] = {
    "all alike": lambda: [step_of(2)] * 2,
    "parameters in parts": lambda: [step_of(2, shard="parameters")] * 2,
    "micro-batches": lambda: [step_of(2, accumulate=2)] * 2,
    "stages": lambda: stages_of(2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["learning_rate", "steps"])
def test_what_a_step_takes(name: str, kind: str) -> None:
    """A rate that one rank gives otherwise, or steps that one rank has taken already."""
    steps = KINDS[kind]()

    def job(world: Thread) -> None:
        step = steps[world.rank]
        session, batch = step.bind(), batch_for(step, world.rank, step.accumulate)
        session.step(batch)
        session.step({**batch, "learning_rate": 0.1})  # as it is by default
        if name == "steps":
            session._notes.steps += world.rank
            session.step(batch)
        session.step({**batch, "learning_rate": 0.1 * (1 + world.rank)})

    said = {
        "learning_rate": "the input 'learning_rate' is 0.1 on rank 0, and 0.2 on rank 1",
        "steps": "the number of steps that it has begun is 3 on rank 0, and 4 on rank 1",
    }
    said_by_all(errors_of(2, job), said[name])


def test_inference_compares_no_steps() -> None:
    """Each rank may infer by itself, as often as it likes."""
    step = fp.compile(fp.models.build(MODEL), target="numpy", ranks=2)

    def job(world: Thread) -> int:
        session, batch = step.bind(), {"x": np.zeros((2, 784), np.float32)}
        return len([session.step(batch) for _ in range(world.rank)])

    assert run(2, job) == [0, 1]


def test_a_session_refuses_after_a_step_that_differed() -> None:
    step = step_of(2)

    def job(world: Thread) -> None:
        session, batch = step.bind(), batch_for(step)
        with pytest.raises(fp.SessionError, match="learning_rate"):
            session.step({**batch, "learning_rate": 0.1 + world.rank})
        session.save("nowhere")

    errors = errors_of(2, job)
    assert all("interrupted" in error for error in errors), errors


def test_samples_of_a_group() -> None:
    """Ranks that compute parts of one model take the same."""
    text = "gpt2_small:layers=1,width=24,heads=2,seq=4,vocabulary=38,batch=2"
    model: Any = fp.models.build(text)
    step = fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy", ranks=4, tensor=2)
    assert step.program.tensor == 2

    def job(world: Thread) -> None:
        session = step.bind()
        session.step(batch_for(step, world.rank // 2))
        session.step(batch_for(step, world.rank // 2 + 5 * (world.rank == 3)))

    said_by_all(errors_of(4, job), "the sum over its samples is", "on rank 2, and", "on rank 3", "same samples")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_assigned(kind: str) -> None:
    """Other content on one rank, or an assignment on one alone; the same on all passes."""
    steps = KINDS[kind]()
    if kind == "stages":
        steps = [step_of(4, stages=2, stage=rank // 2, accumulate=2) for rank in range(4)]
    ranks = len(steps)

    def job(world: Thread, by: int, alone: bool) -> None:
        step = steps[world.rank]
        session, batch = step.bind(), batch_for(step, world.rank, step.accumulate)
        weight = next(iter(session.parameters), "")  # the last stage has none
        held = session.parameters[weight] if weight else 0
        for times in (2, 3):
            if weight and not (times == 3 and alone and world.rank == 0):
                session.parameters[weight] = held * (times + by * (world.rank == 1))
            session.step(batch)

    run(ranks, lambda world: job(world, 0, False))
    for by, alone in ((1, False), (0, True)):
        if not alone or kind != "parameters in parts":
            errors = errors_of(ranks, lambda world, by=by, alone=alone: job(world, by, alone))
            said_by_all(errors, "ranks differ in what they give to a step: the checksum of what was assigned to ")


def test_running_statistics_may_be_assigned_on_each_rank() -> None:
    """As validation does, which takes those of the first rank meanwhile."""

    def net(x: Any) -> Any:
        return fp.nn.linear(fp.nn.batch_norm(x, name="norm"), 10, name="out")

    model = fp.trace(net, fp.spec((4, 5)))
    step = fp.compile(model, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy", ranks=2)

    def job(world: Thread) -> None:
        session = step.bind()
        name = next(slot.name for slot in step.program.tensors if slot.kind is fp.graph.Kind.BUFFER)
        session.stored[name] = session.stored[name] + world.rank
        session.step(batch_for(step))

    run(2, job)


def test_what_one_rank_passes_over_in_a_checkpoint(tmp_path: Path) -> None:
    step, path = step_of(2), tmp_path / "w"

    def job(world: Thread) -> None:
        session = step.bind()
        session.save(path)
        session.load(path, skip=[WEIGHT] * world.rank)

    said = f"ranks differ in what they have loaded: the checksum of {WEIGHT!r} is "
    said_by_all(errors_of(2, job), said, " on rank 0, and nothing on rank 1")
