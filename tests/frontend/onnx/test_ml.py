"""Ops of ai.onnx.ml, and counts of n-grams. ONNX Runtime is the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from foreplan.base.errors import ForeplanError
from foreplan.frontend import from_onnx
from tests.frontend.onnx.models import model, node, random, same_as_onnxruntime

GRAMS: dict[str, Any] = {
    "pool_int64s": [2, 3, 5, 4, 5, 6, 7, 8, 6, 3, 3, 3],
    "ngram_counts": [0, 3, 9],
    "ngram_indexes": [0, 4, 1, 5, 3, 2, 6],
}


def counts(shape: tuple[int, ...], **attributes: Any) -> onnx.ModelProto:
    attributes = {"mode": "TF", "min_gram_length": 1, "max_gram_length": 3, "max_skip_count": 0, **GRAMS, **attributes}
    proto = model([node("TfIdfVectorizer", "x", "y", **attributes)], {"x": shape}, ["y"])
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    return proto


@pytest.mark.parametrize("mode, weights", [("TF", []), ("IDF", []), ("IDF", range(7)), ("TFIDF", range(7))])
@pytest.mark.parametrize("least, most, skip", [(1, 1, 3), (1, 3, 0), (2, 2, 1), (2, 3, 5), (3, 3, 2)])
@pytest.mark.parametrize("shape", [(12,), (4, 9), (2, 1)])
def test_n_grams_are_counted(mode: str, weights: Any, least: int, most: int, skip: int, shape: tuple[int, ...]) -> None:
    proto = counts(shape, mode=mode, min_gram_length=least, max_gram_length=most, max_skip_count=skip)
    if weights:
        proto.graph.node[0].attribute.append(helper.make_attribute("weights", [0.5 + each for each in weights]))
    x = np.random.default_rng(len(shape)).integers(2, 9, shape)
    same_as_onnxruntime(proto, x=np.where(x == 8, 3, x))


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"mode": "BM25"}, "mode must be TF, IDF or TFIDF"),
        ({"ngram_counts": [0, 4, 9]}, "do not divide a pool of 12"),
        ({"ngram_indexes": [0, 1]}, "its pool has 7 n-grams, and ngram_indexes has 2"),
        ({"weights": [1.0]}, "a weight if there are any, for each n-gram"),
        ({"pool_strings": ["a"]}, "it counts texts"),
    ],
)
def test_pools_that_do_not_fit_are_told(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ForeplanError, match=rf"\(TfIdfVectorizer\).*{message}"):
        from_onnx(counts((4,), **attributes))


def of_ml(op: str, inputs: str, shapes: dict[str, Any], constants: dict[str, np.ndarray], **attributes: Any) -> Any:
    made = helper.make_node(op, inputs.split(), ["y"], domain="ai.onnx.ml", **attributes)
    proto = model([made], shapes, ["y"], constants, domains=["ai.onnx.ml"])
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    return proto


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_elements_of_the_last_axis_are_taken(shape: tuple[int, ...]) -> None:
    proto = of_ml("ArrayFeatureExtractor", "x at", {"x": shape}, {"at": np.array([[4, 0, 4]])})
    same_as_onnxruntime(proto, x=random(*shape))


def test_what_is_above_a_threshold_is_one() -> None:
    x = np.float32([[0.5, 0.25, -1.0], [0.75, 0.5, 3.0]])
    same_as_onnxruntime(of_ml("Binarizer", "x", {"x": (2, 3)}, {}, threshold=0.5), x=x)
    same_as_onnxruntime(of_ml("Binarizer", "x", {"x": (2, 3)}, {}), x=x)


@pytest.mark.parametrize("offset, scale", [([0.5], [-2.0]), ([1.0, 2.0, 3.0], [2.0, -0.5, 0.0])])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32"])
def test_features_are_scaled(offset: list[float], scale: list[float], dtype: str) -> None:
    proto = of_ml("Scaler", "x", {"x": (2, 3)}, {}, offset=offset, scale=scale)
    proto.graph.input[0].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    same_as_onnxruntime(proto, x=(4 * random(2, 3)).astype(dtype))


def test_a_scaler_of_other_features_is_told() -> None:
    with pytest.raises(ForeplanError, match=r"\(Scaler\).*scale has 2 numbers, for the features of float32\[2,3\]"):
        from_onnx(of_ml("Scaler", "x", {"x": (2, 3)}, {}, offset=[0.0], scale=[1.0, 2.0]))
