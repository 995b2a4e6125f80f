"""One run from configuration to table: services, cold start, evaluation, training, report, clean-up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rstar2_megatron.settings.checks import check_before_start
from rstar2_megatron.settings.load import ConfigError
from rstar2_megatron.settings.plan import make_plan
from rstar2_megatron.settings.schema import Settings

logger = logging.getLogger(__name__)


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived; BaseException so that no handler of errors swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def execute(settings: Settings, config: DictConfig, *, dry_run: bool) -> int:
    """Run the program for a loaded configuration; returns the exit code. Raises ConfigError for bad input."""
    settings = _with_built_recipe(settings, config)
    check_before_start(settings)
    plan = make_plan(settings)
    print(plan.render(), flush=True)
    if not plan.fits:
        raise ConfigError("the plan does not fit; see the remedies above")
    if dry_run:
        return 0
    with _signals_raise():
        try:
            run = Run(settings, config)
            try:
                run.train()
            finally:
                run.close()
        except Stopped as stopped:
            print(f"stopped by {stopped}; everything this run started has been ended", file=sys.stderr)
            return stopped.exit_code
        except ConfigError:
            raise
        except (ValueError, RuntimeError) as e:
            print(f"error: {e}", file=sys.stderr)
            logger.debug("failed", exc_info=True)
            return 1
    return 0
