"""Which layers are on which stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from impl.errors import ConfigError
from impl.models.catalogue import ModelConfig, Part


def partition(config: ModelConfig, stages: int, counts: Sequence[int] | None = None) -> tuple[Part, ...]:
    """Return each stage's part of the model, every layer on exactly one stage.

    Layer l of L goes to stage ``floor(l * stages / L)``, the authors' rule; the embedding to the first stage, final
    norm and head to the last.

    counts: layers on each stage instead, in order; 0 is allowed (such a stage passes on what it gets).

    Raises :class:`ConfigError` if there are more stages than layers, if ``counts`` do not fit, or if a tied head would
    put one matrix on two stages with two delays.
    """
    layers = config.arch.num_hidden_layers
    if stages < 1:
        raise ConfigError(f"a pipeline needs at least 1 stage, not {stages}")
    if counts is None:
        if stages > layers:
            raise ConfigError(
                f"{config.name} has {layers} layers, too few for {stages} stages: use at most {layers} stages, or "
                f"at least {stages} layers"
            )
        where = [layer * stages // layers for layer in range(layers)]
        counts = [where.count(stage) for stage in range(stages)]
    if len(counts) != stages or min(counts) < 0 or sum(counts) != layers:
        raise ConfigError(
            f"layers per stage {', '.join(map(str, counts))}: give {stages} numbers that add up to {layers} layers"
        )
    if stages > 1 and config.arch.tie_word_embeddings:
        raise ConfigError(
            f"{config.name} ties its head to the embedding, which are on two stages with two delays: use one stage, "
            "or a model with an untied head"
        )
    cuts = accumulate(counts, initial=0)
    return tuple(
        Part(first=first, last=last, embedding=stage == 0, head=stage == stages - 1)
        for stage, (first, last) in enumerate(pairwise(cuts))
    )
