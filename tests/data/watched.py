"""Inputs whose reading is noted, and ends at a row as by a kill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rstar2_megatron.data.rows import Input, Row


def watched(inputs: Sequence[Input], read: list[str], kill_at: int | None = None) -> list[Input]:
    """The same inputs. `read` gets the place of each row; the row that would make it `kill_at` long is a kill instead."""

    class Watched(Input):
        def rows(self, columns: Sequence[str], skip: int) -> Iterator[Row]:
            for row in Input.rows(self, columns, skip):
                if len(read) + 1 == kill_at:
                    raise KeyboardInterrupt
                read.append(row.where)
                yield row

    return [Watched(source.name, source.path, source.hub) for source in inputs]
