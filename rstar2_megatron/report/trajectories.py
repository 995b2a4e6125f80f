"""One self-contained HTML page of a run's or an evaluation's trajectories.

    python -m rstar2_megatron.report.trajectories RUN [--out FILE] [--steps 1-20] [--max-mb 20]

RUN is a run's directory, an evaluation's, a search's, or a trajectories.jsonl. Of a search the page shows its trees: nodes
with N, Q, value, code and output, and the chosen path. Else the page shows the groups of each step: kept and
dropped trajectories with their penalties, turns with tool calls and outputs, reward and ending. Shading shows how far the
actor's log-prob of a token differs from the engine's. The page's address contains the filters.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from rstar2_megatron.records.disk import reason_of
from rstar2_megatron.records.trajectory_row import FLOATS, INTS, unpack
from rstar2_megatron.records.whole_file import write_text
from rstar2_megatron.report.trees import find_trees, tool_call, tree_groups

LEVELS = (1e-3, 1e-2, 1e-1, 1.0)  # of |actor - engine|, darker from each on
_TEMPLATE = Path(__file__).with_name("trajectory_page.html")
Row = dict[str, Any]
_KEYS = "query_id rollout_index prompt solutions turns tool_calls calls_per_turn finish_reason reward positive grade answer"
_NEEDED = frozenset([*_KEYS.split(), "response_tokens", "error"])


@dataclass
class Page:
    """Content of the page, and messages about groups that were left out."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    num_rows: int = 0
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Place of a row in the file. Rows are read when they are shown, because a long run's file does not fit into memory."""

    step: int | None
    query_id: str
    offset: int
    size: int


