"""MODEL as package.module:make: what the function may give, what it is asked, and its errors with its own lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

import foreplan as fp  # noqa: E402
from foreplan.cli import factory  # noqa: E402
from foreplan.cli.main import cli  # noqa: E402

NETS = """import torch
from torch import nn

print("on the way")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x, scale=None):
        y = self.two(torch.relu(self.one(x)))
        return y if scale is None else y * scale


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


def listed(): return Listed(), torch.zeros(4, 64)
def one(): return Net(), torch.zeros(4, 6)
def several(): return Net(), (torch.zeros(4, 6), torch.ones(4, 1))
def by_name(): return Net(), {"x": torch.zeros(4, 6)}
def both(): return Net(), (torch.zeros(4, 6),), {"scale": torch.ones(4, 1)}
def program(): return torch.export.export(Net(), (torch.zeros(4, 6),))
def graph():
    import foreplan
    return foreplan.from_torch(Net(), torch.zeros(4, 6))
def sized(batch=4): return Net(), torch.zeros(batch, 6)
def bare(): return Net()
class Losing(Net):
    def forward(self, x): return {"loss": super().forward(x).square().mean(), "scores": super().forward(x)}
def losing():
    with torch.device("meta"): return Losing(), torch.zeros(4, 6)
def nothing(): return None
def fails(): return Net(), torch.zeros(4, 7) @ torch.zeros(3, 3)
def fails_within(): Net()(torch.zeros(4, 5))
def ends(): raise SystemExit("over")
number = 3
module = Net()
ready = graph()
class Held:
    make = one
