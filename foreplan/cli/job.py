"""The ranks that a launcher has started a command on: what they agree on, and how they end together."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from foreplan.base.errors import TargetError, UsageError
from foreplan.cli.array_file import ArrayFile
from foreplan.cli.data import read_arrays, samples_in
from foreplan.cli.flags import file_options, flag_of, given
from foreplan.cli.options import echo, is_file, is_plan_file
from foreplan.cli.settings import Settings

if TYPE_CHECKING:
    from foreplan.compiler.compiled import Compiled
    from foreplan.lower import Program
    from foreplan.runtime.ranks import World

OF_RANKS = ("train",)  # the commands in which ranks meet


def with_ranks(model: str, settings: Settings, world: World) -> Settings:
    """The settings for as many ranks as a launcher has started, where nothing else is said. Ranks of one machine share
    its cores.

    Raises:
        UsageError: another number is asked for.
    """
    if world.size % settings.step.stages:
        count = settings.step.stages
        raise UsageError(
            f"--stages {count}, and {world.size} process{'es run' if world.size > 1 else ' runs'} this command: each "
            f"stage takes as many, so start {count} or a multiple of it (mpirun -n {count} foreplan train …)"
        )
    asked = settings.step.ranks if given("ranks") else world.size
    if asked != world.size:
        raise UsageError(
            f"--ranks {asked}, and {world.size} process{'es run' if world.size > 1 else ' runs'} this command: start "
            f"them by a launcher (mpirun -n {asked} foreplan train …), and leave --ranks out"
        )
    if world.size == 1 or is_plan_file(model):
        return settings
    step = replace(settings.step, ranks=world.size)
    if step.stages > 1:
        step = replace(step, stage=world.rank // (world.size // step.stages))
    if str(step.target) in ("auto", "cpu") and world.neighbours > 1:
        from foreplan.lower.targets import resolved

        if resolved(str(step.target)) == "cpu":
            cores = len(os.sched_getaffinity(0))
            step = replace(step, target=f"cpu:threads={max(1, cores // world.neighbours)}")
    return replace(settings, step=step)


def agree_on_options(world: World, files: Collection[str]) -> None:
    """Check that all ranks were given the same options. All of them call this at the same time.

    Args:
        files: parameters that are files to read, which each rank may have elsewhere: their content is compared when it
            is read.

    Raises:
        SessionError: they were not; names each option and what each rank has.
    """
    from foreplan.runtime.world.agreement import agree

    context, facts = click.get_current_context(), dict[str, object]()
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in files or (name == "model" and is_file(str(value))):
            value = "nothing" if value in (None, ()) else "a file"
        if name != "as_json":  # which says how the first rank prints
            facts[parameter.opts[-1] if name != "model" else "MODEL"] = "nothing" if value in (None, ()) else value
    facts |= {flag_of(name): value for name, value in file_options().items() if name not in context.params}
    agree(world, "the options of the run", facts)


def read_alike(path: str, world: World) -> ArrayFile:
    """The arrays of an .npz file, which every rank reads at the same time.

    Raises:
        UsageError: see `read_arrays`.
        SessionError: another rank cannot read it, or has another one.
    """
    from foreplan.runtime.world.agreement import together

    with together(world, "the data") as facts:
        arrays = read_arrays(path)
        if world.size > 1:
            facts |= facts_of(arrays)
    return arrays


def samples_alike(program: Program, arrays: ArrayFile, path: str, world: World) -> tuple[int, int]:
    """As `samples_in`, which reads the arrays; all ranks call it at the same time.

    Raises:
        InputError, UsageError: see there.
        SessionError: another rank cannot read them.
    """
    from foreplan.runtime.world.agreement import together

    with together(world, "the data"):
        return samples_in(program, arrays, path)


def facts_of(arrays: ArrayFile) -> dict[str, object]:
    """What ranks compare of arrays: their types, shapes and checksums, which the file tells before they are read."""
    found: dict[str, object] = {f"the type of {x!r}": f"{h.dtype}{list(h.shape)}" for x, h in arrays.headers.items()}
    return found | {f"the checksum of {name!r}": header.checksum for name, header in arrays.headers.items()}


class Share(NamedTuple):
    """The samples of a step that a rank takes.

    Attributes:
        number: which share, from 0 on.
        shares: how many there are. Ranks take the same one that compute parts of one model, or are its stages.
    """

    number: int
    shares: int


def share_of(program: Program, world: World) -> Share:
    """The share of this rank. All ranks call it at the same time."""
    tensor = max(
        world.gather(program.tensor, "the parts of products")
    )  # a stage may have nothing that is computed in parts
    return Share(world.rank % program.of_stage // tensor, program.of_stage // tensor)


def check_ranks(model: str, compiled: Compiled, world: World) -> None:
    """Check that a step is for as many ranks as there are.

    Raises:
        UsageError: it is not.
    """
    ranks = compiled.program.ranks
    if ranks != world.size:
        raise UsageError(
            f"{model!r} is a plan for {ranks} rank{'s' * (ranks > 1)}, and {world.size} run: start {ranks} "
            f"(mpirun -n {ranks} foreplan train …)"
        )


def rank_of_job() -> int:
    """This rank, as the launcher's environment says; 0 where there is none."""
    from foreplan.runtime.launchers import launch_of

    try:
        found = launch_of(os.environ)
    except TargetError:
        return 0
    return 0 if found is None else found.rank


def end_job(code: int) -> None:
    """End this rank, and the others if they would wait for it. There are none if this rank has not run anything."""
    launch = sys.modules.get("foreplan.runtime.ranks.launch")
    if launch is not None:
        launch.end(code)


def tell(message: str, show: Callable[[], None] | None = None, of_ranks: bool = False) -> None:
    """Print an error: the first rank's at once, another rank's only if it differs.

    Args:
        show: prints more than the message; None: there is no more.
        of_ranks: whether all ranks run a command in which they meet, so that they can meet here.
    """
    from foreplan.runtime.ranks import current
    from foreplan.runtime.ranks.launch import PATIENCE, begun

    rank = rank_of_job()
    if rank == 0 and show is not None:
        show()
    elif rank == 0:
        echo(f"error: {message}", err=True)
    if of_ranks:
        with suppress(TargetError):  # there is nothing by which they could
            current()
    world = begun()
    text = re.sub(r"^rank \d+ failed: ", "", message)  # as that rank has it itself
    note = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).digest()
    if rank == 0:
        if world is not None:
            world.meet(note, PATIENCE)
        return
    if world is None:  # no rank has spoken with another
        time.sleep(PATIENCE)
    else:
        notes = world.meet(note, PATIENCE)
        if notes is not None and notes[0] == note:
            return
    echo(f"rank {rank}: error: {message}", err=True)
