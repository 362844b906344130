"""The one place that reads environment variables."""

import os
import sys
import tomllib
from pathlib import Path

from infra.records.data_path import CaptureSpec

TRUE = frozenset({"1", "true", "yes", "on"})


def cache_folder() -> Path:
    """Converted targets and tokenized samples: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE", Path.home() / ".cache" / "draftsmith")).expanduser()


def runs_folder() -> Path:
    """Run folders: $DRAFTSMITH_RUNS, or ./runs."""
    return Path(os.environ.get("DRAFTSMITH_RUNS", "runs")).expanduser().absolute()


def tracking_uri() -> str:
    """MLflow: $MLFLOW_TRACKING_URI, or a SQLite file beside the run folders."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs_folder() / 'mlflow.db'}"


def tracking_database() -> str | None:
    """MLflow's own database, which only its clean-up needs: $MLFLOW_BACKEND_STORE_URI, or a SQLite tracking address."""
    uri = tracking_uri()
    return os.environ.get("MLFLOW_BACKEND_STORE_URI") or (uri if uri.startswith("sqlite:") else None)


def shared_memory_folder() -> Path:
    """Where transports keep objects: $DRAFTSMITH_SHM, or /dev/shm."""
    return Path(os.environ.get("DRAFTSMITH_SHM", "/dev/shm"))


DATA_PLANE = (
    *("DRAFTSMITH_", "PYTHON", "OMP_", "MKL_", "TORCH", "NCCL_", "GLOO_", "CUDA_", "SGLANG_", "MC_"),
    *("HF_", "TRANSFORMERS_", "MLFLOW_", "AWS_", "PG"),
    *("SSL_CERT_", "http", "no_proxy", "HTTP", "NO_PROXY", "all_proxy"),
)
"""How the names of the variables begin that the data plane or its libraries read."""


def data_plane_environment() -> dict[str, str]:
    """What a command of the data plane gets to see of this environment when it runs on another machine."""
    return {name: value for name, value in os.environ.items() if name.startswith(DATA_PLANE)}


def slurm_environment() -> dict[str, str]:
    """For Slurm's commands: a job that this process itself runs in is not the one that is meant."""
    of_a_job = ("SLURM_", "SBATCH_", "SRUN_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(of_a_job)}
    return kept | {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}


MOONCAKE = {
    "MC_STORE_MEMCPY": "0",  # on hosts without RDMA its copying threads crash (Mooncake #1986)
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # else a master that is away blocks for a minute and a half
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else every transfer uses up a port for 60 s
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "WARNING",
}

LOOPBACK = "lo"
RANKS_STORE = "DRAFTSMITH_RANKS_STORE"

CAPTURE = "DRAFTSMITH_CAPTURE"
"""JSON of a CaptureSpec: set for an engine whose plugin is to capture."""


def capture_spec() -> CaptureSpec | None:
    """What the capture plugin of this engine captures, and where to; None: it does not."""
    text = os.environ.get(CAPTURE)
    return None if text is None else CaptureSpec.model_validate_json(text)


def sglang_environment() -> Path:
    """The environment that SGLang lives in: $DRAFTSMITH_SGLANG, or .venv-sglang beside this one."""
    return Path(os.environ.get("DRAFTSMITH_SGLANG", Path(sys.prefix).parent / ".venv-sglang")).expanduser()


def sglang_platform() -> str | None:
    """The platform plugin that SGLang is told to use, by $SGLANG_PLATFORM."""
    return os.environ.get("SGLANG_PLATFORM")


def sglang_api_key() -> str | None:
    """What watched SGLang servers want to see as --api-key: $DRAFTSMITH_SGLANG_API_KEY."""
    return os.environ.get("DRAFTSMITH_SGLANG_API_KEY") or None


def use_mooncake_settings() -> None:
    """What Mooncake's library reads when its first client is made; what a person has set stays."""
    for name, value in MOONCAKE.items():
        os.environ.setdefault(name, value)


def leased_gpus() -> list[str]:
    """The GPUs that this process's pool gave it, by $CUDA_VISIBLE_DEVICES."""
    return [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]


def permitted_gpus() -> tuple[str, ...]:
    """The GPUs (UUIDs) that runs of this machine may lease, by $DRAFTSMITH_GPUS; empty: all that there are."""
    return tuple(one for one in os.environ.get("DRAFTSMITH_GPUS", "").split(",") if one)


def rank_environment(rank: int, world: int, store: int) -> dict[str, str]:
    """What a trainer rank is told: its place, and the descriptor of the file through which the ranks find each other.

    All ranks run on one machine, so gloo and NCCL are held to loopback, whatever interface the surroundings name.
    """
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    return place | {RANKS_STORE: str(store), "GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}


def rank_from_environment() -> tuple[int, int]:
    """(rank, world size) as the launcher sets them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ranks_store() -> Path:
    """The file through which the ranks of this machine find each other: inherited from the launcher, without a name."""
    return Path(f"/proc/self/fd/{os.environ[RANKS_STORE]}")


def prefect_home() -> Path:
    """Prefect's own folder, with the database of runs made without a server: $PREFECT_HOME, or ~/.prefect."""
    return Path(os.environ.get("PREFECT_HOME", Path.home() / ".prefect")).expanduser()


def prefect_api_url() -> str | None:
    """The Prefect server flows report to: $PREFECT_API_URL, or the active profile's; None = one of their own."""
    found = os.environ.get("PREFECT_API_URL")
    if found:
        return found
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", prefect_home() / "profiles.toml"))
    try:
        content = tomllib.loads(profiles.read_text())
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or content.get("active", "")
    return content.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")


def use_heartbeats() -> None:
    """Flows of this process say that they live as often as prefect.yaml's do: its `recover` waits 90 s for it."""
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")


def use_private_prefect_api(url: str, credential: str) -> None:
    """Point this process, and what it starts, to a Prefect server that ends with it."""
    os.environ["PREFECT_API_URL"] = url
    os.environ["PREFECT_API_AUTH_STRING"] = credential
    os.environ["DRAFTSMITH_PRIVATE_PREFECT"] = "1"


def prefect_is_private() -> bool:
    """Whether the Prefect server ends with the command that started it, so that its addresses are of no use later."""
    return "DRAFTSMITH_PRIVATE_PREFECT" in os.environ


def allows_mlflow_file_store() -> bool:
    """Whether $MLFLOW_ALLOW_FILE_STORE permits MLflow's old store of plain files."""
    return os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in TRUE


def proxy_for(host: str) -> str | None:
    """The proxy that plain HTTP to `host` goes through ($http_proxy or $all_proxy, less $no_proxy); None = direct."""
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    if proxy_bypass(host):
        return None
    return proxies.get("http") or proxies.get("all")


def hub_offline() -> bool:
    """Whether $HF_HUB_OFFLINE (or its older name $TRANSFORMERS_OFFLINE) forbids downloads from the Hugging Face Hub."""
    return any(os.environ.get(name, "").lower() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_token() -> str | None:
    """Where a Hugging Face token is kept, never the token: "$HF_TOKEN", a file's path, or None."""
    if os.environ.get("HF_TOKEN"):
        return "$HF_TOKEN"
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")).expanduser()
    file = Path(os.environ.get("HF_TOKEN_PATH", home / "token")).expanduser()
    return str(file) if file.is_file() else None


def unless_set(defaults: dict[str, str]) -> dict[str, str]:
    """Those of the variables that the environment leaves open."""
    return {name: value for name, value in defaults.items() if name not in os.environ}
