"""A generator without a target, started by `test_concurrency.py`: arguments are the ledger's URL, a folder, a name."""

import sys
import time
from pathlib import Path

from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.records.data_path import BufferRecord, ObjectRecord


def main(url: str, folder: Path, owner: str) -> None:
    deadline = time.monotonic() + 600
    with Ledger.open(url, "run") as ledger:
        while not ledger.finished() and time.monotonic() < deadline:
            leases, publications = ledger.lease(owner, 3), []
            for lease in leases:
                file = folder / ledger.key(lease).replace("/", "-")
                file.write_text(str(lease.sample))
                buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3="")
                record = ObjectRecord(key=ledger.key(lease), location=str(file), buffers=(buffer,))
                if lease.ordinal % 7 == 3 and lease.epoch == 0 and lease.attempt == 1:
                    ledger.fail(lease, "the first capture fails")
                else:
                    publications.append(Publication(lease, record))
            for lost in ledger.publish(*publications):
                Path(lost.record.location).unlink()
            if not leases:
                time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
