"""Weights that exist and are equal on all ranks before they are sharded.

fully_shard does not broadcast: it cuts what each rank happens to hold. Ranks that drew different random numbers would
then train a patchwork of models, and hybrid replicas would stay different for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pardist.base.log import get_logger
from lightning_pardist.mesh import Meshes

log = get_logger(__name__)


class Weights:
    """Brings tensors of one module onto the device, initialised and equal on all ranks; each tensor once.

    With the meta device as target every tensor stays as it is: shapes and hooks without memory.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, meshes: Meshes | None, *, absent: Collection[str] = ()
    ) -> None:
        """Starts with nothing ready but what another stage of a pipeline holds.

        Args:
            module: the root.
            device: where tensors are to be.
            meshes: None on one rank.
            absent: first names of parameters that this rank does not hold.
        """
        self._root = module
        self._names = {id(child): name for name, child in module.named_modules()}
        self._device = device
        self._meshes = meshes
        self._ready = {id(parameter) for name, parameter in module.named_parameters() if name in absent}
        self._seed = self._common_seed()

    def make_ready(self, top: nn.Module) -> None:
        """Materializes, initialises, moves and equalizes all tensors below ``top`` that are not ready yet.

        Shards are left alone: they were made from ready tensors.
        """
        for module in top.modules():
            self.make_ready_own(module)

    def make_ready_own(self, module: nn.Module) -> None:
        """Does the same for the tensors registered on this very module."""
        if self._device.type == "meta":
            return
        self._materialize(module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) in self._ready or hasattr(tensor, "placements"):
                continue
            tensor.data = tensor.data.to(self._device)
            self._broadcast(tensor.data)
            self._ready.add(id(tensor))

    def _materialize(self, module: nn.Module) -> None:
        """Gives meta tensors of one module memory and the module's own initial values.

        The random numbers depend on the run's seed and the module's name only, so every layout starts from the same
        weights, whatever order the units are made in.
        """
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        own = [tensor for tensor in own if tensor.is_meta]
        if not own:
            return
        for tensor in own:
            empty = torch.empty_like(tensor, device=self._device)
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            # Keeps the object, and with it every tie and every set of parameters that names it.
            torch.utils.swap_tensors(tensor, empty)
        name = self._names.get(id(module), "")
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=7).digest()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "big"))
            known = self._initialize(module, name)
        if not known:
            log.warning(
                "%s (%s) was built on the meta device and has no reset_parameters(), nor has a module around it "
                "_init_weights(): its tensors hold arbitrary numbers until a checkpoint is loaded",
                name or "the LightningModule",
                type(module).__name__,
            )

    def _initialize(self, module: nn.Module, name: str) -> bool:
        """Calls ``reset_parameters`` and the nearest ``_init_weights(module)``: torch's way, and transformers' way."""
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        parts = name.split(".") if name else []
        for depth in range(len(parts), -1, -1):
            around = self._root.get_submodule(".".join(parts[:depth]))
            init_weights = getattr(around, "_init_weights", None)
            if callable(init_weights):
                init_weights(module)
                return True
        return callable(reset)

    def _broadcast(self, tensor: Tensor) -> None:
        if self._meshes is None or tensor.numel() == 0:
            return
        # As bytes, so that every dtype passes, those that a backend cannot add included.
        whole = tensor.detach().contiguous()
        if self._meshes.pipeline_control is None:
            dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        else:  # other stages hold other tensors; those that several hold were made by name, or sent when it was cut
            group = self._meshes.data_parallel_group
            dist.broadcast(whole.view(-1).view(torch.uint8), group=group, group_src=0)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)

    def _common_seed(self) -> int:
        box: list[int] = [torch.initial_seed()]
        if self._meshes is not None:
            dist.broadcast_object_list(box, src=0, group=self._meshes.control)
        return box[0]
