"""A rollout phase that ends before anything else is done, with played engines."""

from __future__ import annotations

from typing import Any

from rstar2_megatron.cluster.phases.coordinator import RolloutCoordinator
from rstar2_megatron.rollout.spec import RolloutSpec
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.settings.schema import SamplingParams
from rstar2_megatron.trajectory import Problem
from tests.cluster.played_engines import PlayedEngines, driver_channel


class LastMoment(PlayedEngines):
    """The worker of engine 0 dies when the last trajectory has ended; another call than the phase's finds it dead."""

    left = 0

    def poll(self, timeout_s: float) -> Any:
        message = super().poll(timeout_s)
        self.left -= isinstance(message, bytes)
        if not self.left and not self.lost:
            self.kill(0)
            self.lose(0, "it died")
        return message


def test_what_a_worker_held_that_dies_in_a_phases_last_second_is_rolled_out_again() -> None:
    settings = load_settings("rstar2-tiny-cpu", [])
    engines = LastMoment(shuffled=False)
    engines.hold, engines.left = True, 4 * 3
    coordinator = RolloutCoordinator(driver_channel(engines), settings)
    spec = RolloutSpec(3, SamplingParams(max_new_tokens=96), max_assistant_turns=1)
    done = coordinator.run([Problem(str(n), [], []) for n in range(4)], spec, "rollout")
    every = [t for group in done.groups for t in group.trajectories]
    assert len(every) == 4 * 3 and all(t.usable for t in every)
    assert {t.held.worker for t in every if t.held} == {1}
    assert done.stats["workers_lost"] == 1.0 and engines.left < 0, "nothing was rolled out again"
