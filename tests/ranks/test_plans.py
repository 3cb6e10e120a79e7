"""Plans of several ranks: what a rank sends and holds, as files, and what no file may say."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
from click.testing import CliRunner

import foreplan as fp
from foreplan import optim
from foreplan.cli import cli
from foreplan.graph import Op
from foreplan.graph.flat import Flat
from foreplan.graph.text import parse_graph
from foreplan.lower.exchanges import Exchanges
from foreplan.ops.collective import Begin, Finish
from foreplan.passes.ranks import setting
from foreplan.runtime.planfile import digest_of
from foreplan.runtime.world.check import check_exchanges
from tests.profile import values
from tests.ranks.kept import compiled_once

SHARDS = ["none", "state", "gradients", "parameters"]


def step(ranks: int, shard: str = "none", accumulate: int = 1, target: str = "numpy", links: str = "") -> fp.Compiled:
    """A small step."""
    model = fp.models.build("gpt2_small:layers=2,width=32,heads=2,seq=8,vocabulary=64,batch=2")
    return compiled_once(
        model,
        fp.losses.cross_entropy,
        optim.AdamW(0.01),
        target=target,
        ranks=ranks,
        shard=shard,
        accumulate=accumulate,
        links=links,
    )


@pytest.mark.parametrize(("ranks", "shard"), values([2, 4, 7], SHARDS))
def test_what_a_rank_sends(ranks: int, shard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the paper's section 7 (Rajbhandari et al. 2020): twice the parameters, and three times where these lie in
    parts, each times (n − 1) / n. Beside it go losses, and what fills up rows; the last bucket is not gathered twice.
    """
    monkeypatch.setattr(setting, "LEAST", 1 << 15)
    model = fp.models.build("gpt2_small:layers=8,width=64,heads=2,seq=8,vocabulary=64,batch=1")
    step = fp.compile(model, fp.losses.cross_entropy, optim.SGD(0.1), target="numpy", ranks=ranks, shard=shard)
    figures = step.estimate()
    parameters = 4 * figures["weights"]["trained"]["numbers"]
    once = parameters * (ranks - 1) / ranks
    if shard == "parameters":
        assert 3 * once * 0.85 <= figures["sent_bytes"] <= 3 * once * 1.01
    else:
        assert 2 * once <= figures["sent_bytes"] <= 2 * once * 1.01
    alone = compiled_once(model, fp.losses.cross_entropy, optim.SGD(0.1), target="numpy").estimate()
    assert (alone["sent_bytes"], alone["exchanges"], alone["ranks"]) == (0, 0, 1)


def under_way(made: fp.Compiled) -> list[int]:
    """How many exchanges are under way behind each beginning or wait of a plan."""
    calls = [made.program.calls[each.action].op for each in made.plan.steps]
    at_once = sum(map(_waits, calls))
    changes = [1 if isinstance(op, Begin) else -1 for op in calls if isinstance(op, Begin | Finish) and not _waits(op)]
    assert changes.count(1) == changes.count(-1) == Exchanges.of(made.program, made.plan).count - at_once
    return list(accumulate(changes))


def _waits(op: Op) -> bool:
    """Whether it begins an exchange and waits for it at once."""
    return isinstance(op, Begin) and op.wait


def test_exchanges_are_begun_before_they_are_waited_for() -> None:
    """Two are under way at a time: none is waited for before the next one has begun, but for the last."""
    assert under_way(step(4, links="5GB/s,6us"))[:2] == [1, 2]


@pytest.mark.parametrize(("shard", "target"), values(SHARDS, ["numpy", "cpu"]))
def test_where_processors_move_bytes_one_exchange_is_under_way_at_a_time(shard: str, target: str) -> None:
    """Nothing goes on beside it: what was put off would take memory for no time. The same step as over a network takes
    less.
    """
    here, apart = (step(4, shard, target=target, links=links) for links in ("", "5GB/s,6us"))
    assert max(under_way(here)) == 1
    assert here.arena_bytes <= apart.arena_bytes


@pytest.mark.parametrize(("shard", "accumulate"), values(SHARDS, [1, 2]))
def test_files(tmp_path: Path, shard: str, accumulate: int) -> None:
    made, path = step(3, shard, accumulate), tmp_path / "a.plan"
    made.save(path)
    read = fp.load_plan(path)
    assert read.plan == made.plan
    places = [[(slot.name, slot.operand, slot.spread) for slot in each.program.tensors] for each in (made, read)]
    assert places[0] == places[1]
    assert read.options.ranks == 3 and read.options.shard == shard
    assert read.estimate()["sent_bytes"] == made.estimate()["sent_bytes"]
    read.save(tmp_path / "b.plan")
    assert (tmp_path / "b.plan").read_bytes() == path.read_bytes()
    if made.graph is not None:
        assert parse_graph(made.graph.as_text()).as_text() == made.graph.as_text()


