"""What proposals are drawn from: the distributions by which SGLang's DSpark and DFlash 2 draw theirs, and verify."""

import json
import subprocess

import pytest
import torch

from infra.sglang.command import sglang_python
from models.drafts.sampling import Sampling

LOGITS = [3.0, 2.0, 1.0, 0.0, -1.0, -1.0, -1.0, -1.0]
RULES = [(0.7, 0.8, 0), (0.6, 0.95, 3), (1.0, 1.0, 5), (0.7, 0.8, 1)]
SAID = """
import json, sys, torch
from types import SimpleNamespace as Of
from sglang.srt.models.dflash import CandidateSelector
from sglang.srt.speculative.dspark_components.dspark_draft import resolve_draft_params, resolve_greedy_mask
from sglang.srt.speculative.dspark_components.dspark_verify import _draft_probs
logits, rules = json.loads(sys.argv[1])
logits, found = torch.tensor(logits), []
for temperature, top_p, top_k in rules:
    top_ks = torch.tensor([top_k or 1 << 30])
    asked = Of(temperatures=torch.tensor([[temperature]]), top_ks=top_ks, top_ps=torch.tensor([top_p]))
    law = resolve_draft_params(sampling_info=asked, bs=1, device=torch.device("cpu"))
    block = Of(greedy_draft=False, corrected_logits=logits.view(1, 1, -1), temperatures=law.temperatures)
    dspark = _draft_probs(block, len(logits), logits.device).flatten()
    if law.greedy_mask:  # it proposes by its step's temperature, 0, and its rule for greedy requests verifies
        dspark = torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    _, dflash2 = CandidateSelector.sample_path(
        Of(top_k=len(logits)),
        candidate_ids=torch.arange(len(logits)).view(1, 1, -1),
        scores=logits.expand(1, 1, len(logits), -1),
        uniforms=torch.full((1, 1), 0.5),
        temperatures=law.temperatures,
        greedy_mask=resolve_greedy_mask(bs=1, sampling_info=asked, device=logits.device),
    )
    found.append({"dspark": dspark.tolist(), "dflash2": dflash2.flatten().tolist()})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def said(sglang_that_forks: None) -> dict[tuple[float, float, int], dict[str, list[float]]]:
    command = [str(sglang_python()), "-c", SAID, json.dumps([LOGITS, RULES])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip(RULES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("method", ["dspark", "dflash2"])
@pytest.mark.parametrize("rule", RULES)
def test_proposals_are_drawn_as_sglang_draws_them(rule, method, said):
    temperature, top_p, top_k = rule
    ours = Sampling(temperature, top_p, top_k=top_k).drafted(torch.tensor(LOGITS))
    assert ours.tolist() == pytest.approx(said[rule][method], abs=1e-6)
