"""Environment variables: the only module that reads them."""

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from infra.records.data_path import CaptureSpec
from infra.records.servers import ServerMachines
from infra.refusal import Refusal

TRUE = frozenset({"1", "true", "yes", "on"})


def expanded(setting: str, path: str) -> Path:
    """`path` with `~` replaced by a home folder. Raises Refusal, with the setting's name, where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise Refusal(f"{setting} {path!r}: {error}: write the folder's whole path") from error


def cache_folder() -> Path:
    """Folder of converted targets and tokenized samples: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return expanded("$DRAFTSMITH_CACHE", os.environ.get("DRAFTSMITH_CACHE", "~/.cache/draftsmith"))


def runs_folder() -> Path:
    """Parent of the run folders: $DRAFTSMITH_RUNS, or ./runs."""
    return expanded("$DRAFTSMITH_RUNS", os.environ.get("DRAFTSMITH_RUNS", "runs")).absolute()


def tracking_uri() -> str:
    """MLflow's address: $MLFLOW_TRACKING_URI, or a SQLite file beside the run folders.

    Raises Refusal for a folder that such an address cannot name.
    """
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    if "?" in str(runs_folder()):
        raise Refusal(f"{runs_folder()}: the address of MLflow's database cannot hold a ?: set $DRAFTSMITH_RUNS")
    return f"sqlite:///{runs_folder() / 'mlflow.db'}"


def registry_uri() -> str | None:
    """The registry that MLflow's own functions would use, by $MLFLOW_REGISTRY_URI; ours is the tracking server's."""
    return os.environ.get("MLFLOW_REGISTRY_URI") or None


@contextmanager
def tracking_variable_kept() -> Iterator[None]:
    """MLflow writes an address that it is given to $MLFLOW_TRACKING_URI, where the next run of this process that names
    no address, and every child, would take it for the operator's; here the variable is put back."""
    before = os.environ.get("MLFLOW_TRACKING_URI")
    try:
        yield
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def tracking_database() -> str | None:
    """MLflow's database, for its clean-up: $MLFLOW_BACKEND_STORE_URI, or a SQLite tracking address."""
    uri = tracking_uri()
    return os.environ.get("MLFLOW_BACKEND_STORE_URI") or (uri if uri.startswith("sqlite:") else None)


def shared_memory_folder() -> Path:
    """Folder of the transports' shared memory: $DRAFTSMITH_SHM, or /dev/shm."""
    return Path(os.environ.get("DRAFTSMITH_SHM", "/dev/shm"))


DATA_PLANE = (
    *("DRAFTSMITH_", "PYTHON", "OMP_", "MKL_", "TORCH", "NCCL_", "GLOO_", "CUDA_", "SGLANG_", "MC_"),
    *("HF_", "TRANSFORMERS_", "MLFLOW_", "AWS_", "PG"),
    *("SSL_CERT_", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("http", "no_proxy", "HTTP", "NO_PROXY", "all_proxy", "ALL_PROXY"),
)
"""Prefixes of variables that the data plane and its libraries read."""


def use_one_tokenizer_thread() -> None:
    """Tokenize in this thread: as many processes as cores do it at the same time."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def data_plane_environment() -> dict[str, str]:
    """The variables that a data-plane command gets on another machine."""
    reach_loopback_directly()
    return {name: value for name, value in os.environ.items() if name.startswith(DATA_PLANE)}


def slurm_environment() -> dict[str, str]:
    """For Slurm's commands: without the variables of a Slurm job in which this process may itself run."""
    prefixes = ("SLURM_", "SBATCH_", "SRUN_")
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not name.startswith(prefixes)}


def tools_environment(program: str) -> dict[str, str]:
    """$PATH with the programs of the virtual environment that `program` is of, as if it were activated.

    SGLang starts ninja by its bare name, and it is in its environment only.
    """
    folder = Path(program).parent
    if not (folder.parent / "pyvenv.cfg").is_file():
        return {}
    return {"PATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PATH"))))}


MOONCAKE = {
    "MC_STORE_MEMCPY": "0",  # copying threads crash on hosts without RDMA (Mooncake #1986)
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # otherwise an unreachable master blocks for 90 s
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # otherwise every transfer occupies a port for 60 s
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "WARNING",
}

LOOPBACK = "lo"
RANKS_STORE = "DRAFTSMITH_RANKS_STORE"

CAPTURE = "DRAFTSMITH_CAPTURE"
"""JSON of the CaptureSpec of an engine whose plugin captures."""


SERVER_MACHINES = "DRAFTSMITH_SERVER_MACHINES"
"""JSON of the ServerMachines of a process that starts servers over several machines."""


