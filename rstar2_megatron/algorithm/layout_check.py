"""The policy loss that `algorithm.policy_loss` names, and a check that it gives the same on every layout.

Authors call it in a test of their own: `check_layouts(my_loss)`. The check before a run does so too.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rstar2_megatron.algorithm.loss import POLICY_LOSSES, PolicyLoss, Tokens, value_key
from rstar2_megatron.extension.choice import resolve
from rstar2_megatron.extension.user_code import UserCode, UserCodeError
from rstar2_megatron.settings.schema import AlgorithmSettings

KEY = "algorithm.policy_loss"
_LENGTHS = (5, 1, 8, 3)  # of the sequences of the trial batch
_PATIENCE_S = 20.0  # for a rank that calls `sequence_sum` less often than another


def load_policy_loss(algorithm: AlgorithmSettings) -> tuple[PolicyLoss, list[str]]:
    """(the loss, the keys of its values among the sums). A loss of the user's is tried on a few tokens, and checked at every
    call.

    Raises UserCodeError.
    """
    function = resolve(KEY, algorithm.policy_loss, POLICY_LOSSES, "tokens")
    batch = _trial(algorithm)
    batch["logprobs"].requires_grad_()
    trial = _part(batch, algorithm, range(len(_LENGTHS)), torch.arange(sum(_LENGTHS)))
    if not isinstance(algorithm.policy_loss, UserCode):
        return function, sorted(map(value_key, function(trial)[1]))
    shown = f"{KEY}={algorithm.policy_loss.label}"
    names = sorted(_checked(function, shown, None, trial)[1])
    return functools.partial(_checked, function, shown, names), [value_key(name) for name in names]


def _checked(
    loss: Callable[[Tokens], object], shown: str, names: list[str] | None, tokens: Tokens
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its values. names: those of another call, because a metric is a mean over all tokens; None: any.

    A rank without tokens may leave the values out.
    """
    before = _versions(tokens)
    found = loss(tokens)
    if changed := [name for name, version in _versions(tokens).items() if version != before[name]]:
        raise UserCodeError(
            f"{shown} changed tokens.{changed[0]} in place, of which the ratio and the metrics are made; compute a new tensor"
        )
    losses, values = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
    expected = f"a tensor [n] of shape {tuple(tokens.logprobs.shape)}"
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UserCodeError(f"{shown} returned {reprlib.repr(values)} as second value; return a dict of tensors [n] by name")
    if names is not None and sorted(values) != names and len(tokens.logprobs):
        raise UserCodeError(
            f"{shown} returned the values {sorted(values)}, in another micro-batch {names}; return all of them always, zeros "
            "where a token has none"
        )
    for name, tensor in {"": losses, **values}.items():
        what = f"{name!r}, " if name else ""
        if not isinstance(tensor, Tensor):
            raise UserCodeError(f"{shown} returned {what}a {type(tensor).__name__}; return {expected}")
        if tensor.shape != tokens.logprobs.shape:
            raise UserCodeError(f"{shown} returned {what}the shape {tuple(tensor.shape)}; return {expected}, one loss a token")
        wrong = ~torch.isfinite(tensor)
        if wrong.any():
            at = int(wrong.nonzero()[0])
            seen = ", ".join(f"{key} {getattr(tokens, key)[at].item():g}" for key in ("logprobs", "old_logprobs", "advantages"))
            raise UserCodeError(f"{shown} returned {what}{tensor[at].item()} for a token of {seen}")
    assert isinstance(losses, Tensor)
    if tokens.logprobs.requires_grad and not losses.requires_grad:
        raise UserCodeError(f"{shown} returned losses without a gradient; compute them from tokens.logprobs or tokens.ratio")
    return losses, values


def _versions(tokens: Tokens) -> dict[str, int]:
    """How often each tensor was changed in place, by its name."""
    values = {one.name: getattr(tokens, one.name) for one in dataclasses.fields(tokens)}
    return {name: value._version for name, value in values.items() if isinstance(value, Tensor)}


# ------------------------------------------------------------------------------------------------ layouts


def check_layouts(loss: PolicyLoss, algorithm: AlgorithmSettings | None = None) -> None:
    """Compare losses and gradients of one batch, whole and split into micro-batches and over context-parallel ranks.

    loss: a function as `algorithm.policy_loss` names it. algorithm: its settings; None: the defaults.
    Raises ValueError with the first layout that differs by more than rounding in float32, in which the actor's tensors are.
    """
    settings = algorithm or AlgorithmSettings.model_validate(
        {
            "group_size": 1,
            "down_sampling": {"down_sampling_config": {"down_sample_to_n": 1}},
            "sampling_params": {"max_new_tokens": 1},
        }
    )
    everything = list(range(len(_LENGTHS)))
    whole = _run(loss, settings, [everything], 1)
    for what, values in zip(("loss", "gradient"), whole, strict=True):
        if not values.isfinite().all():
            raise ValueError(
                f"the {what} of a token is {float(values[~values.isfinite()][0])}: it must be finite for every advantage, also "
                "for 0, and for every ratio, also for 1, where the first update of a step is (the square root of a square has "
                "no gradient there)"
            )
    for microbatches, ranks in (([everything[::-1]], 1), ([[2], [0, 3], [1]], 1), ([everything], 2), ([[3, 0], [1], [2]], 4)):
        try:
            split = _run(loss, settings, microbatches, ranks)
        except threading.BrokenBarrierError:
            raise ValueError(
                "tokens.sequence_sum is called on one context-parallel rank and not on another; call it whatever the tokens are"
            ) from None
        for what, ours, theirs in zip(("loss", "gradient"), whole, split, strict=True):
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5):
                token = int((ours - theirs).abs().argmax())
                raise ValueError(
                    f"the {what} of a token is {ours[token]:.6g} with all sequences in one micro-batch, {theirs[token]:.6g} in "
                    f"micro-batches {microbatches} over {ranks} context-parallel ranks: it must depend on its own sequence "
                    "only; sum over a sequence by tokens.sequence_sum, and leave means over tokens to "
                    "algorithm.loss_agg_func. Where it does so, it loses digits in float32, as a difference of near means does"
                )


