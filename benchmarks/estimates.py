"""The table of arenas in docs/zoo.md: every zoo model, training and inference, planned on the NumPy target.

Run it with `make estimates`; it prints the table and writes it into docs/zoo.md.
"""

from __future__ import annotations

from pages import MIB, put

import foreplan as fp


def row(name: str) -> str:
    graph = fp.models.build(name)
    training = fp.compile(
        graph,
        loss=getattr(fp.losses, fp.models.default_loss(name)),
        optimizer=fp.optim.Nesterov(0.1),
        remat="off",
    )
    inference = fp.compile(graph, remat="off")
    plan = training.plan
    cells = [
        f"`{name}`",
        ", ".join("×".join(map(str, slot.operand.type.shape)) for slot in inference.program.inputs),
        f"{plan.arena_bytes / MIB:,.1f}",
        f"{plan.arena_bytes / plan.lower_bound_bytes - 1:.2%}",
        f"{inference.plan.arena_bytes / MIB:,.1f}",
        f"{len(plan.steps):,}",
        f"{training.plan_seconds:.1f} s",
    ]
    print("| " + " | ".join(cells) + " |", flush=True)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    head = [
        "| model | input | training, MiB | over the bound | inference, MiB | instructions | planned in |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(head))
    table = "\n".join([*head, *(row(name) for name in fp.models.names())])
    put("docs/zoo.md", "estimates", table)


if __name__ == "__main__":
    main()
