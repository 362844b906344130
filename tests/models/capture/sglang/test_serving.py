"""Real SGLang servers with users, from which a run learns: with a draft, and without one, both with a prefix cache."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from infra.processes.process import Owner
from infra.records.data_path import TargetRecord
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.config import SGLangConfig
from infra.sglang.server import SGLangServer
from models.capture.engine import Captured, Prompt
from models.capture.sglang.serving import ServingEngine
from models.decoding.plain import continue_greedily
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel, eos_ids
from models.targets.weights import read_target_head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LONGEST, ANSWER = 256, 24
LAYERS = ("--return-aux-hidden-state-layer-ids", "1", "2", "3")


@dataclass(frozen=True)
class Operated:
    """A server that its operator has started, and how a run knows it."""

    server: SGLangServer
    socket: Path
    run: Callable[..., PreparedRun]
    reference: TargetModel

    def ask(self, tokens: list[int], **settings: Any) -> list[int]:
        """As a user does."""
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True} | settings.pop("sampling", {})
        body = {"input_ids": tokens, "sampling_params": sampling, **settings}
        answer = httpx.post(f"{self.server.address}/generate", json=body, timeout=120.0, trust_env=False)
        return answer.raise_for_status().json()["output_ids"]

    def engine(self, **live: Any) -> ServingEngine:
        return ServingEngine(self.run(**live), 0)

    def read_back(self, engine: ServingEngine, captured: Captured) -> HiddenStates:
        assert captured.answer is not None
        hidden = engine.layout.empty(len(captured.answer))
        engine.transport.get(captured.record, engine.layout.views(hidden))
        engine.transport.delete(captured.record.key)
        return engine.layout.restored(hidden)


@pytest.fixture(scope="module", params=["draft", "no draft"])
def operated(
    request: pytest.FixtureRequest,
    sglang_run: Callable[..., PreparedRun],
    tiny_target: TargetRecord,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Operated]:
    place, folder = Path(tiny_target.path), tmp_path_factory.mktemp("operated")
    plain, path = sglang_run(), folder / "live.sock"
    layers = plain.config.target.aux_layer_ids
    if request.param == "draft":
        head = read_target_head(place, torch.float32)
        whole = DraftVocabulary.by_frequency(torch.ones(len(head.embedding)), len(head.embedding))
        draft = build_draft(plain.config.draft, head.embedding, whole, layers)
        write_export(draft, folder / "export", {}, read_served_target(place))
        arguments = [*plain.config.draft.engine_arguments(3), "--speculative-draft-model-path", str(folder / "export")]
    else:
        arguments = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3", LAYERS[0]]
        arguments += map(str, layers)
    spec, live = ServerSpec(place, "float32", LONGEST, 8), {"SGLANG_PLATFORM": "draftsmith_test_cpu"}
    command = partial(serving_command, spec, SGLangConfig(), arguments)
    environment = server_environment(SGLangConfig(), 1) | live | {"DRAFTSMITH_LIVE": str(path)}
    server = SGLangServer(command, "operated", Owner("operated", folder), environment, 300.0)

    def run(**live: Any) -> PreparedRun:
        named = {"servers": [{"address": server.address, "socket": str(path)}], "consent": "users of a test agreed"}
        settings = {"retention_days": 1, "share": 1.0} | named | live
        overrides = ("generator.engine=serving", f"generator.live={json.dumps(settings)}", "data.source=live")
        return sglang_run(*overrides, "data.max_samples=40", f"data.max_tokens={LONGEST}", "data.overlong=truncate")

    try:
        yield Operated(server, path, run, TargetModel.load(place, layers, torch.float32))
    finally:
        server.stop()


def prompts(count: int, length: int = 40) -> list[list[int]]:
    """All begin with the same tokens, which the server takes from its cache."""
    same = list(range(300, 300 + length // 2))
    drawn = torch.randint(4, 1000, (count, length - len(same)), generator=torch.Generator().manual_seed(count))
    return [same + row.tolist() for row in drawn]


def test_what_users_ask_is_captured_with_what_they_are_answered(operated: Operated) -> None:
    asked = prompts(6)
    with closing(operated.engine()) as engine, ThreadPoolExecutor(1) as users:
        engine.check_canary(torch.tensor(asked[0]))
        answers = users.map(operated.ask, asked)
        texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for index in range(len(asked)):
            captured = engine.answer(f"{engine.run.folder.name}/0/{index}/1", torch.empty(0), LONGEST)
            assert captured.answer is not None
            prompt = tuple(-1 - token for token in captured.answer if token < 0)
            texts[prompt] = tuple(token for token in captured.answer if token >= 0)
            tokens = torch.tensor([*prompt, *texts[prompt]])
            hidden, expected = operated.read_back(engine, captured), operated.reference.forward(tokens[None])
            torch.testing.assert_close(hidden.aux, expected.aux[0].to(hidden.aux), rtol=0, atol=1e-4)
            torch.testing.assert_close(hidden.last, expected.last[0].to(hidden.last), rtol=0, atol=1e-4)
        assert texts == {tuple(prompt): tuple(answer) for prompt, answer in zip(asked, answers, strict=True)}
        assert not list(engine.transport.keys())


def test_users_cannot_have_anything_captured(operated: Operated) -> None:
    for custom in ({"draftsmith": "mine"}, {"draftsmith": "mine", "draftsmith_password": ""}):
        with closing(operated.engine(share=0.0)) as engine:
            assert operated.ask(prompts(1)[0], sampling={"custom_params": custom})
            assert not list(engine.transport.keys())
        assert operated.ask(prompts(1)[0], sampling={"custom_params": custom})


def test_heldout_texts(operated: Operated) -> None:
    asked, ends = prompts(2, 30), eos_ids(Path(operated.run().target.path))
    with closing(operated.engine()) as engine:
        found = engine.continue_greedily([Prompt(tuple(one)) for one in asked], 12)
    for prompt, text in zip(asked, found, strict=True):
        assert list(text.continuation) == continue_greedily(operated.reference, prompt, 12, ends)
        read = torch.tensor([*text.prompt, *text.continuation[:-1]])
        expected = operated.reference.forward(read[None]).features[0]
        torch.testing.assert_close(text.aux, expected.to(text.aux), rtol=0, atol=1e-4)
