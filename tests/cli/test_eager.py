"""`estimate --as pytorch`, `view -o plan.pickle` and `compare`, as one calls them."""

from __future__ import annotations

from pathlib import Path

from tests.cli.shell import MODEL, answer, foreplan


def test_estimate_as_pytorch() -> None:
    figures = answer("estimate", MODEL, "--as", "pytorch")["pytorch"]
    assert [(row["phase"], row["iteration"]) for row in figures["phases"]] == [
        ("inputs", 0),
        ("model", 0),
        *((phase, i) for i in (1, 2, 3) for phase in ("forward", "backward", "step")),
    ]
    inputs, model = figures["phases"][:2]
    # The batch of 4 × 6 float32 and 4 classes of int64; weights and biases of 6 → 8 → 8 → 3.
    assert inputs["live"] == 4 * 6 * 4 + 4 * 8
    assert model["live"] - inputs["live"] == 4 * (6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)
    assert figures["device"] == "cpu" and inputs["reserved"] is None
    assert figures["peak_bytes"] == max(row["most"] for row in figures["phases"][-3:])
    text = foreplan("estimate", MODEL, "--as", "pytorch").stdout
    assert "after the model" in text and "step 3" in text and "times as much" in text


def test_estimate_as_pytorch_on_a_card() -> None:
    figures = answer("estimate", MODEL, "--as", "pytorch:device=cuda,zero=keep")["pytorch"]
    assert figures["device"] == "cuda" and figures["variant"]["zero"] == "keep"
    assert figures["phases"][-1]["reserved"] == 2 << 20
    done = foreplan("estimate", MODEL, "--as", "pytorch:device=cuda")
    assert "reserved" in done.stdout and "cuBLAS" in done.stdout and "cuDNN" not in done.stdout


def test_workspaces_of_convolutions_on_a_card_that_is_not_named() -> None:
    small = ("estimate", "conv_chain:size=64", "--loss", "mean", "--as")
    assert "workspace=SIZE" in (told := foreplan(*small, "pytorch:device=cuda").stdout) and "cuda:h100" in told
    figures = answer(*small, "pytorch:device=cuda,workspace=3MiB")["pytorch"]
    assert figures["largest_workspace"]["bytes"] == 3 << 20 and "gradient of the" in figures["largest_workspace"]["of"]
    assert "counted with 3.00 MiB" in figures["notes"][0]
    assert answer(*small, "pytorch:workspace=free")["pytorch"]["largest_workspace"] is None


def test_what_is_not_counted_is_said() -> None:
    assert answer("estimate", MODEL, "--as", "pytorch")["pytorch"]["notes"] == []
    (note,) = answer("estimate", MODEL, "--as", "pytorch", "--clip-norm", 1)["pytorch"]["notes"]
    assert "clipping" in note


def test_inference_as_pytorch() -> None:
    figures = answer("estimate", MODEL, "--infer", "--as", "pytorch")["pytorch"]
    assert [row["phase"] for row in figures["phases"]] == ["inputs", "model", *["forward"] * 3]


def test_micro_batches_as_pytorch() -> None:
    """Gradients are kept from the first on, and the next ones are added to them."""
    figures = answer("estimate", MODEL, "--accumulate", 3, "--as", "pytorch")["pytorch"]
    assert [row["phase"] for row in figures["phases"][-4:]] == ["forward", "backward", "micro_batches", "step"]
    alone = answer("estimate", MODEL, "--as", "pytorch")["pytorch"]
    weights = 4 * (6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)
    assert figures["phases"][4]["most"] - alone["phases"][2]["most"] >= weights


def test_buckets_of_ddp() -> None:
    """All gradients lie in buckets once more, beside `.grad`."""
    weights = 4 * (6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3)
    alone, one = (answer("estimate", MODEL, *how)["pytorch"] for how in (("--as", "pytorch"), ("--as", "ddp")))
    of_two = answer("estimate", MODEL, "--as", "ddp", "--ranks", 2)["pytorch"]
    assert one["peak_bytes"] == of_two["peak_bytes"] == alone["peak_bytes"] + weights
    assert of_two["at_peak"]["buckets of gradients"] == weights


def test_a_precision_stands_for_autocast() -> None:
    """Weights and gradients are float32; narrow copies of weights come beside them."""
    wide, narrow = (answer("estimate", MODEL, "--as", "pytorch", *how) for how in ((), ("--precision", "bf16")))
    phases = zip(wide["pytorch"]["phases"], narrow["pytorch"]["phases"], strict=True)
    assert {a["phase"] for a, b in phases if a["live"] != b["live"]} == {"forward"}


def test_wrong_variants() -> None:
    def told(*arguments: object) -> str:
        return foreplan("estimate", MODEL, *arguments, code=2).stderr

    assert "choose" in told("--as", "tensorflow")
    assert "'speed' is no option" in told("--as", "pytorch:speed=high")
    assert "zero is given twice" in told("--as", "pytorch:zero=keep,zero=none")
    assert "zero" in told("--as", "pytorch:zero=maybe")
    assert "'free'" in told("--as", "pytorch:workspace=much")
    assert "--as pytorch" in told("--snapshot", "x.pickle")
    assert "fp.eager_memory" in told("--as", "pytorch", "--precision", "fp16")
    assert "say --as ddp" in told("--as", "pytorch", "--ranks", 2)
    assert "say --as ddp" in told("--as", "ddp", "--ranks", 2, "--shard", "parameters")


def test_a_plan_file_has_no_model(tmp_path: Path) -> None:
    path = tmp_path / "m.plan"
    foreplan("plan", MODEL, "-o", path)
    assert "give the model" in foreplan("estimate", path, "--as", "pytorch", code=2).stderr


def test_snapshots_and_compare(tmp_path: Path) -> None:
    theirs, ours, plan = (tmp_path / name for name in ("theirs.pickle", "ours.pickle", "m.plan"))
    figures = answer("estimate", MODEL, "--as", "pytorch", "--snapshot", theirs)
    foreplan("plan", MODEL, "-o", plan)
    foreplan("view", plan, "-o", ours)
    found = answer("compare", theirs, plan)
    assert found["allocated_bytes"]["pytorch"] == max(row["most"] for row in figures["pytorch"]["phases"])
    assert found["reserved_bytes"]["plan"] == figures["arena_bytes"]
    assert answer("compare", ours, MODEL)["reserved_bytes"]["pytorch"] == figures["arena_bytes"]
    assert "alive at the peak of the plan" in foreplan("compare", theirs, MODEL).stdout


def test_compare_of_what_is_no_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    assert "refused: it would import os.system" in foreplan("compare", path, MODEL, code=2).stderr
