from __future__ import annotations

import ast
from pathlib import Path
from types import CodeType

import pytest

from foreplan.planner import costs
from tests.mutation.changes import changed, changes, install
from tests.profile import pick

SMALL = '''
LIMIT = 3
class Box:
    """Holds."""
    def fits(self, n: int = 3) -> bool:
        """Whether."""
        if n < 0 and not self.open:
            raise ValueError(f"{n} is negative" + "!")
        return n <= LIMIT
'''


def test_the_changes_of_a_small_module() -> None:
    found = changes(ast.parse(SMALL))
    assert {change.function for change in found} == {"Box.fits"}
    assert [(change.before, change.after) for change in found if "\n" not in change.before] == [
        ("n < 0 and (not self.open)", "n < 0 or not self.open"),
        ("n < 0 and (not self.open)", "not self.open"),
        ("n < 0 and (not self.open)", "n < 0"),
        ("n < 0", "n <= 0"),
        ("0", "1"),
        ("not self.open", "self.open"),
        ("raise ValueError(f'{n} is negative' + '!')", "pass"),
        ("return n <= LIMIT", "return None"),
        ("n <= LIMIT", "n < LIMIT"),
    ]
    assert [change.after.splitlines()[0] for change in found if "\n" in change.before] == ["if True:", "if False:"]


MODULES = ["planner/verify/verifier.py", "ops/map.py", "frontend/onnx/node.py", "lower/lower.py"]


@pytest.mark.parametrize("module", MODULES)
def test_every_change_compiles_and_is_one(module: str) -> None:
    tree = ast.parse((Path(__file__).parents[2] / "foreplan" / module).read_text())
    found = changes(tree)
    assert len(found) > 50
    assert all(change.before != change.after for change in found)
    whole = ast.unparse(tree)
    for change in found[:: len(found) // pick(5, 10, 50)]:
        new = changed(tree, change)
        compile(new, module, "exec")
        assert ast.unparse(new) != whole
    assert ast.unparse(tree) == whole


def test_a_change_is_installed_in_every_reference_to_a_function() -> None:
    path = str(costs.__file__)
    tree = ast.parse(Path(path).read_text())
    kept, before = costs.Totals.__mul__, compile(tree, path, "exec")
    (change,) = [each for each in changes(tree) if each.after == "times // total"]
    after: CodeType = compile(changed(tree, change), path, "exec")
    whole = costs.Totals(1, 2, 3, 4)
    assert whole * 12 == costs.Totals(12, 24, 36, 48)
    try:
        assert install(before, after)
        assert whole * 12 == kept(whole, 12) == costs.Totals(12, 6, 4, 3)
    finally:
        assert install(after, before)
    assert whole * 12 == costs.Totals(12, 24, 36, 48)
