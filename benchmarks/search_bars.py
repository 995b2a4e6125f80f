"""Whether search with a trained preference model beats sampling: one table and one JSON line.

    python -m benchmarks.search_bars --model POLICY --reward-model PPM --data FILE --out DIR [key=value ...]

Runs `python -m rstar2_megatron.search --compare` (greedy, MCTS and beam guided by the preference model, independent attempts)
and a second search that is guided by the known answers, the ceiling, on the same problems. Attempts are those that fit into the
generated tokens of the MCTS, problem by problem. Differences are paired over problems, with 95 % bootstrap intervals. The exit
code is 0 when MCTS beats greedy, majority@8 and the majority at equal tokens by 0.15 with intervals above 0, else 1.
--next-model adds the next round's policy, measured greedily.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.records import keep_rows
from rstar2_megatron.evaluation.scores import estimate, majority
from rstar2_megatron.records.jsonl_file import JsonlFile
from rstar2_megatron.reward.pool import GraderPool
from rstar2_megatron.search.choose import solution
from rstar2_megatron.search.table import paired_difference
from rstar2_megatron.search.tree import End
from rstar2_megatron.search.tree_file import tree_of

BAR = 0.15
VOTES = 8
CHOSEN = "mcts, best value"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "reward-model", "data", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--next-model", help="policy of the next round")
    parser.add_argument("--config", help="configuration when the policies are not in runs")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--result", type=Path, help="also add the result to this JSON file, a list of cases")
    parser.add_argument("--case", default="seed 0", help="of the result; an older one of this name is replaced")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="search.rollouts=8 ...")
    own = parser.parse_intermixed_args(argv)
    out = Path(own.out)
    common = ["--data", own.data, "--problems", str(own.problems)]
    common += ["--config", own.config] if own.config else []
    mcts = [*common, "--model", own.model, "--mode", "mcts"]
    scored = ["--reward-model", own.reward_model, "--compare", "search.guide=scores"]
    _search([*mcts, *scored, "--out", str(out / "scores"), *own.overrides])
    truth = ["search.guide=answers", "--out", str(out / "answers")]
    _search([*mcts, *truth, *own.overrides])
    rows = [*_rows(out / "scores"), *_rows(out / "answers", "guided by the answers: ")]
    rows.append(_votes(out / "scores" / "sampling.jsonl"))
    if own.next_model:
        greedy = ["search.mode=sampling", "search.rollouts=1", "search.temperature=0", "search.guide=answers"]
        _search([*common, "--model", own.next_model, "--out", str(out / "next"), *own.overrides, *greedy])
        rows += [{**row, "name": "greedy of the next round"} for row in _rows(out / "next")]
    return report(rows, own.result, own.case)


def _search(words: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "rstar2_megatron.search", *words], check=True)


def _rows(out: Path, prefix: str = "") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((out / "results.json").read_text())
    return [{**row, "name": prefix + row["name"]} for row in rows]


def _votes(path: Path) -> dict[str, Any]:
    """majority@8 of the first 8 attempts, which is less than the tokens of the search where more fit into them."""
    scores: dict[str, float] = {}
    tokens: dict[str, int] = {}
    with GraderPool(1) as grader:
        for row in (row for _, row in JsonlFile(path).numbered_rows() if row is not None):
            nodes = [n for first in (tree_of(row).root.children or [])[:VOTES] for n in first.walk()]
            found = [solution(node) for node in nodes if node.end is End.ANSWER]
            scores[row["query_id"]] = majority(found, grader.equal)
            tokens[row["query_id"]] = sum(n.step.generated_tokens for n in nodes if n.step is not None)
    value = asdict(estimate(list(scores.values())))
    return {"name": f"majority@{VOTES}", "uses_answers": False, **value, "scores": scores, "tokens": tokens}


def report(rows: Sequence[Mapping[str, Any]], path: Path | None, case: str = "seed 0") -> int:
    """Print the table, keep the result in `path`; returns the exit code."""
    by_name = {row["name"]: row for row in rows}
    chosen, greedy = by_name[CHOSEN]["scores"], by_name["greedy"]["scores"]
    print(f"\n{'':<48}{'right':>7} {'95 %':>16} {'tokens':>8}  MCTS with the preference model against it")
    kept = []
    for row in rows:
        difference = paired_difference(chosen, row["scores"])
        tokens = sum(row["tokens"].values()) / max(1, len(row["tokens"]))
        label = row["name"] + (" (uses the answers)" if row["uses_answers"] else "")
        print(
            f"{label:<48}{row['value']:>7.3f} [{row['low']:.3f}, {row['high']:.3f}] {tokens:>8,.0f}  "
            f"{difference.value:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
        )
        kept.append(
            {key: row[key] for key in ("name", "uses_answers", "value", "low", "high")}
            | {"tokens": round(tokens), "mcts_minus_it": asdict(difference)}
        )
    beaten = {row["name"]: row["mcts_minus_it"] for row in kept if _in_the_bar(row["name"])}
    passed = all(d["value"] >= BAR and d["low"] > 0 for d in beaten.values())
    result: dict[str, Any] = {"case": case, "problems": len(greedy), "bar": BAR, "passed": passed, "rows": kept}
    if (after := by_name.get("greedy of the next round")) is not None:
        result["next_round_minus_greedy"] = asdict(paired_difference(after["scores"], greedy))
    keep_rows(path, [result])
    print(json.dumps({key: value for key, value in result.items() if key != "rows"} | {"against": beaten}))
    return 0 if passed else 1


def _in_the_bar(name: str) -> bool:
    """Greedy, majority@8, and the majority of as many attempts as fit into the tokens of the search."""
    return name in ("greedy", f"majority@{VOTES}") or name.startswith("sampling, majority@")


if __name__ == "__main__":
    sys.exit(main())
