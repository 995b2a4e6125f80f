"""Reading problems, and the order of batches across epochs and resumes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rstar2_megatron.data.loader import EpochsOver, ProblemLoader
from rstar2_megatron.data.problems import Columns, drop_long_prompts, read_problems, trained_note
from rstar2_megatron.data.rows import DataError
from rstar2_megatron.settings.schema import DataSettings
from rstar2_megatron.trajectory import Problem

PROBLEMS = [Problem(str(i), [{"role": "user", "content": "x" * i}], ["1"]) for i in range(11)]


def loader(batch: int = 3, *, shuffle: bool = True, seed: int = 5, epochs: int | None = None) -> ProblemLoader:
    data = DataSettings(train_data_paths=[], max_prompt_length=8, rollout_batch_size=batch, shuffle=shuffle, seed=seed)
    return ProblemLoader(PROBLEMS, data, max_epochs=epochs)


def ids(source: ProblemLoader, batches: int) -> list[list[str]]:
    return [[p.query_id for p in source.next_batch()] for _ in range(batches)]


def test_each_epoch_is_its_own_permutation_under_the_seed() -> None:
    source = loader()
    first, second, third = ([i for batch in ids(source, 3) for i in batch] for _ in range(3))
    assert len(set(first)) == 9 and len(set(second)) == 9 and first != second != third
    assert ids(loader(), 9) == ids(loader(), 9)
    assert ids(loader(seed=6), 3) != ids(loader(), 3)
    assert ids(loader(shuffle=False), 4)[::3] == [["0", "1", "2"]] * 2


@given(st.integers(0, 8), st.integers(1, 6))
def test_a_resumed_loader_goes_on_exactly(before: int, after: int) -> None:
    uninterrupted = loader()
    ids(uninterrupted, before)
    state = pickle.loads(pickle.dumps(uninterrupted.state_dict()))
    resumed = loader()
    ids(resumed, 2)  # whatever it did before does not matter
    resumed.load_state_dict(state)
    assert ids(resumed, after) == ids(uninterrupted, after)


def test_epochs_end() -> None:
    source = loader(batch=5, epochs=2)
    ids(source, 4)
    with pytest.raises(EpochsOver, match="max_epochs=2 epochs of the data are used up"):
        source.next_batch()
    ended = loader(batch=5, epochs=1)  # lowered for a resume
    ended.load_state_dict(source.state_dict())
    with pytest.raises(EpochsOver, match="max_epochs=1"):
        ended.next_batch()


def test_a_state_of_other_data_is_refused() -> None:
    state = loader().state_dict() | {"num_problems": 12}
    with pytest.raises(DataError, match="made with 12 problems, now there are 11"):
        loader().load_state_dict(state)


def test_too_few_problems() -> None:
    with pytest.raises(DataError, match=r"11 problems do not fill a step of data.rollout_batch_size=12"):
        loader(batch=12)


def test_long_prompts_are_dropped_and_counted() -> None:
    kept, dropped = drop_long_prompts(PROBLEMS, lambda p: len(p.prompt[0]["content"]), 7)
    assert [p.query_id for p in kept] == [str(i) for i in range(8)] and dropped == 3
    with pytest.raises(DataError, match=r"longer than data.max_prompt_length=7 tokens \(shortest 9\)"):
        drop_long_prompts(PROBLEMS[9:], lambda p: len(p.prompt[0]["content"]), 7)


def test_held_out_problems_that_are_trained_on_are_counted() -> None:
    """Under other ids too, and not those that only the solution tells apart, such as a game's hidden number."""
    others = [Problem(f"held-out-{n}", [{"role": "user", "content": "x" * n}], ["1"]) for n in (9, 10, 11, 12)]
    others[0].solutions, others[3].prompt = ["2"], PROBLEMS[3].prompt
    said = trained_note(others, PROBLEMS)
    assert said and said.startswith("2 of 4 held-out problems are training problems too")
    assert trained_note(others[:1], PROBLEMS) == trained_note([], PROBLEMS) == ""


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


MESSAGES = [{"role": "user", "content": "1+1?"}]


def test_rows_of_the_public_schema(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": MESSAGES, "solutions": ["2", "two"], "query_id": "q7", "task": "sum", "level": 3},
        "",
        {"prompt": "2+2?", "solutions": 4},
    )
    one, two = read_problems([path])
    assert (one.query_id, one.task, one.solutions, one.extra) == ("q7", "sum", ["2", "two"], {"level": 3})
    assert (two.query_id, two.task, two.solutions) == ("a-3", "math", ["4"])
    assert two.prompt == [{"role": "user", "content": "2+2?"}]


def test_other_keys_by_the_yaml(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "x", "answer": ["1"], "prompt": "y"})
    assert read_problems([path], Columns("question", "answer"))[0].prompt[0]["content"] == "x"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": ', r"a.jsonl:2: not JSON"),
        ("[1]", r"a.jsonl:2: expected an object, got list"),
        ({"prompt": MESSAGES}, r"a.jsonl:2: row without 'solutions'; it has prompt"),
        ({"solutions": ["1"]}, r"a.jsonl:2: row without 'prompt'"),
        ({"prompt": MESSAGES, "solutions": []}, r"a.jsonl:2: 'solutions' must be a non-empty list .* \[\]"),
        ({"prompt": MESSAGES, "solutions": [["1"]]}, r"'solutions' must be"),
        ({"prompt": [], "solutions": ["1"]}, r"a.jsonl:2: 'prompt' must be a string or a non-empty list"),
        ({"prompt": [{"role": "user"}], "solutions": ["1"]}, r"a.jsonl:2: message 1 of 'prompt' has no content"),
        ({"prompt": [{"role": "system", "content": "x"}], "solutions": ["1"]}, r"has no user message"),
        ({"prompt": MESSAGES, "solutions": ["1"], "query_id": "q0"}, r"'q0' was already used at .*a.jsonl:1"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": MESSAGES, "solutions": ["2"], "query_id": "q0"}, row)
    with pytest.raises(DataError, match=message):
        read_problems([path])


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.jsonl does not exist"):
        read_problems([tmp_path / "nothing.jsonl"])
    with pytest.raises(DataError, match=r"no problems in .*a.jsonl"):
        read_problems([write(tmp_path / "a.jsonl", "")])
    with pytest.raises(DataError, match=r"no problems in \(no files\)"):
        read_problems([])
