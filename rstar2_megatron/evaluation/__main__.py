"""avg@k, pass@k and majority@k of a model, through the agent loop, judge and grader of training.

    python -m rstar2_megatron.evaluation --model DIR --data FILE [FILE ...] [-k 16] [--out DIR] [key=value ...]

DIR is a Hugging Face directory, a checkpoint (RUN/checkpoints/global_step_N) or a run. By default the sampling is
the paper's: temperature 0.6, at most 30 turns and 30K response tokens, 16 attempts. The configuration gives the conversation
format, engine and judge that the model was trained with: it is that of the run which contains DIR, else --config, else
config/base.yaml with the format that is saved beside the model (rstar2_format.json); key=value changes it as in training.
After a stop the same command continues.

Writes to --out: trajectories.jsonl (every attempt, whole), scores.json, scores.txt. Show them with
`python -m rstar2_megatron.report.trajectories OUT`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rstar2_megatron.evaluation.configure import (
    MAX_TOKENS,
    check_model,
    configure,
    default_out,
    exit_code,
    parse_words,
    read_benchmarks,
    sampling_parser,
)
from rstar2_megatron.evaluation.samples import count_late, late_note
from rstar2_megatron.evaluation.scores import Scores, score, score_by
from rstar2_megatron.records.text_table import aligned
from rstar2_megatron.records.whole_file import write_json, write_text
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.trajectory import Problem

# `sampling` loads torch, which takes seconds; --help and bad input are answered without it.
if TYPE_CHECKING:
    from rstar2_megatron.evaluation.services import SamplingSettings

# The paper's protocol (arXiv 2508.20722, section 5): 16 samples, temperature 0.6, T = 30, at most 30K tokens.
SAMPLES = 16
TEMPERATURE = 0.6
MAX_TURNS = 30


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = sampling_parser("python -m rstar2_megatron.evaluation", __doc__, "RUN/evaluation/NAME, or evaluations/NAME here")
    parser.add_argument("-k", "--samples", type=int, default=SAMPLES, help=f"attempts per problem ({SAMPLES})")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE, help=f"({TEMPERATURE})")
    parser.add_argument("--top-p", type=float, default=1.0, help="(1.0)")
    parser.add_argument("--max-turns", type=int, default=MAX_TURNS, help=f"assistant turns ({MAX_TURNS})")
    parser.add_argument(
        "--max-tokens", type=int, help=f"response tokens, tool responses included ({MAX_TOKENS}, or the model's context)"
    )
    arguments = parse_words(parser, argv, ("samples", "max_turns", "max_tokens", "problems", "engines"))
    if not 0 <= arguments.temperature < math.inf or not 0 < arguments.top_p <= 1:
        parser.error(f"--temperature {arguments.temperature} and --top-p {arguments.top_p}: give >= 0 and (0, 1]")
    for word in arguments.overrides:
        if word.startswith(("evaluation.", "algorithm.sampling_params.", "agentloop.max_assistant_turns")):
            parser.error(f"{word}: sampling is set by --samples, --temperature, --top-p, --max-turns and --max-tokens")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when something failed while running or attempts are missing; 2 for bad input; 130, 143 when stopped."""
    arguments = parse(argv)
    try:
        settings, sampling = configure(arguments)
        check_model(sampling)
        benchmarks = read_benchmarks(arguments.data, arguments.problems, settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out = arguments.out or default_out(arguments.model, "evaluation")
    return exit_code(lambda: run(benchmarks, sampling, out), out)


def run(benchmarks: Mapping[str, Sequence[Problem]], sampling: SamplingSettings, out: Path) -> int:
    """Sample the missing attempts, score all, write and print the scores."""
    from rstar2_megatron.evaluation.sampling import sample  # here, as in `configure`

    problems = [problem for members in benchmarks.values() for problem in members]
    part_of = {p.query_id: name for name, members in benchmarks.items() for p in members}
    k = sampling.spec.samples
    print(
        f"{len(problems)} problems x {k}, temperature {sampling.spec.sampling.temperature}, at most "
        f"{sampling.spec.max_assistant_turns} turns and {sampling.spec.sampling.max_new_tokens} response tokens; model "
        f"{sampling.rollout.model.model_path}",
        flush=True,
    )
    samples = sample(problems, sampling, out / "trajectories.jsonl", label=out.name)
    with GraderPool(1, sampling.reward.timeout_s) as grader:
        parts = score_by(samples, part_of, k, equal=grader.equal)
        if len(benchmarks) > 1 and parts:
            parts["all"] = score(samples, k, num_problems=len(problems), equal=grader.equal)
    text = render(parts)
    late = count_late(out / "trajectories.jsonl", part_of)
    text = "\n".join(filter(None, (text, late_note(late))))
    as_json: dict[str, Any] = {
        "settings": sampling.identity | {"samples": k},
        "late_tries": late,
        "scores": {name: dataclasses.asdict(scores) for name, scores in parts.items()},
    }
    write_json(out / "scores.json", as_json)
    write_text(out / "scores.txt", text + "\n")
    print(text)
    print(f"wrote {out / 'trajectories.jsonl'}, {out / 'scores.json'}, {out / 'scores.txt'}")
    missing = sum(scores.missing for name, scores in parts.items() if name != "all")
    if not parts or missing:
        print(
            f"warning: {missing or len(problems) * k} attempts were spoiled by the infrastructure and are left out; the same "
            f"command tries them again. The reasons are in {out / 'trajectories.jsonl'} and {out / 'logs'}",
            file=sys.stderr,
        )
    return 1 if missing or not parts else 0


def render(parts: Mapping[str, Scores]) -> str:
    """An aligned table, a column per benchmark. Per cent with 95 % intervals."""
    rows: list[tuple[str, list[str]]] = [("", list(parts))]

    def add(label: str, cell: Any) -> None:
        rows.append((label, [cell(scores) for scores in parts.values()]))

    k = max((scores.k for scores in parts.values()), default=1)
    add("problems x attempts", lambda s: f"{s.num_problems} x {s.k}")
    add(f"avg@{k}", lambda s: str(s.average))
    if any(not math.isclose(scores.reward, scores.average.value) for scores in parts.values()):
        add("mean reward", lambda s: f"{s.reward:.3f}")
    for j in sorted({j for scores in parts.values() for j in scores.pass_at if j > 1}):
        add(f"pass@{j}", lambda s, j=j: str(s.pass_at[j]) if j in s.pass_at else "-")
    if k > 1:
        add(f"majority@{k}", lambda s: "-" if s.majority is None else str(s.majority))
        add("deviation of a run's accuracy", lambda s: "-" if s.run_deviation is None else f"{100 * s.run_deviation:.1f}")
    for name, label, form in (
        ("tool_calls", "tool calls", "{:.2f}"),
        ("tool_error_ratio", "tool errors per call", "{:.3f}"),
        ("tool_error_ratio_positive", "  of right attempts", "{:.3f}"),
        ("no_tool_ratio", "attempts without a tool", "{:.3f}"),
        ("num_turns", "turns", "{:.2f}"),
        ("response_length", "response tokens", "{:.0f}"),
        ("response_length_p50", "  median", "{:.0f}"),
        ("response_length_p90", "  90 % quantile", "{:.0f}"),
        ("generated_length", "  generated", "{:.0f}"),
    ):
        add(label, lambda s, name=name, form=form: form.format((s.tools | s.lengths)[name]))
    for ending in next(iter(parts.values())).endings if parts else ():
        add(f"ended: {ending.replace('_', ' ')}", lambda s, ending=ending: f"{s.endings[ending]:.3f}")
    add("attempts spoiled, left out", lambda s: str(s.missing))
    return aligned([[label, *cells] for label, cells in rows])


if __name__ == "__main__":
    sys.exit(main())
