"""Results that the exporter has called like a tensor of the module: they get names of their own.

`torch.onnx.export(…, dynamo=True, optimize=False)` calls the first mean `mean`, as a buffer may be called. The sign is
a node whose output has the name of an initializer of the module, and whose metadata call it so. The result is renamed,
for those readers whose metadata name it and not the tensor.
"""

from __future__ import annotations

from foreplan.frontend.onnx.module.draft import Draft
from foreplan.frontend.onnx.module.signature import Call


def rename_clashing_results(draft: Draft) -> None:
    """Rename each such result. A reader that names neither it nor the tensor, or both, leaves the file as it is: an
    error then says what is given twice.
    """
    held = {tensor.name for tensor in draft.graph.initializer} & draft.exporter.signature.kinds.keys()
    outputs = {info.name for info in draft.graph.output}
    for index, node in enumerate(list(draft.graph.node)):
        for slot, name in enumerate(node.output):
            call = Call.of(node)
            if name not in held or name in outputs or call is None or call.value != name:
                continue
            readers = _readers(draft, name)
            if readers is None:
                continue
            graph, new = draft.change(), draft.claim(f"{name}.result")
            graph.node[index].output[slot] = new
            for at, place in readers:
                graph.node[at].input[place] = new
            draft.notes.append(
                f"the exporter calls a result {name!r}, as the module calls a tensor; it is {new!r} here"
            )


def _readers(draft: Draft, name: str) -> list[tuple[int, int]] | None:
    """The inputs of nodes that read the result of that name; None: the file does not tell of one of them."""
    targets, found = draft.exporter.signature.targets, []
    for index, node in enumerate(draft.graph.node):
        slots = [slot for slot, each in enumerate(node.input) if each == name]
        call = Call.of(node) if slots else None
        if call is None:
            if slots:
                return None
            continue
        result, tensor = name in call.args, any(targets.get(each) == name for each in call.args)
        if result == tensor:
            return None
        found += [(index, slot) for slot in slots if result]
    return found
