"""The life of an SGLang server: started under a supervisor, ready by its health, stopped again."""

import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from infra.network.health import trouble
from infra.network.ports import HOST, is_foreign, reserved_port
from infra.pools.gpus import named_by_position
from infra.processes.process import Owner, Process, ProcessFailedError, start
from infra.processes.supervisor import descendants
from infra.records.servers import ServerMachines
from infra.refusal import Refusal
from infra.settings import leased_gpus
from infra.sglang.compiled import remove_broken
from infra.sglang.leftovers import Leftovers
from infra.sglang.machines import LedMachines
from infra.sglang.toolkit import toolkit_variables
from infra.user import user_name

ANSWER_S = 5.0
POLL_S = 0.3
GRACE_S = 1.0
"""A server is drained before it is stopped; otherwise it would wait some more seconds."""
LOG_LINES = 400
"""Lines at the end of the log in which the reason of a failed start is searched; every process prints its own."""

REFUSALS = (
    (
        r"Model (\w+) does not implement set_eagle3_layers_to_capture",
        "this release of SGLang cannot capture hidden states of {0}: set generator.engine=transformers, or try a newer "
        "SGLang",
    ),
    (r"sglang serve: error: (.*)", "SGLang does not know these arguments: {0}; correct generator.sglang"),
    (r"Repo id must be in the form .*: '(.*?)'", "SGLang finds no target at {0}"),
    (r"^(?:ValueError|NotImplementedError): (.+)", "SGLang refuses: {0}"),
)
"""Failures that a restart would not fix."""


class SGLangServer:
    """A server that is up once this is made. Its creator stops it; if that process dies, the supervisor does.

    Raises Refusal for what a person has to correct, ProcessFailedError if it died of something else, TimeoutError,
    and ConnectionError where another program took its port: the next start takes another one.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        role: str,
        owner: Owner,
        environment: Mapping[str, str],
        start_timeout_s: float,
        machines: ServerMachines | None = None,
    ):
        """`machines`: over which the server extends, this one first; None: this one alone."""
        self._last: deque[str] = deque(maxlen=LOG_LINES)
        owner.logs.mkdir(parents=True, exist_ok=True)
        self._leftovers = Leftovers(owner.logs / f"{role}.leftovers")
        self._leftovers.remove()
        with ExitStack() as stack:
            port, lock = stack.enter_context(reserved_port())
            owner = replace(owner, locks=(*owner.locks, lock.descriptor))
            stack.callback(self._leftovers.remove)
            # SGLang 0.5.23 turns its own all-reduce off for GPUs that are named by UUID.
            arguments, own = command(port), self._own_folder() | named_by_position(leased_gpus())
            own |= toolkit_variables(Path(arguments[0]))
            if machines is not None:
                others = stack.enter_context(closing(LedMachines(machines, role, start_timeout_s)))
                owner = replace(owner, locks=(*owner.locks, others.descriptor))
                arguments = others.start(arguments, dict(environment))
                own |= others.environment
            self.process: Process = start(role, arguments, owner, {**environment, **own}, grace_s=GRACE_S)
            stack.callback(self.process.stop)
            if machines is not None:
                stack.callback(others.stop)  # first: what ends after it does so as ordered
            self.address = f"http://{HOST}:{port}"
            self._wait_until_ready(port, start_timeout_s)
            self._stack = stack.pop_all()

    @property
    def name(self) -> str:
        return self.process.role

    @property
    def log(self) -> Path:
        return self.process.log

    def _own_folder(self) -> dict[str, str]:
        """A folder for its sockets; compiled kernels stay in their shared cache."""
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{user_name()}"
        remove_broken(compiled)
        folder = Path(tempfile.mkdtemp(prefix="draftsmith-sglang-"))
        self._leftovers.add(folder)
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        # torch 2.13 compiles a header into $TMPDIR, five seconds of a core, even where all kernels are in the cache.
        cache["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
        return {"TMPDIR": str(folder), **cache}

    def _wait_until_ready(self, port: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self._check_start()
            if is_foreign(port, partial(descendants, self.process.pid)):
                # A server that has died meanwhile says why; its children may hold the port a little longer.
                time.sleep(POLL_S)
                self._check_start()
                raise ConnectionError(f"another program took port {port} before {self.process.role} listened there")
            self._leftovers.add_shared_memory(self.process.pid)
            if trouble(f"{self.address}/health", ANSWER_S, direct=True) is None:
                return
            time.sleep(POLL_S)
        raise TimeoutError(
            f"{self.process.role} was not ready within {timeout_s:g} s; its log is {self.process.log} "
            "(generator.sglang.start_timeout_s)"
        )

    def _check_start(self) -> None:
        """Raises Refusal or ProcessFailedError when the server has ended."""
        ended = self.process.poll() is not None
        self._last.extend(self.process.new_lines())
        if not ended:
            return
        for pattern, words in REFUSALS:
            for line in self._last:
                found = re.search(pattern, line)
                if found:
                    raise Refusal(f"{words.format(found[1])} (the whole log: {self.process.log})")
        self.check()

    def check(self) -> None:
        """Raises ProcessFailedError, with the end of the log, when the server has ended: it was to run on."""
        failure = self.process.failure(endless=True)
        if failure is None:
            return
        # SGLang kills its own processes, itself last, after an exception in one of them.
        if any("kill_process_tree called" in line for line in failure.tail):
            raise ProcessFailedError(failure.role, 1, failure.tail, failure.log)
        raise failure

    def stop(self) -> None:
        """Stop it and give its port back. Idempotent."""
        self._stack.close()
