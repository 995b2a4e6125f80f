"""CPU slots as RLinf hardware, so that RLinf's placements work on a machine without accelerators.

RLinf places components on the accelerators that it finds. With `hardware.type: CPUSlots` in a node group of the YAML, each
slot counts as one accelerator. RLinf's placement classes then resolve `all` and `0-1` unchanged.

RLinf sends the cluster configuration to a probe process on each node. Unpickling `CPUSlotsConfig` there imports this module,
which registers the hardware type.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.scheduler.hardware import Accelerator, Hardware, HardwareConfig, HardwareInfo, HardwareResource, NodeHardwareConfig

HARDWARE_TYPE = "CPUSlots"


@NodeHardwareConfig.register_hardware_config(HARDWARE_TYPE)
@dataclass
class CPUSlotsConfig(HardwareConfig):
    """`num_slots` worker slots on node `node_rank`."""

    num_slots: int = 1


@Hardware.register()
class CPUSlots(Hardware):
    """Reports slots under RLinf's own accelerator type, with a model name that RLinf reads as 'no device'."""

    HW_TYPE = HARDWARE_TYPE

    @classmethod
    def enumerate(cls, node_rank: int, configs: list[HardwareConfig] | None = None) -> HardwareResource | None:
        slots = sum(
            config.num_slots for config in configs or [] if isinstance(config, CPUSlotsConfig) and config.node_rank == node_rank
        )
        if not slots:
            return None
        info = HardwareInfo(Accelerator.HW_TYPE, "NO_ACCEL:cpu-slot")
        return HardwareResource(Accelerator.HW_TYPE, [info] * slots)


# RLinf takes the first resource of a type: on a machine with GPUs the slots of the YAML must come before them.
Hardware.policy_registry.remove(CPUSlots)
Hardware.policy_registry.insert(0, CPUSlots)
