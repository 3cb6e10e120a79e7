"""What sessions do with the ranks of a job, by the interface `World` alone; one process is `ALONE`."""

from foreplan.runtime.world.world import ALONE, World, world_here

__all__ = ["ALONE", "World", "world_here"]
