"""Maps, masks of bits and random numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.sweep.oracles.expressions import values_of

Array = np.ndarray
Arrays = list[Array]


def masked_map(op: Any, bits: Array, *others: Array) -> Arrays:
    shape = np.broadcast_shapes(*(x.shape for x in others))
    truth = np.array([bool(bits[i // 8] >> (i % 8) & 1) for i in range(math.prod(shape))], bool).reshape(shape)
    return [np.broadcast_to(values_of(expr, [truth, *others]), shape) for expr in op.exprs]


def pack_bits(op: Any, x: Array) -> Arrays:
    truth = {
        "(a0 > 0.0)": lambda: x > 0,
        "(a0 <= 1.0)": lambda: x <= 1,
        "ne(a0, 0)": lambda: x != 0,
        "isnan(a0)": lambda: np.isnan(x),
    }[op.condition]()
    flat = truth.reshape(-1).tolist()
    return [
        np.array([sum(bit << i for i, bit in enumerate(flat[at : at + 8])) for at in range(0, len(flat), 8)], np.uint8)
    ]


def multi_map(op: Any, *inputs: Array) -> Arrays:
    shared = inputs[op.own * op.count :]
    found = []
    for t in range(op.count):
        own = inputs[t * op.own : (t + 1) * op.own]
        found += [np.broadcast_to(values_of(expr, [*own, *shared]), own[0].shape) for expr in op.exprs]
    return found


def _philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, of Salmon et al., word by word."""
    key = list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low, high = 0xFFFFFFFF, 32
        counter = [
            second >> high ^ counter[1] ^ key[0],
            second & low,
            first >> high ^ counter[3] ^ key[1],
            first & low,
        ]
        key = [key[0] + 0x9E3779B9 & low, key[1] + 0xBB67AE85 & low]
    return counter


def random(op: Any, state: Array) -> Arrays:
    seed, step = (int(x) for x in state)
    size, low = math.prod(op.shape), 0xFFFFFFFF
    wide = op.distribution != "bernoulli" and op.dtype.itemsize == 8
    count = 2 * size + 4 if wide else size + 4
    words: list[int] = []
    for j in range(-(-count // 4)):
        words += _philox([j, op.stream, step & low, step >> 32], [seed & low, seed >> 32])
    if op.distribution == "bernoulli":
        found = [float(word < round(op.p * 2**32)) for word in words[:size]]
        return [
            np.array(found)
            .astype(op.dtype.numpy)
            .astype(np.float64 if op.dtype.is_float else op.dtype.numpy)
            .reshape(op.shape)
        ]
    if wide:
        words = [a + (b << 32) for a, b in zip(words[::2], words[1::2])]
    bits = 64 if wide else 32
    if op.distribution == "uniform":
        kept = 53 if wide else 24
        numbers = [(word >> bits - kept) * 2.0**-kept for word in words[:size]]
        return [(np.array(numbers) * (op.high - op.low) + op.low).reshape(op.shape)]
    numbers = []
    for i in range(0, size, 2):
        if wide:
            radius = math.sqrt(-2 * math.log((words[i] >> 11) * 2.0**-53 + 2.0**-54))
            angle = 2 * math.pi * (words[i + 1] >> 11) * 2.0**-53
        else:
            radius = math.sqrt(-2 * math.log(float(np.float32(words[i])) * 2.0**-32 + 2.0**-33))
            angle = 2 * math.pi * float(np.float32(words[i + 1])) * 2.0**-32
        numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return [(np.array(numbers[:size]) * op.std + op.mean).reshape(op.shape)]
