"""Searches solutions step by step, as rStar-Math does: MCTS or beam search over assistant turns with their tool calls.

    python -m rstar2_megatron.search --model DIR --data FILE --mode mcts --rollouts 16 --candidates 8 --depth 16 --out DIR

Without a reward model the search is guided by the known answers (search.guide=answers), which makes training data.
--reward-model scores prefixes with a process preference model; beam search, and search.guide=scores, take the policy's own
likelihood where there is none. search.guide=answers+scores makes training data of later rounds. --compare also runs a greedy
attempt, the other search and independent attempts that generate as many tokens, and compares them on the same problems. DIR,
--config and key=value are as for `python -m rstar2_megatron.evaluation`; search.* are the settings of the search
(docs/search.md). After a stop or a kill the same command continues, and the trees are those of a run without a stop.

Writes to --out: MODE.jsonl (a row a problem, with the whole tree), results.json, results.txt, MODE.pass_counts.jsonl (right
solutions by problem); of a search that is guided by answers also MODE.sft.jsonl (its best right solutions, for
sft.train_data_paths). Show the trees with `python -m rstar2_megatron.report.trajectories OUT`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rstar2_megatron.data.difficulty import pass_counts
from rstar2_megatron.evaluation.configure import (
    check_model,
    configure,
    default_out,
    exit_code,
    parse_words,
    read_graded,
    sampling_parser,
)
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.records.whole_file import write_json, write_jsonl, write_text
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.search.table import ChoiceScores, SearchedSet, read_set, render, results
from rstar2_megatron.settings.sections.search import SearchSettings
from rstar2_megatron.trajectory import Problem

# `session` loads torch, which takes seconds; --help and bad input are answered without it.
if TYPE_CHECKING:
    from rstar2_megatron.evaluation.services import SamplingSettings

_FLAGS = ("mode", "rollouts", "candidates", "depth")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = sampling_parser("python -m rstar2_megatron.search", __doc__, "RUN/search/NAME, or evaluations/NAME here")
    default = SearchSettings()
    parser.add_argument("--mode", choices=("mcts", "beam"), help=f"({default.mode})")
    parser.add_argument("--rollouts", help=f"rollouts of mcts ({default.rollouts})")
    parser.add_argument("--candidates", help=f"continuations of a node ({default.candidates})")
    parser.add_argument("--reward-model", metavar="DIR", help="process preference model (runner.task_type=preference)")
    parser.add_argument("--depth", help=f"most steps of a solution ({default.depth})")
    parser.add_argument("--compare", action="store_true", help="with greedy, sampling of equal price, other search")
    parser.add_argument("--max-tokens", type=int, help="tokens of a whole solution, as for evaluation")
    arguments = parse_words(parser, argv, ("max_tokens", "problems", "engines"))
    arguments.overrides += [f"search.{name}={value}" for name in _FLAGS if (value := getattr(arguments, name)) is not None]
    # `session` takes these from the search's settings
    arguments.samples, arguments.temperature, arguments.top_p, arguments.max_turns = 1, 1.0, 1.0, 1
    return arguments


def guided(search: SearchSettings) -> SearchSettings:
    """The settings with their guide. Raises ValueError for a mode that the guide cannot serve."""
    scored = search.mode == "beam" or search.reward_model is not None
    guide = search.guide or ("scores" if scored else "answers")
    if search.mode == "beam" and guide == "answers":
        raise ValueError(
            "beam search ranks unfinished prefixes, which known answers cannot score: search.guide=scores or answers+scores"
        )
    if search.reward_model is not None and guide == "answers":
        raise ValueError(
            f"search.guide=answers takes no scores, so --reward-model {search.reward_model} would do nothing: leave it out, or "
            "set search.guide=answers+scores"
        )
    return search.model_copy(update={"guide": guide})


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when something failed while running or problems are unfinished; 2 for bad input; 130, 143 when stopped."""
    arguments = parse(argv)
    try:
        settings, sampling = configure(arguments)
        check_model(sampling)
        searched = settings.search
        if arguments.reward_model is not None:
            searched = searched.model_copy(update={"reward_model": arguments.reward_model})
        search = guided(searched)
        if arguments.compare and search.mode == "sampling":
            raise ValueError(
                "--compare adds attempts of search.mode=sampling to a search by itself: set search.mode=mcts or beam, or leave "
                "--compare out"
            )
        if search.reward_model is not None:
            from rstar2_megatron.search.preference.reward_model import check_reward_model  # as `session` below

            policy = Path(sampling.rollout.model.model_path)
            check_reward_model(Path(search.reward_model), policy, sampling.max_context_tokens)
        problems = read_graded(arguments.data, settings, arguments.problems)
        out = arguments.out or default_out(arguments.model, "search")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return exit_code(lambda: run(problems, sampling, search, out, compare=arguments.compare), out)


