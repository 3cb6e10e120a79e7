"""A module at hand, run by PyTorch on tensors without bytes: beside figures by hand, and beside real tensors that
another observer follows.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup-torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import foreplan as fp  # noqa: E402
from foreplan.base.errors import UnsupportedError, UsageError  # noqa: E402
from foreplan.eager import Eager, Variant  # noqa: E402
from foreplan.eager.storage import Use  # noqa: E402
from foreplan.eager.watched.loop import Recipe, run  # noqa: E402
from tests.profile import pick  # noqa: E402
from tests.torch.alive import most_within, phases  # noqa: E402
from tests.torch.test_eager import OPTIMIZERS, drawn, loss_of  # noqa: E402

SEEDS = range(pick(8, 40, 400))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))


class Called(nn.Module):
    """Modules, and a function of them and the input."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.parts, *inputs)


def recipe(*example: Any, **given: Any) -> Recipe:
    start = Recipe(example, {}, lambda y: y.sum(), None, None, "float32", 1, Variant(), None, False)
    return replace(start, **given)


def figures(eager: Eager) -> list[tuple[int, int]]:
    return [(phase.live, phase.most) for phase in eager.phases]


def test_a_small_network_by_hand() -> None:
    """8 inputs of 12 float32 and 8 classes of int64; two layers, 12 → 16 → 5; momentum."""
    eager = fp.eager_memory(
        mlp(), torch.zeros(8, 12), loss="cross_entropy", optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)
    )
    inputs, weights = 8 * 12 * 4 + 8 * 8, 4 * (12 * 16 + 16 + 16 * 5 + 5)
    # The first layer's result is dropped when the ReLU has it; the logits when log_softmax has them.
    kept = 4 * (8 * 16 + 8 * 5 + 1 + 1)  # hidden, log_softmax, loss, the sum of class weights
    live = {(phase.name, phase.iteration): phase.live for phase in eager.phases}
    assert live["inputs", 0] == inputs and live["model", 0] == inputs + weights
    assert live["forward", 1] == inputs + weights + kept
    assert live["backward", 1] == inputs + 2 * weights + 4  # gradients and the loss
    assert live["step", 1] == live["step", 3] == inputs + 3 * weights + 4
    at_peak = {str(use): nbytes for use, nbytes in eager.at_peak.items()}
    assert at_peak["parameters"] == at_peak["optimizer state"] == weights and at_peak["inputs"] == inputs
    assert sum(eager.at_peak.values()) == sum(eager.parts().values()) == eager.peak
    assert {block.name for block in eager.memory.blocks} >= {"1: relu", "0: mm", "0.weight", "0.weight.grad"} - {
        "0: mm"
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn_models_take_what_real_ones_take(seed: int) -> None:
    rng = np.random.default_rng(seed)
    _, module, x = drawn(rng)
    target = torch.zeros(module(x).shape[:-1], dtype=torch.int64)
    _, make = OPTIMIZERS[rng.integers(len(OPTIMIZERS))]
    to_none, foreach = bool(rng.integers(3)), bool(rng.integers(2))
    variant = Variant(zero="none" if to_none else "keep", optimizer="foreach" if foreach else "loop")
    given = recipe(x, loss=loss_of, loss_inputs=(target,), optimizer=make, variant=variant)
    found = run(module, given, sums_in_place=False)
    theirs = phases(module, (x,), target, loss_of, make(module.parameters(), foreach=foreach), to_none=to_none)
    assert figures(found) == theirs


def written(layer: nn.Module, x: Any) -> Any:
    return checkpoint(layer, x, use_reentrant=False)


MODULES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "lstm": lambda: (Called(lambda parts, x: parts[0](x)[0], nn.LSTM(16, 8, 2)), torch.zeros(5, 4, 16)),
    "checkpoint": lambda: (
        Called(lambda parts, x: parts[1](written(parts[0], x)), mlp(), nn.Linear(5, 5)),
        torch.zeros(8, 12, requires_grad=True),
    ),
    "tied": lambda: (
        Called(lambda parts, x: F.linear(parts[0](x), parts[0].weight), nn.Embedding(9, 4)),
        torch.tensor([[1, 2]]),
    ),
    "mask": lambda: (
        Called(lambda parts, x: parts[0](x) if bool((x > 0).all()) else parts[1](x), nn.Linear(4, 4), nn.Linear(4, 9)),
        -torch.ones(3, 4),
    ),
    "picked": lambda: (
        Called(lambda parts, x: parts[0](x)[x.sum(-1) > 0], nn.Linear(4, 4)),
        torch.tensor([[1.0, 0, 0, 0], [-1, 0, 0, 0], [2, 0, 0, 0]]),
    ),
    "attention": lambda: (
        Called(lambda parts, x: parts[0](x, x, x, need_weights=False)[0], nn.MultiheadAttention(16, 2)),
        torch.zeros(7, 2, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", ["float32", "bf16", "fp16", "accumulate", "fused"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_take_what_real_ones_take(name: str, how: str) -> None:
    if (name, how) == ("lstm", "fp16"):
        pytest.skip("oneDNN has no recurrent layer in float16")
    torch.manual_seed(0)
    module, x = MODULES[name]()
    given = recipe(
        x,
        loss=lambda y: y.float().square().mean() * 1e-3,  # scaled gradients are finite in fp16
        optimizer=torch.optim.AdamW,
        precision=how if how in ("float32", "bf16", "fp16") else "float32",
        accumulate=3 if how == "accumulate" else 1,
        variant=Variant(optimizer="fused" if how == "fused" else "auto"),
    )
    found = run(module, given, sums_in_place=False)
    theirs = run(copy.deepcopy(module), replace(given, real=True), sums_in_place=False)
    if name == "lstm":  # oneDNN's backward makes a bias' gradient twice
        assert found.peak == pytest.approx(theirs.peak, rel=0.003)
        return
    assert figures(found) == figures(theirs)


def test_a_module_is_left_as_it_was() -> None:
    module = mlp().eval()
    before = copy.deepcopy(module.state_dict())
    fp.eager_memory(module, torch.zeros(8, 12), loss="mean", optimizer=torch.optim.AdamW)
    assert not module.training and all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    assert all(each.grad is None for each in module.parameters())


def test_a_module_on_meta_has_no_bytes_at_all() -> None:
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(1 << 14, 1 << 14) for _ in range(8)))
    eager = fp.eager_memory(module, torch.zeros(1, 1 << 14, device="meta"), loss="mean", optimizer=torch.optim.AdamW)
    assert eager.peak > 4 * 8 * 4 * (1 << 28)


def test_gradients_are_summed_in_place_as_the_profiler_sees() -> None:
    """Beside the CPU's own allocator: a mode that looks on would have gradients summed in new tensors."""
    from torch.profiler import ProfilerActivity, profile, record_function

    module = Called(lambda parts, x: (lambda y: (y * 2.0 + y * 3.0 + y * 5.0).mean())(parts[0](x)), nn.Linear(64, 64))
    x = torch.randn(128, 64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss = module(x)
        with record_function("backward pass"):
            loss.backward()
    most = most_within(record, "backward pass")
    unseen, watched = (run(module, recipe(x, loss=lambda y: y), each).phases for each in (True, False))
    assert 0 <= most - (unseen[3].most - unseen[1].live) < 64  # numbers within ops
    assert watched[3].most - unseen[3].most == 128 * 64 * 4


def test_on_a_card() -> None:
    """A mask of one byte an element for dropout, autocast as on cards, attention by the flash kernel."""
    x = torch.zeros(2, 128, 64)
    dropped = fp.eager_memory(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), x, loss="mean", target="cuda:h100")
    mask = [block.nbytes for block in dropped.memory.blocks if "native_dropout" in block.name]
    assert sorted(mask)[:1] == [2 * 128 * 64] and dropped.replayed[-1].reserved > 0
    module = Called(lambda parts, x: parts[0](x, x, x, need_weights=False)[0], nn.MultiheadAttention(64, 4))
    flash, math = (
        fp.eager_memory(module, x, loss="mean", target="cuda:h100", precision="bf16", variant={"attention": each})
        for each in ("auto", "math")
    )
    names = {block.name for block in flash.memory.blocks}
    assert any("_scaled_dot_product_flash_attention" in name for name in names)
    assert flash.peak < math.peak
    norm = fp.eager_memory(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), x, loss="sum", target="cuda:h100",
                           precision="bf16")  # fmt: skip
    assert {block.nbytes for block in norm.memory.blocks if block.name == "1: native_layer_norm"} == {
        2 * 128 * 64 * 4, 2 * 128 * 4
    }  # fmt: skip


