"""Values computed again or copied away, within a budget, and what that costs."""
