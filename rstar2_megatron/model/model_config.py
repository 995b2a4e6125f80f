"""The shape of a model, read from a Hugging Face config.json; parameter and FLOP counts.

Pure: no torch, no transformers, so that `--dry-run` takes milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rstar2_megatron.model.config_json import DEFAULTS, is_positive, key_problems, read_object

_CLASSIFIER = "ForSequenceClassification"
_FOREIGN = {
    "adapter_config.json": "a LoRA adapter, which is not loaded: merge it into its model by merge_and_unload of peft, and give "
    "the directory of the result",
    "hf_quant_config.json": "a quantized model, which cannot be trained: take the model in bfloat16",
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's stretch of the rotary embedding beyond the length of pretraining (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder with rotary embeddings, grouped-query attention, and gated MLPs or experts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0
    """Experts of every layer; 0 for a dense model, whose MLP width is `intermediate_size`."""
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    rope_scaling: RopeScaling | None = None
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are scaled to sum to one."""
    scores: bool = False
    """A reward model: a head of one row at the last token (`score.weight`) in place of the vocabulary's."""
    score_head: bool = False
    """The directory holds a reward model, and no policy from which one is trained."""

    @classmethod
    def from_directory(cls, model_path: str | Path, *, scores: bool = False) -> ModelConfig:
        """Read `{model_path}/config.json`. Raises ValueError when it is missing or not supported.

        scores: the shape as a reward model; the directory may hold one, or a policy from which one is trained.
        """
        path = Path(model_path) / "config.json"
        for name, what in _FOREIGN.items():
            if path.with_name(name).is_file():
                raise ValueError(f"{path.with_name(name)}: this is {what}")
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: give a Hugging Face model directory (config.json, *.safetensors, tokenizer)"
            )
        raw = read_object(path)
        found = cls.from_dict(raw, where=str(path), scores=scores)
        if "model_type" not in raw:
            raise ValueError(f"{path} has no model_type, by which transformers finds the model's code; copy it again")
        return found

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json", *, scores: bool = False) -> ModelConfig:
        """Read the keys of a config.json. Raises ValueError for a model that the actor cannot train exactly."""
        architectures = raw.get("architectures")
        architecture = named = str(architectures[0]) if isinstance(architectures, list) and architectures else "(none)"
        if scores and architecture.endswith(_CLASSIFIER):
            if len(raw.get("id2label") or (0, 1)) != 1:  # without the key transformers has two labels
                raise ValueError(f"{where}: a reward model has one label, this classifier has others")
            architecture = architecture.removesuffix(_CLASSIFIER) + "ForCausalLM"
        if architecture not in DEFAULTS:
            raise ValueError(
                f"{where}: architecture {architecture} is not supported; "
                f"supported: {', '.join(DEFAULTS)} (docs/add_a_model.md adds one)"
            )
        raw = {**DEFAULTS[architecture], **raw}
        rope = _rope_parameters(raw, where)
        for problem in key_problems({**raw, **rope}, DEFAULTS[architecture]["model_type"]):
            raise ValueError(f"{where}: {problem}")
        if architecture == "MistralForCausalLM" and raw.get("sliding_window") is not None:
            raise ValueError(
                f"{where}: sliding_window={raw['sliding_window']}; only full causal attention is supported: take a version of "
                "the model without a window (Mistral 7B from v0.2 on), or set it to null if runner.seq_length stays below it"
            )
        heads = raw["num_attention_heads"]
        qwen3 = architecture.startswith("Qwen3")
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            rope_theta=float(rope["rope_theta"]),
            rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
            max_position_embeddings=raw.get("max_position_embeddings") or 32768,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=bool(raw.get("attention_bias", False)) if qwen3 else architecture == "Qwen2ForCausalLM",
            qk_norm=qwen3,
            rope_scaling=_rope_scaling(rope, where),
            scores=scores,
            score_head=named.endswith(_CLASSIFIER),
            **(_experts(raw) if architecture == "Qwen3MoeForCausalLM" else {}),
        )

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts of all layers; 0 for a dense model."""
        return self.num_layers * self.num_experts * 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def exported_keys(self) -> dict[str, Any]:
        """Keys of config.json in which an exported reward model differs from the policy that it was trained from."""
        if not self.scores:
            return {}
        return {
            "architectures": [self.architecture.removesuffix("ForCausalLM") + _CLASSIFIER],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }

    @property
    def head_parameters(self) -> int:
        return self.hidden_size * (1 if self.scores else self.vocab_size)

    @property
    def matmul_parameters(self) -> int:
        """Matrix weights that one token uses: projections, MLP or the token's experts, head."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.is_moe:
            expert = 3 * self.hidden_size * self.expert_intermediate_size
            mlp = self.hidden_size * self.num_experts + self.experts_per_token * expert
        return self.num_layers * (attention + mlp) + self.head_parameters

    @property
    def num_parameters(self) -> int:
        """All parameters: every expert, a tied embedding once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        per_layer = 2 * self.hidden_size
        per_layer += (q + 2 * kv) if self.qkv_bias else 0
        per_layer += 2 * self.head_dim if self.qk_norm else 0
        if self.is_moe:
            idle = self.num_experts - self.experts_per_token
            per_layer += idle * 3 * self.hidden_size * self.expert_intermediate_size
        shared = self.tie_word_embeddings and not self.scores
        embedding = 0 if shared else self.vocab_size * self.hidden_size
        return self.matmul_parameters + embedding + self.num_layers * per_layer + self.hidden_size

    def train_flops(self, lengths: list[int], trained_tokens: int | None = None) -> float:
        """FLOPs of one forward and backward over causal segments of `lengths` tokens (no recompute).

        6 per token and matrix weight that the token uses. Attention: 6 * h_q * d * S per token and layer at segment
        length S, which counts only the causal half. `trained_tokens`: number of tokens that the head runs
        on; None means all.
        """
        tokens = sum(lengths)
        head = self.head_parameters
        body = self.matmul_parameters - head
        attention = 6.0 * self.num_layers * self.num_heads * self.head_dim * sum(n * n for n in lengths)
        return 6.0 * body * tokens + attention + 6.0 * head * (tokens if trained_tokens is None else trained_tokens)


def _experts(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": raw.get("num_local_experts") or raw["num_experts"],  # transformers 5, 4
        "experts_per_token": raw["num_experts_per_tok"],
        "expert_intermediate_size": raw["moe_intermediate_size"],
        "norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
    }


def _rope_parameters(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The keys of the rotary embedding: rope_scaling (transformers 4), which transformers 5 prefers, or rope_parameters."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{where}: rope_scaling or rope_parameters is {given!r}, expected one object for all layers, or null")
    parameters = {"rope_theta": raw.get("rope_theta", 10000.0), **given}
    if not is_positive(parameters["rope_theta"]):
        raise ValueError(f"{where}: rope_theta={parameters['rope_theta']!r}, expected a number above 0")
    return parameters


def _rope_scaling(parameters: dict[str, Any], where: str) -> RopeScaling | None:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{where}: rope type {kind} is not supported; supported: default, llama3")
    if missing := [field.name for field in fields(RopeScaling) if not is_positive(parameters.get(field.name))]:
        raise ValueError(f"{where}: rope type llama3 lacks {', '.join(missing)}, numbers above 0")
    return RopeScaling(*(parameters[field.name] for field in fields(RopeScaling)))
