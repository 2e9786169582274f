"""Losses of four ranks against one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.ranks import run_forked
from tests.train.losses.cases import CASES, RUNS
from tests.train.losses.rank import main

pytestmark = pytest.mark.distributed
WORLD_SIZE = 4
Results = list[dict[str, dict[str, Tensor]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what every rank computed."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        ended = run_forked(main, (folder, WORLD_SIZE), world_size=WORLD_SIZE, logs=folder)
    assert ended.codes == [0] * WORLD_SIZE, "\n".join(ended.outputs)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(WORLD_SIZE)]


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "batch", "micro_steps"), RUNS)
def test_every_rank_has_the_loss_and_the_gradient_of_one_process(
    results: Results, name: str, batch: int, micro_steps: int
) -> None:
    case = CASES[name]
    first, second = case.load()
    model = case.make_model()
    loss = case.plain(model, first[:batch], second[:batch])
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {"loss": loss.detach(), **{key: p.grad for key, p in model.named_parameters() if p.grad is not None}}
    for rank in results:
        found = rank[f"{name}/{batch}/{micro_steps}"]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).abs().max() <= 1e-12, key


@pytest.mark.usefixtures("float64")
def test_encoder_and_temperature_of_a_contrastive_loss_get_the_same_part_of_the_gradient(results: Results) -> None:
    case = CASES["contrastive_clip"]
    first, second = case.load()
    model = case.make_model()
    case.plain(model, first[:32], second[:32]).backward()  # type: ignore[no-untyped-call]
    found = results[0]["contrastive_clip/32/1"]
    ratios = {
        key: float(found[key].norm() / p.grad.norm()) for key, p in model.named_parameters() if p.grad is not None
    }
    assert ratios == {key: pytest.approx(1.0, abs=1e-12) for key in ratios}
    assert "log_scale" in ratios


def test_token_mean_with_accumulation_is_the_sum_over_the_count(results: Results) -> None:
    for rank in results[:2]:
        assert float(rank["token_mean"]["value"]) == pytest.approx(46 / 17, abs=1e-14)
        assert float(rank["token_mean"]["gradient"]) == pytest.approx(46 / 17, abs=1e-14)


def test_uneven_and_empty_shares_are_gathered_in_rank_order(results: Results) -> None:
    for rank in results:
        for outputs in rank["gathered"].values():
            assert outputs.tolist() == [[0.0, 0.0]] * 2 + [[2.0, 2.0]] * 3 + [[3.0, 3.0]]
