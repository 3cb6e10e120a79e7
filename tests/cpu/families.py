"""A small net of each family on this process's instruction set, told as JSON: what runs, and how far from NumPy.

`ONEDNN_MAX_CPU_ISA=AVX2 python -m tests.cpu.families` asks oneDNN for no more than AVX2. Names of nets may follow.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import numpy as np
import pytest

import foreplan as fp
from foreplan.frontend import Tensor, nn
from foreplan.frontend.losses import attach_loss
from foreplan.lower.fallbacks import fallbacks
from foreplan.runtime.cpu.onednn.library import library
from foreplan.runtime.cpu.onednn.primitives import Primitive
from foreplan.runtime.kernel import Run
from tests.cpu.test_engine import data_for
from tests.profile import SHORT, searching_by

NETS = {  # and whether their training is looked at: of those that train alike, one
    "mlp:width=32,batch=4": True,
    "conv_chain:size=16": True,
    "resnet18:batch=1,size=32,classes=5": False,
    "resnet50:batch=1,size=32,classes=5": True,
    "vgg16:batch=1,size=32,classes=5": False,
    "mobilenet_v2:batch=1,size=32,classes=5": False,
    "unet:batch=1,size=16,width=8": True,
    "vit_b16:batch=2,size=32,layers=1,width=48,heads=4,classes=5": True,
    "gpt2_small:batch=2,seq=16,layers=1,width=32,heads=4,vocabulary=60": True,
    "bert_base:batch=2,seq=16,layers=1,width=32,heads=4,vocabulary=60": True,
    "images of 1 axis": True,
    "images of 3 axes": True,
}


def built(name: str) -> fp.Graph:
    """A model of the zoo; or a small net of convolutions, normalisation and pools on images of some axes."""
    if not name.startswith("images"):
        return fp.models.build(name)
    axes = int(name.split()[2])

    def model(x: Tensor) -> Tensor:
        for i, channels in enumerate((16, 24)):
            x = nn.conv(x, channels, kernel=3, stride=1 + i, padding=1, bias=False, name=f"conv{i}")
            x = nn.relu(nn.batch_norm(x, name=f"norm{i}"))
            x = nn.max_pool(x, 2) if i else nn.avg_pool(x, 2)
        return nn.linear(nn.flatten(x), 5, name="head")

    return fp.trace(model, fp.spec((2, 4, *(16,) * axes)), name="images")


def watched(patch: pytest.MonkeyPatch) -> set[str]:
    """oneDNN's names of what is bound to memory from now on."""
    bound, bind = set(), Primitive.bind

    def watching(self: Primitive, addresses: Mapping[int, int]) -> Run:
        bound.add(self.implementation)
        return bind(self, addresses)

    patch.setattr(Primitive, "bind", watching)
    return bound


def told(name: str, training: bool) -> Mapping[str, object]:
    """What a net runs."""
    graph = built(name)
    options = {}
    if training:
        loss = fp.losses.cross_entropy if name.startswith("images") else fp.models.default_loss(name)
        graph = attach_loss(graph, loss, [next(iter(graph.outputs))])
        options = {"optimizer": fp.optim.SGD(0.01)}
    step = fp.compile(graph, target="cpu:threads=1", **options)
    with pytest.MonkeyPatch.context() as patch:
        bound = watched(patch)
        session = step.bind(seed=1)
    data = data_for(step)
    found = session.step(data)
    wanted = fp.compile(graph, target="numpy", **options).bind(seed=1).step(data)
    pairs = [(found.outputs[key], array) for key, array in wanted.outputs.items()]
    pairs += [(np.float32(found.loss), np.float32(wanted.loss))] if training else []
    far = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return {"bound": sorted(bound), "numpy": [each.op for each in fallbacks(step.program)], "far": far}


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(NETS)
    cases = [(name, training) for name in chosen for training in {False, NETS[name]}]
    with searching_by(SHORT):
        nets = {f"{name} {'training' if training else 'inference'}": told(name, training) for name, training in cases}
    print(json.dumps({"instruction set": library().isa, "nets": nets}))
