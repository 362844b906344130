"""What runs inside Ray on the machine of a bundle: who holds its GPUs, and who runs a command there.

Sent there by value: it imports the standard library and Ray only. What passes are strings, numbers and bytes.
"""

import os
import select
import socket
import subprocess
from collections.abc import Mapping, Sequence

CHUNK = 65536
READ_S = 1.0


class Anchor:
    """Holds the GPUs of a bundle. Ray restarts it when it moves the bundle off a lost machine."""

    def machine(self) -> str:
        """A name of this machine."""
        import ray

        return f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"

    def visible(self) -> str:
        """The bundle's GPUs, as Ray bound them."""
        import ray

        return ",".join(str(gpu) for gpu in ray.get_gpu_ids())


class Command:
    """A command under a supervisor, which ends it when this actor ends. Asked by one driver."""

    def __init__(
        self, guard: Sequence[str], command: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> None:
        status, report = os.pipe()
        self._status = status
        # Detached: Ray kills a worker's children before their parent can say a word, and only those.
        self._process = subprocess.Popen(
            [*guard, "--detached", str(report), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            cwd=folder,
            pass_fds=(report,),
        )
        os.close(report)

    def read(self) -> tuple[bytes, int | None]:
        """What was printed since, waiting for it a little, and the exit status once the command has ended."""
        output = self._process.stdout
        assert output is not None
        readable, _, _ = select.select([output, self._status], [], [], READ_S)
        if output in readable:
            printed = os.read(output.fileno(), CHUNK)
            if printed:
                return printed, None
        if self._status in readable:
            return b"", int(os.read(self._status, CHUNK) or b"137")  # none: the supervisor was killed
        return b"", None

    def stop(self) -> None:
        """Have the supervisor stop the command: its starter is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
