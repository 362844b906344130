"""What GPUs need beside their driver: inventories that are given, compilers and environments made of files."""

import sys
from pathlib import Path
from sysconfig import get_path

import pytest

from infra.doctor import cuda
from infra.doctor.finding import Finding
from infra.pools.gpus import Gpu, Gpus

GIB = 2**30


def only(findings: Finding | list[Finding]) -> Finding:
    (finding,) = [findings] if isinstance(findings, Finding) else findings
    return finding


CPU, CUDA12, CUDA13, ROCM = (
    f"__all__ = ['cuda', 'hip']\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
    for cuda, hip in ((None, None), ("'12.8'", None), ("'13.0'", None), (None, "'7.0'"))
)
H100 = Gpu("H100", 80 * GIB, 79 * GIB, capability=(9, 0))
GPUS = Gpus((H100,), "580.1", 13)


@pytest.mark.parametrize(
    ("text", "gpus", "verdict", "said"),
    [
        (CPU, None, "ok", "CPU only"),
        (ROCM, None, "ok", "ROCm"),
        (CUDA13, GPUS, "ok", "CUDA 13"),
        (CPU, GPUS, "problem", "1 GPU"),
        (CUDA13, None, "note", "without GPUs"),
        (CUDA13, Gpus((), "580.1", 13), "note", "without GPUs"),
        (CUDA13, Gpus((H100,), "550.1", 12), "problem", "up to 12"),
        ("cuda = '12.8'\n", GPUS, "ok", "CUDA 12"),
        (CUDA12, GPUS, "ok", "CUDA 12"),
    ],
)
def test_the_build_of_torch_against_the_gpus(
    tmp_path: Path, text: str, gpus: Gpus | None, verdict: str, said: str
) -> None:
    (tmp_path / "version.py").write_text(text)
    finding = only(cuda.torch_build("2.13.0", gpus, tmp_path / "version.py"))
    assert (finding.verdict, said in finding.found) == (verdict, True)


@pytest.mark.parametrize(
    ("text", "capability", "verdict", "said"),
    [
        (CUDA13, (9, 0), "ok", "9.0"),
        (CUDA13, (12, 0), "ok", "12.0"),
        (CUDA13, (7, 0), "problem", "7.0; torch's build has 7.5 to 12.1"),
        (CUDA12, (7, 0), "problem", "7.0: no bfloat16 arithmetic, in which runs on GPUs compute by default"),
        (CUDA12, (10, 0), "problem", "10.0; torch's build has 5.0 to 9.0"),
    ],
)
def test_capabilities(tmp_path: Path, text: str, capability: tuple[int, int], verdict: str, said: str) -> None:
    (tmp_path / "version.py").write_text(text)
    gpus = Gpus((Gpu("GPU", 80 * GIB, 79 * GIB, capability=capability),), "580.1", 13)
    finding = only(cuda.capabilities(gpus, tmp_path / "version.py"))
    assert (finding.verdict, finding.found) == (verdict, said)
    assert bool(finding.remedy) == (verdict != "ok")


@pytest.mark.parametrize(
    ("text", "capability", "cuda_of_driver", "remedy"),
    [
        (CUDA13, (7, 0), 13, ": `make clean`, then `make WHEELS=cu126 quickstart`"),
        (CUDA12, (12, 0), 13, ": `make clean`, then `make WHEELS=cu130 quickstart`"),
        (CUDA12, (12, 0), 12, ": update NVIDIA's driver to 580, `make clean`, then `make WHEELS=cu130 quickstart`"),
        (CUDA13, (7, 5), 13, " generator.engine=transformers"),
    ],
)
def test_the_remedy_fits_driver_and_gpu(
    tmp_path: Path, text: str, capability: tuple[int, int], cuda_of_driver: int, remedy: str
) -> None:
    (tmp_path / "version.py").write_text(text)
    gpus = Gpus((Gpu("GPU", 80 * GIB, 79 * GIB, capability=capability),), "1.1", cuda_of_driver)
    assert only(cuda.capabilities(gpus, tmp_path / "version.py")).remedy.endswith(remedy)


