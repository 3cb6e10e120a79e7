"""What the commands' options mean, and what they refuse."""

from __future__ import annotations

import pytest

from foreplan.base.errors import UsageError
from foreplan.cli.model import with_batch
from foreplan.cli.optimizer import OPTIMIZERS, SCHEDULES, make_optimizer, make_rate, with_steps
from foreplan.cli.settings import LOSSES, parse_shapes


def test_shapes():
    assert parse_shapes(("x:32x3x224x224",)) == {"x": (32, 3, 224, 224)}
    assert parse_shapes(("a:1,b:2x3", "c:0:4X5", "s:")) == {"a": (1,), "b": (2, 3), "c:0": (4, 5), "s": ()}
    assert parse_shapes(()) is None
    for bad in ("x", "32x3", ":3", "x:3x", "x:-1", "x:a", "x:1.5", "x:1,x:2", "x:²"):
        with pytest.raises(UsageError):
            parse_shapes((bad,))


def test_batch_in_a_zoo_name():
    assert with_batch("mlp", None) == "mlp"
    assert with_batch("mlp", 3) == "mlp:batch=3"
    assert with_batch("mlp:width=64,batch=16", 3) == "mlp:width=64,batch=3"


def test_choices_are_those_there_are():
    from foreplan import losses, optim
    from foreplan.passes.optimizer.rule import Common

    assert set(LOSSES) == {name for name, loss in losses.LOSSES.items() if loss.reads == 1}
    kinds = {name for name, kind in vars(optim).items() if isinstance(kind, type) and issubclass(kind, Common)}
    assert set(OPTIMIZERS.values()) == kinds
    makers = {name for name in optim.__all__ if name.islower()}
    assert set(SCHEDULES) == makers - {"joined"}


def test_optimizers_and_schedules_with_parameters():
    from foreplan import optim

    made = make_optimizer("rmsprop:alpha=0.5, centered=True,momentum=.25", 0.1, clip_value=2.0, clip_norm=None)
    assert made == optim.RMSprop(0.1, alpha=0.5, centered=True, momentum=0.25, clip_value=2.0)
    assert make_optimizer("muon:iterations=3,adjust=match_rms_adamw,ema=0.9", 0.1) == optim.Muon(
        0.1, iterations=3, adjust="match_rms_adamw", ema=0.9
    )
    assert make_rate(None, 0.1) == 0.1
    assert make_rate("cosine:steps=9,warmup=2,end=1e-3", 0.1) == optim.cosine(0.1, steps=9, warmup=2, end=1e-3)
    assert make_rate("constant", 0.1) == optim.constant(0.1)
    assert with_steps(None, 7) is None and with_steps("cosine", None) == "cosine"
    assert with_steps("cosine", 7) == "cosine:steps=7" and with_steps("cosine:steps=5", 7) == "cosine:steps=5"
    assert with_steps("linear:warmup=2", 7) == "linear:warmup=2,steps=7" and with_steps("constant", 7) == "constant"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_optimizer("sdg", 0.1), "no optimizer 'sdg'; choose one of sgd"),
        (lambda: make_optimizer("adam:beta3=1", 0.1), "no parameter 'beta3'; it has beta1, beta2, epsilon, ema"),
        (lambda: make_optimizer("adam:weight_decay=1", 0.1), "an option of its own, --weight-decay"),
        (lambda: make_optimizer("adam:beta1=x", 0.1), "beta1 must be in"),
        (lambda: make_optimizer("adam:beta1=0.1,beta1=0.2", 0.1), "given twice"),
        (lambda: make_optimizer("adam:beta1", 0.1), "no parameter; write"),
        (lambda: make_optimizer("adam:groups=1", 0.1), "no parameter 'groups'"),
        (lambda: make_rate("cosine", 0.1), "needs steps: write cosine:steps=NUMBER"),
        (lambda: make_rate("cosine:steps=1.5", 0.1), "whole number"),
        (lambda: make_rate("joined", 0.1), "no schedule 'joined'"),
        (lambda: make_rate("cosine:rate=1,steps=3", 0.1), "--lr"),
    ],
)
def test_parameters_that_there_are_not(make, message):
    with pytest.raises(UsageError, match=message):
        make()
