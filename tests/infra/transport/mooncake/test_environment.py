"""What Mooncake's builds need of a machine."""

from pathlib import Path

import pytest

from infra.doctor import software
from infra.refusal import Refusal
from infra.transport.mooncake.environment import carries_gpu_memory, check_mooncake


def test_the_build_for_cuda_needs_a_driver_and_a_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not carries_gpu_memory()
    metadata = tmp_path / "mooncake_transfer_engine_cuda13-0.3.13.post1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mooncake-transfer-engine-cuda13\nVersion: 0.3.13.post1\n")
    runtime = tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    runtime.write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    assert carries_gpu_memory()
    with pytest.raises(Refusal, match=r"libcudart\.so\.13 \(pip install") as refusal:
        check_mooncake()
    assert str(runtime) in str(refusal.value)
    assert "libcudart.so.13" in software.mooncake().found
