"""Describing leaves no trace: module, batch, random state, memory; and takes modules that cannot be copied."""

from __future__ import annotations

import gc
import random
import resource
import threading
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset

from lightning_pardist.describe import profile_model
from tests.describe.models import GPT, Block, Names, StepModule, conv_net, gpt_batch


def test_module_batch_and_random_state_stay_as_they_are() -> None:
    class Busy(StepModule):
        """Changes everything a step can change."""

        def __init__(self) -> None:
            super().__init__(conv_net())
            self.losses: list[torch.Tensor] = []
            self.steps = 0

        def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
            x = batch.pop("x").mul_(2) + torch.randn(2, 3, 16, 16) * random.random() * np.random.rand()
            loss = self.net(x).square().mean()
            self.losses.append(loss)
            self.steps += 1
            return loss

    module, batch = Busy(), {"x": torch.randn(2, 3, 16, 16)}
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = batch["x"].clone()
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    profile = profile_model(module, batch)
    assert profile.fallback_reason is None
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.equal(batch["x"], x)
    assert (module.losses, module.steps) == ([], 0)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert "log" not in vars(module)


def test_training_goes_on_as_if_nothing_happened() -> None:
    class Describe(L.Callback):
        profile = None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.profile = profile_model(pl_module, batch)

    def train(callbacks: list[L.Callback]) -> tuple[Any, Any]:
        L.seed_everything(0, verbose=False)
        module = GPT()
        data = DataLoader(TensorDataset(*gpt_batch(rows=8)), batch_size=2, shuffle=True)
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        trainer.fit(module, data)
        return module.state_dict(), dict(trainer.callback_metrics)

    describe = Describe()
    weights, metrics = train([])
    weights_described, metrics_described = train([describe])
    assert describe.profile is not None
    assert describe.profile.fallback_reason is None
    assert metrics == metrics_described
    for name, tensor in weights.items():
        assert torch.equal(tensor, weights_described[name]), name


def test_a_meta_module_gives_the_same_profile() -> None:
    torch.manual_seed(0)
    real = profile_model(GPT(), gpt_batch())
    with torch.device("meta"):
        meta_module = GPT()
    meta = profile_model(meta_module, gpt_batch())
    assert meta.fallback_reason is None
    assert (meta.stacks, meta.parameters, meta.suffix) == (real.stacks, real.parameters, real.suffix)
    assert all(parameter.is_meta for parameter in meta_module.parameters())


def test_no_memory_for_weights_or_activations() -> None:
    with torch.device("meta"):
        net = nn.Sequential(*(Block(4096, 32) for _ in range(8)))
    profile_model(Names(h=nn.ModuleList([Block(32)] * 2)), torch.randn(1, 4, 32), entry="forward")  # imports
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = profile_model(net, torch.randn(1, 512, 4096), entry="forward")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert profile.fallback_reason is None
    assert sum(parameter.nbytes for parameter in profile.parameters) > 6e9
    assert profile.saved_activation_bytes > 5e8
    assert grown < 1e8


class Holder(StepModule):
    """Holds what cannot, or must not, be copied."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.lock, self.generator, self.rng = threading.Lock(), torch.Generator(), np.random.default_rng(0)
        self.loader = DataLoader(TensorDataset(torch.randn(8, 4)))
        self.file = open(__file__)  # noqa: SIM115
        self.thread = threading.current_thread()
        self.callback = self.helper
        self.cached = [torch.ones(4), {"scale": torch.full((4,), 2.0)}]
        self.norm_net = parametrizations.weight_norm(nn.Linear(4, 4))
        self.itself = [self]
        self.net.register_forward_hook(self.after)

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cached[0] + self.cached[1]["scale"]

    def after(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        assert self.itself[0] is self
        return self.callback(output)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with self.lock:
            noise = torch.rand(4, generator=self.generator) * self.rng.random()
        return self.norm_net(self.net(batch + noise)).sum()


def test_modules_that_hold_what_cannot_be_copied() -> None:
    module = Holder()
    state, numbers = module.generator.get_state(), module.rng.bit_generator.state
    profile = profile_model(module, torch.randn(2, 4))
    assert profile.fallback_reason is None
    assert profile.unused_parameters == ()
    assert torch.equal(module.generator.get_state(), state)
    assert module.rng.bit_generator.state == numbers
    assert profile.flops_forward == 2 * (2 * 2 * 4 * 4)
    module.file.close()


def test_a_patched_forward_runs_on_the_copy() -> None:
    module = StepModule(nn.Linear(4, 4))
    net, old, adapter, calls = module.net, module.net.forward, nn.Linear(4, 4), []
    net.adapter = adapter

    def forward(x: torch.Tensor) -> torch.Tensor:
        net.count = getattr(net, "count", 0) + 1
        return old(x) + adapter(x)

    net.forward = forward
    net.register_forward_hook(lambda child, args, output: calls.append(1))
    profile = profile_model(module, torch.randn(2, 4))
    assert profile.unused_parameters == ()
    assert profile.flops_forward == 2 * (2 * 2 * 4 * 4)
    assert not hasattr(net, "count")


def test_tensors_that_share_storage_are_one() -> None:
    module = StepModule(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    module.net[1].weight = nn.Parameter(module.net[0].weight.detach().view(4, 4))
    profile = profile_model(module, torch.randn(2, 4))
    assert profile.fallback_reason is None
    assert profile.saved_activation_bytes == 2 * 2 * 4 * 4 + 2 * 4 * 4  # two inputs and the output under the square


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="without a method training_step"):
        profile_model(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(ValueError, match="lazy module must be initialised"):
        profile_model(nn.LazyLinear(2), torch.randn(2, 2), entry="forward")
    with pytest.raises(ValueError, match="device that exists"):
        profile_model(nn.Linear(2, 2), torch.randn(2, 2), entry="forward", device=torch.device("cuda:99"))


@pytest.mark.parametrize("batch", [(torch.ones(2, 4),), {"input": torch.ones(2, 4)}, torch.ones(2, 4)])
def test_forward_takes_the_batch_as_an_example_input(batch: Any) -> None:
    assert profile_model(nn.Linear(4, 3), batch, entry="forward").flops_forward == 2 * 2 * 4 * 3
