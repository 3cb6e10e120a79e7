"""Changes of bytes that break what is written in them."""

from __future__ import annotations

import random

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """One to four bytes or pieces changed, left out, said twice; or the end cut off."""
    made = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        if not made:
            break
        at, length = rng.randrange(len(made)), rng.choice((1, 1, 2, 4, 8, 64))
        kind = rng.randrange(6)
        if kind == 0:
            made[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            made[at] = rng.choice(NUMBERS)
        elif kind == 2:
            del made[at : at + length]
        elif kind == 3:
            made[at:at] = made[at : at + length]
        elif kind == 4:
            made[at:at] = rng.randbytes(length)
        elif rng.random() < 0.3:
            del made[at:]
    return bytes(made)
