"""Matrix products of a decoding batch on all threads of a CPU engine.

MKL computes x @ W.T of 4 to 56 rows on one thread, whatever the threads are. Of W @ x.T it divides the rows of W. With two
threads that takes about half of the time for 16 to 48 rows, and most of it for 8 (`benchmarks/NOTES.md`).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_FEWEST, _MOST = 8, 48  # rows of x
_SMALLEST = 2**18  # numbers of W
_libraries: list[torch.library.Library] = []  # kept alive: a collected Library takes its kernel with it


def mm(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] times w [K, N], which is a weight [N, K] transposed where it is turned: [M, N], contiguous."""
    out = torch.ops.aten.mm.out
    if x.dtype == torch.float32 and _FEWEST <= x.size(0) <= _MOST and w.stride(0) == 1 and w.numel() >= _SMALLEST:
        turned = out(w.t(), x.t(), out=w.new_empty(w.size(1), x.size(0)))
        return turned.t().contiguous()
    return out(x, w, out=x.new_empty(x.size(0), w.size(1)))


def install() -> None:
    """Replace torch's product of two matrices in this process, which must have no use for its gradient."""
    if torch.get_num_threads() == 1:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that it replaces a kernel
        library.impl("mm", mm, "CPU", allow_override=True)
    _libraries.append(library)
