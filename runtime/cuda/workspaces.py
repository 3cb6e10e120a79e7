"""How much workspace cuDNN takes for a convolution in a program that runs its first choice, as PyTorch does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from foreplan.errors import TargetError
from foreplan.graph import Op, TensorType, Window
from foreplan.lower.targets import options_of
from foreplan.runtime.cuda.device import Device
from foreplan.runtime.cuda.libraries.cudnn import Unanswered, library
from foreplan.runtime.cuda.libraries.cudnn_conv_plans import choices
from foreplan.runtime.cuda.target import CudaTarget


@dataclass(frozen=True)
class CudnnChoice:
    """cuDNN, asked for a card that need not be there.

    Attributes:
        device: the card.
        tf32: whether float32 may be rounded to TensorFloat-32.
    """

    device: Device
    tf32: bool

    @property
    def name(self) -> str:
        """Its version, and the card."""
        return f"cuDNN {library().version} for {self.device.title}"

    def workspace(self, op: Op, inputs: Sequence[TensorType], output: TensorType, limit: int | None) -> int | None:
        """Bytes that its first engine within a limit takes; None: it has no such engine.

        Args:
            op: a convolution, or a gradient of one.
            inputs, output: its tensors, in C order.

        Raises:
            TargetError: cuDNN fails at the question.
        """
        sizes = _sizes(op, tuple(inputs), output, self.device, self.tf32)
        return next((nbytes for nbytes in sizes if limit is None or nbytes <= limit), None)


@lru_cache(maxsize=4096)
def _sizes(op: Op, inputs: tuple[TensorType, ...], output: TensorType, device: Device, tf32: bool) -> tuple[int, ...]:
    """Of cuDNN's first choice, and of each later one that takes less than all before."""
    windows = [Window.dense(type) for type in inputs]
    try:
        plans = choices(op, windows, Window.dense(output), device, tf32=tf32)
    except Unanswered as error:
        raise TargetError(f"cuDNN could not be asked for {op}: {error}; say workspace=SIZE instead") from None
    return tuple(plan.workspace for plan in plans)


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
