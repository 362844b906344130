"""Containers and manifests of production/: what they say must be what this code and its servers read."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.workers.process import ProcessJobConfiguration

from infra.files.locks import SHARED_FOLDER
from infra.pools.local import LOCKS
from infra.servers.local import MLFLOW, PREFECT
from infra.servers.stack import WORK_POOLS, WORKER
from models.config.recipe import load_recipe

ROOT = Path(__file__).parents[1]
KIT = ROOT / "production"
COMPOSE = yaml.safe_load((KIT / "compose.yaml").read_text())
WITH_GPUS = yaml.safe_load((KIT / "compose.gpu.yaml").read_text())
MANIFESTS = [
    manifest
    for file in sorted((KIT / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text())
]


def pods() -> dict[str, dict[str, Any]]:
    """Specifications of all pods by the name of what makes them."""
    found = {
        f"{one['kind']}/{one['metadata']['name']}": one["spec"]["template"]["spec"]
        for one in MANIFESTS
        if one["kind"] in {"Deployment", "Job"}
    }
    (cluster,) = (one["spec"] for one in MANIFESTS if one["kind"] == "RayCluster")
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return found | {f"Ray/{number}": group["template"]["spec"] for number, group in enumerate(groups)}


def job_pod() -> dict[str, Any]:
    """Specification of the pod in which a worker starts a flow."""
    template = json.loads((KIT / "kubernetes" / "work-pool.json").read_text())
    return template["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container.get("env", ())}


@pytest.mark.parametrize(("server", "settings"), [("prefect", PREFECT), ("mlflow", MLFLOW)])
def test_servers_have_the_settings_of_our_own(server: str, settings: dict[str, str]) -> None:
    in_compose = COMPOSE["services"][server]["environment"]
    (in_pod,) = (variables(one) for pod in pods().values() for one in pod["containers"] if one["name"] == server)
    for name, value in settings.items():
        assert in_compose[name] == value, name
        assert in_pod[name] == value, name


def test_mlflow_starts_with_the_schema_of_its_version() -> None:
    """In a pod before the server's probes begin: they would end an upgrade that takes minutes."""
    schema = ["python", "-m", "infra.servers.mlflow_schema"]
    shell, option, script = COMPOSE["services"]["mlflow"]["command"]
    assert [shell, option] == ["sh", "-ec"]
    first, then = map(shlex.split, script.strip().splitlines())
    assert first == schema
    pod = pods()["Deployment/mlflow"]
    (server,), (before,) = pod["containers"], pod["initContainers"]
    assert then == ["exec", *server["args"]]
    assert before["args"] == schema
    assert {name: before[name] for name in ("env", "volumeMounts")} == {
        name: server[name] for name in ("env", "volumeMounts")
    }


