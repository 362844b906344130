"""Deletes objects that no row of the ledger holds: leftovers of killed processes."""

from infra.ledger.ledger import Ledger
from infra.transport.base import Transport

CANARY = "/canary/"
"""Part of the keys of objects that a generator writes, reads and deletes as a test."""


def sweep(transport: Transport, ledger: Ledger) -> None:
    """The store is listed first, then the ledger: a key that is leased and written in between is held."""
    for key in set(transport.keys()) - ledger.held_keys():
        if CANARY not in key:
            transport.delete(key)
