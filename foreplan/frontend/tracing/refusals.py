"""Why NumPy has functions that traced tensors cannot take, and what to write instead."""

from __future__ import annotations

_DEPENDS = "gives a shape that depends on data, and shapes are static; use np.where with a mask"
_WRITES = "writes into an array, and traced tensors never change; make a new one with np.where or np.concatenate"
_VALUES = "needs the values of its tensors, which do not exist yet; return them from the function to see them"
_COMPLEX = "gives complex numbers, which foreplan does not have; compute with real and imaginary parts"
_SOLVES = "has no gradient here; compute it outside with NumPy, or write it with matrix products"
_CALLS = "calls a Python function for each piece, which would unroll into the graph; compute on whole tensors"
_COUNTS = "counts, and so has no gradient; write it with comparisons and sums, such as ((x >= low) & (x < high)).sum()"
_MEMORY = "asks where an array lies in memory, and traced tensors lie nowhere yet; compare the tensors with `is`"
_ORDERS = "leaves the order of elements open; use np.sort, np.argsort or foreplan.nn.topk"

_NAMES = {
    _DEPENDS: (
        "nonzero flatnonzero argwhere unique unique_all unique_counts unique_inverse unique_values extract compress "
        "trim_zeros bincount intersect1d setdiff1d setxor1d union1d mask_indices"
    ),
    _WRITES: "copyto fill_diagonal place put put_along_axis putmask",
    _VALUES: (
        "array2string array_repr array_str savetxt save savez savez_compressed min_scalar_type can_cast common_type "
        "datetime_as_string busday_count busday_offset is_busday isfortran require nested_iters format_float_positional"
    ),
    _COMPLEX: "sort_complex poly roots fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn irfft irfft2 irfftn hfft ihfft",
    _SOLVES: (
        "cholesky cond det eig eigh eigvals eigvalsh inv lstsq matrix_rank pinv qr slogdet solve svd svdvals tensorinv "
        "tensorsolve polyfit"
    ),
    _CALLS: "apply_along_axis apply_over_axes piecewise",
    _COUNTS: "digitize histogram histogram2d histogramdd histogram_bin_edges searchsorted packbits unpackbits",
    _MEMORY: "shares_memory may_share_memory",
    _ORDERS: "partition argpartition lexsort",
}
_REASONS = {name: reason for reason, names in _NAMES.items() for name in names.split()}


def reason_against(name: str) -> str:
    """Why the NumPy function of this name is not traced, and what to do."""
    return _REASONS.get(name, "has no traced form; write it with other NumPy functions, or with those of foreplan.nn")
