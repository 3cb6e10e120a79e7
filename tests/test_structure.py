"""The repository's own rules: which part may import which, packaging, and how long an import takes."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.oracle.peers import networkx
from tests.profile import few

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "foreplan"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = sorted(PROJECT["tool"]["setuptools"]["packages"])
PARTS = [name.removeprefix("foreplan.") for name in PACKAGES if name.count(".") == 1]
AT_THE_ROOT = {"cuda", "models", "planner", "runtime"}  # what a visitor must see; linked into the package
# What each part may import, besides the base and itself. `planner` knows integers only.
ALLOWED = {
    "base": set(),
    "jit": set(),
    "graph": set(),
    "planner": {"jit"},
    "ops": {"graph", "jit"},
    "frontend": {"graph", "ops"},
    "passes": {"graph", "ops"},
    "export": {"graph", "ops", "frontend", "passes"},
    "lower": {"graph", "ops", "passes", "planner"},
    "eager": {"graph", "ops", "frontend", "lower"},
    "options": {"graph", "passes", "lower"},
    "report": {"graph", "lower", "planner"},
    "runtime": {"graph", "jit", "ops", "lower", "planner", "options", "export"},
    "models": {"graph", "ops", "frontend"},
    "compiler": {
        "graph", "ops", "frontend", "passes", "lower", "options", "planner", "report", "runtime",
    },
    "views": {"graph", "ops", "eager", "lower", "planner", "report"},
    "fit": {"graph", "passes", "eager", "lower", "options", "planner", "report", "views", "compiler"},
    "onnx_backend": {"graph", "frontend", "lower", "runtime", "compiler"},
    "calibration": {"graph", "frontend", "models", "passes", "lower", "runtime", "compiler"},
    "cuda": set(),
}  # fmt: skip
BASE = {"base", "version"}
# What is found by its name: packages' own modules, engines, a user's function; and what LATE lists.
FOUND_BY_NAME = {f"{folder}__init__.py" for folder in ("", "ops/", "frontend/", "frontend/onnx/ops/")}
FOUND_BY_NAME |= {"frontend/torch/table.py", "lower/targets.py", "cli/factory.py", "base/late.py"}
LATE = {"foreplan.fit.explanation:explain", "foreplan.fit.beside_pytorch:beside_pytorch"}
LATE |= {f"foreplan.compiler.evaluating:{name}" for name in ("evaluation_for", "evaluation_of", "step_of")}
LATE |= {"foreplan.views.formats:write_view", "foreplan.views.picture:notebook_html"}
LATE |= {"foreplan.runtime.ranks.launch:current"}
# What compiles and runs a step, and what it does without. Of the passes of ranks it has the lists of passes alone.
CORE = ("base", "jit", "graph", "ops", "passes", "lower", "planner", "options", "report", "compiler", "runtime")
OUTSIDE = ("foreplan.eager", "foreplan.views", "foreplan.fit", "foreplan.runtime.ranks")
OF_RANKS = tuple(f"foreplan.passes.{name}" for name in ("ranks", "stages", "tensor"))
KNOW_RANKS = {f"compiler/{name}.py" for name in ("pipeline", "staged", "step_graphs")}
KNOW_RANKS |= {"options/ranks.py", "options/shared_weights.py", "passes/pipeline.py"}
ONLY_IN = {
    # The importer; models and plans as files; the backend for the onnx package.
    "onnx": ("frontend", "export", "views", "onnx_backend"),
    "click": ("cli",),
    "tensorboard": ("cli",),
    "filelock": ("compiler",),
    "fsspec": ("compiler",),
    "safetensors": ("runtime",),
    "llvmlite": ("jit", "runtime"),
    "scipy": (),
    "torch": ("eager", "frontend", "runtime", "compiler"),
    "networkx": ("graph", "views"),
    "cupy": ("runtime",),
    "cudnn": ("runtime",),
}


def python_files(part: str = "") -> list[Path]:
    """Of a part, or of the package and all its parts, by their paths in the package."""
    folders = [part] if part else [*PARTS, ""]
    return [file for folder in folders for file in sorted((PACKAGE / folder).glob("**/*.py" if folder else "*.py"))]


@cache
def parsed(file: Path) -> ast.Module:
    """A file as a tree, for all rules that read it."""
    return ast.parse(file.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """All files are parsed once, for all rules. Nodes form no cycles: the garbage collector, which would look at all of
    them again and again, has nothing to do here, neither while they are made nor later.
    """
    gc.disable()
    try:
        for file in [*python_files(), *(ROOT / "tests").glob("**/*.py")]:
            parsed(file)
    finally:
        gc.freeze()
        gc.enable()
    yield
    parsed.cache_clear()


def imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


@pytest.mark.parametrize("part", ALLOWED)
def test_imports_point_one_way(part: str) -> None:
    for file in python_files(part):
        for name in imports(file):
            if name.startswith("foreplan."):
                other = name.split(".")[1]
                assert other in ALLOWED[part] | BASE | {part}, f"{file.relative_to(PACKAGE)} imports {name}"


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def test_the_core_imports_nothing_that_few_steps_need() -> None:
    """Not even for types, or when a function is called: what it calls is listed in LATE."""
    know = set()
    for file in (file for part in CORE for file in python_files(part)):
        own = ".".join(("foreplan", *file.relative_to(PACKAGE).with_suffix("").parts))
        if not within(own, (*OUTSIDE, *OF_RANKS)):
            place, names = file.relative_to(PACKAGE).as_posix(), imports(file)
            assert not [name for name in names if within(name, OUTSIDE)], place
            know |= {place} if any(within(name, OF_RANKS) for name in names) else set()
    assert know == KNOW_RANKS


def test_a_process_that_trains_loads_the_core_alone(tmp_path: Path) -> None:
    code = (
        "import sys, numpy, foreplan as fp\n"
        "graph = fp.models.mlp(batch=2, width=8, layers=1)\n"
        "step = fp.compile(graph, 'cross_entropy', fp.optim.AdamW(ema=0.9), target='numpy')\n"
        "print(step, step.memory, step.plan.as_text(step.program), step.estimate()['arena_bytes'])\n"
        "step.save('plan')\n"
        "session = fp.load_plan('plan').bind()\n"
        "types = {slot.name: slot.operand.type for slot in session.program.required_inputs}\n"
        "session.step({name: numpy.zeros(type.shape, type.dtype.numpy) for name, type in types.items()})\n"
        "session.save('weights', ema=True)\n"
        "session.save('state')\n"
        "step.bind().load('state')\n"
        f"print([name for name in sys.modules if any((name + '.').startswith(each + '.') for each in {OUTSIDE})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_files_import_one_another_in_a_circle() -> None:
    """Not even for their types, or when a function is called."""
    names = {".".join(file.relative_to(PACKAGE).with_suffix("").parts): file for file in python_files()}
    taken = networkx.DiGraph()
    for name, file in names.items():
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = [f"{node.module}.{alias.name}" for alias in node.names]
                taken.add_edges_from((name, each.removeprefix("foreplan.")) for each in (*found, node.module))
    assert not [circle for circle in networkx.strongly_connected_components(taken) if len(circle) > 1]


def test_what_is_called_of_parts_above() -> None:
    """Each exists, and no other is asked for; whole modules are found by name where a user, or a file, names them."""
    asked, by_name = set(), set()
    for file in python_files():
        for call in (node for node in ast.walk(parsed(file)) if isinstance(node, ast.Call)):
            if (name := ast.unparse(call.func)) == "late" and "foreplan.base.late" in imports(file):
                (place,) = call.args
                asked.add(ast.literal_eval(place))
            elif name.endswith("import_module"):
                by_name.add(file.relative_to(PACKAGE).as_posix())
    assert asked == LATE
    for place in LATE:
        module, _, name = place.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
    assert by_name == FOUND_BY_NAME


def test_every_part_but_the_command_line_has_a_place_below_others() -> None:
    assert {*ALLOWED, "cli"} == set(PARTS)
    outside = [file for file in python_files() if file.relative_to(PACKAGE).parts[0] not in ("cli", "__main__.py")]
    assert {file.name for file in python_files() if file.parent == PACKAGE} == {
        "__init__.py",
        "__main__.py",
        "version.py",
    }
    assert not [file.name for file in outside if any(name.startswith("foreplan.cli") for name in imports(file))]


def test_outside_libraries_stay_where_they_belong() -> None:
    for file in python_files():
        place = file.relative_to(PACKAGE)
        part = place.parts[0] if len(place.parts) > 1 else "foreplan"
        for name in imports(file):
            top = name.split(".")[0]
            assert part in ONLY_IN.get(top, (part,)), f"{place} imports {top}"
            assert top not in PARTS, f"{place} imports {top} by its bare name"


def test_machine_code_is_made_in_one_way() -> None:
    """And kept in one, which takes no damaged file."""
    for file in python_files():
        if file != PACKAGE / "jit" / "llvm.py":
            assert not re.search(r"create_mcjit|parse_assembly|emit_object", file.read_text()), file


def test_a_users_folders_are_found_in_one_way() -> None:
    for file in python_files():
        if file != PACKAGE / "base" / "home.py":
            assert not re.search(r"expanduser|Path\.home\(|environ.*\b(XDG_|HOME\b)", file.read_text()), file


def test_every_part_is_packaged_and_linked() -> None:
    for part in AT_THE_ROOT:
        assert (PACKAGE / part).is_symlink() and (PACKAGE / part).resolve() == ROOT / part
    mapped = {"foreplan": "foreplan"} | {f"foreplan.{part}": part for part in AT_THE_ROOT}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == mapped
    folders = {file.parent.relative_to(ROOT) for file in python_files()}
    assert {".".join(folder.parts) for folder in folders} <= set(PACKAGES)
    assert all((ROOT / folder / "__init__.py").is_file() for folder in folders)
    assert {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"} == set(PARTS)


SCRIPTS = sorted(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).glob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_scripts_import_what_there_is(path: Path) -> None:
    """Also what a function imports when it is called, on a machine that no test has."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "foreplan":
            try:
                module = importlib.import_module(node.module or "")
            except ModuleNotFoundError as error:
                if error.name == "torch":
                    continue  # it extends classes of PyTorch's
                raise
            missing = [
                alias.name
                for alias in node.names
                if not hasattr(module, alias.name) and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
            ]
            assert not missing, f"{path.name}:{node.lineno}: {node.module} has no {', '.join(missing)}"


