"""Exported programs and .pt2 files: the graph of their module, what they say otherwise, and files that are refused."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.cli.main import cli  # noqa: E402
from tests.profile import pick  # noqa: E402

warnings.filterwarnings("ignore", module="copyreg")
IDS = torch.arange(12).reshape(4, 3) % 11


class Net(nn.Module):
    """A tied head, frozen weights, a buffer that the state lacks, and a part without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.norm, self.drop, self.middle = nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8)
        self.middle.requires_grad_(False)
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)

    def forward(self, ids: Any) -> Any:
        """Scores of the words."""
        with torch.no_grad():
            aside = self.embed(ids).mean(1)
        return self.head(self.drop(self.norm(self.middle(self.embed(ids).mean(1)))) + aside + self.table)


def program(training: bool = True) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = Net().train(training)
    return module, torch.export.export(module, (IDS,))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.export.save(program()[1], tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


def test_a_program_and_its_file_give_the_graph_of_the_module(file: Path) -> None:
    module, made = program()
    expected = fp.from_torch(module, IDS, check=False)
    loaded = torch.export.load(file)
    for given in (made, file, str(file), loaded):
        if given is loaded and loaded.state_dict["middle.weight"].requires_grad:
            continue  # PyTorch 2.9 forgets what is frozen when it loads a file
        found = fp.from_torch(given)
        assert found.as_text() == expected.as_text() and not found.notes
        assert found.origin.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("training", [True, False])
def test_a_file_trains_as_its_module_does_in_the_mode_in_which_it_was_exported(training: bool, tmp_path: Path) -> None:
    module, made = program(training)
    torch.export.save(made, tmp_path / "net.pt2")
    graph = fp.from_torch(tmp_path / "net.pt2")
    assert [note[:27] for note in graph.notes] == ["exported in evaluation mode"] * (not training)
    session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.2), target="numpy").bind()
    optimizer = torch.optim.SGD((each for each in module.parameters() if each.requires_grad), lr=0.2)
    for seed in range(5):
        ids, wanted = torch.from_numpy(np.random.default_rng(seed).integers(0, 11, (2, 4, 3)))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(ids), wanted[:, 0])
        loss.backward()
        optimizer.step()
        found = session.step({"ids": ids.numpy(), "target": wanted[:, 0].numpy()})
        assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, weight in module.state_dict().items():
        np.testing.assert_allclose(session.state_dict()[name], weight, rtol=1e-4, atol=1e-6, err_msg=name)


class Doubled(torch.autograd.Function):
    """What is computed forward is not what its gradient says."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """The same."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Twice."""
        return g * 2


class Applied(nn.Module):
    """Calls it."""

    def forward(self, x: Any) -> Any:
        """The same."""
        return Doubled.apply(x)


def test_a_program_that_has_lost_a_backward_says_on_which_line() -> None:
    x = torch.ones(2, requires_grad=True)
    (note,) = fp.from_torch(torch.export.export(Applied(), (x,))).notes
    assert "test_programs.py:" in note and "lacks its backward" in note


def test_what_a_program_does_not_take() -> None:
    made = program()[1]
    with pytest.raises(fp.UsageError, match="leave the example out"):
        fp.from_torch(made, IDS)
    with pytest.raises(fp.UsageError, match="leave check=True out"):
        fp.from_torch(made, check=True)
    with pytest.raises(fp.ModelError, match=r"dialect 'ATEN'.*before run_decompositions"):
        fp.from_torch(made.run_decompositions())
    rows = torch.export.Dim("rows")
    with pytest.raises(fp.UnsupportedError, match="without dynamic_shapes"):
        fp.from_torch(torch.export.export(Net().eval(), (IDS,), dynamic_shapes={"ids": {0: rows}}))


# Other files under such a name.


def dynamic(path: Path) -> None:
    rows = torch.export.Dim("rows")
    torch.export.save(torch.export.export(Net().eval(), (IDS,), dynamic_shapes={"ids": {0: rows}}), path)


