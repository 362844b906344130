"""Redaction: the one place that decides which parts of a text are secret.

A secret is the password in an address, a user part without a password where the scheme has no user names (a token), the
value of a parameter such as `password`, `apiKey` or `X-Amz-Signature`, be it written `name=value`, `name: value`,
`--name value` or as JSON, a cookie, the path of a chat service's webhook, and a text in the form of a well-known
service's tokens. Where an address is ambiguous (`https://host:8080/a@b` may hold the password `8080/a`), it is
redacted: showing too little does no harm.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any


def _any_case(name: str) -> str:
    """A JSON schema's pattern has no flag for it."""
    return "".join(f"[{letter}{letter.upper()}]" if letter.isalpha() else letter for letter in name)


def _one_of(*names: str) -> str:
    return f"(?:{'|'.join(map(_any_case, names))})"


_ANYWHERE = _one_of("password", "passwd", "passphrase", "pwd", "secret", "signature", "credential")
"""Secret wherever they stand in a parameter's name, as in `sslpassword` and `X-Amz-Credential`."""
_LAST = _one_of("sig", "auth", "authorization", "jwt", "cookie", "sessionid", "jsessionid", "phpsessid")
"""Secret where they are a name's whole or its last part, as in `x-ms-sig`; `key` is where it is the last of several."""
_IN_QUERIES = _one_of("code", "key", "sas")
"""Secret as the whole name of a parameter of an address; elsewhere words as others."""
_KINDS = _one_of(
    "access", "account", "admin", "api", "app", "auth", "bearer", "client", "encryption", "id", "master", "private",
    "refresh", "secret", "security", "session", "shared", "signing", "storage", "subscription",
)  # fmt: skip
"""What a key or token is called that is one: `num_keys`, `max_tokens` and `pad_token` are none."""
_KIND_OF_KEY = rf"{_KINDS}[_-]?(?:{_any_case('key')}[sS]?|{_any_case('token')}[sS])"
_PASS = rf"(?:{_one_of('admin', 'db', 'ftp', 'http', 'proxy', 'root', 'smtp', 'user')}[_-]?)?{_any_case('pass')}"
_OF_A_TEXT = _one_of(
    "bos", "cls", "draft", "eos", "image", "last", "mask", "next", "pad", "sep", "special", "unk",
)  # fmt: skip
_TOKEN = rf"(?!(?:[\w-]*[_-])?{_OF_A_TEXT}_{_any_case('token')})[\w.%-]*{_any_case('token')}"
_NAME = (
    rf"(?:[\w.%-]*{_ANYWHERE}[\w.%-]*|(?:[\w.%-]*[_-])?{_LAST}"
    rf"|[\w.%-]*(?:[_-]{_any_case('key')}|[a-z0-9]Key)|[\w.%-]*{_KIND_OF_KEY}"
    rf"|[\w-]*[kK][eE][yY]_?[iI][dD]|{_PASS}|{_TOKEN})"
)
_ANY_TOKEN = rf"[\w.%-]*{_any_case('token')}(?!izer|[sS]=)[\w.%-]*"
_PARAMETER = rf"""(?:(?<![^?&;#,\s"'(\[{{]){_NAME}|(?<=[?&])(?:{_IN_QUERIES}|{_ANY_TOKEN}))="""
_USER = r"[^/?#@:\s]*"
_HAS_USER_NAMES = r"(?:postgres|mysql|mariadb|mssql|oracle|ssh|sftp|ftp|smb|hdfs)"
_QUOTED = r"""(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""

PASSWORD = re.compile(
    rf"(?P<user>://{_USER}:)\S*(?=@)"
    rf"|(?P<scheme>(?<![\w+.-])(?!{_HAS_USER_NAMES})[a-z][\w+.-]*://)[^/?#:\s]+(?=@)"
    rf"|(?P<name>{_PARAMETER})(?=[^&#\s])(?:{_QUOTED})?[^&#\s]*"
)
NO_PASSWORD = (
    rf"^(?![\s\S]*(?:://{_USER}:\S*@"
    rf"|(?<![\w+.-])(?!{_HAS_USER_NAMES})[a-z][\w+.-]*://[^/?#:\s]+@"
    rf"|{_PARAMETER}[^&#\s]))"
)
"""A JSON schema's pattern for a text without a secret."""

