"""The Hugging Face Hub: local folders or snapshots of models, and the files of datasets.

A dataset's address is `hf://datasets/OWNER/NAME[@REVISION][/PATH][?config=C&split=S]`. Without a path, config and
split are looked up in the Parquet files that the Hub makes of every public dataset (branch `refs/convert/parquet`), so
no code of the dataset runs and its own layout does not matter. With a path, the files there are read as they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from infra.hub_errors import client_error, hub_refusals
from infra.refusal import Refusal
from infra.settings import expanded

SCHEME = "hf://"
CONVERTED = "refs/convert/parquet"
FORM = "hf://datasets/OWNER/NAME[@REVISION][/PATH], or without PATH [?config=C&split=S]"
TIMEOUT_S = 60.0


def model_folder(
    setting: str, name: str, revision: str | None, patterns: list[str], ignored: list[str] | None = None
) -> Path:
    """The local folder `name`, or the Hub's snapshot of the files that match `patterns` and none of `ignored`.

    In both, `*` matches `/`, too. Raises Refusal, with the recipe's `setting`, if there is neither.
    """
    folder = expanded(setting, name)
    if folder.is_dir():
        # A link may lead elsewhere before a run ends. Of another folder other machines know the path as it is given.
        return folder.resolve() if folder.is_symlink() else folder.absolute()
    with hub_refusals(f"{setting}: there is no folder {name} (looked in {Path.cwd()})", name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))


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

    def below(self, names: Sequence[str]) -> list[str]:
        """The names of this address among all `names`. Raises Refusal, listing what exists, without such a split."""
        if self.path:
            return [name for name in names if name == self.path or name.startswith(f"{self.path}/")]
        configs = sorted({name.split("/")[0] for name in names if name.endswith(".parquet")})
        config = self.config or (configs[0] if len(configs) == 1 else "default")
        if self.config is None and config not in configs:
            raise Refusal(
                f"data.source: {self.repository} has the configs {configs}: choose one by ?config=... in the address"
            )
        splits = sorted({name.split("/")[1] for name in names if name.startswith(f"{config}/")})
        if self.split not in splits:
            raise Refusal(
                f"data.source: {self.repository} has no split {self.split!r} of config {config!r}; there are "
                f"{splits or configs}. Choose by ?config=...&split=..., or name files by a path"
            )
        return [name for name in names if name.startswith(f"{config}/{self.split}/")]


def parse(url: str) -> HubDataset:
    """Parse a dataset's address. Raises Refusal for one of another form."""
    parts = urlsplit(url)
    owner, _, rest = parts.path.strip("/").partition("/")
    name, _, path = rest.partition("/")
    name, _, revision = name.partition("@")
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    if parts.netloc != "datasets" or not owner or not name or set(query) - {"config", "split"} or (path and query):
        raise Refusal(f"data.source {url!r} is not of the form {FORM}")
    revision = unquote(revision) or (None if path else CONVERTED)
    return HubDataset(f"{owner}/{name}", revision, unquote(path), query.get("config"), query.get("split", "train"))


def fetch(wanted: HubDataset, one_kind: Callable[[Iterable[str]], list[str]]) -> tuple[Path, list[str]]:
    """Folder (named after the commit) and names of a dataset's files, downloaded or from the Hub's cache.

    Raises Refusal for a dataset, revision, config or split that does not exist, and if neither Hub nor cache has it.
    """
    repository, revision = wanted.repository, wanted.revision
    hint = "; a dataset that the Hub does not convert to Parquet needs a path to its files"
    with hub_refusals("data.source", repository, revision, hint):
        names = one_kind(wanted.below(_names(wanted)))
        # By the name of the revision, so that a branch is found again in the cache without a network.
        folder = snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=names)
    return Path(folder), names


def _names(wanted: HubDataset) -> list[str]:
    """The names of all files; from the cache if the Hub cannot be reached."""
    repository, revision = wanted.repository, wanted.revision
    try:
        info = HfApi().dataset_info(repository, revision=revision, timeout=TIMEOUT_S)
    except HfHubHTTPError:
        raise  # the Hub was reached
    except (OfflineModeIsEnabled, client_error()):
        cached = snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            allow_patterns=wanted.patterns,
            local_files_only=True,
        )
        files = (path for path in Path(cached).rglob("*") if path.is_file())
        return sorted(path.relative_to(cached).as_posix() for path in files)
    return sorted(sibling.rfilename for sibling in info.siblings or ())
