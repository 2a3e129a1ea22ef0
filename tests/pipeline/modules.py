"""LightningModules whose steps are odd in ways that matter to a pipeline; no line here knows of stages."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L

from tests.support.modules import GPT, Llama, Seq2Seq, SharedWeights, ViT, WeightPenalty

MODULES: dict[str, Callable[[], L.LightningModule]] = {
    "gpt": GPT,
    "vit": ViT,
    "llama": Llama,
    "seq2seq": Seq2Seq,
    "weight_penalty": WeightPenalty,
    "shared_weights": SharedWeights,
}
