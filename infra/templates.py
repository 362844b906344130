"""Pages from Jinja templates, HTML or Markdown, in which no value becomes markup."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from infra.markdown import SPECIAL, escaped, markdown_table
from infra.quantities import byte_size, duration, figure, plural, si, signed


def render(template: Path, **values: Any) -> str:
    """The page that a template makes of `values`.

    Every value is escaped, for HTML in `*.html.jinja` and for Markdown elsewhere, unless it passes the filter `safe`.
    Further filters: those of `infra.quantities`, `count`, `share`, `sentence`, `prose` (text whose commands stand
    between backticks) and, in Markdown, `table` (of rows with equal keys).
    """
    environment = _environment(template.parent, is_html=template.name.endswith(".html.jinja"))
    return environment.get_template(template.name).render(**values)


@cache
def _environment(folder: Path, *, is_html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        autoescape=is_html,
        finalize=None if is_html else _markdown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "byte_size": byte_size,
        "count": "{:,}".format,
        "duration": duration,
        "figure": figure,
        "plural": plural,
        "prose": _html_prose if is_html else _markdown_prose,
        "sentence": sentence,
        "share": "{:.1%}".format,
        "si": si,
        "signed": signed,
        "table": lambda rows, gap="": Markup(markdown_table(rows, gap)),
    }
    return environment


def _markdown(value: Any) -> Any:
    return value if isinstance(value, Markup) else escaped(str(value))


def _html_prose(text: str) -> Markup:
    parts = [Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in _parts(text)]
    return Markup("").join(parts)


def _markdown_prose(text: str) -> Markup:
    return Markup("`".join(part if at % 2 else SPECIAL.sub(r"\\\1", part) for at, part in _parts(text)))


def _parts(text: str) -> enumerate[str]:
    """Plain text and, at odd places, what stands between backticks."""
    return enumerate(text.split("`"))


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
