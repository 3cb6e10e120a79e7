"""Measures this machine: memory outside arenas, and links between ranks (`foreplan devices --calibrate`)."""
