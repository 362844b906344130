"""Context parallelism: ranks that share samples find what one rank does. Real processes, gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.drafts.context import ContextShare

SCRIPT = Path(__file__).with_name("context_ranks.py")
LENGTHS = st.lists(st.integers(1, 90), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what every rank found, for every size of the group: `SIZE-RANK.pt`."""
    folder = tmp_path_factory.mktemp("outcomes")
    subprocess.run([sys.executable, str(SCRIPT), str(folder)], timeout=300, check=True)
    return folder


@pytest.mark.parametrize("size", [2, 3])
def test_loss_gradients_and_counts_are_those_of_one_rank(outcomes: Path, size: int) -> None:
    alone = torch.load(outcomes / "1-0.pt")
    shared = [torch.load(outcomes / f"{size}-{rank}.pt") for rank in range(size)]
    for name, expected in alone.items():
        for key, value in expected.items():
            found = torch.stack([rank[name][key] for rank in shared]).sum(0)
            if value.is_floating_point():
                assert (found - value).norm() <= 1e-5 * value.norm(), (name, key)
            else:
                assert torch.equal(found, value), (name, key)
    assert sum(int(expected["supervised"]) for expected in alone.values()) > 100


@given(lengths=LENGTHS, size=st.integers(1, 5), reach=st.integers(1, 8))
def test_every_row_is_computed_once_and_finds_its_states(lengths: list[int], size: int, reach: int) -> None:
    device, counts = torch.device("cpu"), torch.tensor(lengths)
    ends = counts.cumsum(0).repeat_interleave(counts)
    starts = ends - counts.repeat_interleave(counts)
    shares = [ContextShare(tuple(lengths), size, rank, reach) for rank in range(size)]
    rows = [share.packed_rows(device) for share in shares]
    assert torch.cat(rows).sort().values.tolist() == list(range(sum(lengths)))
    for share, mine in zip(shares, rows, strict=True):
        assert share.row_index(device)[mine].tolist() == list(range(len(mine)))
        assert share.positions(device).tolist() == (mine - starts[mine]).tolist()
        predicted = mine[:, None] + torch.arange(1, reach + 1)
        needed = predicted[predicted < ends[mine][:, None]].unique()
        index = share.state_index(device)
        assert (index >= 0).nonzero().squeeze(-1).tolist() == needed.tolist()
        assert index[needed].tolist() == list(range(len(needed)))


@given(length=st.integers(64, 1000), size=st.integers(1, 8))
def test_ranks_have_equal_work(length: int, size: int) -> None:
    """Rows, and pairs of a row with one that it sees."""
    runs = [ContextShare((length,), size, rank, 1).runs for rank in range(size)]
    rows = [sum(run.rows for run in mine) for mine in runs]
    pairs = [sum(sum(range(run.start + 1, run.stop + 1)) for run in mine) for mine in runs]
    assert max(rows) - min(rows) <= 2
    assert max(pairs) - min(pairs) <= 2 * length
