"""Trees of searches for the trajectory page: every node with N, Q, value, code and output, and the chosen path. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TREE_FILES = ("mcts.jsonl", "beam.jsonl")
Row = dict[str, Any]


def find_trees(directory: Path) -> list[Path]:
    """The files of trees that a search wrote to its directory."""
    return [path for name in TREE_FILES if (path := directory / name).is_file()]


def tree_groups(path: Path, max_bytes: int) -> tuple[list[Row], int, list[str]]:
    """(one group a tree for the page, number of solutions, messages). Raises ValueError when there is no tree.

    Trees after `max_bytes` of rows are left out.
    """
    groups: list[Row] = []
    bad: list[int] = []
    left_out = used = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if groups and used + len(line) > max_bytes:
                left_out += 1
                continue
            try:
                groups.append(_group(json.loads(line), path.stem))
                used += len(line)
            except (ValueError, KeyError, TypeError, AttributeError):
                bad.append(number)
    messages = [f"{path}: {len(bad)} lines could not be read (first: {bad[0]})"] if bad else []
    if left_out:
        messages.append(f"{left_out} trees of {path.name} left out to keep the page small")
    if not groups:
        raise ValueError(f"{path} holds no trees")
    return groups, sum(len(group["trajectories"]) for group in groups), messages


def _group(row: Row, name: str) -> Row:
    nodes = {node["tag"]: _node(node) for node in row["nodes"]}
    leaves = [node for node in row["nodes"] if node["end"] == "answer"]
    chosen = path_tags(row["chosen"]) if row["chosen"] else []
    users = [m["content"] for m in row["prompt"] if m["role"] == "user"]
    return {
        "step": None,
        "query_id": f"{row['query_id']} ({name})",
        "problem": "\n\n".join(users),
        "solutions": row["solutions"],
        "rejected": None,
        "nodes": nodes,
        "chosen": chosen,
        "about": f"{len(nodes)} nodes, {row['expansions']} expansions, {row['generated_tokens']:,} generated tokens",
        "trajectories": [_leaf(i, leaf, row["nodes"], leaf["tag"] == row["chosen"]) for i, leaf in enumerate(leaves)],
    }


def path_tags(tag: str) -> list[str]:
    """Tags from the root to a node."""
    parts = tag.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _node(node: Row) -> Row:
    step = node["step"]
    parts: list[Row] = []
    if step is not None:
        parts = [{"kind": "turn", "text": step["text"]}, *(tool_call(item) for item in step["tool_calls"])]
        if answer := step["observation"]:
            parts.append({"kind": "observation", "response": answer})
    return {
        "n": node["visits"],
        "q": node["total"] / node["visits"] if node["visits"] else None,
        "value": node["value"],
        "end": node["end"],
        "copies": node["copies"],
        "answer": None if step is None else step["answer"],
        "reward": None if step is None else step["reward"],
        "parts": parts,
    }


def tool_call(call: Row) -> Row:
    """A tool call of a row as the page shows it."""
    arguments = call["arguments"]
    others = {name: value for name, value in arguments.items() if name not in ("code", "input")}
    return {
        "kind": "tool",
        "name": call["name"],
        "outcome": call["outcome"],
        "seconds": round(call["seconds"], 3),
        "code": str(arguments.get("code") or "") + (json.dumps(others, ensure_ascii=False) if others else ""),
        "input": str(arguments.get("input") or ""),
        "response": call["response"] if "response" in call else call["response_text"],
    }


def _leaf(index: int, leaf: Row, nodes: Sequence[Row], chosen: bool) -> Row:
    """A solution as a trajectory of the page; `path` names the nodes whose parts it shows."""
    tags = path_tags(leaf["tag"])[1:]
    on_path = [node["step"] for node in nodes if node["tag"] in tags]
    step = leaf["step"]
    return {
        "index": index,
        "kept": chosen or None,
        "right": (step["reward"] or 0.0) > 0,
        "reward": "",
        "grade": "not graded" if step["reward"] is None else "correct" if step["reward"] else "wrong",
        "answer": step["answer"],
        "ending": step["ending"],
        "tokens": None,
        "penalty": None,
        "outcomes": [item["outcome"] for s in on_path for item in s["tool_calls"]],
        "error": "",
        "path": tags,
        "parts": [],
    }
