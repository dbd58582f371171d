"""The rules by which the ledger judges a claim, and the entries of ``experiments/claims.yaml`` that they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from impl.errors import ConfigError
from impl.harness.spec import Frozen, load_yaml, parse
from impl.harness.tiers import Tier
from paper_figures.findings import EXACT, Answer, Finding

REPRODUCED, SAME, NOT, UNTESTED = "reproduced", "same direction", "not reproduced", "not testable here"
VERDICTS = (REPRODUCED, SAME, NOT, UNTESTED)
TOLERANCE = 0.1
"""Relative difference up to which measured and projected numbers agree, unless the claim says otherwise."""
MINIMUM_N = 3
"""Runs, seeds or repetitions below which a measured number reproduces nothing."""
SETUPS = {
    "published": "the published setup",
    "identified": "the setup is not stated, but of all that were planned only this one hits the published numbers",
    "any": "the claim holds at any size",
    "assumed": "something that the number depends on is not published, so that an agreement may be chance",
    "smaller": "another model, data, or number of ranks or stages than published",
}
"""How the setup of ours compares to the published one."""
EQUIVALENT = ("published", "identified", "any")
"""Setups under which a published number can be reproduced."""


class AnswerEntry(Frozen):
    """Which experiment answers a claim: its file's name, the function that finds ours, and how the setups compare.

    tiers: where this answer counts, everywhere if None.  run: ``make`` target that makes the experiment.
    """

    experiment: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    found_by: Annotated[str, Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$")]
    setup: Literal["published", "identified", "any", "assumed", "smaller"]
    tiers: tuple[Tier, ...] | None = None
    run: Literal["reproduce", "full"] = "reproduce"


class ClaimEntry(Frozen):
    """One claim of the ledger.

    value, baseline_value, unit: as published; of a claim without a number ``unit`` has its words.
    quantity, model: which row of the published table, where an id has several.
    compare: the published numbers, or the ``effect``: baseline over value.
    equal_to: what a claim of equality comes down to; ``tolerance`` is then absolute.
    comparable: whether a quotient of ours and the published number says anything.
    not_testable: why no experiment can decide.
    """

    id: Annotated[str, Field(pattern=r"^[CR][0-9]+[a-z]?$")]
    system: Literal["canzona", "rotation"]
    what: Annotated[str, Field(max_length=50)]
    setup: str
    quantity: str | None = None
    model: str | None = None
    value: float | None = None
    baseline_value: float | None = None
    unit: str = ""
    compare: Literal["value", "effect"] = "value"
    equal_to: float | None = None
    tolerance: Annotated[float, Field(ge=0)] | None = None
    minimum_n: Annotated[int, Field(ge=1)] = MINIMUM_N
    comparable: bool = True
    not_testable: str | None = None
    note: str = ""
    answers: tuple[AnswerEntry, ...] = ()

    @property
    def published_id(self) -> str:
        """The id in the published table."""
        return self.id.rstrip("abcdefghijklmnopqrstuvwxyz")

    @property
    def effect(self) -> float:
        """The published baseline over the value, NaN without both."""
        return self.baseline_value / self.value if self.baseline_value is not None and self.value else math.nan

    @model_validator(mode="after")
    def _answerable(self) -> ClaimEntry:
        if not self.answers and self.not_testable is None:
            raise ValueError(f"{self.id} has no answers: name an experiment, or say in not_testable why there is none")
        if self.compare == "effect" and not math.isfinite(self.effect):
            raise ValueError(f"{self.id} compares an effect, which needs value and baseline_value")
        return self


def load(path: Path) -> tuple[ClaimEntry, ...]:
    """Return the claims of a YAML list, in order; raises :class:`ConfigError` that names file, claim and setting."""
    data = load_yaml(path)
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise ConfigError(f"{path}: expected a list of claims")
    try:
        entries = [parse(ClaimEntry, item, str(item.get("id", f"entry {i + 1}"))) for i, item in enumerate(data)]
        ids = [entry.id for entry in entries]
        if twice := [name for name in ids if ids.count(name) > 1]:
            raise ConfigError(f"{twice[0]} is listed twice: give its parts letters, {twice[0]}a and {twice[0]}b")
        return tuple(entries)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


@dataclass(frozen=True)
class Verdict:
    """One of :data:`VERDICTS` and, in words, by what."""

    word: str
    reason: str


def judge(claim: ClaimEntry, answer: Answer | None, missing: str = "") -> Verdict:
    """Return the verdict on a claim by :func:`rules`.

    answer: ours, None if there is none.  missing: why there is none.
    """
    if claim.not_testable is not None:
        return Verdict(UNTESTED, claim.not_testable)
    if answer is None or not answer.known:
        return Verdict(UNTESTED, missing or "no number")
    if claim.equal_to is not None:
        return _equality(claim, answer, claim.equal_to)
    effect = answer.effect
    if effect is None or not effect.known:
        return Verdict(UNTESTED, effect.note if effect and effect.note else "no effect to compare")
    low, high = (effect.low, effect.high) if math.isfinite(effect.low) else (effect.value, effect.value)
    if effect.kind not in EXACT and not math.isfinite(effect.low):
        return Verdict(UNTESTED, f"n = {effect.n}: no interval, so that not even the direction is known")
    text = f"effect {_interval(effect.value, effect.low, effect.high)}"
    if high < 1:
        return Verdict(NOT, f"{text}: the other direction")
    if low <= 1:
        return Verdict(NOT, f"{text}: " + ("the interval includes no effect" if low < high else "no effect"))
    hit, how = agreement(claim, answer)
    against = [*([] if hit else [how]), *obstacles(claim, answer, effect)]
    return Verdict(SAME, "; ".join(against)) if against else Verdict(REPRODUCED, f"{how}; {SETUPS[answer.setup]}")


def _equality(claim: ClaimEntry, answer: Answer, target: float) -> Verdict:
    number = answer.effect if claim.compare == "effect" else answer.value
    if number is None or not number.known:
        return Verdict(UNTESTED, answer.note or "no number")
    far = abs(number.value - target)
    tolerance = claim.tolerance or 0.0
    text = f"{far:.2g} from {target:g}, where {tolerance:g} is allowed" if far else f"exactly {target:g}"
    if far > tolerance:
        return Verdict(NOT, text)
    against = obstacles(claim, answer, number)
    return (
        Verdict(SAME, "; ".join([text, *against]))
        if against
        else Verdict(REPRODUCED, f"{text}; {SETUPS[answer.setup]}")
    )


def obstacles(claim: ClaimEntry, answer: Answer, number: Finding) -> list[str]:
    """Return what stands against calling a claim reproduced although the numbers may agree."""
    found = [] if answer.setup in EQUIVALENT else [SETUPS[answer.setup]]
    if number.kind not in EXACT and number.n < claim.minimum_n:
        found.append(f"n = {number.n}, where {claim.minimum_n} are needed")
    return found


def agreement(claim: ClaimEntry, answer: Answer) -> tuple[bool, str]:
    """Return whether every published number agrees with ours, and in words how."""
    if claim.value is None:
        return False, "no number is published"
    if claim.compare == "effect":
        pairs = [("effect", claim.effect, answer.effect)]
    else:
        pairs = [("value", claim.value, answer.value)]
        if answer.baseline is not None and claim.baseline_value is not None:
            pairs.append(("baseline", claim.baseline_value, answer.baseline))
    words = []
    for name, published, ours in pairs:
        if ours is None or not ours.known or (claim.compare == "value" and ours.unit != claim.unit):
            return False, "ours is another quantity than the published number"
        hit, how = _agrees(claim, published, ours)
        if not hit:
            return False, f"{name} {ours.value:.3g}, published {published:.3g}: {how}"
        words.append(how)
    return True, "; ".join(dict.fromkeys(words))


def _agrees(claim: ClaimEntry, published: float, ours: Finding) -> tuple[bool, str]:
    if ours.kind == "planned" and claim.tolerance is None and claim.compare == "value":
        shown = max(decimals(number) for number in (claim.value, claim.baseline_value) if number is not None)
        text = f"to the {shown} decimals shown" if shown else "to the digits shown"
        return (True, f"equal {text}") if round(ours.value, shown) == published else (False, f"not equal {text}")
    if math.isfinite(ours.low) and ours.low <= published <= ours.high:
        return True, "published within our interval"
    tolerance = TOLERANCE if claim.tolerance is None else claim.tolerance
    far = abs(ours.value - published)
    if far <= tolerance * abs(published):
        return True, f"within {tolerance:.0%}"
    return False, "outside of our interval and tolerance" if math.isfinite(ours.low) else "outside of the tolerance"


def decimals(number: float) -> int:
    """Return the decimals of a number as it was written: 2 of 3.24, 0 of 1."""
    exponent = Decimal(repr(number)).normalize().as_tuple().exponent
    return max(-exponent, 0) if isinstance(exponent, int) else 0


def rules() -> str:
    """Return the rules as Markdown, for the document."""
    setups = "\n".join(f"- *{name}*: {text}." for name, text in SETUPS.items())
    equivalent = ", ".join(f"*{name}*" for name in EQUIVALENT)
    return f"""\