def edited(path: Path, old: str, new: str) -> None:
    """Change a plan file, and make its digest right."""
    first, _, rest = path.read_text().split("\n", 2)
    body, count = re.subn(old, new, rest.removesuffix("\n}\n"), count=1)
    assert count, old
    path.write_text(f'{first}\n"sha256": "{digest_of(body)}",\n{body}\n}}\n')


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"begin_exchange\(ranks=3", "begin_exchange(ranks=2", "does not give"),
        (r'("op":"finish_exchange[^\n]*"overwrites":)\[\[0,0\]\]', r"\1[]", "does not take the place"),
        (r'"members":\[\["([^"]*)",0', r'"members":[["\1",8', "does not lie behind the tensor before it"),
        (r'"ranks":3,"stride":1,"members"', '"ranks":5,"stride":1,"members"', "no part of one for"),
        (r'"members":\[\["([^"]*)"', '"members":[["step"', "named 'step'"),
        (r"fill\(0.0\)\"\]", 'random_seed()"]', "is no content of"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "a.plan"
    step(3, "parameters").save(path)
    edited(path, old, new)
    with pytest.raises(fp.PlanError, match=said):
        fp.load_plan(path)


def test_an_exchange_that_is_never_waited_for() -> None:
    """Its bytes would serve something else while it still writes them."""
    made = step(3)
    steps = [each for each in made.plan.steps if not isinstance(made.program.calls[each.action].op, Finish)]
    with pytest.raises(fp.PlanError, match="is never waited for"):
        check_exchanges(made.program, replace(made.plan, steps=tuple(steps)))
    begun = next(each for each in made.plan.steps if isinstance(made.program.calls[each.action].op, Begin))
    with pytest.raises(fp.PlanError, match="begins once more"):
        check_exchanges(made.program, replace(made.plan, steps=(begun, *made.plan.steps)))
    with pytest.raises(fp.PlanError, match="was not begun"):
        check_exchanges(made.program, replace(made.plan, steps=tuple(x for x in made.plan.steps if x is not begun)))
    check_exchanges(made.program, made.plan)


def test_a_table_of_ranks() -> None:
    """A row for each number of ranks and what they hold parts of; more in parts, more samples."""
    words = ["fit", "mlp:width=256,layers=2", "--ranks", "1,4", "--memory", "6MiB", "--optimizer", "adamw"]
    done = CliRunner().invoke(cli, [*words, "--target", "numpy", "--links", "pcie4*4", "--json"])
    rows = json.loads(done.stdout)["ranks"]
    assert [(row["ranks"], row["shard"]) for row in rows] == [(1, "none"), *((4, shard) for shard in SHARDS)]
    batches = [row["batch"] for row in rows]
    assert batches[-1] > batches[2] > batches[1] and rows[-1]["sent_bytes"] > rows[0]["sent_bytes"] == 0
    assert all(row["whole_bytes"] <= row["memory_bytes"] for row in rows)
    for wrong, said in [("0", "is no number of ranks"), ("two", "is no number of ranks"), ("3", "do not fill nodes")]:
        links = ["--links", "pcie4*2"]
        done = CliRunner().invoke(cli, [*words[:3], wrong, *words[4:], "--target", "numpy", *links])
        assert done.exit_code == 2 and said in done.stderr


def test_a_table_of_groups() -> None:
    """A group takes the samples of one rank, and each of its ranks holds less."""
    words = [
        "fit",
        "mlp:width=256,layers=2",
        "--ranks",
        "4",
        "--shard",
        "none",
        "--memory",
        "6MiB",
        "--target",
        "numpy",
    ]
    tables = [CliRunner().invoke(cli, [*words, *more]) for more in ((), ("--tensor", "2"), ("--tensor", "4"))]
    rows = [CliRunner().invoke(cli, [*words, *more, "--json"]) for more in ((), ("--tensor", "2"), ("--tensor", "4"))]
    for table, done, tensor in zip(tables, rows, (1, 2, 4)):
        (row,) = json.loads(done.stdout)["ranks"]
        assert (row["ranks"], row["tensor"]) == (4, tensor)
        assert f"{row['batch'] * 4 // tensor:,}" in table.stdout.splitlines()[-1].split()
        assert row["samples_per_second"] == pytest.approx(row["batch"] * 4 / tensor / row["predicted_seconds"])
    sizes = [json.loads(done.stdout)["ranks"][0]["batch"] for done in rows]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    done = CliRunner().invoke(cli, [*words, "--tensor", "3"])
    assert done.exit_code == 2 and "tensor=3 does not divide ranks=4" in done.stderr


@pytest.mark.parametrize("ranks", [1, 3, 64])
@pytest.mark.parametrize("shard", SHARDS)
def test_what_is_kept_on_a_rank(ranks: int, shard: str) -> None:
    """To the byte: 12 bytes a parameter with Adam, K of ZeRO's section 3, of which stage 1 spreads the moments, and
    stage 3 all. Rows are filled up to 64 bytes a tensor, and 64 a rank.
    """
    model = fp.models.build("mlp:width=64,layers=3,classes=16,batch=1")  # all of whose tensors have whole rows
    step = fp.compile(model, fp.losses.cross_entropy, optim.Adam(0.1), target="numpy", ranks=ranks, shard=shard)
    numbers = step.estimate()["weights"]["trained"]["numbers"]
    kept = {"parameter": 0, "state": 0}
    filled = 0
    for slot in step.program.stored:
        if isinstance(slot.init, Flat):
            whole = slot.operand.type.size * slot.init.ranks
            filled += (whole - sum(each.type.size for each in slot.init.members)) * (slot.kind == "parameter")
        if slot.operand.type.rank and str(slot.kind) in kept:
            kept[str(slot.kind)] += slot.operand.type.nbytes
    assert 0 <= filled * 4 < 64 * ranks * max(1, len(step.program.stored))
    in_parts = 1 if ranks == 1 or shard == "none" else ranks
    assert kept["state"] == 8 * (numbers + filled) / in_parts
    assert kept["parameter"] == 4 * (numbers + filled) / (in_parts if shard == "parameters" else 1)
