"""Request fields that have no effect: which there are, and how they are reported (http-api section 1).

Names come from clients and end up in a response header, so they are cut to what a header may hold.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

# Accepted for the sake of clients that send them everywhere.
INERT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "verbosity",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "prediction",
        "moderation",
        "spaces_between_special_tokens",
        "best_of",
    }
)
# Two names of one thing: the second is read only when the first is absent.
ALIASES = {
    "extra_key": "cache_salt",
    "rid": "request_id",
    "no_stop_trim": "include_stop_str_in_output",
    "safety_identifier": "user",
}
OTHER = "other"
MAX_REPORTED = 32

_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})
_INERT_OPTION = "stream_options.include_obfuscation"
_HEADER_SAFE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def ignored_label(field: str) -> str:
    """Label of `overlap_ignored_request_fields_total`: a fixed set, whatever clients send."""
    return field if field in INERT or field in ALIASES or field == _INERT_OPTION else OTHER


def unknown_fields(body: Mapping[str, object], known: Collection[str]) -> list[str]:
    """Names present with a value that mean nothing here; `stream_options.x` for those of the options."""
    names = [n for n, v in body.items() if v is not None and n not in known and n not in INERT and n not in ALIASES]
    options = body.get("stream_options")
    if isinstance(options, dict):
        nested = [f"stream_options.{name}" for name in _present(options) if name not in _STREAM_OPTIONS]
        names += [name for name in nested if name != _INERT_OPTION]
    return names


def inert_fields(body: Mapping[str, object]) -> list[str]:
    """Known names present with a value that has no effect: inert ones, and a second name beside the first."""
    names = [name for name in _present(body) if name in INERT]
    names += [name for name in _present(body) if name in ALIASES and body.get(ALIASES[name]) is not None]
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_obfuscation") is not None:
        names.append(_INERT_OPTION)
    return names


def unknown_message_fields(messages: object, known: Collection[str]) -> list[str]:
    """`messages.x` for keys of messages that no template sees."""
    if not isinstance(messages, list):
        return []
    return [f"messages.{n}" for m in messages if isinstance(m, dict) for n in _present(m) if n not in known]


def reported(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, at most 32 of them, safe for a header; the rest are `other`."""
    safe = dict.fromkeys(name if _HEADER_SAFE.fullmatch(name) else OTHER for name in names)
    if len(safe) <= MAX_REPORTED:
        return tuple(safe)
    return (*(name for name in list(safe)[: MAX_REPORTED - 1] if name != OTHER), OTHER)


def _present(fields: Mapping[str, object]) -> list[str]:
    return [name for name, value in fields.items() if value is not None]