def run(problems: Sequence[Problem], sampling: SamplingSettings, search: SearchSettings, out: Path, *, compare: bool) -> int:
    """Search what is missing, score everything, write and print the results."""
    # here, because torch takes seconds to load
    from rstar2_megatron.search.session import search_problems, write_conversations

    print(
        f"{len(problems)} problems, {search.mode} by the rules of {search.rules}, guided by {search.guide}; model "
        f"{sampling.rollout.model.model_path}" + (f", reward model {search.reward_model}" if search.reward_model else ""),
        flush=True,
    )
    planned, spoiled = search_problems(problems, sampling, search, out, compare=compare)
    with GraderPool(1, sampling.reward.timeout_s) as grader:
        budget = _read(search.mode, problems, out).tokens if compare else None
        rows = [row for name, one in planned.items() for row in _results(name, one, problems, out, grader, budget)]
    for name, settings in planned.items():
        if settings.mode == "mcts" and settings.guide != "scores":
            written = write_conversations(problems, sampling, out / f"{name}.jsonl", out / f"{name}.sft.jsonl")
            print(f"{written} right solutions for SFT in {out / f'{name}.sft.jsonl'}")
    text = render(rows, len(problems))
    write_json(
        out / "results.json",
        [
            {"name": row.name, "uses_answers": row.ceiling, **dataclasses.asdict(row.estimate()), "scores": row.scores,
             "tokens": row.tokens}
            for row in rows
        ],
    )  # fmt: skip
    write_text(out / "results.txt", text + "\n")
    print(text)
    print(f"wrote {', '.join(f'{name}.jsonl' for name in planned)} and results to {out}")
    for query_id, reason in spoiled.items():
        print(f"warning: {query_id} is unfinished: {reason}", file=sys.stderr)
    if spoiled:
        print("the same command searches the unfinished problems again", file=sys.stderr)
    return 1 if spoiled else 0


def _read(name: str, problems: Sequence[Problem], out: Path, budget: Mapping[str, int] | None = None) -> SearchedSet:
    rows = (row for _, row in JsonlFile(out / f"{name}.jsonl").numbered_rows() if row is not None)
    return read_set(rows, {problem.query_id for problem in problems}, budget)


def _results(
    name: str,
    settings: SearchSettings,
    problems: Sequence[Problem],
    out: Path,
    grader: GraderPool,
    budget: Mapping[str, int] | None,
) -> list[ChoiceScores]:
    """The rows of one search. `budget`: of the asked search, for the attempts that it is compared with."""
    searched = _read(name, problems, out, budget)
    if not searched.found:
        return []
    if name != "greedy":
        leaves = [(query_id, leaf.positive) for query_id, found in searched.found.items() for leaf in found]
        counts = pass_counts(problems, leaves)
        write_jsonl(out / f"{name}.pass_counts.jsonl", (dataclasses.asdict(count) for count in counts))
    more_by_answers = settings.mode == "mcts" and settings.more_rollouts > 0  # for problems without a right solution
    by_answers = settings.guide in ("answers", "answers+scores") or more_by_answers
    return results(name, searched, grader.equal, by_answers=by_answers)


if __name__ == "__main__":
    sys.exit(main())
