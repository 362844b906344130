"""Each check on real folders, sockets and made-up /proc and /sys trees; judgements on given facts."""

import fcntl
import http.server
import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from rdma_devices import put_rdma_device

from infra import settings
from infra.doctor import devices, machine, network, software
from infra.doctor.checks import Check, Probe, examine, run_check
from infra.doctor.finding import Finding
from infra.network.health import public, trouble
from infra.pools.gpus import Gpu, Gpus, read_gpus

GIB = 2**30
NO_MEMORY_LIMIT = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A made-up `/` that holds these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def only(findings: Finding | list[Finding]) -> Finding:
    if isinstance(findings, Finding):
        return findings
    assert len(findings) == 1, findings
    return findings[0]


def made(name: str, probe: Probe) -> list[Finding]:
    return run_check(Check(name, probe, "the remedy"))


def judged(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in findings}


def test_every_finding_but_a_good_one_has_a_remedy_and_names_are_said_once() -> None:
    findings = examine()
    assert all(bool(finding.remedy) == (finding.verdict != "ok") for finding in findings)
    assert len(judged(findings)) == len(findings) > 15
    assert judged(findings)["Python"] == "ok"


def test_a_check_that_cannot_be_made_says_so_and_ends_no_other(tmp_path: Path) -> None:
    finding = only(made("memory", lambda: machine.memory(tmp_path)))
    assert finding.verdict == "note"
    assert "could not be checked" in finding.found
    assert "cgroup" in finding.found
    with pytest.raises(ZeroDivisionError):
        made("defect", lambda: [1 / 0])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10), "problem"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "problem")]
)
def test_pythons(version: tuple[int, int], verdict: str) -> None:
    assert machine.python(version).verdict == verdict


@pytest.mark.parametrize(("kind", "verdict"), [("x86_64", "ok"), ("aarch64", "note"), ("riscv64", "problem")])
def test_processors(kind: str, verdict: str) -> None:
    assert machine.processor(kind).verdict == verdict


def test_less_than_a_core_is_a_note(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "200000 100000\n"}
    finding = machine.cores(tree(tmp_path, files), affinity=16)
    assert (finding.verdict, "quota allows 2" in finding.found) == ("ok", True)
    (tmp_path / "sys/fs/cgroup/a/cpu.max").write_text("50000 100000\n")
    assert machine.cores(tmp_path, affinity=16).verdict == "note"


@pytest.mark.parametrize(
    ("available_gib", "limit_gib", "used_gib", "verdict"),
    [(20, None, 0, "ok"), (3, None, 0, "note"), (1, None, 0, "problem"), (20, 8, 5, "note"), (20, 4, 3, "problem")],
)
def test_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    available_gib: int,
    limit_gib: int | None,
    used_gib: int,
    verdict: str,
) -> None:
    room = SimpleNamespace(total=32 * GIB, available=available_gib * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    limit = "max" if limit_gib is None else str(limit_gib * GIB)
    files = {
        "proc/self/cgroup": "0::/a\n",
        "sys/fs/cgroup/a/memory.max": limit + "\n",
        "sys/fs/cgroup/a/memory.current": f"{used_gib * GIB}\n",
    }
    finding = machine.memory(tree(tmp_path, files))
    assert finding.verdict == verdict
    assert ("control group" in finding.found) == (limit_gib is not None)


def test_the_old_way_of_saying_no_memory_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n",
        "sys/fs/cgroup/memory/x/memory.limit_in_bytes": NO_MEMORY_LIMIT,
        "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "5",
    }
    assert "control group" not in machine.memory(tree(tmp_path, files)).found


@pytest.mark.parametrize(
    ("limit", "verdict", "said"),
    [(256, "note", "at most 256"), (1024, "ok", "1024"), (resource.RLIM_INFINITY, "ok", "unlimited")],
)
def test_open_files(limit: int, verdict: str, said: str) -> None:
    finding = machine.open_files(limit)
    assert (finding.verdict, said in finding.found) == (verdict, True)


def disk(monkeypatch: pytest.MonkeyPatch, total: float, free: float) -> None:
    """Every file system has these sizes, in GiB, from now on."""
    room = SimpleNamespace(total=total * GIB, free=free * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)


@pytest.mark.parametrize(
    ("total", "free", "verdict", "said"),
    [
        (24, 24, "ok", ""),
        (1, 0.625, "ok", ""),
        (0.0625, 0.0625, "note", "less than twice the usual budget of 512 MiB"),
        (0.5, 0.5, "note", "less than twice"),
        (24, 0.25, "problem", "less than the usual budget"),
    ],
)
def test_shared_memory_is_measured_against_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: float, free: float, verdict: str, said: str
) -> None:
    disk(monkeypatch, total, free)
    finding = machine.shared_memory(tmp_path, 512)
    assert (finding.verdict, said in finding.found) == (verdict, True)


