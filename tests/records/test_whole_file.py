"""Files that are replaced whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rstar2_megatron.records.whole_file import write_json, write_jsonl


def test_a_writer_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_jsonl(path, [{"a": "ä"}, {"a": 2}]) == 2
    assert path.read_text() == '{"a": "ä"}\n{"a": 2}\n'

    def rows() -> Iterator[dict[str, int]]:
        yield {"a": 3}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_jsonl(path, rows())
    assert path.read_text() == '{"a": "ä"}\n{"a": 2}\n'
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{"a": "ä"}\n{"a": 2}\n'
    write_json(path, {"a": 1})
    assert path.read_text() == '{\n  "a": 1\n}\n'
