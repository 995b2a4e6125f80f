"""Memory of the vocabulary head's forward and backward pass.

    python -m benchmarks.actor.head                                  # 16,384 tokens, 151,936 words, hidden size 1536, bf16
    python -m benchmarks.actor.head --tokens 2048                    # same chunk: shows the part linear in tokens
    python -m benchmarks.actor.head --hidden-size 64                 # all tokens at a small hidden size
    python -m benchmarks.actor.head --device cuda

Inputs (hidden states, weight, DDP's fp32 gradient buffer of the weight) are reported separately from the peak of the head's
own allocations. Prints one JSON object. The full size is 30 TFLOP.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import start_peak, status_bytes
from benchmarks.records import write_result
from rstar2_megatron.actor.network.logprob import log_prob_entropy
from rstar2_megatron.services.process import free_port
from rstar2_megatron.settings.schema import ActorSettings

WORDS = 151936


class _Peak:
    """Peak GB of the process (or the GPU) since `start`, above the memory held then."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def start(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = float(torch.cuda.memory_allocated())
        else:
            self._before = start_peak()

    def gb(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - self._before) / 1e9
        return (status_bytes("VmHWM") - self._before) / 1e9


def measure(device: str, hidden_size: int, tokens: int, *, entropy: bool, buffered: bool = True) -> dict[str, Any]:
    """Peak GB of forward and backward pass of log-probs (and entropies), bf16.

    buffered: the weight's gradient is added to a buffer like DDP's, as in training. Otherwise the head allocates it.
    """
    hidden = torch.randn(tokens, hidden_size, device=device).bfloat16().requires_grad_()
    weight: Any = torch.empty(WORDS, hidden_size, device=device, dtype=torch.bfloat16)
    weight.normal_(std=0.02).requires_grad_()
    if buffered:
        weight.main_grad = torch.empty(WORDS, hidden_size, device=device).fill_(0.0)  # touch the pages
    targets = torch.randint(WORDS, (tokens,), device=device)
    chunk = ActorSettings().head_chunk_tokens(cpu=device == "cpu")
    peak = _Peak(device)
    peak.start()
    started = time.perf_counter()
    out = log_prob_entropy(hidden, weight, targets, temperature=1.0, chunk_tokens=chunk, group=dist.group.WORLD)
    (out.sum() if entropy else out[0].sum()).backward()
    own = peak.gb()
    seconds = time.perf_counter() - started
    return {
        "tokens": tokens,
        "vocabulary": WORDS,
        "hidden_size": hidden_size,
        "chunk_tokens": chunk,
        "entropy_term": entropy,
        "hidden_gb": hidden.nbytes / 1e9,
        "weight_gb": weight.nbytes / 1e9,
        "weight_gradient_buffer_gb": weight.main_grad.nbytes / 1e9 if buffered else 0.0,
        "own_peak_gb": own,
        "full_fp32_logits_gb": tokens * WORDS * 4 / 1e9,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hidden-size", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--entropy", action="store_true", help="with a gradient through the entropy too")
    parser.add_argument("--no-buffer", action="store_true", help="without a gradient buffer like DDP's")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--out", type=Path, help="a file that the JSON is written to as well")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    result = measure(args.device, args.hidden_size, args.tokens, entropy=args.entropy, buffered=not args.no_buffer)
    dist.destroy_process_group()
    print(json.dumps(result))
    write_result(args.out, result)


if __name__ == "__main__":
    main()
