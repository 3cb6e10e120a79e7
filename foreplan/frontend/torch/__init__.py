"""PyTorch modules → Graph. Importing this package does not import `torch`.

There are two roads until the second has all that the first has: then `from_torch` takes it, and the first goes.

Through PyTorch's ONNX exporter, which loses what ONNX cannot say: `detach`, names of modules, buffers that are written:

    through_onnx.py  `from_torch`
    onnx_repairs.py  what the exporter writes, put as the module means it

Through the graph that `torch.export` gives, before any decomposition:

    exported.py   `from_exported`
    exporting.py  the module's programs, in training mode and in evaluation mode
    reader.py     programs → Graph: stored tensors, forms, updates of buffers
    run.py        the nodes of one program, in turn
    places.py     what is written in place, and views
    pairs.py      complex numbers
    call.py       one call of an op, as its handler sees it
    known.py      tensors whose content is known while importing
    table.py      the table of ATen ops, which the modules of `ops/` fill
"""

from foreplan.frontend.torch.through_onnx import from_torch

__all__ = ["from_torch"]
