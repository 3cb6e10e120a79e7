"""docs/from-pytorch.md: what each row of its table says, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import foreplan as fp  # noqa: E402
from tests.export.runtime import run as run_onnx  # noqa: E402

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "from-pytorch.md").read_text()
TABLE = PAGE.partition("| PyTorch | foreplan |\n|---|---|\n")[2].partition("\n\n")[0]
ROWS = [line.split(" | ")[0].removeprefix("| ") for line in TABLE.splitlines()]
TESTS: dict[str, Callable[[Path], None]] = {}
pytestmark = pytest.mark.filterwarnings("ignore")


def row(begins: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """A test of the row whose first cell begins so."""

    def add(test: Callable[[Path], None]) -> Callable[[Path], None]:
        TESTS[begins] = test
        return test

    return add


def _test_of(cell: str) -> Callable[[Path], None] | None:
    found = [test for begins, test in TESTS.items() if cell.startswith(begins)]
    return found[0] if len(found) == 1 else None


@pytest.mark.parametrize("cell", ROWS)
def test_a_row_is_true(cell: str, tmp_path: Path) -> None:
    test = _test_of(cell)
    assert test is not None, "a row without a test: write one here"
    test(tmp_path)


def test_every_test_has_a_row() -> None:
    assert len(ROWS) > 10
    assert [begins for begins in TESTS if not any(cell.startswith(begins) for cell in ROWS)] == []


class Net(nn.Module):
    """Three layers, the first of which is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.second = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
        self.third = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        """Scores of three classes."""
        return self.third(self.second(torch.relu(self.norm(self.first(x)))))


def drawn(count: int, seed: int = 0) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=made), torch.randint(0, 3, (count,), generator=made)


def net(kind: type[nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def fed(x: Any, target: Any, **more: Any) -> dict[str, Any]:
    return {"x": x.numpy(), "target": target.numpy(), **more}


def session_of(module: Any, optimizer: Any, **options: Any) -> Any:
    graph = fp.from_torch(module, drawn(8)[0])
    return fp.compile(graph, fp.losses.cross_entropy, optimizer, target="numpy", **options).bind()


def step(module: Any, optimizer: Any, seed: int = 0, before: Callable[[], object] = int) -> float:
    """One step of PyTorch's own loop on the batch of a seed."""
    x, target = drawn(8, seed)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(module(x), target)
    loss.backward()
    before()
    optimizer.step()
    return float(loss.item())


def same(session: Any, module: Any, rtol: float = 1e-4) -> None:
    state = session.state_dict()
    for name, weight in module.state_dict().items():
        np.testing.assert_allclose(state[name], weight, rtol=rtol, atol=1e-6, err_msg=name)


def two_steps(session: Any, module: Any, optimizer: Any, before: Callable[[], object] = int) -> None:
    for seed in range(2):
        assert session.step(fed(*drawn(8, seed))).loss == pytest.approx(step(module, optimizer, seed, before), rel=1e-5)
    same(session, module)


@row("`optimizer.zero_grad()`")
def _step(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))


@row("`model.train()`, `model.eval()`")
def _modes(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))
    x, target = drawn(20, 7)
    module.eval()
    with torch.no_grad():
        scores = module(x)
    found = session.evaluate(fed(x, target))
    np.testing.assert_allclose(found.outputs["output"], scores, rtol=1e-4, atol=1e-6)
    assert found.loss == pytest.approx(nn.functional.cross_entropy(scores, target).item(), rel=1e-5)


@row('`param_group["lr"] = …`')
def _rates(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for seed, rate in enumerate((0.1, 0.03)):
        optimizer.param_groups[0]["lr"] = rate
        more = {} if rate == 0.1 else {"learning_rate": np.float32(rate)}
        assert session.step(fed(*drawn(8, seed), **more)).loss == pytest.approx(step(module, optimizer, seed), rel=1e-5)
    same(session, module)


@row("`clip_grad_norm_(parameters, 1.0)`")
def _clipping(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.5, clip_norm=0.1))
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    two_steps(session, module, optimizer, lambda: nn.utils.clip_grad_norm_(module.parameters(), 0.1))


