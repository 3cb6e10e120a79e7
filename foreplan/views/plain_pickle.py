"""A pickle of plain data, read without Python's own reader, which may import, and take any time and memory.

A pickle is a program for a small machine with a stack. This one knows the instructions that dictionaries, lists,
tuples, text and numbers are written with (protocols 2 to 5), and no other. Each takes a bounded number of steps, so
that the time grows with the file: the keys of dictionaries are text or whole numbers of 64 bits, since the hash of
nested tuples takes exponential time, and collides for chosen numbers of more bits.

Source: pickletools.py of CPython, which describes each instruction.
"""

from __future__ import annotations

import pickletools
from struct import unpack_from
from typing import Any

_SHARE = 8  # bytes of a file for each container in it, at least; an event of a snapshot takes some sixty
_FREE = 4096  # containers that any file may have
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_LENGTHS = {0x8C: ("<B", 1), 0x58: ("<I", 4), 0x8D: ("<Q", 8)}  # of text: SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
_NUMBERS = {0x4B: ("<B", 1), 0x4D: ("<H", 2), 0x4A: ("<i", 4), 0x47: (">d", 8)}  # BININT1, BININT2, BININT, BINFLOAT
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}


class NotPlain(ValueError):
    """The pickle holds more than plain data, or is none; says what."""


def read_plain(data: bytes) -> Any:
    """What a pickle holds.

    Raises:
        NotPlain: it holds something else, or more containers than bytes for them; or it is damaged.
    """
    try:
        return _Machine(data).run()
    except NotPlain:
        raise
    except Exception as error:  # instructions that find something else on the stack than they take
        raise NotPlain(f"it is damaged ({type(error).__name__})") from None


class _Machine:
    """The stack and the memo of a pickle that is read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.marks: list[int] = []
        self.room = len(data) // _SHARE + _FREE

    def run(self) -> Any:
        """Follow all instructions, the most frequent ones first."""
        data, stack, memo = self.data, self.stack, self.memo
        at, end = 0, len(data)
        while at < end:
            op = data[at]
            at += 1
            if op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x6A:  # LONG_BINGET
                stack.append(memo[unpack_from("<I", data, at)[0]])
                at += 4
            elif op in _NUMBERS:
                form, size = _NUMBERS[op]
                stack.append(unpack_from(form, data, at)[0])
                at += size
            elif op == 0x8A:  # LONG1
                at = self._long(at)
            elif op in _LENGTHS:
                at = self._text(op, at)
            elif op == 0x28:  # MARK
                self.marks.append(len(stack))
            elif op == 0x2E:  # STOP
                (found,) = stack
                return found
            elif op in _CONSTANTS:
                stack.append(_CONSTANTS[op])
            else:
                at = self._further(op, at)
        raise NotPlain("it breaks off")

    def _further(self, op: int, at: int) -> int:
        """One of the less frequent instructions; where the next one begins."""
        if op in (0x7D, 0x5D, 0x29, 0x74) or op in _TUPLES:
            self._contain(op)
        elif op in (0x73, 0x75):  # SETITEM, SETITEMS
            self._fill(self._taken(2 if op == 0x73 else None))
        elif op in (0x61, 0x65):  # APPEND, APPENDS
            found = self._taken(1 if op == 0x61 else None)
            self._top(list).extend(found)
        elif op in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            form, size = ("<B", 1) if op == 0x71 else ("<I", 4)
            self.memo[unpack_from(form, self.data, at)[0]] = self.stack[-1]
            return at + size
        elif op in (0x80, 0x95):  # PROTO, FRAME: nothing follows from them
            return at + (1 if op == 0x80 else 8)
        else:
            raise NotPlain(_refusal(self.data, at - 1))
        return at

    def _contain(self, op: int) -> None:
        """An empty dictionary or list, or a tuple."""
        self.room -= 1
        if self.room < 0:
            raise NotPlain(f"it has more than a container for every {_SHARE} of its bytes")
        if op in (0x7D, 0x5D):
            self.stack.append({} if op == 0x7D else [])
        else:
            found = self._taken(_TUPLES.get(op, 0 if op == 0x29 else None))
            self.stack.append(tuple(found))

    def _taken(self, count: int | None) -> list[Any]:
        """The uppermost values, or those above the last mark, which go from the stack."""
        first = self.marks.pop() if count is None else len(self.stack) - count
        if first < (self.marks[-1] if self.marks else 0):
            raise NotPlain("it is damaged: it takes more than there is")
        found = self.stack[first:]
        del self.stack[first:]
        return found

    def _top(self, kind: type) -> Any:
        found = self.stack[-1]
        if type(found) is not kind:
            raise NotPlain(f"it is damaged: it fills something that is no {kind.__name__}")
        return found

    def _fill(self, found: list[Any]) -> None:
        keys = found[::2]
        if wrong := {type(key) for key in keys} - {str, int}:
            raise NotPlain(f"a key of a dictionary in it is a {wrong.pop().__name__}")
        self._top(dict).update(zip(keys, found[1::2], strict=True))

    def _long(self, at: int) -> int:
        """LONG1: a whole number, of 64 bits at most, with a byte for the sign."""
        size = self.data[at]
        number = int.from_bytes(self.data[at + 1 : at + 1 + size], "little", signed=True)
        if size > 9 or not -(1 << 63) <= number < 1 << 64 or at + size >= len(self.data):
            raise NotPlain("a number in it has more than 64 bits, or breaks off")
        self.stack.append(number)
        return at + 1 + size

    def _text(self, op: int, at: int) -> int:
        form, size = _LENGTHS[op]
        start = at + size
        stop = start + unpack_from(form, self.data, at)[0]
        if stop > len(self.data):
            raise NotPlain("it breaks off")
        self.stack.append(self.data[start:stop].decode("utf-8", "surrogatepass"))
        return stop


def _refusal(data: bytes, at: int) -> str:
    """Why an instruction is not followed: what would be imported, if that can be told."""
    texts: list[str] = []
    try:
        for op, argument, _ in pickletools.genops(data):
            if op.name in ("GLOBAL", "INST"):
                return f"it would import {str(argument).replace(' ', '.')}"
            if op.name == "STACK_GLOBAL":
                return f"it would import {'.'.join(texts[-2:])}"
            if op.name in ("PERSID", "BINPERSID"):
                return "it refers to something outside it"
            if isinstance(argument, str):
                texts.append(argument[:200])
    except ValueError:
        pass
    if data[:1] != b"\x80":
        return "it is no pickle of protocol 2 or later"
    return f"its byte {at}, {data[at]:#04x}, is no instruction of plain data"
