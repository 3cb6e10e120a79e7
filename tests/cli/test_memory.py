"""The commands about plans: what they print, write and refuse."""

from __future__ import annotations

import csv
import subprocess

import numpy as np

from tests.cli.shell import MODEL, PROGRAM, answer, foreplan


def test_estimate():
    figures = answer("estimate", MODEL)
    assert figures["mode"] == "training" and figures["target"] == "numpy"
    # Weights and biases of 6 → 8 → 8 → 3, and as much velocity; float32.
    parameters = 4 * (6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)
    assert 2 * parameters <= figures["persistent_bytes"] <= 2 * parameters + 64
    outside = sum(part["nbytes"] for part in figures["outside"])
    assert figures["peak_bytes"] == figures["arena_bytes"] + outside
    assert figures["arena_bytes"] >= figures["lower_bound_bytes"] > figures["persistent_bytes"]
    assert sum(figures["categories"].values()) == figures["lower_bound_bytes"]
    assert set(figures["categories"]) == {
        *(
            "parameters",
            "optimizer_state",
            "gradients",
            "activations",
            "workspace",
            "communication",
            "inputs",
            "outputs",
        )
    }
    for key in ("model", "order_lower_bound_bytes", "flops", "extra_flops_ratio", "extra_seconds_ratio", "nodes",
                "instructions", "plan_seconds", "compile_seconds"):  # fmt: skip
        assert key in figures
    text = foreplan("estimate", MODEL).stdout
    assert f"{figures['arena_bytes']:,} bytes" in text and "peak at instruction" in text


def test_estimate_of_other_steps():
    infer = answer("estimate", MODEL, "--infer")
    sgd = answer("estimate", MODEL, "--optimizer", "sgd")
    adam = answer("estimate", MODEL, "--optimizer", "adamw")
    assert infer["mode"] == "inference" and infer["categories"]["optimizer_state"] == 0
    assert infer["arena_bytes"] < sgd["arena_bytes"] < adam["arena_bytes"]
    assert answer("estimate", MODEL, "--batch", 400)["arena_bytes"] > 10 * infer["arena_bytes"]


def test_a_budget_that_cannot_be_met():
    done = foreplan("estimate", MODEL, "--budget", "1KiB", code=3)
    assert done.stdout == ""
    assert "1.00 KiB" in done.stderr and "lower bound" in done.stderr and "peak" in done.stderr
    found = answer("estimate", MODEL, "--budget", "1KiB", code=3)
    assert found["capacity_bytes"] == 1024 and found["needed_bytes"] >= found["lower_bound_bytes"] > 1024


def test_plan_verify_view_diff(tmp_path):
    a, b = tmp_path / "a.plan", tmp_path / "b.plan"
    written = answer("plan", MODEL, "-o", a)
    foreplan("plan", MODEL, "--batch", 64, "-o", b)
    assert answer("verify", a)["verified"] is True
    assert "verified" in foreplan("verify", b).stdout
    assert answer("view", a)["arena_bytes"] == written["arena_bytes"]
    page = tmp_path / "map.html"
    foreplan("view", a, "-o", page)
    assert page.read_text().startswith("<!DOCTYPE html>")
    grown = answer("diff", a, b)["bytes"]["arena_bytes"]
    assert grown["before"] == written["arena_bytes"] < grown["after"]
    assert "arena" in foreplan("diff", a, MODEL).stdout


def test_the_stages_of_a_plan_are_explained() -> None:
    told = answer("explain", MODEL, "--remat", "off")
    names = ["program order", "order", "alias", "updates", "remat", "placement"]
    assert [stage["name"] for stage in told["stages"]] == names
    assert told["stages"][-1]["arena_bytes"] == told["arena_bytes"] and told["each_once_bytes"] > 0
    text = foreplan("explain", MODEL).stdout
    assert all(f"\n  {name} " in text for name in names) and "No schedule at all needs less than" in text
    assert "'-o'" in foreplan("plan", MODEL, code=2).stderr


def test_a_plan_has_decided_already(tmp_path, data):
    path, other = tmp_path / "a.plan", tmp_path / "b.plan"
    foreplan("plan", MODEL, "--lr", 0.02, "-o", path)
    for option in (("--optimizer", "adam"), ("--batch", 3), ("--infer",), ("--budget", "1GiB")):
        assert f"has decided on {option[0]}" in foreplan("view", path, *option, code=2).stderr
    options = ("--data", data, "--steps", 12)
    by_plan = answer("train", path, *options)["losses"]
    assert by_plan == answer("train", MODEL, "--lr", 0.02, *options)["losses"]
    assert answer("train", path, "--lr", 0.03, *options)["losses"] != by_plan
    foreplan("plan", MODEL, "--infer", "-o", other)
    assert "plan for inference" in foreplan("train", other, *options, code=2).stderr
    assert "plan for training" in foreplan("run", path, "--data", data, code=2).stderr


def test_plans_are_deterministic(tmp_path):
    for name in ("a", "b"):
        foreplan("plan", MODEL, "-o", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_damaged_plan_is_refused(tmp_path):
    path = tmp_path / "a.plan"
    foreplan("plan", MODEL, "-o", path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "error: " in foreplan("verify", path, code=1).stderr
    assert answer("verify", path, code=1)["verified"] is False
    path.write_bytes(whole.replace(b"matmul", b"matnul", 1))
    foreplan("verify", path, code=1)


def test_models_are_listed():
    listed = answer("models")
    assert {"mlp", "resnet50", "gpt2_small"} <= set(listed)
    assert all(name in foreplan("models").stdout for name in listed)


def test_place(tmp_path):
    table, out = tmp_path / "in.csv", tmp_path / "out.csv"
    rng = np.random.default_rng(1)
    lower = rng.integers(0, 50, 60)
    upper = lower + rng.integers(1, 20, 60)
    size = rng.integers(1, 100, 60)
    rows = [f"{i},{a},{b},{n}" for i, (a, b, n) in enumerate(zip(lower, upper, size))]
    table.write_text("id,lower,upper,size\n" + "\n".join(rows) + "\n")
    figures = answer("place", table, "-o", out)
    with open(out) as file:
        placed = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]
    assert [row["id"] for row in placed] == list(range(60))
    for i, p in enumerate(placed):
        for q in placed[:i]:
            together = p["lower"] < q["upper"] and q["lower"] < p["upper"]
            assert not (together and p["offset"] < q["offset"] + q["size"] and q["offset"] < p["offset"] + p["size"])
    highest = max(int(size[(lower <= t) & (t < upper)].sum()) for t in range(70))
    assert figures["lower_bound"] == highest
    assert figures["height"] == max(row["offset"] + row["size"] for row in placed)
    assert foreplan("place", table).stdout == out.read_text()
    out.unlink()
    assert "error" in foreplan("place", table, "--capacity", highest - 1, "-o", out, code=3).stderr
    assert not out.exists()


def test_the_map_may_go_to_standard_output():
    command = [*PROGRAM, "view", MODEL, "-o", "/dev/stdout", "--format", "html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("<!DOCTYPE html>") and done.stdout.rstrip().endswith("</html>")
