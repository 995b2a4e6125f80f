"""Matrix products of a CPU in single precision, by oneDNN.

torch leaves them to MKL, which takes twice as long on a processor of AMD and computes few rows on one thread
(`benchmarks/NOTES.md`).
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import Tensor

_FEWEST = 2**21  # multiplications of a product; a call of oneDNN costs 10 us more
_libraries: list[torch.library.Library] = []  # kept alive: a collected Library takes its kernel with it


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] times b [K, N]: [M, N], contiguous. Autograd is a layer above, so that gradients are such products too."""
    if a.dtype == b.dtype == torch.float32 and a.size(0) * b.numel() >= _FEWEST:
        return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
    return torch.ops.aten.mm.out(a, b, out=a.new_empty(a.size(0), b.size(1)))


def install(kernels: int) -> None:
    """Replace torch's product of two matrices in this process, once, with so many compiled kernels kept.

    Each number of rows has its own kernel. One takes 1 MB, up to 7 for thousands of rows, and a new one 0.1 to 0.3 ms.
    1,024 are kept unless told.
    """
    if _libraries or not torch.backends.mkldnn.is_available():
        return
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # of oneDNN, and of torch in front of it
        os.environ.setdefault(cache, str(kernels))  # read at the first product
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # that it replaces a kernel
        library.impl("mm", mm, "CPU", allow_override=True)
    _libraries.append(library)
