"""Composite ops by their definitions: a model's own functions, and the function bodies that ONNX has for its ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foreplan.base.errors import UnsupportedError
from foreplan.frontend.onnx.bodies import microsoft_body
from foreplan.frontend.onnx.load import domain_of
from foreplan.frontend.onnx.node import OnnxNode
from foreplan.frontend.onnx.sequences import Given, Tensors
from foreplan.frontend.onnx.tensors import ONNX_DTYPES

if TYPE_CHECKING:
    import onnx


def standard_body(n: OnnxNode, given: Sequence[Given]) -> onnx.FunctionProto | None:
    """ONNX's function body of the node's op at its opset, or that of an op of com.microsoft; None if it has none.

    Args:
        n: the node.
        given: its inputs, sequences among them.
    """
    import onnx

    if domain_of(n.proto.domain) == "com.microsoft":
        return microsoft_body(n)
    try:
        schema: Any = onnx.defs.get_schema(n.op_type, n.opset, domain_of(n.proto.domain))
    except onnx.defs.SchemaError:
        return None
    versions = [v for v in schema.function_opset_versions if v <= n.opset]
    if versions:
        return onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))
    versions = [v for v in schema.context_dependent_function_opset_versions if v <= n.opset]
    if not versions:
        return None
    types = [_type_proto(each).SerializeToString() for each in given]
    try:
        body = schema.get_context_dependent_function_with_opset_version(
            max(versions), n.proto.SerializeToString(), types
        )
    except (RuntimeError, ValueError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return None  # the body does not cover this combination of inputs and attributes
    return onnx.FunctionProto.FromString(body)


def _type_proto(given: Given) -> onnx.TypeProto:
    import onnx

    if given is None:
        return onnx.TypeProto()
    if isinstance(given, Tensors):
        return onnx.helper.make_sequence_type_proto(_type_proto(given.items[0] if given.items else None))
    return onnx.helper.make_tensor_type_proto(ONNX_DTYPES[given.type.dtype.name], given.type.shape)


def attributes_of_call(n: OnnxNode, body: onnx.FunctionProto) -> dict[str, onnx.AttributeProto]:
    """The attributes that the body may refer to: those of the node, then the defaults of function and op."""
    import onnx

    found = {attribute.name: attribute for attribute in body.attribute_proto}
    try:
        schema = onnx.defs.get_schema(n.op_type, n.opset, domain_of(n.proto.domain))
        found |= {k: v.default_value for k, v in schema.attributes.items() if v.default_value.type}
    except onnx.defs.SchemaError:
        pass  # a function of the model's own
    return found | {attribute.name: attribute for attribute in n.proto.attribute}


def with_attributes(node: onnx.NodeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """A node of a function body with the call's attributes put in; references to absent ones are dropped."""
    import onnx

    if not _refers(node):
        return node
    filled = onnx.NodeProto()
    filled.CopyFrom(node)
    del filled.attribute[:]
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            if attribute.ref_attr_name in given:
                added = filled.attribute.add()
                added.CopyFrom(given[attribute.ref_attr_name])
                added.name = attribute.name
            continue
        added = filled.attribute.add()
        added.CopyFrom(attribute)
        if attribute.HasField("g"):
            del added.g.node[:]
            added.g.node.extend(with_attributes(inner, given) for inner in attribute.g.node)
    return filled


def _refers(node: onnx.NodeProto) -> bool:
    return any(
        attribute.ref_attr_name or (attribute.HasField("g") and any(_refers(inner) for inner in attribute.g.node))
        for attribute in node.attribute
    )


def unknown_op(n: OnnxNode, domain: str, opsets: Mapping[str, int]) -> UnsupportedError:
    """The error for an op without a translation, and without a body in ONNX."""
    what = f"{domain}.{n.op_type}" if domain else n.op_type
    if domain and domain not in opsets:
        return UnsupportedError(
            f"{n.where}: the model imports no opset of the domain {domain!r}, to which the op {what} belongs; "
            "export it again, or add the domain to its opset_import"
        )
    return UnsupportedError(
        f"{n.where}: foreplan has no translation of the op {what}, and ONNX has no "
        "function body for it; export the model without it, or replace it by simpler ops"
    )
