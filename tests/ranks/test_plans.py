"""Plans of several ranks: what a rank sends and holds, as files, and what no file may say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import foreplan as fp
from foreplan import optim
from foreplan.graph.text import parse_graph
from foreplan.lower.exchanges import Exchanges
from foreplan.ops.collective import Begin, Finish
from foreplan.runtime.planfile import digest_of
from foreplan.runtime.ranks.check import check_exchanges

SHARDS = ["none", "state", "gradients", "parameters"]


def step(ranks: int, shard: str = "none", accumulate: int = 1, target: str = "numpy") -> fp.Compiled:
    """A small step."""
    model = fp.models.build("gpt2_small:layers=2,width=32,heads=2,seq=8,vocabulary=64,batch=2")
    return fp.compile(
        model,
        fp.losses.cross_entropy,
        optim.AdamW(0.01),
        target=target,
        ranks=ranks,
        shard=shard,
        accumulate=accumulate,
    )


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("shard", SHARDS)
def test_what_a_rank_sends(ranks: int, shard: str) -> None:
    """As in the paper's section 7 (Rajbhandari et al. 2020): twice the parameters, and three times where these lie in
    parts, each times (n − 1) / n. Beside it go losses, and what fills up rows.
    """
    one, many = step(1), step(ranks, shard)
    parameters = sum(slot.operand.type.nbytes for slot in one.program.stored if str(slot.kind) == "parameter")
    sent = many.estimate()["sent_bytes"]
    times = (3 if shard == "parameters" else 2) * (ranks - 1) / ranks
    # The last bucket is not gathered twice, and here it is the only one.
    times -= (ranks - 1) / ranks if shard == "parameters" else 0
    assert parameters * times <= sent <= parameters * times * 1.01 + 64 * ranks
    assert one.estimate()["sent_bytes"] == 0 and one.estimate()["ranks"] == 1


def test_exchanges_are_begun_before_they_are_waited_for() -> None:
    """Two are under way at a time: none is waited for before the next one has begun, but for the last."""
    made = step(4)
    calls = [made.program.calls[each.action].op for each in made.plan.steps]
    kinds = [type(op).__name__ for op in calls if isinstance(op, Begin | Finish)]
    assert kinds.count("Begin") == kinds.count("Finish") == Exchanges.of(made.program, made.plan).count
    assert kinds[:2] == ["Begin", "Begin"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("shard", SHARDS)
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
        (r'"ranks":3,"members"', '"ranks":5,"members"', "no part of one for"),
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
