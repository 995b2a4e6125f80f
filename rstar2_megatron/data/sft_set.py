"""Converts public conversation sets to data for supervised fine-tuning, in the paper's proportions.

    python data_process/build_sft_dataset.py --out data/sft                       every source from the hub
    python data_process/build_sft_dataset.py --out data/sft --source toolace=/data/toolace.json --source ...

Writes train.jsonl and validation.jsonl with `messages` (JSON tool calls), `tools` and `source`, and report.json. The
mixture has 165 K function-calling and code, 30 K instruction and 27 K chat conversations (`--scale 0.1`: a tenth of
each; `--count glaive=2000`: another number). SFT trains assistant turns only.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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


@dataclass(slots=True)
class Selection:
    """The conversations of each source with the smallest sampling keys: a uniform sample of fixed size in one pass."""

    counts: Mapping[str, int]
    _heaps: dict[str, list[int]] = field(default_factory=dict)
    """The keys as negative numbers: the largest key is the first."""
    seen: set[int] = field(default_factory=set)
    """Sampling keys of all conversations of any source that `offer` has accepted."""

    def offer(self, source: str, key: int) -> bool:
        """True when the conversation is among the smallest so far."""
        heap = self._heaps.setdefault(source, [])
        if len(heap) < self.counts[source]:
            heapq.heappush(heap, -key)
            return True
        return bool(heap) and heapq.heappushpop(heap, -key) != -key

    def chosen(self) -> set[tuple[str, int]]:
        return {(source, -key) for source, heap in self._heaps.items() for key in heap}


def process(inputs: Sequence[Input], out: Path, options: Options) -> dict[str, Any]:
    """Run or continue the pass; returns the report, which is also written. Raises DataError."""
    configuration = {"inputs": [[asdict(source), source.state] for source in inputs], "options": asdict(options)}
    selection = Selection(options.counts)
    with ResumablePass(out, configuration) as state:
        for row in state.accepted():
            key = sampling_key(row, options.seed)
            selection.offer(row["source"], key)
            selection.seen.add(key)
        for source in inputs:
            state.counters.setdefault(source.name, {"in": 0, "usable": 0, "dropped": {}})

        def make(name: str, row: Row) -> dict[str, Any] | None:
            conversation = SFT_SOURCES[name].parse(row)
            if sum(map(len, _texts(conversation))) > options.max_chars:
                raise Unusable("too long")
            key = sampling_key(conversation, options.seed)
            if key in selection.seen:
                raise Unusable("duplicate")
            state.counters[name]["usable"] += 1
            if not selection.offer(name, key):
                return None
            selection.seen.add(key)
            return conversation

        state.keep(inputs, SFT_SOURCES, options.limit, lambda source: state.counters[source.name], make)
        return _write_results(state, selection, options)


def _texts(conversation: Mapping[str, Any]) -> Iterator[str]:
    for message in conversation["messages"]:
        yield message["content"]
        for call in message.get("tool_calls", []):
            yield json.dumps(call, ensure_ascii=False)
    for tool in conversation["tools"]:
        yield json.dumps(tool, ensure_ascii=False)


def _write_results(state: ResumablePass, selection: Selection, options: Options) -> dict[str, Any]:
    chosen = selection.chosen()
    if len(chosen) <= options.validation:
        raise DataError(
            f"{len(chosen)} conversations are left, --validation {options.validation} takes them all; dropped: "
            + "; ".join(f"{name}: {c['dropped']}, first {c.get('first_dropped', {})}" for name, c in state.counters.items())
        )
    # The order mixes sources and depends on the seed only; the first conversations are held out.
    order = sorted(chosen, key=lambda item: item[1])
    held_out = set(order[: options.validation])
    rows = {key: row for row in state.accepted() if (key := (row["source"], sampling_key(row, options.seed))) in chosen}
    taken = Counter(source for source, _ in chosen)
    report = {
        "rows_in": sum(counts["in"] for counts in state.counters.values()),
        "sources": {
            name: {**counts, "wanted": options.counts[name], "taken": taken[name]} for name, counts in state.counters.items()
        },
        "options": asdict(options),
    }
    train = (rows[key] for key in order if key not in held_out)
    validation = (rows[key] for key in order if key in held_out) if held_out else None
    return state.write_results(train, validation, report)


def render_report(report: Mapping[str, Any]) -> str:
    lines = [f"{'source':<12}{'rows in':>12}{'usable':>12}{'wanted':>12}{'taken':>12}  dropped"]
    for name, counts in report["sources"].items():
        dropped = ", ".join(f"{count:,} {why}" for why, count in sorted(counts["dropped"].items()))
        lines.append(
            f"{name:<12}{counts['in']:>12,}{counts['usable']:>12,}{counts['wanted']:>12,}{counts['taken']:>12,}  {dropped}"
        )
    return "\n".join(lines)


def _parse_counts(words: Sequence[str], scale: float) -> dict[str, int]:
    if not scale > 0:
        raise DataError(f"--scale {scale:g}: give a number above 0")
    counts = {name: max(1, round(source.count * scale)) for name, source in SFT_SOURCES.items()}
    for word in words:
        name, _, number = word.partition("=")
        if name not in counts or not number.isdecimal():
            raise DataError(f"--count {word}: write SOURCE=NUMBER with a source of {', '.join(counts)}")
        counts[name] = int(number)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for bad input."""
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
