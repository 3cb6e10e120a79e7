"""What attention on a card is refused."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan.graph import Window
from foreplan.ops.attention.ops import Attention
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
