"""Translations of ops to ONNX, one file a family. Importing this package fills the table."""

from foreplan.export.ops import elements, index, losses, pool, products, rows, shape
from foreplan.export.table import translation_of

__all__ = ["elements", "index", "losses", "pool", "products", "rows", "shape", "translation_of"]
