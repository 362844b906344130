"""The data plane. Most of its modules run as processes: `python -m models.capture.generator RUN`."""

import gc
import os
import sys

from infra.processes.control_groups import cores
from infra.settings import use_at_most_threads

if (allowed := cores()) < len(os.sched_getaffinity(0)):
    use_at_most_threads(allowed)  # before torch is imported, which knows of no quota

if sys.argv[:1] == ["-m"]:
    # The start of such a process: it imports torch and transformers, whose million objects stay. Searching them for
    # garbage takes a quarter of the start. `infra.processes.exit.run_main` turns the collector on again.
    gc.disable()
