"""What GPUs can do and cost: one table. A recipe's `plan` section overrides every figure.

Peaks are the vendors' dense figures per GPU (data sheets print twice as much, with sparsity); float32 is without TF32,
as torch computes by default. Prices are on-demand lists of one provider each and vary threefold between providers:
spheron.network, 17 March 2026 (H200, B200); runpod.io Secure Cloud as quoted there in May 2026 (H100); the middle of
mercatus-ai.com's range of specialised clouds, May 2026 (A100).
"""

from infra.planner.shapes import Precision
from infra.records.data_path import Record


class Device(Record):
    """One accelerator, or one core of a CPU."""

    name: str
    memory_bytes: int
    """0: shared with everything else on the machine, not planned."""
    peak: dict[Precision, float]
    """Dense FLOP/s of large matrix products."""
    price_per_hour: float
    """US dollars."""

    @property
    def is_gpu(self) -> bool:
        return self.name != CPU


CPU = "cpu"
GB = 10**9
DEVICES = {
    device.name: device
    for device in (
        # NVIDIA A100 data sheet (2021): 312 TFLOP/s bfloat16, 19.5 float32.
        Device(name="A100", memory_bytes=80 * GB, peak={"bfloat16": 312e12, "float32": 19.5e12}, price_per_hour=1.30),
        # NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s bfloat16 with sparsity, 67 float32.
        Device(name="H100", memory_bytes=80 * GB, peak={"bfloat16": 989e12, "float32": 67e12}, price_per_hour=2.69),
        # NVIDIA H200 data sheet, SXM: the H100's arithmetic, 141 GB.
        Device(name="H200", memory_bytes=141 * GB, peak={"bfloat16": 989e12, "float32": 67e12}, price_per_hour=4.54),
        # NVIDIA HGX B200 data sheet: 2.25 PFLOP/s bfloat16 dense, 75 float32, 180 GB.
        Device(name="B200", memory_bytes=180 * GB, peak={"bfloat16": 2250e12, "float32": 75e12}, price_per_hour=6.03),
        # NVIDIA Ada architecture white paper: 165.2 TFLOP/s bfloat16 with float32 sums, dense; 82.6 float32. No price:
        # most people own theirs.
        Device(
            name="RTX 4090", memory_bytes=24 * GB, peak={"bfloat16": 165e12, "float32": 82.6e12}, price_per_hour=0.0
        ),
        # A core of an AMD EPYC with AVX512-BF16, products of 1024 x 1024 measured with torch 2.13; without that
        # instruction bfloat16 is no faster than float32.
        Device(name=CPU, memory_bytes=0, peak={"bfloat16": 450e9, "float32": 100e9}, price_per_hour=0.0),
    )
}


def device_named(name: str) -> Device | None:
    """The table's entry for a name such as NVML's `NVIDIA H200`, or None."""
    words = name.replace("-", " ").split()
    return next((device for device in DEVICES.values() if set(device.name.split()) <= set(words)), None)
