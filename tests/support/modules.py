"""LightningModules of different shape, as users write them: no line here knows that there is more than one rank.

Every class makes its own data (``dataset``), so that a test needs no more than the class. Nothing is random after the
constructor: noise comes with the batch, dropout is off; what one process computes, many must compute too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

TRAIN_ROWS, VALID_ROWS = 24, 16
VOCABULARY, LENGTH, WIDTH = 31, 8, 24  # 31 rows do not divide evenly over ranks


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


class Tokens:
    """Data: token sequences, each the one before shifted by a rule a small model can learn."""

    @staticmethod
    def dataset(rows: int, seed: int) -> Dataset[Any]:
        start = integers(VOCABULARY, rows, 1, seed=seed)
        tokens = (start + 3 * torch.arange(LENGTH + 1)) % VOCABULARY
        return TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class Images:
    """Data: small images in five classes."""

    @staticmethod
    def dataset(rows: int, seed: int) -> Dataset[Any]:
        labels = integers(5, rows, seed=seed)
        return TensorDataset(numbers(rows, 3, 8, 8, seed=seed + 1) + labels.view(-1, 1, 1, 1) / 4, labels)


class Vectors:
    """Data: vectors with a number each."""

    @staticmethod
    def dataset(rows: int, seed: int) -> Dataset[Any]:
        x = numbers(rows, WIDTH, seed=seed)
        return TensorDataset(x, x[:, :4].sum(-1).tanh())


class OneLoss(L.LightningModule):
    """Steps that log one loss, which a subclass computes."""

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


# ---- transformers


class Attention(nn.Module):
    """Causal or full attention with q, k and v in one weight."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        # Without a bias: keys' bias has a gradient of exactly zero, of which Adam makes steps out of rounding noise.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=-1)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, heads: int = 4, causal: bool = True) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(Tokens, L.LightningModule):
    """nanoGPT's shape: fused qkv, learned positions by arange, head tied to the embedding, two parameter groups."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.ln_f, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.wte.weight, std=0.1)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        right = logits.argmax(-1) == targets
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("right", right.float().sum(), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("tokens", tokens.numel(), reduce_fx="sum", on_epoch=True)
        self.log("highest", logits.detach().max(), reduce_fx="max")
        self.log("lowest", logits.detach().min(), reduce_fx=torch.min, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        logits = self(tokens)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()), prog_bar=True)
        self.log("val_right", (logits.argmax(-1) == targets).sum(), reduce_fx="sum")
        self.log("val_max", logits.max(), reduce_fx="max")

    def configure_optimizers(self) -> Any:
        decay = [p for p in self.parameters() if p.dim() > 1]
        rest = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-6)
        schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RecomputedGPT(GPT):
    """The same with the user's own recomputation of every block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.ln_f(x))


class ViT(Images, L.LightningModule):
    """Patches by convolution, parameters between modules, an ``nn.Sequential`` of blocks, metric objects inside."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(0.1 * torch.randn(1, 5, WIDTH))
        self.blocks = nn.Sequential(*(Block(causal=False) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(5, average="micro")
        self.val_metrics = torchmetrics.MetricCollection(
            {
                "val_accuracy": torchmetrics.classification.MulticlassAccuracy(5, average="macro"),
                "val_auroc": torchmetrics.classification.MulticlassAUROC(5),
                "val_confusion": torchmetrics.classification.MulticlassCohenKappa(5),
            }
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x))[:, 0])

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"loss": loss, "size": logits.square().mean()}, on_step=False, on_epoch=True)
        self.log("step_loss", loss)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        self.val_metrics.update(self(images), labels)
        self.log_dict(self.val_metrics, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-6)
        schedule = OneCycleLR(optimizer, max_lr=5e-3, total_steps=20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Llama(Tokens, OneLoss):
    """A Hugging Face model from its config."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
        self.model = LlamaForCausalLM(config)

    def loss(self, batch: Any) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-6)


