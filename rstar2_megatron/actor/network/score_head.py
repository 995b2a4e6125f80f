"""The head of a reward model: one linear row on the hidden state of chosen tokens, in fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


class ScoreHead(torch.nn.Module):
    """Every tensor-parallel rank holds the whole row and computes the same scores, so its gradient needs no reduction.

    There is no bias: a preference is a difference of scores.
    """

    def __init__(self, config: Any, tp_group: Any) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = tp_group, config.sequence_parallel
        device = torch.cuda.current_device()
        weight = torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """hidden [t, 1, H] ([t/tp, 1, H] under sequence parallelism) -> fp32 [1, n] for the tokens `rows` [n]."""
        if self.sequence_parallel:
            # every rank's gradient is the whole one, so the backward pass takes this rank's part and sums nothing
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=self.tp_group)
        chosen = hidden.squeeze(1).index_select(0, rows)
        return F.linear(chosen.float(), self.weight.float()).t()
