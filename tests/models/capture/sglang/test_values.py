"""What real SGLang servers capture equals transformers: architectures, chunks, parallelism, lengths, aborts."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

from infra.data_plane.meeting import open_meeting
from infra.files.atomic import write_atomically
from infra.network.ports import HOST
from infra.processes.process import Owner, module, start
from infra.records.data_path import TargetRecord
from infra.records.servers import ServerMachines
from infra.settings import SERVER_MACHINES
from models.capture.engine import EngineError
from models.capture.sglang.engine import SGLangEngine
from models.config.recipe import load_recipe
from models.config.target import TargetConfig
from models.data.media import Prompt
from models.decoding.plain import continue_greedily
from models.decoding.simulated import features
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.layout import SampleError
from models.targets.model import TargetModel, eos_ids
from models.targets.prepare import prepare_target

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))

from mimo import write_mimo

RECIPES = Path(__file__).parents[4] / "recipes"
LENGTHS = (1, 2, 7, 33, 64, 65, 130, 250)
IDS = (0, 1, 2)
CHUNK = 64
MTP = '{"method":"mtp","family":"mimo","num_heads":6,"num_kv_heads":3,"head_dim":32,"intermediate_size":512}'
"""Its drafts read no layers, and the last states alone are captured."""
SETTINGS = {
    "llama": ("draft.vocab_size=700",),
    "llama, chunked, by Mooncake": (f"generator.sglang.chunked_prefill_tokens={CHUNK}", "transport.kind=mooncake"),
    "mimo, no layers, chunked, by Mooncake": (
        *(f"draft={MTP}", "target.aux_layer_ids=[]", 'generator.sglang.arguments=["--trust-remote-code"]'),
        *(f"generator.sglang.chunked_prefill_tokens={CHUNK}", "transport.kind=mooncake"),
    ),
    "qwen3, data parallel 2": ("generator.sglang.data_parallel=2",),
    "qwen3, data-parallel attention": (
        *("generator.sglang.tensor_parallel=2", "generator.sglang.attention_data_parallel=2"),
        "draft.vocab_size=700",
    ),
    "qwen3, chunked, tensor parallel 2": (
        f"generator.sglang.chunked_prefill_tokens={CHUNK}",
        "generator.sglang.tensor_parallel=2",
        "draft.vocab_size=700",
    ),
    "qwen3, tensor parallel on two machines, by Mooncake": (
        *("generator.sglang.tensor_parallel=2", "pools.kind=slurm", "pools.machines_per_generator=2"),
        *("draft.vocab_size=700", "transport.kind=mooncake"),
    ),
}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """One server, and the same target in transformers."""

    run: PreparedRun
    engine: SGLangEngine
    reference: TargetModel


# Whole prefills of the tiny Llama are trained on in test_streaming.py, with the losses of transformers; those of Gemma
# pass the canary below.
LONG = ("llama", "qwen3, data parallel 2", "qwen3, data-parallel attention", "qwen3, chunked, tensor parallel 2")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in SETTINGS],
)
def served(
    request: pytest.FixtureRequest,
    sglang_run: Callable[..., PreparedRun],
    tiny_target: TargetRecord,
    qwen3_target: TargetRecord,
) -> Iterator[Served]:
    targets = {"llama": tiny_target, "qwen3": qwen3_target}
    target = targets.get(request.param.partition(",")[0]) or mimo_target(request, tiny_target)
    run = sglang_run(*SETTINGS[request.param], target=target)
    if run.config.transport.kind == "mooncake":
        write_atomically(run.folder.store, request.getfixturevalue("mooncake_store"))
    with ExitStack() as stack:
        # For this engine alone: others in this module are on one machine.
        with pytest.MonkeyPatch.context() as patch:
            if request.param.startswith("llama"):
                patch.setenv("DRAFTSMITH_TEST_SPAWN", "1")  # as on GPUs
            if "attention" in request.param:
                patch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")  # SGLang exchanges rows by kernels of GPUs
            if run.config.pools.machines_per_generator > 1:
                patch.setenv(SERVER_MACHINES, stack.enter_context(other_machine(run)))
            engine = stack.enter_context(closing(SGLangEngine(run, 0)))
        yield Served(run, engine, TargetModel.load(Path(target.path), run.config.target.aux_layer_ids, torch.float32))


@contextmanager
def other_machine(run: PreparedRun) -> Iterator[str]:
    """A process for the second of a server's machines; what the process on the first one is told."""
    met = ServerMachines(meeting=open_meeting(run.folder, "generator-0"), count=2, address=HOST).model_dump_json()
    owner = Owner(run.folder.name, run.folder.logs)
    member = start("machine-1", module("infra.sglang.member", run.folder.path, "1", met), owner)
    try:
        yield met
        assert member.poll() is None
    finally:
        member.stop()


def mimo_target(request: pytest.FixtureRequest, tiny_target: TargetRecord) -> TargetRecord:
    """In MiMo's layout, with an MTP layer."""
    folder = request.getfixturevalue("tmp_path_factory").mktemp("targets") / "mimo"
    return prepare_target(TargetConfig(name=str(write_mimo(Path(tiny_target.path), folder)), aux_layer_ids=()))


