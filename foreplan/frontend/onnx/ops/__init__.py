"""Translations of ONNX ops, one file a family; importing this package imports them all, so the table is complete."""

import importlib
import pkgutil

from foreplan.frontend.onnx.node import TRANSLATIONS as TRANSLATIONS

for _module in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_module}")
