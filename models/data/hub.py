"""Datasets of the Hugging Face Hub: `hf://datasets/OWNER/NAME[@REVISION][/PATH][?config=C&split=S]`.

Without a path, config and split are looked up in the Parquet files that the Hub makes of every public dataset (branch
`refs/convert/parquet`), so no code of the dataset runs and its own layout does not matter. With a path, the files there
are read as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from infra.refusal import Refusal

SCHEME = "hf://"
CONVERTED = "refs/convert/parquet"
FORM = "hf://datasets/OWNER/NAME[@REVISION][/PATH], or without PATH [?config=C&split=S]"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class HubDataset:
    """A parsed address."""

    repository: str
    revision: str | None
    path: str
    config: str | None
    split: str

    @property
    def patterns(self) -> list[str]:
        """Glob patterns of the files."""
        return [self.path, f"{self.path}/*"] if self.path else [f"{self.config or '*'}/{self.split}/*"]

    def choose(self, names: Sequence[str], one_kind: Callable[[Iterable[str]], list[str]]) -> list[str]:
        """The files of this address among all `names`. Raises Refusal, listing what exists, if there are none."""
        if self.path:
            below = [name for name in names if name == self.path or name.startswith(f"{self.path}/")]
            return one_kind(below)
        config = self.config or self._only_config(names)
        splits = sorted({name.split("/")[1] for name in names if name.startswith(f"{config}/")})
        if self.split not in splits:
            raise Refusal(
                f"data.source: {self.repository} has no split {self.split!r} of config {config!r}; there are "
                f"{splits or self._configs(names)}. Choose by ?config=...&split=..., or name files by a path"
            )
        return one_kind(name for name in names if name.startswith(f"{config}/{self.split}/"))

    def _only_config(self, names: Sequence[str]) -> str:
        configs = self._configs(names)
        if len(configs) != 1 and "default" not in configs:
            raise Refusal(
                f"data.source: {self.repository} has the configs {configs}: choose one by ?config=... in the address"
            )
        return configs[0] if len(configs) == 1 else "default"

    @staticmethod
    def _configs(names: Sequence[str]) -> list[str]:
        return sorted({name.split("/")[0] for name in names if name.endswith(".parquet")})


@dataclass(frozen=True)
class HubFiles:
    """Files of one commit in the local Hub cache."""

    folder: Path
    names: tuple[str, ...]
    repository: str
    revision: str
    """Commit hash."""


def parse(url: str) -> HubDataset:
    """Parse an address. Raises Refusal for one of another form."""
    parts = urlsplit(url)
    owner, _, rest = parts.path.strip("/").partition("/")
    name, _, path = rest.partition("/")
    name, _, revision = name.partition("@")
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if parts.netloc != "datasets" or not owner or not name or set(query) - {"config", "split"} or (path and query):
        raise Refusal(f"data.source {url!r} is not of the form {FORM}")
    revision = unquote(revision) or (None if path else CONVERTED)
    return HubDataset(f"{owner}/{name}", revision, unquote(path), query.get("config"), query.get("split", "train"))


def fetch(url: str, one_kind: Callable[[Iterable[str]], list[str]]) -> HubFiles:
    """Download the files of an address, or find them in the Hub's cache.

    Raises Refusal for an address, dataset, revision, config or split that does not exist, and if neither Hub nor cache
    has the files.
    """
    wanted = parse(url)
    try:
        chosen = wanted.choose(_listed(wanted), one_kind)
        # By name, so that a branch is found again in the cache without a network. The folder is named after the commit.
        folder = Path(
            snapshot_download(wanted.repository, repo_type="dataset", revision=wanted.revision, allow_patterns=chosen)
        )
    except LocalEntryNotFoundError as error:
        raise Refusal(
            f"data.source: {wanted.repository} is not in the Hugging Face cache, and the Hub cannot be reached: check "
            "the network, or give a file or folder"
        ) from error
    except HfHubHTTPError as error:
        raise Refusal(
            f"data.source: the Hub refused {wanted.repository} at revision {wanted.revision or 'main'}: {error}. Check "
            "name and revision; for a gated dataset accept its terms and run `hf auth login`; a dataset that the Hub "
            "does not convert to Parquet needs a path to its files"
        ) from error
    return HubFiles(folder, tuple(chosen), wanted.repository, folder.name)


def _listed(wanted: HubDataset) -> list[str]:
    """The names of all files; from the cache if the Hub cannot be reached."""
    try:
        info = HfApi().dataset_info(wanted.repository, revision=wanted.revision, timeout=TIMEOUT_S)
    except (OfflineModeIsEnabled, httpx.TransportError):
        folder = Path(
            snapshot_download(
                wanted.repository,
                repo_type="dataset",
                revision=wanted.revision,
                allow_patterns=wanted.patterns,
                local_files_only=True,
            )
        )
        files = (path for path in folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(folder).as_posix() for path in files)
    return sorted(sibling.rfilename for sibling in info.siblings or ())
