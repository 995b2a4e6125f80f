"""Products of fp32 by oneDNN, in the processes of the actor and the engine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from rstar2_megatron.cpu.products import mm

ACTOR = """
from rstar2_megatron.actor.layout import Layout
from rstar2_megatron.actor.process_groups import join
from rstar2_megatron.services.process import free_port
from tests.actor.tiny import settings
actor = settings()[0]
join(actor, Layout(1, 1, 1, 1), rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{free_port()}", device="cpu")
"""
ENGINE = """
from rstar2_megatron.rollout.engine import scheduler_entry
scheduler_entry.shim.prepare_scheduler()
"""
OPERATIONS = """
import torch
from torch.profiler import ProfilerActivity, profile

def products(rows, dtype=torch.float32):
    layer = torch.nn.Linear(256, 1024, bias=False, dtype=dtype)
    x = torch.randn(rows, 3, 256, dtype=dtype, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(x).sum().backward()
    exact = layer.weight.double().sum(0).expand(rows, 3, 256), x.double().sum((0, 1)).expand(1024, 256)
    for gradient, expected in zip((x.grad, layer.weight.grad), exact):
        torch.testing.assert_close(gradient.double(), expected, rtol=0.0, atol=1e-3 if dtype == torch.float32 else 1.0)
    return sum(event.count for event in seen.key_averages() if event.key == "mkldnn::_linear_pointwise")

print(products(32), products(2), products(32, torch.bfloat16))
"""


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 48, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 256), (1025, 257), (64, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_torch(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Each of the three products of a layer: its own, and those of the gradients of its input and its weight."""
    torch.manual_seed(0)
    x, weight, gradient = (torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    for a, b in (
        (x, weight.t()),
        (x, weight.t().contiguous()),
        (gradient, weight),
        (gradient.t(), x),
        (x[:, 1:], weight[:, 1:].t()),
    ):
        product = mm(a, b)
        assert product.is_contiguous() and product.dtype == dtype
        torch.testing.assert_close(
            product.double(), a.double() @ b.double(), rtol=0.0, atol=2e-4 if dtype == torch.float32 else 0.5
        )


@pytest.mark.parametrize("process", [ACTOR, ENGINE], ids=["actor", "engine"])
def test_a_process_computes_large_products_and_their_gradients_by_onednn(process: str) -> None:
    """96 rows are large, 6 are not; bf16 is left to torch, which has oneDNN for it."""
    done = subprocess.run([sys.executable, "-c", process + OPERATIONS], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "3 0 0"


@pytest.mark.parametrize(
    ("process", "products"),
    [
        (
            ACTOR,  # keeps 1,120 MB of these without a limit, about 400 with 64 kernels
            """
weight = torch.randn(1024, 192, requires_grad=True)
for rows in range(2000, 3500, 25):
    if rows == 2250:
        before = psutil.Process().memory_info().rss
    (torch.randn(rows, 192, requires_grad=True) @ weight.t()).sum().backward()
""",
        ),
        (
            ENGINE,  # keeps 340 MB of these without a limit
            """
weight = torch.randn(256, 256)
for rows in range(100, 700):
    if rows == 200:
        before = psutil.Process().memory_info().rss
    torch.randn(rows, 256) @ weight.t()
""",
        ),
    ],
    ids=["actor", "engine"],
)
def test_products_of_many_sizes_take_no_memory_for_long(process: str, products: str) -> None:
    """Training on batches of 50 sizes, and decoding or prefills of 500."""
    program = f"{process}\nimport psutil, torch\n{products}\nprint((psutil.Process().memory_info().rss - before) // 2**20)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 150
