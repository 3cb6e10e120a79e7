"""ONNX's Fourier transforms; its windows are functions that ONNX itself writes in other ops."""

from __future__ import annotations

from foreplan.frontend.onnx.node import OnnxNode, Operand, translates
from foreplan.ops.fourier import dft, stft
from foreplan.ops.shape import reshape


@translates("DFT")
def _dft(n: OnnxNode) -> Operand:
    axis = n.integer("axis", 1) if n.opset < 20 else int(n.known_scalar(2)) if n.has(2) else -2
    length = int(n.known_scalar(1)) if n.has(1) else None
    inverse, onesided = (bool(n.integer(name, 0)) for name in ("inverse", "onesided"))
    return dft(n.b, n.value(0), length, n.axis(axis, len(n.shape(0))), inverse, onesided)


@translates("STFT")
def _stft(n: OnnxNode) -> Operand:
    step, x = int(n.known_scalar(1)), n.value(0)
    window = n.value(2) if n.has(2) else None
    if n.has(3):
        length = int(n.known_scalar(3))
    elif window is not None:
        length = window.type.size
    else:
        raise n.fail("it has neither a window nor a frame_length")
    if len(x.shape) == 2:
        x = reshape(n.b, x, (*x.shape, 1))
    return stft(n.b, x, step, length, window, bool(n.integer("onesided", 1)))
