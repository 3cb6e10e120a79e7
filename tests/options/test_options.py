"""Options: said once, and the same for `compile`, for commands and in plan files."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foreplan as fp
from foreplan.base.arguments import REMAT
from foreplan.cli.main import cli
from foreplan.options import PRECISIONS, Options
from foreplan.options.fields import info_of
from foreplan.passes import PRECISIONS as TYPES

NAMES = [each.name for each in fields(Options)]
SIZES = st.sampled_from(["2GiB", "512MiB", "64k", "123"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)
DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "target": st.sampled_from(["numpy", "cpu", "cpu:threads=2", "cuda:h100"]),
    "budget": st.none() | SIZES | st.integers(0, 2**62) | st.floats(0, 4, exclude_min=True),
    "remat": st.sampled_from(REMAT),
    "outputs": st.none() | st.lists(TEXTS, max_size=3),
    "gradients": st.lists(TEXTS, max_size=3),
    "train": st.lists(TEXTS, max_size=3),
    "freeze": st.lists(TEXTS, max_size=3),
    "batch_norm": st.sampled_from(("train", "sync", "frozen")),
    "checkpoint": st.lists(TEXTS, max_size=3),
    "keep": st.lists(TEXTS, max_size=3),
    "recompute": st.lists(TEXTS, max_size=3),
    "to_host": st.lists(TEXTS, max_size=3),
    "split": st.dictionaries(TEXTS, st.integers(2, 99), max_size=3),
    "fission": st.sampled_from(("auto", "off")),
    "accumulate": st.integers(1, 1000),
    "ranks": st.integers(1, 1000),
    "stages": st.integers(1, 1000),
    "stage": st.integers(0, 1000),
    "links": st.sampled_from(("", "nvlink4", "pcie4*4+ethernet-100g")),
    "shard": st.sampled_from(("none", "state", "gradients", "parameters")),
    "tensor": st.integers(1, 8),
    "offload": st.booleans(),
    "prefetch": st.booleans(),
    "prepack": st.booleans(),
    "precision": st.sampled_from(PRECISIONS),
    "narrow_weights": st.booleans(),
    "tune": st.booleans(),
    "accuracy": st.sampled_from(["default", "strict"]),
    "workspace": SIZES | st.sampled_from(["auto", "unlimited"]) | st.integers(0, 2**62),
}


def test_every_option_is_an_argument_of_compile_and_in_its_docstring() -> None:
    assert list(inspect.signature(fp.compile).parameters) == ["graph", *NAMES]
    for name in NAMES:
        assert f"\n    {name}: " in str(fp.compile.__doc__)
    with pytest.raises(TypeError, match="targt"):
        fp.compile(fp.models.build("mlp:width=8,batch=2"), targt="cpu")  # type: ignore[call-arg]


@pytest.mark.parametrize("command", ["estimate", "plan", "bench", "train", "pareto", "fit", "view", "graph"])
def test_every_option_that_has_a_flag_has_it_in_each_command_with_its_default(command: str) -> None:
    flags = {each.name: each for each in cli.commands[command].params}
    own = {"ranks"} if command == "fit" else set()  # of which it takes several
    context = click.Context(cli.commands[command])
    parsed = {
        name: flag.process_value(context, flag.get_default(context))
        for name, flag in flags.items()
        if not flag.required
    }
    for each in fields(Options):
        if info_of(each).flag and each.name not in own:
            assert flags[each.name].opts[0] == info_of(each).flag
            assert (parsed[each.name] or None) == (each.default or None)
            assert flags[each.name].help.startswith(info_of(each).help.removesuffix("."))  # type: ignore[attr-defined]


def test_all_flags_are_drawn_here_and_precisions_are_those_of_the_passes() -> None:
    flags = {each.name for each in fields(Options) if info_of(each).flag}
    assert flags == set(DRAWN), "say in DRAWN how values of an option are drawn"
    assert tuple(TYPES) == PRECISIONS


@given(st.fixed_dictionaries(DRAWN))
def test_options_come_back_from_json(drawn: dict[str, Any]) -> None:
    options = Options(**drawn)
    assert Options.from_json(json.loads(json.dumps(options.to_json()))) == options


def test_options_show_what_differs_from_the_defaults() -> None:
    assert str(Options()) == ""
    assert str(Options(fp.losses.mean, budget=0.5, outputs=["y"])) == "budget=0.5, outputs=['y']"
    assert Options(budget=np.int64(64), accumulate=np.int32(2)).to_json()["budget"] == 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": "much"},
        {"budget": float("nan")},
        {"budget": True},
        {"remat": "on"},
        {"outputs": "y"},
        {"checkpoint": [1]},
        {"split": {"h": 1}},
        {"fission": True},
        {"accumulate": 0},
        {"accumulate": 2.0},
        {"offload": 1},
        {"precision": "float64"},
        {"tune": "yes"},
        {"workspace": -1},
        {"workspace": "some"},
    ],
)
def test_a_wrong_value_is_told_before_anything_is_compiled(wrong: dict[str, Any]) -> None:
    with pytest.raises(fp.UsageError):
        Options(**wrong)


def test_a_plan_keeps_its_options(tmp_path: Path) -> None:
    graph = fp.models.build("mlp:width=8,batch=2")
    step = fp.compile(
        graph, fp.losses.cross_entropy, fp.optim.SGD(0.1), accumulate=3, budget="1MiB", workspace=64, prefetch=True
    )
    step.save(tmp_path / "step.plan")
    loaded = fp.load_plan(tmp_path / "step.plan")
    assert loaded.options == Options(target="numpy", accumulate=3, budget="1MiB", workspace=64, prefetch=True)
    assert loaded.estimate()["options"] == step.estimate()["options"] == loaded.options.to_json()
