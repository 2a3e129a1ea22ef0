"""The GPT example by LightningCLI: model, data, Trainer and strategy come from a YAML file.

``python examples/cli/main.py fit --config examples/cli/by_name.yaml``
``python examples/cli/main.py fit --config examples/cli/by_class_path.yaml``
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning.pytorch.cli import LightningCLI

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))  # the module and the data of the GPT example
from gpt_module import GPT
from text_data import StandardLibrary


def main() -> None:
    LightningCLI(GPT, StandardLibrary)


if __name__ == "__main__":
    main()
