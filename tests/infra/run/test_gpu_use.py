"""How busy a run's GPUs were: looked at while a process runs, written by process, told by role."""

import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from infra.files.lines import read_objects, write_objects
from infra.files.run_folder import RunFolder
from infra.run.gpu_use import gpu_use, measured_use

GPUS = ("GPU-a", "GPU-b")
LOOK_S = 0.001
LONGEST_S = 60.0


class Driver:
    """Stands in for NVML with two GPUs: their percentages in turn, look by look, then an error or the last ones."""

    def __init__(self, looks: Sequence[tuple[int, int]], fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self._looks, self._next, self._fails = looks, dict.fromkeys(GPUS, 0), fails
        self.over = threading.Event()
        answers: dict[str, Callable[..., object]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: len(GPUS),
            "DeviceGetHandleByIndex": lambda index: GPUS[index],
            "DeviceGetUUID": lambda gpu: gpu,
            "DeviceGetMigMode": lambda _gpu: (0, 0),
            "DeviceGetMemoryInfo": lambda _gpu, **_version: SimpleNamespace(),
            "DeviceGetUtilizationRates": self.rates,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(pynvml, f"nvml{name}", answer)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(GPUS))

    def rates(self, gpu: str) -> SimpleNamespace:
        look = self._next[gpu]
        self._next[gpu] += 1
        if look >= len(self._looks):
            self.over.set()
            if self._fails:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return SimpleNamespace(gpu=self._looks[min(look, len(self._looks) - 1)][GPUS.index(gpu)], memory=0)


def measure(folder: RunFolder, driver: Driver, line_s: float) -> None:
    with measured_use(folder, "training", LOOK_S, line_s):
        assert driver.over.wait(LONGEST_S)


def test_a_driver_that_cannot_say_leaves_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, driver = RunFolder(tmp_path), Driver([(20, 40), (60, 80)], True, monkeypatch)
    measure(folder, driver, 1000.0)
    assert gpu_use(folder) == {"training": pytest.approx(0.5)}
    assert "not measured any more" in capfd.readouterr().out


def test_one_line_for_each_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    measure(folder, Driver([(50, 50)] * 5, False, monkeypatch), 0.0)
    (path,) = folder.gpu_use.iterdir()
    assert path.name.startswith("training-")
    assert len(read_objects(path)) >= 5


def test_nothing_is_written_while_only_gpus_of_others_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, driver = RunFolder(tmp_path), Driver([(50, 50)], False, monkeypatch)
    looks, failed = count(), list[threading.ExceptHookArgs]()

    def look() -> None:
        if next(looks) == 3:
            driver.over.set()

    def fail(error: threading.ExceptHookArgs) -> None:
        failed.append(error)
        driver.over.set()

    monkeypatch.setattr(pynvml, "nvmlInit", look)
    monkeypatch.setattr(threading, "excepthook", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-lost")
    measure(folder, driver, 0.0)
    assert (failed, gpu_use(folder)) == ([], {})


def test_nothing_is_written_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with measured_use(RunFolder(tmp_path), "inference"):
        pass
    assert not RunFolder(tmp_path).gpu_use.exists()


def test_long_lines_and_many_gpus_weigh_more(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.gpu_use.mkdir()
    write_objects(folder.gpu_use / "inference-a-1.jsonl", [{"role": "inference", "gpu_s": 120.0, "busy": 0.9}])
    write_objects(folder.gpu_use / "inference-b-1.jsonl", [{"role": "inference", "gpu_s": 60.0, "busy": 0.3}])
    write_objects(folder.gpu_use / "training-a-2.jsonl", [{"role": "training", "gpu_s": 60.0, "busy": 0.1}])
    assert gpu_use(folder) == pytest.approx({"inference": 0.7, "training": 0.1})
