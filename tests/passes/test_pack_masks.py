"""One-bit masks in a whole step: beside the texts of `pack_masks/`."""

from __future__ import annotations

import foreplan as fp
from foreplan.passes import simplified


def test_simplifying_again_changes_nothing() -> None:
    graph = fp.models.build("unet:batch=1,size=32,width=16")
    compiled = fp.compile(graph, loss=fp.losses.cross_entropy, remat="off")
    assert any(call.op.name == "pack_bits" for call in compiled.program.calls)
    whole = compiled.graph
    assert whole is not None and simplified(whole).as_text() == whole.as_text()
