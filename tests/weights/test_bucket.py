"""A stream of weights cut into buckets, each of which another process reads as a safetensors file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rstar2_megatron.records.disk import NotWritten
from rstar2_megatron.weights.bucket import buckets
from rstar2_megatron.weights.cuda_ipc import handle_of, open_device_bucket
from rstar2_megatron.weights.shared_memory import SharedBucket
from tests.small_disk import small_disk

SENT = {
    "odd": torch.arange(3, dtype=torch.bfloat16),
    "wide": torch.arange(6, dtype=torch.float32).view(2, 3),
    "columns": torch.arange(12, dtype=torch.float32).view(3, 4).t(),
    "large": torch.arange(100, dtype=torch.float32),
    "scalar": torch.tensor(7.0),
}


def test_every_bucket_is_the_file_and_the_device_buffer_of_its_tensors() -> None:
    """Tensors of another width begin a bucket, and so does one that is larger than a bucket."""
    names, arrived = [], {}
    for bucket, last in buckets(SENT.items(), 80):
        assert bucket.data.nbytes == sum(SENT[name].nbytes for name in bucket.places)
        shared = SharedBucket(bucket)
        arrived |= load_file(shared.path)
        shared.close()
        for name, tensor in open_device_bucket(handle_of(bucket)):
            assert torch.equal(tensor, SENT[name])
        names.append((list(bucket.places), last))
    assert names == [(["odd"], False), (["wide", "columns"], False), (["large"], False), (["scalar"], True)]
    assert arrived.keys() == SENT.keys()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in SENT.items())


def test_a_file_that_finds_no_room_is_told(tmp_path: Path) -> None:
    """The route over a disk. A write to mapped memory would end the process by a signal."""
    ((bucket, _),) = buckets([("large", torch.zeros(1 << 20))], 1 << 30)
    expected = pytest.raises(NotWritten, match=r"could not write .*weights.* No space left on device \(.* MB are free there\)")
    with small_disk(tmp_path / "small", 1) as disk, expected:
        SharedBucket(bucket, disk / "weights")


def test_the_stream_may_use_one_tensor_for_all() -> None:
    one = torch.zeros(4)
    stream = ((str(n), one.fill_(n)) for n in range(5))
    found = {name: tensor.tolist() for bucket, _ in buckets(stream, 32) for name, tensor in bucket.tensors()}
    assert found == {str(n): [float(n)] * 4 for n in range(5)}


def test_a_stream_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="no weights to send"):
        list(buckets([], 32))
