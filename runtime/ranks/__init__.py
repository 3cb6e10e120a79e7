"""The ranks of a job: who they are, and what moves bytes between them."""

from foreplan.runtime.ranks.launch import current, using
from foreplan.runtime.ranks.world import ALONE, Alone, World

__all__ = ["ALONE", "Alone", "World", "current", "using"]
