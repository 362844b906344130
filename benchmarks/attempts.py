"""Rows of a benchmark that may be stopped and resumed.

Every row keeps the commit, day and processor of its own measurement, whatever writes the result in the end, and an
attempt that was made again stays in the file.
"""

import json
from pathlib import Path
from typing import Any

from machine import UNDER, measured_here

from infra.refusal import Refusal

Json = dict[str, Any]


def kept_parts(result: Json, name: str) -> dict[str, Json]:
    """The parts `result[name]` of a result that is written anew, each with what it was measured under."""
    under = {key: result[key] for key in UNDER if key in result}
    return {key: under | part for key, part in result[name].items()}


class Attempts:
    """JSON lines, one for each attempt at a row; `key` names the row.

    Args:
        path: the file, which need not exist.
        settings: what decides a row's figures.
        key: fields that tell rows apart.

    Raises Refusal if the file has rows of other settings.
    """

    def __init__(self, path: Path, settings: Json, key: tuple[str, ...] = ("seed",)):
        self.path, self.settings, self.key = path, json.loads(json.dumps(settings)), key
        self.lines: list[Json] = []
        for line in path.read_text().splitlines() if path.is_file() else []:
            row = json.loads(line)
            if (found := row.pop("settings", None)) != self.settings:
                raise Refusal(
                    f"{path} has rows of other settings ({found}, not {self.settings}): resume with those, or remove "
                    "the file"
                )
            self.lines.append(row)

    def keep(self, row: Json) -> None:
        """Append an attempt, measured now."""
        self.lines.append(json.loads(json.dumps(row)) | measured_here())
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[-1] | {"settings": self.settings}) + "\n")

    @property
    def newest(self) -> list[Json]:
        """The last attempt at every row, in the order of their keys."""
        rows = {self._name(row): row for row in self.lines}
        return [rows[name] for name in sorted(rows)]

    @property
    def replaced(self) -> list[Json]:
        """Attempts that were made again, oldest first."""
        newest = {self._name(row): row for row in self.lines}
        return [row for row in self.lines if row is not newest[self._name(row)]]

    def under(self) -> Json:
        """What the newest attempt was measured under."""
        return {name: self.lines[-1][name] for name in UNDER}

    def _name(self, row: Json) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)