"""
FAILS, WITHIN = (1 + NETS[: NETS.index(text)].count("\n") for text in ("def fails()", "y = self.two"))  # their lines


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "nets_of_tests").mkdir()
    (tmp_path / "nets_of_tests" / "nets.py").write_text(NETS)
    (tmp_path / "bad_of_tests.py").write_text("def f(:\n")
    (tmp_path / "lacking_of_tests.py").write_text("\nimport there_is_no_such_module\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    factory.made.cache_clear()
    yield
    for name in [each for each in sys.modules if "_of_tests" in each]:
        del sys.modules[name]


def ran(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.parametrize(
    "name", ["one", "several", "by_name", "both", "program", "graph", "sized", "Held.make", "ready"]
)
def test_what_a_function_may_give(name: str) -> None:
    done = ran("estimate", f"nets_of_tests.nets:{name}", "--json")
    figures = json.loads(done.stdout)  # which what the module prints is not in
    assert (figures["model"], figures["mode"], "on the way" in done.stderr) == ("Net", "training", True)


@pytest.mark.parametrize("name", ["one", "sized"])
@pytest.mark.parametrize("size", [("--batch", "16"), ("--shapes", "x:16x6")])
def test_another_batch(name: str, size: tuple[str, str]) -> None:
    done = ran("graph", f"nets_of_tests.nets:{name}", "--infer", *size)
    assert "input %x: float32[16,6]" in done.stdout and "float32[16,3]" in done.stdout


def test_the_module_behind_a_model_is_the_one_that_was_made() -> None:
    first = factory.made("nets_of_tests.nets:one")
    assert factory.made("nets_of_tests.nets:one") is first and first.args[0].shape == (4, 6)
    assert factory.made("nets_of_tests.nets:sized", 3).args[0].shape == (3, 6)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("nets_of_tests.nets:bare", "a module without an example; return (module, example)"),
        ("nets_of_tests.nets:module", "a module without an example; return (module, example)"),
        ("nets_of_tests.nets:nothing", "it must give (module, example), (module, args, kwargs)"),
        ("nets_of_tests.nets:fails", f"nets.py:{FAILS}: RuntimeError: mat1 and mat2"),
        ("nets_of_tests.nets:fails_within", f"nets.py:{WITHIN}: RuntimeError: mat1 and mat2"),
        ("nets_of_tests.nets:ends", "SystemExit: over"),
        ("nets_of_tests.nets:number", "and no function"),
        ("nets_of_tests.nets:absent", "has no 'absent'"),
        ("nets_of_tests/nets.py:one", "write nets_of_tests.nets:one"),
        ("bad_of_tests:make", "bad_of_tests.py:1: SyntaxError"),
        ("lacking_of_tests:make", "lacking_of_tests.py:2: ModuleNotFoundError"),
        ("absent_of_tests:make", "there is no module 'absent_of_tests' in the current folder"),
        ("mlp:make", "'make' is not a size"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(model: str, says: str) -> None:
    done = ran("estimate", model)
    last = done.output.strip().splitlines()[-1]
    assert done.exit_code == 2 and last.startswith("error: ") and says in last and "Traceback" not in done.output


def test_what_takes_no_other_size_says_what_to_do() -> None:
    done = ran("estimate", "nets_of_tests.nets:one", "--shapes", "z:16x6")
    assert done.exit_code == 2 and "has no input 'z'" in done.output
    done = ran("estimate", "nets_of_tests.nets:several", "--shapes", "x:16x6,scale:3x1")
    assert done.exit_code == 2 and "let the function take batch=" in done.output


def test_errors_of_foreplan_stay_as_they_are() -> None:
    Path("raising_of_tests.py").write_text("import foreplan\ndef make(): return foreplan.models.build('absent')\n")
    with pytest.raises(fp.UsageError) as expected:
        fp.models.build("absent")
    assert f"error: {expected.value}" in ran("estimate", "raising_of_tests:make").output


def test_the_loss_of_a_model_that_gives_it_and_has_no_numbers() -> None:
    model = "nets_of_tests.nets:losing"
    found = json.loads(ran("estimate", model, "--optimizer", "adamw", "--json").stdout)
    asked = json.loads(ran("estimate", model, "--optimizer", "adamw", "--loss", "sum", "--json").stdout)
    assert found["arena_bytes"] == asked["arena_bytes"] > 0
    beside = json.loads(ran("estimate", model, "--as", "pytorch", "--optimizer", "adamw", "--json").stdout)
    assert beside["pytorch"]["peak_bytes"] > 4 * 4 * (6 * 8 + 8 + 8 * 3 + 3)


@pytest.mark.parametrize(("name", "batch"), [("one", ()), ("sized", ("--batch", "16")), ("by_name", ())])
def test_pytorchs_own_step_is_beside_the_plan(name: str, batch: tuple[str, ...]) -> None:
    """That of the module, which PyTorch runs; the same as from Python."""
    model = f"nets_of_tests.nets:{name}"
    found = json.loads(ran("estimate", model, "--as", "pytorch", "--optimizer", "adamw", "--json", *batch).stdout)
    given = factory.made(model, 16 if batch else None)
    eager = fp.eager_memory(
        given.model, *given.args, kwargs=given.kwargs, loss="cross_entropy", optimizer=fp.optim.AdamW(1e-3)
    )
    assert found["pytorch"]["peak_bytes"] == eager.as_json()["peak_bytes"] > 0
    weights = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    assert eager.as_json()["peak_bytes"] >= 4 * weights


def test_a_rank_of_fsdp2_is_beside_the_plan_of_a_rank() -> None:
    """As from Python, with the members of lists of modules by themselves."""
    words = ("--optimizer", "adamw", "--ranks", "4", "--shard", "parameters", "--json")
    found = json.loads(ran("estimate", "nets_of_tests.nets:listed", "--as", "fsdp2", *words).stdout)
    given = factory.made("nets_of_tests.nets:listed", None)
    options: dict[str, Any] = {"loss": "cross_entropy", "optimizer": fp.optim.AdamW(1e-3), "ranks": 4}
    eager, alone = (
        fp.eager_memory(given.model, *given.args, shard=shard, **(options | more))
        for shard, more in ((["layers.*"], {}), ((), {"ranks": 1}))
    )
    assert found["pytorch"]["peak_bytes"] == eager.as_json()["peak_bytes"] < alone.as_json()["peak_bytes"]
    for model, framework, says in (
        ("nets_of_tests.nets:one", "fsdp2", "no list of layers"),
        ("mlp:batch=4,width=8,layers=1", "fsdp2", "runs a PyTorch module itself"),
        ("nets_of_tests.nets:listed", "fsdp2:shard=no", "no part of the module"),
    ):
        done = ran("estimate", model, "--as", framework, "--ranks", "4")
        assert done.exit_code == 2 and says in done.stderr


def test_pytorchs_own_step_is_of_the_functions_own_example() -> None:
    done = ran("estimate", "nets_of_tests.nets:one", "--as", "pytorch", "--batch", "16")
    assert done.exit_code == 2 and "let its function take batch=" in done.stderr