def test_both_workers_have_the_gpus() -> None:
    """Flows of both decode on GPUs, and find in one folder and one queue which GPUs are in use."""
    worker, recovery = WITH_GPUS["services"]["worker"], WITH_GPUS["services"]["recovery"]
    assert recovery == worker
    assert worker["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    (mount,) = worker["volumes"]
    volume, folder = mount.split(":")
    assert volume in WITH_GPUS["volumes"]
    assert Path(folder) == LOCKS
    # A new volume takes over owner and mode of the image's folder; without one it would be root's.
    assert f"--owner=draftsmith --mode={SHARED_FOLDER:o} {LOCKS}" in (KIT / "Containerfile").read_text()


def test_what_machines_share_lies_in_the_volume_that_all_mount() -> None:
    text = (KIT / "Containerfile").read_text()
    for name in ("DRAFTSMITH_RUNS", "DRAFTSMITH_CACHE", "HF_HOME"):
        assert re.findall(rf"\b{name}=(/data/\S+)", text), name
    flows = ("Deployment/workers", "Ray/0", "Ray/1")
    for pod in (*(pods()[name] for name in flows), job_pod()):
        assert all("/data" in [mount["mountPath"] for mount in one["volumeMounts"]] for one in pod["containers"])
    assert all(COMPOSE["services"][name]["volumes"] == ["work:/data"] for name in ("worker", "recovery"))


def test_every_work_pool_has_a_worker() -> None:
    commands = [service.get("command", []) for service in COMPOSE["services"].values()]
    commands += [container.get("args", []) for pod in pods().values() for container in pod["containers"]]
    for pool in WORK_POOLS:
        assert sum(command[:5] == ["prefect", "worker", "start", "--pool", pool] for command in commands) == 2, pool
    for name, value in WORKER.items():
        assert COMPOSE["services"]["worker"]["environment"][name] == value
        assert variables(pods()["Deployment/workers"]["containers"][0])[name] == value


def test_nothing_listens_beyond_this_machine() -> None:
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    # With these three a follower beside the servers reads the registry and the artifacts, and emits events.
    assert sorted(ports) == [f"127.0.0.1:{port}:{port}" for port in (4200, 5000, 8333)]
    assert not any(one["kind"] == "Ingress" or one["spec"].get("type") for one in MANIFESTS if "spec" in one)


def test_no_pod_runs_as_root_or_may_become_it() -> None:
    for name, pod in pods().items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["securityContext"]["runAsUser"] == 1000, name
    assert job_pod()["securityContext"]["runAsNonRoot"]
    assert "USER 1000" in (KIT / "Containerfile").read_text()


def test_secrets_do_not_cover_where_kubernetes_puts_its_own() -> None:
    """/var/run is a link to /run in Debian: a token's mount point could not be made in a read-only /run/secrets.

    Where one mount's path lies inside another's, Kubernetes makes the mount point itself.
    """
    mounts = [
        mount["mountPath"]
        for pod in (*pods().values(), job_pod())
        for container in (*pod["containers"], *pod.get("initContainers", ()))
        for mount in container["volumeMounts"]
        if mount["name"] == "secrets"
    ]
    assert len(mounts) == 9
    assert {*mounts} == {"/var/run/secrets"}


def test_the_image_has_what_kuberay_asks_of_it() -> None:
    """Its probes run wget, except where it knows a version of Ray that answers without; its commands a login shell."""
    text = (KIT / "Containerfile").read_text()
    assert " wget " in text
    (path,) = re.findall(r"^ENV PATH=(\S+):", text, re.MULTILINE)
    assert f'echo "PATH={path}:\\$PATH" > /etc/profile.d/' in text
    (cluster,) = (one["spec"] for one in MANIFESTS if one["kind"] == "RayCluster")
    locked = re.findall(r"^ray==(\S+)", (ROOT / "requirements" / "lock.txt").read_text(), re.MULTILINE)
    assert [cluster["rayVersion"]] == locked


def test_secrets_are_made_once_and_closed_to_others(tmp_path: Path) -> None:
    made, seen = tmp_path / "secrets", []
    for _ in range(2):
        command = ["sh", KIT / "new-secrets.sh", made]
        subprocess.run(command, check=True, capture_output=True, timeout=30, umask=0o077)
        seen.append({file.name: file.read_text() for file in made.iterdir()})
    found = seen[0]
    assert seen[1] == found
    assert made.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in made.iterdir()} == {0o644}, "containers read as another user"
    assert {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()} == set(found)
    assert found["PREFECT_SERVER_API_AUTH_STRING"] == found["PREFECT_API_AUTH_STRING"]
    assert found["POSTGRES_PASSWORD"] in found["MLFLOW_BACKEND_STORE_URI"]
    assert found["POSTGRES_PASSWORD"] in found["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    (identity,) = json.loads(found["s3.json"])["identities"]
    assert identity["credentials"] == [
        {"accessKey": found["AWS_ACCESS_KEY_ID"], "secretKey": found["AWS_SECRET_ACCESS_KEY"]}
    ]
    assert len({*found.values()}) == len(found) - 2, "two secrets stand in two files each"


def test_files_of_secrets_become_variables(tmp_path: Path) -> None:
    """Also as Kubernetes mounts them: links into a hidden folder."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "PGPASSWORD").write_text("with space and 'quotes' $HOME\n")
    (tmp_path / "PGPASSWORD").symlink_to("..data/PGPASSWORD")
    (tmp_path / "AWS_SECRET_ACCESS_KEY").write_text("second")
    (tmp_path / "kubernetes.io" / "serviceaccount").mkdir(parents=True)
    command = [
        "sh",
        KIT / "entrypoint.sh",
        "sh",
        "-c",
        'echo "$PGPASSWORD|$AWS_SECRET_ACCESS_KEY|$1"',
        "-",
        "an argument",
    ]
    environment = {"PATH": os.environ["PATH"], "SECRETS": str(tmp_path)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=30)
    assert done.stdout == "with space and 'quotes' $HOME|second|an argument\n"


def test_a_secret_that_cannot_be_read_ends_the_container(tmp_path: Path) -> None:
    """Empty, a server's credential would let everybody in. Root may read every file, so reading fails here at cat."""
    (tmp_path / "cat").write_text("#!/bin/sh\necho Permission denied >&2\nexit 1\n")
    (tmp_path / "cat").chmod(0o755)
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "PREFECT_SERVER_API_AUTH_STRING").write_text("draftsmith:word")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SECRETS": str(secrets)}
    command = ["sh", KIT / "entrypoint.sh", "echo", "started"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{secrets}/PREFECT_SERVER_API_AUTH_STRING cannot be read by user" in done.stderr
    assert "chmod" in done.stderr


def test_a_container_without_secrets_starts(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "SECRETS": str(tmp_path / "none")}
    command = ["sh", KIT / "entrypoint.sh", "sh", "-c", "exit 7"]
    assert subprocess.run(command, env=environment, timeout=30, check=False).returncode == 7


def test_the_image_installs_what_there_is(tmp_path: Path) -> None:
    text = (KIT / "Containerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'OURS="\.\[(.*?)\]"', text)
    assert {*extras.split(",")} <= {*project["optional-dependencies"]}
    assert re.search(r"^sglang:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # What the image writes as the version is what its package then has.
    (substitution,) = re.findall(r"sed -i (\".*\") pyproject\.toml", text)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = f"VERSION=0.1.0+gabc1234; sed -i {substitution} pyproject.toml"
    subprocess.run(["sh", "-c", script], cwd=tmp_path, check=True, timeout=30)
    written = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert written["project"]["version"] == "0.1.0+gabc1234"
    assert written["tool"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_the_job_of_ray_names_settings_that_there_are() -> None:
    (job,) = (one["spec"] for one in MANIFESTS if one["kind"] == "RayJob")
    program, *_, command = shlex.split(job["entrypoint"])
    assert f"/usr/local/bin/{program}" in (KIT / "Containerfile").read_text()
    words = shlex.split(command)
    recipe, overrides = words[5], words[6:]
    config = load_recipe(ROOT / recipe, overrides)
    assert config.pools.kind == "ray"
    assert config.transport.kind == "mooncake"
    assert config.transport.address == "auto"


def test_a_pod_of_the_pool_has_what_a_deployment_asks_for() -> None:
    """By Prefect's own rule for templates and job variables."""
    template = json.loads((KIT / "kubernetes" / "work-pool.json").read_text())
    manifest = template["job_configuration"]["job_manifest"]
    assert manifest["spec"]["template"]["spec"]["containers"][0]["workingDir"] == "{{ working_dir }}"
    kept = {"job_configuration": {"env": "{{ env }}", "working_dir": "{{ working_dir }}"}} | {
        "variables": template["variables"]
    }
    asked = {"working_dir": "/data/elsewhere", "env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}
    found = asyncio.run(ProcessJobConfiguration.from_template_and_values(kept, asked, client=object()))  # type: ignore[arg-type]
    assert str(found.working_dir) == "/data/elsewhere"
    assert found.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    assert found.env["RAY_HEAD"] == "draftsmith-head-svc:6379"


def test_files_that_are_named_are_there() -> None:
    texts = [file.read_text() for file in KIT.rglob("*") if file.is_file() and "secrets" not in file.parts]
    named = {path for text in texts for path in re.findall(r"/opt/draftsmith/([\w./-]+\.(?:sh|json|yaml))", text)}
    assert len(named) >= 4
    assert [path for path in named if not (ROOT / path).is_file()] == []
    table = re.findall(r"^\| (`[^|]+`) \|", (ROOT / "docs" / "production.md").read_text(), re.MULTILINE)
    files = [
        name for row in table for name in re.findall(r"`([\w./-]+)`", row) if "." in name or name == "Containerfile"
    ]
    assert len(files) >= 9
    assert [name for name in files if not (KIT / name).is_file()] == []
