"""What an export says of itself, and what is refused."""

import json
from pathlib import Path

import pytest

from infra.records.drafts import BLOCK
from models.config.draft import parse_draft_config
from models.export.description import FLOATS, block_of, check_precision, read_description

DRAFT = {"method": "eagle3", "vocab_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
DRAFT |= {"intermediate_size": 20}


OTHER = {"dtype": "float16"}


def write(folder: Path, settings: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("served", [True, False])
def test_what_is_written_is_read(tmp_path, served):
    config = parse_draft_config(DRAFT)
    block = block_of(config, (1, 4), 40, served=served)
    found = read_description(write(tmp_path, {"dtype": "bfloat16", BLOCK: {"target_revision": "r"} | block}))
    assert (found.config, found.aux_layer_ids, found.target_vocab_size) == (config, (1, 4), 40)
    assert (found.served, found.target_revision, found.dtype) == (served, "r", "bfloat16")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["X"]}, "does not say how the draft is built"),
        ({"dtype": "float16", BLOCK: {"draft": DRAFT}}, "does not say how the draft is built"),
        ({BLOCK: {"draft": DRAFT, "served_by": []}}, "does not say how the draft is built"),
        (OTHER | {BLOCK: {"draft": DRAFT | {"method": "eagle9"}, "served_by": []}}, "another version of Draftsmith"),
        (OTHER | {BLOCK: {"draft": DRAFT | {"no_such_knob": 1}, "served_by": []}}, "another version of Draftsmith"),
    ],
)
def test_what_cannot_be_built_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        read_description(write(tmp_path, settings))


def test_a_folder_without_an_export_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not an exported draft"):
        read_description(tmp_path)


@pytest.mark.parametrize(("trained", "now"), [(None, "fp8 128x128"), ("fp8 128x128", None), ("modelopt NVFP4", "fp8")])
def test_a_benchmark_at_another_precision_is_refused(tmp_path, trained, now):
    block = block_of(parse_draft_config(DRAFT), (1, 4), 40, served=True)
    precision = {"quantization": trained, "dtype": "bfloat16", "engine": "sglang 0.5.23"}
    draft = write(tmp_path, {"dtype": "bfloat16", BLOCK: block | {"precision": precision}})
    check_precision(draft, trained)
    told = f"in {trained or FLOATS}, and here the target is in {now or FLOATS}"
    with pytest.raises(ValueError, match=told):
        check_precision(draft, now)
    write(tmp_path, {"dtype": "bfloat16", BLOCK: block})
    check_precision(draft, now)  # a published draft says nothing
