"""Products of a decoding batch, which are turned for MKL."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rstar2_megatron.cpu.few_rows import mm


@pytest.mark.parametrize("rows", [1, 7, 8, 32, 48, 49])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 256), (1025, 256), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_torch(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    expected = x.double() @ weight.double().t()
    for w in (weight.t(), weight.t().contiguous()):  # a layer's, and one that lies as it is multiplied
        product = mm(x, w)
        assert product.is_contiguous() and product.dtype == dtype
        torch.testing.assert_close(product.double(), expected, rtol=0.0, atol=1e-4 if dtype == torch.float32 else 0.5)


def test_only_few_rows_of_a_large_weight_are_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turned product is the one that is written as [outputs, rows]."""
    seen: list[tuple[int, ...]] = []
    original = torch.ops.aten.mm.out

    class Recorded:
        out = staticmethod(lambda a, b, out: seen.append(tuple(out.shape)) or original(a, b, out=out))

    monkeypatch.setattr(torch.ops.aten, "mm", Recorded)
    for rows, outputs in ((7, 1024), (8, 1024), (48, 1024), (49, 1024), (32, 64)):
        mm(torch.zeros(rows, 256), torch.zeros(outputs, 256).t())
    assert seen == [(7, 1024), (1024, 8), (1024, 48), (49, 1024), (32, 64)]


@pytest.mark.parametrize(("threads", "seen"), [(1, "[]"), (2, "[(32, 1024)]")])
def test_a_process_of_several_threads_takes_them_for_its_layers(threads: int, seen: str) -> None:
    program = f"""
import torch
from rstar2_megatron.cpu import few_rows
seen, original = [], few_rows.mm
few_rows.mm = lambda x, w: seen.append((x.size(0), w.size(1))) or original(x, w)
torch.set_num_threads({threads})
few_rows.install()
with torch.inference_mode():
    layer = torch.nn.Linear(256, 1024, bias=False)
    x = torch.randn(32, 256)
    torch.testing.assert_close(layer(x), (x.double() @ layer.weight.double().t()).float(), rtol=0.0, atol=1e-4)
    print([shape for shape in seen if shape == (32, 1024)][:1])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, seen), done.stderr
