"""One table of all ops: how cases are drawn, an independent definition, and how far a result may be off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from foreplan.graph import Op, TensorType
from foreplan.graph.registry import registered_ops
from tests.sweep.bounds import SHARE_OF_SMALLEST, Exact, Expressions, Oracle, Rule, Smooth, Sums
from tests.sweep.case import Case
from tests.sweep.cases import elements, places, products, rows, sampling, windows
from tests.sweep.draws import emptied
from tests.sweep.oracles import elements as element_oracles
from tests.sweep.oracles import places as place_oracles
from tests.sweep.oracles import products as product_oracles
from tests.sweep.oracles import rows as row_oracles
from tests.sweep.oracles import sampling as sampling_oracles
from tests.sweep.oracles import windows as window_oracles

Draw = Callable[[Random], Case]
Types = Sequence[TensorType]
TRIES = 12  # engines have kernels for a sixth of the draws of an op at least


def class_of(name: str) -> type[Op]:
    """The op of an entry."""
    known = registered_ops()
    assert name in known, f"no op has the name {name!r} of an entry: does its class say @register?"
    return known[name]


@dataclass(frozen=True)
class Entry:
    """What the sweep knows of an op.

    Attributes:
        full: a case of whole tensors.
        oracle: the outputs from inputs in float64, by a definition that shares nothing with the op's kernels.
        rule: how far a result may be off.
        smooth: a case at which the op is differentiable, where not every case of `draw` is.
    """

    full: Draw
    oracle: Oracle
    rule: Rule
    smooth: Draw | None = None

    def draw(self, rng: Random) -> Case:
        """A case; one in twenty of nothing along some axes, where the op takes that."""
        case = self.full(rng)
        return emptied(case, rng) if rng.random() < 0.05 else case

    def served(self, rng: Random, has: Callable[[Case], bool]) -> Case:
        """A case for which there is a kernel, if there is one for any of a few draws."""
        case = self.draw(rng)
        for _ in range(TRIES):
            if has(case):
                break
            case = self.draw(rng)
        return case


def _per_channel(op: Any, types: Types) -> int:
    return 2 * types[0].size // max(1, types[0].shape[1])


def _per_row(op: Any, types: Types) -> int:
    """Elements of a row, or rows, whichever are more."""
    width = math.prod(types[0].shape[op.axis :])
    return 2 * max(width, types[0].size // max(1, width))


def _along(op: Any, types: Types) -> int:
    return types[0].shape[op.axis]


def _all(op: Any, types: Types) -> int:
    return types[0].size


def _taps(op: Any, types: Types) -> int:
    return math.prod(op.kernel) + 3


def _conv(op: Any, types: Types) -> int:
    return math.prod(types[1].shape[1:]) + 1


def _deformed(op: Any, types: Types) -> int:
    return 8 * math.prod(types[1].shape[1:]) + 1


def _conv_data(op: Any, types: Types) -> int:
    return types[1].size + 1


def _conv_weight(op: Any, types: Types) -> int:
    return types[1].size // max(1, types[1].shape[1]) + 1


def _inner(op: Any, types: Types) -> int:
    return types[0].shape[-2 if op.transpose_a else -1] + 1


def _attended(op: Any, types: Types) -> int:
    return 2 * max(max(type.shape) for type in types) + types[0].shape[-1]


def _updates(op: Any, types: Types) -> int:
    return types[0].size + 1


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _partial_products(op: Any, wide: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """Of products, in any order."""
    if op.how != "prod" or wide[0].dtype.kind != "f":
        return 0.0, 0.0
    sizes = np.log2(np.abs(wide[0]))
    sizes = np.where(np.isfinite(sizes), sizes, 0.0)
    return tuple(clip(sizes, 0.0).sum(op.axes, keepdims=op.keepdims) for clip in (np.minimum, np.maximum))


def _logarithm_gradient(op: Any, wide: Sequence[np.ndarray]) -> float:
    """A gradient, and a share of a row's."""
    y, g = wide
    return float((np.abs(g) + np.exp(y) * np.abs(g).sum(op.axis, keepdims=True)).max(initial=0.0))


