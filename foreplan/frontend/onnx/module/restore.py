"""A file's graph as the module has it: with the tensors that an exporter has merged, doubled, left out or renamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foreplan.frontend.onnx.module.clashing_names import rename_clashing_results
from foreplan.frontend.onnx.module.draft import Draft
from foreplan.frontend.onnx.module.duplicated_weights import tie_duplicated_weights
from foreplan.frontend.onnx.module.exporter import Exporter
from foreplan.frontend.onnx.module.merged_nodes import split_merged_nodes
from foreplan.frontend.onnx.module.merged_weights import split_merged_weights
from foreplan.frontend.onnx.module.omitted_biases import restore_omitted_biases
from foreplan.frontend.onnx.order import in_order

if TYPE_CHECKING:
    import onnx


def restore_module(
    graph: onnx.GraphProto, exporter: Exporter, label: str
) -> tuple[onnx.GraphProto, Exporter, list[str]]:
    """The graph, what the exporter tells of its tensors, and notes for people; the graph itself where nothing changes.

    Only files of PyTorch's exporters are changed, as far as they tell what the module has.

    Args:
        graph: of the file, which stays as it is.
        exporter: what the file tells of its tensors.
        label: of the model, for errors.

    Raises:
        ModelError: the nodes of a graph that is changed give a tensor twice, or wait for each other.
    """
    draft = Draft(graph, exporter)
    if exporter.is_torch:
        for step in (
            rename_clashing_results,
            split_merged_nodes,
            split_merged_weights,
            restore_omitted_biases,
            tie_duplicated_weights,
        ):
            step(draft)
    if draft.graph is not graph:
        nodes = [node for _, node in in_order(draft.graph.node, label)]
        del draft.graph.node[:]
        draft.graph.node.extend(nodes)
    return draft.graph, draft.exporter, draft.notes
