"""Actor and engines on the same accelerators: one sleeps while the other works.

What each of them holds in accelerator memory:

    rollout            engines: weights, KV cache       actor: nothing
    training           engines: nothing                 actor: weights, gradients, optimizer
    weight sync        engines: weights                 actor: weights
    rollout            engines: weights, KV cache       actor: nothing

A call of either worker group wakes what it needs first (`before` of the group), so a caller cannot forget to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rstar2_megatron.cluster.calls import WorkerGroup

_ACTOR_ANYWHERE = frozenset(
    {
        "place",
        "rendezvous_address",
        "initialize",
        "offload",
        "reload",
        "forget_weights",
        "finish_checkpoint",
        "shutdown",
        "trace_clock",
        "begin_trace",
        "end_trace",
        "begin_profile",
        "end_profile",
    }
)
_ACTOR_WEIGHTS = frozenset({"send_weights", "weights_checksum", "export_hf"})
_ENGINE_WEIGHTS = frozenset({"receive_weights", "weights_checksum"})


class Colocation:
    """Puts an actor group and a rollout group, both already started, to sleep and wakes them.

    `resync` sends the actor's weights to the engines again, because an engine loses its weights when it sleeps.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, resync: Callable[[], object], timeout_s: float) -> None:
        self._actor, self._rollout = actor, rollout
        self._resync, self._timeout_s = resync, timeout_s
        self._actor_holds: Literal["all", "weights", "nothing"] = "nothing"  # offloaded before engines start
        self._released: set[str] = set()  # of the engines' memory
        self._weights_current = True
        self._seconds = 0.0
        actor.before = self._before_actor
        rollout.before = self._before_rollout

    def wake_actor(self) -> None:
        """Wake the actor with all its state, after the engines have released theirs."""
        if self._actor_holds == "all":
            return
        with self._timed():
            self._rollout.call("release_memory", timeout_s=self._timeout_s)
            self._released = {"weights", "kv_cache"}
            self._weights_current = False
            self._actor.call("reload", timeout_s=self._timeout_s)
        self._actor_holds = "all"

    def wake_for_sync(self) -> None:
        """Wake the weights of actor and engines, and nothing else."""
        if self._actor_holds == "nothing":
            self.wake_actor()
        if self._actor_holds == "all":
            with self._timed():
                self._actor.call("offload", True, timeout_s=self._timeout_s)
            self._actor_holds = "weights"
        self._resume("weights")

    def clear(self) -> None:
        """Leave the accelerators to an engine that starts: it sizes its KV cache by the memory that it finds free."""
        self.wake_actor()  # which puts the engines to sleep
        with self._timed():
            self._actor.call("offload", timeout_s=self._timeout_s)
        self._actor_holds = "nothing"

    def join(self, engines: list[int]) -> None:
        """Put newly started engines to sleep, as the others are."""
        self._rollout.call("release_memory", ranks=engines, timeout_s=self._timeout_s)

    def weights_synced(self) -> None:
        """Note that the engines have the actor's weights."""
        self._weights_current = True

    def wake_engines(self) -> None:
        """Wake the engines with current weights and a KV cache, after the actor has moved to host memory."""
        if not self._weights_current:
            self.wake_for_sync()
            self._resync()
        if self._actor_holds != "nothing":
            with self._timed():
                self._actor.call("offload", timeout_s=self._timeout_s)
            self._actor_holds = "nothing"
        self._resume("weights")
        self._resume("kv_cache")

    def pop_seconds(self) -> float:
        """Seconds spent on sleeping and waking since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _resume(self, tag: str) -> None:
        if tag in self._released:
            with self._timed():
                self._rollout.call("resume_memory", [tag], timeout_s=self._timeout_s)
            self._released.discard(tag)

    def _before_actor(self, method: str) -> None:
        if method in _ACTOR_ANYWHERE or (method in _ACTOR_WEIGHTS and self._actor_holds == "weights"):
            return
        self.wake_actor()

    def _before_rollout(self, method: str) -> None:
        if method == "generate":
            self.wake_engines()
        elif method in _ENGINE_WEIGHTS:
            self._resume("weights")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started
