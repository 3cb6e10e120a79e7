"""Adapters in PEFT's files: written, read back, and refused with a reason. `tests/torch/test_lora.py` reads them with
PEFT itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import foreplan as fp
from foreplan.runtime.session import Session

PREFIX = "base_model.model."
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def net(ids: fp.Tensor) -> fp.Tensor:
    with fp.nn.scope("h"):
        y = np.tanh(fp.nn.linear(fp.nn.embedding(ids, 7, 4, name="table"), 6, name="up"))
        y = np.tanh(y @ fp.nn.parameter("down.weight", (6, 5), fp.graph.Normal(0.5)))
    return fp.nn.linear(y, 3, name="head")


def session_of(
    rank: int = 2,
    alpha: float = 6,
    seed: int = 0,
    targets: tuple[str, ...] = ("h",),
    dora: bool = False,
    **more: Any,
) -> Session:
    graph = fp.lora(fp.trace(net, fp.spec(5, "int64")), rank, alpha, targets, dora=dora)
    return fp.compile(graph, fp.losses.cross_entropy, fp.optim.Momentum(0.3), **more).bind(seed=seed)


def trained(session: Session, steps: int = 3) -> Session:
    for i in range(steps):
        session.step({"ids": np.arange(i, i + 5) % 7, "target": np.arange(i, i + 5) % 3})
    return session


def adapters(session: Session) -> dict[str, np.ndarray]:
    return {name: array for name, array in session.parameters.items() if ".lora_" in name}


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **values}))


def test_what_is_written_is_in_pefts_names_and_comes_back(tmp_path: Path) -> None:
    session = trained(session_of())
    session.save_adapters(tmp_path / "a" / "b")
    tensors = load_file(tmp_path / "a" / "b" / FILE)
    assert tensors.keys() == {PREFIX + name for name in adapters(session)}
    assert {PREFIX + f"h.{name}" for name in ("table.lora_embedding_A", "up.lora_A.weight")} < tensors.keys()
    config = json.loads((tmp_path / "a" / "b" / CONFIG).read_text())
    assert config["target_modules"] == ["h.down", "h.table", "h.up"] and (config["r"], config["lora_alpha"]) == (2, 6)
    assert config["peft_type"] == "LORA" and config["modules_to_save"] is None and config["rank_pattern"] == {}
    other = trained(session_of(seed=1), 1)
    state = {name: array for name, array in other.stored.items() if "/velocity" in name}
    other.load_adapters(tmp_path / "a" / "b")
    for name, array in adapters(session).items():
        np.testing.assert_array_equal(other.parameters[name], array)
    assert state and all((other.stored[name] == array).all() for name, array in state.items())


def test_a_head_that_is_trained_is_saved_whole_as_a_module(tmp_path: Path) -> None:
    session = trained(session_of(train=["head.weight"]))
    session.save_adapters(tmp_path)
    tensors = load_file(tmp_path / FILE)
    assert {PREFIX + "head.weight", PREFIX + "head.bias"} == {name for name in tensors if ".lora_" not in name}
    assert json.loads((tmp_path / CONFIG).read_text())["modules_to_save"] == ["head"]
    other = session_of(seed=2)
    other.load_adapters(tmp_path)
    np.testing.assert_array_equal(other.parameters["head.weight"], session.parameters["head.weight"])


def test_each_adapters_own_rank_and_alpha_are_written_and_asked_for(tmp_path: Path) -> None:
    def bound(alpha: float) -> Session:
        graph = fp.lora(fp.trace(net, fp.spec(5, "int64")), 2, 6, ["h.up", "h.table"])
        graph = fp.lora(graph, 3, alpha, ["h.down"])
        return fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.3)).bind()

    session = bound(4.5)
    session.save_adapters(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 6)
    assert config["rank_pattern"] == {r"^h\.down": 3} and config["alpha_pattern"] == {r"^h\.down": 4.5}
    session.load_adapters(tmp_path)
    with pytest.raises(fp.SessionError, match=r"add 1\.5 times their product, and this model's 2 times"):
        bound(6).load_adapters(tmp_path)


@pytest.mark.parametrize(
    ("values", "alpha"),
    [({"use_rslora": True, "lora_alpha": 3 * 2**0.5}, 6), ({"alpha_pattern": {"h.down": 6, "up": 6, "table": 6}}, 6)],
)
def test_configurations_that_peft_reads_so_are_read_so(values: dict[str, Any], alpha: float, tmp_path: Path) -> None:
    session = session_of(alpha=alpha)
    session.save_adapters(tmp_path)
    change(tmp_path, **({"lora_alpha": 1} | values))
    session.load_adapters(tmp_path)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floating_point_types_are_converted(dtype: type, tmp_path: Path) -> None:
    session = trained(session_of())
    session.save_adapters(tmp_path)
    tensors = {name: array.astype(dtype) for name, array in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    session.load_adapters(tmp_path)
    for name, array in tensors.items():
        np.testing.assert_array_equal(session.parameters[name.removeprefix(PREFIX)], array.astype(np.float32))


def drop(folder: Path, ending: str) -> None:
    tensors = load_file(folder / FILE)
    save_file({name: array for name, array in tensors.items() if not name.endswith(ending)}, folder / FILE)


def add(folder: Path) -> None:
    save_file({**load_file(folder / FILE), PREFIX + "x.lora_A.weight": np.zeros((2, 3), np.float32)}, folder / FILE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "cannot be read: No such file"),
        (lambda folder: (folder / FILE).unlink(), "there is no checkpoint"),
        (lambda folder: (folder / CONFIG).write_text("{"), "is not JSON"),
        (lambda folder: (folder / CONFIG).write_bytes(b"\xff\xfe"), "is not JSON"),
        (lambda folder: (folder / CONFIG).write_text("[" * 100_000), "is not JSON"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "does not describe LoRA"),
        (lambda folder: change(folder, peft_type="IA3"), "does not describe LoRA"),
        (lambda folder: change(folder, use_dora=True), "use_dora = True, and this model's 'h.table' has not"),
        (lambda folder: change(folder, lora_bias=True), "has lora_bias, which foreplan"),
        (lambda folder: change(folder, lora_alpha=7), "add 3.5 times their product, and this model's 3 times"),
        (lambda folder: change(folder, lora_alpha="7"), "no number as lora_alpha"),
        (lambda folder: change(folder, lora_alpha=None), "no number as lora_alpha"),
        (lambda folder: change(folder, lora_alpha=10**400), "no number as lora_alpha"),
        (lambda folder: change(folder, lora_alpha=float("nan")), "no number as lora_alpha"),
        (lambda folder: change(folder, lora_alpha=True), "no number as lora_alpha"),
        (lambda folder: change(folder, alpha_pattern={"x": -(10**400)}), "no number as alpha_pattern"),
        (lambda folder: change(folder, alpha_pattern=[1]), "alpha_pattern that is no table"),
        (lambda folder: change(folder, r=-1), "no whole number above 0 as r"),
        (lambda folder: change(folder, r=10**30), "no whole number above 0 as r"),
        (lambda folder: change(folder, r=3), "have rank 3 in 'h.table', and this model 2"),
        (lambda folder: change(folder, rank_pattern={"up": 4}), "have rank 4 in 'h.up', and this model 2"),
        (lambda folder: change(folder, rank_pattern={"up": 2.0}), "no whole number above 0 as rank_pattern"),
        (lambda folder: change(folder, use_dora={"a": 1}), "use_dora that is neither true nor false"),
        (lambda folder: ((folder / CONFIG).unlink(), os.mkfifo(folder / CONFIG)), "is no regular file"),
        (lambda folder: os.truncate(folder / CONFIG, 17 << 20), "more than 16"),
        (lambda folder: drop(folder, "up.lora_B.weight"), "of other adapters than .* it lacks 'base_model.model.h.up"),
        (add, "of other adapters than .* it has 'base_model.model.x.lora"),
        (lambda folder: (folder / FILE).write_bytes(b"12345678"), "is not a checkpoint that can be read"),
    ],
)
def test_damaged_files_are_refused_and_change_nothing(
    damage: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    trained(session_of()).save_adapters(tmp_path)
    damage(tmp_path)
    session = session_of(seed=3)
    before = dict(session.stored)
    with pytest.raises(fp.SessionError, match=message):
        session.load_adapters(tmp_path)
    assert all((session.stored[name] == array).all() for name, array in before.items())
    trained(session, 1)


def test_adapters_of_another_rank_are_refused(tmp_path: Path) -> None:
    session_of(rank=2, alpha=6).save_adapters(tmp_path)
    change(tmp_path, lora_alpha=9, r=3)  # the strength is right for rank 3
    with pytest.raises(fp.SessionError, match=r"its .* is float32\[2,.* and not float32\[3,.* their rank"):
        session_of(rank=3, alpha=9).load_adapters(tmp_path)


def test_magnitudes_are_written_and_come_back_and_are_asked_for(tmp_path: Path) -> None:
    session = trained(session_of(dora=True))
    session.save_adapters(tmp_path)
    names = {f"h.{module}.lora_magnitude_vector" for module in ("table", "up", "down")}
    tensors = load_file(tmp_path / FILE)
    assert {PREFIX + name for name in names} == {name for name in tensors if "magnitude" in name}
    assert json.loads((tmp_path / CONFIG).read_text())["use_dora"] is True
    other = session_of(seed=1, dora=True)
    other.load_adapters(tmp_path)
    for name, array in adapters(session).items():
        np.testing.assert_array_equal(other.parameters[name], array)
    with pytest.raises(fp.SessionError, match=r"use_dora = True, and this model's 'h.table' has not: .* same dora"):
        session_of().load_adapters(tmp_path)
    drop(tmp_path, "up.lora_magnitude_vector")
    with pytest.raises(fp.SessionError, match=r"it lacks 'base_model\.model\.h\.up\.lora_magnitude_vector'"):
        other.load_adapters(tmp_path)


def test_adapters_with_magnitudes_and_without_have_no_common_file(tmp_path: Path) -> None:
    graph = fp.lora(fp.trace(net, fp.spec(5, "int64")), 2, 6, ["h.up"], dora=True)
    session = fp.compile(fp.lora(graph, 2, 6, ["h.down"]), fp.losses.cross_entropy, fp.optim.SGD(0.1)).bind()
    with pytest.raises(fp.SessionError, match=r"with magnitudes .* and without"):
        session.save_adapters(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    trained(session).save(tmp_path / "whole.safetensors")
    session.load(tmp_path / "whole.safetensors")


def norms(session: Session, module: str) -> np.ndarray:
    return np.linalg.norm(session.stored[f"{module}.weight"], axis=0 if module in ("h.table", "h.down") else 1)


MODULES = ("h.table", "h.up", "h.down")


def test_first_magnitudes_are_the_norms_of_what_is_drawn_loaded_or_assigned(tmp_path: Path) -> None:
    base = fp.compile(fp.trace(net, fp.spec(5, "int64"))).bind(seed=6)
    base.save(tmp_path / "base.safetensors")
    session = session_of(seed=7, dora=True)

    def check() -> None:
        for module in MODULES:
            magnitude = session.parameters[f"{module}.lora_magnitude_vector"]
            np.testing.assert_allclose(magnitude, norms(session, module), rtol=1e-6)

    check()
    first = session.parameters["h.up.lora_magnitude_vector"]
    loaded = session.load(tmp_path / "base.safetensors", strict=False)
    assert "h.up.lora_magnitude_vector" in loaded.missing
    check()
    assert (session.parameters["h.up.lora_magnitude_vector"] != first).any()
    ids = {"ids": np.arange(5)}
    found = fp.compile(fp.lora(fp.trace(net, fp.spec(5, "int64")), 2, 6, ["h"], dora=True)).bind(share=session)
    wanted = base.step(ids).outputs["output"]
    np.testing.assert_allclose(found.step(ids).outputs["output"], wanted, rtol=1e-5, atol=1e-6)
    session.stored["h.down.weight"] = session.stored["h.down.weight"] * 3
    session.parameters["h.up.weight"] = session.stored["h.up.weight"] * 2
    check()


def test_magnitudes_that_were_trained_or_loaded_stay_when_weights_are_read(tmp_path: Path) -> None:
    base = fp.compile(fp.trace(net, fp.spec(5, "int64"))).bind(seed=6)
    base.save(tmp_path / "base.safetensors")
    source = session_of(seed=6, dora=True)
    trained(source).save_adapters(tmp_path / "adapters")
    session = session_of(seed=7, dora=True)
    session.load_adapters(tmp_path / "adapters")  # before the weights that they belong to
    session.load(tmp_path / "base.safetensors", strict=False)
    for name, array in source.parameters.items():
        np.testing.assert_array_equal(session.parameters[name], array, err_msg=name)
    session.stored["h.up.weight"] = source.stored["h.up.weight"] * 2
    np.testing.assert_array_equal(
        session.parameters["h.up.lora_magnitude_vector"], source.parameters["h.up.lora_magnitude_vector"]
    )
    source.save(tmp_path / "whole.safetensors")
    fresh = session_of(seed=8, dora=True)
    fresh.load(tmp_path / "whole.safetensors")
    for name, array in source.stored.items():
        np.testing.assert_array_equal(fresh.stored[name], array, err_msg=name)


def test_a_step_of_many_micro_batches_and_averages_begin_at_the_norms() -> None:
    session = session_of(dora=True, accumulate=2)
    for module in MODULES:
        np.testing.assert_allclose(
            session.parameters[f"{module}.lora_magnitude_vector"], norms(session, module), rtol=1e-6
        )
    graph = fp.lora(fp.trace(net, fp.spec(5, "int64")), 2, 6, ["h"], dora=True)
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1, ema=0.9)).bind()
    averages = session.state_dict(ema=True, merged=True)
    np.testing.assert_allclose(averages["h.up.weight"], session.stored["h.up.weight"], rtol=1e-5)


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fp.UsageError, match="cannot be made"):
        session_of().save_adapters(tmp_path / "file")
    plain = fp.compile(fp.trace(net, fp.spec(5, "int64"))).bind()
    for call in (plain.save_adapters, plain.load_adapters):
        with pytest.raises(fp.SessionError, match="has no adapters: foreplan"):
            call(tmp_path)
    assert plain.state_dict(merged=True).keys() == plain.state_dict().keys()
