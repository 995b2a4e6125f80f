"""Root-mean-square norm for the local layer spec: supports sequence parallelism, fast on CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _HostRMSNorm(torch.autograd.Function):
    """fp32 norm with an explicit backward pass: torch's own takes five times as long on CPU.

    y = x r w with r = (mean(x^2) + eps)^-1/2; with g the gradient of y and u = x r:
    dw = sum_tokens(g u), dx = r (g w - u mean(g w u)).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.size(-1)).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit = x * scale
        wide = grads[0] * unit
        grad_weight = wide.flatten(0, -2).sum(0)
        mean = torch.mv(wide.flatten(0, -2), weight).view(scale.shape).div_(x.size(-1))
        grad_x = (grads[0] * weight).addcmul_(unit, mean, value=-1.0).mul_(scale)
        return grad_x, grad_weight, None


class RMSNorm(torch.nn.Module):
    """RMSNorm with the constructor of megatron-core's layer spec, whose own torch norm has no sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        # finalize_model_grads sums the gradients of marked weights over the TP ranks, which see different tokens.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, (x.size(-1),), self.weight, self.eps)
        result = _HostRMSNorm.apply(x, self.weight, self.eps)
        assert isinstance(result, Tensor)
        return result