def capture_spec() -> CaptureSpec | None:
    """The capture specification of this engine's plugin; None if it does not capture."""
    text = os.environ.get(CAPTURE)
    return None if text is None else CaptureSpec.model_validate_json(text)


def live_socket() -> Path | None:
    """Where an engine that serves users listens for runs that learn from it: $DRAFTSMITH_LIVE; None: they may not.

    A run's own engine has inherited the variable, where somebody has set it for everything.
    """
    text = None if CAPTURE in os.environ else os.environ.get("DRAFTSMITH_LIVE")
    return Path(text) if text else None


def sglang_environment() -> Path:
    """SGLang's virtual environment: $DRAFTSMITH_SGLANG, or .venv-sglang beside this one."""
    return Path(os.environ.get("DRAFTSMITH_SGLANG", Path(sys.prefix).parent / ".venv-sglang")).expanduser()


def sglang_platform() -> str | None:
    """SGLang's platform plugin by $SGLANG_PLATFORM."""
    return os.environ.get("SGLANG_PLATFORM")


def sglang_api_key() -> str | None:
    """The --api-key of watched SGLang servers: $DRAFTSMITH_SGLANG_API_KEY."""
    return os.environ.get("DRAFTSMITH_SGLANG_API_KEY") or None


def use_mooncake_settings() -> None:
    """Set variables that Mooncake reads when its first client is created, unless they are already set."""
    for name, value in MOONCAKE.items():
        os.environ.setdefault(name, value)


NO_GPU = frozenset({"", "-1", "NoDevFiles"})
"""How $CUDA_VISIBLE_DEVICES says that there is none: by habit, and by Slurm."""


def visible_devices() -> list[str] | None:
    """The GPUs that $CUDA_VISIBLE_DEVICES names, by position or UUID; None where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [gpu for gpu in map(str.strip, text.split(",")) if gpu not in NO_GPU]


def mps_folder() -> Path:
    """Where the control daemon of NVIDIA's Multi-Process Service (MPS) listens, if it runs."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))


def leased_gpus() -> list[str]:
    """The GPUs that this process leased, by $CUDA_VISIBLE_DEVICES."""
    return visible_devices() or []


def cuda_home() -> Path | None:
    """CUDA's toolkit, by $CUDA_HOME or $CUDA_PATH."""
    text = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return Path(text) if text else None


def c_compiler() -> str | None:
    """The C compiler that Triton is told to use, by $CC."""
    return os.environ.get("CC")


def permitted_gpus() -> tuple[str, ...]:
    """The GPUs that runs on this machine may lease, by position or UUID, from $DRAFTSMITH_GPUS; empty: all."""
    return tuple(filter(None, map(str.strip, os.environ.get("DRAFTSMITH_GPUS", "").split(","))))


def ignored_gpu_bytes() -> int | None:
    """Memory that others may hold on a GPU that is leased all the same, by $DRAFTSMITH_GPU_IGNORED_MIB; None: unset."""
    text = os.environ.get("DRAFTSMITH_GPU_IGNORED_MIB")
    return int(text) * 2**20 if text else None


def own_gpus() -> list[str]:
    """The GPU of this trainer rank; of any other process all that it leased."""
    gpus, local = leased_gpus(), os.environ.get("LOCAL_RANK")
    return gpus if local is None or not gpus else [gpus[int(local) % len(gpus)]]


def rank_environment(local: int, ranks: int, index: int, machines: int) -> dict[str, str]:
    """A trainer rank's numbers: `local` of the `ranks` ranks of machine `index` of `machines`."""
    places = {"LOCAL_RANK": local, "NODE_RANK": index, "RANK": index * ranks + local}
    counts = {"LOCAL_WORLD_SIZE": ranks, "WORLD_SIZE": machines * ranks}
    return {name: str(number) for name, number in (places | counts).items()}


def meeting_environment(store: str, interface: str) -> dict[str, str]:
    """The file through which the ranks find each other, and the only network interface on which they listen."""
    return {RANKS_STORE: store} | interface_environment(interface)


def interface_environment(interface: str) -> dict[str, str]:
    """The only network interface on which gloo and NCCL listen. Without `=` NCCL takes it as a prefix."""
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def server_part_environment(interface: str, address: str) -> dict[str, str]:
    """For a part of a server over several machines; left to itself SGLang takes the address of the default route."""
    return interface_environment(interface) | {"SGLANG_HOST_IP": address}


def server_machines() -> ServerMachines | None:
    """The machines over which this process's SGLang servers extend; None: this one alone."""
    text = os.environ.get(SERVER_MACHINES)
    return None if text is None else ServerMachines.model_validate_json(text)


class RankPlace(NamedTuple):
    """A trainer rank's numbers, and how many ranks there are, in all and on its machine."""

    rank: int
    world: int
    local: int
    local_world: int


