"""The policy as a megatron-core GPTModel: configuration, construction, forward to log-probs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from rstar2_megatron.actor.network.attention import rotary_frequencies
from rstar2_megatron.actor.network.layer_spec import Implementation, block_spec
from rstar2_megatron.actor.network.logprob import LogProbHead
from rstar2_megatron.actor.network.microbatch import MicroBatch
from rstar2_megatron.actor.network.score_head import ScoreHead
from rstar2_megatron.model.model_config import ModelConfig
from rstar2_megatron.settings.schema import ActorModelSettings

_UNFUSED = "NVTE_UNFUSED_ATTN"  # TransformerEngine: whether attention that stores all scores is allowed


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns log-probs and entropies of the wanted tokens, never full logits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _output_layer_without_apex():
            super().__init__(*args, **kwargs)
        if self.post_process:
            # GPTModel has no option for the class of its output layer. LogProbHead replaces only the forward; parameters,
            # names, sharding and tied-embedding marks stay.
            self.output_layer.__class__ = LogProbHead

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        # the only keyword that GPTModel.forward passes through unchanged
        result = self._head(hidden_states, **kwargs["loss_mask"])
        assert isinstance(result, Tensor)
        return result

    def _head(self, hidden: Tensor, **arguments: Any) -> Any:
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        return self.output_layer(hidden, weight, **arguments)


class ScoreModel(PolicyModel):
    """A reward model: the last stage has a score head in place of the vocabulary's and returns scores of the wanted tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            del self.output_layer  # GPTModel cannot be built without it
            self.score = ScoreHead(self.config, self.pg_collection.tp)

    def _head(self, hidden: Tensor, **arguments: Any) -> Any:
        return self.score(hidden, arguments["rows"])

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> Any:
        """The modules' own, because those of GPTModel and LanguageModule demand a vocabulary head."""
        whole = ensure_metadata_has_dp_cp_group(metadata)
        return super(LanguageModule, self).sharded_state_dict(prefix, sharded_offsets, whole)


@contextmanager
def _output_layer_without_apex() -> Iterator[None]:
    """Let megatron-core build its output layer with `gradient_accumulation_fusion` and without Apex.

    megatron-core 0.16.1 raises an error (tensor_parallel/layers.py:924), because its backward pass needs Apex's kernel.
    That pass is not used: LogProbHead adds to DDP's buffer itself, and all other fused layers are TransformerEngine's.
    """
    available = layers._grad_accum_fusion_available
    layers._grad_accum_fusion_available = True
    try:
        yield
    finally:
        layers._grad_accum_fusion_available = available


def transformer_config(
    model: ModelConfig, settings: ActorModelSettings, implementation: Implementation, device: str
) -> TransformerConfig:
    """megatron-core's configuration for this model and layout."""
    dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
    pipeline = settings.pipeline_model_parallel_size
    interleaved = (settings.virtual_pipeline_model_parallel_size or 1) > 1
    fused = device == "cuda"
    engine = implementation == "transformer_engine"
    recomputes_layers = settings.recompute_granularity == "full"  # method and num_layers apply only to "full"

    def leave(weight: Tensor) -> Tensor:  # weights are not initialised: all are read from the Hugging Face directory
        return weight

    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.intermediate_size,
        num_attention_heads=model.num_heads,
        num_query_groups=model.num_kv_heads,
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        qk_layernorm=model.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=leave,
        output_layer_init_method=leave,
        embedding_init_method=leave,
        use_cpu_initialization=False,
        tensor_model_parallel_size=settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=settings.virtual_pipeline_model_parallel_size if interleaved else None,
        context_parallel_size=settings.context_parallel_size,
        sequence_parallel=settings.sequence_parallel and settings.tensor_model_parallel_size > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        attention_softmax_in_fp32=True,
        calculate_per_token_loss=True,  # DDP then sums gradients; the loss arrives normalised
        # Packed micro-batches differ in length, so pipeline stages send each other shapes. megatron-core requires this
        # dispatcher for it even in dense models. Interleaving with batched p2p gives silently wrong losses.
        variable_seq_lengths=pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        **_expert_fields(model, settings, grouped=engine),
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        deallocate_pipeline_outputs=pipeline > 1,
        recompute_granularity=settings.recompute_granularity,
        recompute_method=settings.recompute_method if recomputes_layers else None,
        recompute_num_layers=settings.recompute_num_layers if recomputes_layers else None,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        persist_layer_norm=engine,
        apply_rope_fusion=engine,
        gradient_accumulation_fusion=engine,
    )


