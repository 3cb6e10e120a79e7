"""A model cut into stages, which ranks run one behind the other: pipeline parallelism."""

from foreplan.passes.stages.cuts import best_cuts
from foreplan.passes.stages.inference import CutIntoStages, laid_out_by_weights, stage_forward
from foreplan.passes.stages.layout import Layout, laid_out
from foreplan.passes.stages.schedule import Unit, units_of
from foreplan.passes.stages.stage import StageStep

__all__ = [
    "CutIntoStages",
    "Layout",
    "StageStep",
    "Unit",
    "best_cuts",
    "laid_out",
    "laid_out_by_weights",
    "stage_forward",
    "units_of",
]
