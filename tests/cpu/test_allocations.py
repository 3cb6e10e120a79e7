"""What a step takes of the C library's heap while it runs, counted by functions that stand before its own.

oneDNN makes the list of a primitive's arguments for each run, and its products of matrices with gaps (which Winograd's
algorithm and attention make) take a block for themselves, of which it does not tell: nothing else, and nothing stays.
Without AVX-512 all its products and some convolutions take one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.check import instruction_set, needs_onednn
from tests.profile import few, pick

LISTS = 4 * 1024  # bytes: of arguments, of the primitives of one kernel
# Bytes a thread, by the instruction set: of any product, and of products with gaps and of convolutions.
PRODUCT, BLOCK = {
    "SSE4.1": (1024 * 1024, 5 * 1024 * 1024),
    "AVX": (0, 320 * 1024),
    "AVX2": (16 * 1024, 320 * 1024),
    "AVX2 with VNNI": (16 * 1024, 320 * 1024),
}.get(instruction_set(), (0, 252 * 1024))
COUNTER = """
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

static atomic_int counting;
static atomic_long held;
atomic_long most_held, still_held;

void start_counting(void) { held = most_held = 0; counting = 1; }
void stop_counting(void) { counting = 0; still_held = held; }

static void *taken(void *p) {
    if (counting && p) {
        long now = atomic_fetch_add(&held, (long)malloc_usable_size(p)) + (long)malloc_usable_size(p);
        long most = most_held;
        while (now > most && !atomic_compare_exchange_weak(&most_held, &most, now)) {}
    }
    return p;
}

static void given_back(void *p) {
    if (counting && p) held -= (long)malloc_usable_size(p);
}

void free(void *p) { given_back(p); __libc_free(p); }
void *malloc(size_t n) { return taken(__libc_malloc(n)); }
void *calloc(size_t n, size_t size) { return taken(__libc_calloc(n, size)); }
void *realloc(void *p, size_t n) { given_back(p); return taken(__libc_realloc(p, n)); }
void *memalign(size_t step, size_t n) { return taken(__libc_memalign(step, n)); }
void *aligned_alloc(size_t step, size_t n) { return taken(__libc_memalign(step, n)); }
int posix_memalign(void **p, size_t step, size_t n) {
    *p = taken(__libc_memalign(step, n));
    return *p ? 0 : ENOMEM;
}
"""
# Of steps that are named on the command line: the most bytes held while each runs, and those that are left. What is
# left of earlier ones to the garbage collector is freed before.
STEPS = """
import ctypes, gc, json, sys
from tests.cpu.test_engine import compiled, data_for
from tests.profile import SHORT, searching_by

counter, found = ctypes.CDLL(None), []
for model, threads, form in json.loads(sys.argv[1]):
    with searching_by(SHORT):
        step = compiled(model, f"cpu:threads={threads}", form == "training")
    session, data = step.bind(), data_for(step)
    for _ in range(3):
        session.step(data)
    run = session._body.bound.run
    run()
    gc.collect()
    gc.disable()
    counter.start_counting()
    run()
    counter.stop_counting()
    gc.enable()
    found.append([ctypes.c_long.in_dll(counter, name).value for name in ("most_held", "still_held")])
print(json.dumps(found))
"""
pytestmark = [
    needs_onednn(),
    pytest.mark.skipif(
        platform.libc_ver()[0] != "glibc", reason="counts by functions of glibc, which this Linux does not have"
    ),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler that is called cc: install gcc"),
]


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.c").write_text(COUNTER)
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", "counter.so", "counter.c"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "counter.so"


def held(counter: Path, *steps: tuple[str, int, str], text: str = STEPS) -> list[list[int]]:
    """Of each step the most bytes that it holds beside the arena, and those that it leaves; all in one process."""
    answer = subprocess.run(
        [sys.executable, "-c", text, json.dumps(steps)],
        env={**os.environ, "LD_PRELOAD": str(counter)},
        check=True,
        capture_output=True,
        text=True,
    )
    found: list[list[int]] = json.loads(answer.stdout)
    return found


def test_the_counter_counts(counter: Path) -> None:
    """Else the rest could not fail."""
    text = STEPS.replace("counter.start_counting()\n    run()", "counter.start_counting()\n    kept = bytearray(12345)")
    ((most, left),) = held(counter, ("mlp:width=32,batch=8", 1, "inference"), text=text)
    assert 12345 <= left <= most < 12345 + 2048


GPT = "gpt2_small:batch=2,seq=160,layers=2,width=256,heads=4,vocabulary=600"
RESNET = "resnet18:batch=2,size=64,classes=7"
MOBILE = "mobilenet_v2:batch=2,size=64,classes=5"
USUAL = {
    ("mlp:width=200,batch=64", 1, "training"): PRODUCT,
    (GPT, 1, "training"): BLOCK,
    (GPT, 1, "inference"): BLOCK,
    (RESNET, 1, "training"): BLOCK,
    (MOBILE, 1, "inference"): PRODUCT,
}
OTHERS = {
    (RESNET, 2, "training"): 2 * BLOCK,
    (RESNET, 1, "inference"): BLOCK,
    (MOBILE, 1, "training"): PRODUCT,
}


@pytest.fixture(scope="module")
def taken(counter: Path) -> dict[tuple[str, int, str], list[int]]:
    steps = pick([*USUAL], [*USUAL], [*USUAL, *OTHERS])
    return dict(zip(steps, held(counter, *steps), strict=True))


@pytest.mark.parametrize(
    ("model", "threads", "form", "most"),
    few([(*step, most) for step, most in (USUAL | OTHERS).items()], range(len(USUAL))),
)
def test_a_step_holds_what_onednn_does_not_tell_and_leaves_nothing(
    taken: dict[tuple[str, int, str], list[int]], model: str, threads: int, form: str, most: int
) -> None:
    found, left = taken[model, threads, form]
    assert left == 0
    assert found <= LISTS + most