def read_index(path: Path) -> tuple[list[RowPlace], list[str]]:
    """Entries of a trajectories.jsonl and messages about lines that could not be read. Raises ValueError for none."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give a run's directory (runner.save_trajectories_per_step > 0)")
    entries: list[RowPlace] = []
    bad: list[int] = []
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                whole = row.keys() >= _NEEDED and all(isinstance(turn, str) for turn in row["turns"])
            except (ValueError, TypeError, AttributeError):
                whole = False
            if whole:
                entries.append(RowPlace(row.get("step"), str(row["query_id"]), offset, len(line)))
            else:
                bad.append(number)
            offset += len(line)
    messages = [f"{path}: {len(bad)} lines could not be read (first: {bad[0]})"] if bad else []
    if not entries:
        raise ValueError(f"{path} holds no trajectories")
    return entries, messages


def load_rows(path: Path, entries: Sequence[RowPlace]) -> list[Row]:
    rows = []
    with path.open("rb") as file:
        for entry in entries:
            file.seek(entry.offset)
            rows.append(json.loads(file.read(entry.size)))
    return rows


def build_page(path: Path, entries: Sequence[RowPlace], tokenizer: Any = None, *, max_bytes: int = 20_000_000) -> Page:
    """Groups of the page, by step or else by problem; evenly thinned out over the steps to about `max_bytes`.

    tokenizer: decodes single tokens for the shading; None: no shading.
    """
    page = Page(num_rows=len(entries))
    groups: dict[tuple[Any, str], list[RowPlace]] = {}
    for entry in entries:
        groups.setdefault((entry.step, entry.query_id), []).append(entry)
    # A step keeps its order, in which trained groups come first; an evaluation's attempts lie as they ended.
    by_problem = lambda name: re.sub(r"\d+", lambda number: number[0].zfill(12), name)  # noqa: E731
    keys = sorted(groups, key=lambda key: (-1, by_problem(key[1])) if key[0] is None else (key[0], ""))
    chosen = _thin_out(keys, [sum(entry.size for entry in groups[key]) for key in keys], max_bytes)
    if len(chosen) < len(keys):
        page.messages.append(f"{len(keys) - len(chosen)} of {len(keys)} groups left out to keep the page small")
    page.groups = [_group(load_rows(path, groups[key]), tokenizer) for key in chosen]
    return page


def _thin_out(keys: Sequence[Any], sizes: Sequence[int], budget: int) -> list[Any]:
    """As many evenly spread keys as fit into the budget; at least one."""
    if sum(sizes) <= budget or len(keys) < 2:
        return list(keys)
    count = max(1, int(len(keys) * budget / sum(sizes)))
    picked = {round(i * (len(keys) - 1) / max(count - 1, 1)) for i in range(count)}
    return [keys[i] for i in sorted(picked)]


def _group(rows: Sequence[Row], tokenizer: Any) -> dict[str, Any]:
    first = rows[0]
    users = [m["content"] for m in first["prompt"] if m["role"] == "user"]
    return {
        "step": first.get("step"),
        "query_id": first["query_id"],
        "problem": "\n\n".join(users),
        "solutions": first["solutions"],
        "rejected": first.get("rejected"),
        "trajectories": [_trajectory(row, tokenizer) for row in sorted(rows, key=lambda row: row["rollout_index"])],
    }


def _trajectory(row: Row, tokenizer: Any) -> dict[str, Any]:
    return {
        "index": row["rollout_index"],
        "kept": row.get("kept"),
        "right": row["positive"],
        "reward": _reward(row),
        "grade": row["grade"] or "not graded",
        "answer": row["answer"],
        "ending": row["finish_reason"] or "none",
        "tokens": row["response_tokens"],
        "penalty": row.get("penalty"),
        "outcomes": [call["outcome"] for call in row["tool_calls"]],
        "error": row["error"],
        "parts": list(_parts(row, tokenizer)),
    }


def _reward(row: Row) -> str:
    """The reward and its terms, where it is more than right or wrong."""
    reward, terms = row["reward"] or 0.0, row.get("reward_terms") or {}
    if reward in (0.0, 1.0) and len(terms) < 2:
        return ""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in terms.items())
    return f"; reward {reward:.3g}" + (f" ({parts})" if parts else "")


def _parts(row: Row, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Turns with the tool calls that follow each, and what an environment or loop of the user's said."""
    answers = row.get("observations") or []
    if opening := row.get("opening"):
        yield {"kind": "observation", "response": opening}
    shaded = shaded_turns(row, tokenizer) if tokenizer is not None else None
    calls = map(tool_call, row["tool_calls"])
    counts = row["calls_per_turn"]
    for number, text in enumerate(row["turns"]):
        turn: dict[str, Any] = {"kind": "turn", "text": text}
        if shaded is not None:
            turn["pieces"] = shaded[number]
        yield turn
        yield from islice(calls, *counts[number : number + 1] or [0])
        if answer := "".join(answers[number : number + 1]):
            yield {"kind": "observation", "response": answer}
    yield from calls


def shaded_turns(row: Row, tokenizer: Any) -> list[list[tuple[str, int, str]]] | None:
    """(text, level, difference) pieces of each turn; None when the row has no log-prob differences that fit it."""
    if not row.get("logprob_diff") or not row.get("token_ids"):
        return None
    ids, spans = unpack(row["token_ids"], INTS), row["generated"]
    differences = unpack(row["logprob_diff"], FLOATS)
    if len(spans) != len(row["turns"]) or sum(end - start for start, end in spans) != len(differences):
        return None
    values = iter(differences)
    return [_pieces(ids[start:end], [next(values) for _ in range(end - start)], tokenizer) for start, end in spans]


def _pieces(ids: Sequence[int], differences: Sequence[float], tokenizer: Any) -> list[tuple[str, int, str]]:
    """One piece for a run of unshaded tokens, and one for several tokens that form a single character."""
    pieces: list[tuple[str, int, str]] = []
    waiting: list[int] = []
    worst = 0.0
    for token, difference in zip(ids, differences, strict=True):
        waiting.append(token)
        worst = max(worst, difference, key=abs)
        text = tokenizer.decode(waiting, skip_special_tokens=False)
        if "\ufffd" in text and len(waiting) < 4:
            continue
        level = sum(abs(worst) >= least for least in LEVELS)
        if not level and pieces and not pieces[-1][1]:
            pieces[-1] = (pieces[-1][0] + text, 0, "")
        else:
            pieces.append((text, level, f"{worst:+.2g}" if level else ""))
        waiting, worst = [], 0.0
    if waiting:
        pieces.append((tokenizer.decode(waiting, skip_special_tokens=False), 0, ""))
    return pieces


