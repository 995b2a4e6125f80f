"""A policy loss of the user's: tried before a run, checked at each call, compared over layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rstar2_megatron.algorithm.layout_check import check_layouts, load_policy_loss
from rstar2_megatron.algorithm.loss import POLICY_LOSSES, Tokens, policy_loss
from rstar2_megatron.extension.user_code import UserCodeError
from tests.algorithm.own import own
from tests.algorithm.tokens import algorithm

SEQUENCE_RATIO = """
import torch

def f(tokens):
    mean = tokens.sequence_sum(tokens.logprobs - tokens.old_logprobs) / tokens.sequence_sum(torch.ones_like(tokens.logprobs))
    ratio = mean.exp()[tokens.sequence]
    return -tokens.advantages * ratio, {"sequence_ratio": ratio}
"""


def sequence_ratio(tokens: Tokens) -> Any:
    space: dict[str, Any] = {}
    exec(SEQUENCE_RATIO, space)
    return space["f"](tokens)


@pytest.mark.parametrize("loss", [*POLICY_LOSSES.values(), sequence_ratio])
def test_losses_of_own_sequences_are_the_same_on_every_layout(loss: Any) -> None:
    check_layouts(loss)


def of_the_microbatch(tokens: Tokens) -> torch.Tensor:
    return -tokens.advantages * tokens.ratio / tokens.ratio.mean()


def of_the_rank(tokens: Tokens) -> torch.Tensor:
    sums = tokens.logprobs.new_zeros(tokens.num_sequences).index_add(0, tokens.sequence, tokens.logprobs - tokens.old_logprobs)
    return -tokens.advantages * sums.exp()[tokens.sequence]


def of_a_constant(tokens: Tokens) -> torch.Tensor:
    """Only its gradient differs between the layouts."""
    mean = tokens.ratio.mean()
    return -tokens.advantages * tokens.ratio * (mean / mean.detach())


def sometimes(tokens: Tokens) -> torch.Tensor:
    if (tokens.position % 2 == 0).any():  # not on the second of two ranks
        return tokens.sequence_sum(tokens.logprobs)[tokens.sequence]
    return tokens.logprobs


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (of_the_microbatch, r"the loss of a token is .* in micro-batches .* it must depend on its own sequence only"),
        (of_the_rank, r"over 2 context-parallel ranks: .* sum over a sequence by tokens.sequence_sum"),
        (of_a_constant, r"the gradient of a token is"),
    ],
)
def test_losses_of_more_than_their_sequence_are_found(loss: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_layouts(loss)


def test_a_loss_without_a_gradient_at_ratio_1_is_found() -> None:
    """Where all tokens are in the first update of a step."""
    with pytest.raises(ValueError, match="the gradient of a token is nan: it must be finite for every advantage, also for 0"):
        check_layouts(lambda tokens: (((tokens.ratio - 1) ** 2).sqrt() * tokens.advantages, {}))


def test_a_loss_that_divides_by_the_advantage_is_found() -> None:
    """It is 0 where a turn has none to be compared with."""
    with pytest.raises(ValueError, match=r"the loss of a token is (nan|inf|-inf): it must be finite"):
        check_layouts(lambda tokens: (-tokens.ratio / tokens.advantages, {}))


def test_ranks_that_sum_unequally_often_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rstar2_megatron.algorithm.layout_check._PATIENCE_S", 0.5)
    with pytest.raises(ValueError, match="sequence_sum is called on one context-parallel rank and not on another"):
        check_layouts(sometimes)


def test_an_own_loss_is_loaded_with_the_names_of_its_values(tmp_path: Path) -> None:
    loss, names = load_policy_loss(algorithm(policy_loss=own(tmp_path, SEQUENCE_RATIO)))
    assert names == ["loss/sequence_ratio"]
    check_layouts(loss)
    _, names = load_policy_loss(algorithm())
    assert names == ["clipped", "dual_clipped"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return tokens.ratio.mean()", r"returned the shape \(\); return a tensor \[n\] of shape \(17,\), one loss a token"),
        ("return 1.0", r"returned a float; return a tensor \[n\]"),
        ("return -tokens.advantages", r"returned losses without a gradient; compute them from tokens.logprobs or tokens.ratio"),
        ("return tokens.logprobs * float('nan')", r"returned nan for a token of logprobs -\d.*, old_logprobs .*, advantages 1"),
        ("return tokens.ratio, {'a': tokens.ratio[1:]}", r"returned 'a', the shape \(16,\); return a tensor"),
        ("return tokens.ratio, [1]", r"returned \[1\] as second value; return a dict of tensors \[n\] by name"),
        ("return tokens.ratio, {1: tokens.ratio}", r"returned \{1: .* as second value; return a dict of tensors \[n\] by name"),
        ("tokens.old_logprobs.sub_(1)\n    return -tokens.ratio", r"changed tokens.old_logprobs in place, .* a new tensor"),
        ("return -tokens.ratio * (100 * tokens.ratio).exp()", r"returned -inf for a token of logprobs"),
        (
            "out = tokens.ratio.double()\n    m = tokens.ratio > 0\n    out[m] = tokens.ratio[m]\n    return out",
            r"failed: .*own.py:4, in f: RuntimeError: Index put",
        ),
        ("raise SystemExit(3)", r"failed: .*own.py:2, in f: SystemExit: 3"),
        ("return tokens.nothing", r"failed: .*own.py:2, in f: AttributeError: 'Tokens' object has no attribute 'nothing'"),
    ],
)
def test_wrong_results_are_one_sentence(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UserCodeError, match=r"algorithm.policy_loss=own.py:f " + said) as refused:
        load_policy_loss(algorithm(policy_loss=own(tmp_path, f"def f(tokens):\n    {body}\n")))
    assert "\n" not in str(refused.value)


def test_a_value_may_be_called_as_one_of_ours(tmp_path: Path) -> None:
    """Metrics of the loss, and the number of tokens by which all means are divided, stay what they are."""
    text = "def f(tokens):\n    return -tokens.ratio, {name: 0 * tokens.ratio + 5 for name in ('tokens', 'ratio', 'clipped')}"
    loss, names = load_policy_loss(algorithm(policy_loss=own(tmp_path, text)))
    logprobs = torch.zeros(3, requires_grad=True)
    plain, whole = logprobs.detach(), torch.zeros(3, dtype=torch.long)
    tokens = Tokens(logprobs, plain, plain, plain, plain, whole, whole, 1, algorithm())
    _, sums = policy_loss(tokens, loss, denominator=1.0)
    assert names == ["clipped", "loss/ratio", "loss/tokens"]
    assert {name: float(sums[name]) for name in ("tokens", "ratio", *names)} == {
        "tokens": 3, "ratio": 3, "clipped": 15, "loss/ratio": 15, "loss/tokens": 15,
    }  # fmt: skip


def test_values_that_only_some_microbatches_have_are_refused(tmp_path: Path) -> None:
    text = "def f(tokens):\n    return -tokens.ratio, {'up': tokens.ratio} if (tokens.advantages > 0).any() else {}"
    loss, _ = load_policy_loss(algorithm(policy_loss=own(tmp_path, text)))
    with pytest.raises(UserCodeError, match=r"returned the values \[\], in another micro-batch \['up'\]; return all of them"):
        check_layouts(loss)


def test_a_rank_without_tokens_may_leave_values_out(tmp_path: Path) -> None:
    text = "def f(tokens):\n    return (-tokens.ratio, {'up': tokens.ratio}) if len(tokens.ratio) else tokens.ratio"
    loss, names = load_policy_loss(algorithm(policy_loss=own(tmp_path, text)))
    check_layouts(loss)
    assert names == ["loss/up"]


def test_a_loss_of_another_precision_passes() -> None:
    """The tensors are float32, as torch's own are, so that those of a loss fit."""

    def with_tensors_of_its_own(tokens: Tokens) -> torch.Tensor:
        losses, chosen = torch.zeros(len(tokens.ratio)), tokens.advantages > 0
        losses[chosen] = -tokens.ratio[chosen]
        return losses

    check_layouts(with_tensors_of_its_own)
    check_layouts(lambda tokens: (-tokens.ratio.detach() * tokens.advantages * tokens.logprobs).float().double())
    check_layouts(lambda tokens: (-tokens.ratio * tokens.advantages).float())


def test_a_loss_that_goes_backward_itself_is_told() -> None:
    def backward(tokens: Tokens) -> torch.Tensor:
        loss = -tokens.ratio * tokens.advantages
        loss.sum().backward()
        return loss

    with pytest.raises(ValueError, match="its gradient cannot be computed: Trying to backward through the graph a second time"):
        check_layouts(backward)


def test_a_rank_without_tokens_has_a_loss_with_a_gradient() -> None:
    """Expert parallelism gives a rank micro-batches without a sequence."""
    empty, whole = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.long)
    plain = empty.detach()
    losses, _ = sequence_ratio(Tokens(empty, plain, plain, plain, plain, whole, whole, 0, algorithm()))
    losses.sum().backward()
    assert losses.shape == (0,) and empty.grad is not None
