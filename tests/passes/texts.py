"""Tests of passes as texts: a graph before a pass, and the graph after it.

    # What the case shows.
    : name=value                     the pass's options, if it has any
    graph %g ...                     before
    becomes
    graph %g ...                     after; or `stays` in the place of both, if the pass gives back the very same graph

A file `tests/passes/PASS/*.txt` has one case or several, each beginning with a line `#`. `test_texts.py` holds every
case against the pass, and both graphs against each other: they compute the same, or what `judges.py` says of a pass
that means something else. `python -m tests.passes.texts [PASS]` writes the graphs after the passes anew; read what has
changed in them. So write `stays` at first: what the pass makes of the graph then takes its place. The body of a loop
has lines of its own, indented by two spaces.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from foreplan import passes
from foreplan.base.patterns import Selection
from foreplan.graph import DType, Graph, Kind, Op, Value, as_dtype, parse_graph
from foreplan.graph.op import Types
from foreplan.lower.targets import target_named
from foreplan.passes.optimizer import SGD
from foreplan.passes.ranks import DifferentiateInParts, Ranks, Sharding, Storage
from tests.ops.check import evaluate

FOLDER = Path(__file__).parent
STAYS = "stays"
BECOMES = "becomes"
IGNORED = -100  # as an index of a loss


def _accepts(op: Op, inputs: Types, outputs: Types) -> bool:
    """Any op in the place of others, as if a target had kernels for all."""
    assert list(op.infer(inputs)) == list(outputs), op
    return True


# Options that are no literals, from such.
_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "accepts": lambda target: target_named(target).fuses,
    "accumulation": lambda given: passes.Accumulation(),
    "consume": lambda rate: passes.updating(SGD(rate)),
    "dtype": as_dtype,
    "machine": target_named,
    "optimizer": lambda rate: SGD(rate),
    "price": lambda nanoseconds: lambda node: nanoseconds,
    "ranks": lambda given: Ranks(**given) if isinstance(given, dict) else given,
    "selection": lambda given: Selection(**given),
    "sharding": lambda given: Sharding(Ranks(**given), SGD(0.5), passes.updating(SGD(0.5))),
    "storage": lambda given: Storage(Ranks(**given)),
}
for _module in ("compiler.pipeline", "lower.loop"):  # which use every pass there is
    import_module(f"foreplan.{_module}")
PASSES = {name: kind for name, kind in passes.KNOWN.items() if kind.__module__.startswith("foreplan.")}


def made(name: str, **given: Any) -> passes.Pass:
    """A pass by its name, with options that are literals."""
    assert name in PASSES, f"texts are of passes that foreplan/compiler/pipeline.py lists, and {name!r} is none"
    kind = PASSES[name]
    if "accepts" in kind.__dataclass_fields__:
        given.setdefault("accepts", _accepts)
    options = {key: _OPTIONS[key](x) if key in _OPTIONS and not callable(x) else x for key, x in given.items()}
    if kind is DifferentiateInParts:
        options["step"] = passes.Differentiate(options["sharding"].reducing(options["sharding"].updating))
    return kind(**options)


@dataclass(frozen=True)
class Case:
    """One case of a text.

    Attributes:
        title: what it shows, without the signs in front.
        options: of the pass, as text.
        before, after: graphs as text; the second is empty where the pass gives back the very same graph.
    """

    title: str
    options: str
    before: str
    after: str

    def as_text(self) -> str:
        options = f": {self.options}\n" if self.options else ""
        end = f"{BECOMES}\n{self.after}" if self.after else f"{STAYS}\n"
        text = "".join(f"# {line}\n" for line in self.title.splitlines()) + options + self.before + end
        return re.sub(r"(?<!\\)\\n", "\n  ", text)

    def run(self, name: str) -> tuple[Graph, Graph]:
        """The graphs before and behind the pass of a name."""
        graph = parse_graph(self.before)
        call = ast.parse(f"f({self.options})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        return graph, made(name, **given)(graph)


def cases_of(file: Path) -> list[Case]:
    """The cases of a file, in order."""
    cases: list[Case] = []
    title, options, graphs, ends = [], "", [""], False
    for line in [*file.read_text().replace("\n  ", r"\n").splitlines(), "#"]:
        if line.startswith("#") and not ends:
            assert not graphs[0], f"{file}: behind the graph of {title[0]!r} stands neither {STAYS!r} nor {BECOMES!r}"
        if line.startswith("#") and ends:
            cases.append(Case("\n".join(title), options, graphs[0], "".join(graphs[1:])))
            title, options, graphs, ends = [], "", [""], False
        if line.startswith("#"):
            title.append(line[1:].strip())
        elif line.startswith(":"):
            options = line[1:].strip()
        elif line in (BECOMES, STAYS):
            ends = True
            graphs.append("")
        elif line:
            graphs[-1] += line + "\n"
    assert cases, f"{file}: no case"
    return cases


def files(*names: str) -> list[Path]:
    """The texts of some passes, or of all."""
    return sorted(file for file in FOLDER.glob("*/*.txt") if not names or file.parent.name in names)


def drawn(values: tuple[Value, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Content for values: floating-point numbers positive for what is stored, small whole numbers, of which the
    first of a `target` is one that losses ignore, bits in bytes, booleans of which the first of each row is set.
    """
    found = {}
    for value in values:
        if value.kind is Kind.CONSTANT:
            continue
        if value.dtype.is_float:
            array = rng.uniform(0.5, 1, value.shape) if value.kind.is_stored else rng.standard_normal(value.shape)
        else:
            array = rng.integers(0, 256 if value.dtype.name == "uint8" else 2, value.shape)
            if value.dtype.name == "bool" and value.shape:
                array[..., :1] = 1
            array.flat[:1] = IGNORED if value.name == "target" else array.flat[:1]
        found[value.name] = np.asarray(array).astype(value.dtype.numpy)
    return found