def _rounded_mean(axes: Callable[[Any, int], tuple[int, ...]]) -> Callable[[Any, Sequence[np.ndarray]], float]:
    """What a few roundings of a mean move all that it is taken from by, alike: no rounding of the inputs does that."""

    def size(op: Any, wide: Sequence[np.ndarray]) -> float:
        x, over = wide[0], axes(op, wide[0].ndim)
        if not x.size:
            return 0.0
        scale = max([1.0, *map(_largest, wide[1:2])])
        return scale * _largest(x.mean(over) / np.sqrt(x.var(over) + op.epsilon)) / SHARE_OF_SMALLEST

    return size


def _range(op: Any, wide: Sequence[np.ndarray]) -> float:
    """Of a channel: sums around one of its elements may cancel in its mean."""
    x = wide[0]
    if not x.size:
        return 0.0
    over = (0, *range(2, x.ndim))
    return _largest(x.max(over) - x.min(over))


def _row_gradient(op: Any, wide: Sequence[np.ndarray]) -> float:
    """A row's gradient before its mean is taken away."""
    scale = max(1.0, _largest(wide[1])) if op.scaled else 1.0
    return _largest(wide[op.g]) * _largest(wide[op.g - 1]) * scale


def _channel_gradient(op: Any, wide: Sequence[np.ndarray]) -> float:
    """A channel's gradient before its mean is taken away."""
    return _largest(wide[4]) * _largest(wide[1]) / math.sqrt(float(wide[3].min()) + op.epsilon)


def _centred_products(op: Any, wide: Sequence[np.ndarray]) -> float:
    """What is summed up."""
    return _largest(wide[2]) * (_largest(wide[0]) + _largest(wide[1]))


def _shared(op: Any, wide: Sequence[np.ndarray]) -> float:
    """Weights of a cubic kernel of which some are left out are divided by a sum that may be small."""
    divided = op.mode == "cubic" and (op.exclude_outside or op.antialias)
    return 16.0 * float(np.abs(wide[0]).max(initial=0.0)) if divided else 0.0


def _spread(op: Any, wide: Sequence[np.ndarray]) -> float:
    """Of random numbers."""
    return {"uniform": abs(op.low) + abs(op.high), "normal": abs(op.mean) + 8 * op.std}.get(op.distribution, 1.0)


def _moved(draw: Draw, oracle: Oracle) -> Entry:
    return Entry(draw, oracle, Exact(bits=True))


_REDUCE = Entry(rows.reduce, row_oracles.reduce, Sums(_all, reach=_partial_products))
_LINES = Smooth(_along)
_CHANNELS = Smooth(_per_channel)
_ROWS = Smooth(_per_row)
_CENTRED_ROWS = Smooth(_per_row, cancels=_rounded_mean(lambda op, rank: tuple(range(op.axis, rank))))
_CENTRED_CHANNELS = Smooth(_per_channel, cancels=_rounded_mean(lambda op, rank: (0, *range(2, rank))))
_ROW_GRADIENTS = Smooth(_per_row, cancels=_row_gradient)
_CHANNEL_GRADIENTS = Smooth(_per_channel, cancels=_channel_gradient)
_SCORES = Smooth(_attended, narrow_on_cpu=True)
# A probability near 1, less 1, times what states and weights hold.
_LOGITS = Smooth(
    _attended, narrow_on_cpu=True, cancels=lambda op, wide: float(max(np.abs(x).max(initial=0) for x in wide[:2]))
)
_FEW = Smooth(lambda op, types: 8, narrow=True)
_READ = Smooth(lambda op, types: 64)
# `gradient`: a pass puts its nodes in their place before anything has a kernel for them
# (`tests/passes/test_expand_gradients.py`). `loop`: its kernels are plans of its body, and
# `tests/frontend/test_scan_drawn.py` draws those.
WITHOUT_KERNEL = {"custom_gradient", "gradient", "loop"}
# Of all ranks of a job: tests/ranks/test_collectives.py draws them, and tests/gpu/test_nccl.py for cards.
OF_RANKS = {
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "rank_broadcast", "shift"),
    *("begin_exchange", "finish_exchange", "own_part", "only_on", "local_index", "begin_send", "begin_receive"),
}

