"""An engine compiles its kernels before it serves: at their first use, in the time of the start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rstar2_megatron.rollout.engine.child import EngineChild
from rstar2_megatron.rollout.engine.client import EngineClient
from rstar2_megatron.rollout.engine.protocol import EngineReport
from tests.rollout.engine.test_engine import PROMPT, settings_for

pytestmark = pytest.mark.timeout(400)


async def test_an_engine_has_generated_before_its_first_report_and_kept_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, reports = tmp_path / "engine.log", list[tuple[EngineReport, bool]]()
    take = EngineChild._take_report

    def taken(child: EngineChild, report: EngineReport) -> None:
        is_warm = re.search(r"^warm-up: 3 requests in [\d.]+ s$", log.read_text(), re.MULTILINE) is not None
        reports.append((report, is_warm))
        take(child, report)

    monkeypatch.setattr(EngineChild, "_take_report", taken)
    engine = EngineClient(settings_for(tiny_model), name="warm engine", log_path=log)
    try:
        await engine.start()
        first, is_warm = reports[0]
        assert is_warm and first.used_tokens == 0 and first.generated == {}
        answers = [await engine.generate([0, 0, *PROMPT], {"max_new_tokens": 4}, timeout_s=60) for _ in range(2)]
        assert answers[0].cached_tokens == 0 < answers[1].cached_tokens
    finally:
        await engine.close()
