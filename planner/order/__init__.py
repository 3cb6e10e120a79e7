"""The order of the actions: heuristics, and searches for a lower peak."""
