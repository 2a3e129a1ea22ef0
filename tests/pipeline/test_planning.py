"""Plans of pipelines, without a process: what crosses a cut, who holds what, and what is refused by name."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from lightning_pardist.describe import profile_model
from lightning_pardist.describe.module_table import module_table
from lightning_pardist.describe.skeleton import Skeleton, Step
from lightning_pardist.plan.pipeline import plan_pipeline
from lightning_pardist.plan.pipeline_input import PipelineInput
from lightning_pardist.specs.pipeline_options import PipelineOptions
from lightning_pardist.specs.pipeline_plan import PipelinePlan
from lightning_pardist.strategies.schedules import schedule_table
from tests.bad_input.common import four_parts
from tests.pipeline.modules import GPT, ConvNet, DeepGPT, ManyStates, Seq2Seq, SkipGPT
from tests.support.modules import WIDTH, Block, Recurrent


def plan(module: L.LightningModule, ranks: int = 2, rows: int = 8, **options: Any) -> PipelinePlan:
    data = module.dataset(rows, seed=1)
    collate = getattr(module, "collate", default_collate)
    batch = collate([data[i] for i in range(rows)])
    profile = profile_model(module, batch)
    assert profile.source == "fake_run", profile.fallback_reason
    blocks = [block.name for block in profile.blocks()]
    skeleton = Skeleton(module, torch.device("cpu"), None)
    flow, _ = skeleton.dataflow(blocks, Step("training_step", batch, (0,), is_transferred=False))
    chosen = PipelineOptions(**options)
    return plan_pipeline(
        PipelineInput(
            table=module_table(module, profile.called_modules),
            profile=profile,
            dataflow=flow,
            options=chosen,
            ranks=ranks,
            schedules=schedule_table(chosen),
        )
    )


def refused(module: L.LightningModule, pattern: str, **arguments: Any) -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        plan(module, **arguments)
    four_parts(str(caught.value))


def test_a_tied_weight_lives_on_both_ends() -> None:
    made = plan(GPT())
    assert made.shared_parameters == (("wte.weight", (0, 1)),)
    assert [stage.receives for stage in made.stages] == [(), ((1, 0),)]
    held = [made.held_by(rank) for rank in range(2)]
    assert held[0] & held[1] == {"wte.weight"}
    assert held[0] | held[1] == {name for name, _ in GPT().named_parameters()}


def test_what_code_outside_of_blocks_makes_is_made_again() -> None:
    made = plan(SkipGPT(), ranks=4)
    names = {name for name, _ in made.shared_parameters}
    assert names == {"embedding.weight"}, "the skip needs the embedding on the last stage, and nothing else is doubled"
    # The gain that blocks hand through is not sent: it is made again from the embedding, where blocks use it.
    assert all(len(stage.receives) <= 1 for stage in made.stages)


def test_outputs_of_all_blocks_travel_to_the_head() -> None:
    assert plan(ManyStates(), ranks=4).stages[3].receives == ((0, 0), (1, 0), (2, 0))


def test_an_encoder_output_is_carried_to_every_decoder_block() -> None:
    made = plan(Seq2Seq(), ranks=4)
    assert made.stages[3].receives == ((1, 0), (2, 0)), "encoder's and decoder's last"
    assert dict(made.shared_parameters).keys() == {
        "transformer.encoder.norm.weight",
        "transformer.encoder.norm.bias",
    }


class HeavyHead(DeepGPT):
    """A vocabulary that costs as much as two of its eight blocks."""

    def __init__(self) -> None:
        super().__init__()
        block = sum(p.numel() for p in self.blocks[0].parameters() if p.dim() == 2)
        self.head = nn.Linear(WIDTH, round(2 * block / WIDTH), bias=False)


@pytest.mark.parametrize(("ranks", "most", "by_count"), [(2, 1.03, 1.18), (4, 1.22, 1.55)])
def test_a_heavy_head_takes_blocks_away_from_its_stage(ranks: int, most: float, by_count: float) -> None:
    ours, even = plan(HeavyHead(), ranks), plan(HeavyHead(), ranks, split=[8 // ranks] * ranks)
    assert len(ours.stages[-1].blocks) < len(even.stages[-1].blocks)
    for made in (ours, even):
        costs = [stage.flops for stage in made.stages]
        assert made.balance == pytest.approx(max(costs) * ranks / sum(costs), rel=1e-3)
    best = min(_balances_of_all_splits(ours))
    assert ours.balance == pytest.approx(best, rel=1e-3), "there is a better split"
    assert ours.balance < most and even.balance > by_count


def _balances_of_all_splits(made: PipelinePlan) -> list[float]:
    """Dearest stage over the mean, for every way to cut; blocks of these models cost the same."""
    block = max(stage.flops // len(stage.blocks) for stage in made.stages[:-1])
    last = made.stages[-1]
    head, count = last.flops - block * len(last.blocks), len(made.blocks)
    found = []
    for cuts in combinations(range(1, count), made.ranks - 1):
        costs = [block * (stop - start) for start, stop in pairwise((0, *cuts, count))]
        costs[-1] += head
        found.append(max(costs) * len(costs) / sum(costs))
    return found


def test_splits_of_the_user() -> None:
    assert [len(s.blocks) for s in plan(DeepGPT(), split=[5, 3]).stages] == [5, 3]
    assert [s.first for s in plan(DeepGPT(), split=["blocks.2"]).stages] == [0, 2]
    refused(DeepGPT(), r"5 stage|9 block", split=[5, 4])
    refused(DeepGPT(), r"blocks\.9.*are no blocks", split=["blocks.9"])
    refused(DeepGPT(), r"name the 1 block", split=["blocks.2", "blocks.4"])


def test_micro_batches_keep_the_idle_share_and_fit_the_batch() -> None:
    assert plan(DeepGPT(), rows=32).num_microbatches == 8  # 4 would idle 20 %, 8 idle 11.1 %
    assert plan(DeepGPT(), rows=32, most_idle=0.05).num_microbatches == 32
    assert plan(DeepGPT(), ranks=4, rows=6).num_microbatches == 6, "limited by the batch"
    assert plan(DeepGPT(), num_microbatches=3).num_microbatches == 3


def test_stages_of_v_shaped_schedules_end_on_the_first_rank() -> None:
    made = plan(DeepGPT(), schedule="zbv_zero_bubble")
    assert [stage.rank for stage in made.stages] == [0, 1, 1, 0]
    assert made.loss_rank == 0
    assert not made.shared_parameters, "embedding and head are on one rank"


# ---- refusals


def test_too_many_stages_and_no_stack() -> None:
    refused(GPT(), r"3 block\(s\) for 4 stage", ranks=4)
    refused(GPT(), r"3 block\(s\) for 4 stage", ranks=2, schedule="interleaved_1f1b")
    refused(Recurrent(), r"no stack of like blocks")
    refused(ConvNet(), r"4 block\(s\) for 6 stage", ranks=6)


def test_micro_batches_that_a_schedule_cannot_run() -> None:
    refused(DeepGPT(), r"num_microbatches=2 on 2.*DualPipeV", num_microbatches=2, schedule="dualpipev")


def test_a_batch_smaller_than_its_schedule_needs() -> None:
    for schedule in ("1f1b", "dualpipev"):
        refused(DeepGPT(), rf"1 row\(s\) per batch, schedule={schedule} on 4", ranks=4, rows=1, schedule=schedule)
    for schedule in ("gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble"):
        assert plan(DeepGPT(), ranks=4, rows=1, schedule=schedule).num_microbatches == 1


def test_few_micro_batches_run_if_asked_for_and_say_their_price() -> None:
    one = plan(DeepGPT(), num_microbatches=1)
    assert one.idle_share == pytest.approx(0.5)
    assert one.notes[-1] == (
        "1 micro-batch(es) for 2 pipeline ranks: the step sees the whole batch at once, and ranks wait 50 % of the time"
    )
    assert (
        plan(DeepGPT(), ranks=4, num_microbatches=2).notes[-1].endswith("4 pipeline ranks: ranks wait 60 % of the time")
    )


class Repeated(GPT):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.ln_f(x))


def test_a_stack_in_a_loop() -> None:
    refused(Repeated(), r"blocks\.0 was called 2 times")


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.block(x)
        return self.state * 2


class HiddenState(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Remembering() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.blocks[0].state.mean()


def test_a_value_that_a_block_keeps_to_itself() -> None:
    refused(HiddenState(), r"the code after the last block reads a tensor made inside blocks\.0")


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return self.block(x), Box()


class Box:
    pass


class Boxes(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Opaque() for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.ln_f(x))


def test_outputs_that_cannot_be_sent() -> None:
    refused(Boxes(), r"returns a Box")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"schedule": "2f2b"}, "schedule='2f2b'"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"split": "blocks"}, "split='blocks'"),
        ({"split": [2, "blocks.1"]}, "split="),
        ({"most_idle": 2}, "most_idle=2"),
        ({"stages_per_rank": 2}, "1 for the schedule 1f1b"),
        ({"stages_per_rank": 3, "schedule": "dualpipev"}, "2 for the schedule dualpipev"),
        ({"loss_weight": "words"}, "loss_weight='words'"),
        ({"timeline": "step.svg"}, "timeline='step.svg'"),
    ],
)
def test_options_that_mean_nothing(arguments: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern) as caught:
        PipelineOptions(**arguments)
    four_parts(str(caught.value))
