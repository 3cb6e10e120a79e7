"""LoRA and DoRA beside PEFT: losses, gradients, files, merged weights."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import foreplan as fp

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")
peft = pytest.importorskip("peft", reason="PEFT is not installed: make setup-torch")
pytorch_utils = pytest.importorskip(
    "transformers.pytorch_utils", reason="transformers is not installed: make setup-torch"
)
Conv1D = pytorch_utils.Conv1D
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


PREFIX = "base_model.model."
IDS = torch.zeros(4, 7, dtype=torch.int64)
ALL = ["emb", "body.0", "body.2", "mix", "conv"]
CASES = {
    "products": (["body.0", "body.2"], {}),
    "all": (ALL, {}),
    "with a head": (["body.0", "conv"], {"modules_to_save": ["head"]}),
    "dora, products": (["body.0", "body.2"], {"use_dora": True}),
    "dora, all": (ALL, {"use_dora": True}),
    "dora, with a head": (["mix", "conv"], {"use_dora": True, "modules_to_save": ["head"]}),
}
ENGINES = ["numpy", "cpu:threads=1"]


def pair(
    targets: list[str], more: dict[str, Any], rank: int, alpha: int, seed: int, engine: str = "numpy"
) -> tuple[Any, Any, Any]:
    """A module with PEFT's adapters, one without, and a session of foreplan's with first adapters of its own."""
    torch.manual_seed(seed)
    base = Small()
    graph = fp.from_torch(base, IDS)
    plain = Small()
    plain.load_state_dict(base.state_dict())
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **more)
    theirs = peft.get_peft_model(base, config)
    step = fp.compile(
        fp.lora(graph, rank, alpha, targets, dora=more.get("use_dora", False)),
        fp.losses.cross_entropy,
        fp.optim.SGD(0.3),
        train=more.get("modules_to_save", ()),
        target=engine,
    )
    return theirs, plain, step.bind()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_those_of_peft_in_its_files_and_merged(case: str, engine: str, tmp_path: Path) -> None:
    targets, more = CASES[case]
    seed = list(CASES).index(case)
    rng = np.random.default_rng(seed)
    rank, alpha = int(rng.integers(1, 5)), int(rng.integers(1, 20))
    theirs, plain, session = pair(targets, more, rank, alpha, seed, engine)
    theirs.save_pretrained(tmp_path / "before")
    assert (session.parameters[f"{targets[-1]}.lora_B.weight"] == 0).all()
    if more.get("use_dora"):  # the first magnitudes follow from the weights
        for key, array in load_file(tmp_path / "before" / "adapter_model.safetensors").items():
            if key.endswith("magnitude_vector"):
                np.testing.assert_allclose(session.parameters[key.removeprefix(PREFIX)], array, rtol=1e-6)
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


def gradients_by_peft(theirs: Any, ids: Any, target: Any) -> dict[str, Any]:
    """By foreplan's names."""
    theirs.zero_grad()
    nn.functional.cross_entropy(theirs(torch.from_numpy(ids)), torch.from_numpy(target)).backward()
    found = {}
    for name, value in theirs.named_parameters():
        if value.grad is not None:
            own = name.removeprefix(PREFIX).replace(".default", "")
            found[own.replace("magnitude_vector.weight", "magnitude_vector")] = value.grad.numpy().copy()
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_and_gradients_of_trained_magnitudes_are_those_of_peft(engine: str, tmp_path: Path) -> None:
    """With B and magnitudes that are far from where they begin, so that norms and magnitudes differ."""
    rng = np.random.default_rng(5)
    theirs, _, session = pair(ALL, {"use_dora": True}, 3, 5, 5, engine)
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            if "lora_" in name:
                value.add_(torch.randn_like(value) * 0.3)
    theirs.save_pretrained(tmp_path)
    session.load_adapters(tmp_path)
    ids, target = rng.integers(0, 11, (4, 7)), rng.integers(0, 3, 4)
    wanted = gradients_by_peft(theirs, ids, target)
    before = dict(session.parameters)
    (name,) = [slot.name for slot in session.program.inputs if slot.name not in ("target", "learning_rate")]
    result = session.step({name: ids, "target": target, "learning_rate": 1.0})
    with torch.no_grad():
        logits = theirs(torch.from_numpy(ids))
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(target))
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    trained = {name for name, value in before.items() if (session.parameters[name] != value).any()}
    assert trained == wanted.keys() and sum(name.endswith("magnitude_vector") for name in trained) == len(ALL)
    for name, gradient in wanted.items():
        found = before[name] - session.parameters[name]
        np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=1e-6, err_msg=name)


def test_what_dropout_leaves_is_scaled_as_in_peft() -> None:
    """Each row that foreplan gives is PEFT's for one of the 32 ways to drop elements of a row of five."""
    torch.manual_seed(0)
    base, x, target = nn.Sequential(nn.Linear(5, 4)), torch.randn(64, 5), np.zeros((64, 4), np.float32)
    graph = fp.lora(fp.from_torch(base, x), 2, 6, ["0"], dropout=0.5, dora=True)
    session = fp.compile(graph, fp.losses.mse, fp.optim.SGD(0.0), outputs=list(graph.outputs)).bind(seed=3)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0"], use_dora=True))
    layer = theirs.base_model.model[0]
    parts = [layer.lora_A["default"], layer.lora_B["default"], layer.lora_magnitude_vector["default"]]
    with torch.no_grad():
        for part, end in zip(parts, ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")):
            part.weight.add_(torch.randn_like(part.weight))
            session.parameters[f"0.{end}"] = part.weight.numpy()
        linear = layer.get_base_layer()
        given = {"lora_A": parts[0], "lora_B": parts[1], "scaling": 3.0, "base_layer": linear}
        masks = torch.cartesian_prod(*[torch.tensor([0.0, 2.0])] * 5)
        wanted = torch.stack([linear(x) + parts[2](x * mask, **given) for mask in masks]).numpy()
    (name,) = [slot.name for slot in session.program.inputs if slot.name not in ("target", "learning_rate")]
    (found,) = session.step({name: x.numpy(), "target": target}).outputs.values()
    nearest = abs(wanted - found).max(2).argmin(0)
    np.testing.assert_allclose(found, wanted[nearest, np.arange(64)], rtol=1e-4, atol=1e-5)
    assert len(set(nearest.tolist())) > 16


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
