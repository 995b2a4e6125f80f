"""Peak rates of accelerators, for MFU. The FLOPs of a step are counted by `ModelConfig.train_flops`."""

from __future__ import annotations

# bf16 dense TFLOP/s by part of the device's name, from the makers' data sheets; the first match counts.
_PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "GH200": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "MI300X": 1307.0,
}


def peak_tflops(device_name: str) -> float | None:
    """bf16 dense peak of a device in TFLOP/s, None when it is not known."""
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in device_name), None)