A claim has an **effect**: how many times the claimed side is better, larger or more, above 1 in the direction of the
claim. The first rule that fits decides, for every claim alike.

1. **{UNTESTED}**: no experiment has a number here (not run, failed, diverged), or none can decide (advice, a rule for
   settings, a size or device that no experiment has, a claim whose own numbers contradict each other), or a measured
   effect has no interval (one seed). Ours is shown all the same where there is one.
2. **{NOT}**: the interval of our effect lies on the other side of 1, or includes it. It is said of our setup
   only, which the details name: what is absent in a small model may be there in a large one.
3. **{REPRODUCED}**: our effect is on the claim's side, *every* published number agrees, the setup is the published
   one, and a measured number has n of at least {MINIMUM_N} seeds, repetitions or runs. A number agrees if the published
   one lies within our interval or is at most {TOLERANCE:.0%} away: published ones have two or three digits and no
   interval. A planned number has no spread, so it must be equal in every decimal that is shown.
4. **{SAME}**: our effect is on the claim's side with the whole interval, but the size differs, no size is
   published, n is too small, or the setup is another one.

A claim that something is *equal* or *zero* is {REPRODUCED} within the tolerance of its entry, else {NOT};
with too small an n or in another setup it is {SAME} at most. Times and sizes from small models are {SAME} at
most, whatever they are.

How setups compare:

{setups}

With {equivalent} a claim can be {REPRODUCED}. Intervals of measured numbers are those of the experiment's table (95 %,
of times the quartiles), of projected ones the band that 90 of 100 draws of the inputs lead to."""


def _interval(value: float, low: float, high: float) -> str:
    text = f"{value:.3g}"
    return f"{text} [{low:.3g}, {high:.3g}]" if math.isfinite(low) and low < high else text


def counts(words: Sequence[str]) -> str:
    """Return how many claims have which verdict, as a sentence."""
    parts = [f"**{list(words).count(word)} {word}**" for word in VERDICTS]
    return f"Of {len(words)} claims: {', '.join(parts)}."
