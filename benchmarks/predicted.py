"""Predicted times of training steps beside measured ones: one thread, each instruction set that this processor has.

    python benchmarks/predicted.py

A net's ratio is the predicted time of its step over the least processor time of some steps. Each set is measured in a
process of its own, in which oneDNN and foreplan's own code are held to it (`ONEDNN_MAX_CPU_ISA`). The last column has
the ratio after `tune=True`, with the processor's own set. Writes predicted.json beside this file, which keeps what was
measured on other processors, and the table into benchmarks/results/cpu.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpu import processor_name, short
from pages import put

NETS = (
    "resnet50:batch=8", "resnet18:batch=8", "vgg16:batch=2", "mobilenet_v2:batch=8", "efficientnet_b0:batch=4",
    "convnext_tiny:batch=2", "unet:size=64,batch=4", "conv_chain:size=256", "gpt2_small:layers=4,batch=2,seq=256",
    "bert_base:layers=4,batch=2,seq=128", "vit_b16:layers=4,batch=4", "llama:layers=2,batch=1,seq=256",
    "lstm_lm:width=256,batch=32", "dlrm", "mlp:batch=256", "mlp:width=64,batch=16",
)  # fmt: skip
SETS = {"AVX2": "AVX2", "AVX-512": "AVX512_CORE", "own": "DEFAULT", "tuned": "DEFAULT"}  # and what oneDNN is told
FILE = Path(__file__).with_suffix(".json")
ENOUGH, MOST = 4, 30  # seconds and steps of a net


def ratio(net: str, tune: bool) -> float:
    """Predicted over measured."""
    import foreplan as fp
    from foreplan.frontend.losses import attach_loss
    from foreplan.runtime.inputs import made_up

    graph = attach_loss(fp.models.build(net), fp.models.default_loss(net))
    step = fp.compile(graph, optimizer=fp.optim.Nesterov(1e-4), target="cpu:threads=1", tune=tune)
    session = step.bind()
    data = made_up(session.program)
    session.step(data)
    found, begun = [], time.perf_counter()
    while len(found) < MOST and time.perf_counter() - begun < ENOUGH:
        started = time.process_time()
        session.step(data)
        found.append(time.process_time() - started)
    nanoseconds = sum(step.program.actions[each.action].nanoseconds for each in step.plan.steps)
    return nanoseconds / 1e9 / min(found)


def main() -> None:
    if "--worker" in sys.argv:
        for net in NETS:
            print(json.dumps(ratio(net, "--tune" in sys.argv)), flush=True)
        return
    known = json.loads(FILE.read_text())
    columns = known.setdefault(processor_name(), {})
    for name, told in SETS.items():
        with tempfile.TemporaryDirectory() as folder:  # nothing that was measured before
            held = {"ONEDNN_MAX_CPU_ISA": told, "OMP_NUM_THREADS": "1", "FOREPLAN_CACHE_DIR": folder}
            command = [sys.executable, __file__, "--worker", *(["--tune"] if name == "tuned" else [])]
            done = subprocess.run(command, env=os.environ | held, stdout=subprocess.PIPE, text=True, check=True)
        columns[name] = dict(zip(NETS, (round(float(line), 3) for line in done.stdout.split())))
        print(name, columns[name], flush=True)
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    places = [(processor, name) for processor in sorted(known, reverse=True) for name in SETS]
    lines = [f"| step | {' | '.join(f'{short(processor)}, {name}' for processor, name in places)} |"]
    lines.append("|---" * (1 + len(places)) + "|")
    for net in NETS:
        ratios = (f"{known[processor][name][net]:.2f}" for processor, name in places)
        lines.append(f"| `{net}` | {' | '.join(ratios)} |")
    put("benchmarks/results/cpu.md", "predicted", "\n".join(lines))


if __name__ == "__main__":
    main()
