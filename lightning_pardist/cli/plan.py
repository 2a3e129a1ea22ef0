"""``pardist plan``: what a program's training will take on a cluster, found out here, without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.plugins.precision import HalfPrecision
from torch.optim import Optimizer

from lightning_pardist.base.errors import message
from lightning_pardist.cli.capture import Captured, capture, run_on_meta
from lightning_pardist.cli.plan_output import estimate_text, ranking_text, write_chart
from lightning_pardist.plan import format_plan
from lightning_pardist.plan.estimate import Cluster
from lightning_pardist.plan.layouts import FILL
from lightning_pardist.specs.block_levers import RecomputeOptions
from lightning_pardist.specs.config import ParallelConfig
from lightning_pardist.specs.device import Device, parse_device
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.tensor_options import TensorOptions
from lightning_pardist.strategies.estimating import PRECISIONS, Estimator, config_from
from lightning_pardist.strategies.hybrid import HybridStrategy
from lightning_pardist.strategies.optimizers import state_bytes_per_element
from lightning_pardist.strategies.presets import PRESETS
from lightning_pardist.strategies.sample import find_sample

_TRUE_DTYPES = {"64-true": torch.float64, "16-true": torch.float16, "bf16-true": torch.bfloat16}
_OLD_WORDS = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed", "None": "32-true"}


def add_commands(parser: ArgumentParser) -> None:
    """Adds the arguments of ``pardist plan``."""
    parser.add_argument("target", type=str, help="a script that calls Trainer.fit, or a LightningCLI configuration")
    parser.add_argument("--args", type=str, default="", help="the script's own arguments, as one text")
    parser.add_argument("--world", type=int, required=True, help="ranks")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that the ranks are on")
    parser.add_argument(
        "--device", type=str, default=None, help="a100, h100, h200, b200, or figures: memory=80GB,flops=989e12"
    )
    parser.add_argument(
        "--layout",
        type=str,
        default=None,
        help="'auto' ranks layouts; a pardist_* name; or sizes, such as zero_stage=3,data_parallel_shard_size=8. "
        "By default what the program asks for",
    )
    parser.add_argument("--precision", type=str, default=None, help="by default the program's")
    parser.add_argument("--recompute", type=str, default=None, help="full, selective or none; by default the program's")
    parser.add_argument("--fill", type=float, default=FILL, help="share of the memory that 'auto' may fill")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--output", type=str, default=None, help="also write a chart (.html, .png) or all figures (.json)"
    )


def run(arguments: Namespace) -> None:
    """Does what was asked and prints the result."""
    device = None if arguments.device is None else parse_device(arguments.device)  # before the program runs
    cluster = _cluster(arguments, device)
    captured = capture(arguments.target, arguments.args)
    precision = arguments.precision or _word(captured.asked.get("precision"))
    estimator = _estimator(captured, precision)
    if arguments.layout == "auto":
        candidates = estimator.layouts(cluster, arguments.fill)
        fitting = next((c.estimate for c in candidates if c.rejected is None), None)
        figures: Any = [
            {"layout": c.layout, "rejected": c.rejected, "estimate": c.estimate.to_dict() if c.estimate else None}
            for c in candidates
        ]
        text = ranking_text(candidates, arguments.fill)
        if fitting is not None:
            text += f"\n\n{estimate_text(fitting)}"
        chosen = fitting or next((c.estimate for c in candidates if c.estimate), None)
    else:
        layout = _layout(arguments, captured)
        sizes = layout.config.resolve(world_size=cluster.world_size, num_nodes=cluster.num_nodes)
        chosen = estimator.estimate(
            layout.config,
            cluster,
            layout.recompute,
            tensor=layout.tensor if sizes.tensor_parallel > 1 else None,
            pipeline=layout.pipeline if sizes.pipeline_parallel > 1 else None,
        )
        figures = chosen.to_dict()
        text = f"{format_plan(chosen.plan)}\n\n{estimate_text(chosen)}"
    text = "\n".join([text, *(f"note: {note}" for note in captured.notes)])
    print(json.dumps(figures, indent=2) if arguments.json else text)
    if arguments.output is not None:
        path = Path(arguments.output)
        if path.suffix == ".json":
            path.write_text(json.dumps(figures, indent=2) + "\n")
        elif chosen is not None:
            write_chart(chosen, path)


def _cluster(arguments: Namespace, device: Device | None) -> Cluster:
    world, nodes = arguments.world, arguments.nodes
    if world < 1 or nodes < 1 or world % nodes:
        raise ValueError(
            message(
                "The ranks must spread evenly over the nodes.",
                got=f"--world {world} --nodes {nodes}",
                source="the command line",
                change="make --world a positive multiple of --nodes",
            )
        )
    return Cluster(world_size=world, num_nodes=nodes, device=device)


def _estimator(captured: Captured, precision: str) -> Estimator:
    module, trainer = captured.module, captured.trainer
    module.trainer = trainer
    data: Any = captured.datamodule or module
    if captured.datamodule is not None:
        captured.datamodule.trainer = trainer
    loaders = captured.loaders
    if captured.datamodule is not None or loaders is None:
        data.prepare_data()
        data.setup("fit")
        loaders = data.train_dataloader()
    run_on_meta(module.configure_model, f"{type(module).__name__}.configure_model", captured.notes)
    sample = find_sample(module, _Given(loaders), None)  # type: ignore[arg-type]  # has the one method that is asked
    if sample is None:
        raise ValueError(
            message(
                "An estimate needs a batch to run the step on.",
                got="training data that tells no batch without being iterated, and no example_input_array",
                source="the program's training data",
                change="give the module an example_input_array, or use a map-style dataset",
            )
        )
    batch = sample.batch
    if precision in _TRUE_DTYPES:
        module.to(_TRUE_DTYPES[precision])
        if precision != "64-true":
            batch = HalfPrecision(precision).convert_input(batch)  # type: ignore[arg-type]
    return Estimator(
        module,
        batch,
        precision=precision,
        optimizer_bytes_per_element=_optimizer_bytes(captured),
        accumulate_grad_batches=int(captured.asked.get("accumulate_grad_batches") or 1),
        entry=sample.entry,
    )


class _Given:
    """The program's loaders, in the form in which ``find_sample`` asks for them."""

    def __init__(self, loaders: Any) -> None:
        self._loaders = loaders

    def peek(self) -> Any:
        """Returns them."""
        return self._loaders


