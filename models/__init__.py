"""The data plane. Most of its modules run as processes: `python -m models.capture.generator RUN`."""

import gc
import signal
import sys

if sys.argv[:1] == ["-m"]:
    # The start of such a process: it imports torch and transformers, whose million objects stay. Searching them for
    # garbage takes a quarter of the start. `infra.processes.exit.run_main` turns both back.
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C meanwhile ends it without a traceback
