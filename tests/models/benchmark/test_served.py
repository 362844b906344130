"""Counting a served draft's steps where the server sends some of them together, as a busy one does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.files.run_folder import RunFolder
from infra.processes.process import Owner
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.sglang.client import Answer, SGLangClient
from infra.sglang.server import SGLangServer
from models.benchmark import served
from models.benchmark.served import counts_of, setup_of, watch
from models.config.recipe import RunConfig
from models.decoding.acceptance import AcceptedCounts, summarise
from models.run import RunWithTarget

STREAMS = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        for meta in asked["sampling_params"]["messages"]:
            message = {"output_ids": [7] * meta["completion_tokens"], "meta_info": meta}
            self.wfile.write(f"data: {json.dumps(message)}\\n\\n".encode())
        self.wfile.write(b"data: [DONE]\\n\\n")

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
ACCEPTED = (4, 0, 2, 3)
"""Draft tokens accepted in each verification step, at lookahead 4."""

NEVER = frozenset[int]()

Watched = Callable[..., Answer]


def counters(accepted: tuple[int, ...]) -> dict[str, Any]:
    """SGLang's counters of a request's verification steps."""
    histogram = [accepted.count(count) for count in range(max(accepted) + 1)]
    return {
        "spec_verify_ct": len(accepted),
        "spec_num_correct_drafts": sum(accepted),
        "spec_correct_drafts_histogram": histogram,
    }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Watches an answer whose messages end after `ends` tokens, the last one with SGLang's counters."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-c", STREAMS, str(port)]

    server = SGLangServer(command, "server", Owner("tests", tmp_path_factory.mktemp("served")), {}, 300.0)
    with closing(SGLangClient(server, 120.0)) as client:

        def answer(*ends: int, **last: Any) -> Answer:
            metas: list[dict[str, Any]] = [{"completion_tokens": end} for end in ends]
            metas[-1] |= last
            return watch(client, [1, 2], {"messages": metas})

        yield answer
    server.stop()


def test_steps_that_came_one_by_one_are_counted_in_order(watched: Watched) -> None:
    assert counts_of(watched(1, 6, 7, 10, 14, **counters(ACCEPTED)), 4, NEVER) == AcceptedCounts(4, ACCEPTED)


@pytest.mark.parametrize("ends", [(1, 7, 14), (10, 14), (14,)])
def test_coalesced_steps_are_counted_by_the_engine(watched: Watched, ends: tuple[int, ...]) -> None:
    counted = counts_of(watched(*ends, **counters(ACCEPTED)), 4, NEVER)
    assert counted == AcceptedCounts(4, tuple(sorted(ACCEPTED)))
    assert summarise([(counted,)]) == summarise([(AcceptedCounts(4, ACCEPTED),)])


def test_of_coalesced_steps_the_one_that_the_end_cut_is_left_out(watched: Watched) -> None:
    # The last step accepted three, and the text ended with the second of them.
    assert counts_of(watched(1, 7, 10, 12, **counters(ACCEPTED)), 4, NEVER) == AcceptedCounts(4, (0, 2, 4), cut=1)


@pytest.mark.parametrize("ends", [(1, 6, 7, 10, 12), (1, 7, 10, 12)])
def test_a_step_that_the_end_of_the_text_closes_counts_with_what_it_emitted(
    watched: Watched, ends: tuple[int, ...]
) -> None:
    counted = counts_of(watched(*ends, **counters(ACCEPTED)), 4, frozenset({7}))
    assert (sorted(counted.accepted), counted.cut, counted.ended) == ([0, 2, 4], 0, 2)
    assert (counted.tokens, counted.steps) == (11, 4), "as the engine counts them"


def test_where_the_last_message_holds_several_steps_the_longest_that_fits_is_the_cut_one(watched: Watched) -> None:
    assert counts_of(watched(1, 7, 12, **counters(ACCEPTED)), 4, NEVER) == AcceptedCounts(4, (0, 2, 3), cut=1)


def test_an_answer_that_the_prefill_ended_has_no_steps(watched: Watched) -> None:
    assert counts_of(watched(1), 4, NEVER) == AcceptedCounts(4, ())


def test_counters_that_contradict_each_other_are_refused(watched: Watched) -> None:
    wrong = counters(ACCEPTED) | {"spec_num_correct_drafts": 8}
    with pytest.raises(Refusal, match="contradict"):
        counts_of(watched(1, 14, **wrong), 4, NEVER)


@pytest.mark.parametrize(("gpus", "generators", "ranks"), [(3, 3, 1), (6, 3, 2), (4, 1, 4), (0, 1, 1)])
def test_the_target_is_served_on_as_many_gpus_as_a_generators_copy(
    tiny_config: RunConfig,
    tiny_target: TargetRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    generators: int,
    ranks: int,
) -> None:
    """It was captured there: three GPUs that each hold a copy are not a copy on three, which divides few heads."""

    def started(command: Callable[[int], list[str]], *_options: Any) -> None:
        started_with = command(80)
        assert started_with[started_with.index("--tensor-parallel-size") + 1] == str(ranks)
        raise Refusal("seen")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(f"GPU-{index}" for index in range(gpus)))
    monkeypatch.setenv("DRAFTSMITH_SGLANG", str(tmp_path))
    for package in ("sglang", "draftsmith"):
        (tmp_path / f"lib/python3.11/site-packages/{package}-1.dist-info").mkdir(parents=True)
    monkeypatch.setattr(served, "SGLangServer", started)
    tree = tiny_config.model_dump(mode="json")
    tree["pools"] |= {"inference_gpus": gpus}
    tree["generator"] |= {"engine": "sglang", "count": generators, "compute_dtype": "bfloat16"}
    tree["benchmark"] |= {"compute_dtype": "bfloat16"}
    run = RunWithTarget(RunFolder(tmp_path), RunConfig.model_validate(tree), tiny_target)
    with pytest.raises(Refusal, match="seen"), setup_of(run).serving(None, 0):
        pass