def _expert_fields(model: ModelConfig, settings: ActorModelSettings, *, grouped: bool) -> dict[str, Any]:
    """Settings for Qwen3's mixture of experts: softmax over all experts in fp32, top k, no dropped token.

    megatron-core computes the softmax over the chosen k only, which equals rescaling (`norm_topk_prob`).
    grouped: TransformerEngine's GEMM over all experts of a rank and its kernel that sorts tokens by expert. Otherwise the
    experts run one after the other.
    """
    if not model.is_moe:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_intermediate_size,
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": grouped,
        "moe_permute_fusion": grouped,
        "expert_model_parallel_size": settings.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def build_chunks(
    model: ModelConfig, settings: ActorModelSettings, implementation: Implementation, device: str
) -> tuple[TransformerConfig, list[Any]]:
    """This rank's model chunks (one, or one per virtual pipeline stage), weights not yet loaded."""
    config = transformer_config(model, settings, implementation, device)
    virtual = config.virtual_pipeline_model_parallel_size
    chunks: list[Any] = []
    os.environ.pop(_UNFUSED, None)  # megatron-core demands its own value while it makes a model
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": vp_stage} if virtual else {}
        chunk = (ScoreModel if model.scores else PolicyModel)(
            config,
            block_spec(config, implementation, vp_stage),
            vocab_size=model.vocab_size,
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=model.tie_word_embeddings and not model.scores,
            # In the local spec PackedAttention applies the rotary embedding.
            position_embedding_type="rope" if implementation == "transformer_engine" else "none",
            rotary_base=model.rope_theta,  # type: ignore[arg-type]
            vp_stage=vp_stage,
        )
        chunk.to(device)
        if hasattr(chunk, "rotary_pos_emb"):
            # Its own rope_scaling fixes all numbers of Llama 3's but the factor. The frequencies are put where the replaced
            # ones are, because megatron-core itself moves them to the GPU at their first use.
            rotary = chunk.rotary_pos_emb
            rotary.inv_freq = rotary_frequencies(model).to(rotary.inv_freq.device)
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." in name:
                # The gradients of experts are summed over the expert data-parallel group. megatron-core marks experts so
                # only at EP > 1; with the mark at EP 1 too, checkpoints of all layouts have the same structure.
                parameter.allreduce = False
        chunks.append(Float16Module(config, chunk) if config.bf16 else chunk)
    if implementation == "transformer_engine" and config.bf16:
        # Where no fast attention fits, TransformerEngine must say so: the one that stores all scores takes too much memory.
        os.environ[_UNFUSED] = "0"
    return config, chunks


def unwrap(chunk: Any) -> Any:
    """The PolicyModel inside its DDP and Float16Module wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def forward_wanted(chunk: Any, batch: MicroBatch, temperature: float, chunk_tokens: int) -> Tensor:
    """Run a pipeline stage. Returns hidden states, or on the last stage fp32 [2, n]: log-probs and entropies.

    Of a reward model the last stage returns fp32 [1, n]: scores.
    """
    head = {"rows": batch.rows, "targets": batch.targets, "temperature": temperature, "chunk_tokens": chunk_tokens}
    output = chunk(batch.input_ids, batch.positions, None, packed_seq_params=batch.packed, loss_mask=head)
    assert isinstance(output, Tensor)
    return output