def test_buckets_of_ddp(tmp_path: Path) -> None:
    """Those that PyTorch itself makes, for a group of one process."""
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from tests.torch.alive import Alive

    module, x = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3))), torch.zeros(2, 600)
    alone, within = (fp.eager_memory(module, x, loss="mean", variant={"parallel": each}) for each in ("none", "ddp"))
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        alive = Alive()
        for parameter in module.parameters():
            alive.count(parameter)
        before = alive.now
        with alive:
            parallel = DistributedDataParallel(module)
            parallel(x).mean().backward()
            for parameter in module.parameters():
                parameter.grad = None
        kept = alive.now - before - x.nbytes
    finally:
        distributed.destroy_process_group()
    assert within.peak - alone.peak == sum(each.nbytes for each in module.parameters())
    assert within.peak - alone.peak == pytest.approx(kept, rel=0.01)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_rank_within_fsdp(target: str) -> None:
    """Four layers of as many numbers, gathered one by one in bf16; gradients are summed in float32."""
    module, x = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256, bias=False)) for _ in range(4))), torch.zeros(2, 256)
    given = {"loss": "sum", "optimizer": torch.optim.AdamW, "precision": "bf16", "target": target}
    kinds = [type(part) for part in module]
    eager = fp.eager_memory(module, x, ranks=8, shard=["*"], **given)
    layer = 256 * 256
    phases = {phase.name: phase.live for phase in eager.phases if phase.iteration == 3}
    state = {use: sum(b.nbytes for b in eager.alive_at_peak if b.use is use) for use in (Use.PARAMETER, Use.STATE)}
    assert state[Use.PARAMETER] == 4 * 4 * layer // 8
    assert state[Use.STATE] == pytest.approx(2 * 4 * 4 * layer // 8, abs=32)
    assert phases["step"] == pytest.approx(x.nbytes + 4 * 4 * 4 * layer // 8, abs=2000)
    # At the peak: what this rank keeps; two layers gathered, and the gradients of one in bf16, and of two in float32.
    most = eager.peak - state[Use.PARAMETER] - state[Use.STATE]
    assert 2 * layer + 4 * layer < most < (2 * 2 + 2 + 2 * 4 + 2) * layer
    assert [type(part) for part in module] == kinds and not any(part._forward_hooks for part in module.modules())
    assert fp.eager_memory(module, x, ranks=8, shard=["*"], **given).peak == eager.peak


class _InEightBits(torch.optim.Optimizer):
    """Momentum as whole numbers of one byte, with a scale for each 256 of them; its update is one for a compiler."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["codes"] = torch.zeros(parameter.numel() // 256, 256, dtype=torch.int8, device=parameter.device)
                state["scales"] = torch.zeros(parameter.numel() // 256, 1, device=parameter.device)
            torch.compile(self.update, fullgraph=True)(parameter, parameter.grad, state["codes"], state["scales"])

    @staticmethod
    def update(parameter: Any, grad: Any, codes: Any, scales: Any) -> None:
        momentum = (codes * scales).mul_(0.9).add_(grad.view_as(codes))
        scales.copy_(momentum.abs().amax(1, keepdim=True) / 127)
        codes.copy_((momentum / scales).round_())
        parameter.sub_(momentum.view_as(parameter), alpha=0.1)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_optimizer_in_eight_bits(target: str) -> None:
    module = nn.Linear(256, 64, bias=False)
    eager = fp.eager_memory(module, torch.zeros(2, 256), loss="sum", optimizer=_InEightBits, target=target)
    numbers = 256 * 64
    state = sum(block.nbytes for block in eager.alive_at_peak if block.use is Use.STATE)
    assert state == numbers + 4 * numbers // 256
    assert eager.phases[-1].live == 4 * (2 * 256 + 2 * numbers + 1) + state


def test_what_is_refused() -> None:
    def refused(match: str, **given: Any) -> None:
        module = given.pop("module", mlp())
        with pytest.raises(UsageError, match=match):
            fp.eager_memory(module, torch.zeros(8, 12), **given)

    refused("give loss=", optimizer=torch.optim.AdamW)
    refused("as it is written", loss="mean", variant={"relu": "new"})
    refused("attn_implementation", loss="mean", variant={"attention": "eager"})
    refused("known in PyTorch", loss="triplet_margin")
    refused("not known here", loss="mean", optimizer=fp.optim.LAMB())
    refused("accumulate must be a whole number of at least 1", loss="mean", accumulate=0)
    refused("give a torch.nn.Module", loss="mean", module=3)
    refused("among how many ranks", loss="mean", shard=["0"])
    refused("no part of the module", loss="mean", ranks=2, shard=["7"])
    refused("on the CPU", loss="mean", real=True, target="cuda:h100")


def test_code_that_asks_for_weights_is_named() -> None:
    module = Called(lambda parts, x: parts[0](x) if parts[0].weight.sum() > 0 else -parts[0](x), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match=r"test_at_hand\.py:\d+: .* depends on weights.*real=True"):
        fp.eager_memory(module, torch.zeros(2, 4), loss="mean")
    assert fp.eager_memory(module, torch.zeros(2, 4), loss="mean", real=True).peak > 0


def test_an_op_without_a_description_is_named() -> None:
    library = torch.library.Library("foreplan_at_hand", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    module = Called(lambda parts, x: torch.ops.foreplan_at_hand.twice(parts[0](x)), nn.Linear(4, 4))
    with pytest.raises(
        UnsupportedError, match=r"at_hand\.py:\d+: of the op foreplan_at_hand.twice.default .*register_fake"
    ):
        fp.eager_memory(module, torch.zeros(2, 4), loss="mean")
    numbers = Called(lambda parts, x: parts[0](x) * float(parts[0](x).detach().numpy().mean()), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="depends on weights"):
        fp.eager_memory(numbers, torch.zeros(2, 4), loss="mean")


def test_what_no_device_without_kernels_can_run_is_named() -> None:
    module = Called(lambda parts, x: parts[0](x) * torch.binomial(x, x), nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="on a card that is not here; target='cpu'"):
        fp.eager_memory(module, torch.zeros(2, 4), loss="mean", target="cuda")


@pytest.mark.parametrize("bias", [True, False])
def test_cells_of_a_gru_on_a_card(bias: bool) -> None:
    """For each step, in tensors as large as its state: the input; five that RNN.cu of PyTorch keeps for backward; the
    state; and both kinds of gates, which derivatives.yaml keeps for a second derivative.
    """
    steps, batch, width = 5, 8, 64
    module = Called(lambda parts, x: parts[0](x)[0], nn.GRU(width, width, bias=bias))
    short, long = (
        fp.eager_memory(module, torch.zeros(n, batch, width), loss="mean", target="cuda:h100").phases
        for n in (steps, 2 * steps)
    )
    state = 4 * batch * width
    grown = next(b.live - a.live for a, b in zip(short, long) if "forward" in a.name)
    assert grown == steps * (1 + 5 + 1 + 3 + 3) * state


def test_the_page_that_shows_it() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "beside-pytorch.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    exec(compile(example, page.name, "exec"), {})


def test_a_forward_pass_alone() -> None:
    eager = fp.eager_memory(mlp(), torch.zeros(8, 12), variant={"grad": "off"})
    assert [phase.name for phase in eager.phases] == ["inputs", "model", "forward", "forward", "forward"]
