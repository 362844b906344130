"""Every target family in the process's own stages, as tiny random models of the real architectures."""

import sys
from pathlib import Path

import pytest

from infra.records.data_path import TargetRecord

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import target_stages as stages
from target_families import FAMILIES, write


@pytest.mark.parametrize("name", FAMILIES)
def test_prepared_captured_and_decoded(name: str, tiny_target: TargetRecord, tmp_path: Path) -> None:
    folder = write(FAMILIES[name], tmp_path, Path(tiny_target.path))
    stages.prepare(folder)
    loaded = stages.load(folder)
    stages.check_canary(loaded)
    stages.check_canary_in_bfloat16(loaded, folder)
    stages.check_packed(loaded, folder)
    if name == "llama4":
        with pytest.raises(NotImplementedError, match="meta tensor"):
            stages.check_large(loaded, folder, tmp_path / "converted")
    else:
        stages.check_large(loaded, folder, tmp_path / "converted")
    stages.check_head(loaded, folder)
    stages.check_plain(loaded)
    stages.check_chain(loaded)
    stages.check_tree(loaded)
    stages.check_batch(loaded)
