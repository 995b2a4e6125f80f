"""Peak FLOP rates of accelerators, for MFU. `ModelConfig.train_flops` counts the FLOPs of a step."""

from __future__ import annotations

# Dense bf16 TFLOP/s from the makers' data sheets, by a part of the device's name; the first match is used.
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
    """Dense bf16 peak of a device in TFLOP/s; None for an unknown device."""
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in device_name), None)
