"""Redaction: the one place that decides which parts of a text are secret.

A secret is the password in an address, a user part without a password where the scheme has no user names (a token), and
the value of a parameter such as `password`, `sslpassword`, `token` or `X-Amz-Signature`. Where an address is ambiguous
(`https://host:8080/a@b` may hold the password `8080/a`), it is redacted: showing too little does no harm.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_SECRET_NAMES = ("password", "passwd", "passphrase", "pwd", "secret", "signature", "credential", "token")
_KEYS = ("key", "sig", "auth", "authorization")
"""Secret where they are the parameter's whole name or its last part, as in `api_key`."""


def _any_case(name: str) -> str:
    """A JSON schema's pattern has no flag for it."""
    return "".join(f"[{letter}{letter.upper()}]" for letter in name)


_NAME = (
    rf"(?:[\w.%-]*(?:{'|'.join(map(_any_case, _SECRET_NAMES))})(?![sS]=)[\w.%-]*"
    rf"|(?:[\w.%-]*[_-])?(?:{'|'.join(map(_any_case, _KEYS))})|[\w-]*[kK][eE][yY]_?[iI][dD])"
)
_PARAMETER = rf"""(?<![^?&;#,\s"'(]){_NAME}="""
_USER = r"[^/?#@:\s]*"
_HAS_USER_NAMES = r"(?:postgres|mysql|mariadb|mssql|oracle|ssh|sftp|ftp|smb|hdfs)"

PASSWORD = re.compile(
    rf"(?P<user>://{_USER}:)\S*(?=@)"
    rf"|(?P<scheme>(?<![\w+.-])(?!{_HAS_USER_NAMES})[a-z][\w+.-]*://)[^/?#:\s]+(?=@)"
    rf"|(?P<name>{_PARAMETER})[^&#\s]+"
)
NO_PASSWORD = (
    rf"^(?![\s\S]*(?:://{_USER}:\S*@"
    rf"|(?<![\w+.-])(?!{_HAS_USER_NAMES})[a-z][\w+.-]*://[^/?#:\s]+@"
    rf"|{_PARAMETER}[^&#\s]))"
)
"""A JSON schema's pattern for a text without a secret."""


def redacted(setting: Any) -> Any:
    """The same text, list or mapping with `***` in the place of every secret."""
    if isinstance(setting, str):
        return PASSWORD.sub(lambda match: f"{match['user'] or match['scheme'] or match['name']}***", setting)
    if isinstance(setting, Mapping):
        return {redacted(key): redacted(value) for key, value in setting.items()}
    if isinstance(setting, Sequence) and not isinstance(setting, bytes):
        return [redacted(value) for value in setting]
    return setting