@row("parameter groups")
def _groups(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.5, groups=[fp.optim.Group("first", rate=0.1)]))
    rest = [each for name, each in module.named_parameters() if not name.startswith("first.")]
    groups = [{"params": module.first.parameters(), "lr": 0.05}, {"params": rest, "lr": 0.5}]
    two_steps(session, module, torch.optim.SGD(groups))


@row("`requires_grad_(False)`")
def _frozen(_: Path) -> None:
    for says in (True, False):
        module = net()
        if says:
            module.first.requires_grad_(False)
        session = session_of(module, fp.optim.SGD(0.5), **({} if says else {"freeze": ["first"]}))
        module.first.requires_grad_(False)
        two_steps(session, module, torch.optim.SGD([w for w in module.parameters() if w.requires_grad], 0.5))
        np.testing.assert_array_equal(session.state_dict()["first.weight"], net().state_dict()["first.weight"])


@row("`loss / 4` and a step after four backward passes")
def _accumulated(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.5), accumulate=4)
    optimizer, total = torch.optim.SGD(module.parameters(), 0.5), 0.0
    batches = [drawn(8, seed) for seed in range(4)]
    optimizer.zero_grad()
    for x, target in batches:
        loss = nn.functional.cross_entropy(module(x), target) / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    given = fed(*(torch.stack(parts) for parts in zip(*batches)))
    assert session.step(given).loss == pytest.approx(total, rel=1e-5)
    same(session, module)


@row("`torch.autocast(")
def _autocast(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1), precision="bf16")
    x, target = drawn(8)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(module(x), target)
    assert session.step(fed(x, target)).loss == pytest.approx(loss.item(), rel=0.01)


class Checkpointed(Net):
    """The second layer is computed again in the backward pass."""

    def forward(self, x: Any) -> Any:
        """Scores of three classes."""
        y = torch.relu(self.norm(self.first(x)))
        return self.third(checkpoint(self.second, y, use_reentrant=False))


@row("`torch.utils.checkpoint`")
def _checkpoints(_: Path) -> None:
    for kind, options in (
        (Net, {"budget": "1GiB"}),
        (Net, {"checkpoint": ["second"]}),
        (Checkpointed, {}),
    ):
        module = net(kind)
        session = session_of(module, fp.optim.SGD(0.1), **options)
        two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))


@row("selective checkpointing, `save_on_cpu`")
def _by_name(_: Path) -> None:
    for options in ({"keep": ["second"]}, {"recompute": ["second"]}):
        module = net()
        session = session_of(module, fp.optim.SGD(0.1), **options)
        two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))
    graph = fp.from_torch(net(), drawn(8)[0])
    away = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="cuda:t4", to_host=["second"])
    assert away.estimate()["host_bytes"] > 0


class Stopped(nn.Module):
    """Two parts without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        """Scores of three classes."""
        with torch.no_grad():
            aside = self.second(x)
        y = self.first(x)
        return self.third(y * y.detach() + aside)


@row("`tensor.detach()`")
def _detached(_: Path) -> None:
    module = net(Stopped)
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))

    def traced(x: Any, w: Any) -> Any:
        return x * w * fp.stop_gradient(w)

    weight = fp.trace(traced, fp.spec((3,)), fp.spec((3,)))
    step = fp.compile(weight, fp.losses.sum, fp.optim.SGD(0.1), gradients=["w"], target="numpy").bind()
    x, w = np.float32([1, 2, 3]), np.float32([4, 5, 6])
    np.testing.assert_allclose(step.step({"x": x, "w": w}).gradients["w"], x * w)


class Hooked(Stopped):
    """Hooks of a tensor and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def forward(self, x: Any) -> Any:
        """Scores of three classes."""
        y = self.first(x)
        y.register_hook(lambda g: -g)
        return self.third(y * self.second(x))


@row("`y.register_hook(hook)`")
def _hooked(_: Path) -> None:
    module = net(Hooked)
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))


