"""Checkpoints: the same bytes every time, and what may be read into what."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import foreplan as fp
from foreplan.graph import Graph
from foreplan.runtime.tensor_files import Entry


def model(dropout: float = 0.0) -> Graph:
    def network(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        x = fp.nn.relu(fp.nn.batch_norm(fp.nn.linear(x, 5, name="hidden"), name="norm"))
        return fp.nn.linear(fp.nn.dropout(x, dropout) if dropout else x, 3, name="head")

    return fp.trace(network, fp.spec((4, 6)), name="model")


def session(optimizer: object = None, dropout: float = 0.0, seed: int = 0) -> fp.runtime.session.Session:
    return fp.compile(model(dropout), loss=fp.losses.cross_entropy, optimizer=optimizer).bind(seed=seed)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(4, 6)).astype(np.float32), "target": rng.integers(0, 3, 4)}


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    trained = session(fp.optim.Adam())
    trained.step(batch())
    written = set()
    for _ in range(20):
        trained.save(tmp_path / "c.safetensors")
        written.add((tmp_path / "c.safetensors").read_bytes())
    assert len(written) == 1


def test_parameters_start_any_optimizer_and_its_state_only_its_own(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    trained = session(fp.optim.Nesterov(0.1))
    trained.step(batch())
    trained.save(path)
    for optimizer in (fp.optim.Adam(), fp.optim.SGD(0.1)):
        other = session(optimizer, seed=1)
        before = dict(other.stored)
        with pytest.raises(fp.SessionError, match="state of another optimizer"):
            other.load(path)
        assert all((before[name] == other.stored[name]).all() for name in before)
        other.load(path, state=False)
        for name in trained.parameters:
            np.testing.assert_array_equal(trained.parameters[name], other.parameters[name])
        assert other.steps_done == 0
        other.step(batch())


def test_weights_bring_no_state_with_them(tmp_path: Path) -> None:
    trained = session(fp.optim.Nesterov(0.1))
    trained.step(batch())
    trained.save(tmp_path / "c.safetensors")
    step = fp.compile(model(), loss=fp.losses.cross_entropy, optimizer=fp.optim.Nesterov(0.1))
    fresh = step.bind(weights=tmp_path / "c.safetensors")
    assert fresh.steps_done == 0 and not fresh.stored["head.weight/velocity"].any()
    np.testing.assert_array_equal(fresh.stored["norm.running_mean"], trained.stored["norm.running_mean"])


def test_a_program_without_an_optimizer_reads_what_it_keeps(tmp_path: Path) -> None:
    trained = session(fp.optim.Nesterov(0.1), dropout=0.5)
    trained.step(batch())
    trained.save(tmp_path / "c.safetensors")
    gradients = session(dropout=0.5, seed=1)
    gradients.load(tmp_path / "c.safetensors")
    np.testing.assert_array_equal(gradients.stored["random_state"], trained.stored["random_state"])


def test_files_of_other_tools_are_read(tmp_path: Path) -> None:
    source, target = session(seed=1), session(fp.optim.Adam(), seed=2)
    save_file(dict(source.stored), tmp_path / "plain.safetensors", {"format": "pt", "made": "elsewhere"})
    target.load(tmp_path / "plain.safetensors")
    np.testing.assert_array_equal(source.parameters["head.weight"], target.parameters["head.weight"])
    source.save(tmp_path / "ours.safetensors")
    assert set(load_file(tmp_path / "ours.safetensors")) == set(source.stored)


DEEP = '{"state":' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("metadata", ["[]", "{", '{"state": 3}', '{"state": [1, null]}', "null", DEEP])
def test_damaged_metadata_are_refused_or_passed_over(tmp_path: Path, metadata: str) -> None:
    source = session(fp.optim.Nesterov(0.1))
    save_file(dict(source.stored), tmp_path / "c.safetensors", {"foreplan": metadata})
    try:
        session(fp.optim.Nesterov(0.1)).load(tmp_path / "c.safetensors")
    except fp.SessionError as error:
        assert metadata in ("{", DEEP) and "not a checkpoint" in str(error)


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(fp.SessionError, match="directory"):
        session().load(tmp_path)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(fp.SessionError, match="not a checkpoint"):
        session().load(tmp_path / "text")
    for seed in (-1, 1 << 63):
        with pytest.raises(fp.UsageError, match="a seed"):
            session(seed=seed)


def test_a_model_may_use_the_optimizers_names(tmp_path: Path) -> None:
    def network(x: fp.frontend.Tensor, learning_rate: fp.frontend.Tensor) -> fp.frontend.Tensor:
        return fp.nn.linear(x * learning_rate, 3) + fp.nn.parameter("step", (3,))

    graph = fp.trace(network, fp.spec((4, 6)), fp.spec((4, 6)))
    step = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Adam())
    trained, resumed = step.bind(), step.bind(seed=1)
    inputs = {**batch(), "learning_rate": np.ones((4, 6), np.float32)}
    for _ in range(3):
        trained.step(inputs)
    trained.save(tmp_path / "c.safetensors")
    resumed.load(tmp_path / "c.safetensors")
    assert trained.steps_done == resumed.steps_done == 3
    assert trained.step(inputs).loss == resumed.step(inputs).loss


@pytest.mark.parametrize("name", ["__metadata__", "__metadata__.", "__metadata__.."])
def test_a_parameter_may_have_the_name_that_the_format_keeps(tmp_path: Path, name: str) -> None:
    def network(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        other = fp.nn.parameter(f"{name}.", (3, 1), 2.0)
        return x @ fp.nn.parameter(name, (6, 3), fp.frontend.nn.uniform_fan_in(6)) @ other @ other.T

    graph = fp.trace(network, fp.spec((4, 6)))
    compiled = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Adam())
    trained = compiled.bind()
    trained.step(batch())
    trained.save(tmp_path / "c.safetensors")
    again = compiled.bind(seed=1)
    again.load(tmp_path / "c.safetensors")
    for kept in trained.stored:
        np.testing.assert_array_equal(again.stored[kept], trained.stored[kept])
    assert again.step(batch()).loss == trained.step(batch()).loss


def test_what_has_no_elements_is_kept(tmp_path: Path) -> None:
    def network(x: fp.frontend.Tensor) -> fp.frontend.Tensor:
        return fp.nn.linear(fp.nn.linear(x, 0, name="none"), 3, name="head")

    graph = fp.trace(network, fp.spec((4, 6)))
    compiled = fp.compile(graph, loss=fp.losses.cross_entropy, optimizer=fp.optim.Adam())
    trained = compiled.bind()
    trained.step(batch())
    trained.save(tmp_path / "c.safetensors")
    assert load_file(tmp_path / "c.safetensors")["none.weight"].shape == (0, 6)
    again = compiled.bind(seed=1)
    again.load(tmp_path / "c.safetensors")
    assert again.step(batch()).loss == trained.step(batch()).loss


def test_parameters_alone_do_not_mend_a_session(tmp_path: Path) -> None:
    damaged = session(fp.optim.Nesterov(0.1))
    damaged.save(tmp_path / "c.safetensors")
    damaged._broken = "KeyboardInterrupt"
    damaged.load(tmp_path / "c.safetensors", state=False)
    with pytest.raises(fp.SessionError, match="interrupted"):
        damaged.step(batch())
    damaged.load(tmp_path / "c.safetensors")
    damaged.step(batch())


def test_a_load_takes_little_memory_beside_the_arena(tmp_path: Path) -> None:
    step = fp.compile(fp.models.mlp(batch=1, width=2048, layers=3))  # weights of 16 MiB, and more
    saved, other = step.bind(seed=1), step.bind(seed=2)
    saved.save(tmp_path / "w.safetensors")
    other.load(tmp_path / "w.safetensors")  # what is imported for it counts once
    tracemalloc.start()
    other.load(tmp_path / "w.safetensors")
    beside = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert beside < 4 << 20 < max(array.nbytes for array in other.parameters.values())
    for name, array in saved.parameters.items():
        np.testing.assert_array_equal(other.parameters[name], array)


def test_a_load_that_is_interrupted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = session(fp.optim.Adam())
    trained.save(tmp_path / "w.safetensors")
    read = Entry.read
    seen = []

    def interrupted(entry: Entry, out: np.ndarray, transposed: bool) -> None:
        seen.append(out)
        if len(seen) > 1:
            raise KeyboardInterrupt
        read(entry, out, transposed)

    monkeypatch.setattr(Entry, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained.load(tmp_path / "w.safetensors")
    monkeypatch.undo()
    for use in (lambda: trained.step(batch()), lambda: trained.save(tmp_path / "again")):
        with pytest.raises(fp.SessionError, match="a load was interrupted"):
            use()
    trained.load(tmp_path / "w.safetensors")
    trained.step(batch())
