"""A LightningModule's own training_step, and what deriving leaves behind."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_pardist.describe.linear_roles import derive_roles
from tests.tensor_plan import models


class LitGPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = models.GPT([models.Block(models.FusedAttention("split")) for _ in range(2)], tied=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[1].flatten())
        self.log("accuracy", (logits.argmax(-1) == batch[1]).float().mean())
        return loss


def test_training_step() -> None:
    roles = derive_roles(LitGPT(), (models.ids(), models.ids()))
    found = {weight.name.removeprefix("model."): weight.role for weight in roles.weights}
    assert found["tokens"] == found["head"] == "vocab"
    assert found["blocks.1.attention.qkv"] == "fused_column"
    assert found["blocks.1.mlp.down"] == "row"


def test_the_module_stays_as_it_is() -> None:
    torch.manual_seed(0)
    module = LitGPT()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    derive_roles(module, (models.ids(), models.ids()))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert not module.model._forward_hooks and not module._forward_hooks


def test_a_module_without_memory() -> None:
    with torch.device("meta"):
        module = LitGPT()
    roles = derive_roles(module, (models.ids(), models.ids()))
    assert [weight.role for weight in roles.weights].count("row") == 4
