"""What attention on a card is refused, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Op, Window
from foreplan.graph.types import tensor_type
from foreplan.ops.attention.gradient import AttentionGrad
from foreplan.ops.attention.ops import Attention
from foreplan.runtime.cuda.device import device_named
from foreplan.runtime.cuda.kernels import prices
from foreplan.runtime.cuda.kernels.attention import attention
from foreplan.runtime.kernel import Refused
from tests.gpu.check import DEVICE, type_of
from tests.gpu.compiled import needs_gcc
from tests.kernels import normal

pytestmark = needs_gcc


def test_long_heads_and_wide_elements_are_refused() -> None:
    for x in (normal(1, 1, 4, 600), normal(1, 1, 4, 4).astype(np.float64)):
        types = [Window.dense(type_of(x))] * 3
        outputs = [Window.dense(type) for type in Attention(1.0).infer([w.type for w in types])]
        with pytest.raises(Refused):
            attention(Attention(1.0), types, outputs, DEVICE)


# Milliseconds of foreplan's own kernels on an H200, GPT-2 small's heads in float32, and multiplied in TensorFloat-32:
# with one sample, much of the card waits. The price of that sample's last gradient is 21 % too high: it counts tiles of
# queries, and those of keys are twice as many.
NEAR, TOO_HIGH = 0.1, 1.21
MEASURED = [
    (1, False, 0.137, 0.426),
    (16, False, 0.839, 2.778),
    (1, True, 0.084, 0.216 * TOO_HIGH),
    (16, True, 0.362, 1.118),
]


@pytest.mark.parametrize(("batch", "tensor_cores", "forward", "backward"), MEASURED)
def test_few_blocks_leave_much_of_a_card_idle(batch: int, tensor_cores: bool, forward: float, backward: float) -> None:
    x, device = tensor_type(f"float32[{batch},1024,12,64]"), device_named("h200")
    op = Attention(0.125, True, True)
    o, sums = op.infer([x, x, x])
    gradient: Op = AttentionGrad(0.125, True, True)
    for each, given, made, milliseconds in (
        (op, [x, x, x], [o, sums], forward),
        (gradient, [x, x, x, o, sums, o], [x, x, x], backward),
    ):
        inputs, outputs = ([Window.dense(type) for type in types] for types in (given, made))
        price = prices.attention(each, inputs, outputs, device, tensor_cores) / 1e6
        assert price == pytest.approx(milliseconds, rel=NEAR)
