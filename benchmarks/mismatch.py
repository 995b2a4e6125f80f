"""`python -m benchmarks.mismatch`: training where the engines' weights are not the actor's, with and without correction.

    python -m benchmarks.mismatch --seeds 0 1 2 --noise 0.05 [--once] --steps 50 --out results/mismatch [NAME] [key=value ...]

Every run trains the tiny recipe from one cold start, with the policy's log-probs before the update as the old ones. The
engines of all arms but `exact` get weights with noise (`noisy_actor`): the mean |log-prob of engine - of actor| is about
`--noise` nats; at 0.2 the tiny model's engines answer few problems. `noise` has no correction, `noise-tis` and the others one
of `docs/asynchronous.md`. A finished run is not repeated, so after a stop the same command continues. At its end the curves of
the arms are drawn, with the held-out accuracy of the weights before and after training, which is measured without noise; the
pass rate is that of the engines with noise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.logged import logged
from benchmarks.noisy_actor import ONCE, SIZE, NoisyActor
from benchmarks.verl.beside import Beside, seed_words
from rstar2_megatron.cluster import launch
from rstar2_megatron.records.whole_file import write_jsonl
from rstar2_megatron.report.curves import main as draw
from rstar2_megatron.runs.main import main as run
from rstar2_megatron.settings.load import load_settings
from rstar2_megatron.tiny.resolve import resolve_tiny

EXACT = "exact"
ARMS: dict[str, tuple[str, ...]] = {
    EXACT: (),
    "noise": (),
    "noise-tis": ("algorithm.importance_sampling_fix=True",),
    "noise-icepop": ("algorithm.icepop=[0.5,5]",),
    "noise-mis": ("algorithm.mis_geometric=[0.9,1.1]",),
    "noise-decoupled": ("algorithm.decoupled_loss=True",),
}
PANELS = ("held-out", "pass-rate", "logprob-diff", "grad-norm")
_EVERY_ARM = (
    "algorithm.recompute_logprobs=True",
    "runner.save_interval=-1",  # a run that was stopped begins again: the noise is not in checkpoints
    "runner.val_check_interval=-1",  # between steps it would be of the weights with noise
)
_CHILD = "--with-noise"


@dataclass(frozen=True)
class Mismatch(Beside):
    """Runs of the arms, from one model."""

    once: bool = False
    """The same noise at each weight sync."""

    def train(self, arm: str, seed: int, noise: float, words: Sequence[str]) -> Path:
        directory = self.out / f"{arm}-{seed}"
        if (directory / "finished.json").is_file():
            return directory
        all_words = [*self.overrides, *words, *seed_words(seed), *_EVERY_ARM, *ARMS[arm]]
        all_words += self.place(directory.name)
        program = "rstar2_megatron.runs.main" if arm == EXACT else "benchmarks.mismatch"
        command = [sys.executable, "-m", program, *([] if arm == EXACT else [_CHILD]), self.config, *all_words]
        environment = {**os.environ, SIZE: str(noise), ONCE: str(int(self.once))}
        logged(command, self.out / f"{directory.name}.log", environment, Path.cwd())
        return directory

    def with_held_out(self, directory: Path) -> Path:
        """A copy of a run's log with the evaluations before and after it, which a run keeps apart from its steps."""
        log, held_out = directory / "metrics.jsonl", json.loads((directory / "held_out.json").read_text())
        *rows, last = map(json.loads, log.read_text().splitlines())
        before = {"step": 0.0, "eval/average": held_out["before_rl"]}
        copy = self.out / "drawn" / directory.name / log.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(copy, [before, *rows, last | {"eval/average": held_out["after_rl"]}])
        return copy.parent

    def compare(self, noise: float) -> int:
        """Run what is not finished, draw, and print the final accuracies; returns the exit code of the drawing."""
        settings = resolve_tiny(load_settings(self.config, self.overrides))
        self.out.mkdir(parents=True, exist_ok=True)
        start = self.start_model(settings)
        paths: dict[str, list[Path]] = {arm: [] for arm in self.arms}
        for seed in self.seeds:  # so that a comparison that is stopped has whole seeds
            for arm in self.arms:
                paths[arm].append(self.train(arm, seed, noise, start))
        for arm, directories in paths.items():
            final = [json.loads((d / "held_out.json").read_text())["after_rl"] for d in directories]
            print(f"{arm}: held-out {mean(final):.3f} of seeds {', '.join(f'{x:.3f}' for x in final)}")
        arms = [f"{arm}={','.join(str(self.with_held_out(d)) for d in directories)}" for arm, directories in paths.items()]
        words = [word for arm in arms for word in ("--arm", arm)]
        return draw([*words, "--metrics", *PANELS, "--out", str(self.out)])


def main() -> int:
    if sys.argv[1:2] == [_CHILD]:
        launch.ActorWorker = NoisyActor  # type: ignore[misc]
        return run(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="NAME and key=value of the runs (rstar2-tiny-cpu)")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[EXACT, "noise", "noise-tis"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--noise", type=float, default=0.05, help="nats a trained token, in the mean")
    parser.add_argument("--once", action="store_true", help="the same noise at each weight sync")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("results/mismatch"))
    options = parser.parse_intermixed_args()
    if not options.noise > 0:
        parser.error(f"--noise {options.noise}: give a number of nats above 0")
    names = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    mismatch = Mismatch(
        (names or ["rstar2-tiny-cpu"])[0],
        [*overrides, f"runner.max_steps={options.steps}"],
        options.arms,
        options.seeds,
        options.out,
        Path(sys.executable),
        options.once,
    )
    return mismatch.compare(options.noise)


if __name__ == "__main__":
    sys.exit(main())
