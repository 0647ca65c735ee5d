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
        memory_gib: memory in GiB, as the driver reports it (an H100 of 80 GB has 79.6); for the 910C as it is sold.
        bf16_tflops: dense peak in TFLOP/s.
        memory_tb_s: memory bandwidth in TB/s.
        link_gb_s: one way to devices of the same node, GB/s.
        network_gb_s: one way to other nodes, GB/s.
        per_node: devices in a node.
        source: of the figures.

    Raises:
        ProxyError: a figure is no number above 0.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    memory_tb_s: float
    link_gb_s: float
    network_gb_s: float
    per_node: int
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_gib", "bf16_tflops", "memory_tb_s", "link_gb_s", "network_gb_s", "per_node"):
            value, whole = getattr(self, name), name == "per_node"
            number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise ProxyError(
                    f"{name} of device {self.name!r} is {value!r}",
                    expected=f"a {'whole' if whole else 'finite'} number above 0",
                    remedy=f"give {name} as in the device's data sheet",
                )


def _said(*, memory: str, bf16: str, rate: str, link: str, network: str) -> str:
    """Return where each figure comes from, those of one source together; nothing can be left out."""
    figures: dict[str, list[str]] = {}
    for name, source in {
        "memory": memory,
        "bf16": bf16,
        "memory's rate": rate,
        "link": link,
        "network": network,
    }.items():
        figures.setdefault(source, []).append(name)
    return "; ".join(f"{', '.join(names)}: {source}" for source, names in figures.items())


UNVERIFIED = "UNVERIFIED"
"""Stands in a source before what is not the vendor's own word."""


def _third(source: str) -> str:
    """Return a source that is not the vendor, marked so."""
    return f"{UNVERIFIED}, not the vendor's: {source}"


_A100, _H100 = "NVIDIA A100 data sheet, SXM", "NVIDIA H100 data sheet, SXM, the sparse rate halved"
_OPEN_INSTRUCT = _third("github.com/allenai/open-instruct/pull/1441")
_MLPERF = "NVIDIA's own submission to MLPerf Inference v4.1, system H200-SXM-141GBx8"
_INFERSIM = "github.com/alibaba/InferSim, hardware/gpu.py"
_MEASURED = "github.com/zzc0721/torch-performance-test-data/issues"
_CLOUDMATRIX = "arXiv 2506.12708, by Huawei"
_MIG = "docs.nvidia.com/datacenter/tesla/mig-user-guide"
_ATLAS_A2 = (
    "Huawei's table of Atlas A2 (gitcode.com/cann/ops-nn, cross_platform_migration_guide.md, quoted in issue 6033)"
)
_HALF = f"half a package of two dies, {_CLOUDMATRIX}"
_LIKE_910C = f"{UNVERIFIED}, no source seen: taken from a die of the 910C"
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
            _said(
                memory="the driver's 81,920 MiB (github.com/modal-labs/modal-client/pull/2797)",
                bf16=_A100,
                rate=_A100,
                link=_A100,
                network="one 200 Gb/s port a device, DGX A100 data sheet",
            ),
        ),
        Device(
            "H100",
            79.6,
            989,
            3.35,
            450,
            50,
            8,
            _said(
                memory="the driver's 81,559 MiB (github.com/NVIDIA/nccl/issues/1264)",
                bf16=_H100,
                rate=_H100,
                link=_H100,
                network="one 400 Gb/s port a device, DGX H100 data sheet",
            ),
        ),
        Device(
            "H200",
            140.4,
            989,
            4.8,
            450,
            50,
            8,
            _said(
                memory=f"the driver's 143,771 MiB (github.com/NVIDIA/cuda-samples/issues/311); 141 GB in {_MIG}",
                bf16=_OPEN_INSTRUCT,
                rate=_OPEN_INSTRUCT,
                link=_MLPERF,
                network=_MLPERF,
            ),
        ),
        Device(
            "H20",
            95.6,
            148,
            4.0,
            450,
            50,
            8,
            _said(
                memory=f"the driver's 97,871 MiB (github.com/NVIDIA/nvtrust/issues/128); 96 GB in {_MIG}",
                bf16=f"{_third(_INFERSIM)}; 142 measured ({_MEASURED}/77)",
                rate=_third("willitrunai.com/es/gpus/h20-96gb; no public NVIDIA data sheet was found"),
                link=_third(_INFERSIM),
                network=_third(_INFERSIM),
            ),
        ),
        Device(
            "Ascend-910B",
            64,
            354,
            1.6,
            196,
            25,
            8,
            _said(
                memory="the driver's 65,536 MiB (github.com/Project-HAMi/HAMi-WebUI/issues/47)",
                bf16=f"24 cores x 8,192 operations x 1.8 GHz, the 910B2's in CANN's Ascend910B2C.ini; 353 in "
                f"{_ATLAS_A2}; 315 measured ({_MEASURED}/109)",
                rate=_ATLAS_A2,
                link=_LIKE_910C,
                network=_LIKE_910C,
            ),
        ),
        Device(
            "Ascend-910C-die",
            64,
            376,
            1.6,
            196,
            25,
            16,
            _said(memory=_HALF, bf16=_HALF, rate=_HALF, link=_HALF, network=_HALF),
        ),
        Device(
            "Ascend-910C",
            128,
            752,
            3.2,
            392,
            50,
            8,
            _said(memory=_CLOUDMATRIX, bf16=_CLOUDMATRIX, rate=_CLOUDMATRIX, link=_CLOUDMATRIX, network=_CLOUDMATRIX),
        ),
    )
}
"""Devices by name; `source` says UNVERIFIED of a figure that is not the vendor's own, or that no source gives."""


def device(name: str) -> Device:
    """Return a device type by name; raises ProxyError for an unknown one."""
    if name not in DEVICES:
        raise ProxyError(f"unknown device type {name!r}", expected=f"one of {', '.join(DEVICES)}, or a Device of yours")
    return DEVICES[name]
