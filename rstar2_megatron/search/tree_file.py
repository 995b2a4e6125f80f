"""Trees on disk: one row a problem when its search ends, and a journal of the expansions of unfinished ones.

A search is a function of its expansions, so a tree is resumed by growing it from the journal: a kill loses the expansions
under way and nothing else. The journal is removed when no search is unfinished.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rstar2_megatron.evaluation.samples import SamplesError, check_identity, check_problem, read_rows
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.search.choose import best_value, solutions
from rstar2_megatron.search.mcts import MCTS
from rstar2_megatron.search.step import Step
from rstar2_megatron.search.strategy import Search
from rstar2_megatron.search.tree import End, Node, Tree
from rstar2_megatron.trajectory import Problem

_STEPS = TypeAdapter(list[Step])
_STEP = TypeAdapter(Step)
_OF_NODE = ("visits", "total", "value", "end", "copies", "kept")
Recorded = dict[str, list[Step]]
"""Candidates by the tag of the expanded node."""


def tree_row(problem: Problem, search: Search, mode: str, seconds: float, prompt_ids: Sequence[int] = ()) -> dict[str, Any]:
    """The whole tree of a finished search as JSON: nodes, parents first, with N, q, value and step.

    prompt_ids: the token ids that every path begins with.
    """
    nodes = [
        {
            "tag": node.tag,
            **{name: getattr(node, name) for name in _OF_NODE},
            "step": None if node.step is None else _STEP.dump_python(node.step, mode="json"),
        }
        for node in search.tree.root.walk()
    ]
    return {
        "query_id": problem.query_id,
        "task": problem.task,
        "prompt": problem.prompt,
        "solutions": problem.solutions,
        "mode": mode,
        "rollouts": search.found[: search.rollouts] if isinstance(search, MCTS) else None,
        "chosen": None if (best := best_value(solutions(search.tree, mode))) is None else best.tag,
        "expansions": search.tree.expansions,
        "generated_tokens": search.tree.generated_tokens,
        "seconds": round(seconds, 3),
        "prompt_ids": list(prompt_ids),
        "nodes": nodes,
    }


def tree_of(row: Mapping[str, Any]) -> Tree:
    """The tree of a row. Raises ValueError for a row of another kind."""
    nodes: dict[str, Node] = {}
    try:
        for item in row["nodes"]:
            parent = nodes.get(item["tag"].rpartition(".")[0])
            step = None if item["step"] is None else _STEP.validate_python(item["step"])
            node = Node(item["tag"], parent.depth + 1 if parent else 0, parent, step)
            for name in _OF_NODE:
                setattr(node, name, item[name])
            node.end = None if node.end is None else End(node.end)
            if parent is not None:
                parent.children = [*(parent.children or []), node]
            nodes[node.tag] = node
        return Tree(nodes["0"], row["generated_tokens"], row["expansions"])
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise ValueError(f"not a tree: {type(error).__name__}: {error}") from None


class TreeFile:
    """`path` holds the finished trees, `path` with the suffix .expansions.jsonl the journal.

    `identity` must be the same for every tree of a file.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._rows = JsonlFile(self.path)
        self.journal_path = self.path.with_suffix(".expansions.jsonl")
        self._journal = JsonlFile(self.journal_path, sync=False)
        self._identity = identity

    def open(self, problems: Sequence[Problem]) -> tuple[set[str], dict[str, Recorded]]:
        """(problems with a finished tree, recorded expansions of the others). Must be called before the other methods.

        A line that a kill cut short is removed. Raises SamplesError for a file of other settings or of other problems
        under the same query_id, and for a broken row.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        check_identity(self.path, self._identity)
        self.path.touch()  # from now on it has settings, also while it has no tree
        by_id = {problem.query_id: problem for problem in problems}
        finished = {self._check(row, by_id, number) for number, row in self.rows()} & set(by_id)
        recorded: dict[str, Recorded] = {}
        for number, row in read_rows(self._journal):
            try:
                if row["query_id"] not in finished:
                    recorded.setdefault(row["query_id"], {})[row["tag"]] = _STEPS.validate_python(row["steps"])
            except (KeyError, ValidationError) as error:
                raise _broken(self.journal_path, number, error) from None
        return finished, recorded

    def _check(self, row: Mapping[str, Any], by_id: Mapping[str, Problem], number: int) -> str:
        try:
            query_id = str(row["query_id"])
            tree_of(row)
        except (KeyError, ValueError) as error:
            raise _broken(self.path, number, error) from None
        if query_id in by_id:
            check_problem(self.path, row, by_id[query_id])
        return query_id

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(line number, row) of each finished tree."""
        return read_rows(self._rows)

    def record(self, query_id: str, tag: str, steps: Sequence[Step]) -> None:
        """Write an expansion; the operating system has it before this returns."""
        self._journal.append({"query_id": query_id, "tag": tag, "steps": _STEPS.dump_python(list(steps), mode="json")})

    def finish(self, row: Mapping[str, Any]) -> None:
        """Write a finished tree; it is on disk before this returns."""
        self._rows.append(row)

    def close(self, *, complete: bool) -> None:
        """Remove the journal when every search has ended."""
        if complete:
            self.journal_path.unlink(missing_ok=True)


def _broken(path: Path, number: int, error: Exception) -> SamplesError:
    reason = " ".join(str(error).split())[:200]
    return SamplesError(f"{path}:{number}: {reason}; repair or remove this line, and its problem is searched again")