_SURE = (
    rf"(?:[\w.-]*{_ANYWHERE}[sS]?|[\w.-]*{_KIND_OF_KEY}|[\w.-]*{_KINDS}[_-]?{_any_case('token')}"
    rf"|(?:[\w.-]*[_-])?{_any_case('jwt')})"
)
"""Names before a colon or a blank: fewer than before `=`, because prose has them (`the last token: 5`)."""
_WRITTEN = re.compile(
    # A header, with or without its scheme.
    rf"""(?P<header>(?<![\w-])(?:{_any_case("proxy-")})?{_any_case("authorization")}["']?[ \t]*[:=][ \t]*["']?)"""
    r"""(?:(?:Bearer|Basic|Token|bearer|basic|token)\s+)?[^\s"',]+"""
    # JSON and YAML; of words in prose (`without a password: set one`) the value is not the last one of its line.
    rf"""|(?P<field>(?<![\w.-]){_SURE}["']?[ \t]*:[ \t]*)"""
    rf"""(?:{_QUOTED}|(?![\s\[{{"',;}}])[^\s"',;}}]*(?:\d[^\s"',;}}]*|(?=\s*(?:[,;}}]|$))))"""
    rf"""|(?P<cookie>(?<![\w-])(?:{_any_case("set-")})?{_any_case("cookie")}["']?[ \t]*:[ \t]*["']?)"""
    r"""(?=[\w.-]+=)[^"'\n]+"""
    rf"""|(?P<session>(?<![\w.-])[\w.-]*{_any_case("session")}[_-]?{_any_case("id")}["']?[ \t]*[=:][ \t]*["']?)"""
    r"""(?=[^\s"',;&]*\d)[\w.~%+/=-]{16,}"""
    rf"""|(?P<json>["'](?:{_any_case("token")}|{_any_case("key")})["']\s*:\s*)["'][\w.~+/=-]{{16,}}["']"""
    rf"""|(?P<option>(?<![\w-])--(?:{_SURE}|{_TOKEN})(?:["'],)?\s+)(?!-)(?:{_QUOTED}|[^\s"',]+)""",
    re.MULTILINE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|(?<![/-])sk-(?=[\w-]*\d)(?:(?:admin|ant|lf|or|proj|svcacct)-[\w-]{20,}"
    r"|[A-Za-z0-9]{20,}[\w-]*|(?=[\w-]*[A-Z])[\w-]{20,})"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[\w-]{35}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)|(?<=\b[Bb]earer )(?=\S*\d)[\w.~+/=-]{8,}"
)
"""Tokens of well-known services, whatever stands before them."""
_WEBHOOK = re.compile(
    r"((?:\bhooks\.slack(?:-gov)?\.com/\w+|\bdiscord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+"
    r"|\bwebhook\.office\.com/webhookb2|\boutlook\.office(?:365)?\.com/webhook|\bhooks\.zapier\.com/hooks/catch"
    r"|://[^/\s]+/hooks(?=/[a-z0-9]{26}\b))/|\bapi\.telegram\.org/(?:file/)?bot)[^\s\"'<>()?#]+",
    re.IGNORECASE,
)
"""Addresses of chat services whose path is a secret (`/hooks/` of a server of one's own: Mattermost)."""
_IS_NAME, _IS_OPTION = re.compile(_NAME), re.compile(rf"--(?:{_SURE}|{_TOKEN})")


def redacted(setting: Any) -> Any:
    """The same text, list or mapping with `***` in the place of every secret."""
    if isinstance(setting, str):
        setting = _WEBHOOK.sub(_hidden, PASSWORD.sub(_hidden, setting))
        return _SHAPES.sub("***", _WRITTEN.sub(_hidden, setting))
    if isinstance(setting, Mapping):
        return {
            redacted(key): "***" if value and _is_secret(key, value, _IS_NAME) else redacted(value)
            for key, value in setting.items()
        }
    if isinstance(setting, Sequence) and not isinstance(setting, bytes):
        pairs = zip((None, *setting), setting, strict=False)
        return ["***" if _is_secret(before, value, _IS_OPTION) else redacted(value) for before, value in pairs]
    return setting


def _hidden(match: re.Match[str]) -> str:
    """The match with `***` after the part that names the secret."""
    return f"{next(shown for shown in match.groups() if shown)}***"


def _is_secret(name: Any, value: Any, names: re.Pattern[str]) -> bool:
    return isinstance(name, str) and isinstance(value, str) and names.fullmatch(name) is not None
