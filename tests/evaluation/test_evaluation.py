"""`python -m rstar2_megatron.evaluation` with every part real: SGLang, the agent loop, the Code Judge, the grader."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rstar2_megatron.data.problems import read_problems
from rstar2_megatron.evaluation.__main__ import configure, default_out, main, parse
from rstar2_megatron.evaluation.model_directory import hugging_face_directory
from rstar2_megatron.evaluation.samples import SampleFile
from rstar2_megatron.search.__main__ import main as search
from tests.e2e.runs import ProgramRun, read_jsonl
from tests.evaluation.rows import row
from tests.rollout.memorised import CONVERSATIONS, SETTINGS
from tests.runs.inputs.models import CONFIG, write_directory

OVERRIDES = [
    f"agentloop.system_prompt='{SETTINGS.system_prompt}'",
    "agentloop.user_prefix=''",
    "actor.model.precision=fp32",
    "rollout.max_total_tokens=4096",
    "rollout.max_running_requests=8",
    "data.max_prompt_length=400",
    "tools.codejudge.num_workers=1",
    "tools.codejudge.time_limit_s=2",
    "reward.num_workers=1",
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "memorised.jsonl"
    rows = [{"prompt": f"{name}?", "solutions": ["42"], "query_id": name} for name in CONVERSATIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(model: Path, data: Path, out: Path) -> list[str]:
    flags = ["--model", str(model), "--data", str(data), "--out", str(out), "-k", "2"]
    flags += ["--temperature", "0", "--max-turns", "2", "--max-tokens", "400"]
    return [sys.executable, "-m", "rstar2_megatron.evaluation", *flags, *OVERRIDES]


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_stopped_evaluation_goes_on_and_scores(memorised_model: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = command(memorised_model, data, out)
    first = ProgramRun(words, tmp_path / "first.log").start()
    # one conversation's program runs until the judge's limit, so others are on disk while it is under way
    first.wait_for(lambda: len(read_jsonl(out / "trajectories.jsonl")) >= 1, 240, "a trajectory")
    first.send(signal.SIGINT)
    assert first.wait(60) == 130, first.text()[-3000:]
    first.assert_nothing_left()
    before = (out / "trajectories.jsonl").read_text()
    assert 1 <= before.count("\n") < 6, "the stop came too late to test anything"

    second = ProgramRun(words, tmp_path / "second.log").start()
    assert second.wait(240) == 0, second.text()[-3000:]
    second.assert_nothing_left()
    assert (out / "trajectories.jsonl").read_text().startswith(before)
    rows = read_jsonl(out / "trajectories.jsonl")
    drawn = [(row["query_id"], row["rollout_index"]) for row in rows if row["finish_reason"] != "infrastructure"]
    assert sorted(drawn) == sorted((name, i) for name in CONVERSATIONS for i in range(2))
    outcomes = {row["query_id"]: [call["outcome"] for call in row["tool_calls"]] for row in rows}
    assert outcomes == {"right": ["ok"], "loop": ["timeout"], "broken": ["malformed"]}

    scores = json.loads((out / "scores.json").read_text())["scores"]["memorised"]
    assert scores["average"]["value"] == 1.0 and scores["majority"]["value"] == 1.0
    assert scores["tools"]["tool_calls"] == 1.0
    assert scores["tools"]["tool_error_ratio"] == pytest.approx(2 / 3)
    assert scores["missing"] == 0
    assert "avg@2" in second.text() and "100.0 [43.9, 100.0]" in second.text()


def model_of_context(directory: Path, tokens: int) -> Path:
    write_directory(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": tokens}))
    return directory


def test_the_papers_protocol_is_the_default(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut down to the context of a model that has less."""
    for tokens, response in ((40_960, 30 * 1024), (4096, 4096 - 8)):
        model = model_of_context(tmp_path / str(tokens), tokens)
        _, sampling = configure(parse(["--model", str(model), "--data", str(data)]))
        spec = sampling.spec
        params = spec.sampling
        assert (spec.samples, params.temperature, spec.max_assistant_turns, params.max_new_tokens) == (16, 0.6, 30, response)
    assert "share the model's 4088 tokens" in capsys.readouterr().err


def test_attempts_sample_by_seeds_of_their_own_where_requests_do(data: Path, tmp_path: Path) -> None:
    """Without a seed all k attempts of an engine with request_seeds are one draw."""
    model = model_of_context(tmp_path / "model", 4096)
    for words, seed in (([], None), (["rollout.request_seeds=True", "actor.seed=7"], 7)):
        _, sampling = configure(parse(["--model", str(model), "--data", str(data), *words]))
        assert sampling.spec.seed == seed


