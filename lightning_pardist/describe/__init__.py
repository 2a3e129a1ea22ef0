"""Step 1: module and sample batch to ``ModelProfile``, by one run on fake tensors; no process group, no Lightning."""

from lightning_pardist.describe.profile import module_tree_profile, profile_model
from lightning_pardist.describe.sample import sample_from_loader

__all__ = ["module_tree_profile", "profile_model", "sample_from_loader"]
