"""Files of other tools: what they are is told, and how their model becomes an ONNX file."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from foreplan.base.errors import ForeplanError, ModelError
from foreplan.cli.data import read_arrays
from foreplan.frontend import from_onnx
from tests.cli.shell import foreplan


def archive(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name in names:
            file.writestr(name, b"")


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "entries", "what"),
    [
        ("x.pt", ["x/data.pkl", "x/version"], "torch.save.*torch.export.save"),
        ("model.bin", ["archive/data.pkl", "archive/data/0"], "torch.save.*from_torch"),
        ("x.pth", ["x/data.pkl", "x/code/__torch__.py"], "TorchScript module.*torch.export.save"),
        ("x.pt2", ["x/archive_format", "x/models/model.json"], "exported program.*foreplan.from_torch"),
        ("x.keras", ["config.json", "model.weights.h5"], "Keras.*format='onnx'"),
        ("x.zip", ["model.onnx"], "unpack it"),
    ],
)
def test_archives_are_told_by_what_they_hold(tmp_path: Path, name: str, entries: list[str], what: str) -> None:
    archive(tmp_path / name, *entries)
    with pytest.raises(ModelError, match=what) as caught:
        from_onnx(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("end", ["pt", "onnx", "npz"])
def test_an_archive_damaged_at_any_byte_is_refused(tmp_path: Path, end: str) -> None:
    path = tmp_path / f"x.{end}"
    archive(path, "x/data.pkl", "é.npy", "x.npy")
    whole = path.read_bytes()
    for at in range(4, len(whole)):
        for change in (0xFF, 0x80, 0x01):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
            with pytest.raises(ForeplanError, match=re.escape(str(path))):
                read_arrays(str(path)) if end == "npz" else from_onnx(path)
        path.write_bytes(whole[:at])
        with pytest.raises(ForeplanError, match=re.escape(str(path))):
            read_arrays(str(path)) if end == "npz" else from_onnx(path)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("x.tflite", b"\x1c\0\0\0TFL3" + bytes(40), "TensorFlow Lite.*tf2onnx.convert --tflite"),
        ("x.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "Keras.*tf2onnx"),
        ("old.pth", b"\x80\x02\x8a\nl\xfc\x9c" + bytes(40), "pickle.*torch.export.save"),
        ("x.gguf", b"GGUF\3\0\0\0" + bytes(40), "GGUF"),
        ("x.pb", b"\x0a\x0b" + b"a" * 40, "by its name.*TensorFlow.*tf2onnx.convert --graphdef"),
        ("w.bin", b"\xff" * 100, "by its name.*weights"),
        ("x.ckpt", b"", "is empty"),
    ],
)
def test_files_are_told_by_bytes_or_by_name(tmp_path: Path, name: str, content: bytes, what: str) -> None:
    path = written(tmp_path, name, content)
    with pytest.raises(ModelError, match=what) as caught:
        from_onnx(path)
    assert str(path) in str(caught.value)


def test_weights_and_folders_are_told(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), np.float32)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"weights without a model.*--weights"):
        from_onnx(tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match="a folder; give"):
        from_onnx(tmp_path)
    written(tmp_path, "saved_model.pb", b"")
    with pytest.raises(ModelError, match=r"SavedModel of TensorFlow.*--saved-model"):
        from_onnx(tmp_path)


def test_the_command_line_tells_it_without_a_traceback(tmp_path: Path) -> None:
    path = written(tmp_path, "model.pt", b"\x80\x02" + os.urandom(60))
    done = foreplan("estimate", path, code=2)
    assert "torch.export.save" in done.stderr and "Traceback" not in done.stderr