def test_late_tries_stand_beside_the_scores(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every attempt is on disk already, so that nothing is started."""
    model, out = model_of_context(tmp_path / "model", 4096), tmp_path / "out"
    words = ["--model", str(model), "--data", str(data), "--out", str(out), "-k", "1", "rollout.trajectory_timeout_s=300"]
    settings, sampling = configure(parse(words))
    file, problems = SampleFile(out / "trajectories.jsonl", sampling.identity), read_problems([data], settings.data)
    file.open(problems)
    for n, p in enumerate(problems):
        drawn = row(p.query_id, prompt=p.prompt, solutions=p.solutions)
        for line in [drawn | {"finish_reason": "infrastructure", "late": True}] * n + [drawn]:
            file.append(line)
    assert main(words) == 0
    said = "3 tries took longer than rollout.trajectory_timeout_s was for them and were drawn again; these are the long ones"
    assert said in capsys.readouterr().out and said in (out / "scores.txt").read_text()
    assert json.loads((out / "scores.json").read_text())["late_tries"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "neither a Hugging Face directory"),
        (["--max-tokens", "999999"], "exceeds the context"),
        (["--data", "missing.jsonl"], "missing.jsonl does not exist"),
        (["rollout.max_runing_requests=3"], "rollout.max_running_requests"),
    ],
)
def test_bad_input_ends_with_2_before_anything_starts(
    data: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of_context(tmp_path / "model", 4096)
    assert main(["--model", str(model), "--data", str(data), *words]) == 2
    assert message in capsys.readouterr().err


def test_results_of_other_settings_end_with_2(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = model_of_context(tmp_path / "model", 4096), tmp_path / "out"
    out.mkdir()
    for name, program in {"trajectories": main, "mcts": search}.items():
        (out / f"{name}.jsonl").write_text("{}\n")
        (out / f"{name}.jsonl.settings.json").write_text("{}")
        assert program(["--model", str(model), "--data", str(data), "--out", str(out)]) == 2
        assert f"{name}.jsonl was made with other settings" in capsys.readouterr().err


def test_worked_solutions_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every score would be 0."""
    model, path = model_of_context(tmp_path / "model", 4096), tmp_path / "worked.jsonl"
    path.write_text(json.dumps({"prompt": "1+1?", "solutions": "we add both of the numbers " * 5}) + "\n")
    for program in (main, search):
        assert program(["--model", str(model), "--data", str(path)]) == 2
        assert "1 of 1 problems have worked solutions or none, which no answer equals" in capsys.readouterr().err


def test_bad_weights_end_with_2_and_ignored_ones_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_directory(tmp_path / "model")
    words = ["--model", str(model), "--data", str(tmp_path / "none.jsonl")]
    weights = load_file(model / "model.safetensors")
    save_file(weights, model / "old-backup.safetensors")
    assert main(words) == 2
    assert f"note: {model}: old-backup.safetensors (1 files) is not loaded" in capsys.readouterr().err
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, model / "model.safetensors")
    for program in (main, search):
        assert program(words) == 2
        assert f"error: {model}/model.safetensors: model.norm.weight holds NaN or infinity" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_ends_with_2_as_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_directory(tmp_path / "model")
    words = ["--model", str(model), "--data", str(tmp_path / "none.jsonl")]
    for words_of_tokenizer, sentence in ((60, "they are of different models"), (700, "the model's embedding 640: enlarge it")):
        vocab = {f"w{i}": i for i in range(words_of_tokenizer)}
        (model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        for program in (main, search):
            assert program(words) == 2
            told = capsys.readouterr().err
            assert f"error: {model}/tokenizer.json has {words_of_tokenizer} tokens" in told and sentence in told
    (model / "tokenizer.json").unlink()
    assert main(words) == 2 and f"{model} has no tokenizer (tokenizer.json" in capsys.readouterr().err


def test_results_of_a_run_lie_in_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "global_step_3").mkdir(parents=True)
    (run / "config.yaml").touch()
    (run / "metrics.jsonl").touch()
    assert default_out(run / "checkpoints" / "global_step_3", "evaluation") == run / "evaluation" / "global_step_3"
    assert default_out(tmp_path / "Qwen", "search") == Path("evaluations/Qwen")


def test_of_a_run_that_goes_on_the_newest_checkpoint_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its model/ is that of fewer steps, until it finishes again."""
    run = tmp_path / "run"
    for place in ("model", "checkpoints/global_step_2/huggingface", "checkpoints/global_step_10/huggingface"):
        (run / place).mkdir(parents=True)
        (run / place / "config.json").touch()
    for step in (2, 10):
        (run / f"checkpoints/global_step_{step}/actor").mkdir()
        (run / f"checkpoints/global_step_{step}/actor/metadata.json").touch()
        (run / f"checkpoints/global_step_{step}/data").mkdir()
        (run / f"checkpoints/global_step_{step}/data/data.pt").touch()
    newest = run / "checkpoints/global_step_10"
    os.utime(run / "model/config.json", (1, 1))
    assert hugging_face_directory(run) == newest / "huggingface"
    assert capsys.readouterr().out == f"the model is that of {newest}, because the run has gone on behind its model/\n"
    (run / "model/config.json").touch()  # exported at the end
    assert hugging_face_directory(run) == run / "model"
    shutil.rmtree(run / "checkpoints")
    assert hugging_face_directory(run) == run / "model"


def test_a_checkpoint_of_verl_is_not_taken_for_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "global_step_100" / "actor" / "huggingface").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"global_step_100 is neither .* `python -m verl.model_merger merge`"):
        hugging_face_directory(tmp_path / "global_step_100")


def test_data_may_be_named_in_several_places() -> None:
    assert parse(["--model", "m", "--data", "a", "b", "--data", "c"]).data == [Path("a"), Path("b"), Path("c")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "nan"], "--temperature nan and --top-p 1.0: give >= 0 and (0, 1]"),
        (["--temperature", "inf"], "--temperature inf"),
        (["--top-p", "nan"], "--top-p nan"),
        (["--out", __file__], f"--out {__file__} is a file; name a directory"),
    ],
)
def test_values_that_no_run_can_have_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--data", "d", *words])
    assert message in capsys.readouterr().err


def test_sampling_keys_of_the_configuration_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--model", "m", "--data", "d", "evaluation.temperature=1"])
    assert "--temperature" in capsys.readouterr().err
