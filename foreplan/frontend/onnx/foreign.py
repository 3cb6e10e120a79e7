"""Files that are no ONNX models: what they are, and how their model becomes one."""

from __future__ import annotations

import zipfile
from pathlib import Path

_TORCH = (
    "load the module in Python and give it to foreplan.from_torch, or to a command as package.module:make; or write "
    "its program, torch.export.save(torch.export.export(module, (example,)), 'model.pt2')"
)
_TENSORFLOW = "convert it with tf2onnx: python -m tf2onnx.convert --{} {} --output model.onnx"
_WEIGHTS = "export the model that they belong to, and give them to `foreplan run --weights` or to session.load"
_PICKLE = b"\x80"
# By the end of a name, for what no first bytes tell.
_BY_SUFFIX = {
    ".pt": ("a file of PyTorch", _TORCH),
    ".pth": ("a file of PyTorch", _TORCH),
    ".bin": ("a file of weights or of another tool, without a model", _TORCH),
    ".ckpt": ("a checkpoint of training, without a model", _TORCH),
    ".safetensors": ("a damaged file of weights, without a model", _WEIGHTS),
    ".h5": ("a damaged file of Keras", _TENSORFLOW.format("keras", "model.h5")),
    ".keras": ("a damaged file of Keras", "load it and call model.export('model.onnx', format='onnx')"),
    ".pb": ("a graph of TensorFlow, or damaged", _TENSORFLOW.format("graphdef", "model.pb --inputs … --outputs …")),
    ".tflite": ("a damaged file of TensorFlow Lite", _TENSORFLOW.format("tflite", "model.tflite")),
    ".mlmodel": ("a model of Core ML", "export it to ONNX from the framework in which it was made"),
    ".pdmodel": ("a model of Paddle", "convert it with paddle2onnx"),
}


def told_by_bytes(path: Path) -> str:
    """What a file is by its first bytes, and what to do with it; empty: it may be an ONNX model."""
    if path.is_dir():
        if (path / "saved_model.pb").is_file():
            return f"a SavedModel of TensorFlow; {_TENSORFLOW.format('saved-model', path)}"
        return "a folder; give the .onnx file"
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(16)
    found = None
    if head.startswith(b"PK\3\4"):
        found = _in_zip(path)
    elif head.startswith(b"\x89HDF\r\n\x1a\n"):
        found = ("a file of Keras, or other HDF5 data", _TENSORFLOW.format("keras", path))
    elif head[4:8] == b"TFL3":
        found = ("a model of TensorFlow Lite", _TENSORFLOW.format("tflite", path))
    elif head[8:9] == b"{" and int.from_bytes(head[:8], "little") + 8 <= size:
        found = ("a safetensors file: weights without a model", _WEIGHTS)
    elif head.startswith(b"GGUF"):
        found = ("a GGUF file: weights for llama.cpp", "export the model to ONNX from the framework that made it")
    elif head.startswith(_PICKLE) and head[1:2] in b"\2\3\4\5":
        found = ("a pickle, as old versions of PyTorch write", _TORCH)
    return "" if found is None else f"{found[0]}; {found[1]}"


def told_by_name(path: Path) -> str:
    """What a file that is no ONNX model may be by its name, and what to do with it; empty: the name does not tell."""
    found = _BY_SUFFIX.get(path.suffix.lower())
    return "" if found is None else f"by its name {found[0]}; {found[1]}"


def _in_zip(path: Path) -> tuple[str, str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # whatever zipfile raises at bytes that it did not write
        return "a damaged archive, perhaps of PyTorch", _TORCH
    ends = {name.rpartition("/")[2] for name in names}
    if "model.weights.h5" in ends:
        return "a model of Keras", "load it and call model.export('model.onnx', format='onnx')"
    if any(name.endswith(".onnx") for name in ends):
        return "an archive that holds an ONNX model", "unpack it and give the .onnx file"
    if "data.pkl" in ends and any("/code/" in name for name in names):
        return "a TorchScript module", _TORCH
    if "data.pkl" in ends:
        return "a file of torch.save: weights, or a pickled module", _TORCH
    if any("archive_format" in name or "serialized_exported_program" in name for name in ends):
        return "an exported program of PyTorch", "give it to foreplan.from_torch, or to a command under a name in .pt2"
    return "an archive", "unpack it and give the .onnx file in it"
