"""Ops of the domain ai.onnx.ml that compute with tensors of numbers."""

from __future__ import annotations

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.frontend.onnx.tensors import from_array
from foreplan.graph import as_dtype
from foreplan.ops.expr import where
from foreplan.ops.index import gather
from foreplan.ops.map import elementwise
from foreplan.ops.shape import reshape

DOMAIN = "ai.onnx.ml"


@translates("ArrayFeatureExtractor", domain=DOMAIN)
def _array_feature_extractor(n: OnnxNode) -> Operand:
    """Elements of the last axis; a vector is taken for a row."""
    x, places = n.value(0), n.value(1)
    if len(x.shape) == 1:
        x = reshape(n.b, x, (1, *x.shape))
    return gather(n.b, x, reshape(n.b, places, (places.type.size,)), len(x.shape) - 1)


@translates("Binarizer", domain=DOMAIN)
def _binarizer(n: OnnxNode) -> Operand:
    """1 above the threshold, else 0."""
    x, threshold = n.value(0), n.number("threshold", 0.0)
    return elementwise(n.b, lambda a: where(a > threshold, 1, 0), x, dtype=x.dtype)


@translates("Scaler", domain=DOMAIN)
def _scaler(n: OnnxNode) -> Operand:
    """Features along the last axis less an offset, times a scale: one of each feature, or one of all."""
    x, terms = n.value(0), []
    for name, usual in (("offset", 0.0), ("scale", 1.0)):
        numbers = np.asarray(n.numbers(name, [usual]), np.float32)
        if len(numbers) not in {1, *x.shape[-1:]}:
            raise n.misshapen(f"{name} has {len(numbers)} numbers, for the features of {n.type(0)}")
        terms.append(n.as_value(from_array(f"{n.output_names[0]}.{name}", numbers)))
    return elementwise(n.b, lambda a, offset, scale: (a - offset) * scale, x, *terms, dtype=as_dtype("float32"))
