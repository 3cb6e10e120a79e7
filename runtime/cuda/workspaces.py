"""How much workspace cuDNN takes for a convolution in a program that runs its first choice, as PyTorch does.

cuDNN is asked without the card, and a card has engines of which it says nothing then. One was found by its bytes. In a
chain of convolutions on an H100 (cuDNN 9.19.0, float32 without TensorFloat-32), PyTorch took 3,460.5 MiB for a gradient
of weights. For a described H100, cuDNN names no engine that takes it. It is what Winograd transforms in separate steps
need, and cuDNN's library has such kernels. With it for 64 channels and more, the chain's live and reserved bytes are
those measured. The rule is from this one model; the peak of U-Net then is within 0.4 %, and 12 % too low without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from foreplan.base.errors import TargetError
from foreplan.base.units import ceil_div
from foreplan.graph import Op, TensorType, Window
from foreplan.lower.targets import options_of
from foreplan.ops.conv.ops import ConvWeightGrad
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.libraries.cudnn import Unanswered, library
from foreplan.runtime.cuda.libraries.cudnn_conv_plans import choices
from foreplan.runtime.cuda.target import CudaTarget

TAPS, TILE = 3, 4  # along each axis: of the weights, and of the gradients that are transformed together
LEAST_CHANNELS = 64  # in and out: the chain reserves what it did if 128 → 64 channels take it, and 64 → 32 do not


@dataclass(eq=False)
class CudnnChoice:
    """cuDNN, asked for a card that need not be there.

    Attributes:
        device: the card.
        tf32: whether float32 may be rounded to TensorFloat-32.
        assumed: how many answers are not cuDNN's, but by `winograd_bytes`.
    """

    device: Device
    tf32: bool
    assumed: int = 0

    @property
    def name(self) -> str:
        """Its version, and the card."""
        return f"cuDNN {library().version} for {self.device.title}"

    @property
    def remark(self) -> str:
        """How far its answers are known to hold, for people."""
        if self.rounds:
            return "with TensorFloat-32 they were not compared with a card's, as they were with tf32=off"
        if not self.assumed:
            return "on the card it may have further engines"
        return (
            f"gradients of {TAPS} × {TAPS} weights with {LEAST_CHANNELS} channels or more take what Winograd "
            "transforms need, as was seen on an H100: of these it says nothing without the card"
        )

    @property
    def rounds(self) -> bool:
        """Whether float32 is rounded to TensorFloat-32, which older cards do not have."""
        return self.tf32 and "tensorfloat32" in dict(self.device.peaks)

    def workspace(self, op: Op, inputs: Sequence[TensorType], output: TensorType, limit: int | None) -> int | None:
        """Bytes that its first engine within a limit takes; None: it has no such engine.

        Args:
            op: a convolution, or a gradient of one.
            inputs, output: its tensors, in C order.

        Raises:
            TargetError: cuDNN fails at the question.
        """
        winograd = None if self.rounds else winograd_bytes(op, inputs)
        if winograd is not None and (limit is None or winograd <= limit):
            self.assumed += 1
            return winograd
        told = _told(op, tuple(inputs), output, self.device, self.tf32)
        return next((nbytes for nbytes in told if limit is None or nbytes <= limit), None)


@lru_cache(maxsize=4096)
def _told(op: Op, inputs: tuple[TensorType, ...], output: TensorType, device: Device, tf32: bool) -> tuple[int, ...]:
    """What cuDNN tells without the card: of its first choice, and of each later one that takes less than all before."""
    windows = [Window.dense(type) for type in inputs]
    try:
        plans = choices(op, windows, Window.dense(output), device, tf32=tf32)
    except Unanswered as error:
        raise TargetError(f"cuDNN could not be asked for {op}: {error}; say workspace=SIZE instead") from None
    return tuple(plan.workspace for plan in plans)


def winograd_bytes(op: Op, inputs: Sequence[TensorType]) -> int | None:
    """Workspace of a weight gradient by Winograd transforms, F(3 × 3, 4 × 4), in steps; None: it is not known to run.

    Images x, gradients g and the result are all transformed: of each tile of 4 × 4 gradients, 6 × 6 numbers a channel,
    and as many of each pair of channels.

    Args:
        op: any convolution.
        inputs: x [N, C, H, W] and g [N, K, P, Q].

    References:
        A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
    """
    if not isinstance(op, ConvWeightGrad) or op.kernel != (TAPS, TAPS):
        return None
    if (op.strides, op.dilations, op.groups) != ((1, 1), (1, 1), 1):
        return None
    x, g = inputs
    n, k, *extents = g.shape
    c = x.shape[1]
    if min(c, k) < LEAST_CHANNELS:
        return None
    tiles = n * ceil_div(extents[0], TILE) * ceil_div(extents[1], TILE)
    return (TILE + TAPS - 1) ** 2 * (tiles * (c + k) + c * k) * x.dtype.itemsize


def asked(target: str, tf32: bool) -> CudnnChoice:
    """cuDNN, asked for the card of a target.

    Args:
        target: such as `cuda:h100`; `cuda` is the card in this machine.

    Raises:
        TargetError: cuDNN is not installed.
        UsageError: there is no such card.
    """
    library()
    return CudnnChoice(CudaTarget(options_of(target)).device, tf32)
