"""Writes verl's side of a configuration of this project: `bash compare_with_verl.sh NAME [key=value ...] --export DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rstar2_megatron.report.verl_export import export
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.tiny.resolve import resolve_tiny


def main() -> int:
    """Returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", metavar="NAME", help="as for run_rstar2.sh")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--export", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_intermixed_args()
    try:
        settings = resolve_tiny(load_settings(arguments.config, arguments.overrides))
        found = export(settings, arguments.export)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote verl's side to {arguments.export}; start it by: bash {arguments.export}/run_verl.sh\n")
    print("without counterpart:\n- " + "\n- ".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
