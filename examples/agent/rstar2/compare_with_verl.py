"""verl beside this project: `bash compare_with_verl.sh NAME [key=value ...]` runs both and draws the comparison.

With `--export DIR` only verl's command and files are written, for a run of verl on its own GPUs.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.verl.beside import ARMS, Beside
from benchmarks.verl.export import export
from rstar2_megatron.settings.load import CONFIG_DIR, load_settings, users_path
from rstar2_megatron.tiny.resolve import resolve_tiny

VERL_PYTHON = CONFIG_DIR.parent / ".venv-verl" / "bin" / "python"


def main() -> int:
    """Returns 0, 1 when a run or the drawing failed, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="compare_with_verl.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="NAME", help="as for run_rstar2.sh")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write verl's side to DIR and run nothing")
    parser.add_argument("--arms", nargs="+", default=["verl", "grpo", "roc-paper"], metavar="ARM", help=f"of {', '.join(ARMS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: results/NAME.beside-verl")
    arguments = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way is ended as well
    try:
        if arguments.export is None:
            out = users_path(arguments.out or Path("results") / f"{Path(arguments.config).stem}.beside-verl")
            words = arguments.config, arguments.overrides, arguments.arms, arguments.seeds
            return Beside(*words, out.resolve(), VERL_PYTHON).run()
        settings = resolve_tiny(load_settings(arguments.config, arguments.overrides))
        found = export(settings, users_path(arguments.export))
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote verl's side to {arguments.export}; start it by: bash {arguments.export}/run_verl.sh\n")
    print("without counterpart:\n- " + "\n- ".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
