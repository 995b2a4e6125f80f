"""What searches of the same problems reached: accuracy of each choice with 95 % intervals, and its price in tokens. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rstar2_megatron.evaluation.scores import Equal, Estimate, bootstrap, estimate, majority
from rstar2_megatron.records.text_table import aligned
from rstar2_megatron.search.choose import Solution, best_value, most_frequent, most_valued, solutions
from rstar2_megatron.search.tree import Tree
from rstar2_megatron.search.tree_file import tree_of


@dataclass(slots=True)
class ChoiceScores:
    """One choice of one search: a score in [0, 1] for each problem."""

    name: str
    scores: dict[str, float]
    tokens: dict[str, int] = field(default_factory=dict)
    """Generated tokens by problem, every candidate included."""
    ceiling: bool = False
    """Uses the answers: no method that may be deployed."""

    def estimate(self) -> Estimate:
        return estimate(list(self.scores.values()))


@dataclass(frozen=True, slots=True)
class SearchedSet:
    """The trees of one search over a set of problems. `attempts` counts those of independent sampling, by problem."""

    found: dict[str, list[Solution]]
    tokens: dict[str, int]
    attempts: dict[str, int] = field(default_factory=dict)


def read_set(rows: Iterable[Mapping[str, Any]], wanted: set[str], budget: Mapping[str, int] | None = None) -> SearchedSet:
    """Solutions and tokens of the wanted problems. Raises ValueError for a row that is no tree.

    budget: tokens by problem; of independent attempts only the first ones that fit into it count, and at least one.
    """
    searched = SearchedSet({}, {})
    for row in rows:
        query_id = row["query_id"]
        if query_id not in wanted:
            continue
        tree, mode = tree_of(row), row["mode"]
        found, tokens = solutions(tree, mode), row["generated_tokens"]
        if mode == "sampling":
            used = _affordable(tree, None if budget is None else budget.get(query_id))
            tokens = sum(used.values())
            found = [leaf for leaf in found if ".".join(leaf.tag.split(".")[:2]) in used]
            searched.attempts[query_id] = len(used)
        searched.found[query_id], searched.tokens[query_id] = found, tokens
    return searched


def _affordable(tree: Tree, budget: int | None) -> dict[str, int]:
    """Generated tokens of the first attempts that fit into the budget, by the tag of their first step."""
    used: dict[str, int] = {}
    for first in tree.root.children or []:
        tokens = sum(node.step.generated_tokens for node in first.walk() if node.step is not None)
        if budget is not None and used and sum(used.values()) + tokens > budget:
            break
        used[first.tag] = tokens
    return used


def results(name: str, searched: SearchedSet, equal: Equal, *, by_answers: bool) -> list[ChoiceScores]:
    """Every choice of a search. by_answers: the known answers decide what is searched or valued."""
    found, tokens = searched.found, searched.tokens

    def of(choice: Callable[[Sequence[Solution]], Solution | None]) -> dict[str, float]:
        return {q: best.reward if (best := choice(leaves)) else 0.0 for q, leaves in found.items()}

    any_right = {q: float(any(s.reward for s in leaves)) for q, leaves in found.items()}
    if attempts := searched.attempts:
        average = {q: sum(s.reward for s in leaves) / attempts[q] for q, leaves in found.items()}
        one = {q: n // attempts[q] for q, n in tokens.items()}
        mean = round(sum(attempts.values()) / len(attempts))
        if mean == 1:
            return [ChoiceScores(name, average, one)]
        rows = [ChoiceScores(f"{name}, avg@1", average, one)]
        votes = {q: majority(leaves, equal) for q, leaves in found.items()}
        rows.append(ChoiceScores(f"{name}, majority@{mean}", votes, tokens))
        if not by_answers:
            rows.append(ChoiceScores(f"{name}, best of {mean}", of(best_value), tokens))
        return [*rows, ChoiceScores(f"{name}, any of {mean}", any_right, tokens, ceiling=True)]
    return [
        ChoiceScores(f"{name}, best value", of(best_value), tokens, ceiling=by_answers),
        ChoiceScores(f"{name}, majority", of(lambda s: most_frequent(s, equal)), tokens, ceiling=by_answers),
        ChoiceScores(f"{name}, value-weighted", of(lambda s: most_valued(s, equal)), tokens, ceiling=by_answers),
        ChoiceScores(f"{name}, any right", any_right, tokens, ceiling=True),
    ]


def paired_difference(first: Mapping[str, float], second: Mapping[str, float]) -> Estimate:
    """Mean over common problems of first - second, with the 95 % interval of a paired bootstrap (fixed seed)."""
    common = sorted(first.keys() & second.keys())
    if not common:
        raise ValueError("the two results have no problem in common")
    return bootstrap(np.array([first[q] - second[q] for q in common]))


def render(rows: Sequence[ChoiceScores], num_problems: int) -> str:
    """An aligned table: right answers in per cent with intervals, generated tokens a problem, distance to greedy.

    num_problems: those that were asked for. The heading has the number that the rows count, and a line the unfinished ones.
    """
    counted = sorted({len(row.scores) for row in rows}) or [0]
    greedy = next((row for row in rows if row.name == "greedy"), None)
    table = [("", f"right of {' to '.join(map(str, counted))}, %", "tokens a problem", "against greedy")]
    for row in rows:
        tokens = f"{sum(row.tokens.values()) / len(row.tokens):,.0f}" if row.tokens else "-"
        against = "" if greedy is None or row is greedy else _signed(paired_difference(row.scores, greedy.scores))
        table.append((row.name + (" (uses the answers)" if row.ceiling else ""), str(row.estimate()), tokens, against))
    missing = num_problems - counted[0]
    return aligned(table) + (f"\n{missing} of {num_problems} problems are unfinished and not counted" if missing else "")


def _signed(e: Estimate) -> str:
    return f"{100 * e.value:+.1f} [{100 * e.low:+.1f}, {100 * e.high:+.1f}]"
