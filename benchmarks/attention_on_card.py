"""Times of attention's kernels on the card in this machine, for variants of tiles, beside PyTorch's.

    PYTHONPATH=<root of the tree> python3 bench.py [quick]

Needs torch and NVRTC (as `foreplan` finds it); no CuPy. The table goes to stdout and to $OUT/attn.txt.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

BEGIN = time.time()
LIMIT = float(os.environ.get("LIMIT", "92"))
OUT = Path(os.environ.get("OUT", "."))

from foreplan.graph import Window  # noqa: E402
from foreplan.graph.types import tensor_type  # noqa: E402
from foreplan.ops.attention.gradient import AttentionGrad  # noqa: E402
from foreplan.ops.attention.ops import Attention  # noqa: E402
from foreplan.runtime.cuda.device import device_named  # noqa: E402
from foreplan.runtime.cuda.engine import packed  # noqa: E402
from foreplan.runtime.cuda.kernels import attention as own  # noqa: E402
from foreplan.runtime.cuda.kernels.attention_tiles import FORWARD, KEYS, QUERIES, Tile, tile_for  # noqa: E402
from foreplan.runtime.cuda.launch import FOLDER, Launch  # noqa: E402
from foreplan.runtime.cuda.libraries import nvrtc  # noqa: E402

DEVICE = device_named("h200")
LINES: list[str] = []


def say(text: str = "") -> None:
    print(text, flush=True)
    LINES.append(text)
    (OUT / "attn.txt").write_text("\n".join(LINES) + "\n")


# name: batch, tokens, heads, key heads, depth, causal, mask
CASES = {
    "gpt2 16x1024x12x64 causal": (16, 1024, 12, 12, 64, True, False),
    "bert 32x512x12x64": (32, 512, 12, 12, 64, False, False),
    "gqa 4x2048x16(4)x128 causal": (4, 2048, 16, 4, 128, True, False),
    "mask 8x1024x12x64": (8, 1024, 12, 12, 64, False, True),
}
T = Tile  # rows, columns, threads, across, resident, widest, query_tiles
SIMT = {
    (64, FORWARD): [(128, 64, 128, 8, 2), (64, 64, 128, 16, 3), (64, 64, 128, 16, 2), (128, 32, 128, 8, 3), (128, 32, 128, 8, 2), (128, 64, 256, 16, 1), (64, 64, 64, 8, 3)],
    (64, QUERIES): [(64, 64, 128, 16, 2), (64, 32, 128, 8, 3), (128, 64, 256, 16, 1), (64, 32, 128, 16, 2)],
    (64, KEYS): [(64, 64, 128, 16, 2), (64, 64, 128, 16, 2, 2), (64, 32, 128, 16, 3), (64, 32, 128, 8, 2), (64, 32, 128, 16, 2, 2), (128, 64, 256, 16, 1, 2)],
    (128, FORWARD): [(64, 32, 128, 16, 2), (128, 64, 256, 16, 1), (128, 32, 256, 16, 1), (64, 64, 128, 16, 1)],
    (128, QUERIES): [(32, 64, 128, 16, 2), (64, 32, 128, 16, 2), (64, 64, 256, 16, 1), (64, 32, 256, 16, 2)],
    (128, KEYS): [(64, 32, 128, 16, 2), (64, 32, 256, 16, 1), (64, 64, 256, 16, 1, 2), (32, 32, 128, 16, 2), (32, 64, 128, 16, 2)],
}
TC = {
    (64, FORWARD): [(64, 64, 128, 0, 3), (64, 32, 128, 0, 4), (128, 32, 128, 0, 3), (128, 64, 128, 0, 2), (128, 64, 256, 0, 1), (64, 128, 128, 0, 2)],
    (64, QUERIES): [(64, 64, 128, 0, 3), (64, 64, 128, 0, 2), (64, 32, 128, 0, 3), (128, 32, 128, 0, 2), (128, 64, 128, 0, 2)],
    (64, KEYS): [(64, 64, 128, 0, 2), (64, 64, 128, 0, 2, 2), (64, 32, 128, 0, 3), (64, 32, 128, 0, 3, 2), (128, 32, 128, 0, 2), (64, 16, 128, 0, 3, 2)],
    (128, FORWARD): [(64, 64, 128, 0, 2), (64, 32, 128, 0, 3), (128, 32, 128, 0, 2), (128, 64, 256, 0, 1)],
    (128, QUERIES): [(64, 32, 128, 0, 2), (64, 64, 128, 0, 1), (128, 64, 256, 0, 1), (64, 32, 128, 0, 3)],
    (128, KEYS): [(64, 32, 128, 0, 2), (64, 16, 128, 0, 2), (128, 32, 256, 0, 1), (64, 64, 128, 0, 1), (64, 32, 128, 0, 1, 2)],
}
# Texts of cuda/ that differ: file, pattern, replacement.
TEXTS = {"": [], "u2": [("attention_threads.cuh", "#pragma unroll 1\n", "#pragma unroll 2\n")]}
FOLDERS: dict[str, Path] = {}


def types_of(case):
    batch, tokens, heads, shared, depth, causal, masked = case
    q, k = (tensor_type(f"float32[{batch},{tokens},{n},{depth}]") for n in (heads, shared))
    mask = [tensor_type(f"float32[{batch},1,{tokens},{tokens}]")] * masked
    op = Attention(depth**-0.5, causal, True)
    o, sums = op.infer([q, k, k, *mask])
    return op, (q, k, k, *mask), (o, sums), AttentionGrad(op.scale, causal, True), (q, k, k, o, sums, o, *mask), (q, k, k)


def launches_of(case, tile, tc):
    """Launches with that tile (None: as chosen), by kernel."""
    op, given, made, gradient, given_back, made_back = types_of(case)
    chosen = (lambda kernel, e, device, tensor_cores=False: (tile, tile.resident)) if tile else tile_for
    own.tile_for = chosen
    dense = lambda types: [Window.dense(x) for x in types]  # noqa: E731
    found = [*own.attention(op, dense(given), dense(made), DEVICE, tc).instructions]
    found += own.gradient(gradient, dense(given_back), dense(made_back), DEVICE, tc).instructions
    return {each.entry: each for each in found if isinstance(each, Launch)}


def compile_one(key, source, text):
    begin = time.time()
    if text:
        nvrtc.FOLDER = FOLDERS[text]
    try:
        code = nvrtc.compiler().compile(source, "sm_90")
        (figures,) = nvrtc.figures(code).values()
        return key, code, (figures.registers, figures.stack), time.time() - begin
    except Exception as error:
        return key, None, f"{type(error).__name__}: {str(error)[:300]}", time.time() - begin


def variants():
    """(case, kernel, tensor cores, tile, text) of all."""
    for name, case in CASES.items():
        for tc, table in ((False, SIMT), (True, TC)):
            for kernel in (FORWARD, QUERIES, KEYS):
                tiles = [Tile(*(*t[:5], 1024, *t[5:])) for t in table[case[4], kernel]]
                for i, tile in enumerate([None, *tiles]):
                    yield name, kernel, tc, tile, ""
                    if not tc and i in (1, 2):
                        yield name, kernel, tc, tile, "u2"


class Driver:
    def __init__(self):
        self.lib = ctypes.CDLL("libcuda.so.1")

    def check(self, status, what):
        if status:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{what}: {text.value}")

    def function(self, code, entry, shared):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.lib.cuModuleLoadData(ctypes.byref(module), code), "load")
        self.check(self.lib.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), "function")
        self.check(self.lib.cuFuncSetAttribute(function, 8, shared), "shared memory")
        return function

    def launch(self, function, launch, arguments, stream):
        words = (ctypes.c_char * len(arguments)).from_buffer_copy(arguments)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(words))
        self.check(
            self.lib.cuLaunchKernel(function, *launch.grid, *launch.block, launch.shared, ctypes.c_void_p(stream), parameters, None),
            "launch",
        )


def main() -> None:
    quick = "quick" in sys.argv
    for text, changes in TEXTS.items():
        if changes:
            folder = Path(tempfile.mkdtemp())
            shutil.copytree(FOLDER, folder / "cuda")
            for file, pattern, put in changes:
                place = folder / "cuda" / file
                assert pattern in place.read_text()
                place.write_text(place.read_text().replace(pattern, put))
            FOLDERS[text] = folder / "cuda"
    wanted = [v for v in variants() if not quick or (v[3] is None)]
    launches, sources = {}, {}
    for name, kernel, tc, tile, text in wanted:
        try:
            launch = launches_of(CASES[name], tile, tc)[kernel]
        except Exception as error:
            say(f"NOT MADE {name} {kernel} {tile}: {error}")
            continue
        launches[name, kernel, tc, tile, text] = launch
        sources[(launch.source, kernel, text)] = None
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"))
    futures = [pool.submit(compile_one, key, key[0], key[2]) for key in sources]
    import torch

    torch.zeros(1, device="cuda")
    say(f"{torch.cuda.get_device_name()} torch {torch.__version__} {len(sources)} sources; begun {time.time() - BEGIN:.0f} s ago")
    if "--no-torch" not in sys.argv:
        peers = {name: torch_times(torch, case) for name, case in CASES.items()}
    else:
        peers = {}
    codes = {}
    for future in as_completed(futures):
        key, code, about, seconds = future.result()
        codes[key] = code, about
        if code is None:
            say(f"NOT COMPILED {key[1]} {dict(key[0].defines)}: {about}")
    say(f"compiled after {time.time() - BEGIN:.0f} s")
    pool.shutdown()
    driver, best = Driver(), {}
    for name, case in CASES.items():
        if time.time() - BEGIN > LIMIT:
            say(f"no time left for {name}")
            continue
        bench_case(torch, driver, name, case, launches, codes, best)
    say()
    say("SUMMARY: ms forward, backward; TFLOP/s as counted")
    for name, case in CASES.items():
        op, given, made, gradient, given_back, made_back = types_of(case)
        flops = op.flops(given, made), gradient.flops(given_back, made_back)
        line = [f"{name:30}"]
        for tc in (False, True):
            for chosen in ("default", "best"):
                try:
                    f, q, k = (best[name, kernel, tc, chosen] for kernel in (FORWARD, QUERIES, KEYS))
                except KeyError:
                    continue
                line.append(f"{'tf32' if tc else 'f32'} {chosen}: {f:.3f} ({flops[0] / f / 1e9:.1f}), {q + k:.3f} ({flops[1] / (q + k) / 1e9:.1f})")
        for label, (f, b) in peers.get(name, {}).items():
            line.append(f"{label}: {f:.3f} ({flops[0] / f / 1e9:.1f}), {b:.3f} ({flops[1] / b / 1e9:.1f})")
        say("\n    ".join(line))
    say(f"done after {time.time() - BEGIN:.0f} s")


def timed(torch, run, least=3, budget=0.12):
    """Best milliseconds of several runs."""
    run()
    torch.cuda.synchronize()
    best, begin = 1e9, time.time()
    for i in range(30):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        best = min(best, first.elapsed_time(last))
        if i + 1 >= least and time.time() - begin > budget:
            break
    return best


def tensors_of(torch, case):
    batch, tokens, heads, shared, depth, causal, masked = case
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(batch, tokens, n, depth, device="cuda") for n in (heads, shared, shared, heads))
    mask = torch.randn(batch, 1, tokens, tokens, device="cuda") if masked else None
    return q, k, v, g, mask


def torch_times(torch, case):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    batch, tokens, heads, shared, depth, causal, masked = case
    found = {}
    try:
        q, k, v, g, mask = tensors_of(torch, case)
        k, v = (x.repeat_interleave(heads // shared, 2) for x in (k, v))
        q, k, v, g = (x.transpose(1, 2) for x in (q, k, v, g))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        mask = None if mask is None else mask.expand(batch, heads, tokens, tokens)
        for tf32 in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = tf32
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                run = lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)  # noqa: E731
                forward = timed(torch, run)
                out = run()
                back = timed(torch, lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True))
            found["torch " + ("tf32" if tf32 else "f32")] = forward, back
        torch.backends.cuda.matmul.allow_tf32 = False
    except Exception as error:
        say(f"torch fails: {type(error).__name__} {str(error)[:300]}")
    return found


def exact(torch, q, k, v, g, mask, case):
    """Of the first batch item, in float64."""
    batch, tokens, heads, shared, depth, causal, masked = case
    q, k, v, g = (x[:1].double().transpose(1, 2) for x in (q, k, v, g))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(heads // shared, 1) for x in (k, v)]
    scores = depth**-0.5 * q @ wide[0].transpose(2, 3)
    if mask is not None:
        scores = scores + mask[:1].double()
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens, device="cuda", dtype=torch.bool).triu(1), -torch.inf)
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1) @ wide[1]
    found = torch.autograd.grad(out, (q, k, v), g)
    return [x.detach().transpose(1, 2) for x in (out, *found)] + [lse.detach()]


def bench_case(torch, driver, name, case, launches, codes, best):
    batch, tokens, heads, shared, depth, causal, masked = case
    op, given, made, gradient, given_back, made_back = types_of(case)
    flops = {FORWARD: op.flops(given, made)}
    whole = gradient.flops(given_back, made_back)
    flops[QUERIES], flops[KEYS] = whole * 3 / 5, whole * 4 / 5
    q, k, v, g, mask = tensors_of(torch, case)
    wanted = exact(torch, q, k, v, g, mask, case)
    o, lse = torch.empty_like(q), torch.empty(batch, heads, tokens, device="cuda")
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    deltas = torch.empty_like(lse)
    first = {("input", i): x for i, x in enumerate([q, k, v, *([mask] if masked else [])])}
    first |= {("output", 0): o, ("output", 1): lse}
    second = {("input", i): x for i, x in enumerate([q, k, v, o, lse, g, *([mask] if masked else [])])}
    second |= {("output", i): x for i, x in enumerate([dq, dk, dv])} | {("workspace", 0): deltas}
    checked = {FORWARD: [(o, 0)], QUERIES: [(dq, 1)], KEYS: [(dk, 2), (dv, 3)]}
    say()
    say(f"== {name}: queries counted as 3/5 of the gradient's operations, keys as 4/5 (what they compute)")
    stream = torch.cuda.current_stream().cuda_stream

    def arguments(launch):
        places = first if launch.entry == FORWARD else second
        return packed(launch, lambda place: places[place.of, place.index].data_ptr() + place.offset)

    for tc in (False, True):
        for kernel in (FORWARD, QUERIES, KEYS):
            rows = []
            for key, launch in launches.items():
                if key[:3] != (name, kernel, tc):
                    continue
                if time.time() - BEGIN > LIMIT:
                    say("no time left")
                    return
                code, about = codes[launch.source, kernel, key[4]]
                label = ("default " if key[3] is None else str(astuple(key[3]))) + key[4]
                if code is None:
                    continue
                try:
                    function = driver.function(code, kernel, launch.shared)
                    words = arguments(launch)
                    for x, _ in checked[kernel]:
                        x.fill_(float("nan"))
                    run = lambda: driver.launch(function, launch, words, stream)  # noqa: E731, B023
                    ms = timed(torch, run)
                    errors = [float((x[:1].double() - wanted[i]).norm() / wanted[i].norm()) for x, i in checked[kernel]]
                    missing = sum(int(torch.isnan(x).sum()) for x, _ in checked[kernel])
                except Exception as error:
                    say(f"FAILED {kernel} {label}: {str(error)[:200]}")
                    if "illegal" in str(error) or "unspecified" in str(error):
                        raise
                    continue
                wrong = missing or max(errors) > (3e-3 if tc else 2e-5) or max(errors) != max(errors)
                rows.append((ms, label, about, launch.shared, errors, wrong))
                if key[3] is None:
                    best[name, kernel, tc, "default"] = ms
                if not wrong:
                    best[name, kernel, tc, "best"] = min(ms, best.get((name, kernel, tc, "best"), 1e9))
            for ms, label, about, shared_bytes, errors, wrong in sorted(rows):
                say(
                    f"{'tf32' if tc else 'f32 '} {kernel:18} {label:36} {ms:7.3f} ms {flops[kernel] / ms / 1e9:6.1f} TFLOP/s  "
                    f"regs {about[0]} stack {about[1]} shared {shared_bytes}  error {max(errors):.1e}{' WRONG' if wrong else ''}"
                )
            # What the next kernel reads: from the default, in float32.
            if kernel == FORWARD and not float(lse.isnan().sum()) == 0:
                say("log-sum-exp holds NaN")


def astuple(tile):
    return tile.rows, tile.columns, tile.threads, tile.across, tile.resident, tile.query_tiles


if __name__ == "__main__":
    main()
