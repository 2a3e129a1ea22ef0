"""Embedding and head over a vocabulary that is shared out over the tensor axis.

[Note: vocabulary shards] The head's logits are the largest tensor of a language model. Each rank keeps the columns of
its own words; a cross entropy is computed on them with two small reductions. What else the code does with logits
(argmax, softmax, accuracy) sees whole ones, gathered when they are asked for. So logits travel as ``VocabularyShards``:
a tensor of the whole shape that holds this rank's columns only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pardist.base.function_names import function_name
from lightning_pardist.base.torch_api import as_plain_tensors, wrapper_tensor
from lightning_pardist.run.tensor_ops import Group, all_reduce, gather_from_ranks, sum_over_ranks


@dataclass(frozen=True)
class Vocabulary:
    """How words fall on the ranks."""

    lengths: tuple[int, ...]
    """By rank."""
    rank: int
    group: Group

    @property
    def start(self) -> int:
        """The first word of this rank."""
        return sum(self.lengths[: self.rank])

    @property
    def end(self) -> int:
        """The word after the last one of this rank."""
        return self.start + self.lengths[self.rank]


def look_up(ids: Tensor, table: Tensor, vocabulary: Vocabulary, func: Callable[..., Tensor], **options: Any) -> Tensor:
    """Returns the whole embeddings of words, of which this rank knows some.

    Args:
        ids: words, any shape.
        table: this rank's rows.
        vocabulary: which rows they are.
        func: ``F.embedding``.
        options: its other arguments.

    Raises:
        ValueError: for options that look at all rows of the table.
    """
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if options.get(name):
            raise ValueError(
                f"an embedding shared out by its vocabulary cannot have {name}={options[name]!r}: keep it whole with "
                "TensorOptions(plan={'<its name>': 'replicate'})"
            )
    padding = options.get("padding_idx")
    if padding is not None:
        padding += sum(vocabulary.lengths) if padding < 0 else 0
        mine = vocabulary.start <= padding < vocabulary.end
        options["padding_idx"] = padding - vocabulary.start if mine else None
    outside = (ids < vocabulary.start) | (ids >= vocabulary.end)
    local = (ids - vocabulary.start).masked_fill(outside, 0)
    if vocabulary.lengths[vocabulary.rank] == 0:
        found = table.new_zeros((*ids.shape, table.shape[1])) + 0 * table.sum()
    else:
        found = func(local, table, **options).masked_fill(outside.unsqueeze(-1), 0)
    return sum_over_ranks(found, vocabulary.group)


class VocabularyShards(Tensor):
    """Logits of the whole shape of which a rank holds its columns; see [Note: vocabulary shards]."""

    local: Tensor
    words_dim: int
    """Dim of the vocabulary, from the right: -1 for the last."""
    vocabulary: Vocabulary
    gathered: Tensor | None

    @staticmethod
    def wrap(local: Tensor, vocabulary: Vocabulary, dim: int = -1) -> VocabularyShards:
        """Returns the shards as a tensor of the whole shape."""
        shape = list(local.shape)
        shape[dim] = sum(vocabulary.lengths)
        result: VocabularyShards = wrapper_tensor(VocabularyShards, shape, local)
        result.local, result.vocabulary, result.words_dim, result.gathered = local, vocabulary, dim, None
        return result

    def whole(self) -> Tensor:
        """Returns all columns on every rank, gathered once."""
        if self.gathered is None:
            self.gathered = gather_from_ranks(
                self.local, self.words_dim, self.vocabulary.lengths, self.vocabulary.group
            )
        return self.gathered

    def like(self, local: Tensor, dim: int | None = None) -> VocabularyShards:
        """Returns other columns of the same words."""
        return VocabularyShards.wrap(local, self.vocabulary, self.words_dim if dim is None else dim)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = function_name(func)
        with as_plain_tensors():
            if name in _FACTS:
                return func(*args, **kwargs)
            if name in _KEEPING:
                kept = _KEEPING[name](func, args, kwargs)
                if kept is not None:
                    return kept
            if name == "cross_entropy":
                loss = _cross_entropy(args, kwargs)
                if loss is not None:
                    return loss
            return func(*_whole(args), **_whole(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub leaves out the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_whole(args), **_whole(kwargs or {}))


_FACTS = frozenset(
    "shape size dim ndim ndimension dtype device numel nelement layout is_cuda is_cpu is_floating_point is_complex"
    " requires_grad element_size is_sparse is_quantized is_meta names itemsize get_device is_nested".split()
)
"""What the whole shape answers."""


def _whole(value: Any) -> Any:
    if isinstance(value, VocabularyShards):
        return value.whole()
    if isinstance(value, (tuple, list)):
        return type(value)([_whole(item) for item in value])
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def _same(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Changes of dtype or memory: column by column."""
    x = args[0]
    if not isinstance(x, VocabularyShards) or any(isinstance(a, Tensor) for a in (*args[1:], *kwargs.values())):
        return None
    return x.like(func(x.local, *args[1:], **kwargs))


