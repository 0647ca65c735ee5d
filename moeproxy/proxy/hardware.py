"""Device types: memory, peak rates, links, and where the figures come from.

Rates are dense bfloat16 peaks of data sheets, links one way. What a run reaches is a fraction that depends on the
software; `scale.timing` asks for it as a range.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeproxy.errors import ProxyError


@dataclass(frozen=True)
class Device:
    """One accelerator as a training job sees it.

    Args:
        name: key of `DEVICES`.
        memory_gib: memory in GiB, as the driver reports it where that is known; otherwise as it is sold, since the
            "GB" of data sheets are GiB within two per cent (an H100 of 80 GB reports 79.6 GiB).
        bf16_tflops: dense peak in TFLOP/s.
        memory_tb_s: memory bandwidth in TB/s.
        link_gb_s: one way to devices of the same node, GB/s.
        network_gb_s: one way to other nodes, GB/s.
        per_node: devices in a node.
        source: of the figures.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    memory_tb_s: float
    link_gb_s: float
    network_gb_s: float
    per_node: int
    source: str


_NETWORK = "network: one 400 Gb/s port a device, as in DGX H100 nodes"
DEVICES: dict[str, Device] = {
    one.name: one
    for one in (
        Device(
            "A100-80GB",
            80,
            312,
            2.039,
            300,
            25,
            8,
            "NVIDIA A100 data sheet (SXM); network: one 200 Gb/s port a device, as in DGX A100; memory: the driver's "
            "81,920 MiB (github.com/modal-labs/modal-client/pull/2797)",
        ),
        Device(
            "H100",
            79.6,
            989,
            3.35,
            450,
            50,
            8,
            f"NVIDIA H100 data sheet (SXM; the sparse 1,979 halved); {_NETWORK}; memory: the driver's 81,559 MiB "
            "(github.com/NVIDIA/nccl/issues/1264)",
        ),
        Device(
            "H200",
            139,
            989,
            4.8,
            450,
            50,
            8,
            f"NVIDIA H200 data sheet (SXM, 141 GB); {_NETWORK}; memory: what a program sees of one, rounded down",
        ),
        Device(
            "H20",
            96,
            148,
            4.0,
            450,
            50,
            8,
            "published by vendors and in github.com/alibaba/InferSim, hardware/gpu.py; no public NVIDIA data sheet",
        ),
        Device(
            "Ascend-910B",
            64,
            376,
            1.6,
            196,
            25,
            8,
            "taken as one die of the 910C, which packages two (arXiv 2506.12708); variants from 280 to 400 TFLOP/s and "
            "0.4 to 1.6 TB/s are reported, so rates are uncertain; memory 64 GB",
        ),
        Device(
            "Ascend-910C-die",
            64,
            376,
            1.6,
            196,
            25,
            16,
            "arXiv 2506.12708: a package has two dies with 752 TFLOP/s, 128 GB and 3.2 TB/s; frameworks count dies",
        ),
        Device("Ascend-910C", 128, 752, 3.2, 392, 50, 8, "arXiv 2506.12708, a package of two dies"),
    )
}


def device(name: str) -> Device:
    """Return a device type by name; raises ProxyError for an unknown one."""
    if name not in DEVICES:
        raise ProxyError(f"unknown device type {name!r}", expected=f"one of {', '.join(DEVICES)}, or a Device of yours")
    return DEVICES[name]
