"""What only bfloat16 has on the CPU engine: rounding of every number to the nearest, and maps between types."""

from __future__ import annotations

import numpy as np
import pytest

from foreplan import jit
from foreplan.ops.bits import MaskedMap, PackBits
from foreplan.ops.conv.ops import Conv
from foreplan.ops.join import Pad
from foreplan.ops.map import Map
from foreplan.ops.softmax import LogSoftmax, Softmax
from foreplan.runtime.cpu.codegen.elements import as_in, number
from tests.cpu.check import check, needs_onednn
from tests.engines.engine import BFLOAT16, NARROW
from tests.kernels import as_images, normal, packed

pytestmark = needs_onednn()
ENGINE = NARROW["cpu"]


def test_elements_are_rounded_to_the_nearest_and_nan_stays() -> None:
    """Every bfloat16, what lies half-way to the next and a little beside that, against ml_dtypes."""

    @jit.compiled
    def there_and_back(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> None:
        for k in range(len(x)):
            y[k] = as_in(y, x[k])
            z[k] = number(y[k])

    high = np.arange(2**16, dtype=np.uint32) << 16
    x = np.concatenate([high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)
    y, z = np.zeros(x.size, np.uint16), np.zeros(x.size, np.float32)
    there_and_back(x, y, z)
    with np.errstate(invalid="ignore"):
        wanted = x.astype(BFLOAT16.numpy)
    numeric = ~np.isnan(x)
    np.testing.assert_array_equal(y[numeric], wanted.view(np.uint16)[numeric])
    np.testing.assert_array_equal(z, wanted.astype(np.float32))
    assert np.isnan(z[~numeric]).all()


@pytest.mark.parametrize("shape", [(7,), (3, 40), (2, 19, 5, 3)], ids=str)
def test_maps_of_several_types(shape: tuple[int, ...]) -> None:
    x, y = normal(*shape), np.abs(normal(*shape, seed=1)) + np.float32(0.5)
    x.reshape(-1)[:3] = np.nan, np.inf, -np.inf
    op = Map(("bfloat16(relu(float32(a0) * a1))", "float32(a0) + a1", "bfloat16(exp(float32(a0)))"))
    for windows in (None, as_images(x, y)):
        ENGINE.check(op, x, y, windows=windows, wide=[1])
    ENGINE.check(Map(("bfloat16(float32(a0) * 3)",)), x, over=(0, 0))
    ENGINE.check(PackBits("a0 > 0"), normal(*shape[:2], 8))  # of images, bits are in another order


def test_copies_masks_and_slices() -> None:
    image, x, more = (normal(*shape).astype(BFLOAT16.numpy) for shape in ((2, 24, 5, 8), (7, 24), (2, 3, 4)))
    exactly = {"rtol": 0.0, "atol": 0.0}
    check(Map(("a0",)), image, windows=as_images(image), **exactly)
    for over in (None, (0, 1)):
        check(MaskedMap(("where(a0, a1, 0.0)",)), packed(normal(7, 24, seed=1) > 0), x, over=over, **exactly)
    check(Pad(((0, 0), (1, 2), (0, 0)), 1.5), more, **exactly)


def test_rows_with_numbers_that_are_not_finite() -> None:
    x = normal(5, 40)
    x[0, 3], x[1, 39], x[2], x[3, 7] = np.nan, np.inf, -np.inf, -np.inf
    for op in (Softmax(1), LogSoftmax(1)):
        ENGINE.check(op, x)


# Strides, pads, dilations, groups, images and weights: along the rows, taps meet only zeros.
@pytest.mark.parametrize(
    ("op", "images", "weights"),
    [
        (Conv((1, 1), ((1, 1), (1, 0)), (2, 2), 2), (1, 4, 1, 4), (8, 2, 2, 1)),
        (Conv((2, 1), ((3, 3), (2, 0)), (2, 2), 4), (1, 8, 1, 3), (8, 2, 3, 2)),
        (Conv((1, 1), ((2, 2), (0, 1)), (3, 1), 1), (2, 64, 1, 5), (32, 64, 2, 3)),
    ],
    ids=["two groups", "four groups", "one group"],
)
def test_convolutions_whose_taps_meet_only_zeros(op: Conv, images: tuple[int, ...], weights: tuple[int, ...]) -> None:
    """On tile registers some of oneDNN 3.2 end the process."""
    x, w, bias = normal(*images), normal(*weights), normal(weights[0])
    ENGINE.check(op, x, w, bias)
    (y,) = ENGINE.run(op, [x, w, bias])
    np.testing.assert_array_equal(y, np.broadcast_to(bias.astype(BFLOAT16.numpy)[:, None, None], y.shape))
