"""Torch profiles of chosen steps (`runner.profiler`), of every actor rank and every engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rstar2_megatron.cluster.calls import WorkerGroup
from rstar2_megatron.settings.schema import ProfilerSettings

_START_TIMEOUT_S = 120.0
_WRITE_TIMEOUT_S = 900.0  # the profile of a long step has gigabytes of events


class StepProfiles:
    """Files: `{output_dir}/step_N/actor_rank_R.json.gz`, and `engine_R-...trace.json.gz` as SGLang names them."""

    def __init__(
        self, run: Path, settings: ProfilerSettings, actor: WorkerGroup, rollout: WorkerGroup
    ) -> None:
        self._settings, self._groups = settings, (actor, rollout)
        self._directory = Path(settings.output_dir or run / "profiles").resolve()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around training step `number`."""
        if number not in self._settings.steps:
            yield
            return
        directory = str(self._directory / f"step_{number}")
        for group in self._groups:
            group.call("begin_profile", directory, timeout_s=_START_TIMEOUT_S)
        yield
        for group in self._groups:
            group.call("end_profile", directory, timeout_s=_WRITE_TIMEOUT_S)
