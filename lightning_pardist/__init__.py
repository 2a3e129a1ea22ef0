"""Lightning strategies that train an unchanged LightningModule on a torch DeviceMesh."""

from __future__ import annotations

__version__ = "0.1.0"