def compiled_package(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("net/archive_format", "pt2")
        archive.writestr("net/data/aotinductor/model/model.wrapper.so", b"\x7fELF")
        archive.writestr("net/version", "3")


def old_form(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.8")
        archive.writestr("serialized_exported_program.json", "{}")


OTHERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "dynamic": (dynamic, "without a fixed extent.*without dynamic_shapes"),
    "core": (lambda path: torch.export.save(program()[1].run_decompositions(), path), "before run_decompositions"),
    "package": (compiled_package, "a package of AOTInductor.*torch.export.save"),
    "old": (old_form, "torch.export.save"),
    "script": (lambda path: torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path), "a TorchScript module"),
    "weights": (lambda path: torch.save(Net().state_dict(), path), "a file of torch.save"),
    "archive": (lambda path: zipfile.ZipFile(path, "w").close(), "torch.export.save"),
    "text": (lambda path: path.write_text("hello"), "no exported program, but damaged"),
    "empty": (lambda path: path.write_bytes(b""), "no exported program, but damaged"),
    "JSON": (lambda path: path.write_text("{}"), "no exported program, but damaged"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_another_file_is_refused_with_what_it_is(name: str, tmp_path: Path) -> None:
    write, says = OTHERS[name]
    write(tmp_path / "net.pt2")
    with pytest.raises(fp.ModelError, match=says):
        fp.from_torch(tmp_path / "net.pt2")
    done = CliRunner().invoke(cli, ["estimate", str(tmp_path / "net.pt2")])
    assert done.exit_code == 2 and "Traceback" not in done.output and "error: " in done.output


@pytest.mark.parametrize("seed", range(pick(2, 6, 60)))
def test_a_damaged_file_is_refused_or_read_as_data(seed: int, file: Path) -> None:
    rng, data = np.random.default_rng(seed), bytearray(file.read_bytes())
    if seed % 2:
        data = data[: int(rng.integers(5, len(data)))]
    else:
        directory = data.index(b"PK\1\2")  # few of the bytes, and of all the parts that read them
        for at in rng.integers(directory if seed % 4 else 0, len(data), 8):
            data[at] = int(rng.integers(0, 256))
    file.write_bytes(data)
    try:
        fp.from_torch(file)
    except fp.ForeplanError as error:
        assert str(file) in str(error) or "program" in str(error) or "ATen op" in str(error)


# Hostile files.


class Touch:
    """A pickle that makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


Parts = dict[str, bytes]


def in_json(name: str, edit: Callable[[Any, str], None]) -> Callable[[Parts, str], None]:
    def change(parts: Parts, mark: str) -> None:
        document = json.loads(parts[name])
        edit(document, mark)
        parts[name] = json.dumps(document).encode()

    return change


def code_as_a_name(document: Any, mark: str) -> None:
    """PyTorch writes names of inputs into the code of a function."""
    name = f"ids=__import__('os').mkdir({mark!r})"
    text = json.dumps(document).replace('"ids"', json.dumps(name))
    document.clear()
    document.update(json.loads(text))


def code_as_an_extent(document: Any, mark: str) -> None:
    sizes = document["graph_module"]["graph"]["tensor_values"]["ids"]["sizes"]
    text = f"__import__('os').mkdir({mark!r})"
    sizes[0] = {"as_expr": {"expr_str": text, "hint": {"as_int": 4}}}


def another_function(document: Any, mark: str) -> None:
    document["graph_module"]["graph"]["nodes"][-1]["target"] = "torch.os.mkdir"


def an_import(document: Any, mark: str) -> None:
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    context = '{"\\u005f_enum__": true, "fqn": "antigravity:x", "name": "y"}'
    signature["out_spec"] = json.dumps([1, {"type": "builtins.dict", "context": context, "children_spec": []}])


def a_pickled_weight(document: Any, mark: str) -> None:
    document["config"]["norm.weight"]["use_pickle"] = True


def a_pickled_object(parts: Parts, mark: str) -> None:
    parts["data/constants/opaque_obj_0"] = pickle.dumps(Touch(mark))


def a_pickled_example(parts: Parts, mark: str) -> None:
    buffer = io.BytesIO()
    torch.save(((Touch(mark),), {}), buffer)
    parts["data/sample_inputs/model.pt"] = buffer.getvalue()


def deep_json(parts: Parts, mark: str) -> None:
    parts["models/model.json"] = b"[" * 100_000


def a_weight_beyond_its_bytes(document: Any, mark: str) -> None:
    document["config"]["norm.weight"]["tensor_meta"]["sizes"] = [{"as_int": 1 << 20}]


MODEL, WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
HOSTILE: dict[str, tuple[Callable[[Parts, str], None], bool]] = {  # and whether PyTorch's own reader runs it
    "code as a name": (in_json(MODEL, code_as_a_name), True),
    "code as an extent": (in_json(MODEL, code_as_an_extent), True),
    "another function": (in_json(MODEL, another_function), False),
    "an import": (in_json(MODEL, an_import), False),
    "a pickled weight": (in_json(WEIGHTS, a_pickled_weight), False),
    "a pickled object": (a_pickled_object, False),
    "a pickled example": (a_pickled_example, True),
    "deep JSON": (deep_json, False),
    "a weight beyond its bytes": (in_json(WEIGHTS, a_weight_beyond_its_bytes), False),
}


def edited(file: Path, change: Callable[[Parts, str], None], mark: str) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(parts, mark)
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            archive.writestr(f"net/{name}", data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_nothing(name: str, file: Path, tmp_path: Path) -> None:
    change, runs = HOSTILE[name]
    mark = tmp_path / "mark"
    edited(file, change, str(mark))
    done = CliRunner().invoke(cli, ["estimate", str(file)])
    assert done.exit_code == 2 and "Traceback" not in done.output and "error: " in done.output, done.output
    assert not mark.exists() and "antigravity" not in sys.modules
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    if runs:
        with contextlib.suppress(Exception):
            torch.export.load(file)
        assert mark.exists(), "the case shows nothing: PyTorch does not run it"


VALUES = (0, 1, -1, 1 << 31, 1 << 70, 1e308, "", None, [], {}, True, "x", [1, 2], {"as_int": 3})


def places(part: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a document but the whole."""
    for key, each in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        yield (*path, key)
        yield from places(each, (*path, key))


def drawn_edit(seed: int) -> Callable[[Parts, str], None]:
    """One part of a document has another content, or is gone."""
    rng = np.random.default_rng(seed)

    def edit(document: Any, mark: str) -> None:
        ways = list(places(document))
        *path, last = ways[rng.integers(len(ways))]
        for key in path:
            document = document[key]
        if rng.random() < 0.2:
            del document[last]
        else:
            document[last] = VALUES[rng.integers(len(VALUES))]

    return in_json((MODEL, MODEL, WEIGHTS)[rng.integers(3)], edit)


def test_a_file_that_is_edited_anywhere_is_read_or_refused(file: Path) -> None:
    data = file.read_bytes()
    for seed in range(pick(20, 100, 2000)):
        file.write_bytes(data)
        edited(file, drawn_edit(seed), "")
        with contextlib.suppress(fp.ForeplanError):
            fp.from_torch(file)


def test_an_edited_file_without_a_change_is_read(file: Path) -> None:
    before = fp.from_torch(file).as_text()
    edited(file, lambda parts, mark: None, "")
    assert fp.from_torch(file).as_text() == before


def test_without_pytorch_a_file_is_refused_with_the_way_out(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = CliRunner().invoke(cli, ["estimate", str(file)])
    assert done.exit_code == 2 and "pip install torch" in done.output
