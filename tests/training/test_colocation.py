"""Who holds the memory when, for the calls of a whole run. The groups only record: the real ones run in tests/e2e."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rstar2_megatron.settings.schema import ActorSettings
from rstar2_megatron.training.colocation import Colocation


class Recorder:
    """A worker group that notes its calls in one list shared with the other."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls
        self.before: Callable[[str], None] | None = None

    def call(self, method: str, *args: Any, timeout_s: float, ranks: list[int] | None = None) -> None:
        if self.before is not None:
            self.before(method)
        name = self.name if ranks is None else f"{self.name} {ranks}"
        self.calls.append(" ".join([name, method, *(str(a) for a in args)]))


@pytest.fixture
def run() -> tuple[Colocation, Recorder, Recorder, list[str]]:
    calls: list[str] = []
    actor, rollout = Recorder("actor", calls), Recorder("engines", calls)

    def sync() -> None:
        colocation.wake_for_sync()
        rollout.call("receive_weights", timeout_s=1)
        actor.call("send_weights", timeout_s=1)
        colocation.weights_synced()

    colocation: Colocation = Colocation(actor, rollout, sync, 1.0)  # type: ignore[arg-type]
    colocation.sync = sync  # type: ignore[attr-defined]
    return colocation, actor, rollout, calls


def test_a_step_moves_the_memory_in_order(run: Any) -> None:
    colocation, actor, rollout, calls = run
    rollout.call("generate", timeout_s=1)
    assert calls == ["engines generate"]  # they start with the memory
    calls.clear()
    actor.call("compute_logprobs", timeout_s=1)
    actor.call("train_step", timeout_s=1)
    colocation.sync()
    rollout.call("generate", timeout_s=1)
    assert calls == [
        "engines release_memory",
        "actor reload",
        "actor compute_logprobs",
        "actor train_step",
        "actor offload True",
        "engines resume_memory ['weights']",
        "engines receive_weights",
        "actor send_weights",
        "actor offload",
        "engines resume_memory ['kv_cache']",
        "engines generate",
    ]


def test_engines_never_generate_from_forgotten_weights(run: Any) -> None:
    """A checkpoint after the sync takes the engines' memory, so their weights must be sent again."""
    colocation, actor, rollout, calls = run
    actor.call("train_step", timeout_s=1)
    colocation.sync()
    actor.call("weights_checksum", timeout_s=1)  # its weights are still there
    calls.clear()
    actor.call("save_checkpoint", timeout_s=1)
    actor.call("finish_checkpoint", timeout_s=1)
    assert calls == ["engines release_memory", "actor reload", "actor save_checkpoint", "actor finish_checkpoint"]
    calls.clear()
    rollout.call("generate", timeout_s=1)
    assert calls.index("engines receive_weights") < calls.index("engines generate")
    assert calls[-3:] == ["actor offload", "engines resume_memory ['kv_cache']", "engines generate"]


def test_an_engine_that_starts_again_finds_the_memory_free_and_sleeps_with_the_others(run: Any) -> None:
    colocation, actor, _, calls = run
    actor.call("train_step", timeout_s=1)
    calls.clear()
    colocation.clear()
    calls.append("engine 1 starts")
    colocation.join([1])
    colocation.sync()
    assert calls == [
        "actor offload",
        "engine 1 starts",
        "engines [1] release_memory",
        "engines release_memory",  # to reload the actor; nothing is left to release
        "actor reload",
        "actor offload True",
        "engines resume_memory ['weights']",
        "engines receive_weights",
        "actor send_weights",
    ]


def test_any_offloaded_part_lets_actor_and_engines_take_turns() -> None:
    assert not ActorSettings().offloads
    parts = ("offload_weight", "offload_grad", "offload_optimizer")
    assert all(ActorSettings.model_validate({part: True}).offloads for part in parts)
