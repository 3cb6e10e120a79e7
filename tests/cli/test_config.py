"""`--config`: a step's options from a file, which is as trusted as any other."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foreplan as fp
from foreplan.base.errors import UsageError
from foreplan.base.untrusted import RULES
from foreplan.cli import cli
from foreplan.cli.config import read_config
from foreplan.cli.flags import Flag, settings_from
from foreplan.cli.settings import FIELDS, OF_MODEL, OF_STEP, Settings
from foreplan.options import Options
from foreplan.options.fields import info_of
from tests.cli.shell import MODEL, answer, foreplan
from tests.options.test_options import DRAWN

WITH_CONFIG = [name for name, each in cli.commands.items() if any(p.name == "config" for p in each.params)]


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def written(path: Path, step: dict[str, Any], model: dict[str, Any]) -> str:
    lines = [f"{name} = {toml(value)}" for name, value in step.items() if value is not None]
    lines += ["[model]", *(f"{name} = {toml(value)}" for name, value in model.items())]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def settings_of(path: str, *words: str) -> Settings:
    """The settings of `estimate MODEL` with a file and words."""
    command = cli.commands["estimate"]
    with command.make_context("estimate", [MODEL, "--config", path, *words]) as context:
        return settings_from({name: value for name, value in context.params.items() if name in FIELDS})


def test_every_command_that_makes_a_step_takes_a_file() -> None:
    with_options = {name for name, each in cli.commands.items() if any(isinstance(p, Flag) for p in each.params)}
    assert set(WITH_CONFIG) == with_options - {"verify"}  # which makes none
    assert {"run", "compare", "diff", "train", "export", "fit"} <= set(WITH_CONFIG)


def test_flags_are_what_the_fields_say() -> None:
    """Each field of `Settings` is a flag of each command, but that the options of `compile` are one of them."""
    assert {each.name for each in fields(Settings)} - {"step"} == set(OF_MODEL)
    assert not set(OF_MODEL) & set(OF_STEP)
    for name in ("estimate", "train", "bench"):
        flags = {each.name: each for each in cli.commands[name].params if isinstance(each, Flag)}
        assert set(flags) == set(FIELDS)
        assert all(flags[key].opts == [info_of(each).flag] for key, each in FIELDS.items())
        assert all(flags[key].group == info_of(each).group != "" for key, each in FIELDS.items())


@pytest.mark.parametrize("command", ["estimate", "train", "fit", "run", "devices"])
def test_help_has_every_flag_once_under_its_heading(command: str) -> None:
    _, _, text = foreplan(command, "--help").stdout.partition("Example")
    lines = text.partition("\n\n")[2].splitlines()
    headings: dict[str, str] = {}
    heading = ""
    for line in lines:
        if line and line[0] != " ":
            heading = line.rstrip(":")
        elif line.startswith("  -"):
            flag = next(word.rstrip(",") for word in line.split() if word.startswith("--"))
            assert flag not in headings
            headings[flag] = heading
    listed = [each for each in cli.commands[command].params if isinstance(each, click.Option)]
    assert set(headings) == {each.opts[-1] for each in listed} | {"--help"}
    for each in listed:
        assert headings[each.opts[-1]] == getattr(each, "group", "Options")
    assert headings["--json"] == headings["--help"] == "Output" == heading


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.fixed_dictionaries({}, optional=dict(DRAWN)))
def test_a_file_gives_what_compile_is_given(tmp_path: Path, drawn: dict[str, Any]) -> None:
    drawn = {name: value for name, value in drawn.items() if not isinstance(value, int) or value < 2**63}
    found = settings_of(written(tmp_path / "step.toml", drawn, {}))
    assert found.step == Options(**{name: value for name, value in drawn.items() if value is not None})
    assert replace(found, step=Settings().step) == Settings()


def test_a_file_gives_what_the_command_line_adds(tmp_path: Path) -> None:
    model = {
        "batch": 3,
        "shapes": {"x:0": [2, 3], "y": []},
        "values": {"axes": [0, 1], "k": 3},
        "infer": True,
        "loss": "mse",
        "optimizer": "adamw:beta2=0.95",
        "rate": 1,
        "schedule": "cosine:steps=3",
        "clip_norm": 1.5,
        "lora": ["*.q"],
        "rank": 4,
        "dora": True,
    }
    found = settings_of(written(tmp_path / "step.toml", {}, model))
    assert found == Settings(**model | {"lora": ("*.q",)})
    assert found.shapes == {"x:0": (2, 3), "y": ()} and found.rate == 1.0


def test_flags_win(tmp_path: Path) -> None:
    path = written(
        tmp_path / "step.toml",
        {"budget": "1GiB", "freeze": ["a", "b"], "remat": "off", "accumulate": 4, "outputs": []},
        {"batch": 3, "shapes": {"x": [2]}, "decay": "matrices"},
    )
    found = settings_of(path, "--budget", "2GiB", "--freeze", "c", "--batch", "5", "--remat", "auto", "--shapes", "x:7")
    assert found.step == Options(budget="2GiB", freeze=("c",), remat="auto", accumulate=4, outputs=())
    assert (found.batch, found.shapes, found.decay) == (5, {"x": (7,)}, "matrices")
    assert settings_of(path, "--accumulate", "1").step.accumulate == 1  # the default, written out


def test_commands_go_by_it(tmp_path: Path) -> None:
    path = written(tmp_path / "step.toml", {"target": "numpy", "freeze": ["hidden0"]}, {"batch": 6, "optimizer": "sgd"})
    words = ("--target", "numpy", "--freeze", "hidden0", "--batch", "6", "--optimizer", "sgd")
    timed = {"plan_seconds", "compile_seconds"}
    by_file, by_flags = answer("estimate", MODEL, "--config", path), answer("estimate", MODEL, *words)
    assert {k: v for k, v in by_file.items() if k not in timed} == {k: v for k, v in by_flags.items() if k not in timed}
    assert answer("diff", MODEL, MODEL, "--config", path)


def test_runs_go_by_it(tmp_path: Path) -> None:
    data = tmp_path / "x.npz"
    np.savez(data, x=np.ones((6, 6), np.float32))
    half = written(tmp_path / "half.toml", {"target": "numpy", "outputs": ["logits"]}, {"batch": 3})
    assert answer("run", MODEL, "--data", data, "--config", half)["logits"]["shape"] == [6, 3]


def test_what_a_command_refuses_is_refused_from_a_file_too(tmp_path: Path) -> None:
    path = written(tmp_path / "step.toml", {"budget": "1MiB"}, {})
    for command, *more in (("pareto",), ("fit", "--memory", "1MiB")):
        assert "--budget makes no sense here" in foreplan(command, MODEL, *more, "--config", path, code=2).stderr
    foreplan("plan", MODEL, "-o", tmp_path / "a.plan")
    told = foreplan("estimate", tmp_path / "a.plan", "--config", path, code=2).stderr
    assert "has decided on --budget already" in told and f"options are also from {path!r}" in told
    path = written(tmp_path / "step.toml", {}, {"infer": True})
    assert "leave --infer out" in foreplan("train", MODEL, "--data", "x.npz", "--config", path, code=2).stderr


def test_files_that_it_names_lie_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = Path(fp.__file__).resolve().parents[1] / "runtime" / "cuda" / "devices" / "h100.toml"
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "mine.toml").write_bytes(card.read_bytes())
    (tmp_path / "other.toml").write_bytes(card.read_bytes())
    (folder / "link.toml").symlink_to(tmp_path / "other.toml")
    monkeypatch.chdir(tmp_path)
    path = written(folder / "step.toml", {"target": "cuda:mine.toml"}, {})
    assert answer("estimate", MODEL, "--config", "own/step.toml")["fits"]
    np.save(folder / "axes.npy", np.arange(2))
    written(folder / "step.toml", {}, {"values": {"axes": "axes.npy"}})
    assert settings_of(path).values == {"axes": str(folder.resolve() / "axes.npy")}
    for name in ("../other.toml", str(tmp_path / "other.toml"), "link.toml", "\0.toml"):
        written(folder / "step.toml", {"target": f"cuda:{name}"}, {})
        assert "step.toml': target: " in foreplan("estimate", MODEL, "--config", path, code=2).stderr
        written(folder / "step.toml", {}, {"values": {"axes": name}})
        assert "[model]: values: " in foreplan("estimate", MODEL, "--config", path, code=2).stderr


WRONG = {
    'buget = "1GiB"': "there is no key 'buget' (did you mean budget?)",
    "xyz = 1": "there is no key 'xyz'; keys are target, budget, ",
    "batch = 3": "there is no key 'batch': it stands in the table [model]",
    "[model]\nbudget = 1": "[model]: there is no key 'budget': it stands at the beginning, before [model]",
    "[model]\ntrust_code = true": "there is no key 'trust_code': a file cannot say it; give --trust-code",
    "weights_folder = '/'": "a file cannot say it; give --weights-folder",
    "[model]\nstep = {}": "there is no key 'step'",
    "passes = []": "there is no key 'passes'",
    "share = 1": "there is no key 'share'",
    "model = 3": "model is a table, [model], and is 3 (int)",
    "[[model]]": "model is a table, [model], and is [{}] (list)",
    "[target]\nname = 'cpu'": "target must be a str",
    "target = 3": "target must be a str",
    "budget = true": "a budget is bytes, text",
    "budget = 'much'": "budget: 'much' is not a size",
    "remat = 'on'": "there is no remat 'on'; choose one of off, auto",
    "remat = 1979-05-27": "choose one of off, auto",
    "freeze = 'head'": "freeze takes a list of names",
    "freeze = {head = true}": "freeze takes a list of names",
    "freeze = [['head']]": "freeze takes a list of names",
    "split = {h = {a = 2}}": "split of 'h' must be a whole number",
    "accumulate = 2.0": "accumulate must be a whole number of at least 1",
    "accumulate = []": "accumulate must be a whole number of at least 1",
    "offload = 1": "offload is True or False",
    "stage = -1": "stage must be a whole number of at least 0",
    "ranks = 99999999999999999999": "a whole number has 67 bits",
    "links = []": "links must be a str",
    "[model]\nbatch = true": "batch must be a whole number of at least 1",
    "[model]\nbatch = '3'": "batch must be a whole number of at least 1",
    "[model]\nshapes = {x = 3}": "shapes of 'x' must be a list of whole numbers",
    "[model]\nshapes = {x = [-1]}": "shapes of 'x' must be a whole number of at least 0",
    "[model]\nvalues = {x = {}}": "values of 'x' must be numbers",
    "[model]\nvalues = {x = ['a']}": "values of 'x' must be numbers",
    "[model]\nrate = '0.1'": "rate must be a number",
    "[model]\nrate = true": "rate must be a number",
    "[model]\noptimizer = 'sdg'": "there is no optimizer 'sdg'; choose one of sgd, ",
    "[model]\noptimizer = {name = 'sgd'}": "optimizer must be a str",
    "[model]\nschedule = 'cosin'": "there is no schedule 'cosin'",
    "[model]\nloss = 'hinge'": "there is no loss 'hinge'",
    "a = ": "is no TOML file: Invalid value",
    "a" * 9 + "." * 9: "is no TOML file",
    "a = " + "[" * 9000: "is no TOML file",
    "target = 'cpu'\ntarget = 'numpy'": "is no TOML file: Cannot overwrite a value",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:30])
def test_what_is_wrong_is_told_with_file_and_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.toml"
    path.write_text(text)
    done = foreplan("estimate", MODEL, "--config", path, code=2)
    assert done.stdout == "" and done.stderr.startswith(f"error: {str(path)!r}") and WRONG[text] in done.stderr
    told = answer("train", MODEL, "--data", "x.npz", "--config", path, code=2)
    assert told["error"] == "usage" and WRONG[text] in told["message"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'target = "\xe9"')
    (tmp_path / "large.toml").write_bytes(b"#" * (RULES["TOML"].largest + 1))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    told = {
        "": "Is a directory",
        "none.toml": "No such file",
        "loop": "Too many levels of symbolic links",
        "latin.toml": "it is not UTF-8 at byte 10",
        "large.toml": "has more than 16.00 KiB",
    }
    for name, text in told.items():
        assert text in foreplan("estimate", MODEL, "--config", tmp_path / name, code=2).stderr
    for path in ("", "a\0b", "\udcff", os.devnull + "/x"):
        assert "error: " in foreplan("estimate", MODEL, "--config", path, code=2).stderr
    assert answer("estimate", MODEL, "--target", "numpy", "--config", os.devnull)["options"]["budget"] is None


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from([*FIELDS, "model", "share", "passes", "step"]) | st.text(max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=st.dictionaries(KEYS, JUNK, max_size=3), model=st.dictionaries(KEYS, JUNK, max_size=3))
def test_drawn_files_are_taken_or_refused(tmp_path: Path, step: dict[str, Any], model: dict[str, Any]) -> None:
    text = "\n".join(f"{toml(key)} = {toml(value)}" for key, value in step.items())
    text += "\n[model]\n" + "\n".join(f"{toml(key)} = {toml(value)}" for key, value in model.items())
    path = tmp_path / "step.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        found = read_config(str(path))
    except UsageError as error:
        assert repr(str(path)) in str(error)
        return
    assert set(found) <= set(step) | set(model)
    assert settings_of(str(path)) == Settings(
        **{name: value for name, value in found.items() if name in OF_MODEL},
        step=Options(**{name: value for name, value in found.items() if name in OF_STEP}),
    )
