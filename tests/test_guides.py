"""The map in docs/ and the guides that add something: their code runs, as it stands there."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import foreplan as fp
from foreplan.cli import cli
from foreplan.eager import Variant
from foreplan.graph import Op
from foreplan.graph import registry as declared
from foreplan.graph.layouts import in_c_order
from foreplan.graph.text import parse_graph
from foreplan.lower import targets
from foreplan.passes import Pass, Stage
from foreplan.runtime.cpu import table as cpu_table
from foreplan.runtime.cuda import table as cuda_table
from foreplan.runtime.kernel import Family
from tests.engines.engine import ENGINES, require
from tests.gpu import compiled
from tests.ops.check import check_vjp
from tests.sweep.bounds import Sums
from tests.sweep.judges import JUDGES, judge_draws
from tests.sweep.table import ENTRIES, Entry

ROOT = Path(__file__).resolve().parents[1]
DEVICES = ROOT / "runtime" / "cuda" / "devices"
PLAIN = {"Mean", "Sum", "MeanSquaredError", "MeanAbsoluteError"}  # classes of losses without parameters
JUDGED = [name for name in JUDGES if name not in ("card", "decomposition", "onnx")]


def files(guide: str) -> dict[str, str]:
    """The files that a guide shows, by the paths in their first lines."""
    blocks = re.findall(r"```(?:python|cpp)\n((?:#|//) (\S+)\n.*?)```", (ROOT / "docs" / guide).read_text(), re.S)
    return {path: text for text, path in blocks}


def test_the_page_beside_pytorch_names_all_options() -> None:
    text = (ROOT / "docs" / "beside-pytorch.md").read_text()
    for each in dataclasses.fields(Variant):
        assert f"`{each.name}`" in text


def test_the_map_prints_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)
    exec(compile(example, "architecture.md", "exec"), {})
    assert capsys.readouterr().out.count("relu") > 3


def test_the_page_on_optimizing_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "optimizing.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(example, "optimizing.md", "exec"), names)
    assert (names["scores"].argmax(1) == names["labels"]).mean() > 0.8
    assert Path("averages.safetensors").exists()


def test_the_page_on_the_memory_map_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from foreplan.views.formats import FORMATS

    page = (ROOT / "docs" / "memory-map.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(example, "memory-map.md", "exec"), names)
    assert {"map.html", "both.html", "lean.trace.json"} <= {file.name for file in tmp_path.iterdir()}
    assert re.findall(r"^\| `(\.\S+)` \| `(\w+)` \|", page, re.M) == [(each.ending, each.name) for each in FORMATS]


def test_the_basics_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "basics.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile("\n".join(examples), "basics.md", "exec"), names)
    assert [names["rate"](t) for t in (0, 10, 55, 100)] == pytest.approx([0, 5e-3, 2.5e-3, 0])
    assert names["losses"][-1] < names["losses"][0] / 2 and (names["scores"].argmax(1) == names["labels"]).all()
    assert names["result"].outputs["scores"].shape == (16, 10)
    assert names["result"].gradients["image"].shape == (16, 1, 8, 8)


ALONE = """
import importlib.abc, runpy, sys

BANNED = {"onnx", "networkx", "click", "rich", "safetensors", "ml_dtypes", "threadpoolctl", "scipy"}


class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BANNED:
            raise ImportError(f"{name} is not there")


sys.meta_path.insert(0, Refuse())
for script in sys.argv[1:]:
    runpy.run_path(script)
others = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(name for name in others if name in ("numpy", "llvmlite") or name in BANNED))
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("foreplan.") and name.count(".") > 1}))
"""


def test_the_planner_runs_where_nothing_but_numpy_and_llvmlite_is(tmp_path: Path) -> None:
    shown = files("your-own-framework.md")
    for name, text in shown.items():
        (tmp_path / name).write_text(text)
    assert list(shown) == ["problem.py", "planning.py", "run.py", "wrong.py"]
    (tmp_path / "alone.py").write_text(ALONE)
    command = [sys.executable, "alone.py", *shown]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    *_, libraries, parts = done.stdout.splitlines()
    assert "the gradient is right: True" in done.stdout
    assert libraries == "llvmlite numpy"
    assert set(parts.split()) == {"base", "planner", "jit"}


def test_the_planner_is_imported_without_the_rest() -> None:
    """Of foreplan only errors and other small modules, and of libraries numpy alone."""
    code = (
        "import sys, foreplan.planner\n"
        "print(*sorted(name[14:] for name in sys.modules if name.startswith('foreplan.base.')))\n"
        "print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('foreplan.')}))\n"
        "others = ('llvmlite', 'onnx', 'networkx', 'click', 'rich', 'ml_dtypes')\n"
        "print(*(name for name in others if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["arguments errors files units", "base planner version", ""]


def test_the_page_on_optimizing_names_all_that_there_is() -> None:
    page = (ROOT / "docs" / "optimizing.md").read_text()
    for module in (fp.losses, fp.optim):
        for name in set(dir(module)) - {"Optimizer", "Schedule", "Group"} - PLAIN:
            assert re.search(rf"`{name}[`(]", page), name


def test_what_is_built_on_a_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "building-on-a-model.md").read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "building-on-a-model.md", "exec"), names)
    assert [value.name for value in names["graph"].parameters][-2:] == ["head.weight", "head.bias"]
    assert {value.name for value in names["pair"].parameters} == {
        f"tower.{value.name}" for value in names["backbone"].parameters
    }
    assert 0 <= names["found"]["right"] <= 4 and np.isfinite(names["result"].loss)
    assert {file.name for file in Path("adapters").iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    assert names["merged"].keys() == {value.name for value in names["base"].stored}
    assert "wte.lora_A.weight" in {value.name for value in fp.lora(names["base"], targets=["wte"]).parameters}


def test_models_as_python_functions_compile() -> None:
    (first, second) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python-models.md").read_text(), re.S)
    names: dict[str, Any] = {}
    exec(compile(first, "python-models.md", "exec"), names)
    assert names["step"].plan.arena_bytes > 0
    assert {"lstm.weight_ih_l0_reverse", "head.bias"} <= {weight.name for weight in names["graph"].parameters}
    exec(compile(second, "python-models.md", "exec"), names)
    assert [value.shape for value in names["graph"].outputs.values()] == [(8, 16), (10, 8, 16)]


def test_the_page_on_onnx_models_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "onnx.md").read_text(), re.S)
    exec(compile("\n".join(examples), "onnx.md", "exec"), {})


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Import the text of a module under a name, until the test ends."""

    def loaded(name: str, text: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


@pytest.fixture
def scale(
    load: Callable[[str, str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[float], Op]:
    """The op that the guide adds, with its kernels and its entry in the sweep."""
    shown = files("adding-an-op.md")
    monkeypatch.setattr(declared, "_REGISTRY", declared.registered_ops())
    made = {
        path: load(path.removesuffix(".py").replace("/", "."), text)
        for path, text in shown.items()
        if path.endswith(".py")
    }
    on_cpu, on_cuda = made["runtime/cpu/kernels/scale.py"], made["runtime/cuda/kernels/scale.py"]
    monkeypatch.setitem(cpu_table.FAMILIES, "scale", Family({"loops": on_cpu.scale}, in_c_order, on_cpu.reads))
    monkeypatch.setitem(cuda_table.FAMILIES, "scale", cuda_table._own(on_cuda.scale, reads=on_cuda.reads))
    sources = tmp_path / "cuda"
    sources.mkdir()
    for file in compiled.FOLDER.glob("*.cu*"):
        (sources / file.name).symlink_to(file)
    (sources / "scale.cu").write_text(shown["cuda/scale.cu"])
    monkeypatch.setattr(compiled, "FOLDER", sources)
    cases, oracles = made["tests/sweep/cases/scale.py"], made["tests/sweep/oracles/scale.py"]
    monkeypatch.setitem(ENTRIES, "scale", Entry(cases.scale, oracles.scale, Sums(lambda op, types: 1)))
    return made["foreplan/ops/scale.py"].Scale


@pytest.mark.parametrize("judge", JUDGED)
def test_the_op_that_the_guide_adds_is_right_to_every_judge(scale: Callable[[float], Op], judge: str) -> None:
    judge_draws(judge, "scale", 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_op_that_the_guide_adds_runs_on_every_engine(scale: Callable[[float], Op], engine: str) -> None:
    require(engine)
    x = np.linspace(-3, 3, 1001, dtype=np.float32)
    ENGINES[engine].check(scale(0.5), x, rtol=1e-7)
    ENGINES[engine].check_over(scale(0.5), [x], (0, 0), rtol=1e-7)
    check_vjp(lambda b, x: b.apply(scale(0.5), x), x.astype(np.float64))


def test_the_guide_names_all_that_an_op_states() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|", (ROOT / "docs" / "adding-an-op.md").read_text().split("## Its kernels")[0], re.M
    )
    found = {name for name in vars(Op) if name[0] != "_"}
    serving = {"check_count", "reads", "result_types", "wide_form", "wide_sum"}  # those that state something
    assert set(rows) == found - serving


def test_the_engine_that_the_guide_adds_trains(
    load: Callable[[str, str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = files("adding-an-engine.md")
    for path, text in shown.items():
        load(path.removesuffix(".py").replace("/", "."), text)
    monkeypatch.setitem(targets.ENGINES, "mine", targets.EngineInfo("runtime.mine"))
    graph, losses = fp.models.build("mlp:width=32,batch=4"), {}
    for target in ("numpy", "mine"):
        step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), target=target)
        step.save(tmp_path / f"{target}.plan")
        sessions = step.bind(seed=1), fp.load_plan(tmp_path / f"{target}.plan").bind(seed=1, poison=True)
        data = {value.name: np.full(value.shape, 0.5, np.float32) for value in graph.inputs}
        losses[target] = [[session.step(data).loss for _ in range(3)] for session in sessions]
    assert losses["mine"] == losses["numpy"] and losses["mine"][0] == losses["mine"][1]
    assert len(set(losses["mine"][0])) == 3
    done = CliRunner().invoke(cli, ["estimate", "mlp:width=32,batch=4", "--target", "mine"])
    assert done.exit_code == 0, done.output


def test_the_pass_that_the_guide_adds_works(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "adding-a-pass.md").read_text()
    (tmp_path / "guide.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", guide, re.S)))
    found = runpy.run_path(str(tmp_path / "guide.py"))
    usual, tried = map(int, capsys.readouterr().out.split())
    assert tried <= usual
    graph = parse_graph(
        "graph %g\ninput %x: float32[2,3]\n%y: float32[2,3] = map(exprs=('a0',)) [%x] as %y\n"
        "%z: float32[2,3] = map(exprs=('relu(a0)',)) [%y] as %z\noutput %z = %z\n"
    )
    (left,) = found["drop_identities"](graph).nodes
    assert left.name == "z" and left.inputs == graph.inputs


def test_the_card_that_the_guide_shows_is_one_of_the_package() -> None:
    shown = re.findall(r"(?:^(?:    .*)?\n)+", (ROOT / "docs" / "adding-a-card.md").read_text(), re.M)
    (block,) = [text for text in shown if "capability" in text]
    assert textwrap.dedent(block).strip() == (DEVICES / "rtx4090.toml").read_text().strip()


def test_the_guide_names_every_field_of_a_pass() -> None:
    page = (ROOT / "docs" / "adding-a-pass.md").read_text().partition("| field | what |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.M)
    assert re.findall(r"\w+", " ".join(rows)) == [*inspect.signature(Pass.__init_subclass__).parameters]
    stages = (ROOT / "docs" / "adding-a-pass.md").read_text().partition("| stage | what |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", stages, re.M) == [each.name for each in Stage]