def render(page: Page, title: str) -> str:
    shown = sum(len(group["trajectories"]) for group in page.groups)
    about = f"{len(page.groups)} groups, {shown} of {page.num_rows} trajectories"
    about = "; ".join([about, *page.messages])
    text = json.dumps({"title": title, "about": about, "groups": page.groups}, ensure_ascii=False)
    # Only `<` could end the script element; the text is never parsed as HTML.
    return _TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", text.replace("<", "\\u003c"))


def build_tree_page(paths: Sequence[Path], *, max_bytes: int = 20_000_000) -> Page:
    """The page of a search: a group a tree, with its solutions as trajectories. Raises ValueError without a tree."""
    page = Page()
    for path in paths:
        groups, solutions, messages = tree_groups(path, max_bytes // len(paths))
        page.groups += groups
        page.num_rows += solutions
        page.messages += messages
    return page


def find_tokenizer(directory: Path) -> Any:
    """The tokenizer of the run's exported model, or of the model it started from; None without one or without transformers."""
    candidates = [directory / "model"]  # an evaluation's directory has neither, and no log-probs either
    config = directory / "config.yaml"
    if config.is_file():
        model = yaml.safe_load(config.read_text(encoding="utf-8")).get("rollout", {}).get("model", {})
        candidates.append(Path(model.get("model_path", "")))
    for candidate in candidates:
        if (candidate / "tokenizer.json").is_file():
            try:
                from transformers import AutoTokenizer  # here: it takes seconds
            except ImportError:  # `.[report]` alone
                return None
            return AutoTokenizer.from_pretrained(candidate)
    return None


def select_steps(entries: Sequence[RowPlace], steps: str | None) -> list[RowPlace]:
    """Entries of "3", "1-20" or all steps. Raises ValueError for another text or no entries."""
    if steps is None:
        return list(entries)
    first, dash, last = steps.partition("-")
    try:
        low = int(first)
        high = int(last) if dash else low
    except ValueError:
        raise ValueError(f"--steps {steps}: write one step or a range, such as 1-20") from None
    chosen = [entry for entry in entries if entry.step is not None and low <= entry.step <= high]
    if not chosen:
        raise ValueError(f"--steps {steps}: no trajectories of these steps")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 2 when there is nothing to show; 1 when the page cannot be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, help="default: trajectories.html beside the trajectories")
    parser.add_argument("--steps", help="one step or a range, such as 1-20")
    parser.add_argument("--max-mb", type=float, default=20.0, help="about the largest size of the page")
    arguments = parser.parse_args(argv)
    path = arguments.run / "trajectories.jsonl" if arguments.run.is_dir() else arguments.run
    directory = path.parent
    max_bytes = int(arguments.max_mb * 1e6)
    out = arguments.out or directory / "trajectories.html"
    try:
        if out.is_dir():
            raise ValueError(f"--out {out} is a directory; name a file")
        if arguments.run.is_dir() and not path.is_file() and (trees := find_trees(directory)):
            page = build_tree_page(trees, max_bytes=max_bytes)
        else:
            entries, messages = read_index(path)
            entries = select_steps(entries, arguments.steps)
            page = build_page(path, entries, find_tokenizer(directory), max_bytes=max_bytes)
            page.messages = messages + page.messages
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, render(page, directory.resolve().name))
    except (OSError, ValueError) as error:
        print(f"error: {reason_of(error, out, '--out')}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    for message in page.messages:
        print(f"note: {message}", file=sys.stderr)
    print(f"wrote {out}: {len(page.groups)} groups, {out.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
