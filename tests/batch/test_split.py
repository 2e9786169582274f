from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcddp.batch.split import ceil_div, divide, fill, offset, part

totals, counts = st.integers(0, 10_000), st.integers(1, 500)


@given(total=totals, parts=counts)
def test_parts_add_up_and_differ_by_one_at_most(total: int, parts: int) -> None:
    sizes = divide(total, parts)
    assert len(sizes) == parts
    assert sum(sizes) == total
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == ceil_div(total, parts)


@given(total=totals, parts=counts)
def test_one_part_and_its_beginning_are_those_of_the_whole_list(total: int, parts: int) -> None:
    sizes = divide(total, parts)
    for index in {0, parts // 2, parts - 1}:
        assert part(total, parts, index) == sizes[index]
        assert offset(total, parts, index) == sum(sizes[:index])


@given(total=totals, size=st.integers(1, 40), parts=counts)
def test_parts_are_filled_one_after_the_other(total: int, size: int, parts: int) -> None:
    total = min(total, size * parts)
    sizes = fill(total, size, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes.count(size) >= total // size


@pytest.mark.parametrize(("total", "parts", "expected"), [(256, 3, (86, 85, 85)), (2, 4, (1, 1, 0, 0)), (0, 2, (0, 0))])
def test_the_first_parts_are_the_larger_ones(total: int, parts: int, expected: tuple[int, ...]) -> None:
    assert divide(total, parts) == expected
