"""Every option of `foreplan train` that one rank is given otherwise ends the command on all ranks, before it reads
anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

import foreplan as fp
from foreplan.cli.main import cli
from foreplan.cli.train import FILES, train
from tests.ranks.threads import Thread, run

USUAL = ["train", "mlp:batch=2", "--data", "nowhere.npz"]
# What a file of options says is compared as if it were written out.
OTHERS = ("as_json", "config")
OPTIONS = [each for each in train.params if isinstance(each, click.Option) and each.name not in OTHERS]


def words_for(option: click.Option) -> list[str]:
    """An option with a value that it does not have by default."""
    flag = option.opts[-1]
    if option.is_flag:
        return [flag]
    kind: Any = option.type
    if isinstance(kind, click.Choice):
        return [flag, next(str(each) for each in kind.choices if each != option.default)]
    written = {"--split": "fc=2", "--target": "cpu", "--shapes": "x:2x3", "--values": "x=[1]", "--accumulate": "3"}
    number = isinstance(kind, click.types.IntParamType | click.types.FloatParamType) or option.opts[-1] in ("--ranks",)
    return [flag, written.get(flag, "7" if number or kind.name == "whole" else "other")]


def told_by(ranks: int, words: list[list[str]]) -> list[str]:
    """What a command ends with on each rank, given its words on each."""

    def job(world: Thread) -> str:
        with pytest.raises(click.ClickException) as error:
            cli.main(words[world.rank], prog_name="foreplan", standalone_mode=False)
        return error.value.format_message()

    return run(ranks, job)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.opts[-1])
def test_each_option_is_compared(option: click.Option) -> None:
    name = option.name
    plain = [word for word in USUAL if name != "data" or word not in ("--data", "nowhere.npz")]
    errors = told_by(2, [USUAL, [*plain, *words_for(option)]])
    if name == "data":  # another path is none: what lies there is compared
        assert "nowhere.npz" in errors[0] and "'other'" in errors[1]
        return
    assert errors[0] == errors[1] and errors[0].startswith("ranks differ in the options of the run: "), errors
    assert f"{option.opts[-1]} is " in errors[0] and " on rank 0, and " in errors[0], errors[0]
    assert errors[0].count(" is ") == 1, errors[0]


def test_another_model() -> None:
    errors = told_by(3, [USUAL, USUAL, ["train", "mlp:batch=3", *USUAL[2:]]])
    assert len(set(errors)) == 1 and "MODEL is mlp:batch=2 on ranks 0, 1, and mlp:batch=3 on rank 2" in errors[0]


def test_files_of_options_are_compared_by_what_they_say(tmp_path: Path) -> None:
    for name, text in (("a", "budget = 0.5"), ("b", "  budget  =  5e-1  # the same"), ("c", "[model]\nbatch = 3")):
        (tmp_path / f"{name}.toml").write_text(text)
    own = {name: [*USUAL, "--config", str(tmp_path / f"{name}.toml")] for name in "abc"}
    assert all("nowhere.npz" in error for error in told_by(2, [own["a"], own["b"]]))
    errors = told_by(2, [own["a"], own["c"]])
    assert errors[0] == errors[1] and "--budget is 0.5 on rank 0, and nothing on rank 1" in errors[0]
    assert "--batch is nothing on rank 0, and 3 on rank 1" in errors[0]


@pytest.mark.parametrize("name", sorted(set(FILES) - {"data"}))
def test_files_may_lie_elsewhere(name: str) -> None:
    """Each rank may have its own copy; whether there is one is compared."""
    option = next(each for each in OPTIONS if each.name == name)
    errors = told_by(2, [[*USUAL, option.opts[-1], f"/of/{rank}"] for rank in range(2)])
    assert all("nowhere.npz" in error for error in errors), errors


@pytest.mark.parametrize("change", ["data", "weights", "seed", "nothing"])
def test_an_inference_of_ranks(tmp_path: Path, change: str) -> None:
    """`foreplan run` of a plan of ranks, all of which take the same samples."""
    model = fp.models.build("mlp:width=8,layers=1,batch=2")
    plan = tmp_path / "m.plan"
    fp.compile(model, target="numpy", ranks=2, shard="parameters").save(plan)
    words = []
    for rank in range(2):
        own = rank if change == "data" else 0
        np.savez(tmp_path / f"{rank}.npz", x=np.full((4, 784), own, np.float32))
        fp.compile(model, target="numpy").bind(seed=rank if change == "weights" else 0).save(tmp_path / f"{rank}.w")
        seed = str(rank if change == "seed" else 0)
        files = ["--data", str(tmp_path / f"{rank}.npz"), "--weights", str(tmp_path / f"{rank}.w")]
        words.append(["run", str(plan), *files, "-o", str(tmp_path / "out.npz"), "--seed", seed])
    if change == "nothing":
        run(2, lambda world: cli.main(words[world.rank], prog_name="foreplan", standalone_mode=False))
        assert set(np.load(tmp_path / "out.npz").files)
        return
    errors = told_by(2, words)
    said = {
        "data": "ranks differ in the data: the checksum of 'x' is ",
        "weights": "ranks differ in what they have loaded",
    }
    said["seed"] = "--seed is 0 on rank 0, and 1 on rank 1"
    assert errors[0] == errors[1] and said[change] in errors[0], errors
