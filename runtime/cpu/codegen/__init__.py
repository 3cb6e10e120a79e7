"""Machine code of loops: by LLVM from expressions, and by Numba; and how it is called."""
