"""What the flow does with a run, without Prefect: owns it, starts its processes and keeps them running.

python benchmarks/driver.py RUN                       all of it on this machine
python benchmarks/driver.py RUN --side trainer        store and trainer; whoever starts it drives the generators
python benchmarks/driver.py RUN --side generator
python benchmarks/driver.py RUN --parts 2             with a Mooncake store whose memory is in two processes
python benchmarks/driver.py --postgres FOLDER ADDRESS a PostgreSQL that is started again whenever it dies
python benchmarks/driver.py RUN --progress            the ledger's counts, as JSON
python benchmarks/driver.py RUN --freeze-in-transaction  hold the run's row in the ledger, and stop
"""

import argparse
import os
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path

from postgres import recipe_url

from infra.data_plane.start import start_generator, start_trainer
from infra.data_plane.watch import RunWatch
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.pools.local import LocalPool
from infra.processes.exit import run_main
from infra.processes.keep_running import Generators, KeptProcess, follow
from infra.processes.process import Owner, ProcessFailedError, module
from infra.processes.process import start as start_process
from infra.run.ownership import own_run
from infra.servers.postgres import PostgresServer
from infra.transport.choice import objects_folder
from infra.transport.mooncake.store import start_store
from models.config.recipe import RunConfig, read_config

DATABASE = "ledgers"
READY = "ready"
STALL_S = 120.0
PREPARE_S = 300.0
PREPARATION = {"target": "models.targets.prepare", "samples": "models.data.prepare"}
POLL_S = 0.2


def drive(folder: RunFolder, config: RunConfig, with_generators: bool, resumes: bool, parts: int = 1) -> None:
    """Own the run and train it to its end. `resumes` does what the flow does first when a person resumes a run."""
    with ExitStack() as stack:
        owner = stack.enter_context(own_run(folder, config.transport, print))
        if resumes:
            prepare(owner, folder)
            with Ledger.open(config.ledger.url or folder.ledger_url, folder.name) as ledger:
                if ledger.progress().total:
                    ledger.forget_crashes()
        pool = LocalPool(owner)
        store: list[KeptProcess] = []
        if config.transport.kind == "mooncake":
            objects = objects_folder(config.transport, folder)
            store = stack.enter_context(start_store(pool, folder, config.transport, objects, print, parts=parts))
        with Ledger.open(config.ledger.url or folder.ledger_url, folder.name) as ledger:
            ledger.reopen()
        print(READY, flush=True)
        generators = start_generators(stack, pool, folder, config) if with_generators else []
        training = config.training
        trainer = stack.enter_context(closing(start_trainer(pool, folder, training.ranks, training.threads)))
        ledger = stack.enter_context(Ledger.open(config.ledger.url or folder.ledger_url, folder.name))
        follow(
            trainer,
            Generators(generators),
            print,
            print,
            [RunWatch(ledger, STALL_S, config.ledger.max_quarantined).check],
            store,
        )


def prepare(owner: Owner, folder: RunFolder) -> None:
    """Write the records of target and samples again: both are found in the cache."""
    for role, name in PREPARATION.items():
        start_process(role, module(name, folder.path), owner).wait(PREPARE_S)


def freeze_in_transaction(folder: RunFolder, config: RunConfig) -> None:
    """Hold the lock that every write to the run's rows takes, and stop as by SIGSTOP."""
    with Ledger.open(config.ledger.url or folder.ledger_url, folder.name) as ledger:
        with ledger.write():
            print(READY, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)


def start_generators(stack: ExitStack, pool: LocalPool, folder: RunFolder, config: RunConfig) -> list[KeptProcess]:
    settings = config.generator
    return [
        stack.enter_context(closing(start_generator(pool, folder, index, settings.count, settings.threads)))
        for index in range(settings.count)
    ]


def drive_generators(folder: RunFolder, config: RunConfig) -> None:
    """Generators alone, until all have ended well, or the run has: then the store that they ask for is gone."""
    with ExitStack() as stack:
        left = start_generators(stack, LocalPool(Owner(folder.name, folder.logs)), folder, config)
        while left:
            left = [one for one in left if not one.tend(lambda _line: None, print)]
            for one in list(left):
                if one.failure is None:
                    continue
                if not has_finished(folder, config):
                    raise one.failure
                left.remove(one)
            time.sleep(POLL_S)


def has_finished(folder: RunFolder, config: RunConfig) -> bool:
    with Ledger.open(config.ledger.url or folder.ledger_url, folder.name) as ledger:
        return ledger.finished()


def keep_postgres(folder: Path, address: str) -> None:
    """Until it is killed: then the server's supervisor stops the server."""
    server = PostgresServer(folder, Owner("chaos", folder.with_name("logs")), host=address)
    server.make_database(DATABASE)
    folder.with_name("url").write_text(recipe_url(server, DATABASE))
    print(READY, flush=True)
    while True:
        try:
            server.process.check()
        except ProcessFailedError:
            server.start()
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--side", choices=["both", "trainer", "generator"], default="both")
    parser.add_argument("--parts", type=int, default=1, metavar="N", help="processes that hold the store's memory")
    parser.add_argument("--resumes", action="store_true", help="as a person resumes a run")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--freeze-in-transaction", action="store_true")
    parser.add_argument("--postgres", nargs=2, metavar=("FOLDER", "ADDRESS"))
    options = parser.parse_args()
    if options.postgres:
        keep_postgres(Path(options.postgres[0]), options.postgres[1])
        return
    folder = RunFolder(options.run.absolute())
    config = read_config(folder.config)
    if options.progress:
        with Ledger.open(config.ledger.url or folder.ledger_url, folder.name) as ledger:
            print(ledger.progress().model_dump_json())
    elif options.freeze_in_transaction:
        freeze_in_transaction(folder, config)
    elif options.side == "generator":
        drive_generators(folder, config)
    else:
        drive(folder, config, options.side == "both", options.resumes, options.parts)


if __name__ == "__main__":
    run_main(main)