def test_cuda_folder_holds_no_python() -> None:
    assert not list((ROOT / "cuda").glob("**/*.py"))


def test_banned_bare_names_cover_every_part() -> None:
    banned = PROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert set(banned) == AT_THE_ROOT


def test_pythons_that_are_claimed_are_asked() -> None:
    """Each by a job of `python -m tests.environments`, and README names the same."""
    from tests.environments.__main__ import JOBS, OLDEST

    stated = [text.rpartition(" ")[2] for text in PROJECT["project"]["classifiers"] if ":: Python :: 3." in text]
    assert stated[0] == OLDEST and PROJECT["project"]["requires-python"] == f">={OLDEST}"
    assert {f"python{version}" for version in stated[1:]} <= set(JOBS)
    assert f"Python {', '.join(stated[:-1])} or {stated[-1]}," in (ROOT / "README.md").read_text()


def test_import_is_light() -> None:
    heavy = ("llvmlite", "scipy", "onnx", "networkx", "rich", "jax", "filelock", "fsspec")
    code = f"import sys, foreplan, foreplan.compiler.kept_plans; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_compiling_a_small_model_loads_nothing_heavy() -> None:
    code = (
        "import sys, foreplan as fp\n"
        "fp.lower(fp.models.mlp(batch=2, width=8, layers=1))\n"
        "print([m for m in ('scipy', 'networkx', 'onnx', 'jax', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_stated_once_the_same() -> None:
    import foreplan

    assert foreplan.__version__ == PROJECT["project"]["version"]
    assert f"## {foreplan.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_file_is_too_long() -> None:
    others = (
        file for folder in ("tests", "benchmarks", "docs", "examples") for file in (ROOT / folder).glob("**/*.py")
    )
    lines = {str(file): len(file.read_text().splitlines()) for file in (*python_files(), *others)}
    long = {name: n for name, n in lines.items() if n > 450}
    assert not long, "a file has at most 450 lines: give a noun of it a file of its own"


def test_every_target_of_make_does_something() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    rules = {line.partition(":")[0] for line in lines if re.match(r"[a-z][a-z-]*:", line)}
    (phony,) = (line.split()[1:] for line in lines if line.startswith(".PHONY:"))
    told = {found[1] for line in lines if (found := re.match(r'\t@echo "make ([a-z-]+)', line))}
    assert rules == {*phony, "help"} and told < rules


def test_no_leftovers() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert not [str(file) for file in python_files() if pattern.search(file.read_text())]


def test_whatever_skips_a_test_says_why() -> None:
    silent = []
    for file in sorted((ROOT / "tests").glob("**/*.py")):
        if not re.search(r"\b(skip|skipif|importorskip|xfail)\b", file.read_text()):
            continue
        for call in (node for node in ast.walk(parsed(file)) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute) or not re.search("skip|xfail", call.func.attr):
                continue
            name = ast.unparse(call.func)
            said = (name == "pytest.skip" and call.args) or any(each.arg == "reason" for each in call.keywords)
            skips = name in ("pytest.skip", "pytest.importorskip", "pytest.xfail")
            if (skips or re.fullmatch(r"pytest\.mark\.(skip|skipif|xfail)", name)) and not said:
                silent.append(f"{file.relative_to(ROOT)}:{call.lineno}")
    assert not silent


def test_membership_is_not_asked_of_tuples_as_long_as_a_graph() -> None:
    """It would take a time that grows with the square of the graph: `returned` is the set of `results`."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Compare)
        for how, whom in zip(node.ops, node.comparators)
        if isinstance(how, ast.In | ast.NotIn) and isinstance(whom, ast.Attribute)
        if whom.attr in ("results", "nodes")
    ]
    assert not found


def test_no_generator_outlives_what_it_reads() -> None:
    """A generator that a comprehension gives reads that one's variable when it has its last value."""
    loops = (ast.GeneratorExp, ast.ListComp, ast.SetComp)
    late = []
    for file in [*python_files(), *sorted((ROOT / "tests").glob("**/*.py"))]:
        for loop in (node for node in ast.walk(parsed(file)) if isinstance(node, loops)):
            if isinstance(loop.elt, ast.GeneratorExp):
                own = {
                    name.id for each in loop.generators for name in ast.walk(each.target) if isinstance(name, ast.Name)
                }
                first = {id(node) for node in ast.walk(loop.elt.generators[0].iter)}  # which alone is read at once
                names = [node for node in ast.walk(loop.elt) if isinstance(node, ast.Name) and id(node) not in first]
                late += [f"{file.relative_to(ROOT)}:{name.lineno}: {name.id}" for name in names if name.id in own]
    assert not late


@pytest.mark.parametrize(
    "before", few(["", "fp.compile", "import foreplan.lower.program", "from foreplan.lower import lower"], (0, 3))
)
def test_lower_is_a_stage_to_call_whatever_was_imported_before(before: str) -> None:
    code = f"import foreplan as fp\n{before}\nprint(fp.lower(fp.models.mlp(batch=2, width=8, layers=1)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("<Program")


def test_the_stage_takes_what_its_function_takes() -> None:
    import foreplan as fp
    from foreplan.lower.lower import lower
    from foreplan.passes import without

    assert inspect.signature(fp.lower) == inspect.signature(lower)
    graph = fp.models.mlp(batch=2, width=8, layers=1)
    assert fp.lower(graph, passes=without("group_updates")).as_text() == fp.lower(graph).as_text()


def test_no_part_has_the_name_of_a_public_function() -> None:
    """A part that is imported becomes an attribute of the package, in the place of the function."""
    import foreplan

    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert "planner" in parts
    assert not parts & (set(foreplan.__all__) - set(foreplan._MODULES))


@pytest.mark.parametrize("name", ["planner", "graph", "onnx_backend", "eager"])
def test_parts_need_no_import_of_their_own(name: str) -> None:
    code = f"import foreplan as fp; assert fp.{name}.__name__ == 'foreplan.{name}'"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["nonsense", "_repr_html_", "micro_batch"])
def test_what_is_no_part_is_no_attribute(name: str) -> None:
    import foreplan

    with pytest.raises(AttributeError, match=f"module 'foreplan' has no attribute '{name}'"):
        getattr(foreplan, name)