def hold_same(before: Graph, after: Graph, rng: np.random.Generator, far: float | None = None) -> None:
    """Check that two graphs give the same outputs, loss, gradients and updates, up to `far` beside their size, or the
    rounding of their types; and where they have a loss and no gradients yet, that these are the same as well.
    """
    assert {value.name: value.type for value in before.inputs} == {value.name: value.type for value in after.inputs}
    inputs, stored = drawn(before.inputs, rng), drawn(before.stored, rng)
    pairs = [(before, after)]
    if before.loss is not None and before.parameters and not before.gradients:
        pairs.append((passes.differentiate(before), passes.differentiate(after)))
    for old, new in pairs:
        results = evaluate(old, inputs, stored, hard=False), evaluate(new, inputs, stored, hard=False)
        most = tolerance(old, new) if far is None else far
        for (name, x), (other, y) in zip(named(old).items(), named(new).items(), strict=True):
            assert name == other and x.type == y.type, (name, other)
            a, b = (found[value].astype(np.float64) for found, value in zip(results, (x, y)))
            scale = np.abs(a[np.isfinite(a)]).max(initial=0.0)
            np.testing.assert_allclose(b, a, rtol=most, atol=most * scale, err_msg=name)


def named(graph: Graph) -> Mapping[str, Value]:
    """The results of a graph, by what they are."""
    found = {f"output {name}": value for name, value in sorted(graph.outputs.items())}
    found |= {f"gradient {name}": value for name, value in sorted(graph.gradients.items())}
    found |= {f"update {old.name}": new for old, new in sorted(graph.updates.items(), key=lambda pair: pair[0].name)}
    return found | ({} if graph.loss is None else {"loss": graph.loss})


def tolerance(*graphs: Graph) -> float:
    """How far results of graphs may lie apart, beside their size: by some roundings of their types."""
    return max(_roundings(value.dtype) for graph in graphs for value in graph.values())


def _roundings(dtype: DType) -> float:
    """Of a text; there are only four to a narrow type on any way, each of half an epsilon or less."""
    return (2 if dtype.is_narrow else 512) * float(ml_dtypes.finfo(dtype.numpy).eps) if dtype.is_float else 0.0


def main(names: list[str]) -> None:
    """Write the graphs behind passes anew."""
    for file in files(*names):
        found: list[Any] = []
        for case in cases_of(file):
            before, after = case.run(file.parent.name)
            found.append(Case(case.title, case.options, case.before, "" if after is before else after.as_text()))
        text = "\n".join(case.as_text() for case in found)
        if text != file.read_text():
            file.write_text(text)
            print(f"{file.relative_to(FOLDER)}: written anew; read what has changed")


if __name__ == "__main__":
    main(sys.argv[1:])
