"""PyTorch modules and exported programs → Graph, by the graph that `torch.export` gives, before any decomposition.

Importing this package does not import `torch`.

    importer.py        a module, a program or a file of one → Graph
    archive.py         a file of `torch.export.save` → a program, unless it could run something
    program.py         what a program must be, and notes on it
    module_tensors.py  the tensors of a module or a program
    exporting.py       the module's programs, in training mode and in evaluation mode
    attributes.py      what a module does with Python's own objects
    functions.py       autograd functions, whose backward is traced too
    export_gaps.py     hooks, and what else an export passes over in silence
    transforms.py      gradients within a module, and functions mapped over items
    skipped_checks.py  what PyTorch's own layers ask of numbers without need
    patches.py         what of PyTorch is another thing for a while, or is done beside it
    frames.py          lines of the user's own code
    reader.py          programs → Graph: stored tensors, forms, updates of buffers
    run.py             the nodes of one program, in turn
    decompositions.py  what PyTorch makes of an op that has no entry in the table
    autocast.py        the types within `torch.autocast`
    writes.py          which tensors are written in place
    places.py          what is written in place, and views
    pairs.py           complex numbers
    call.py            one call of an op, as its handler sees it
    known_tensors.py   tensors whose content is known while importing
    reference_pass.py  one pass of PyTorch itself, to hold a graph against
    table.py           the table of ATen ops, which the modules of `ops/` fill
"""
