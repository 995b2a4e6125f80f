"""Problems from a table that this project does not know: examples/extend/own_data.csv, one calculation a row.

`data.rows` names `row`. What it returns beside `prompt` and `solutions` is in `problem.extra`, for a reward or a tool.
"""

from typing import Any

WORDING = {"product": "Multiply {a} by {b}.", "gcd": "Find the gcd of {a} and {b}."}


def row(row: dict[str, Any]) -> dict[str, Any] | None:
    """A row as training reads it; None leaves the row out."""
    if "prompt" in row:  # the held-out problems have this project's form
        return row
    if row["operation"] not in WORDING:
        return None
    return {
        "prompt": WORDING[row["operation"]].format(**row),
        "solutions": row["result"],
        "query_id": f"{row['operation']}-{row['a']}-{row['b']}",
        "operation": row["operation"],
    }
