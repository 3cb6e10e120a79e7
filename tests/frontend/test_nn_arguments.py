"""Layers with one wrong argument each: an error of ours, or a graph; never a traceback out of NumPy or foreplan."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foreplan as fp
from foreplan.frontend import nn
from tests.compiler.test_arguments import VALUES
from tests.profile import pick

FUNCTIONS = sorted(name for name in nn.__all__ if inspect.isfunction(getattr(nn, name)))
IMAGES, ROWS, HEADS = (2, 4, 8, 8), (2, 6, 8), (2, 2, 6, 4)
SHAPES = dict.fromkeys(("gru", "lstm", "rnn", "multi_head_attention", "linear", "split_heads", "topk"), ROWS)
SHAPES |= dict.fromkeys(("attention", "join_heads", "rotary_embedding"), HEADS)
# What is right, so that one argument at a time is wrong.
RIGHT: dict[str, Any] = {
    "size": 4, "kernel": 3, "features": 4, "groups": 2, "axis": -1, "count": 4, "heads": 2, "depth": 5, "k": 2,
    "factor": 2, "padding": 1, "scale": 2, "fan_in": 3, "fan_out": 4, "shape": (2, 3), "name": "own", "bias": True,
    "start": 1, "parts": 1, "function": lambda x: (x, lambda g: g),
}  # fmt: skip
TENSORS = ("x", "q", "k", "v", "y", "logits", "value", "through")

DRAWS = pick(4, 6, 60)


def arguments(name: str, x: Any, ids: Any) -> dict[str, Any]:
    """All that a function needs."""
    found: dict[str, Any] = {}
    for each in inspect.signature(getattr(nn, name)).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if each.name in TENSORS and not (name == "topk" and each.name == "k"):
            found[each.name] = x
        elif each.name == "tensors":
            found[each.name] = [x, x]
        elif each.name in ("ids", "target"):
            found[each.name] = ids
        elif each.name == "mask":
            found[each.name] = x > 0 if name == "masked_mean" else None
        elif each.default is each.empty:
            found[each.name] = RIGHT[each.name]
    return found


def traced(name: str, wrong: str = "", value: Any = None) -> fp.graph.Graph:
    def model(x: Any, ids: Any) -> Any:
        given = arguments(name, x, ids)
        if name == "shared":
            nn.linear(x, 3, name="own")
            given["name"] = "own.weight"
        if name == "cross_entropy":
            given["target"] = ids[:, 0, 0, 0]
            given["logits"] = x[:, :, 0, 0]
        if wrong:
            given[wrong] = value
        found = getattr(nn, name)(**given)
        if isinstance(found, tuple):
            found = found[0]
        return found if hasattr(found, "shape") and hasattr(found, "dtype") else x * 1.0

    return fp.trace(model, fp.spec(SHAPES.get(name, IMAGES)), fp.spec(SHAPES.get(name, IMAGES), "int64"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_right_works(name: str) -> None:
    if name != "gradient":
        traced(name)


PARAMETERS = [
    (name, each.name)
    for name in FUNCTIONS
    for each in inspect.signature(getattr(nn, name)).parameters.values()
    if each.kind is not each.VAR_POSITIONAL
]


@pytest.mark.parametrize(("name", "wrong"), PARAMETERS)
@settings(
    max_examples=pick(4, 6, 60),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
@given(value=VALUES | st.just(np.ones((3, 3), np.float32)))
def test_a_wrong_argument_ends_in_an_error_of_ours_or_works(name: str, wrong: str, value: Any) -> None:
    try:
        traced(name, wrong, value)
    except fp.ForeplanError as error:
        assert str(error)
