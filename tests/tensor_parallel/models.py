"""LightningModules as users write them, none of which knows of a tensor axis; small, without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.tensor_plan import models as parts

VOCABULARY, LENGTH, ROWS = (
    parts.VOCABULARY,
    parts.LENGTH,
    16,
)  # a number of words that does not divide over 2 or 4 ranks


def dataset(rows: int = ROWS, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class Trained(L.LightningModule):
    """What all have in common."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def scored(self, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """A loss and what else people compute from logits."""
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), **options)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(-1) == targets).float().mean())
        self.log("confidence", logits.softmax(-1).amax(-1).mean())
        return loss


class GPT(Trained):
    """Fused projections and hard-coded head counts; tied embeddings."""

    def __init__(self, attention: Callable[[], nn.Module], mlp: Callable[[], nn.Module] = parts.MLP) -> None:
        super().__init__()
        self.net = parts.GPT([parts.Block(attention(), mlp()) for _ in range(2)])

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.scored(self.net(batch[0]), batch[1], ignore_index=-1)

    def validation_step(self, batch: Any, index: int) -> None:
        logits = self.net(batch[0])
        self.log("val_loss", F.cross_entropy(logits.transpose(1, 2), batch[1]))

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self.net(batch[0])


class HuggingFace(Trained):
    """A model of transformers, by its configuration."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        common = {"vocab_size": VOCABULARY, "pad_token_id": 0}
        if kind == "gpt2":
            no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config: Any = transformers.GPT2Config(
                n_embd=24, n_layer=2, n_head=4, n_positions=16, **no_dropout, **common
            )
            self.net: Any = transformers.GPT2LMHeadModel(config)
        elif kind == "t5":
            config = transformers.T5Config(
                d_model=24,
                d_kv=8,
                d_ff=36,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                **common,
            )
            self.net = transformers.T5ForConditionalGeneration(config)
        else:
            heads, key_value_heads = (3, 3) if kind == "llama-3-heads" else (8, 2)
            config = transformers.LlamaConfig(
                hidden_size=8 * heads,
                intermediate_size=41,
                num_hidden_layers=2,
                num_attention_heads=heads,
                num_key_value_heads=key_value_heads,
                max_position_embeddings=16,
                **common,
            )
            self.net = transformers.LlamaForCausalLM(config)

    def training_step(self, batch: Any, index: int) -> Tensor:
        out = self.net(input_ids=batch[0], labels=batch[1])
        self.log("loss", out.loss)
        self.log("accuracy", (out.logits.argmax(-1) == batch[1]).float().mean())
        return out.loss


class Encoder(Trained):
    """torch's own encoder, whose attention is one function that counts heads itself; label smoothing."""

    def __init__(self, heads: int = 4, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        layer = nn.TransformerEncoderLayer(24, heads, 41, dropout=0.0, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, VOCABULARY)
        self.batch_first = batch_first

    def training_step(self, batch: Any, index: int) -> Tensor:
        hidden = self.embedding(batch[0])
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        padding = torch.zeros(batch[0].shape, dtype=torch.bool).index_fill_(1, torch.tensor([LENGTH - 1]), True)
        hidden = self.encoder(hidden, mask=mask.isinf(), src_key_padding_mask=padding, is_causal=False)
        hidden = hidden if self.batch_first else hidden.transpose(0, 1)
        logits = self.head(hidden)
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)(logits.transpose(1, 2), batch[1])
        self.log("loss", loss)
        return loss


class Tower(Trained):
    """Linear layers in a row, of widths that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(LENGTH, 40), nn.GELU(), nn.Linear(40, 41), nn.GELU(), nn.Linear(41, 24))
        self.head = nn.Linear(24, 5)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.scored(self.head(self.net(batch[0].float() / VOCABULARY)), batch[1][:, 0] % 5)


class ViT(Trained):
    """``reshape(B, N, 3, H, D)``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = parts.ViT([parts.Block(parts.FusedAttention("view"), parts.MLP()) for _ in range(2)])

    def training_step(self, batch: Any, index: int) -> Tensor:
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(5))
        images = noise * batch[0][:, :1, None, None].float() / VOCABULARY
        return self.scored(self.net(images), batch[1][:, 0] % 10)


MODELS: dict[str, Callable[[], Any]] = {
    "fused split": lambda: GPT(lambda: parts.FusedAttention("split"), parts.GatedMLP),
    "fused unflatten": lambda: GPT(lambda: parts.FusedAttention("unflatten", parts.eager)),
    "fused slice": lambda: GPT(lambda: parts.FusedAttention("slice")),
    "interleaved": lambda: GPT(lambda: parts.FusedAttention("interleaved")),
    "grouped fused": lambda: GPT(lambda: parts.GroupedAttention(fused=True, norm="head")),
    "latent": lambda: GPT(parts.LatentAttention),
    "gpt2": lambda: HuggingFace("gpt2"),
    "llama": lambda: HuggingFace("llama"),
    "llama-3-heads": lambda: HuggingFace("llama-3-heads"),
    "t5": lambda: HuggingFace("t5"),
    "encoder": Encoder,
    "encoder-3-heads": lambda: Encoder(heads=3),
    "encoder-length-first": lambda: Encoder(batch_first=False),
    "tower": Tower,
    "vit": ViT,
}


class Adversarial(Trained):
    """Manual optimization: two optimizers, toggles, clipping by hand, gradients that add up over two passes."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.words = nn.Embedding(VOCABULARY, parts.WIDTH)
        self.maker = parts.Block(parts.FusedAttention("split"), parts.GatedMLP())
        self.judge = parts.Block(parts.GroupedAttention(norm="head"), parts.MLP())
        self.score = nn.Linear(parts.WIDTH, 1)

    def configure_optimizers(self) -> Any:
        judging = [*self.judge.parameters(), *self.score.parameters()]
        making = [*self.words.parameters(), *self.maker.parameters()]
        return torch.optim.SGD(judging, lr=0.1, momentum=0.9), torch.optim.SGD(making, lr=0.1)

    def judged(self, hidden: Tensor) -> Tensor:
        return self.score(self.judge(hidden)).mean((1, 2))

    def training_step(self, batch: Any, index: int) -> None:
        judge, maker = self.optimizers()
        self.toggle_optimizer(judge)
        made, real = self.maker(self.words(batch[0])).detach(), self.words(batch[1]).detach()
        for sign, hidden in ((1.0, made), (-1.0, real)):
            loss = F.softplus(sign * self.judged(hidden)).mean()
            self.manual_backward(loss)
        self.clip_gradients(judge, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        judge.step()
        judge.zero_grad()
        self.untoggle_optimizer(judge)
        self.log("judge", loss)
        self.toggle_optimizer(maker)
        loss = F.softplus(-self.judged(self.maker(self.words(batch[0])))).mean()
        self.manual_backward(loss)
        maker.step()
        maker.zero_grad()
        self.untoggle_optimizer(maker)
        self.log("maker", loss)


OTHERS: dict[str, Callable[[], Any]] = {"adversarial": Adversarial}
"""Models that not every run can have."""