def _optimizer_bytes(captured: Captured) -> float | None:
    try:
        optimizers = list(_optimizers(captured.module.configure_optimizers()))
    except Exception as error:  # the user's code, outside a run
        captured.notes.append(f"the optimizer's state is unknown: configure_optimizers failed here ({error})")
        return None
    return state_bytes_per_element(optimizers)


def _optimizers(given: Any) -> Sequence[Optimizer]:
    if isinstance(given, Optimizer):
        return [given]
    if isinstance(given, dict):
        return _optimizers(given.get("optimizer"))
    if isinstance(given, (list, tuple)):
        return [optimizer for each in given for optimizer in _optimizers(each)]
    return []


def _word(precision: Any) -> str:
    word = _OLD_WORDS.get(str(precision), str(precision))
    if word not in PRECISIONS:
        raise ValueError(
            message(
                f"The strategy works with the precisions {', '.join(PRECISIONS)}.",
                got=word,
                source="Trainer(precision=...) in the program",
                change="give another with --precision",
            )
        )
    return word


@dataclass(frozen=True)
class _Layout:
    """What is to be estimated."""

    config: ParallelConfig
    recompute: RecomputeOptions | None
    tensor: TensorOptions | None = None
    pipeline: PipelineOptions | None = None


def _layout(arguments: Namespace, captured: Captured) -> _Layout:
    strategy = captured.asked.get("strategy", "auto")
    own = strategy if isinstance(strategy, HybridStrategy) else None
    recompute = own.recompute if own is not None else None
    if arguments.recompute is not None:
        recompute = RecomputeOptions(mode=arguments.recompute)
    options = (own.tensor_options, own.pipeline_options) if own is not None else (None, None)
    text = arguments.layout
    if text is None and own is not None:
        return _Layout(own.config, recompute, *options)
    if text is None:
        text = strategy if strategy in PRESETS else "pardist_hybrid"
    if text in PRESETS:
        return _Layout(config_from(dict(PRESETS[text].arguments)), recompute, *options)
    return _Layout(_sizes(text), recompute, *options)


def _sizes(text: str) -> ParallelConfig:
    names = [field.name for field in fields(ParallelConfig)]
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in names or not value:
            raise ValueError(
                message(
                    f"A layout is 'auto', one of {', '.join(PRESETS)}, or name=value of {', '.join(names)}.",
                    got=repr(part),
                    source=f"--layout {text}",
                    change="write for example --layout zero_stage=3,data_parallel_shard_size=8",
                )
            )
        given[name] = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
    return ParallelConfig(**given)