class Seq2Seq(OneLoss):
    """Encoder and decoder, batches as dicts, a loss that ignores padding."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, 4, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=40, dropout=0.0, batch_first=True
        )
        self.out = nn.Linear(WIDTH, VOCABULARY)

    @staticmethod
    def dataset(rows: int, seed: int) -> Dataset[Any]:
        source = integers(VOCABULARY, rows, LENGTH, seed=seed)
        target = source.flip(1)
        return [{"source": s, "target": t} for s, t in zip(source, target, strict=True)]  # type: ignore[return-value]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        return self.out(self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self(batch["source"], batch["target"][:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), batch["target"][:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


# ---- no block stack


class ActivatedNorm(nn.BatchNorm2d):
    """A batch norm with its activation, as vision libraries have them."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class ConvNet(Images, OneLoss):
    """Plain attributes, no stack; batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 7, 3, padding=1), self.norm(7)
        self.conv2, self.norm2 = nn.Conv2d(7, 14, 3, padding=1, stride=2), self.norm(14)
        self.conv3, self.norm3 = nn.Conv2d(14, 21, 3, padding=1), self.norm(21, activated=True)
        self.fc1, self.fc2 = nn.Linear(21, 16), nn.Linear(16, 5)

    def norm(self, channels: int, activated: bool = False) -> nn.Module:
        return ActivatedNorm(channels) if activated else nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(images)))
        x = F.relu(self.norm2(self.conv2(x)))
        x = self.norm3(self.conv3(x))
        return self.fc2(F.relu(self.fc1(x.mean((2, 3)))))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        return [optimizer], [MultiStepLR(optimizer, [1], gamma=0.3)]


class GroupNormNet(ConvNet):
    """The same with a norm per sample."""

    def norm(self, channels: int, activated: bool = False) -> nn.Module:
        norm = nn.GroupNorm(7, channels)
        return nn.Sequential(norm, nn.ReLU()) if activated else norm


class Recurrent(Vectors, OneLoss):
    """An LSTM, which keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 10, num_layers=2, batch_first=True), nn.Linear(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x.unflatten(1, (-1, 4)))[0][:, -1]).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3, eps=1e-4)


# ---- unusual training steps


class GAN(Vectors, L.LightningModule):
    """Manual optimization as in Lightning's documentation: toggled optimizers, gradients cleared after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.build()

    def build(self) -> None:
        self.generator = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, WIDTH - 8))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH - 8, 33), nn.LeakyReLU(0.2), nn.Linear(33, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch[0][:, :8], batch[0][:, 8:]  # noise comes with the batch
        generator, discriminator = self.optimizers()
        self.toggle_optimizer(generator)
        fake = self.generator(noise)
        loss = F.softplus(-self.discriminator(fake)).mean()
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(discriminator)
        real_loss = F.softplus(-self.discriminator(real)).mean()
        fake_loss = F.softplus(self.discriminator(self.generator(noise).detach())).mean()
        loss = (real_loss + fake_loss) / 2
        self.log("d_loss", loss, on_step=True, on_epoch=True)
        self.manual_backward(loss)
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.discriminator(self.generator(batch[0][:, :8])).mean())

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.5)
        second = torch.optim.Adam(self.discriminator.parameters(), lr=1e-3, eps=1e-5)
        return [first, second], [LambdaLR(first, lambda s: 0.9**s), LambdaLR(second, lambda s: 0.8**s)]


class BareGAN(GAN):
    """The same with every parameter on the LightningModule itself: toggling must reach those too."""

    def build(self) -> None:
        self.g1, self.g2 = nn.Parameter(0.3 * torch.randn(33, 8)), nn.Parameter(0.3 * torch.randn(WIDTH - 8, 33))
        self.d1, self.d2 = nn.Parameter(0.3 * torch.randn(33, WIDTH - 8)), nn.Parameter(0.3 * torch.randn(1, 33))
        self.generator, self.discriminator = self.generate, self.discriminate

    def generate(self, noise: Tensor) -> Tensor:
        return F.relu(noise @ self.g1.T) @ self.g2.T

    def discriminate(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x @ self.d1.T, 0.2) @ self.d2.T

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD([self.g1, self.g2], lr=0.1, momentum=0.5)
        second = torch.optim.Adam([self.d1, self.d2], lr=1e-3, eps=1e-5)
        return [first, second], [LambdaLR(first, lambda s: 0.9**s), LambdaLR(second, lambda s: 0.8**s)]


class TwoBackwards(Vectors, L.LightningModule):
    """Manual optimization with accumulation: two backward passes add up, and the optimizer steps every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, 1))
        self.other = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        first = F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])
        self.manual_backward(first)
        second = (self.net(batch[0]) - self.other(batch[0])).square().mean()
        self.manual_backward(second)
        self.log_dict({"first": first, "second": second})
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-5)