def _view(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Views that leave the vocabulary as the last dim."""
    x, sizes = args[0], args[1:] or tuple(kwargs.values())
    if not isinstance(x, VocabularyShards) or x.words_dim != -1 or not sizes:
        return None
    shape = list(sizes[0]) if isinstance(sizes[0], (tuple, list)) else list(sizes)
    if not all(isinstance(size, int) for size in shape):
        return None
    rows = x.numel() // x.shape[-1]
    if shape[-1] == -1 and -1 not in shape[:-1] and _product(shape[:-1]) == rows:
        shape[-1] = x.shape[-1]
    if shape[-1] != x.shape[-1]:
        return None
    return x.like(x.local.reshape(*shape[:-1], x.local.shape[-1]))


def _flatten(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    x = args[0]
    given = dict(zip(("start_dim", "end_dim"), args[1:])) | dict(kwargs)
    if not isinstance(x, VocabularyShards) or x.words_dim != -1:
        return None
    end = given.get("end_dim", -1)
    return x.like(x.local.flatten(given.get("start_dim", 0), end)) if end % x.local.ndim != x.local.ndim - 1 else None


def _transpose(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    x = args[0]
    if not isinstance(x, VocabularyShards) or len(args) != 3 or kwargs:
        return None
    ndim = x.local.ndim
    one, other, now = args[1] % ndim, args[2] % ndim, x.words_dim % ndim
    moved = {one: other, other: one}.get(now, now)
    return x.like(x.local.transpose(one, other), moved - ndim)


def _index(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Slices of leading dims: positions, not words."""
    x, index = args
    if not isinstance(x, VocabularyShards) or x.words_dim != -1:
        return None
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(entry, slice) or entry is Ellipsis for entry in entries):
        return None
    taken = [entry for entry in entries if entry is not Ellipsis]
    full = slice(None)
    if Ellipsis in entries and entries[-1] is not Ellipsis and entries[-1] != full:
        return None
    if Ellipsis not in entries and len(taken) == x.local.ndim and taken[-1] != full:
        return None
    return x.like(x.local[index])


_KEEPING: Mapping[str, Callable[..., Tensor | None]] = {
    **dict.fromkeys(("float", "to", "contiguous", "double", "bfloat16", "half", "type", "clone"), _same),
    "view": _view,
    "reshape": _view,
    "flatten": _flatten,
    "transpose": _transpose,
    "getitem": _index,
}


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


_CROSS_ENTROPY = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _cross_entropy(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Returns ``F.cross_entropy`` of sharded logits, None for forms that need whole ones."""
    given = dict(zip(_CROSS_ENTROPY, args)) | dict(kwargs)
    logits, target = given["input"], given["target"]
    plain = given.get("weight") is None and given.get("reduce") is None and given.get("size_average") is None
    if not isinstance(logits, VocabularyShards) or isinstance(target, VocabularyShards) or not plain:
        return None
    ndim = logits.local.ndim
    if target.is_floating_point() or logits.words_dim % ndim != (1 if ndim > 1 else 0):
        return None
    vocabulary = logits.vocabulary
    local = logits.local.movedim(logits.words_dim, -1)
    rows = local.reshape(-1, local.shape[-1])
    wanted = target.reshape(-1)
    ignored = wanted == given.get("ignore_index", -100)
    losses = _RowLosses.apply(rows, wanted.masked_fill(ignored, 0), vocabulary, given.get("label_smoothing", 0.0))
    losses = losses.masked_fill(ignored, 0)
    dtype = losses.dtype if torch.is_autocast_enabled(local.device.type) else local.dtype  # as torch's own
    reduction = given.get("reduction", "mean")
    if reduction == "mean":
        return (losses.sum() / (~ignored).sum()).to(dtype)
    if reduction == "sum":
        return losses.sum().to(dtype)
    return losses.view(target.shape).to(dtype) if reduction == "none" else None


class _RowLosses(torch.autograd.Function):
    """Cross entropy of each row: log(sum exp) - logit of the target, with label smoothing over all words.

    Loss parallel of Megatron-LM (Shoeybi et al. 2019, section 3): a maximum and one sum over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, vocabulary: Vocabulary, smoothing: float) -> Tensor:
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        words = sum(vocabulary.lengths)
        largest = wide.amax(-1) if wide.shape[-1] else wide.new_full(wide.shape[:1], float("-inf"))
        all_reduce(largest, vocabulary.group, dist.ReduceOp.MAX)
        shifted = wide - largest.unsqueeze(-1)
        outside = (target < vocabulary.start) | (target >= vocabulary.end)
        column = (target - vocabulary.start).masked_fill(outside, 0)
        exps = shifted.exp()
        if wide.shape[-1]:
            hit = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
        else:
            hit = torch.zeros_like(largest)
        sums = torch.stack([exps.sum(-1), hit, shifted.sum(-1)] if smoothing else [exps.sum(-1), hit])
        all_reduce(sums, vocabulary.group)
        ctx.save_for_backward(exps / sums[0].unsqueeze(-1), column, outside)
        ctx.smoothing, ctx.words, ctx.dtype = smoothing, words, logits.dtype
        losses = sums[0].log() - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (sums[0].log() - sums[2] / words)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, column, outside = ctx.saved_tensors
        result = softmax - ctx.smoothing / ctx.words if ctx.smoothing else softmax.clone()
        if result.shape[-1]:
            hit = (~outside).to(result.dtype) * (ctx.smoothing - 1)
            result.scatter_add_(-1, column.unsqueeze(-1), hit.unsqueeze(-1))
        return (result * gradient.unsqueeze(-1)).to(ctx.dtype), None, None, None
