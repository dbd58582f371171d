"""Settings of a run from a file and from options of a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from impl.errors import ConfigError
from impl.harness.spec import load_yaml


def settings_of(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the file ``args.config``, overridden by the options ``names`` that were given.

    Raises :class:`ConfigError` if the file holds no settings.
    """
    data = load_yaml(args.config) if args.config is not None else {}
    if not isinstance(data, dict):
        raise ConfigError(f"{args.config} must hold settings, one 'key: value' a line")
    return data | {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def require_model(data: dict[str, Any]) -> dict[str, Any]:
    """Return ``data``; raises :class:`ConfigError` if it names no model."""
    if data.get("model") is None:
        raise ConfigError("no model given: write for example --model qwen3-tiny")
    return data
