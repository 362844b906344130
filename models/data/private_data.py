"""Finds secrets and personal data in text with Presidio's pattern recognizers.

They need no model and no network, and verify check digits and numbering plans. Patterns for keys of well-known services
are added here. Names and postal addresses have no pattern and are not found.
"""

import re
from collections.abc import Sequence
from functools import cache

import tldextract
from presidio_analyzer import AnalyzerEngine, Pattern, PatternRecognizer, RecognizerRegistry
from presidio_analyzer import predefined_recognizers as predefined
from presidio_analyzer.nlp_engine import NoOpNlpEngine

LANGUAGE = "en"
MIN_SCORE = 0.3
"""Lower scores are vague patterns, such as any nine digits."""

SECRETS = {
    "AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})",
    "GitLab token": r"\bglpat-[\w-]{20,}",
    "Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "model provider's key": r"\bsk-[A-Za-z0-9_-]{20,}",
    "Google key": r"\bAIza[\w-]{35}",
    "Stripe key": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}",
    "package registry's token": r"\b(?:pypi-[\w-]{30,}|npm_[A-Za-z0-9]{36})",
    "JSON web token": r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+",
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "bearer token": r"\b[Bb]earer\s+[A-Za-z0-9._~+/-]{20,}",
    "password in an address": r"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/@]+@",
    "assigned secret": r"(?i)\b\w*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key)\b[\"']?\s*[:=]\s*[\"']?"
    r"[^\s\"',;()<>{}\[\]]{8,}",
}
SECRET = "SECRET"

_SUFFIXES = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
"""Uses the package's own list of domains, without a download."""


class OfflineEmailRecognizer(predefined.EmailRecognizer):
    """Presidio's own recognizer downloads the list of domains."""

    def validate_result(self, pattern_text: str) -> bool:
        return bool(_SUFFIXES(pattern_text).top_domain_under_public_suffix)


@cache
def _analyzer() -> AnalyzerEngine:
    secrets = PatternRecognizer(
        supported_entity=SECRET,
        name="SecretRecognizer",
        patterns=[Pattern(name, regex, 0.9) for name, regex in SECRETS.items()],
        global_regex_flags=re.MULTILINE,  # the default would ignore case
    )
    personal = [
        recognizer(supported_language=LANGUAGE)
        for recognizer in (
            OfflineEmailRecognizer,
            predefined.PhoneRecognizer,
            predefined.CreditCardRecognizer,
            predefined.IbanRecognizer,
            predefined.IpRecognizer,
            predefined.MacAddressRecognizer,
            predefined.UsSsnRecognizer,
            predefined.CryptoRecognizer,
        )
    ]
    nothing = NoOpNlpEngine([{"lang_code": LANGUAGE, "model_name": "none"}])
    nothing.load()
    registry = RecognizerRegistry(recognizers=[secrets, *personal], supported_languages=[LANGUAGE])
    return AnalyzerEngine(registry=registry, nlp_engine=nothing, supported_languages=[LANGUAGE])


def find_private_data(texts: Sequence[str]) -> set[str]:
    """Kinds of private data in the texts: Presidio's names and `SECRET`; empty if there is none."""
    return {
        result.entity_type
        for text in texts
        for result in _analyzer().analyze(text, language=LANGUAGE, score_threshold=MIN_SCORE)
    }
