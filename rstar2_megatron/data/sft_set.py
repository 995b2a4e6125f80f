"""Converts public conversation sets to data for supervised fine-tuning, in the paper's proportions.

    python data_process/build_sft_dataset.py --out data/sft                       every source from the hub
    python data_process/build_sft_dataset.py --out data/sft --source toolace=/data/toolace.json --source ...

Writes train.jsonl and validation.jsonl with `messages` (JSON tool calls), `tools` and `source`, and report.json. The
mixture has 165 K function-calling and code, 30 K instruction and 27 K chat conversations (`--scale 0.1`: a tenth of
each; `--count glaive=2000`: another number). Until the end all usable conversations lie in --out: a few GB of whole sets.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rstar2_megatron.data.command_line import data_parser, run_command
from rstar2_megatron.data.resumable import ResumablePass
from rstar2_megatron.data.rows import DataError, Input, Row, Unusable, inputs_of
from rstar2_megatron.data.sft_sources import SFT_SOURCES


@dataclass(frozen=True, slots=True)
class Options:
    """Options that decide the result, apart from the inputs."""

    counts: Mapping[str, int]
    """Conversations wanted of each source."""
    validation: int = 0
    max_chars: int = 32_000
    seed: int = 0
    limit: int | None = None


def sampling_key(conversation: Mapping[str, Any], seed: int) -> int:
    """Sort key of a conversation in the sampling order: a hash of the user messages."""
    said = [m["content"] for m in conversation["messages"] if m["role"] == "user"]
    return int.from_bytes(hashlib.blake2b(json.dumps([seed, said]).encode(), digest_size=12).digest())


def process(inputs: Sequence[Input], out: Path, options: Options) -> dict[str, Any]:
    """Run or continue the pass; returns the report, which is also written. Raises DataError."""
    configuration = {"inputs": [[asdict(source), source.state] for source in inputs], "options": asdict(options)}
    with ResumablePass(out, configuration) as state:
        keys = {sampling_key(row, options.seed): row["source"] for row in state.accepted()}
        for source in inputs:
            state.counters.setdefault(source.name, {"in": 0, "usable": 0, "dropped": {}})

        def make(name: str, row: Row) -> dict[str, Any]:
            conversation = SFT_SOURCES[name].parse(row)
            if sum(map(len, _texts(conversation))) > options.max_chars:
                raise Unusable("too long")
            key = sampling_key(conversation, options.seed)
            if key in keys:
                raise Unusable("duplicate")
            keys[key] = name
            state.counters[name]["usable"] += 1
            return conversation

        state.keep(inputs, SFT_SOURCES, options.limit, lambda source: state.counters[source.name], make)
        return _write_results(state, keys, options)


def _texts(conversation: Mapping[str, Any]) -> Iterator[str]:
    for message in conversation["messages"]:
        yield message["content"]
        for call in message.get("tool_calls", []):
            yield json.dumps(call, ensure_ascii=False)
    for tool in conversation["tools"]:
        yield json.dumps(tool, ensure_ascii=False)


def _write_results(state: ResumablePass, keys: Mapping[int, str], options: Options) -> dict[str, Any]:
    """Of each source those with the smallest sampling keys: a uniform sample, which does not depend on the order of rows."""
    of_source = {name: [key for key, source in keys.items() if source == name] for name in state.counters}
    chosen = sorted(key for name in of_source for key in heapq.nsmallest(options.counts[name], of_source[name]))
    if len(chosen) <= options.validation:
        raise DataError(
            f"{len(chosen)} conversations are left, --validation {options.validation} takes them all; dropped: "
            + "; ".join(f"{name}: {c['dropped']}, first {c.get('first_dropped', {})}" for name, c in state.counters.items())
        )
    # The order mixes sources and depends on the seed only; the first conversations are held out.
    wanted = set(chosen)
    rows = {key: row for row in state.accepted() if (key := sampling_key(row, options.seed)) in wanted}
    taken = Counter(keys[key] for key in chosen)
    report = {
        "rows_in": sum(counts["in"] for counts in state.counters.values()),
        "sources": {
            name: {**counts, "wanted": options.counts[name], "taken": taken[name]} for name, counts in state.counters.items()
        },
        "options": asdict(options),
    }
    validation = [rows[key] for key in chosen[: options.validation]]
    return state.write_results((rows[key] for key in chosen[options.validation :]), validation or None, report)


def render_report(report: Mapping[str, Any]) -> str:
    lines = [f"{'source':<12}{'rows in':>12}{'usable':>12}{'wanted':>12}{'taken':>12}  dropped"]
    for name, counts in report["sources"].items():
        dropped = ", ".join(f"{count:,} {why}" for why, count in sorted(counts["dropped"].items()))
        lines.append(
            f"{name:<12}{counts['in']:>12,}{counts['usable']:>12,}{counts['wanted']:>12,}{counts['taken']:>12,}  {dropped}"
        )
    return "\n".join(lines)


def _parse_counts(words: Sequence[str], scale: float) -> dict[str, int]:
    if not 0 < scale < float("inf"):
        raise DataError(f"--scale {scale:g}: give a number above 0")
    counts = {name: max(1, round(source.count * scale)) for name, source in SFT_SOURCES.items()}
    for word in words:
        name, _, number = word.partition("=")
        if name not in counts or not number.isdecimal():
            raise DataError(f"--count {word}: write SOURCE=NUMBER with a source of {', '.join(counts)}")
        counts[name] = int(number)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 2 for bad input, or 1 for what fails later."""
    parser = data_parser(__doc__, held_out="conversations", seed_of="the choice and the order")
    parser.add_argument(
        "--source", action="append", metavar="NAME[=PATH]", help=f"of {', '.join(SFT_SOURCES)}; default all, from the hub"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="share of the paper's numbers (default 1)")
    parser.add_argument("--count", nargs="+", action="extend", default=[], metavar="NAME=N", help="another number for a source")
    parser.add_argument("--max-chars", type=int, default=32_000, help="longer conversations are left out")
    return run_command(parser.parse_args(argv), _make, render_report)


def _make(arguments: argparse.Namespace) -> dict[str, Any]:
    inputs = [i for word in arguments.source or list(SFT_SOURCES) for i in inputs_of(word, SFT_SOURCES)]
    counts = _parse_counts(arguments.count, arguments.scale)
    options = Options(counts, arguments.validation, arguments.max_chars, arguments.seed, arguments.limit)
    return process(inputs, arguments.out, options)


if __name__ == "__main__":
    raise SystemExit(main())
