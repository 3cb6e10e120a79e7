"""Compiled functions: integer and float loops over arrays, written in Python, that run as machine code.

    @compiled
    def total(x):
        found = 0.0
        for i in range(x.size):
            found += x[i]
        return found

They are a small part of Python, and mean what they mean there: numbers, arrays of NumPy, tuples, named tuples of these,
`for` over ranges and arrays, `while`, `if`, and calls of other compiled functions. A variable keeps the type of what it
is given first. There are four differences: integers have 64 bits and wrap around, indices and bounds of slices are not
negative, no integer is divided by zero, and an array that a function makes ends with it.

`FOREPLAN_JIT=off` leaves functions as they are; `FOREPLAN_JIT=checked` raises an error where an index is not within its
axis.
"""

from foreplan.jit.function import Compiled as Compiled
from foreplan.jit.function import compiled as compiled
from foreplan.jit.source import Emitted as Emitted