class Autoencoder(Vectors, L.LightningModule):
    """Never calls itself: submodules, methods and a single weight are used straight from ``training_step``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 15), nn.ReLU(), nn.Linear(15, 5))
        self.decoder = nn.Sequential(nn.Linear(5, 15), nn.ReLU(), nn.Linear(15, WIDTH))
        self.probe = nn.Linear(5, 1)

    def code(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.code(batch[0])
        rebuilt = self.decoder(z)
        guess = F.linear(z, self.probe.weight).squeeze(-1) + self.probe.bias
        loss = F.mse_loss(rebuilt, batch[0]) + F.mse_loss(guess, batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.decoder(self.code(batch[0])), batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Regression(Vectors, OneLoss):
    """What the rest have in common: a network, a squared error, an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = self.build()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 18), nn.GELU(), nn.Linear(18, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.1, eps=1e-5)


class ResidualBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 30), nn.Linear(30, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tower(blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*(ResidualBlock() for _ in range(blocks)), nn.Linear(WIDTH, 1))


class WeightPenalty(Regression):
    """A penalty over all parameters, written into the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters())
        self.log("penalty", penalty)
        return super().loss(batch) + 1e-2 * penalty


class LateWeightPenalty(WeightPenalty):
    """The penalty of one block only, taken after the forward pass has used it."""

    def loss(self, batch: Any) -> Tensor:
        error = F.mse_loss(self(batch[0]), batch[1])
        return error + 1e-2 * sum(p.square().sum() for p in self.blocks[1].parameters())


class UnusedParameters(Regression):
    """A layer that no step uses; in one process it keeps its values, weight decay or not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualBlock() for _ in range(2)])
        self.blocks[0].spare = nn.Linear(WIDTH, 3)
        self.spare = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


class Chooser(Regression):
    """A scorer whose values only choose: no gradient reaches it, and in one process no weight decay does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualBlock() for _ in range(2)])
        self.scorer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.zeros_like(x).scatter(-1, self.scorer(x).topk(4, dim=-1).indices, 0.5)
        for block in self.blocks:
            x = block(x + chosen)
        return super().forward(x)


class OneBlockManyTimes(Regression):
    """The same block object in every place of the stack."""

    def build(self) -> nn.Module:
        return nn.Sequential(*[ResidualBlock()] * 3, nn.Linear(WIDTH, 1))


class SharedWeights(Regression):
    """Different blocks that hold the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([ResidualBlock() for _ in range(3)])
        for block in self.blocks[1:]:
            for name in ("up", "down"):
                getattr(block, name).weight = getattr(self.blocks[0], name).weight
                getattr(block, name).bias = getattr(self.blocks[0], name).bias
            block.norm = self.blocks[0].norm

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


