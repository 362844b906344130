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
    bandwidth: float
    """Of its memory, in bytes per second."""
    price_per_hour: float
    """US dollars."""

    @property
    def is_gpu(self) -> bool:
        return self.name != CPU

    @property
    def inference_share(self) -> float:
        """Share of the peak that prefill reaches."""
        return 0.43 if self.is_gpu else 0.55

    @property
    def training_share(self) -> float:
        """Share of the peak that draft steps reach."""
        return 0.38 if self.is_gpu else 0.6


CPU = "cpu"


def _gpu(name: str, memory_mib: int, bfloat16: float, float32: float, bandwidth: float, price: float) -> Device:
    """From MiB as NVIDIA's driver reports them, dense TFLOP/s of both precisions, TB/s and dollars per hour."""
    peak: dict[Precision, float] = {"bfloat16": bfloat16 * 1e12, "float32": float32 * 1e12}
    memory, per_s = memory_mib * 2**20, bandwidth * 1e12
    return Device(name=name, memory_bytes=memory, peak=peak, bandwidth=per_s, price_per_hour=price)


# A core of an AMD EPYC with AVX512-BF16. Cores differ severalfold, so the plan of a recipe measures this machine's. A
# core's share of the machine's bandwidth is assumed.
_CORE = Device(name=CPU, memory_bytes=0, peak={"bfloat16": 450e9, "float32": 100e9}, bandwidth=10e9, price_per_hour=0.0)
DEVICES = {
    device.name: device
    for device in (
        # NVIDIA A100 data sheet (2021).
        _gpu("A100", 81_920, 312, 19.5, 2.039, 1.30),
        # NVIDIA H100 data sheet, SXM: 1,979 TFLOP/s bfloat16 with sparsity.
        _gpu("H100", 81_559, 989, 67, 3.35, 2.69),
        # NVIDIA H200 data sheet, SXM: the H100's arithmetic.
        _gpu("H200", 143_771, 989, 67, 4.8, 4.54),
        # NVIDIA HGX B200 data sheet.
        _gpu("B200", 183_359, 2250, 75, 7.7, 6.03),
        # NVIDIA Ada architecture white paper, bfloat16 with float32 sums. No price: most people own theirs.
        _gpu("RTX 4090", 24_564, 165, 82.6, 1.008, 0.0),
        _CORE,
    )
}


def device_named(name: str) -> Device | None:
    """The table's entry for a name such as NVML's `NVIDIA H200`, or None."""
    words = name.replace("-", " ").split()
    return next((device for device in DEVICES.values() if set(device.name.split()) <= set(words)), None)
