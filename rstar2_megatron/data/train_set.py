"""Converts public mathematics sets to problems for reinforcement learning.

    python data_process/process_train_dataset.py --out data/train --source dapo \\
        --source openmathreasoning=/data/OpenMathReasoning/data --source project-euler=/data/euler.jsonl \\
        --decontaminate /data/aime24.jsonl /data/math500.jsonl --validation 512

Writes train.jsonl and validation.jsonl with `prompt`, `solutions`, `query_id`, `task`, and report.json: rows in, rows
out, and why the others were dropped. A source is NAME for the hub, or NAME=PATH for jsonl, json or parquet files (a file, a
directory, a glob). After a kill the same command continues the pass.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rstar2_megatron.data.cleaning import CONTRADICTION, fingerprint, integer_answer, strip_wrappers, words
from rstar2_megatron.data.command_line import data_parser, run_command
from rstar2_megatron.data.decontaminate import NGramIndex
from rstar2_megatron.data.math_sources import SOURCES, problem_text
from rstar2_megatron.data.problems import problem_of
from rstar2_megatron.data.resumable import ResumablePass
from rstar2_megatron.data.rows import BESIDE, DataError, Input, Row, Unusable, file_rows, find_files, inputs_of

DEFAULT_MAX_DIGITS = 18
CONFIGS = ("all", "en", "cn")  # of DAPO on the hub
SPLITS = ("cot", "tir", "genselect", "additional_problems")  # of OpenMathReasoning
_SHOWN_NGRAMS = 20


@dataclass(frozen=True, slots=True)
class Options:
    """Options that decide the result, apart from the inputs."""

    ngram: int = 8
    boilerplate: int = 0
    max_answer_digits: int = DEFAULT_MAX_DIGITS
    validation: int = 0
    seed: int = 0
    limit: int | None = None
    """Rows read of each input; None reads all."""


def parse_source(word: str, config: str | None = None, split: str | None = None) -> list[Input]:
    """Inputs of NAME or NAME=PATH. Raises DataError for an unknown shape, configuration, split or path."""
    inputs = inputs_of(word, SOURCES)
    for source, key, known, value in (("dapo", "config", CONFIGS, config), ("openmathreasoning", "split", SPLITS, split)):
        hub = inputs[0].hub if word == source else None
        if hub is not None and value is not None:
            if value not in known:
                raise DataError(f"--{key} of {hub.repo} is one of {', '.join(known)}, not {value!r}")
            inputs = [Input(source, hub=replace(hub, **{key: value}))]
    return inputs


class Cleaner:
    """Accepts or drops problems one by one; remembers accepted problems to find duplicates."""

    def __init__(self, options: Options, contamination: NGramIndex, state: ResumablePass) -> None:
        self.options, self.contamination = options, contamination
        self.ngrams: dict[str, int] = state.counters.setdefault("ngrams", {})
        """How many problems each n-gram of an evaluation problem dropped."""
        self.conflicting = state.counters["conflicting"] = dict.fromkeys(state.counters.get("conflicting", ()))
        """Fingerprints of problems that were published with different answers."""
        self.answers = {fingerprint_of(row): row["solutions"][0] for row in state.accepted()}
        """Answer of every accepted problem, by fingerprint."""

    def check(self, name: str, row: Row) -> dict[str, Any]:
        """The row to keep. Raises Unusable with the reason to drop it, DataError for a row of another shape."""
        published, answer = SOURCES[name].parse(row)
        text = strip_wrappers(published)
        tokens = words(text)
        if not tokens or not answer.strip():
            raise Unusable("no problem or no answer")
        if CONTRADICTION.search(text):
            raise Unusable("asks for another form of answer")
        integer = integer_answer(answer, self.options.max_answer_digits)
        if integer is None:
            raise Unusable("answer is no integer")
        key = fingerprint(words(text, operators=True))
        if key in self.answers:
            if self.answers[key] != integer:
                self.conflicting[key] = None
            raise Unusable("duplicate")
        shared = self.contamination.match(tokens)
        if shared is not None:
            self.ngrams[shared] = self.ngrams.get(shared, 0) + 1
            raise Unusable("contaminated")
        prompt = [{"role": "user", "content": text}]
        kept = {"prompt": prompt, "solutions": [integer], "query_id": f"{name}-{key}", "task": name}
        whole = kept | {name: row.values.get(name) for name in BESIDE}
        try:
            problem_of(whole, "not read in training", "prompt", "solutions", key)
        except DataError as error:
            raise Unusable(str(error)) from None
        self.answers[key] = integer
        return kept


def fingerprint_of(row: dict[str, Any]) -> str:
    """The fingerprint inside a row's query_id."""
    return str(row["query_id"]).rpartition("-")[2]


def evaluation_texts(patterns: Sequence[str]) -> Iterator[str]:
    """Texts of the evaluation problems that must not be trained on."""
    for pattern in patterns:
        for path in find_files(pattern):
            yield from (problem_text(row) for row in file_rows(path))