@pytest.mark.timeout(1800)
def test_gemma_once(
    sglang_run: Callable[..., PreparedRun],
    engine_of: Callable[..., SGLangEngine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The real Gemma 3 270M: sliding windows, its own norms, residuals a thousand times larger than the tiny ones.

    Compared once as a small target is, and once as one that is too large to be loaded.
    """
    config = load_recipe(RECIPES / "quickstart.yaml")
    target = prepare_target(config.target)
    run = sglang_run("target.aux_layer_ids=[2, 9, 15]", target=target)
    engine, tokens = engine_of(run), torch.tensor([2, *range(1000, 1600)])
    engine.check_canary(tokens)
    assert not capsys.readouterr().out
    monkeypatch.setattr("models.capture.sglang.engine.LOADED_BYTES", 0)
    for said in ("canary: reading 1 GiB of weights, to compare the chosen layers\n", ""):
        engine.check_canary(tokens)
        assert capsys.readouterr().out == said
    assert not list(run.folder.path.glob("canary-*"))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 1000, (length,), generator=generator) for length in LENGTHS]


def test_continuations_are_the_targets_own(served: Served) -> None:
    """Greedy text, and the features of all of it but the last token."""
    chosen = [tokens.tolist() for tokens in prompts()[3:6]]
    for prompt, found in zip(
        chosen, served.engine.continue_greedily([Prompt(tuple(one)) for one in chosen], 12), strict=True
    ):
        ends = eos_ids(Path(served.run.target.path))
        assert list(found.prompt) == prompt
        assert list(found.continuation) == continue_greedily(served.reference, prompt, 12, ends)
        expected = features(served.reference, [*prompt, *found.continuation])
        assert (found.aux - expected).abs().max() <= 1e-4
    assert not list(served.run.open_transport().keys())


def test_hidden_states_equal_transformers(served: Served) -> None:
    """All at once, so that the server batches several prompts into one prefill."""
    tokens = prompts()
    with ThreadPoolExecutor(len(tokens)) as threads:
        keys = [f"{served.run.folder.name}/0/{index}/1" for index in range(len(tokens))]
        captured = list(threads.map(served.engine.capture, keys, tokens))
    transport, layout = served.run.open_transport(), served.run.layout
    for prompt, one in zip(tokens, captured, strict=True):
        assert one.record.nbytes == len(prompt) * layout.bytes_per_token
        hidden = layout.empty(len(prompt))
        transport.get(one.record, layout.views(hidden))
        expected = served.reference.forward(prompt[None])
        assert worst(hidden, expected) <= 1e-4
        if layout.top_token:
            assert torch.equal(hidden.top, served.reference.top_tokens(expected.last[0]))
        transport.delete(one.record.key)
    assert not list(transport.keys())


def worst(hidden: HiddenStates, expected: HiddenStates) -> float:
    """Largest absolute difference."""
    pairs = ((hidden.aux, expected.aux[0]), (hidden.last, expected.last[0]))
    return max((mine - theirs).abs().max().item() for mine, theirs in pairs if theirs.numel())


def test_the_canary_passes(served: Served) -> None:
    served.engine.check_canary(prompts()[4])
    assert not list(served.run.open_transport().keys())


def test_other_requests_pass_untouched(served: Served) -> None:
    prompt = prompts()[4]
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{served.engine.server.address}/generate",
        json={"input_ids": prompt.tolist(), "sampling_params": sampling},
        timeout=300,
        trust_env=False,
    ).json()
    assert "draftsmith" not in answer["meta_info"]
    tokens = prompt[None]
    for _ in range(8):
        tokens = torch.cat(
            [tokens, served.reference.logits(served.reference.forward(tokens).last[:, -1]).argmax(-1)[None]], 1
        )
    assert answer["output_ids"] == tokens[0, len(prompt) :].tolist()
    assert not list(served.run.open_transport().keys())


def test_a_failed_capture_fails_its_request_alone(served: Served) -> None:
    prompt = prompts()[5]
    with pytest.raises(EngineError, match=r"capture in SGLang failed: .*no/such\+key"):
        served.engine.capture("no/such+key", prompt)
    captured = served.engine.capture("right/0/0/1", prompt)
    served.run.open_transport().delete(captured.record.key)


def test_a_prompt_that_is_too_long_is_refused_by_name(served: Served) -> None:
    with pytest.raises(SampleError, match="SGLang refused the prompt of 40000 tokens"):
        served.engine.capture("long/0/0/1", torch.full((40000,), 5))


def test_an_aborted_prompt_leaves_nothing(
    sglang_run: Callable[..., PreparedRun],
    engine_of: Callable[..., SGLangEngine],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Aborted between its chunks; the parts that were captured are forgotten, and the key is free for another try."""
    parts = tmp_path / "parts"
    monkeypatch.setenv("DRAFTSMITH_TEST_FAULT", f"slow:0:{parts}")
    run = sglang_run(f"generator.sglang.chunked_prefill_tokens={CHUNK}")
    engine = engine_of(run)
    prompt, address = torch.full((12 * CHUNK,), 5), engine.server.address
    with ThreadPoolExecutor(1) as thread, httpx.Client(base_url=address, timeout=300, trust_env=False) as client:
        custom = {"max_new_tokens": 1, "custom_params": {"draftsmith": "aborted/0/0/1"}}
        body = {"rid": "aborted", "input_ids": prompt.tolist(), "sampling_params": custom}
        asked = thread.submit(client.post, "/generate", json=body)
        while not parts.exists():
            assert not asked.done(), asked.result().text
            time.sleep(0.01)
        assert parts.read_text() == "1"
        client.post("/abort_request", json={"rid": "aborted"})
        parts.with_suffix(".go").touch()
        answer = asked.result()
    assert "abort" in answer.text
    assert not list(run.open_transport().keys())
    captured = engine.capture("aborted/0/0/2", prompt)
    # The reply leaves before the writer's call returns.
    deadline = time.monotonic() + 120
    while parts.read_text() != "0":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert captured.record.nbytes == len(prompt) * run.layout.bytes_per_token
    run.open_transport().delete(captured.record.key)
