"""Products of matrices, on tile registers, by vector instructions and by oneDNN."""
