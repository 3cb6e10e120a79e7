"""LoRA beside PEFT: losses, files, merged weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreplan as fp

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
nn = torch.nn
warnings.filterwarnings("ignore", module="peft")


class Small(nn.Module):
    """Products, an embedding and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False))
        self.mix = Conv1D(6, 6)  # as GPT-2 holds weights: [in, out]
        self.conv = nn.Conv1d(6, 5, 3, padding=1, stride=2)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Any) -> Any:
        """Logits for ids [N, T]."""
        y = torch.tanh(self.mix(self.body(self.emb(ids))))
        return self.head(torch.relu(self.conv(y.transpose(1, 2))).mean(2))


IDS = torch.zeros(4, 7, dtype=torch.int64)
ALL = ["emb", "body.0", "body.2", "mix", "conv"]
CASES = {
    "products": (["body.0", "body.2"], {}),
    "all": (ALL, {}),
    "with a head": (["body.0", "conv"], {"modules_to_save": ["head"]}),
}


def pair(targets: list[str], more: dict[str, Any], rank: int, alpha: int, seed: int) -> tuple[Any, Any, Any]:
    """A module with PEFT's adapters, one without, and a session of foreplan's with the same first adapters."""
    torch.manual_seed(seed)
    base = Small()
    graph = fp.from_torch(base, IDS)
    plain = Small()
    plain.load_state_dict(base.state_dict())
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **more)
    theirs = peft.get_peft_model(base, config)
    step = fp.compile(
        fp.lora(graph, rank, alpha, targets),
        fp.losses.cross_entropy,
        fp.optim.SGD(0.3),
        train=more.get("modules_to_save", ()),
    )
    return theirs, plain, step.bind()


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_peft_in_its_files_and_merged(case: str, tmp_path: Path) -> None:
    targets, more = CASES[case]
    seed = list(CASES).index(case)
    rng = np.random.default_rng(seed)
    rank, alpha = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    theirs, plain, session = pair(targets, more, rank, alpha, seed)
    theirs.save_pretrained(tmp_path / "before")
    assert (session.parameters["body.0.lora_B.weight"] == 0).all()
    session.load_adapters(tmp_path / "before")
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], 0.3)
    (name,) = [slot.name for slot in session.program.inputs if slot.name not in ("target", "learning_rate")]
    losses = []
    for _ in range(10):
        ids, target = rng.integers(0, 11, (4, 7)), rng.integers(0, 3, 4)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(theirs(torch.from_numpy(ids)), torch.from_numpy(target))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert session.step({name: ids, "target": target}).loss == pytest.approx(losses[-1], rel=2e-5)
    assert len(set(losses)) == 10
    session.save_adapters(tmp_path / "after")
    config = json.loads((tmp_path / "after" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (rank, pytest.approx(alpha))
    read = peft.PeftModel.from_pretrained(Small(), tmp_path / "after", torch_device="cpu")
    for key, tensor in theirs.state_dict().items():
        if "lora_" in key or "modules_to_save" in key:
            torch.testing.assert_close(read.state_dict()[key], tensor, rtol=1e-4, atol=1e-6)
    session.to_torch(plain)
    whole = theirs.merge_and_unload().state_dict()
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, whole[key], rtol=1e-4, atol=1e-6)


def test_first_adapters_are_drawn_as_peft_draws_them() -> None:
    """A of 64 x 400 numbers: their least, largest and mean square; B is zero. Of tables the other way round."""
    module = nn.Sequential(nn.Embedding(50, 400), nn.Linear(400, 300))
    torch.manual_seed(0)
    graph = fp.from_torch(module, torch.zeros(2, 3, dtype=torch.int64))
    ours = fp.compile(fp.lora(graph, 64, 16, ["0", "1"])).bind().parameters
    theirs = peft.get_peft_model(module, peft.LoraConfig(r=64, target_modules=["0", "1"])).state_dict()
    for name in ("0.lora_embedding_A", "0.lora_embedding_B", "1.lora_A.weight", "1.lora_B.weight"):
        key = f"base_model.model.{name}".replace("_A.", "_A.default.").replace("_B.", "_B.default.")
        wanted = theirs[key if "embedding" not in name else f"{key}.default"].numpy()
        assert ours[name].shape == wanted.shape
        found = [np.mean(np.square(a)) for a in (ours[name], wanted)]
        assert found[0] == pytest.approx(found[1], rel=0.03)
        if "embedding" not in name:
            assert abs(ours[name]).max() <= abs(wanted).max() * 1.001
