"""The NumPy engine: every op by its own reference kernel."""
