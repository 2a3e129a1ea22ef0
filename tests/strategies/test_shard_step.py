"""Updates on plain shards: the same bits as on DTensors, and nobody but the optimizer sees the shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_pardist.run.shard_step import ShardStep
from lightning_pardist.torch_dtensor_api import local_tensor

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    "sgd plain": (torch.optim.SGD, {}),
}


class OwnAdamW(torch.optim.AdamW):
    """A subclass may do anything, so it must meet DTensors."""


def build(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], *, sharded: bool = True
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))  # 5 rows and 1 row on 2 ranks
    if sharded:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    groups = [[module[0].weight, module[2].bias], [module[0].bias, module[2].weight]]
    return module, cls([{"params": ps, "lr": 0.01 * (i + 1)} for i, ps in enumerate(groups)], **options)


def train(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], *, on_shards: bool, sharded: bool = True
) -> dict[str, Any]:
    """Parameters and optimizer state after four steps, by position; one step has a parameter without a gradient."""
    module, optimizer = build(cls, options, sharded=sharded)
    held = [list(group["params"]) for group in optimizer.param_groups]
    for step in range(4):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        F.mse_loss(module(x).squeeze(-1), x.sum(-1)).backward()
        if step == 2:
            module[2].bias.grad = None
        if on_shards:
            with ShardStep(optimizer) as shards:
                optimizer.step(lambda: shards.show())  # type: ignore[arg-type]  # no loss
        else:
            optimizer.step()
        optimizer.zero_grad()
        now = [group["params"] for group in optimizer.param_groups]
        assert all(a is b for before, after in zip(held, now, strict=True) for a, b in zip(before, after, strict=True))
        assert set(optimizer.state) <= set(module.parameters())
    found: dict[str, Any] = {}
    for index, parameter in enumerate(module.parameters()):
        found[f"{index}"] = parameter.detach()
        found.update({f"{index}.{key}": value for key, value in optimizer.state[parameter].items()})
    return found


def compare(name: str) -> list[str]:
    """What differs between both ways, in value, kind or layout."""
    ours, torchs = (train(*OPTIMIZERS[name], on_shards=on_shards) for on_shards in (True, False))
    assert ours.keys() == torchs.keys()
    return [key for key in ours if not _same(ours[key], torchs[key])]


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, DTensor) and (a.placements, a.shape, a.stride()) != (b.placements, b.shape, b.stride()):
        return False
    return torch.equal(local_tensor(a), local_tensor(b)) if isinstance(a, Tensor) else bool(a == b)


def compare_all() -> dict[str, list[str]]:
    return {name: compare(name) for name in OPTIMIZERS}


def test_elementwise_optimizers_leave_the_same_bits_and_kinds(run_distributed):
    for differences in run_distributed(compare_all, world_size=2):
        assert differences == {name: [] for name in OPTIMIZERS}


def rprop() -> bool:
    """torch's own Rprop cannot step on DTensors, so the reference is the whole module."""
    ours = train(torch.optim.Rprop, {}, on_shards=True)
    whole = train(torch.optim.Rprop, {}, on_shards=False, sharded=False)
    return all(torch.equal(ours[key].full_tensor(), whole[key]) for key in ours if "step" not in key.split("."))


def test_rprop_steps_although_it_cannot_on_dtensors(run_distributed):
    assert all(run_distributed(rprop, world_size=2))


def kinds_during_the_step(cls: type[torch.optim.Optimizer], hook: bool) -> list[bool]:
    """Whether each parameter is a DTensor once the groups are shown; and again after an error in the step."""
    module, optimizer = build(cls, {})
    if hook:
        optimizer.register_step_post_hook(lambda *args: None)
    seen = []

    def closure() -> Any:
        shards.show()
        seen.extend(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        raise ArithmeticError

    with pytest.raises(ArithmeticError), ShardStep(optimizer) as shards:
        optimizer.step(closure)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == set(map(id, module.parameters()))
    return seen


@pytest.mark.parametrize(
    ("cls", "hook", "whole"),
    [(torch.optim.AdamW, False, False), (torch.optim.AdamW, True, True), (OwnAdamW, False, True)],
    ids=["shards", "a hook after the step", "a subclass"],
)
def test_only_known_optimizers_without_hooks_see_shards(run_distributed, cls, hook, whole):
    for seen in run_distributed(kinds_during_the_step, cls, hook, world_size=2):
        assert seen == [whole] * 4