def test_shared_memory_that_is_not_there_is_a_note(tmp_path: Path) -> None:
    assert machine.shared_memory(tmp_path / "no").verdict == "note"


@pytest.mark.parametrize(("free", "verdict"), [(0.5, "problem"), (5, "note"), (50, "ok")])
def test_free_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, verdict: str) -> None:
    disk(monkeypatch, 100, free)
    assert machine.disk(tmp_path).verdict == verdict


def test_folders_of_dead_runs_are_told_from_those_in_use_and_left_alone(tmp_path: Path) -> None:
    assert "0 left over" in machine.leftovers(tmp_path).found
    for name in ("draftsmith-dead", "draftsmith-alive", "somebody-else"):
        (tmp_path / name / "objects").mkdir(parents=True)
        (tmp_path / name / "lock").touch()
    (tmp_path / "draftsmith-unlocked").mkdir()
    with (tmp_path / "draftsmith-alive" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finding = machine.leftovers(tmp_path)
    assert finding.verdict == "note"
    assert finding.found.startswith("1 in use, 2 left over")
    assert "draftsmith-dead" in finding.found
    assert "draftsmith-alive" not in finding.found
    assert (tmp_path / "draftsmith-dead" / "objects").is_dir()


def test_a_run_folder_leaves_nothing_behind_and_need_not_exist(tmp_path: Path) -> None:
    assert machine.file_locks(tmp_path / "not" / "yet").verdict == "ok"
    assert "made by the first run" in machine.run_folder(tmp_path / "not" / "yet").found
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_on_a_network_file_system_is_a_problem(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n")
    finding = machine.run_folder(tmp_path / "runs", mounts)
    assert (finding.verdict, "PostgreSQL" in finding.remedy) == ("problem", True)


def test_a_run_folder_that_takes_no_files_is_a_problem() -> None:
    assert machine.file_locks(Path("/proc/runs")).verdict == "problem"  # not even root makes files there


PCI = {"sys/bus/pci/devices/0/vendor": "0x10de\n", "sys/bus/pci/devices/0/class": "0x030200\n"}
H100 = Gpu("H100", 80 * GIB, 79 * GIB)


@pytest.mark.parametrize(
    ("gpu", "verdict", "said"),
    [
        (H100, "ok", "79 GiB free of 80 GiB, driver 580.1"),
        (Gpu("H100", 80 * GIB, 40 * GIB, ((7, 39 * GIB),)), "note", "process 7 (39 GiB)"),
        (Gpu("H100", 80 * GIB, 79 * GIB, ((7, 0),)), "note", "in use by process 7"),
        (Gpu("H100", 80 * GIB, 40 * GIB), "note", "cannot be seen from here"),
        (Gpu("H100", 80 * GIB, 79 * GIB, mig=True, slices=(H100, H100)), "note", "MIG is on: 2 slices"),
        (Gpu("H100", 0, 0, mig=True), "note", "MIG is on without a slice"),
        (Gpu("H100", 80 * GIB, 79 * GIB, most_processes=1), "note", "(Exclusive Process) lets one process"),
        (Gpu("H100", 80 * GIB, 79 * GIB, most_processes=0), "note", "(Prohibited) lets nothing compute"),
    ],
)
def test_gpus(gpu: Gpu, verdict: str, said: str) -> None:
    findings = devices.gpus(Gpus((H100, gpu), "580.1", 13))
    assert judged(findings) == {"GPU 0": "ok", "GPU 1": verdict}
    assert said in findings[1].found


def test_no_gpu_and_a_gpu_without_a_driver_are_told_apart(tmp_path: Path) -> None:
    assert only(devices.gpus(None, tmp_path)).verdict == "ok"
    assert "an AMD GPU, which Draftsmith cannot use" in only(devices.gpus(None, tree(tmp_path, {"dev/kfd": ""}))).found
    assert "no driver" in only(devices.gpus(None, tree(tmp_path, PCI))).found


def test_nvml_that_is_absent_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(code: int) -> None:
        def init() -> None:
            raise pynvml.NVMLError(code)

        monkeypatch.setattr(pynvml, "nvmlInit", init)

    fail(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert read_gpus() is None
    fail(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    finding = only(made("GPUs", lambda: devices.gpus(read_gpus())))
    assert (finding.verdict, "mismatch" in finding.found.lower()) == ("note", True)


def rdma(root: Path, memlock: int) -> list[Finding]:
    """Of a machine with devices."""
    probes: tuple[tuple[str, Probe], ...] = (
        ("RDMA", lambda: devices.rdma(root)),
        ("RDMA access", lambda: devices.rdma_access(root)),
        ("locked memory", lambda: devices.locked_memory(root, memlock)),
        ("GPUDirect", lambda: devices.gpudirect(root)),
    )
    return [finding for name, probe in probes for finding in made(name, probe)]


def test_rdma(tmp_path: Path) -> None:
    assert "no device" in only(rdma(tmp_path, 0)).found
    put_rdma_device(tmp_path, "mlx5_0", layer="InfiniBand").unlink()
    put_rdma_device(tmp_path, "mlx5_1", "1: DOWN")
    findings = rdma(tmp_path, 8 * 2**20)
    verdicts = {"RDMA mlx5_0": "ok", "RDMA mlx5_1": "note", "RDMA access": "note", "locked memory": "note"}
    assert judged(findings) == verdicts
    assert findings[0].found == "port 1 ACTIVE (InfiniBand, 400 Gb/sec (4X NDR))"
    assert findings[2].found.startswith("programs cannot open mlx5_0: ")
    put_rdma_device(tmp_path, "mlx5_0", layer="InfiniBand")
    findings = rdma(tmp_path, resource.RLIM_INFINITY)
    assert judged(findings) == {"RDMA mlx5_0": "ok", "RDMA mlx5_1": "note", "locked memory": "ok"}
    tree(tmp_path, {"proc/driver/nvidia/version": ""})
    assert rdma(tmp_path, 0)[-1].verdict == "note"
    tree(tmp_path, {"sys/module/nvidia_peermem/refcnt": "0"})
    assert "GPU's own memory" in rdma(tmp_path, 0)[-1].found


def test_a_device_that_mooncake_does_not_speak_to_is_no_link(tmp_path: Path) -> None:
    """As AWS's EFA."""
    put_rdma_device(tmp_path, "rdmap_0", layer="Unspecified")
    finding = rdma(tmp_path, 0)[0]
    assert (finding.verdict, finding.remedy) == ("note", devices.OTHER_LAYER)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"prefect": "3.8.8", "fastapi": "0.165.0"}, "min_items"),
        ({"lightning": "2.6.2"}, "GHSA-w37p-236h-pfx3"),
        ({"lightning": "2.6.3"}, "GHSA-w37p-236h-pfx3"),
        ({"torch": "2.12.1+cu130"}, "training on GPUs"),
        ({"sglang": "0.5.22"}, "0.5.23"),
        ({"sglang": "0.5.23", "prefect": "3.8.8"}, "torch of its own"),
    ],
)
def test_each_known_clash_is_recognised(versions: dict[str, str], said: str) -> None:
    finding = only(software.clashes(versions))
    assert finding.verdict != "ok"
    assert said in finding.found
    assert all(version in finding.found for version in versions.values())


