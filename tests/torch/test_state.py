"""What a session keeps of a module is what the module keeps: names, ties, constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from safetensors.numpy import save_file  # noqa: E402
from torch import nn  # noqa: E402

import foreplan as fp  # noqa: E402
from tests.profile import few  # noqa: E402
from tests.torch.exports import example  # noqa: E402
from tests.torch.modules import MODULES  # noqa: E402

SOME = ("input normalization", "resnet, basic blocks", "gpt, tied", "lstm", "swin block", "mlp with spectral norm")


class Kept(nn.Module):
    """What a state_dict may hold: ties, what nothing reads, what is computed with while importing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 2)
        self.b.weight = self.a.weight
        self.also = self.a
        self.register_buffer("order", torch.tensor([2, 0, 1, 3]))
        self.register_buffer("shift", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.register_buffer("turn", torch.polar(torch.ones(2), torch.ones(2)))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, x: Any) -> Any:
        """[N, 4]."""
        x = self.b(self.a(x)[:, self.order]) + self.shift.exp() + self.passing
        return x + torch.view_as_real(self.turn).flatten()


def test_the_state_of_a_session_is_all_that_the_module_has(tmp_path: Path) -> None:
    module, x = Kept(), torch.randn(5, 4)
    session = fp.compile(fp.from_torch(module, x), fp.losses.mean, fp.optim.AdamW(0.1), target="numpy").bind()
    for _ in range(2):
        session.step({"x": x.numpy()})
    state = session.state_dict()
    Kept().load_state_dict({name: torch.from_numpy(array) for name, array in state.items()}, strict=True)
    assert state["b.weight"] is state["a.weight"] or (state["b.weight"] == state["a.weight"]).all()
    assert (state["idle.weight"] == module.idle.weight.detach().numpy()).all()
    session.save(tmp_path / "whole.safetensors")
    session.load(tmp_path / "whole.safetensors")
    # As other tools write it: a tied weight under one of its names, or under each of them.
    real = {name: array for name, array in state.items() if array.dtype.kind != "c"}
    once = {name: array for name, array in real.items() if not name.startswith("also") and name != "a.weight"}
    for file in (real, once):
        save_file({**file, "b.weight": state["b.weight"] + 1}, tmp_path / "theirs.safetensors")
        session.load(tmp_path / "theirs.safetensors")
    assert (session.state_dict()["also.weight"] == state["a.weight"] + 1).all()
    save_file({**real, "order": np.array([0, 1, 2, 3])}, tmp_path / "theirs.safetensors")
    with pytest.raises(
        fp.SessionError, match=r"another 'order' than the module, whose int64\[4\] the model was computed"
    ):
        session.load(tmp_path / "theirs.safetensors")


class Passing(nn.Module):
    """Writes what its state_dict does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), torch.ones(4)
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: Any) -> Any:
        """[N, 4]."""
        y = self.layer(x)
        self.mean.mul_(0.9).add_(y.detach().mean(0))
        self.scale.mul_(1.1)
        return (y - self.mean) * self.scale


def test_what_is_not_in_a_state_dict_is_kept_and_not_in_the_session_s(tmp_path: Path) -> None:
    module, theirs, x = Passing(), Passing(), torch.randn(5, 4)
    theirs.load_state_dict(module.state_dict())
    session = fp.compile(fp.from_torch(module, x), fp.losses.mean, fp.optim.SGD(0.1), target="numpy").bind()
    session.save(tmp_path / "begin.safetensors")
    for _ in range(2):
        session.step({"x": x.numpy()})
        loss = theirs(x).mean()
        loss.backward()
        with torch.no_grad():
            for p in theirs.parameters():
                p.sub_(0.1 * p.grad)
                p.grad = None
    assert session.state_dict().keys() == module.state_dict().keys()
    session.to_torch(module)
    for found, wanted in ((module.mean, theirs.mean), (module.scale, theirs.scale)):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(module.state_dict(), theirs.state_dict())
    save_file(session.state_dict(), tmp_path / "theirs.safetensors")
    session.load(tmp_path / "theirs.safetensors")
    session.load(tmp_path / "begin.safetensors", state=False)
    session.to_torch(module)
    assert (module.mean == 0).all() and (module.scale == 1).all()


@pytest.mark.parametrize("name", few(list(MODULES), [i for i, name in enumerate(MODULES) if name in SOME]))
def test_modules_load_the_state_of_a_session_strictly(name: str) -> None:
    made = example(name)
    session = fp.compile(fp.from_torch(made.module, *made.inputs), target="numpy").bind()
    state = session.state_dict()
    made.module.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()}, strict=True)
