"""Adapters from the command line: `--lora`, `--rank`, `--alpha`, `--save-adapters`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

import foreplan as fp
from tests.cli.shell import answer, foreplan

MODEL = "mlp:batch=8,width=16,layers=2,inputs=4,classes=3"


def data(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    path = folder / "data.npz"
    np.savez(path, x=rng.normal(size=(16, 4)).astype(np.float32), target=rng.integers(0, 3, 16))
    return path


def test_estimates_are_those_of_the_adapted_model() -> None:
    found = answer("estimate", MODEL, "--lora", "hidden0", "--lora", "hidden1", "--rank", "2", "--alpha", "6")
    graph = fp.lora(fp.models.build(MODEL), 2, 6, ["hidden0", "hidden1"])
    step = fp.compile(graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.01))
    assert found["arena_bytes"] == step.arena_bytes
    assert found["weights"]["trained"] == {"tensors": 4, "numbers": 2 * (4 + 16) + 2 * (16 + 16)}
    assert any("LoRA of rank 2 and alpha 6: 2 weights have adapters" in note for note in found["notes"])
    assert answer("estimate", MODEL, "--infer", "--lora", "hidden0")["mode"] == "inference"
    also = answer("estimate", MODEL, "--lora", "hidden0", "--train", "out")
    assert also["weights"]["trained"]["tensors"] == 4


def test_dora_trains_magnitudes_too() -> None:
    found = answer("estimate", MODEL, "--lora", "hidden0", "--rank", "2", "--dora")
    assert found["weights"]["trained"] == {"tensors": 3, "numbers": 2 * (4 + 16) + 16}
    assert any("DoRA of rank 2 and alpha 16: 1 weights have adapters" in note for note in found["notes"])


def test_train_writes_adapters_that_a_session_reads(tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "adapters", tmp_path / "w.safetensors"
    options = ("--data", data(tmp_path), "--steps", "3", "--lr", "0.1", "--lora", "hidden*", "--rank", "2")
    written = foreplan("train", MODEL, *options, "--save-adapters", folder, "-o", checkpoint).stdout
    assert written.startswith("trains 4 tensors, ") and f"wrote {checkpoint}" in written
    assert json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] == 16
    session = fp.compile(fp.lora(fp.models.build(MODEL), 2, 16, ["hidden*"])).bind()
    session.load_adapters(folder)
    for name, array in load_file(checkpoint).items():
        if ".lora_" in name and "velocity" not in name:
            np.testing.assert_array_equal(session.parameters[name], array)
    alone = foreplan("train", MODEL, *options, "--save-adapters", tmp_path / "more").stdout
    assert f"wrote {tmp_path / 'more'}" in alone
    first, second = (load_file(each / "adapter_model.safetensors") for each in (folder, tmp_path / "more"))
    assert all((first[name] == second[name]).all() for name in first)


def test_what_cannot_be_meant_is_told(tmp_path: Path) -> None:
    assert "say by --lora" in foreplan("estimate", MODEL, "--rank", "4", code=2).stderr
    assert "--dora is that of adapters" in foreplan("estimate", MODEL, "--dora", code=2).stderr
    assert "no weight of the model is called 'conv'" in foreplan("estimate", MODEL, "--lora", "conv", code=2).stderr
    assert "alpha must be in" in foreplan("estimate", MODEL, "--lora", "*", "--alpha", "-1", code=2).stderr
    train = ("train", MODEL, "--data", data(tmp_path), "--save-adapters")
    assert "has no adapters" in foreplan(*train, tmp_path / "a", code=2).stderr
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    assert "cannot be made" in foreplan(*train, tmp_path / "file", "--lora", "*", code=2).stderr
    plan = tmp_path / "step.plan"
    foreplan("plan", MODEL, "--lora", "hidden0", "-o", plan)
    assert "decided on --lora" in foreplan("estimate", plan, "--lora", "hidden1", code=2).stderr
    foreplan("train", plan, "--data", data(tmp_path), "--save-adapters", tmp_path / "from plan")
    assert (tmp_path / "from plan" / "adapter_model.safetensors").exists()


def test_adapters_are_measured_while_they_are_trained(tmp_path: Path) -> None:
    path = data(tmp_path)
    found = answer(
        *("train", MODEL, "--data", path, "--validation", path, "--epochs", "2", "--lr", "0.5"),
        *("--lora", "hidden*", "--rank", "4", "--alpha", "40"),
    )
    first, last = (each["loss"] for each in (found["validations"][0], found["validations"][-1]))
    assert first != last and found["adapters"] is None
