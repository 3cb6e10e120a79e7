"""What a module recomputes by `torch.utils.checkpoint`, a step recomputes."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint, checkpoint_sequential  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.frontend.torch import reader  # noqa: E402
from tests.torch.beside import assert_trains_as_pytorch  # noqa: E402


class Block(nn.Module):
    """Two products."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Any) -> Any:
        """As x."""
        return x + self.down(torch.tanh(self.up(x)))


class Checkpointed(nn.Module):
    """Blocks that are recomputed, by one of the ways to say so."""

    def __init__(self, how: str, blocks: int = 4) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(Block() for _ in range(blocks))
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        """Two numbers a row."""
        x = x if self.how == "reentrant, idle" else self.first(x)
        for block in self.blocks:
            if self.how == "function":
                x = torch.sigmoid(checkpoint(lambda y, b=block: b.down(torch.tanh(b.up(y))), x, use_reentrant=False))
            elif self.how == "never":
                x = block(x)
            elif self.how != "sequential":
                x = checkpoint(block, x, use_reentrant=self.how.startswith("reentrant"))
        if self.how == "sequential":
            x = checkpoint_sequential(nn.Sequential(*self.blocks), 2, x, use_reentrant=False)
        return self.head(x)


CHECKPOINTED = {
    "modules": [f"blocks.{i}" for i in range(4)],
    "reentrant": [f"blocks.{i}" for i in range(4)],
    "reentrant, idle": [],  # PyTorch gives no gradient where the argument has none
    "function": [f"blocks.{i}.up..blocks.{i}.down" for i in range(4)],
    "sequential": ["blocks.0..blocks.1", "blocks.2..blocks.3"],
    "never": [],
}


@pytest.mark.parametrize("how", CHECKPOINTED)
def test_what_a_module_recomputes_is_recomputed(how: str) -> None:
    torch.manual_seed(0)
    module, x = Checkpointed(how), torch.randn(64, 8)
    graph = fp.from_torch(module, x)
    session = assert_trains_as_pytorch(module, copy.deepcopy(module), (x,))
    options: dict[str, Any] = {"loss": fp.losses.mean, "optimizer": fp.optim.SGD(0.1), "target": "numpy"}
    step, without = fp.compile(graph, **options), fp.compile(graph, checkpoint=[], **options)
    notes = [note for note in step.program.notes if "torch.utils.checkpoint" in note]
    assert not any("torch.utils.checkpoint" in note for note in without.program.notes)
    if not CHECKPOINTED[how]:
        assert not notes and step.arena_bytes == without.arena_bytes
        return
    assert len(notes) == 1 and notes[0].startswith("recomputed")
    assert step.arena_bytes < 0.9 * without.arena_bytes
    if how != "sequential":  # whose last part PyTorch does not recompute
        assert fp.compile(graph, checkpoint=CHECKPOINTED[how], **options).plan == step.plan
    assert session.steps_done == 3
    assert not any("recomputed" in note for note in fp.compile(graph, target="numpy").program.notes)
    assert not any("recomputed" in note for note in fp.compile(graph, budget=0.9, **options).program.notes)


class Images(nn.Module):
    """Layers with batch normalisation, which counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 3)
        self.layer1, self.layer2 = (nn.Sequential(self.block(), self.block()) for _ in range(2))

    @staticmethod
    def block() -> Any:
        """As most networks of images have it."""
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Any) -> Any:
        """Scores."""
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


OPTIONS: list[dict[str, Any]] = [
    *({"checkpoint": ["layer1"]}, {"checkpoint": ["layer?.*"]}, {"checkpoint": ["layer1.0..layer2.0"]}),
    *({"keep": ["layer1"]}, {"recompute": ["layer1"]}, {"to_host": ["layer1"]}, {"split": {"layer1": 2}}),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parts_of_a_module_are_called_by_their_paths(options: dict[str, Any]) -> None:
    graph = fp.from_torch(Images(), torch.randn(4, 3, 16, 16))
    usual: dict[str, Any] = {"loss": fp.losses.cross_entropy, "optimizer": fp.optim.SGD(0.1), "target": "numpy"}
    step = fp.compile(graph, **usual, **options)
    if "checkpoint" in options:
        assert step.arena_bytes < fp.compile(graph, **usual).arena_bytes
    scoped = [
        node for node in graph.nodes if node.name.startswith(tuple(name for name, _ in Images().named_children()))
    ]
    assert len(scoped) >= 0.95 * len(graph.nodes)


def test_work_of_naming_what_is_recomputed_is_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    segments_of = reader.segments_of

    def counted(*args: Any) -> Any:
        count = 0

        def call(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(call)
        try:
            return segments_of(*args)
        finally:
            sys.setprofile(None)
            calls.append(count)

    monkeypatch.setattr(reader, "segments_of", counted)
    for n in (4, 16):
        module = Checkpointed("modules", n)
        assert fp.from_torch(module, torch.randn(4, 8)).origin.segments == tuple(f"blocks.{i}" for i in range(n))
    assert calls[1] < 5 * calls[0]
