"""Public benchmarks as jsonl for `python -m rstar2_megatron.evaluation`.

    python data_process/process_eval_dataset.py [--benchmarks aime24 aime25 hmmt25 math500 gpqa-diamond] [--out data/eval]

Loads from the Hugging Face hub; GPQA needs its terms accepted there and a login. --source takes one benchmark from a local
copy instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rstar2_megatron.data.rows import DataError
from rstar2_megatron.evaluation.benchmarks import BENCHMARKS, load
from rstar2_megatron.records.whole_file import write_jsonl


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", nargs="+", default=list(BENCHMARKS), choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("data/eval"))
    parser.add_argument("--source", type=Path, help="a local copy: directory, jsonl, csv or parquet; with one benchmark")
    parser.add_argument("--seed", type=int, default=0, help="order of GPQA's choices")
    arguments = parser.parse_args()
    if arguments.source and len(arguments.benchmarks) != 1:
        parser.error("--source holds one benchmark; name it with --benchmarks")
    failed = 0
    for name in arguments.benchmarks:
        try:
            rows = load(name, arguments.source, arguments.seed)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            failed += 1
            continue
        path = arguments.out / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"{path}: {write_jsonl(path, rows)} problems")
    return 2 if failed == len(arguments.benchmarks) else 1 if failed else 0  # docs/inputs.md


if __name__ == "__main__":
    sys.exit(main())
