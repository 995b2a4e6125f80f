"""A whole preference run with every part real: trees in, a reward model out, which transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rstar2_megatron.runs.main import main
from tests.rollout.tiny import make_model
from tests.search.written_trees import write_trees

OFF = ["cold_start.enabled=False", "cold_start.builder=null", "data.train_data_paths=[]", "data.val_data_paths=[]"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("preference")
    model = make_model(root / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    write_trees(root / "mcts.jsonl", tokenizer, 8)
    write_trees(root / "held-out.jsonl", tokenizer, 2)
    return [
        "rstar2-tiny-cpu",
        *OFF,
        "runner.task_type=preference",
        f"rollout.model.model_path={model}",
        f"preference.train_data_paths=[{root / 'mcts.jsonl'}]",
        f"preference.val_data_paths=[{root / 'held-out.jsonl'}]",
        "preference.min_distance=1",
        "preference.lr=1e-3",
        "preference.batch_size=8",
        "preference.epochs=2",
        f"runner.output_dir={root / 'results'}",
        "runner.experiment_name=ppm",
    ]


def test_trees_without_pairs_and_comparisons_without_room_end_with_1(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Before Ray starts."""
    assert main([*words, "preference.min_distance=500"]) == 1
    assert "no pair to train on in 8 trees" in capfd.readouterr().err
    short = ["data.max_prompt_length=32", "algorithm.sampling_params.max_new_tokens=32", "runner.seq_length=64"]
    assert main([*words, *short, "runner.max_tokens_per_mbs=64"]) == 1
    assert "a micro-batch has room for 64: raise runner.max_tokens_per_mbs" in capfd.readouterr().err


def test_a_dry_run_reads_the_trees(words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--dry-run"]) == 0
    trees = tmp_path / "mcts.jsonl"
    given = next(word for word in words if word.startswith("preference.train_data_paths")).partition("=")[2].strip("[]")
    trees.write_text(Path(given).read_text().replace('"mode": "mcts"', '"mode": "beam"'))
    assert main([*words, f"preference.train_data_paths=[{trees}]", "--dry-run"]) == 2
    assert f"{trees}:1: a tree of beam; only trees of MCTS have the Q of steps" in capfd.readouterr().err


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_run_learns_its_pairs_and_exports_a_classifier(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # the run starts its own head, which leaves nothing
    command = [sys.executable, "-m", "rstar2_megatron.runs.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "eval/preference_loss 0.6931" in done.stdout
    run = Path(words[-2].partition("=")[2]) / "ppm"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[0]["train/preference/loss"] == pytest.approx(0.6931, abs=1e-3)
    assert rows[-1]["eval/preference_accuracy"] == 1.0 and rows[-1]["eval/preference_loss"] < 0.65
    assert (run / "curves.png").stat().st_size > 5_000 and (run / "finished.json").is_file()
    assert (run / "checkpoints" / f"global_step_{len(rows)}" / "actor").is_dir()
    model = AutoModelForSequenceClassification.from_pretrained(run / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")

    def score(text: str) -> float:
        prompt = "<|im_start|>user\nWhat is 12+5?"
        ids = tokenizer.encode(f"{prompt}{text}<|im_end|>", add_special_tokens=False)
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits[0, 0])

    assert score("a good way: add them") > score("a bad way: guess the number")
