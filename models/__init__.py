"""The data plane. Most of its modules run as processes: `python -m models.capture.generator RUN`."""

import gc
import sys

if sys.argv[:1] == ["-m"]:
    # The start of such a process: it imports torch and transformers, whose million objects stay. Searching them for
    # garbage takes a quarter of the start. `infra.processes.exit.run_main` turns the collector on again.
    gc.disable()
