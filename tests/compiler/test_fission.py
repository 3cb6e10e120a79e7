"""Models in parts: by hand, and where a budget of inference asks for it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import foreplan as fp
from foreplan import passes
from foreplan.compiler.compiled import Compiled
from foreplan.compiler.forms import other_forms
from foreplan.compiler.pipeline import passes_of_training
from foreplan.options import Options
from foreplan.passes.pipeline import of_stages
from tests.cli.shell import answer, foreplan
from tests.compiler.chains import chain
from tests.profile import few, values

CHAIN = "conv_chain:size=64"
GPT = "gpt2_small:batch=2,seq=16,layers=2,width=32,heads=2,vocabulary=64"


def outputs(step: Compiled, seed: int = 0) -> dict[str, np.ndarray]:
    assert step.model is not None
    rng = np.random.default_rng(seed)
    given = {x.name: rng.normal(size=x.shape).astype(x.dtype.numpy) for x in step.model.inputs}
    return {name: np.array(y) for name, y in step.bind(seed=3).step(given).outputs.items()}


@pytest.mark.parametrize("target", ["numpy", "cpu"])
@pytest.mark.parametrize(
    ("model", "share"), few([(CHAIN, 0.6), ("resnet18:batch=32,size=96", 0.8), ("vgg16:batch=4,size=64", 0.7)])
)
def test_inference_within_a_budget(model: str, share: float, target: str) -> None:
    graph = fp.models.build(model)
    whole = fp.compile(graph, target=target)
    with pytest.raises(fp.DoesNotFitError) as least:
        fp.compile(graph, target=target, budget=1, fission="off")
    persistent = whole.memory.persistent
    budget = persistent + int(share * (least.value.needed - persistent))
    parts = fp.compile(graph, target=target, budget=budget)
    assert parts.arena_bytes <= budget
    assert any("run in" in note and "never whole" in note for note in parts.program.notes)
    for name, y in outputs(whole).items():
        np.testing.assert_allclose(outputs(parts)[name], y, rtol=1e-4, atol=1e-4 * np.abs(y).max())


# MiB of plans of whole tensors: 1,540, 1,315, 318 and 281.
@pytest.mark.parametrize(
    ("model", "mebibytes"),
    few([("conv_chain", 560), ("vgg16:batch=32", 700), ("resnet50:batch=32", 220), ("unet:batch=4,size=256", 200)]),
)
def test_budgets_that_whole_tensors_do_not_meet(model: str, mebibytes: int) -> None:
    assert fp.compile(fp.models.build(model), budget=f"{mebibytes}MiB").arena_bytes <= mebibytes << 20


def test_a_budget_that_is_met_changes_nothing() -> None:
    graph = fp.models.build(CHAIN)
    whole = fp.compile(graph)
    assert fp.compile(graph, budget=whole.arena_bytes).program.digest == whole.program.digest


def test_what_no_way_meets_is_refused_with_the_least() -> None:
    with pytest.raises(fp.DoesNotFitError) as told:
        fp.compile(fp.models.build(CHAIN), budget="2MiB")
    whole = fp.compile(fp.models.build(CHAIN))
    assert told.value.capacity == 2 << 20 < told.value.needed < whole.arena_bytes


def test_forms_differ_and_are_compared_with_the_step_as_it_is() -> None:
    graph = fp.models.build("conv_chain:size=64")
    step = fp.compile(graph, fp.losses.mean, fp.optim.SGD(0.1), remat="off")
    forms = list(other_forms(step))
    texts = [tuple(sorted(form.as_text().splitlines())) for form, _ in forms]
    assert step.graph is not None
    assert len({*texts, tuple(sorted(step.graph.as_text().splitlines()))}) == len(forms) + 1 > 3
    whole = fp.planner.totals(step.program, [tuple(each.action for each in step.plan.steps)])[0]
    for _, program in forms:
        found = fp.planner.plan(program, remat="off")
        costs = fp.planner.totals(program, [tuple(each.action for each in found.steps)])[0]
        told = f"adds {costs.nanoseconds / whole.nanoseconds - 1:+.1%} to the predicted time"
        assert told in program.notes[-1]
        assert program.base == (whole.flops, whole.nanoseconds)


SPLITS = [
    (GPT, "h.*.mlp=4"),
    (GPT, "h.0=2 h.1.attn=2"),
    ("conv_chain:size=16", "conv1..conv2=8"),
    ("conv_chain:size=16,batch=2", "conv1..conv4=2 conv6..conv8=3"),
    ("resnet18:batch=4,size=64", "conv1..max_pool=4"),
]


@pytest.mark.parametrize(
    ("chosen", "target"), values(SPLITS[:4], ["numpy", "cpu"]) + few(product(SPLITS[4:], ["cpu", "numpy"]), ())
)
def test_a_split_step_trains_as_the_whole(chosen: tuple[str, str], target: str) -> None:
    model, split = chosen[0], chosen[1].split()
    graph, loss = fp.models.build(model), fp.models.default_loss(model)
    steps = [fp.compile(graph, loss, fp.optim.SGD(0.05), target=target, split=s, fission="off") for s in ([], split)]
    assert steps[0].graph is not None
    rng = np.random.default_rng(0)
    given = {
        x.name: rng.normal(size=x.shape).astype("f4") if x.dtype.is_float else rng.integers(0, 8, x.shape)
        for x in steps[0].graph.inputs
        if x.init is None
    }
    losses = []
    for step in steps:
        session = step.bind(seed=3)
        losses.append([session.step(given).loss for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
    assert steps[1].program.digest != steps[0].program.digest


def test_parts_of_a_split_model_are_checkpointed_by_name() -> None:
    """A local micro-batch: some rows at a time, forward and again for backward."""
    graph, loss = fp.models.build(GPT), fp.losses.cross_entropy
    step = fp.compile(graph, loss, fp.optim.SGD(0.1), split={"h.*.mlp": 4}, checkpoint=["h.*.mlp"])
    again = [run.action for run in step.plan.steps]
    twice = {step.program.actions[action].name for action in again if again.count(action) > 1}
    assert any(name.startswith("h.0.mlp") and "/part" in name for name in twice)


@pytest.mark.parametrize(
    ("split", "kept"),
    [({"h.*": 2}, ("h.*=2",)), (["a=2", "b..c=3"], ("a=2", "b..c=3")), ((), ()), ({"a=b": 4}, ("a=b=4",))],
)
def test_split_is_kept_as_text(split: object, kept: tuple[str, ...]) -> None:
    options = Options(target="cpu", split=split)  # type: ignore[arg-type]
    assert options.split == kept
    assert Options.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ("h=2", "split takes a list of names"),
        (["h"], "split says in how many parts"),
        (["h=x"], "split of 'h' must be a whole number"),
        ({"h": 1}, "split of 'h' must be a whole number of at least 2"),
        ({3: 2}, "split says in how many parts"),
        (7, "split takes a list of names"),
    ],
)
def test_what_is_no_split(split: object, told: str) -> None:
    with pytest.raises(fp.UsageError, match=told):
        Options(split=split)  # type: ignore[arg-type]


def test_commands_split() -> None:
    whole = answer("estimate", CHAIN, "--infer")
    parts = answer("estimate", CHAIN, "--infer", "--split", "conv1..conv4=4")
    assert parts["arena_bytes"] < whole["arena_bytes"]
    within = answer("estimate", CHAIN, "--infer", "--budget", parts["arena_bytes"])
    assert within["arena_bytes"] <= parts["arena_bytes"]
    answer("estimate", CHAIN, "--infer", "--budget", parts["arena_bytes"], "--fission", "off", code=3)
    assert "cannot run in 70 parts" in foreplan("estimate", CHAIN, "--infer", "--split", "conv3=70", code=2).stderr


# MiB, and percent of predicted time; of whole tensors 1,534, 2,638 and 2,706, and no less than 1,160 of the last two.
@pytest.mark.parametrize(
    ("activation", "mebibytes", "percent"),
    few(
        [
            ("ReLU", 1050, 2),
            ("ReLU", 560, 4),
            ("GELU", 1160, 3),
            ("GELU", 1050, 3.5),
            ("batch norm and ReLU", 1160, 3),
        ]
    ),
)
def test_chains_with_activations(activation: str, mebibytes: int, percent: int) -> None:
    step = fp.compile(chain(activation, 1024), fp.losses.mse, fp.optim.Nesterov(0.1), budget=f"{mebibytes}MiB")
    assert step.arena_bytes <= mebibytes << 20
    assert step.estimate()["extra_seconds_ratio"] <= percent / 100


@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_a_step_in_pieces_trains_as_the_whole(target: str) -> None:
    """Batch norm, gelu and concatenations between convolutions, so tight that pieces are chosen."""
    graph = fp.models.build("unet:batch=2,size=32,width=16")
    arguments = (graph, fp.losses.cross_entropy, fp.optim.Nesterov(0.05))
    whole = fp.compile(*arguments, target=target, fission="off", remat="off")
    entries = passes_of_training(Options(outputs=list(graph.outputs), target=target), [passes.split_pieces])
    pieces = passes.run_passes(graph, of_stages(entries, (passes.Stage.FORWARD, passes.Stage.MEMORY)))
    assert any("run in" in note for note in pieces.notes)
    parts = fp.compile(pieces, *arguments[1:], target=target, fission="off")
    rng = np.random.default_rng(0)
    given = {"images": rng.normal(size=(2, 3, 32, 32)).astype("f4"), "target": rng.integers(0, 2, (2, 32, 32))}
    losses = [[session.step(given).loss for _ in range(3)] for session in (whole.bind(seed=1), parts.bind(seed=1))]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)


def test_what_recomputes_little_stays_whole() -> None:
    """No search for pieces where a budget costs next to nothing."""
    graph = fp.models.build("resnet18:batch=4,size=64")
    arguments = (graph, fp.losses.cross_entropy, fp.optim.SGD(0.1))
    whole = fp.compile(*arguments, remat="off")
    assert fp.compile(*arguments, budget=whole.arena_bytes).program.digest == whole.program.digest


SEQUENCES = "gpt2_small:batch=4,seq=64,layers=4,width=64,heads=2,vocabulary=512,dropout=0.1"
FEWER = SEQUENCES.replace("layers=4", "layers=2")


def losses(step: Compiled) -> list[float]:
    """Of three steps on drawn inputs."""
    assert step.model is not None and step.graph is not None
    rng = np.random.default_rng(0)
    given = {
        x.name: rng.normal(size=x.shape).astype("f4") if x.dtype.is_float else rng.integers(0, 8, x.shape)
        for x in step.graph.inputs
        if x.init is None
    }
    session = step.bind(seed=3)
    return [float(session.step(given).loss) for _ in range(3)]


LAST = [
    (FEWER, "h.1..loss=4"),
    ("conv_chain:size=40", "conv1..loss=3"),
    (SEQUENCES, "wte..loss=3"),
    ("resnet18:batch=4,size=64", "conv1..loss=2"),
]


@pytest.mark.parametrize(
    ("chosen", "target"), values(LAST[:2], ["numpy", "cpu"]) + few(product(LAST[2:], ["numpy", "cpu"]), ())
)
def test_layers_up_to_the_loss_train_in_parts(chosen: tuple[str, str], target: str) -> None:
    """The same masks, the same losses. Of a residual net only what follows its last batch norm; bands of an image."""
    model, split = chosen[0], [chosen[1]]
    arguments = fp.models.build(model), fp.models.default_loss(model), fp.optim.Adam(0.001)
    whole, parts = (fp.compile(*arguments, target=target, split=s, fission="off") for s in ([], split))
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)
    assert any("to the loss, and back, run in" in note for note in parts.program.notes)


def test_a_budget_chooses_parts_of_the_batch_where_recomputation_takes_longer() -> None:
    graph, arguments = fp.models.build(FEWER), (fp.losses.cross_entropy, fp.optim.Nesterov(0.1))
    whole = fp.compile(graph, *arguments, remat="off")
    budget = int(0.65 * whole.arena_bytes)
    again = fp.compile(graph, *arguments, budget=budget, fission="off")
    parts = fp.compile(graph, *arguments, budget=budget)
    assert parts.arena_bytes <= budget and again.arena_bytes <= budget
    assert parts.estimate()["predicted_seconds"] < again.estimate()["predicted_seconds"]
    assert any("to the loss, and back, run in 4 parts" in note for note in parts.program.notes)
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["numpy", "cpu"])
def test_a_budget_chooses_bands_of_an_image(target: str) -> None:
    """Two fifths of the least that whole tensors allow."""
    arguments = chain("GELU", 256), fp.losses.mse, fp.optim.Nesterov(0.1)
    whole = fp.compile(*arguments, target=target, remat="off", fission="off")
    with pytest.raises(fp.DoesNotFitError) as least:
        fp.compile(*arguments, target=target, budget=1, fission="off")
    parts = fp.compile(*arguments, target=target, budget=int(0.4 * least.value.needed))
    assert any("parts along axis 2 of what the loss adds up" in note for note in parts.program.notes)
    assert parts.estimate()["predicted_seconds"] < 1.5 * whole.estimate()["predicted_seconds"]
    if target == "cpu":  # NumPy's convolutions of this size take two minutes
        np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-4)


@pytest.mark.thorough
def test_smaller_budgets_never_give_larger_or_faster_plans() -> None:
    graph, arguments = fp.models.build(SEQUENCES), (fp.losses.cross_entropy, fp.optim.Nesterov(0.1))
    whole = fp.compile(graph, *arguments, remat="off").arena_bytes
    sizes, times = [], []
    for share in (1, 0.9, 0.8, 0.7, 0.65):
        step = fp.compile(graph, *arguments, budget=int(share * whole))
        sizes.append(step.arena_bytes)
        times.append(step.estimate()["predicted_seconds"])
    assert sizes == sorted(sizes, reverse=True)
    assert times == sorted(times)


# MiB, and percent of predicted time over the step that recomputes nothing; recomputation alone takes 9 % and more.
@pytest.mark.thorough
@pytest.mark.whole_search
@pytest.mark.parametrize(
    ("model", "mebibytes"), [("gpt2_small", 1906), ("bert_base", 1795), ("vit_b16", 2053), ("convnext_tiny", 1612)]
)
def test_transformers_in_parts_of_the_batch(model: str, mebibytes: int) -> None:
    arguments = fp.models.build(model), fp.models.default_loss(model), fp.optim.Nesterov(0.1)
    whole = fp.compile(*arguments, remat="off", fission="off")
    parts = fp.compile(*arguments, budget=f"{mebibytes}MiB")
    assert parts.arena_bytes <= mebibytes << 20
    assert parts.estimate()["predicted_seconds"] <= 1.03 * whole.estimate()["predicted_seconds"]


def test_channels_are_split_by_default_only_where_that_adds_little() -> None:
    """The chain's second convolution over a few channels is slow on the cpu engine, by its own prices."""
    arguments = fp.models.build("conv_chain"), fp.losses.mean, fp.optim.Nesterov(0.1)
    for target, splits in (("numpy", True), ("cpu", False)):
        step, whole = (fp.compile(*arguments, target=target, fission=fission) for fission in ("auto", "off"))
        assert any("run in" in note for note in step.program.notes) is splits
        assert step.estimate()["predicted_seconds"] <= 1.02 * whole.estimate()["predicted_seconds"]


def test_each_form_of_a_step_has_other_work() -> None:
    """A form that lists the same nodes in another order is no other form: the planner orders them itself."""

    def forms(model: str) -> list[tuple[str, ...]]:
        step = fp.compile(fp.models.build(model), fp.models.default_loss(model), fp.optim.SGD(0.1))
        assert step.graph is not None
        graphs = [step.graph, *(graph for graph, _ in other_forms(step))]
        return [tuple(sorted(graph.as_text().splitlines())) for graph in graphs]

    assert len(forms("resnet18:batch=2,size=32")) == 1
    several = forms("conv_chain:size=64,batch=2")
    assert len(several) > 2 and len(set(several)) == len(several)
