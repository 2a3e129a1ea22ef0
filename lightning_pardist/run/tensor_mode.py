"""Lets the module's own code run on this rank's share of its matrices.

A function mode sees every call of a torch function during a step. A linear layer whose weight opens a region gets its
input ready for use by all ranks; one that closes a region sums its output over the ranks; everything between computes
on local tensors as it is, and calls that speak of whole sizes are answered with local ones. Weights are known by
identity, so ``F.linear``, ``addmm``, ``einsum`` and ``x @ w.t()`` are one case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_pardist import torch_dist_api
from lightning_pardist.base.function_names import CONTRACTIONS, function_name
from lightning_pardist.base.nested import leaves, map_leaves
from lightning_pardist.parallel_model import ParallelModel
from lightning_pardist.run.attention import attend_with_own_heads, attention_arguments
from lightning_pardist.run.call_scopes import CallScopes
from lightning_pardist.run.sequence import SequenceShards, SequenceState
from lightning_pardist.run.tensor_ops import Alone, Group, rank_in, sum_over_ranks
from lightning_pardist.run.vocabulary import Vocabulary, VocabularyShards, look_up
from lightning_pardist.run.whole_sizes import CONVOLUTIONS, WholeSizes, numbers_of_rank, own_groups
from lightning_pardist.specs.tensor_plan import SequenceStack, TensorLayout, TensorPlan
from lightning_pardist.specs.tensor_roles import TensorRole

_T = TypeVar("_T")

_BIASED = frozenset(["addmm", "baddbmm"])
_INPUTS_KEPT = 4
"""Inputs of open regions whose copy is shared by all layers that open one (queries, keys and values; gate and up)."""


@dataclass(frozen=True)
class Use:
    """A sharded weight, or what was made of it."""

    role: TensorRole
    layout: TensorLayout


class TensorMode(TorchFunctionMode):
    """Active in every step of a module on the tensor axis."""

    def __init__(self, model: ParallelModel, alone: Alone | None = None) -> None:
        """Installs itself on the module.

        Args:
            model: a module that is cut along the tensor axis.
            alone: exchange nothing, to try how the code runs on a rank's sizes; needs no meshes then.
        """
        super().__init__()
        plan = model.plan.tensor
        assert plan is not None
        self._plan: TensorPlan = plan
        self._model = model
        self._group: Group = alone or _live_group(model)
        self._size = plan.size
        self._handles: list[RemovableHandle] = []
        self._rank = rank_in(self._group)
        self._whole_sizes = WholeSizes(plan.shares, self._rank, self._opened)
        self._weights: dict[int, Use] = {}
        self._made: list[Tensor] = []
        """Keeps what was made of weights in this step, for it is known by identity."""
        self._inputs: list[tuple[Tensor, Tensor]] = []
        self._names: dict[Any, str] = {}
        self._scopes = CallScopes(self, self._forget)
        self._sequence = SequenceShards(self._rank, self._size, self._group)
        self._know_weights()
        self._handles += self._scopes.install(model, plan)
        self._install_sequence()

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def _know_weights(self) -> None:
        layouts = {layout.parameter: layout for layout in self._plan.layouts}
        uses = {name: Use(role, layouts[name]) for name, role in self._plan.uses}
        stored = {id(p): uses[n] for n, p in self._model.module.named_parameters(remove_duplicate=False) if n in uses}
        for held in self._model.shards:
            if id(held.stored) in stored:
                self._weights[id(held.local)] = stored[id(held.stored)]
        self._unknown = {}
        for record in torch_dist_api.fsdp_parameters(self._model.module) if self._model.kind == "shard" else ():
            if id(record.sharded_param) in stored:
                self._unknown[id(record)] = (record, stored[id(record.sharded_param)])
        if self._unknown:
            for module in self._model.module.modules():
                if isinstance(module, FSDPModule):
                    self._handles.append(module.register_forward_pre_hook(lambda *_: self._know_gathered()))

    def _know_gathered(self) -> None:
        """Notes parameters that fully_shard has gathered for the first time; the objects stay the same from then on."""
        for key, (record, use) in list(self._unknown.items()):
            whole = torch_dist_api.whole_parameter(record)
            if whole is not None:
                self._weights[id(whole)] = use
                del self._unknown[key]

    def _install_sequence(self) -> None:
        for stack in self._plan.sequence_stacks:
            for part, is_running in self._parts(stack):
                self._handles += self._sequence.watch(self._model.module, part, is_running)

    def _parts(self, stack: SequenceStack) -> Iterator[tuple[SequenceStack, Callable[[], bool]]]:
        """Yields what this rank runs of a stack: whole hidden states cross from one pipeline stage to the next."""
        cut = self._model.pipeline
        if cut is None:
            yield stack, lambda: True
            return
        for stage in cut.plan.stages_of(cut.rank):
            blocks = tuple(name for name in stack.blocks if name in stage.blocks)
            if blocks:
                inside = tuple(f"{block}." for block in blocks)
                around = tuple(name for name in stack.around_regions if name.startswith(inside))
                yield replace(stack, blocks=blocks, around_regions=around), partial(cut.runs, stage.first)

    @contextmanager
    def _as_in(self, block: str, sequence: SequenceState) -> Iterator[None]:
        with self._scopes.inside(block), self._sequence.as_it_was(sequence):
            yield

    def again(self, block: str) -> Callable[[], AbstractContextManager[object]]:
        """Returns what makes a context to compute a block in once more, as now; the block's hooks do not run there."""
        return partial(self._as_in, block, self._sequence.state())

    def remove(self) -> None:
        """Takes its hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def run(self, fn: Callable[[], _T]) -> _T:
        """Returns ``fn()``, run on shares.

        Logits in it come back whole: code after a step may look at them on one rank alone.
        """
        with self.step():
            out = fn()
        if any(isinstance(leaf, VocabularyShards) for leaf in leaves(out)):
            whole = map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, VocabularyShards) else leaf, out)
            return cast(_T, whole)
        return out

    @contextmanager
    def step(self) -> Iterator[None]:
        """Is active in this context."""
        self._know_gathered()
        try:
            with self._scopes.step(), self:
                yield
        finally:
            self._sequence.reset()
            self._forget()

    def _forget(self) -> None:
        """Lets go of what is known of a step's tensors."""
        self._inputs.clear()
        for tensor in self._made:
            self._weights.pop(id(tensor), None)
        self._made.clear()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__iter__ and not isinstance(args[0], VocabularyShards):
            return iter(self.__torch_function__(torch.unbind, types, args))
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = function_name(func)
        call = self._scopes.next_call(name)
        if name in CONTRACTIONS:
            found = self._weight_of(args, kwargs)
            if found is not None:
                return self._linear(name, func, args, dict(kwargs), found)
        elif name == "embedding":
            table = args[1] if len(args) > 1 else kwargs["weight"]
            use = self._weights.get(id(table))
            if use is not None and use.role == "vocab":
                return self._look_up(func, args, kwargs, use)
        elif name == "multi_head_attention_forward":
            return self._attention(func, args, kwargs)
        elif name in CONVOLUTIONS:
            args, kwargs = own_groups(args, kwargs)
        elif name in ("view", "reshape") and call is None:
            return self._followed(args[0], self._sequence.view(func, args, kwargs))
        elif call is None and name.startswith("dropout") and args and self._sequence.is_shard(args[0]):
            with numbers_of_rank(self._rank, args[0].device):
                return func(*args, **kwargs)
        out = func(*args, **kwargs) if call is None else self._whole_sizes.run(call, func, tuple(args), kwargs)
        return self._followed(args[0], out) if args else out

    def _weight_of(self, args: Any, kwargs: Any) -> Use | None:
        for item in (*args, *kwargs.values()):
            for tensor in item if isinstance(item, (tuple, list)) else (item,):
                use = self._weights.get(id(tensor))
                if use is not None:
                    return use
        return None

    def _followed(self, source: Any, out: Any) -> Any:
        """Returns what was made of a tensor; a sharded weight's transpose, or a part of it, is noted as that weight."""
        use = self._weights.get(id(source))
        if use is None or not isinstance(source, Tensor):
            return out
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.dim() >= 2 and id(tensor) not in self._weights:
                self._weights[id(tensor)] = use
                self._made.append(tensor)
        return out

    # ---- linear layers -----------------------------------------------------------------------------------------------

    def _linear(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], use: Use) -> Tensor:
        if use.role == "row":
            return self._close(name, func, args, kwargs)
        biases = {"linear": (2,), "addmm": (0,), "baddbmm": (0,)}.get(name, ())
        args = tuple(item if i in biases else self._opened(item) for i, item in enumerate(args))
        kwargs = {key: item if key == "bias" else self._opened(item) for key, item in kwargs.items()}
        args, kwargs = self._with_local_bias(name, args, kwargs, use)
        out: Tensor = func(*args, **kwargs)
        if use.role != "vocab":
            return out
        logits = VocabularyShards.wrap(out, self._vocabulary(use))
        return logits if self._plan.loss_parallel else logits.whole()

    def _opened(self, item: Any) -> Any:
        """Returns an activation ready for use by all ranks; weights and everything else as they are."""
        if isinstance(item, (tuple, list)):
            return type(item)([self._opened(part) for part in item])
        is_activation = isinstance(item, Tensor) and item.requires_grad and not isinstance(item, nn.Parameter)
        is_shard = self._sequence.is_shard(item) and not self._sequence.is_inside_region
        if is_shard and not (isinstance(item, Tensor) and item.requires_grad):
            return self._sequence.opened(item)
        if not is_activation or id(item) in self._weights or (not torch.is_grad_enabled() and not is_shard):
            return item
        if self._sequence.is_inside_region and self._plan.sequence_stacks:
            return item  # opened at the door
        for given, copied in self._inputs:
            if given is item:
                return copied
        copied = self._sequence.opened(item)
        self._inputs = [*self._inputs[1 - _INPUTS_KEPT :], (item, copied)]
        return copied

    def _with_local_bias(self, name: str, args: Any, kwargs: dict[str, Any], use: Use) -> tuple[Any, dict[str, Any]]:
        """Cuts a bias that is whole on every rank where the plan shards the weight alone."""
        lengths = use.layout.length, use.layout.local_length(self._rank)

        def cut(bias: Any) -> Any:
            if (
                not isinstance(bias, Tensor)
                or bias.dim() != 1
                or bias.shape[0] != lengths[0]
                or lengths[0] == lengths[1]
            ):
                return bias
            return torch.cat([bias[start : start + length] for start, length in use.layout.stretches[self._rank]])

        if name == "linear" and len(args) > 2:
            return (*args[:2], cut(args[2])), kwargs
        if name in _BIASED:
            return (cut(args[0]), *args[1:]), kwargs
        return args, {key: cut(item) if key == "bias" else item for key, item in kwargs.items()}

    def _close(self, name: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
        """Returns the output summed over the ranks; the bias is added once, after the sum."""
        bias = None
        if name == "linear":
            bias = args[2] if len(args) > 2 else kwargs.pop("bias", None)
            out = func(*args[:2], **kwargs)
        elif name in _BIASED:
            beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
            bias = args[0] if beta == 1 else beta * args[0]
            out = torch.matmul(args[1], args[2])
            out = out if alpha == 1 else alpha * out
        else:
            out = func(*args, **kwargs)
        out = self.closed(out)
        return out if bias is None else self._sequence.follow(out, out + bias)

    # ---- vocabulary --------------------------------------------------------------------------------------------------

    def _vocabulary(self, use: Use) -> Vocabulary:
        lengths = tuple(use.layout.local_length(rank) for rank in range(self._size))
        return Vocabulary(lengths, self._rank, self._group)

    def _look_up(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], use: Use) -> Tensor:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
        given = dict(zip(names, args)) | kwargs
        return look_up(given.pop("input"), given.pop("weight"), self._vocabulary(use), func, **given)

    # ---- attention as one function -----------------------------------------------------------------------------------

    def _attention(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        given = attention_arguments(args, kwargs)
        weight = given["in_proj_weight"] if not given["use_separate_proj_weight"] else given["q_proj_weight"]
        use = self._weights.get(id(weight))
        if use is None:
            return func(*args, **kwargs)
        return attend_with_own_heads(given, use.layout, self._rank, self)

    def opened(self, tensor: Tensor) -> Tensor:
        """Returns an activation that a region is opened with."""
        result: Tensor = self._opened(tensor)
        return result

    def closed(self, tensor: Tensor, positions: int | None = None) -> Tensor:
        """Returns the sum over the ranks of what a region ends with; see [Note: sequence shards].

        Args:
            tensor: this rank's part of the sum.
            positions: the dim of the positions, if the caller knows.
        """
        shard = self._sequence.closed(tensor, positions)
        return sum_over_ranks(tensor, self._group) if shard is None else shard


def alone_on(model: ParallelModel) -> Alone:
    """Returns what stands for the group of this rank's tensor axis where nothing is to be exchanged."""
    return Alone(rank_in(_live_group(model)))


def _live_group(model: ParallelModel) -> Group:
    assert model.meshes is not None
    return model.meshes.tensor.get_group()