class SharedModule(Regression):
    """One encoding, a child of the root and of every block; a mixing layer that two of the blocks share."""

    class Block(ResidualBlock):
        def __init__(self, encoding: nn.Module, mixing: nn.Module) -> None:
            super().__init__()
            self.encoding, self.mixing = encoding, mixing

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.mixing(x + self.encoding(x)).tanh())

    def __init__(self) -> None:
        super().__init__()
        self.encoding, mixing = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        own = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.Block(self.encoding, each) for each in (mixing, mixing, own)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)


class BareParameters(Vectors, OneLoss):
    """Parameters registered on the LightningModule itself and no modules at all."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(0.2 * torch.randn(WIDTH, 11))
        self.w2 = nn.Parameter(0.2 * torch.randn(11))
        self.biases = nn.ParameterList([torch.zeros(11), torch.zeros(1)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w1 + self.biases[0]) @ self.w2 + self.biases[1]

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=3e-3, eps=1e-5)


class ScalarParameters(Images, L.LightningModule):
    """A logit scale, as in CLIP, and a gate inside every block: parameters without a dim."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.lin(x)

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3 * 8 * 8, WIDTH)
        self.blocks = nn.ModuleList([self.Gated() for _ in range(3)])
        self.prototypes = nn.Parameter(torch.randn(5, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images: Tensor) -> Tensor:
        x = self.inp(images.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.logit_scale.exp() * F.normalize(x, dim=-1) @ F.normalize(self.prototypes, dim=-1).T

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log_dict({"loss": loss, "scale": self.logit_scale})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        scalars = [p for p in self.parameters() if p.dim() == 0]
        rest = [p for p in self.parameters() if p.dim() > 0]
        return torch.optim.AdamW([{"params": rest}, {"params": scalars, "lr": 1e-2}], lr=2e-3, eps=1e-4)


class LoRALinear(nn.Module):
    """A frozen bf16 weight, computed with in the input's dtype, and a trained fp32 adapter beside it."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        base = 0.2 * torch.randn(width, width)
        self.weight = nn.Parameter(base.to(torch.bfloat16), requires_grad=False)
        self.down, self.up = nn.Parameter(0.2 * torch.randn(rank, width)), nn.Parameter(torch.zeros(width, rank))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype)) + F.linear(F.linear(x, self.down), self.up)


class LoRA(Regression):
    """Adapters in fp32 on a frozen base in bf16."""

    def build(self) -> nn.Module:
        blocks = [nn.Sequential(LoRALinear(WIDTH), nn.Tanh()) for _ in range(3)]
        head = nn.Linear(WIDTH, 1)
        head.weight.requires_grad_(False)
        return nn.Sequential(nn.Sequential(*blocks), head)


class RoutedExperts(Regression):
    """Every row goes to one expert, so that on a given rank some experts may get none and are not called."""

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
            self.experts = nn.ModuleList([ResidualBlock() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            weight, choice = self.router(y).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (choice == index).nonzero().squeeze(-1)
                if len(rows) > 0:
                    out = out.index_add(0, rows, weight[rows, None] * expert(y[rows]))
            return x + out

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Mixture() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return super().forward(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


MODULES: dict[str, Callable[[], L.LightningModule]] = {
    "gpt": GPT,
    "recomputed_gpt": RecomputedGPT,
    "vit": ViT,
    "llama": Llama,
    "seq2seq": Seq2Seq,
    "convnet": ConvNet,
    "groupnorm": GroupNormNet,
    "recurrent": Recurrent,
    "gan": GAN,
    "bare_gan": BareGAN,
    "two_backwards": TwoBackwards,
    "autoencoder": Autoencoder,
    "weight_penalty": WeightPenalty,
    "late_weight_penalty": LateWeightPenalty,
    "unused_parameters": UnusedParameters,
    "chooser": Chooser,
    "one_block_many_times": OneBlockManyTimes,
    "shared_weights": SharedWeights,
    "shared_module": SharedModule,
    "bare_parameters": BareParameters,
    "scalar_parameters": ScalarParameters,
    "lora": LoRA,
    "routed_experts": RoutedExperts,
}