class Writes(Stopped):
    """A buffer, and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.scale = torch.ones(8)

    def forward(self, x: Any) -> Any:
        """Scores of three classes."""
        y = self.first(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        self.scale.mul_(1.1)
        with torch.no_grad():
            self.third.weight.clamp_(-0.2, 0.2)
        return self.third((y - self.mean) * self.scale)


@row("a buffer, a tensor attribute or a weight")
def _written(_: Path) -> None:
    module = net(Writes)
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))


class Straight(torch.autograd.Function):
    """Rounds; its gradient is three times what comes, so that no other rule gives it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Rounded."""
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        """Thrice."""
        return 3 * g


class Rounded(Net):
    """Its last layer sees rounded numbers."""

    def forward(self, x: Any) -> Any:
        """Scores of three classes."""
        return self.third(Straight.apply(4 * self.second(torch.relu(self.norm(self.first(x))))))


@row("`torch.autograd.Function`")
def _functions(_: Path) -> None:
    module = net(Rounded)
    session = session_of(module, fp.optim.SGD(0.01))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.01))


@row("`x.requires_grad_()`, `x.grad`")
def _input_gradients(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1), gradients=["x"])
    x, target = drawn(8)
    x.requires_grad_()
    nn.functional.cross_entropy(module(x), target).backward()
    found = session.step(fed(x.detach(), target)).gradients["x"]
    np.testing.assert_allclose(found, x.grad, rtol=1e-4, atol=1e-6)


@row("`model.state_dict()`, `load_state_dict`")
def _state(folder: Path) -> None:
    from safetensors.torch import save_file

    module = net()
    session = session_of(module, fp.optim.SGD(0.1))
    assert set(module.state_dict()) <= set(session.state_dict())
    same(session, module)
    torch.manual_seed(5)
    other = Net()
    save_file(other.state_dict(), folder / "other.safetensors")
    session.load(folder / "other.safetensors")
    same(session, other)


@row("`torch.save` of model and optimizer")
def _saved(folder: Path) -> None:
    module = net()
    session, again = (session_of(net(), fp.optim.Adam(0.01)) for _ in range(2))
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    two_steps(session, module, optimizer)
    session.save(folder / "run.safetensors")
    again.load(folder / "run.safetensors")
    assert again.step(fed(*drawn(8, 2))).loss == pytest.approx(step(module, optimizer, 2), rel=1e-5)
    same(again, module, rtol=1e-3)


@row("`torch.onnx.export`")
def _onnx(folder: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))
    session.to_onnx(folder / "net.onnx")
    x = drawn(8, 3)[0]
    with torch.no_grad():
        expected = module.eval()(x)
    (found,) = run_onnx(folder / "net.onnx", {"x": x.numpy()}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@row("`torch.export.export`, `torch.export.save`")
def _programs(folder: Path) -> None:
    program = torch.export.export(net(), (drawn(8)[0],))
    torch.export.save(program, folder / "model.pt2")
    for given in (program, folder / "model.pt2"):
        module = net()
        graph = fp.from_torch(given)
        session = fp.compile(graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), target="numpy").bind()
        two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))


@row("`DataLoader`")
def _loader(_: Path) -> None:
    module = net()
    session = session_of(module, fp.optim.SGD(0.1))
    data = torch.utils.data.TensorDataset(*drawn(24))
    batches = [fed(x, target) for x, target in torch.utils.data.DataLoader(data, 8)]
    losses = [result.loss for result in session.steps(batches)]
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for loss, (x, target) in zip(losses, torch.utils.data.DataLoader(data, 8), strict=True):
        optimizer.zero_grad()
        wanted = nn.functional.cross_entropy(module(x), target)
        wanted.backward()
        optimizer.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("parts", [(), ("norm",), ("norm", "first")])
def test_a_part_in_evaluation_mode_stays_so_in_training(parts: tuple[str, ...]) -> None:
    """What the page says of modes; the whole module in evaluation mode trains as one in training mode does."""
    module = net()
    for name in parts:
        module.get_submodule(name).eval()
    session = session_of(module, fp.optim.SGD(0.1))
    two_steps(session, module, torch.optim.SGD(module.parameters(), 0.1))
    whole = session_of(net().eval(), fp.optim.SGD(0.1))
    module = net()
    two_steps(whole, module, torch.optim.SGD(module.parameters(), 0.1))
