"""The ratchet: arena bytes of every zoo model's plans, kept in plan_sizes.json; a test fails when one grows.

`python benchmarks/plan_sizes.py` shows what changed and writes the sizes down, smaller or larger: a larger one needs a
reason in the commit that brings it.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import foreplan as fp

SIZES = Path(__file__).with_name("plan_sizes.json")
FORMS = {"inference": None, "training": "off", "training, free": "auto"}
PRECISIONS = {"": "float32", ", bf16": "bf16"}


def sizes(name: str) -> dict[str, int]:
    """Arena bytes of one model's plans, by form: forward only, and the whole step (Nesterov) without recomputation
    and with what costs next to nothing; each in float32 and in bfloat16.
    """
    graph = fp.models.build(name)
    loss = getattr(fp.losses, fp.models.default_loss(name))
    found = {}
    for (suffix, precision), (form, remat) in itertools.product(PRECISIONS.items(), FORMS.items()):
        training = {} if remat is None else {"loss": loss, "optimizer": fp.optim.Nesterov(0.1)}
        step = fp.compile(graph, remat=remat or "off", precision=precision, **training)
        found[form + suffix] = step.plan.arena_bytes
    return found


def main() -> None:
    before = json.loads(SIZES.read_text()) if SIZES.exists() else {}
    after = {}
    for name in fp.models.names():
        after[name] = sizes(name)
        for form, nbytes in after[name].items():
            old = before.get(name, {}).get(form)
            change = "" if old in (None, nbytes) else f"  was {old:,}: {nbytes / old - 1:+.2%}"
            print(f"{name:14s} {form:20s} {nbytes:>14,}{change}", flush=True)
    SIZES.write_text(json.dumps(after, indent=2) + "\n")


if __name__ == "__main__":
    main()
