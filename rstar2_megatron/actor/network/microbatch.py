"""A packed micro-batch as tensors: tokens, segment layout, and the wanted tokens, whose log-probs or scores are computed.

Shapes: t tokens on this rank (t * cp on all CP ranks), n wanted tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rstar2_megatron.actor.network.attention import PackedBatch, rotary_tables
from rstar2_megatron.algorithm.batch import TrainSequence, places_behind_tools

_LENGTHS = 1024  # the longest length that TransformerEngine is told is a multiple

Wanted = Literal["trained", "all", "last"]
"""Log-probs of the tokens of `loss_mask`, or of every token with a predecessor; the scores of the last tokens."""


@dataclass(slots=True)
class MicroBatch:
    """`rows`, `targets` and the per-token tensors after them have one entry per wanted token of this rank."""

    input_ids: Tensor  # [1, t]
    positions: Tensor  # [1, t]
    packed: PackedSeqParams
    rows: Tensor  # [n] row in [t] whose output predicts the wanted token; "last": the token's own
    targets: Tensor  # [n] the wanted token's id
    sequence: Tensor  # [n] index of the token's sequence in the list of sequences
    place: Tensor  # [n] index of the token in its sequence
    advantages: Tensor  # [n]
    rollout_logprobs: Tensor  # [n]
    behind_tool: Tensor  # [n] as of `places_behind_tools`; "trained" only
    members: tuple[int, ...]
    """The sequences of the micro-batch, also those whose wanted tokens other CP ranks have."""


@dataclass(frozen=True, slots=True)
class PackContext:
    """Model and layout settings that determine how a micro-batch is built."""

    frequencies: Tensor  # [d/2] of the rotary embedding
    dtype: torch.dtype
    device: str
    tensor_parallel: int
    sequence_parallel: bool
    context_parallel: int
    context_rank: int
    implementation: Literal["local", "transformer_engine"]


def padded_lengths(lengths: Sequence[int], context: PackContext) -> list[int]:
    """Segment lengths with the padding for CP and SP; the padding for SP is added to the last segment.

    CP splits a segment into 2 * cp chunks, as `local_places` says. SP splits a rank's tokens into equal parts.
    """
    cp = context.context_parallel
    multiple = 2 * cp if cp > 1 else 1
    of_all = cp * context.tensor_parallel if context.sequence_parallel else 1
    padded = [-(-n // multiple) * multiple for n in lengths]
    while sum(padded) % of_all:
        padded[-1] += multiple
    return padded


def local_places(length: int, cp: int, rank: int) -> Tensor:
    """Positions of a padded segment that CP rank `rank` holds: chunk `rank` and chunk `2 cp - 1 - rank`.

    This pairing gives every rank the same share of the causal triangle.
    """
    if cp == 1:
        return torch.arange(length)
    chunk = length // (2 * cp)
    last = 2 * cp - 1 - rank
    return torch.cat([torch.arange(rank * chunk, (rank + 1) * chunk), torch.arange(last * chunk, (last + 1) * chunk)])


def build_microbatch(
    sequences: Sequence[TrainSequence], indices: Sequence[int], context: PackContext, wanted: Wanted = "trained"
) -> MicroBatch:
    """Pack `sequences[i] for i in indices`.

    Without indices the result is the smallest valid micro-batch without wanted tokens. A rank without work runs it to take
    part in the collectives of the other ranks.
    """
    members = [sequences[i] for i in indices]
    tokens = [m.input_ids for m in members] or [np.zeros(1, np.int32)]
    lengths = [len(ids) for ids in tokens]
    padded = padded_lengths(lengths, context)
    cp, rank = context.context_parallel, context.context_rank

    ids, positions, rows, targets, owner, place = [], [], [], [], [], []
    first_row = 0
    for number, (segment_ids, length, full) in enumerate(zip(tokens, lengths, padded)):
        flat = torch.zeros(full, dtype=torch.long)
        flat[:length] = torch.tensor(segment_ids)
        places = local_places(full, cp, rank)
        ids.append(flat[places])
        positions.append(places)
        if members:
            ahead = 0 if wanted == "last" else 1
            mask = torch.zeros(full + 1, dtype=torch.bool)
            if wanted == "trained":
                mask[1:length] = torch.tensor(members[number].loss_mask[1:], dtype=torch.bool)
            else:
                mask[length - 1 if wanted == "last" else 1 : length] = True
            local = torch.nonzero(mask[places + ahead]).squeeze(-1)
            predicted = places[local] + ahead
            rows.append(local + first_row)
            targets.append(flat[predicted])
            owner.append(torch.full((len(local),), indices[number], dtype=torch.long))
            place.append(predicted)
        first_row += len(places)

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)

    all_positions = torch.cat(positions)
    owners, places_ = joined(owner), joined(place)
    advantages = [torch.tensor(m.advantage, dtype=torch.float32).expand(m.length)[p] for m, p in zip(members, place)]
    rollout = [torch.tensor(m.rollout_logprobs, dtype=torch.float32)[p] for m, p in zip(members, place)]
    turns = [m.loss_mask if m.generated is None else m.generated for m in members]
    behind = [torch.from_numpy(places_behind_tools(turn))[p] for turn, p in zip(turns, place)]
    device = context.device
    return MicroBatch(
        input_ids=torch.cat(ids)[None].to(device),
        positions=all_positions[None].to(device),
        packed=_layout(padded, all_positions, context),
        rows=joined(rows).to(device),
        targets=joined(targets).to(device),
        sequence=owners,
        place=places_,
        advantages=(torch.cat(advantages) if advantages else torch.zeros(0)).to(device),
        rollout_logprobs=(torch.cat(rollout) if rollout else torch.zeros(0)).to(device),
        behind_tool=joined(behind).to(device),
        members=tuple(indices),
    )


def _layout(lengths: list[int], positions: Tensor, context: PackContext) -> PackedSeqParams:
    edges = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if context.implementation == "transformer_engine":
        edges = edges.to(context.device)
        # Kernels are chosen, and rotary tables kept, for each value: few values, not one for each micro-batch.
        longest = -(-max(lengths) // _LENGTHS) * _LENGTHS
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=edges,
            cu_seqlens_kv=edges,
            cu_seqlens_q_padded=edges,
            cu_seqlens_kv_padded=edges,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
    device = context.device
    cos, sin = rotary_tables(positions.to(device), context.frequencies, context.dtype)
    packed = PackedBatch(qkv_format="sbhd", cos=cos, sin=sin, lengths=tuple(lengths), max_seqlen_q=max(lengths))
    if context.context_parallel > 1:
        packed.context_mask = _context_mask(lengths, context).to(device)
        return packed
    if device == "cuda":
        packed.cu_seqlens_q = edges.to(device)
    longest = max(lengths)
    if min(lengths) != longest:  # segments of equal length need no padding
        starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
        segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        slot = segment * longest + positions
        slot_token = torch.zeros(len(lengths) * longest, dtype=torch.long)
        slot_token[slot] = starts[segment] + positions
        packed.slot_token, packed.token_slot = slot_token.to(device), slot.to(device)
    return packed


def _context_mask(lengths: list[int], context: PackContext) -> Tensor:
    """[t, t * cp], True where this rank's query attends to a key; keys are in the order of the CP gather."""
    cp = context.context_parallel
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor([n // cp for n in lengths]))
    places = [torch.cat([local_places(n, cp, rank) for n in lengths]) for rank in range(cp)]
    same = segment[:, None] == segment.repeat(cp)[None]
    return same & (places[context.context_rank][:, None] >= torch.cat(places)[None])
