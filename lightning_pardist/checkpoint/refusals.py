"""What a load is refused with, in words."""

from __future__ import annotations

from lightning_pardist.base.errors import message


def _listed(names_: list[str]) -> str:
    return ", ".join(names_[:8]) + (f" and {len(names_) - 8} more" if len(names_) > 8 else "") if names_ else "none"


def names_differ(path: str, missing: list[str], unexpected: list[str]) -> str:
    """Returns the refusal of a checkpoint whose names are not those of the module."""
    return message(
        "The module must have the names that are in the checkpoint.",
        got=f"missing in the checkpoint: {_listed(missing)}; unexpected in it: {_listed(unexpected)}",
        source=path,
        change="load with strict=False (strict_loading=False on the module) to fill what corresponds and keep the rest",
    )


def shapes_differ(path: str, name: str, saved: tuple[int, ...], live: tuple[int, ...]) -> str:
    """Returns the refusal of a checkpoint of another model."""
    return message(
        "A checkpoint must be of the same model: the shapes of whole tensors must agree.",
        got=f"the first that differs is {name}: {saved} in the checkpoint, {live} in the module",
        source=path,
        change="build the module with the hyperparameters of the checkpoint, or choose another checkpoint",
    )


def parameters_lost(path: str, index: int, lost: list[str]) -> str:
    """Returns the refusal of an optimizer that lacks parameters it had."""
    return message(
        "The optimizer must have the parameters and groups that it had when the checkpoint was saved.",
        got=f"optimizer {index} no longer has {_listed(lost)}",
        source=path,
        change="build the same groups, or load with strict=False to drop their state",
    )


def other_optimizers(path: str, problem: str) -> str:
    """Returns the refusal of other optimizers than those of the run."""
    return message(
        "A run resumes with the optimizers that it had.",
        got=problem,
        source=f"configure_optimizers() and {path}",
        change="return the same optimizers in the same order, or load weights only, or with strict=False",
    )


def weights_only_source(path: str, kind: str) -> str:
    """Returns the refusal to resume a run from weights alone."""
    return message(
        "A run can be resumed from a checkpoint of lightning_pardist or a Lightning .ckpt file with optimizer states.",
        got=f"weights without a run ({kind})",
        source=path,
        change='load it as weights: LoadRequest(what="weights")',
    )
