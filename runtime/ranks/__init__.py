"""The ranks of a job: how a process finds them, and what moves bytes between them on the host."""

from foreplan.runtime.ranks.launch import current, using
from foreplan.runtime.world.world import ALONE, Alone, World

__all__ = ["ALONE", "Alone", "World", "current", "using"]
