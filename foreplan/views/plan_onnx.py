"""A plan as an ONNX file for viewers such as Netron: a node an instruction, with offsets and lifetimes as metadata.

Its ops are foreplan's own, in the domain `foreplan`, so no runtime runs it; `foreplan export --step` writes a step that
runs. Metadata of nodes and values is part of ONNX from IR version 10 on. Netron 9.3 shows that of nodes and not that of
values, but it shows what describes a value: so a sentence there says where it lies and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreplan.report.memory import Memory, printable
from foreplan.version import VERSION
from foreplan.views.flow import Content, Flow

if TYPE_CHECKING:
    import onnx

IR_VERSION, OPSET, DOMAIN = 10, 18, "foreplan"
_OTHER_NAMES = {"FLOAT32": "FLOAT", "FLOAT64": "DOUBLE"}


def plan_onnx(memory: Memory, title: str) -> bytes:
    """The file. What is there when the step begins are inputs; what it ends with are outputs."""
    import onnx

    flow = Flow.of(memory)
    calls = getattr(memory.problem, "calls", ())
    proto = onnx.ModelProto(ir_version=IR_VERSION, producer_name="foreplan", producer_version=VERSION)
    proto.opset_import.add(domain="", version=OPSET)
    proto.opset_import.add(domain=DOMAIN, version=1)
    graph = proto.graph
    graph.name = printable(title)
    _add(proto.metadata_props, {"arena_bytes": memory.arena, "peak_step": memory.peak_step})
    names = _unique([content.name for content in flow.contents])
    for content, name in zip(flow.contents, names):
        lists = [graph.input] if content.written < 0 else [] if content.last else [graph.value_info]
        for each in lists + ([graph.output] if content.last else []):
            each.append(_told(flow, content, name))
    labels = _unique([printable(name) for name in flow.line.names])
    for i, step in enumerate(memory.plan.steps):
        node = graph.node.add(name=labels[i], domain=DOMAIN, op_type=calls[step.action].op.name if calls else "action")
        node.input.extend(names[c] for c in flow.reads[i])
        node.output.extend(names[c] for c in flow.writes[i])
        if calls and calls[step.action].source:
            node.doc_string = printable(calls[step.action].source)
        _add(node.metadata_props, flow.facts_of(i))
    return bytes(proto.SerializeToString())


def _told(flow: Flow, content: Content, name: str) -> onnx.ValueInfoProto:
    import onnx

    kind, shape = "UINT8", [flow.memory.problem.values[content.value].nbytes]
    if content.type is not None:
        kind, shape = content.type.dtype.name.upper(), list(content.type.shape)
    known = onnx.TensorProto.DataType.Value(_OTHER_NAMES.get(kind, kind))
    value = onnx.helper.make_tensor_value_info(name, known, shape, flow.sentence(content))
    _add(value.metadata_props, flow.facts(content))
    return value


def _add(props: object, facts: dict[str, str | int]) -> None:
    for key, value in facts.items():
        if value != "":
            props.add(key=f"plan.{key}", value=str(value))  # type: ignore[attr-defined]


def _unique(names: list[str]) -> list[str]:
    """Names of which none is empty or comes twice."""
    seen: set[str] = set()
    found = []
    for name in names:
        name, number = name or "value", 1
        while (taken := name if number == 1 else f"{name}~{number}") in seen:
            number += 1
        seen.add(taken)
        found.append(taken)
    return found