@pytest.mark.parametrize(
    "versions",
    [
        {},
        {"prefect": "3.8.8", "fastapi": "0.150.0", "lightning": "2.6.6", "torch": "2.13.0+cpu"},
        {"prefect": "3.9.1", "fastapi": "0.165.0"},
        {"fastapi": "0.165.0", "lightning": "2.6.4"},
        {"torch": "2.13.0"},
        {"sglang": "0.5.23", "torch": "2.13.0"},
    ],
)
def test_versions_that_go_together(versions: dict[str, str]) -> None:
    assert only(software.clashes(versions)).verdict == "ok"


def test_declared_packages() -> None:
    wanted = ["torch>=2.11", "Typing_Extensions", "target; extra == 'quickstart'", "pytest; extra == 'dev'"]
    complete = {"torch": "2.13.0+cpu", "typing-extensions": "4.1", "target": "1"}
    assert software.requirements(complete, wanted).verdict == "ok"
    finding = software.requirements({"torch": "2.10.0", "typing-extensions": "4.1"}, wanted)
    assert finding.verdict == "problem"
    assert finding.found == "torch 2.10.0 instead of >=2.11; target is missing"


def test_engines_and_an_environment_of_their_own(tmp_path: Path) -> None:
    def sglang() -> Finding:
        return only(software.sglang(tmp_path / "env"))

    assert software.version_of("transformers", {}).verdict == "problem"
    assert sglang().verdict == "note"
    packages = tmp_path / "env" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    assert "not installed" in sglang().found
    tree(packages, {"sglang.dist-info/METADATA": "Name: sglang\nVersion: 0.5.23\n"})
    assert (sglang().verdict, "without Draftsmith's capture plugin" in sglang().found) == ("problem", True)
    tree(packages, {"draftsmith.dist-info/METADATA": "Name: draftsmith\nVersion: 0.1.0\n"})
    for version, verdict in (("0.5.23", "ok"), ("0.5.20", "note")):
        info = tree(packages, {"sglang.dist-info/METADATA": f"Name: sglang\nVersion: {version}\n"})
        assert (sglang().verdict, version in sglang().found) == (verdict, True), info