def _trial(algorithm: AlgorithmSettings) -> dict[str, Tensor]:
    """Tensors of a batch with ratios on both sides of the clips and of 1, and with advantages of turns where these are on."""
    generator, lengths = torch.Generator().manual_seed(0), torch.tensor(_LENGTHS)
    old = -3 * torch.rand(sum(_LENGTHS), generator=generator, dtype=torch.float64) - 0.1
    signs = torch.tensor([1.0, 0.0, -0.5, 0.7], dtype=torch.float64)  # 0: of a turn that has none to be compared with
    position = torch.cat([torch.arange(4, 4 + length) for length in _LENGTHS])  # behind a prompt of 4
    advantages = signs.repeat_interleave(lengths)
    if algorithm.turn_returns.discount is not None:
        advantages = advantages * 0.8 ** (position // 3)
    logprobs = old + 0.5 * torch.randn(sum(_LENGTHS), generator=generator, dtype=torch.float64)
    logprobs[::5] = old[::5]  # as all are in the first update of a step
    return {
        "logprobs": logprobs.float(),
        "old_logprobs": old.float(),
        "rollout_logprobs": (old + 0.01).float(),
        "advantages": advantages.float(),
        "entropy": -old.float(),
        "sequence": torch.arange(len(_LENGTHS)).repeat_interleave(lengths),
        "position": position,
    }


def _part(
    batch: dict[str, Tensor],
    algorithm: AlgorithmSettings,
    members: Sequence[int],
    places: Tensor,
    across_ranks: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tokens:
    local = torch.zeros(len(_LENGTHS), dtype=torch.long)
    local[list(members)] = torch.arange(len(members))
    tensors = {name: tensor[places] for name, tensor in batch.items()}
    tensors["sequence"] = local[tensors["sequence"]]
    return Tokens(**tensors, num_sequences=len(members), settings=algorithm, across_ranks=across_ranks)


def _run(
    loss: PolicyLoss, algorithm: AlgorithmSettings, microbatches: Sequence[Sequence[int]], ranks: int
) -> tuple[Tensor, Tensor]:
    """(losses, gradients of their weighted sum) of all tokens, in the order of the trial batch."""
    batch = _trial(algorithm)
    logprobs = batch["logprobs"].requires_grad_()
    losses = torch.zeros_like(batch["old_logprobs"])
    for members in microbatches:
        own_rank = torch.where(torch.isin(batch["sequence"], torch.tensor(members)), batch["position"] % ranks, -1)
        places = [torch.nonzero(own_rank == rank).squeeze(1) for rank in range(ranks)]
        meeting = _Meeting(ranks)
        parts = [_part(batch, algorithm, members, own, functools.partial(meeting.sum, rank)) for rank, own in enumerate(places)]
        with ThreadPoolExecutor(ranks) as pool:
            running = [pool.submit(meeting.run, loss, part) for part in parts]
        if failed := [error for one in running if (error := one.exception())]:  # the cause rather than what it broke
            raise min(failed, key=lambda error: isinstance(error, threading.BrokenBarrierError))
        found = [one.result() for one in running]
        own_losses = torch.cat([x[0] if isinstance(x, tuple) else x for x in found])
        losses = losses.index_add(0, torch.cat(places), own_losses.to(losses.dtype))
    weights = torch.linspace(1.0, 2.0, len(losses), dtype=torch.float64)
    try:
        (gradient,) = torch.autograd.grad((losses * weights).sum(), logprobs)
    except RuntimeError as error:
        raise ValueError(f"its gradient cannot be computed: {' '.join(str(error).split())}") from error
    return losses.detach(), gradient


class _Meeting:
    """Sums what the ranks, which are threads here, bring to the same call."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, self._add, timeout=_PATIENCE_S)
        self.brought = [torch.empty(0)] * ranks

    def run(self, loss: PolicyLoss, tokens: Tokens) -> Any:
        try:
            return loss(tokens)
        except BaseException:
            self.barrier.abort()
            raise

    def sum(self, rank: int, values: Tensor) -> Tensor:
        self.brought[rank] = values
        self.barrier.wait()
        return self.total

    def _add(self) -> None:
        self.total = torch.stack(self.brought).sum(0)
