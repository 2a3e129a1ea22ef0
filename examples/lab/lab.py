"""Six steps from one process to two nodes, each with a check: ``python examples/lab/lab.py``.

Every step trains the GPT of ``examples/gpt`` in processes of its own and compares what they noted. Nothing but the
Trainer's arguments changes from step to step. Takes a few minutes on two CPU cores; ``--steps 1 2`` runs some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpt"))  # the module of the GPT example, unchanged
from gpt_module import GPT

from lightning_pardist import HybridStrategy, RecomputeOptions, estimate

STEPS, GLOBAL_BATCH, WIDTH, DEPTH = 6, 4, 64, 4
SECONDS = 280.0


# ---- one training, in one or more processes --------------------------------------------------------------------------


class Notes(L.Callback):
    """What a run tells the checks."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.dtypes: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        module.blocks[0].mlp[0].register_forward_hook(lambda m, args, out: self.dtypes.append(str(out.dtype)))


def tokens(context: int) -> DataLoader[tuple[Tensor, ...]]:
    """Half of the steps are one epoch, so that a run may end between two."""
    shape = STEPS // 2 * GLOBAL_BATCH, context + 1
    rows = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("LAB_WORLD_SIZE", "1")))
    return DataLoader(TensorDataset(rows), batch_size=GLOBAL_BATCH // world_size, collate_fn=_stack)


def _stack(samples: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([sample[0] for sample in samples])


def train(options: argparse.Namespace) -> None:
    """One run; every rank notes what it saw."""
    L.seed_everything(1, verbose=False)
    strategy: Any = "auto"
    if options.strategy != "auto":
        recompute = RecomputeOptions() if options.recompute else None
        stage = {"ddp": 0, "fsdp": 3, "hybrid": 3}[options.strategy]
        replicate = 1 if options.strategy == "fsdp" else "auto"
        strategy = HybridStrategy(
            zero_stage=stage, data_parallel_replicate_size=replicate, recompute=recompute, print_plan=False
        )
    notes = Notes()
    callbacks: list[L.Callback] = [notes]
    if options.save:
        callbacks.append(ModelCheckpoint(options.save, filename="{epoch}", save_top_k=-1))  # at the end of every epoch
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        strategy=strategy,
        precision=options.precision,
        max_steps=options.until,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(options.save),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GPT(width=WIDTH, depth=DEPTH, context=options.context)
    trainer.fit(module, tokens(options.context), ckpt_path=options.load)
    state = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()]
    moments = [
        value.to_local() if hasattr(value, "to_local") else value
        for entry in trainer.optimizers[0].state.values()
        for value in entry.values()
        if value.dim()
    ]
    found = {
        "losses": notes.losses,
        "dtypes": sorted(set(notes.dtypes)),
        "state_bytes": sum(tensor.nbytes for tensor in [*state, *moments]),
        "layout": {} if strategy == "auto" else strategy.plan.sizes.as_dict(),
    }
    Path(options.notes).joinpath(f"rank-{trainer.global_rank}.json").write_text(json.dumps(found, default=dict))


# ---- the steps -------------------------------------------------------------------------------------------------------


def run(folder: Path, name: str, *arguments: str, launcher: list[list[str]] | None = None) -> list[dict[str, Any]]:
    """Starts one training and returns the notes of its ranks."""
    notes = folder / name
    notes.mkdir()
    devices = next((a.partition("=")[2] for a in arguments if a.startswith("--devices=")), "1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LAB_WORLD_SIZE": devices, "GLOO_SOCKET_IFNAME": "lo"}
    script = [__file__, f"--notes={notes}", *arguments]
    commands = [[*start, *script] for start in launcher or [[sys.executable]]]
    started = [
        subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for c in commands
    ]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit(f"{name} failed:\n" + "\n".join(outputs))
    return [json.loads(path.read_text()) for path in sorted(notes.glob("rank-*.json"))]


def check(what: str, *, good: bool) -> None:
    print(f"    {'ok    ' if good else 'WRONG '} {what}", flush=True)
    if not good:
        raise SystemExit(1)


def close(ours: list[float], theirs: list[float], tolerance: float) -> bool:
    return len(ours) == len(theirs) > 0 and all(
        abs(a - b) <= tolerance * abs(b) for a, b in zip(ours, theirs, strict=True)
    )


class Lab:
    """The steps; what one of them measured, the later ones use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._one: dict[str, Any] | None = None
        self._fsdp: list[dict[str, Any]] | None = None

    @property
    def one(self) -> dict[str, Any]:
        """One process, plain Lightning: the judge of every step."""
        if self._one is None:
            (self._one,) = run(self.folder, "one", "--strategy=auto")
        return self._one

    @property
    def fsdp(self) -> list[dict[str, Any]]:
        """Sharded over two processes."""
        if self._fsdp is None:
            self._fsdp = run(self.folder, "fsdp", "--strategy=fsdp", "--devices=2")
        return self._fsdp

    def step_1(self) -> None:
        """Copies on two processes (ddp) train as one process does."""
        for rank, found in enumerate(run(self.folder, "ddp", "--strategy=ddp", "--devices=2")):
            check(
                f"rank {rank}: {STEPS} losses equal one process to 1e-5",
                good=close(found["losses"], self.one["losses"], 1e-5),
            )

    def step_2(self) -> None:
        """Sharding over two processes (fsdp) halves what a rank holds."""
        for rank, found in enumerate(self.fsdp):
            share = found["state_bytes"] / self.one["state_bytes"]
            check(f"rank {rank} holds {share:.1%} of parameters and Adam's state", good=0.49 < share < 0.51)
            check(
                f"rank {rank}: losses equal one process to 1e-5", good=close(found["losses"], self.one["losses"], 1e-5)
            )

    def step_3(self) -> None:
        """bf16-mixed computes in bfloat16 and stays near the losses in fp32."""
        for rank, found in enumerate(
            run(self.folder, "bf16", "--strategy=fsdp", "--devices=2", "--precision=bf16-mixed")
        ):
            check(f"rank {rank}: blocks compute in {found['dtypes']}", good=found["dtypes"] == ["torch.bfloat16"])
            check(f"rank {rank}: losses within 2 % of fp32", good=close(found["losses"], self.one["losses"], 0.02))

    def step_4(self) -> None:
        """Recomputation lets a longer context into the same memory."""

        def activations(context: int, recompute: RecomputeOptions | None) -> int:
            batch = torch.zeros(2, context + 1, dtype=torch.int64)
            with torch.device("meta"):
                module = GPT(width=WIDTH, depth=DEPTH, context=context)
            found = estimate(module, batch, world_size=2, recompute=recompute)
            assert found.worst.activations is not None
            return found.worst.activations

        budget = activations(128, None)
        longest = 128
        while activations(2 * longest, RecomputeOptions()) <= budget:
            longest *= 2
        check(f"context 128 keeps {budget / 2**20:.1f} MiB; recomputed, {longest} fits as well", good=longest > 128)
        long = f"--context={longest}"
        plain, again = (
            run(self.folder, name, "--strategy=fsdp", "--devices=2", long, *more)
            for name, more in (("long", ()), ("long_recomputed", ("--recompute",)))
        )
        check("and trains with the same losses, bit for bit", good=plain[0]["losses"] == again[0]["losses"])

    def step_5(self) -> None:
        """A checkpoint of two processes goes on in one and in two, as plain Lightning goes on from its own."""
        ours, theirs = self.folder / "ours", self.folder / "theirs"
        run(self.folder, "saved", "--strategy=fsdp", "--devices=2", f"--save={ours}")
        run(self.folder, "saved_plain", "--strategy=auto", f"--save={theirs}")
        (plain,) = run(self.folder, "resumed_plain", "--strategy=auto", f"--load={theirs / 'epoch=0.ckpt'}")
        load = f"--load={ours / 'epoch=0.ckpt'}"
        for name, layout in (("resumed_one", ["--strategy=ddp"]), ("resumed_ddp", ["--strategy=ddp", "--devices=2"])):
            for rank, found in enumerate(run(self.folder, name, *layout, load)):
                good = close(found["losses"], plain["losses"], 1e-5)
                check(f"{name}, rank {rank}: {len(plain['losses'])} losses after the resume are equal", good=good)

    def step_6(self) -> None:
        """Two nodes by torchrun: two agents that meet by c10d, here on loopback."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        agent = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc_per_node=1",
            "--rdzv_backend=c10d",
        ]
        agent += ["--rdzv_id=lab", f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1"]
        found = run(self.folder, "nodes", "--strategy=hybrid", "--num_nodes=2", launcher=[agent, agent])
        for rank, notes in enumerate(found):
            check(f"rank {rank}: one copy per node", good=notes["layout"]["data_parallel_replicate"] == 2)
            check(
                f"rank {rank}: losses equal one process to 1e-5", good=close(notes["losses"], self.one["losses"], 1e-5)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6])
    inner = parser.add_argument_group("one training, as the steps start it")
    inner.add_argument("--notes", default="")
    inner.add_argument("--strategy", default="auto")
    inner.add_argument("--devices", type=int, default=1)
    inner.add_argument("--num_nodes", type=int, default=1)
    inner.add_argument("--precision", default="32-true")
    inner.add_argument("--context", type=int, default=128)
    inner.add_argument("--until", type=int, default=STEPS)
    inner.add_argument("--recompute", action="store_true")
    inner.add_argument("--save", default="")
    inner.add_argument("--load", default=None)
    options = parser.parse_args()
    if options.notes:
        train(options)
        return
    with tempfile.TemporaryDirectory(prefix="pardist-lab-") as folder:
        lab = Lab(Path(folder))
        for number in options.steps:
            step: Callable[[], None] = getattr(lab, f"step_{number}")
            print(f"{number}. {step.__doc__}", flush=True)
            step()
    print("All checks passed.")


if __name__ == "__main__":
    main()
