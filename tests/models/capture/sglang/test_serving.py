"""Real SGLang servers with users, from which a run learns: with a draft, and without one, both with a prefix cache."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.network.health import trouble
from infra.network.ports import HOST, reserved_port
from infra.processes.process import Process, start
from infra.records.data_path import TargetRecord
from infra.sglang.config import SGLangConfig
from models.capture.engine import Captured
from models.capture.sglang.serving import ServingEngine
from models.data.media import Prompt
from models.decoding.plain import continue_greedily
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel, eos_ids
from tests.models.capture.sglang.operated import LONGEST, PLAIN, Operated, launch, operated_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
READY_S = 120.0


@dataclass(frozen=True)
class Served:
    """A server with users, and the same target in transformers."""

    operated: Operated
    run: Callable[..., PreparedRun]
    reference: TargetModel

    def engine(self, **live: Any) -> ServingEngine:
        return ServingEngine(self.run(*self.operated.overrides(40, **live)), 0)

    def read_back(self, engine: ServingEngine, captured: Captured) -> HiddenStates:
        assert captured.answer is not None
        hidden = engine.layout.empty(len(captured.answer))
        engine.transport.get(captured.record, engine.layout.views(hidden))
        engine.transport.delete(captured.record.key)
        return engine.layout.restored(hidden)


DIVIDED = SGLangConfig(tensor_parallel=2, attention_data_parallel=2)
SERVERS = {
    "draft": (True, PLAIN),
    # Three processes that spin would keep the other tests waiting.
    "draft, two copies": (True, SGLangConfig(data_parallel=2, arguments=("--sleep-on-idle",))),
    "no draft": (False, PLAIN),
    "no draft, data-parallel attention": (False, DIVIDED),
}
LONG = ("draft", "no draft", "no draft, data-parallel attention")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in SERVERS]
)
def served(
    request: pytest.FixtureRequest,
    sglang_run: Callable[..., PreparedRun],
    tiny_target: TargetRecord,
    qwen3_target: TargetRecord,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    # SGLang's Llama does not divide attention by requests.
    target = qwen3_target if "attention" in request.param else tiny_target
    run = partial(sglang_run, target=target)
    plain = run()
    reference = TargetModel.load(Path(target.path), plain.config.target.aux_layer_ids, torch.float32)
    with operated_server(plain, tmp_path_factory.mktemp("operated"), *SERVERS[request.param]) as operated:
        yield Served(operated, run, reference)


def prompts(count: int, length: int = 40) -> list[list[int]]:
    """All begin with the same tokens, which the server takes from its cache."""
    same = list(range(300, 300 + length // 2))
    drawn = torch.randint(4, 1000, (count, length - len(same)), generator=torch.Generator().manual_seed(count))
    return [same + row.tolist() for row in drawn]


def test_what_users_ask_is_captured_with_what_they_are_answered(served: Served) -> None:
    asked = prompts(6)
    with closing(served.engine()) as engine, ThreadPoolExecutor(1) as users:
        engine.check_canary(torch.tensor(asked[0]))
        answers = users.map(served.operated.ask, asked)
        texts: dict[tuple[int, ...], tuple[int, ...]] = {}
        for index in range(len(asked)):
            captured = engine.answer(f"{engine.run.folder.name}/0/{index}/1", torch.empty(0), LONGEST)
            assert captured.answer is not None
            prompt = tuple(-1 - token for token in captured.answer if token < 0)
            texts[prompt] = tuple(token for token in captured.answer if token >= 0)
            tokens = torch.tensor([*prompt, *texts[prompt]])
            hidden, expected = served.read_back(engine, captured), served.reference.forward(tokens[None])
            torch.testing.assert_close(hidden.aux, expected.aux[0].to(hidden.aux), rtol=0, atol=1e-4)
            torch.testing.assert_close(hidden.last, expected.last[0].to(hidden.last), rtol=0, atol=1e-4)
        assert texts == {tuple(prompt): tuple(answer) for prompt, answer in zip(asked, answers, strict=True)}
        assert not list(engine.transport.keys())


def test_users_cannot_have_anything_captured(served: Served) -> None:
    """Nor end the server, by what SGLang lets through."""
    of_users = ({}, {"draftsmith_password": ""}, {"draftsmith_password": "ü"})
    for custom in (*({"draftsmith": "mine"} | one for one in of_users), [1]):
        with closing(served.engine(share=0.0)) as engine:
            assert served.operated.ask(prompts(1)[0], sampling={"custom_params": custom})
            assert not list(engine.transport.keys())
        assert served.operated.ask(prompts(1)[0], sampling={"custom_params": custom})


def test_heldout_texts(served: Served) -> None:
    asked, ends = prompts(2, 30), eos_ids(Path(served.run().target.path))
    with closing(served.engine()) as engine:
        found = engine.continue_greedily([Prompt(tuple(one)) for one in asked], 12)
    for prompt, text in zip(asked, found, strict=True):
        assert list(text.continuation) == continue_greedily(served.reference, prompt, 12, ends)
        read = torch.tensor([*text.prompt, *text.continuation[:-1]])
        expected = served.reference.forward(read[None]).features[0]
        torch.testing.assert_close(text.aux, expected.to(text.aux), rtol=0, atol=1e-4)


@pytest.mark.long
def test_a_server_that_is_restarted_is_waited_for(
    sglang_run: Callable[..., PreparedRun], tmp_path: Path, kill_tree: Callable[[int], None]
) -> None:
    """At the same address, as a roll-out does; the generator goes on by itself, after a canary."""
    plain, path = sglang_run(), tmp_path / "live.sock"
    command, name, owner, environment = launch(plain, tmp_path, path, with_draft=True)
    with reserved_port() as (port, _):
        operated = Operated(f"http://{HOST}:{port}", path)

        def start_server() -> Process:
            process = start(name, command(port), owner, environment, grace_s=1.0)
            deadline = time.monotonic() + READY_S
            while trouble(f"{operated.address}/health", 5.0, direct=True) is not None:
                assert time.monotonic() < deadline
                time.sleep(0.3)
            return process

        first, asked = start_server(), prompts(2, 44)
        with closing(ServingEngine(sglang_run(*operated.overrides(40)), 0)) as engine, ThreadPoolExecutor(1) as waiting:
            for process, prompt in ((first, asked[0]), (None, asked[1])):
                captured = waiting.submit(engine.answer, f"run/0/{prompt[-1]}/1", torch.empty(0), LONGEST)
                second = process or start_server()
                operated.ask(prompt)
                answer = captured.result(timeout=60).answer
                assert answer is not None
                assert [-1 - token for token in answer if token < 0] == prompt
                kill_tree(second.pid)
