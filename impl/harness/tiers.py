"""What all kinds of experiments share: tiers, labels, and the merging and hashing of settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator

from impl.errors import ConfigError, unknown
from impl.harness.spec import Frozen

Tier = Literal["ci", "laptop", "gpu1", "node8", "cluster"]
TIERS: tuple[str, ...] = get_args(Tier)


def _names_a_folder(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+", text):
        raise ValueError("write lower-case letters, digits and hyphens, for it names folders; `name` is for display")
    return text


def _is_one_line(text: str) -> str:
    if not text.isprintable() or not text.strip():
        raise ValueError("write one line of text that can be printed")
    return text


Id = Annotated[str, AfterValidator(_names_a_folder)]


class Label(Frozen):
    """One of the things that an experiment compares.

    id: its name in paths and tables' keys; name: how it is displayed, any line of text.
    """

    id: Id
    name: Annotated[str, AfterValidator(_is_one_line)]


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Return nested plain data in which later ``layers`` override earlier ones key by key."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def canonical_digest(data: Any) -> str:
    """SHA-256 of plain data in a form that does not depend on key order."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def of_tier(tiers: Any, tier: str) -> Any:
    """Return what ``tiers`` says about ``tier``; raises :class:`ConfigError` if that is nothing."""
    if tier not in TIERS:
        raise unknown("tier", tier, TIERS)
    if tier not in tiers:
        raise ConfigError(f"this experiment has no tier {tier!r}; it has {', '.join(tiers)}")
    return tiers[tier]


def no_duplicates(labels: Sequence[Label]) -> None:
    """Raise ValueError if two of ``labels`` have the same id, or the same name: tables could not tell them apart."""
    for given in ([label.id for label in labels], [label.name for label in labels]):
        for name in given:
            if given.count(name) > 1:
                raise ValueError(f"{name!r} is listed twice")
