"""The planner: numbers in (a Problem), a verified plan out; it knows no graph, op or engine."""

from foreplan.planner.costs import Totals, totals
from foreplan.planner.driver import plan, plan_curve
from foreplan.planner.no_reuse import without_reuse
from foreplan.planner.placement.intervals import Interval, place_intervals, read_intervals, write_intervals
from foreplan.planner.placement.offsets import Placement, place
from foreplan.planner.plan import Buffer, Certificate, Plan, Step
from foreplan.planner.problem import (
    ALIGNMENT,
    Action,
    Category,
    Overwrite,
    Part,
    Problem,
    Region,
    Role,
    Value,
)
from foreplan.planner.recompute.front import Beside, Curve
from foreplan.planner.report import buffers, bytes_by_category, category_series, live_at
from foreplan.planner.stages import Stage, Stages, explain
from foreplan.planner.verify.verifier import verify
from foreplan.planner.verify.wellformed import check_problem

__all__ = [
    "ALIGNMENT",
    "Action",
    "Beside",
    "Buffer",
    "Category",
    "Certificate",
    "Curve",
    "Interval",
    "Overwrite",
    "Part",
    "Placement",
    "Plan",
    "Problem",
    "Region",
    "Role",
    "Stage",
    "Stages",
    "Step",
    "Totals",
    "Value",
    "buffers",
    "bytes_by_category",
    "category_series",
    "check_problem",
    "explain",
    "live_at",
    "place",
    "place_intervals",
    "plan",
    "plan_curve",
    "read_intervals",
    "without_reuse",
    "totals",
    "verify",
    "write_intervals",
]