@pytest.fixture
def server() -> Iterator[str]:
    """A server whose `/api/health` and `/health` answer, and nothing else does."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in ("/api/health", "/health") else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No proxies, servers or tokens of whoever runs the tests."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TRANSFORMERS_OFFLINE", "PREFECT_PROFILE", "PREFECT_PROFILES_PATH"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("PREFECT_HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(home))
    return home


def test_servers_that_answer_and_servers_that_do_not(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "ANSWER_S", 120.0)  # a busy machine
    assert network.prefect(f"{server}/api").verdict == "ok"
    assert network.prefect(f"{server}/other").verdict == "problem"
    assert "404" in network.prefect(f"{server}/other").found
    assert network.mlflow(server).verdict == "ok"
    with socket.socket() as deaf:  # bound, never listening
        deaf.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        assert "refused" in network.mlflow(url).found
        deaf.listen()
        why = trouble(url, 0.2) or ""
        assert "no answer within" in why or "timed out" in why


@pytest.mark.parametrize(
    ("uri", "verdict"),
    [
        ("sqlite:////somewhere/mlflow.db", "ok"),
        ("file:///somewhere/mlruns", "problem"),
        ("mlruns", "problem"),
        ("postgresql://me:secret@host/db", "note"),
    ],
)
def test_tracking_without_a_server(uri: str, verdict: str) -> None:
    finding = network.mlflow(uri)
    assert finding.verdict == verdict
    assert "secret" not in finding.found


def test_a_registry_of_its_own_is_said_to_stay_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = "http://mlflow:5000"
    for uri, silent in (("", True), (tracking, True), ("http://me:secret@registry:5000", False)):
        monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
        found = network.mlflow_registry(settings.registry_uri(), tracking)
        assert (found == []) == silent
    finding = only(found)
    assert (finding.verdict, "registry:5000, drafts are registered in http://mlflow:5000" in finding.found) == (
        "note",
        True,
    )
    assert "secret" not in finding.found


def test_the_server_of_a_prefect_profile_counts(bare_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.prefect_api_url() is None
    assert network.prefect(None).verdict == "ok"
    profiles = 'active = "ours"\n[profiles.ours]\nPREFECT_API_URL = "http://server/api"\n[profiles.bare]\n'
    (bare_environment / "profiles.toml").write_text(profiles)
    assert settings.prefect_api_url() == "http://server/api"
    monkeypatch.setenv("PREFECT_PROFILE", "bare")
    assert settings.prefect_api_url() is None
    monkeypatch.setenv("PREFECT_API_URL", "http://other/api")
    assert settings.prefect_api_url() == "http://other/api"


def test_a_proxy_is_used_unless_the_way_is_direct(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert trouble(f"{server}/health", 5.0) is not None
    assert trouble(f"{server}/health", 120.0, direct=True) is None


def test_the_hub_and_a_token_that_is_never_shown(bare_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no token" in network.hub().found
    (bare_environment / "token").write_text("hf_secret")
    assert str(bare_environment / "token") in network.hub().found
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finding = network.hub()
    assert (finding.verdict, "$HF_TOKEN" in finding.found) == ("note", True)
    assert "hf_secret" not in finding.model_dump_json()


def test_addresses_are_shown_without_their_secrets() -> None:
    assert public("https://token@host:80/x?y=1") == "https://host:80/x?y=1"
    assert public("http://host/api") == "http://host/api"
    assert public("sqlite:////runs/mlflow.db") == "sqlite:////runs/mlflow.db"


def test_mooncake_s_protocol_is_stated(tmp_path: Path) -> None:
    for state, protocol in (("1: DOWN", "TCP"), ("4: ACTIVE", "RDMA")):
        put_rdma_device(tmp_path, "mlx5_0", state)
        finding = software.mooncake(tmp_path)
        assert finding.verdict == "note" or finding.found.endswith(f"it carries by {protocol}")
