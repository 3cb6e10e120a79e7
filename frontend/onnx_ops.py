"""The complete table of translations: importing this module imports every file of them."""

import importlib
import pkgutil

import foreplan.frontend
from foreplan.frontend.onnx_node import TRANSLATIONS as TRANSLATIONS

for _module in sorted(
    m.name for m in pkgutil.iter_modules(foreplan.frontend.__path__) if m.name.startswith("onnx_ops_")
):
    importlib.import_module(f"foreplan.frontend.{_module}")
