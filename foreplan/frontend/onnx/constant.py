"""Constant nodes: one tensor, in any of the attributes that may hold it."""

from __future__ import annotations

import numpy as np

from foreplan.frontend.onnx.node import OnnxNode
from foreplan.frontend.onnx.tensors import Constant, from_array
from foreplan.graph.value import Kind


def constant(n: OnnxNode, kind: Kind) -> Constant:
    """The content of a Constant node.

    Args:
        n: the node.
        kind: what it becomes if it holds floats.

    Raises:
        UnsupportedError: it holds strings or a sparse tensor.
    """
    name = n.output_names[0]
    tensor = n.tensor("value", kind)
    if tensor is not None:
        return tensor
    if n.has_attribute("value_float"):
        return from_array(name, np.array(n.raw_number("value_float"), np.float32), kind)
    if n.has_attribute("value_floats"):
        return from_array(name, np.array(n.numbers("value_floats"), np.float32), kind)
    if n.has_attribute("value_int"):
        return from_array(name, np.array(n.integer("value_int"), np.int64), kind)
    if n.has_attribute("value_ints"):
        return from_array(name, np.array(n.integers("value_ints"), np.int64), kind)
    held = [attribute.name for attribute in n.proto.attribute]
    raise n.unsupported(
        f"it holds {', '.join(held) or 'nothing'}, and foreplan reads dense tensors of numbers; store it as one"
    )
