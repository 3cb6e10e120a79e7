"""oneDNN: its C API, as far as it is used, and its primitives."""
