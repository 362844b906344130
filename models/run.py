"""One run as the processes of the data plane open it: recipe, target, samples, ledger, transport."""

from dataclasses import dataclass
from pathlib import Path

import torch

from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import SampleSlot, SamplesRecord, TargetRecord
from infra.records.sharing import Sharing
from infra.refusal import Refusal
from infra.transport.base import Transport
from infra.transport.budget import memory_budget
from infra.transport.choice import open_transport
from models.config.recipe import RunConfig, read_config
from models.data.sample_set import SampleSet, Split
from models.dtypes import DTYPES
from models.targets.layout import HiddenStateLayout


@dataclass(frozen=True)
class RunWithTarget:
    """A run whose target is prepared."""

    folder: RunFolder
    config: RunConfig
    target: TargetRecord

    @property
    def layout(self) -> HiddenStateLayout:
        """Shapes and data type of the hidden states."""
        dtype = DTYPES[self.config.generator.stored_dtype]
        return HiddenStateLayout(
            aux_count=len(self.config.target.aux_layer_ids),
            hidden_size=self.target.hidden_size,
            dtype=dtype,
            top_token=self.config.top_token(self.target.vocab_size),
            embedded=self.config.embedded,
        )


@dataclass(frozen=True)
class PreparedRun(RunWithTarget):
    """A run whose target and samples are prepared."""

    samples: SamplesRecord

    @classmethod
    def open(cls, path: Path) -> "PreparedRun":
        """Read the run's records. Raises Refusal if the run is not prepared."""
        folder = RunFolder(path.absolute())
        for file in (folder.config, folder.target, folder.samples):
            if not file.is_file():
                raise Refusal(f"{file} is missing: prepare the run with `draftsmith retrain`")
        records = TargetRecord.read(folder.target), SamplesRecord.read(folder.samples)
        return cls(folder, read_config(folder.config), *records)

    @property
    def sharing(self) -> Sharing:
        """How generators and trainer share devices; two pools where no flow has decided."""
        if self.folder.sharing.is_file():
            return Sharing.read(self.folder.sharing)
        return Sharing(mode="apart", why="", budget_bytes=memory_budget(self.config.transport, 0))

    def open_samples(self, split: Split = "train") -> SampleSet:
        return SampleSet.open(Path(self.samples.path), split)

    def epoch_slots(self, epoch: int) -> list[SampleSlot]:
        """Every training sample of an epoch in its order."""
        lengths = self.open_samples().lengths.tolist()
        order = epoch_order(self.config.seed, epoch, len(lengths))
        return [SampleSlot(ordinal=o, sample=s, tokens=lengths[s]) for o, s in enumerate(order)]

    def open_transport(self) -> Transport:
        return open_transport(self.config.transport, self.folder)

    def open_ledger(self) -> Ledger:
        """Open the run's ledger, and register the run in it if necessary."""
        config = self.config
        ledger = Ledger.open(config.ledger.url or self.folder.ledger_url, self.folder.name)
        ledger.create_run(
            budget_bytes=self.sharing.budget_bytes,
            bytes_per_token=self.layout.bytes_per_token,
            lease_seconds=config.ledger.lease_seconds,
            max_attempts=config.ledger.max_attempts,
            order=config.training.order,
        )
        return ledger


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The order of one epoch: a permutation of `count` samples that depends only on its arguments."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()
