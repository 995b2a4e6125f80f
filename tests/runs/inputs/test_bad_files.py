"""A user's model and data with one mistake each: one sentence with the file and the remedy, exit 2, nothing is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rstar2_megatron.runs.inputs.output_directory import held_directory
from rstar2_megatron.runs.main import main
from rstar2_megatron.settings.load import ConfigError, load
from tests.runs.inputs.models import write_directory


class Case:
    """A good model, data and output directory, in which a case breaks one thing."""

    def __init__(self, root: Path) -> None:
        self.model, self.data = root / "model", root / "train.jsonl"
        self.output = root / "results"
        self.words: list[str] = []
        self.rows = [{"prompt": f"{i}+1?", "solutions": [str(i + 1)], "query_id": f"q{i}"} for i in range(20)]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        write_directory(self.model, shards=2)

    def arguments(self) -> list[str]:
        return [
            "rstar2-tiny-cpu",
            "cold_start.enabled=False",
            f"rollout.model.model_path={self.model}",
            f"data.train_data_paths=[{self.data}]",
            "data.val_data_paths=[]",
            f"runner.output_dir={self.output}",
            *self.words,
        ]

    def change(self, name: str, **keys: object) -> None:
        """Set keys of a JSON file of the model; None removes one."""
        path = self.model / name
        raw = {**json.loads(path.read_text()), **keys}
        path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))

    def line(self, number: int, content: bytes) -> None:
        lines = self.data.read_bytes().splitlines(keepends=True)
        lines[number - 1] = content + b"\n"
        self.data.write_bytes(b"".join(lines))


def _truncate(case: Case) -> None:
    shard = case.model / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])


def _lose_tensor(case: Case) -> None:
    raw = json.loads((case.model / "model.safetensors.index.json").read_text())
    for file in set(raw["weight_map"].values()):
        (case.model / file).unlink()
    write_directory(case.model, shards=2)
    case.change("config.json", num_hidden_layers=5)


def _file_as_output(case: Case) -> None:
    case.output.write_text("")


def _far_token(case: Case) -> None:
    tokenizer = json.loads((case.model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": 640, "content": "<|mine|>", "special": True})
    (case.model / "tokenizer.json").write_text(json.dumps(tokenizer))


def _no_end(case: Case) -> None:
    case.change("tokenizer_config.json", eos_token=None)
    case.change("config.json", eos_token_id=None)


def _other_vocabulary(case: Case) -> None:
    tokenizer = json.loads((case.model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"w{i}": i for i in range(100)}
    tokenizer["added_tokens"] = [{"id": 100, "content": "<|im_start|>"}, {"id": 101, "content": "<|im_end|>"}]
    (case.model / "tokenizer.json").write_text(json.dumps(tokenizer))


def _no_turns(case: Case) -> None:
    tokenizer = json.loads((case.model / "tokenizer.json").read_text())
    tokenizer["added_tokens"] = [{"id": 602, "content": "</s>", "special": True}]
    (case.model / "tokenizer.json").write_text(json.dumps(tokenizer))
    case.change("tokenizer_config.json", eos_token="</s>")


CASES: dict[str, tuple[Callable[[Case], object], str]] = {
    "not UTF-8": (
        lambda c: c.line(3, b'{"prompt": "gr\xfc\xdfe?", "solutions": ["1"]}'),
        "{data}:3: byte 0xfc at column 15 is not UTF-8; convert the file from its own encoding, e.g. iconv",
    ),
    "a raw control character": (
        lambda c: c.line(2, b'{"prompt": "a\x01b", "solutions": ["1"]}'),
        "{data}:2: not JSON (a raw control character U+0001 inside a string at column 14); write \\u0001 in its place",
    ),
    "an escaped control character": (
        lambda c: c.line(4, rb'{"prompt": "a\u0000b", "solutions": ["1"]}'),
        "{data}:4: 'prompt' has the control character U+0000, which no reader sees; remove it",
    ),
    "a config without heads": (
        lambda c: c.change("config.json", num_attention_heads=None),
        "{model}/config.json: num_attention_heads=None, expected a whole number from 1 on; copy",
    ),
    "a config that is not JSON": (
        lambda c: (c.model / "config.json").write_bytes(b'{"a": \xff'),
        "{model}/config.json is not JSON",
    ),
    "another architecture": (
        lambda c: c.change("config.json", architectures=["GemmaForCausalLM"]),
        "GemmaForCausalLM is not supported; supported: Qwen2ForCausalLM, ",
    ),
    "a truncated shard": (_truncate, "{model}/model-1.safetensors is truncated or damaged: "),
    "an empty shard": (
        lambda c: (c.model / "model-0.safetensors").write_bytes(b""),
        "{model}/model-0.safetensors is truncated or damaged: 0 bytes, ",
    ),
    "a missing shard": (
        lambda c: (c.model / "model-0.safetensors").unlink(),
        "model.safetensors.index.json names model-0.safetensors, which {model} does not hold; copy",
    ),
    "missing tensors": (_lose_tensor, "{model} has no tensor model.layers.4.input_layernorm.weight and 11 more"),
    "another embedding": (
        lambda c: c.change("config.json", vocab_size=700),
        "vocab_size=700, but model.embed_tokens.weight has 640 rows; set vocab_size=640",
    ),
    "an added token beyond the embedding": (
        _far_token,
        "{model}/tokenizer.json has 641 tokens, e.g. the added token '<|mine|>' (640), the model's embedding 640",
    ),
    "another vocabulary": (_other_vocabulary, "has 102 tokens, the model's embedding 640: they are of different models"),
    "an end of text that no token is": (
        lambda c: c.change("config.json", eos_token_id=7),
        "config.json: eos_token_id=7 is no special token of tokenizer.json: model and tokenizer are of different",
    ),
    "no end of text": (_no_end, "{model} names no end-of-text token: set eos_token in tokenizer_config.json"),
    "a template without tools": (
        lambda c: (
            c.change("tokenizer_config.json", chat_template="{{ messages[0].content }}"),
            c.words.extend(["agentloop.chat_template=tokenizer", "agentloop.system_prompt=null", "agentloop.user_prefix=null"]),
        ),
        "agentloop.chat_template=tokenizer, but the chat template of {model} has no tools",
    ),
    "a tokenizer without turns": (_no_turns, "the tokenizer of {model} has neither <|im_start|> and <|im_end|> nor a chat"),
    "an output directory that is a file": (_file_as_output, "{output} is a file, and the run would write into"),
}


@pytest.mark.parametrize("name", CASES)
def test_one_sentence(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    break_it, expected = CASES[name]
    break_it(case)
    assert main(case.arguments()) == 2
    out, error = capfd.readouterr()
    (sentence,) = [line for line in error.splitlines() if line.startswith("error: ")]
    places = {"data": str(case.data), "model": str(case.model), "output": str(case.output)}
    for key, place in places.items():
        expected = expected.replace("{" + key + "}", place)
    assert expected in sentence
    assert "Traceback" not in out + error and "Traceback" not in sentence
    assert not case.output.is_dir() or not any(case.output.rglob("*.jsonl"))


def test_what_of_the_problems_is_used_otherwise_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    asked = [{"role": "system", "content": "All numbers are in base 7."}, {"role": "user", "content": "3+5?"}]
    case.line(2, json.dumps({"prompt": asked, "solutions": ["11"]}).encode())
    words = [*case.arguments(), f"data.val_data_paths=[{case.data}]", "--dry-run"]
    assert main(words) == 0
    said = capfd.readouterr().err
    assert "data.train_data_paths: 1 problems begin with a system message, which the model does not read; set agentloop" in said
    assert f"data.val_data_paths={case.data} is trained on" in said
    assert main([*words, "agentloop.use_data_system_prompt=True"]) == 0
    assert "system message" not in capfd.readouterr().err


def test_a_directory_of_a_run_of_another_task(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its checkpoints would be resumed, or its model moved aside."""
    case = Case(tmp_path)
    assert main([*case.arguments(), "runner.experiment_name=mine", "--dry-run"]) == 0
    (case.output / "mine").mkdir(parents=True)
    (case.output / "mine" / "config.yaml").write_text("runner: {task_type: sft}\n")
    assert main([*case.arguments(), "runner.experiment_name=mine", "--dry-run"]) == 2
    said = f"{case.output}/mine has a run of runner.task_type=sft, this one is of reasoning; give each its"
    assert said in capfd.readouterr().err


