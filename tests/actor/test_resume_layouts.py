"""A checkpoint of every layout loads bit for bit, into its own and into another layout, and training continues alike.

The model's sizes are no powers of two, so that gradient buckets need padding; head and embedding are tied or not.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rstar2_megatron.actor.convert import checkpoint_weights
from rstar2_megatron.model.model_config import ModelConfig
from tests.actor.programs import checkpoints
from tests.actor.ranks import RankPool
from tests.actor.tiny import sequences, settings, write_model

BATCHES = [sequences(6, seed=40 + i) for i in range(2)]
SHAPE: dict[str, Any] = {
    "vocab_size": 326,
    "hidden_size": 72,
    "intermediate_size": 150,
    "num_hidden_layers": 12,
    "num_attention_heads": 18,
    "num_key_value_heads": 6,
}
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {**TP2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
PP2_VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
BF16 = {"precision": "bf16"}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
HOST = {"optimizer_cpu_offload": True}
PLAIN = {"use_distributed_optimizer": False}


@dataclass(frozen=True)
class Row:
    name: str
    ranks: int
    model: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)
    bucket_size: int | None = None
    tier: str = "release"
    """Of the tied model, which a pipeline shares between two stages; the untied one is for CI without a pipeline."""


# A row's other layout is the one before it; the first row's is the last.
DENSE = [
    Row("single", 1),
    Row("PP2", 2, PP2, tier="default"),
    Row("TP2", 2, TP2, tier="default"),
    Row("DP2, overlap, many buckets", 2, {}, OVERLAP, 9_000, tier="ci"),
    Row("host optimizer: PP2, interleaved", 2, PP2_VP2, HOST, tier="ci"),
    Row("TP2, SP, PP2", 4, {**TP2_SP, **PP2}, tier="ci"),
    Row("CP2", 2, CP2, tier="ci"),
    Row("DP2", 2),
    Row("PP2, interleaved", 2, PP2_VP2),
    Row("TP2, SP", 2, TP2_SP),
    Row("host optimizer", 1, {}, HOST),
    Row("TP2, SP, CP2", 4, {**TP2_SP, **CP2}, tier="ci"),
    Row("PP2, interleaved, DP2, overlap, many buckets", 4, PP2_VP2, OVERLAP, 9_000, tier="ci"),
    Row("TP2, DP2, overlap, many buckets", 4, TP2, OVERLAP, 9_000),
    Row("PP2, CP2", 4, {**PP2, **CP2}),
    Row("CP2, DP2", 4, CP2),
    Row("PP4", 4, {"pipeline_model_parallel_size": 4}),
    Row("CP4", 4, {"context_parallel_size": 4}),
    Row("TP2, SP, PP2, interleaved", 4, {**TP2_SP, **PP2_VP2}),
    Row("PP2, interleaved, CP2", 4, {**PP2_VP2, **CP2}),
    Row("host optimizer: TP2, SP", 2, TP2_SP, HOST),
    Row("host optimizer: PP2, interleaved, DP2, overlap", 4, PP2_VP2, {**OVERLAP, **HOST}, 9_000),
]
HALF = [
    Row("bf16: single", 1, BF16),
    Row("bf16: PP2", 2, {**BF16, **PP2}, tier="ci"),
    Row("bf16: PP2, DP2, overlap, many buckets", 4, {**BF16, **PP2}, OVERLAP, 9_000),
    Row("bf16, host optimizer: PP2, DP2", 4, {**BF16, **PP2}, HOST),
]
# megatron-core stores the state of its plain optimizer in another form.
WITHOUT_DISTRIBUTED_OPTIMIZER = [
    Row("plain optimizer: single", 1, {}, PLAIN),
    Row("plain optimizer: PP2", 2, PP2, PLAIN, tier="ci"),
    Row("plain optimizer: TP2, DP2", 4, TP2, PLAIN),
]
HALF_WITHOUT_DISTRIBUTED_OPTIMIZER = [
    Row("plain optimizer, bf16: DP2", 2, BF16, PLAIN),
    Row("plain optimizer, bf16: PP2", 2, {**BF16, **PP2}, PLAIN),
]
EXPERTS = [
    Row("experts", 1),
    Row("experts: EP2", 2, EP2, tier="ci"),
    Row("experts: PP2, EP2", 4, {**PP2, **EP2}),
    Row("experts: DP2, overlap, many buckets", 2, {}, OVERLAP, 9_000),
    Row("experts: TP2, SP", 2, TP2_SP),
    Row("experts: TP2, SP, EP2", 2, {**TP2_SP, **EP2}, tier="ci"),
    Row("experts: CP2, EP2, DP2", 4, {**CP2, **EP2}),
    Row("experts: TP2, SP, EP2, DP2, overlap", 4, {**TP2_SP, **EP2}, OVERLAP),
    Row("host optimizer: experts, EP2", 2, EP2, HOST),
]


def _cases() -> list[Any]:
    cases = []
    for rows, which in (
        (DENSE, "dense"),
        (HALF, "dense"),
        (WITHOUT_DISTRIBUTED_OPTIMIZER, "dense"),
        (HALF_WITHOUT_DISTRIBUTED_OPTIMIZER, "dense"),
        (EXPERTS, "experts"),
    ):
        for tie in (True, False):
            for number, row in enumerate(rows):
                untied = "ci" if row.tier != "release" and "PP2" not in row.name else "release"
                tier = row.tier if tie else untied
                marks = [] if tier == "default" else [getattr(pytest.mark, tier)]
                name = f"{row.name}, {'tied' if tie else 'untied'}"
                cases.append(pytest.param(row, rows[number - 1], which, tie, id=name, marks=marks))
    return cases


class Checkpoints:
    """The checkpoint of each row, made when first asked for."""

    def __init__(self, pool: RankPool, root: Path) -> None:
        self._pool, self._root = pool, root
        self._made: dict[tuple[str, str, bool], tuple[Path, dict[str, int], dict[str, float]]] = {}

    def model(self, which: str, tie: bool) -> Path:
        directory = self._root / f"{which}-{tie}"
        if not directory.exists():
            write_model(directory, tie=tie, experts={} if which == "experts" else None, **SHAPE)
        return directory

    def of(self, row: Row, which: str, tie: bool) -> tuple[Path, dict[str, int], dict[str, float]]:
        """(directory, checksums of the weights that were saved, the uninterrupted run's next step)."""
        key = (row.name, which, tie)
        if key not in self._made:
            directory = self._root / str(len(self._made)) / "actor"
            directory.parent.mkdir()
            config = settings(model=row.model, optim=row.optim)
            arguments = (config, self.model(which, tie), directory, BATCHES, row.bucket_size)
            results = self._pool.run(checkpoints.save_and_continue, row.ranks, *arguments)
            self._made[key] = (directory, *results[0])
        return self._made[key]


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(pool, tmp_path_factory.mktemp("resume-layouts"))


@pytest.mark.parametrize("row, before, which, tie", _cases())
def test_resumes_in_this_layout_from_its_own_and_from_another(
    pool: RankPool, saved: Checkpoints, row: Row, before: Row, which: str, tie: bool
) -> None:
    own, other = saved.of(row, which, tie), saved.of(before, which, tie)
    config = settings(model=row.model, optim=row.optim)
    results = pool.run(
        checkpoints.load_each,
        row.ranks,
        config,
        saved.model(which, tie),
        [own[0], other[0], own[0]],
        BATCHES[1],
        row.bucket_size,
        1_000_000,  # a twelfth of the state and less: loads take many pieces
    )
    for rank in results:  # every rank exports every weight
        assert [checksums for checksums, _ in rank] == [own[1], other[1], own[1]]
    (_, same), (_, after_other), (_, again) = results[0]
    for key in ("actor/policy_loss", "actor/grad_norm", "actor/lr", "actor/optimizer_steps"):
        assert same[key] == own[2][key] == again[key], key
    loss, norm = (1e-5, 1e-4) if row.model.get("precision") != "bf16" else (5e-2, 5e-2)
    assert after_other["actor/policy_loss"] == pytest.approx(other[2]["actor/policy_loss"], abs=loss)
    assert after_other["actor/grad_norm"] == pytest.approx(other[2]["actor/grad_norm"], rel=norm)
    assert after_other["actor/optimizer_steps"] == other[2]["actor/optimizer_steps"]


def test_a_checkpoint_of_another_form_or_with_other_weights_is_refused(
    pool: RankPool, saved: Checkpoints, tmp_path: Path
) -> None:
    """Settings that change the stored form are named; a file with one bit flipped is not trained on."""
    directory, _, _ = saved.of(DENSE[0], "dense", True)
    which = saved.model("dense", True)
    for other, key in ((settings(model=BF16), "precision"), (settings(optim=PLAIN), "use_distributed_optimizer")):
        with pytest.raises(RuntimeError, match=rf"was saved with actor\.\w+\.{key}=\w+, this run has \w+: set"):
            pool.run(checkpoints.load_each, 1, other, which, [directory], BATCHES[1])
    damaged = tmp_path / "actor"
    shutil.copytree(directory, damaged)
    config = ModelConfig.from_directory(which)
    embedding = dict(checkpoint_weights(damaged, config))["model.embed_tokens.weight"]
    stored = embedding.numpy().tobytes()[:4096]
    flipped = bytes([stored[0] ^ 1]) + stored[1:]
    for file in damaged.glob("*.distcp"):  # the weight, and the optimizer's copy of it
        file.write_bytes(file.read_bytes().replace(stored, flipped))
    with pytest.raises(ValueError, match=r"are not those that were saved, e\.g\. model\.embed_tokens"):
        dict(checkpoint_weights(damaged, config))
    with pytest.raises(RuntimeError, match=r"ValueError: .*are not those that were saved"):
        pool.run(checkpoints.load_each, 1, settings(), which, [damaged], BATCHES[1])