def process(inputs: Sequence[Input], out: Path, options: Options, *, decontaminate: Sequence[str] = ()) -> dict[str, Any]:
    """Run or continue the pass; returns the report, which is also written. Raises DataError."""
    index = NGramIndex(evaluation_texts(decontaminate), options.ngram, options.boilerplate)
    if decontaminate:
        print(f"decontamination: {index.num_problems} evaluation problems, {options.ngram}-grams")
    configuration = {
        "inputs": [[asdict(source), source.state] for source in inputs],
        "options": asdict(options),
        "decontaminate": {str(f): [f.stat().st_mtime_ns, f.stat().st_size] for p in decontaminate for f in find_files(p)},
    }
    with ResumablePass(out, configuration) as state:
        if state.resumed and state.source < len(inputs):
            print(f"continuing at row {state.row + 1} of {inputs[state.source].label}")
        cleaner = Cleaner(options, index, state)
        sources = state.counters.setdefault("sources", {})
        state.keep(inputs, SOURCES, options.limit, lambda source: sources.setdefault(source.label, {}), cleaner.check)
        return _write_results(state, cleaner, inputs, options, index)


def _write_results(
    state: ResumablePass, cleaner: Cleaner, inputs: Sequence[Input], options: Options, index: NGramIndex
) -> dict[str, Any]:
    sources = state.counters["sources"]
    keys = [key for key in cleaner.answers if key not in cleaner.conflicting]
    if not keys:
        firsts = [
            f"{count} as {counts['first_dropped'][why]}: {why}"
            for counts in sources.values()
            for why, count in counts.get("dropped", {}).items()
        ]
        raise DataError(
            f"no problem is left of {sum(c.get('in', 0) for c in sources.values())} rows; dropped: {'; '.join(firsts)}"
        )
    # The order is by hash, so a problem stays in the validation set when others are added.
    ordered = sorted(keys, key=lambda key: fingerprint([str(options.seed), key]))
    held_out = set(ordered[: options.validation])
    if len(held_out) >= len(keys):
        raise DataError(f"--validation {options.validation} takes all of the {len(keys)} problems; lower it")
    dropped = sum((Counter(counts.get("dropped", {})) for counts in sources.values()), Counter[str]())
    conflicts = sum(fingerprint_of(row) in cleaner.conflicting for row in state.accepted())
    report = {
        "rows_in": sum(counts.get("in", 0) for counts in sources.values()),
        "dropped": dict(dropped.most_common()) | {"published with different answers": conflicts},
        "sources": {
            label: {**counts, "shape": next(s.name for s in inputs if s.label == label)} for label, counts in sources.items()
        },
        "evaluation_problems": index.num_problems,
        "commonest_shared_ngrams": dict(Counter(state.counters["ngrams"]).most_common(_SHOWN_NGRAMS)),
        "options": asdict(options),
    }

    def rows(validation: bool) -> Iterator[dict[str, Any]]:
        for row in state.accepted():
            key = fingerprint_of(row)
            if key not in cleaner.conflicting and (key in held_out) is validation:
                yield row

    return state.write_results(rows(False), rows(True) if held_out else None, report)


def render_report(report: Mapping[str, Any]) -> str:
    """Rows in, rows out, why rows were dropped, and what they were not compared with, as aligned text."""
    lines = [f"{report['rows_in']:>10,} rows in"]
    lines += [f"{count:>10,} dropped: {why}" for why, count in report["dropped"].items() if count]
    lines += [f"{count:>10,} rows in {name}" for name, count in report["written"].items()]
    if not report["evaluation_problems"]:
        lines.append("not compared with any evaluation set: --decontaminate")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 2 for bad input, or 1 for what fails later."""
    parser = data_parser(__doc__, held_out="problems", seed_of="the split")
    parser.add_argument("--source", action="append", required=True, metavar="NAME[=PATH]", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--config", help="hub configuration of DAPO: en (default), cn, all")
    parser.add_argument("--split", help="hub split of OpenMathReasoning: cot (default), tir, additional_problems")
    parser.add_argument(
        "--decontaminate",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="evaluation sets to keep out of training",
    )
    parser.add_argument("--ngram", type=int, default=8, help="words in common that drop a problem (default 8)")
    parser.add_argument(
        "--boilerplate",
        type=int,
        default=0,
        help="n-grams of at least this many evaluation problems do not count; 0 (default, as in the paper): all count",
    )
    parser.add_argument("--max-answer-digits", type=int, default=DEFAULT_MAX_DIGITS, help=f"default {DEFAULT_MAX_DIGITS}")
    return run_command(parser.parse_args(argv), _make, render_report)


def _make(arguments: argparse.Namespace) -> dict[str, Any]:
    inputs = [i for word in arguments.source for i in parse_source(word, arguments.config, arguments.split)]
    for key, name in (("config", "dapo"), ("split", "openmathreasoning")):
        if getattr(arguments, key) is not None and name not in arguments.source:
            raise DataError(f"--{key} is of {name} on the hub; give --source {name} beside it, or leave it out")
    if arguments.boilerplate < 0 or arguments.boilerplate == 1:  # every n-gram would be one
        raise DataError(f"--boilerplate must be 0 or at least 2, got {arguments.boilerplate}")
    options = Options(**{field.name: getattr(arguments, field.name) for field in fields(Options)})
    return process(inputs, arguments.out, options, decontaminate=arguments.decontaminate)


if __name__ == "__main__":
    raise SystemExit(main())
