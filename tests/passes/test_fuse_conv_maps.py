"""Convolutions that take in what alone reads their results: beside the texts of `fuse_conv_maps/`."""

from __future__ import annotations

import foreplan as fp


def test_a_target_that_does_not_ask_for_it_gets_none() -> None:
    graph = fp.models.build("resnet18:batch=1,size=32")
    assert not any(call.op.name == "conv_map" for call in fp.lower(graph).calls)