def test_a_read_only_output_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    case.output.mkdir()
    case.output.chmod(0o555)
    mounted = os.geteuid() == 0  # root may write where the mode says no
    if mounted and subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(case.output)]).returncode:
        pytest.skip("cannot mount a read-only file system here")
    try:
        assert main(case.arguments()) == 2
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(case.output)], check=True)
    sentence = capfd.readouterr().err.splitlines()[-1]
    assert sentence.startswith(f"error: runner.output_dir={case.output} cannot be written (")
    assert sentence.endswith("set it to a directory that you may write")


def test_the_good_case_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    case = Case(tmp_path)
    assert main([*case.arguments(), "--dry-run"]) == 0
    assert "warning" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stored", "precision", "told"),
    [(torch.float32, "bf16", True), (torch.bfloat16, "fp32", False), (torch.bfloat16, "bf16", False)],
)
def test_rounded_weights_are_told(
    stored: torch.dtype, precision: str, told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """bfloat16 weights are exact in float32, so only the reverse is worth a line."""
    case = Case(tmp_path)
    write_directory(case.model, shards=2, dtype=stored)
    words = [f"actor.model.precision={precision}", f"rollout.model.precision={precision}", "--dry-run"]
    assert main([*case.arguments(), *words]) == 0
    assert ("are float32 and are rounded to bfloat16; set actor.model.precision=fp32" in capfd.readouterr().err) is told


def test_a_second_run_of_a_directory_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Across processes; the first one's files stay, and the name is free when its process has ended."""
    case = Case(tmp_path)
    settings = load(case.arguments()[0], case.arguments()[1:]).settings
    kept = case.output / settings.runner.experiment_name / "metrics.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text('{"step": 1}\n')
    program = (
        "import sys; from rstar2_megatron.settings.load import load\n"
        "from rstar2_megatron.runs.inputs.output_directory import held_directory\n"
        "with held_directory(load(sys.argv[1], sys.argv[2:]).settings): print('held', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", program, *case.arguments()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        assert main(case.arguments()) == 2
        sentence = capfd.readouterr().err.splitlines()[-1]
        assert f"is in use by a run (process {first.pid} on " in sentence
        assert "set runner.experiment_name to another name" in sentence
        assert kept.read_text() == '{"step": 1}\n'
    finally:
        first.kill()
        first.wait()
    with held_directory(settings), pytest.raises(ConfigError, match=f"process {os.getpid()} on"), held_directory(settings):
        pass
