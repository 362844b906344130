"""What the trainer's machine runs of a run, started by `test_two_hosts.py`: ledger, store and trainer.

Arguments: the run's folder, this machine's address, a folder that everybody may enter.
"""

import sys
from contextlib import ExitStack, closing
from pathlib import Path

from infra.data_plane import start_trainer
from infra.files import write_atomically
from infra.keep_running import follow
from infra.mooncake.services import start_store
from infra.ownership import own_run
from infra.pools.local import LocalPool
from infra.postgres import PostgresServer
from infra.run_folder import RunFolder
from infra.transport.choice import objects_folder
from models.config import read_config


def main(folder: RunFolder, address: str, public: Path) -> None:
    with ExitStack() as stack:
        config = read_config(folder.config)
        owner = stack.enter_context(own_run(folder, config.transport, print))
        server = PostgresServer(public, owner, host=address)
        stack.callback(server.stop)
        ledger = config.ledger.model_copy(update={"url": server.make_database("ledger")})
        config = config.model_copy(update={"ledger": ledger})
        write_atomically(folder.config, config)
        pool, objects = LocalPool(owner), objects_folder(config.transport, folder)
        store = stack.enter_context(start_store(pool, folder, config.transport, objects, print))
        print("everything is there", flush=True)
        trainer = stack.enter_context(closing(start_trainer(pool, folder, 1, 1)))
        follow(trainer, [], print, print, services=store)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