def test_builds_without_cuda_have_no_capabilities(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(CPU)
    assert cuda.capabilities(GPUS, tmp_path / "version.py") == cuda.capabilities(None, tmp_path / "version.py") == []


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_whether_torch_works_on_the_gpus_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.torch_works(None) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = only(cuda.torch_works(GPUS, Path(sys.executable)))
    assert (finding.verdict, "torch sees no GPU" in finding.found) == ("problem", True)
    assert "torch computes on 2 GPUs" in only(cuda.torch_works(GPUS, program(tmp_path / "python", "echo 2"))).found


BROKEN = """echo 0; echo 1; cat >&2 <<'END'
Traceback (most recent call last):
  File "<string>", line 7, in <module>
torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
END
exit 1"""
"""As torch ends on the second of two GPUs."""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (BROKEN, "cuda:1: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"),
        ("echo libcudart.so.13: no such file >&2; exit 1", "them: libcudart.so.13: no such file"),
        ("exit 1", "them: it said nothing"),
    ],
)
def test_the_gpu_on_which_torch_fails_is_named_with_its_error(tmp_path: Path, text: str, found: str) -> None:
    finding = only(cuda.torch_works(GPUS, program(tmp_path / "python", text)))
    assert (finding.verdict, finding.found) == ("problem", f"torch cannot compute on {found}")


def test_what_compiles_the_kernels_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = tmp_path / "root" / get_path("include", "posix_prefix").lstrip("/") / "Python.h"
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CC", raising=False)
    assert cuda.kernel_builds(None) == []
    finding = only(cuda.kernel_builds(GPUS, tmp_path / "root"))
    assert finding.verdict == "problem"
    assert finding.found == f"missing: a C compiler (gcc or clang) and {header}"
    header.parent.mkdir(parents=True)
    header.touch()
    clang = program(tmp_path / "path/clang", "")
    finding = only(cuda.kernel_builds(GPUS, tmp_path / "root"))
    assert (finding.verdict, finding.found) == ("ok", str(clang))
    monkeypatch.setenv("CC", "own-cc")
    assert only(cuda.kernel_builds(GPUS, tmp_path / "root")).found == "missing: a C compiler (own-cc)"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SGLang's, complete, with a CUDA toolkit beside it."""
    folder = tmp_path / "environment"
    package = folder / "lib/python3.11/site-packages/torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(CUDA13)
    metadata = package.with_name("torch-2.14.1.dist-info") / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    program(folder / "bin/ninja", "")
    program(tmp_path / "path/c++", "")
    program(tmp_path / "cuda/bin/nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88")
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return folder


def test_an_environment_of_sglang_that_fits(environment: Path) -> None:
    assert cuda.sglang_environment(environment, None) == []
    findings = cuda.sglang_environment(environment, GPUS)
    assert [(one.name, one.verdict) for one in findings] == [("SGLang's torch", "ok"), ("CUDA compiler", "ok")]
    assert "nvcc, CUDA 13.0" in findings[1].found


def test_what_sglang_lacks_is_named(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (environment / "bin/ninja").unlink()
    (tmp_path / "path/c++").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("CUDA_HOME")
    old = Gpus((H100,), "550.1", 12)
    torch, tools, compiler = cuda.sglang_environment(environment, old, tmp_path)
    assert "up to 12" in torch.found
    assert "missing: ninja" in tools.found
    assert "C++ compiler" in tools.found
    assert f"no nvcc in {tmp_path}/usr/local/cuda/bin" in compiler.found
    assert {one.verdict for one in (torch, tools, compiler)} == {"problem"}


def test_the_toolkit_of_sglangs_environment_goes_before_all_others(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's modules set $CUDA_HOME, often to CUDA 12."""
    program(environment / "cuda/bin/nvcc", "echo release 13.0")
    program(tmp_path / "cuda/bin/nvcc", "echo release 12.4")
    own = cuda.sglang_environment(environment, GPUS, tmp_path)[-1]
    assert (own.verdict, own.found) == ("ok", f"{environment}/cuda/bin/nvcc, CUDA 13.0")
    (environment / "cuda/bin/nvcc").unlink()
    for home in (tmp_path / "cuda", None):
        if home is None:
            monkeypatch.delenv("CUDA_HOME")
            (tmp_path / "usr/local").mkdir(parents=True)
            (tmp_path / "cuda").rename(tmp_path / "usr/local/cuda")
        old = cuda.sglang_environment(environment, GPUS, tmp_path)[-1]
        place = home or tmp_path / "usr/local/cuda"
        found = f"{place}/bin/nvcc, CUDA 12.4; SGLang's torch is built for CUDA 13"
        assert (old.verdict, old.found) == ("problem", found)


def test_a_compiler_that_the_driver_is_too_old_for(environment: Path, tmp_path: Path) -> None:
    compiler = cuda.sglang_environment(environment, Gpus((H100,), "550.1", 12))[-1]
    assert (compiler.verdict, "the driver runs CUDA up to 12" in compiler.found) == ("problem", True)
    program(tmp_path / "cuda/bin/nvcc", "echo nothing")
    assert "does not tell its version" in cuda.sglang_environment(environment, GPUS)[-1].found
