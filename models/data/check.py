"""`python -m models.data.check RUN_FOLDER`: reads every record, before the target is prepared, and lists broken ones.

Needs no target and no torch.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.quantities import plural
from infra.refusal import Refusal
from infra.terminal import visible
from models.config.data import LIVE, NO_TEMPLATE, DataConfig
from models.config.recipe import read_config
from models.data.conversations import PYTHON_DOCS, Document, training_documents
from models.data.kinds import Selection
from models.data.message import sent_back
from models.data.sources import find_source
from models.progress_bars import counting

SHOWN_SUFFIXES = 5
"""Most suffixes of unread files in a message."""

_LACKING = {
    "answer": "without a turn of the assistant: nothing of them is learned; data.regeneration={} lets the target "
    "answer them",
    "reasoning": "with reasoning before the last answer alone, as in logs of requests: where the chat template has a "
    "place for reasoning the earlier answers are not learned, because the target reasons before it answers",
    "end": "with an answer that was cut: it is learned without an end",
    "answer after its reasoning": "with an answer that was cut inside its reasoning or a tool call: it is not learned",
}
"""What the answers of a conversation may lack, and the rest of a warning that begins with their number."""


class DataCheck(NamedTuple):
    """What a source holds."""

    kinds: Counter[str]
    """Documents: `conversation`, `plain text`, `token record`."""
    roles: Counter[str]
    """Turns of the conversations by role."""
    broken: tuple[str, ...]
    """Place and reason of each record that cannot be used."""
    warnings: tuple[str, ...]
    selection: Selection | None = None
    """The files of a folder or dataset."""

    def lines(self) -> Iterator[str]:
        """For a terminal or a log: every broken record, the files, what was found, the warnings."""
        yield from (f"broken: {visible(fault)}" for fault in self.broken)
        if self.selection is not None:
            yield _files(self.selection)
        found = ", ".join(plural(number, kind) for kind, number in self.kinds.items())
        turns = ", ".join(f"{number:,} {role}" for role, number in sorted(self.roles.items()))
        yield (
            f"data: {found or 'nothing that can be used'}"
            + (f" (turns: {turns})" if turns else "")
            + (f"; {plural(len(self.broken), 'broken record')} left out" if self.broken else "")
        )
        yield from (f"warning: {warning}" for warning in self.warnings)


def check_data(config: DataConfig) -> DataCheck:
    """Read all records of the source.

    Raises Refusal: no source, more broken records than `data.max_broken_share` allows, or text that the recipe's chat
    template cannot take.
    """
    kinds, roles, broken = Counter[str](), Counter[str](), list[str]()
    traits = Counter[str]()
    for document in counting(training_documents(config, broken), "checking data"):
        kinds[document.kind] += 1
        if document.plain and not document.tokens and config.chat_template != NO_TEMPLATE:
            raise Refusal(
                f"{document.place}: plain text has no turns for a chat template: set data.chat_template=none "
                "(`data check`: --chat-template none), or give conversations"
            )
        roles.update(message.role for message in document.messages if not document.plain)
        traits.update(_traits(document, config))
    selection = None if config.source == PYTHON_DOCS else find_source(config.source).selection
    return DataCheck(kinds, roles, tuple(broken), tuple(_warnings(config, kinds, traits)), selection)


def _files(selection: Selection) -> str:
    """How many files are read, and how many are left out because of their kind."""
    left_out = [
        f"{counts.total():,} of {kind} ({', '.join(suffix for suffix, _ in counts.most_common(SHOWN_SUFFIXES))})"
        for kind, counts in (("another kind", selection.others), ("an unknown kind", selection.unknown))
        if counts
    ]
    more = f"; left out: {' and '.join(left_out)}" if left_out else ""
    return f"files: {len(selection.names):,} read ({selection.format}){more}"


def _traits(document: Document, config: DataConfig) -> Iterator[str]:
    """What the answers of a conversation lack, by the keys of `_LACKING`; nothing where the target answers anew."""
    if document.plain or config.regeneration is not None:
        return
    if all(message.role != "assistant" for message in document.messages):
        yield "answer"
    if document.tokens or config.chat_template == NO_TEMPLATE:
        return
    if config.thinking != "strip" and sent_back(document.messages):
        yield "reasoning"
    cut = [message.learned for message in document.messages if message.cut]
    if True in cut:
        yield "end"
    if False in cut:
        yield "answer after its reasoning"


def _warnings(config: DataConfig, kinds: Counter[str], traits: Counter[str]) -> Iterator[str]:
    if config.chat_template == NO_TEMPLATE and kinds["conversation"]:
        yield (
            f"data.chat_template=none: {plural(kinds['conversation'], 'conversation')} would be learned whole, with "
            "what users and system said; leave it out, and only what the assistant said is learned"
        )
    yield from (f"{plural(traits[trait], 'conversation')} {said}" for trait, said in _LACKING.items() if traits[trait])


def main() -> None:
    config = read_config(RunFolder(Path(sys.argv[1]).absolute()).config).data
    if config.source in (PYTHON_DOCS, LIVE):
        return
    for line in check_data(config).lines():
        print(line, flush=True)


if __name__ == "__main__":
    run_main(main)
