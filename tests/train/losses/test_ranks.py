"""Losses of four ranks against one process, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.messages import GoldenMessages
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
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_encoder_and_temperature_of_a_contrastive_loss_get_the_same_part_of_the_gradient(
    results: Results, micro_steps: int
) -> None:
    case = CASES["contrastive_clip"]
    first, second = case.load()
    model = case.make_model()
    case.plain(model, first[:32], second[:32]).backward()  # type: ignore[no-untyped-call]
    found = results[0][f"contrastive_clip/32/{micro_steps}"]
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
        for outputs in (*rank["gathered"].values(), *rank["after"].values()):
            assert outputs.tolist() == [[0.0, 0.0]] * 2 + [[2.0, 2.0]] * 3 + [[3.0, 3.0]]


# What the message of each misuse must tell.
WRONG = {
    "number as count": ("the number 5 on rank 0", "torch.tensor(5)", "global_count"),
    "number as count on one rank": ("the number 5 on rank 2", "torch.tensor(5)"),
    "list": ("a statistic on rank 0 is no tensor", "give the sum over this rank's samples"),
    "vector in a weighted mean": ("a tensor of 2 numbers with a dimension on rank 0", "write losses.sum()"),
    "vectors of uneven shares": ("of rank 1 (2 of 2 numbers)", "of rank 0 (2 of 3 numbers)", "losses.sum()"),
    "large vectors": ("of rank 1 (1 of 601 numbers)", "than those of rank 0 "),
    "large vector on one rank": ("of rank 1 (1 of 600 numbers)", "than those of rank 0 "),
    "another number of statistics": ("of rank 3 (2 of 2 numbers)", "than those of rank 0 "),
    "micro-batches": ("micro-batches on rank 0 are not as many", "losses.sum()"),
    "nothing on one rank": ("sum_statistics got no statistics on rank 0", "give those of an empty share"),
    "complex on one rank": ("a complex64 tensor on rank 1", "give torch.view_as_real"),
    "scalar": ("what is to be gathered on rank 0 is a scalar", "give the outputs [n, ...]"),
    "scalar on one rank": ("gathered on rank 1 is a scalar", "give the outputs [n, ...]"),
    "no tensor": ("gathered on rank 0 is no tensor", "give the outputs of the model, [n, ...]"),
    "too few sizes": ("sizes holds 3 numbers on rank 0", "there are 4 ranks", "or leave sizes out"),
    "sizes of a full batch": ("sizes holds 2 for rank 1, which gives 1 rows", "or leave sizes out"),
    "other sizes": ("rank 1 was given other sizes than rank 0", "give the same list on every rank"),
    "sizes on one rank": ("rank 1 was given other sizes than rank 0", "or leave sizes out"),
    "other rows": ("on rank 1 (4 numbers each) than on rank 0 (3)", "by padding"),
    "other rows of known sizes": ("on rank 1 (4 numbers each)", "on rank 0 (3)"),
    "other dtypes": ("shape or dtype on rank 1 (1 numbers each)", "on rank 0 (1)"),
    "outputs of other samples": ("the outputs on rank 0 have 2 and 8 rows", "give outputs of the same samples"),
    "scalar outputs": ("gathered on rank 0 is a scalar", "give the outputs [n, ...]"),
}


@pytest.mark.parametrize("misuse", WRONG)
def test_misuse_is_refused_by_every_rank_with_the_same_words(
    golden: GoldenMessages, results: Results, misuse: str
) -> None:
    messages = [rank["refused"][misuse] for rank in results]
    assert len(set(messages)) == 1
    message = golden.message(messages[0])
    for fact in WRONG[misuse]:
        assert fact in message