def rank_from_environment() -> RankPlace:
    """This rank's place by its launcher; the only rank without one."""
    names = ("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")
    return RankPlace(*(int(os.environ.get(name, default)) for name, default in names))


def ranks_store() -> str:
    """Path of the file through which the ranks find each other."""
    return os.environ[RANKS_STORE]


def prefect_home() -> Path:
    """Prefect's folder, with the database of runs without a server: $PREFECT_HOME, or ~/.prefect."""
    return expanded("$PREFECT_HOME", os.environ.get("PREFECT_HOME", "~/.prefect"))


def check_home_folder() -> None:
    """Raise Refusal where this user has no home folder: neither Prefect's nor MLflow's library loads then."""
    try:
        Path.home()
    except RuntimeError as error:
        raise Refusal(
            "this user has no home folder, and /etc/passwd no entry: set $HOME to a folder of yours"
        ) from error


def prefect_api_url() -> str | None:
    """The Prefect server of flows, from where Prefect's client takes it; None: each flow starts its own.

    In this order: $PREFECT_API_URL; .env, prefect.toml and pyproject.toml in the working folder; the active profile.
    Prefect's own settings are not asked, because importing them takes a second.
    """
    if url := os.environ.get("PREFECT_API_URL") or _dotenv_api_url():
        return url
    project = _toml(Path("pyproject.toml")).get("tool", {}).get("prefect", {})
    for settings in (_toml(Path("prefect.toml")), project):
        if url := settings.get("api", {}).get("url"):
            return url
    profiles = _toml(Path(os.environ.get("PREFECT_PROFILES_PATH", prefect_home() / "profiles.toml")))
    active = os.environ.get("PREFECT_PROFILE") or profiles.get("active", "")
    return profiles.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")


def _dotenv_api_url() -> str | None:
    """$PREFECT_API_URL in the working folder's .env, in either case, as Prefect reads it."""
    if not Path(".env").is_file():
        return None
    from dotenv import dotenv_values

    return {key.upper(): value for key, value in dotenv_values(".env").items()}.get("PREFECT_API_URL")


def _toml(file: Path) -> dict[str, Any]:
    """A file's content; empty where it is missing or no TOML."""
    try:
        return tomllib.loads(file.read_text())
    except (FileNotFoundError, tomllib.TOMLDecodeError):
        return {}


def use_heartbeats() -> None:
    """Flows of this process send heartbeats as often as prefect.yaml's, whose `recover` waits 90 s for one."""
    os.environ.setdefault("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "30")


def use_private_prefect_api(url: str, credential: str) -> None:
    """Point this process and its children to a Prefect server that ends with it."""
    os.environ["PREFECT_API_URL"] = url
    os.environ["PREFECT_API_AUTH_STRING"] = credential
    os.environ["DRAFTSMITH_PRIVATE_PREFECT"] = "1"


def prefect_is_private() -> bool:
    """Whether the Prefect server ends with its command, so that its addresses are useless later."""
    return "DRAFTSMITH_PRIVATE_PREFECT" in os.environ


def allows_mlflow_file_store() -> bool:
    """Whether $MLFLOW_ALLOW_FILE_STORE permits MLflow's old file store."""
    return os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in TRUE


PROXIES = ("http_proxy", "https_proxy", "all_proxy")
NO_PROXY = (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy"))
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def reach_loopback_directly() -> None:
    """Have clients in this process and its children use the environment's proxies for other machines only.

    No proxy reaches this machine's loopback, where Prefect's and MLflow's servers of a run are.
    """
    if not any(name in os.environ or name.upper() in os.environ for name in PROXIES):
        return
    # Libraries differ in which spelling they prefer.
    before = {name: os.environ.get(name, os.environ.get(other, "")) for name, other in NO_PROXY}
    for name, value in before.items():
        hosts = [host for host in map(str.strip, value.split(",")) if host]
        os.environ[name] = ",".join(hosts if "*" in hosts else dict.fromkeys((*hosts, *LOOPBACK_HOSTS)))


def hub_offline() -> bool:
    """Whether $HF_HUB_OFFLINE (or $TRANSFORMERS_OFFLINE) forbids downloads from the Hugging Face Hub."""
    return any(os.environ.get(name, "").lower() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def hub_token() -> str | None:
    """The location of the Hugging Face token, never the token: "$HF_TOKEN", a file, or None."""
    if os.environ.get("HF_TOKEN"):
        return "$HF_TOKEN"
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    file = expanded("$HF_TOKEN_PATH", os.environ.get("HF_TOKEN_PATH", f"{home}/token"))
    return str(file) if file.is_file() else None


def unless_set(defaults: dict[str, str]) -> dict[str, str]:
    """The defaults of variables that are not set."""
    return {name: value for name, value in defaults.items() if name not in os.environ}
