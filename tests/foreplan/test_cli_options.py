"""What the commands' options mean, and what they refuse."""

from __future__ import annotations

import pytest

from foreplan.cli.options import LOSSES, OPTIMIZERS, parse_shapes, with_batch
from foreplan.errors import UsageError


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

    assert set(LOSSES) == set(losses.LOSSES)
    assert all(hasattr(optim, name) for name in OPTIMIZERS.values())