ENTRIES: dict[str, Entry] = {
    "conv": Entry(windows.conv, window_oracles.conv, Sums(_conv)),
    "conv_data_grad": Entry(windows.conv_data_grad, window_oracles.conv_data_grad, Sums(_conv_data)),
    "conv_weight_grad": Entry(windows.conv_weight_grad, window_oracles.conv_weight_grad, Sums(_conv_weight)),
    "conv_map": Entry(windows.conv_map, product_oracles.conv_map, Smooth(_conv)),
    "max_pool": Entry(windows.max_pool, window_oracles.max_pool, Exact()),
    "max_pool_grad": Entry(windows.max_pool_grad, window_oracles.max_pool_grad, Sums(_taps)),
    "avg_pool": Entry(windows.avg_pool, window_oracles.avg_pool, Sums(_taps)),
    "avg_pool_grad": Entry(windows.avg_pool_grad, window_oracles.avg_pool_grad, Sums(_taps)),
    "resize": Entry(windows.resize, window_oracles.resize, Smooth(lambda op, types: 64, narrow=True, cancels=_shared)),
    "resize_grad": Entry(
        windows.resize_grad, window_oracles.resize_grad, Smooth(lambda op, types: 256, narrow=True, cancels=_shared)
    ),
    "grid_sample": Entry(sampling.grid_sample, sampling_oracles.grid_sample, _READ, sampling.few_taps_grid_sample),
    "roi_align": Entry(sampling.roi_align, sampling_oracles.roi_align, _READ, sampling.few_points_roi_align),
    "deform_conv": Entry(
        sampling.deform_conv,
        sampling_oracles.deform_conv,
        Smooth(_deformed, narrow=True),
        sampling.few_taps_deform_conv,
    ),
    "reduce": _REDUCE,
    "cumsum": Entry(rows.cumsum, row_oracles.cumsum, Sums(_along, narrow=True)),
    "arg_reduce": Entry(rows.arg_reduce, row_oracles.arg_reduce, Exact()),
    "top_k": Entry(rows.top_k, row_oracles.top_k, Exact()),
    "softmax": Entry(rows.softmax, row_oracles.softmax, _LINES),
    "softmax_grad": Entry(rows.softmax_grad, row_oracles.softmax_grad, _LINES),
    "log_softmax": Entry(rows.log_softmax, row_oracles.log_softmax, _LINES),
    "log_softmax_grad": Entry(
        rows.log_softmax_grad, row_oracles.log_softmax_grad, Smooth(_along, cancels=_logarithm_gradient)
    ),
    "layer_norm": Entry(rows.layer_norm, row_oracles.layer_norm, _CENTRED_ROWS),
    "layer_norm_grad": Entry(rows.layer_norm_grad, row_oracles.layer_norm_grad, _ROW_GRADIENTS),
    "rms_norm": Entry(rows.rms_norm, row_oracles.rms_norm, _ROWS),
    "rms_norm_grad": Entry(rows.rms_norm_grad, row_oracles.rms_norm_grad, _ROW_GRADIENTS),
    "batch_norm": Entry(rows.batch_norm, row_oracles.batch_norm, _CHANNELS),
    "batch_norm_train": Entry(rows.batch_norm_train, row_oracles.batch_norm_train, _CENTRED_CHANNELS),
    "batch_norm_grad": Entry(rows.batch_norm_grad, row_oracles.batch_norm_grad, _CHANNEL_GRADIENTS),
    "batch_norm_sync": Entry(rows.batch_norm_sync, row_oracles.batch_norm_train, _CENTRED_CHANNELS),
    "channel_sums": Entry(rows.channel_sums, row_oracles.channel_sums, Smooth(_per_channel, cancels=_centred_products)),
    "masked_batch_norm_grad": Entry(
        rows.masked_batch_norm_grad, row_oracles.masked_batch_norm_grad, Smooth(_per_channel, narrow=True)
    ),
    "channel_moments": Entry(rows.channel_moments, row_oracles.channel_moments, Smooth(_per_channel, cancels=_range)),
    "cross_entropy": Entry(
        rows.cross_entropy, row_oracles.cross_entropy, Smooth(_along, cancels=lambda op, wide: _largest(wide[0]))
    ),
    "cross_entropy_grad": Entry(rows.cross_entropy_grad, row_oracles.cross_entropy_grad, _LINES),
    "linear_cross_entropy": Entry(rows.linear_cross_entropy, row_oracles.linear_cross_entropy, _LOGITS),
    "matmul": Entry(products.matmul, product_oracles.matmul, Sums(_inner)),
    "matmul_map": Entry(products.matmul_map, product_oracles.matmul_map, Smooth(_inner, narrow=True)),
    "attention": Entry(products.attention, product_oracles.attention, _SCORES),
    "attention_grad": Entry(products.attention_grad, product_oracles.attention_grad, _SCORES),
    "packed_attention_grad": Entry(products.packed_attention_grad, product_oracles.packed_attention_grad, _SCORES),
    "map": Entry(elements.map_, place_oracles.identity, Expressions(), elements.smooth_map),
    "multi_map": Entry(elements.multi_map, element_oracles.multi_map, _FEW),
    "masked_map": Entry(elements.masked_map, element_oracles.masked_map, Sums(lambda op, types: 4)),
    "pack_bits": Entry(elements.pack_bits, element_oracles.pack_bits, Exact()),
    "random": Entry(elements.random_, element_oracles.random, Smooth(lambda op, types: 32, cancels=_spread)),
    "dropout": _moved(places.dropout, place_oracles.identity),
    "stop_gradient": _moved(places.stop_gradient, place_oracles.identity),
    "by_mode": _moved(places.by_mode, place_oracles.identity),
    "straight_through": _moved(places.straight_through, place_oracles.identity),
    "quantised": _moved(places.quantised, place_oracles.identity),
    "reshape": _moved(places.reshape, place_oracles.reshape),
    "bitcast": _moved(places.bitcast, place_oracles.bitcast),
    "transpose": _moved(places.transpose, place_oracles.transpose),
    "slice": _moved(places.slice_, place_oracles.slice_),
    "broadcast": _moved(places.broadcast, place_oracles.broadcast),
    "concat": _moved(places.concat, place_oracles.concat),
    "pad": _moved(places.pad, place_oracles.pad),
    "unslice": _moved(places.unslice, place_oracles.unslice),
    "unstack": _moved(places.unstack, place_oracles.unstack),
    "gather": _moved(places.gather, place_oracles.gather),
    "gather_elements": _moved(places.gather_elements, place_oracles.gather_elements),
    "scatter_add": Entry(places.scatter_add, place_oracles.scatter_add, Sums(_updates, narrow=True)),
    "first_equal": Entry(places.first_equal, place_oracles.first_equal, Exact()),
    "map_scatter_add": Entry(places.map_scatter_add, place_oracles.map_scatter_add, Smooth(_updates, narrow=True)),
    "scatter_reduce": Entry(
        places.scatter_reduce,
        place_oracles.scatter_reduce,
        Smooth(_updates, narrow=True),
        places.apart_scatter_reduce,
    ),
    "scatter_elements_add": Entry(
        places.scatter_elements_add, place_oracles.scatter_elements_add, Sums(_updates, narrow=True)
    ),
}
