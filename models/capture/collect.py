"""`python -m models.capture.collect RUN`: the first requests of a run that learns from users, before its training.

Half of them are held out; the other half shows which tokens a new draft should know. Writes RUN/live.jsonl.
"""

import argparse
import json
import math
import time
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from threading import Event

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.records.live import Taken
from models.capture.live_texts import Learned, LiveFilter, private_data_finder
from models.capture.sglang.tap import POLL_S, Tap, open_tap, wanted_of
from models.config.data import DataConfig
from models.config.recipe import read_config
from models.progress_bars import bars
from models.run import RunWithTarget

LEAST, MOST = 32, 512
TELL_S = 3600.0
"""How often to say what became of the users' requests."""


def wanted_texts(data: DataConfig) -> int:
    """How many requests are collected before the training."""
    assert data.max_samples is not None, "recipes with data.source=live say how many samples they learn"
    return min(max(LEAST, math.ceil(data.answered_before * data.max_samples)), MOST)


def collect(run: RunWithTarget) -> list[Learned]:
    """Wait until enough requests have come that may be learned from. A server that is restarted is waited for."""
    live, left_out = run.config.generator.live, LiveFilter(run, private_data_finder())
    assert live is not None, "data.source=live has generator.live"
    wanted, timeout_s = wanted_of(run), run.config.generator.sglang.start_timeout_s
    count, texts, taken, told = wanted_texts(run.config.data), list[Learned](), Taken(), time.monotonic()
    with ExitStack() as stack, bars() as bar:
        advance = bar("collected requests", count)
        taps = [open_tap(server, wanted, Event(), timeout_s) for server in live.servers]
        stack.callback(lambda: [tap.close() for tap in taps if tap is not None])
        for place, server in cycle(enumerate(live.servers)):
            if len(texts) == count:
                break
            if time.monotonic() - told > TELL_S:
                print(left_out.summary(len(texts), taken), flush=True)
                told = time.monotonic()
            try:
                tap = taps[place] = taps[place] or Tap(server, wanted)
                taken = tap.take()
            except OSError as error:
                if (lost := taps[place]) is not None:
                    print(f"{server.address}: {error}; waiting for it", flush=True)
                    lost.close()
                taps[place] = None
                time.sleep(POLL_S)
                continue
            learned = None if taken.text is None else left_out.learned(taken.text)
            if learned is not None:
                texts.append(learned)
                advance(1)
        print(left_out.summary(len(texts), taken), flush=True)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    folder = RunFolder(parser.parse_args().run.absolute())
    if folder.live.is_file():
        return  # of the same run, before it was interrupted
    run = RunWithTarget(folder, read_config(folder.config), TargetRecord.read(folder.target))
    lines = (json.dumps({"input_ids": text.tokens, "prompt": text.prompt}) for text in collect(run))
    write_atomically(folder.live, "".join(f"{line}\n" for line in lines), mode=0o600)


if __name__ == "__main__":
    run_main(main)
