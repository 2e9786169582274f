from __future__ import annotations

import pytest

from hpcddp.slurm.hostlist import MOST_HOSTS, HostListError, expand
from tests.facts import assert_facts
from tests.messages import GoldenMessages


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[8-10]", ["n8", "n9", "n10"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[01-03]", ["r1n01", "r1n02", "r1n03", "r2n01", "r2n02", "r2n03"]),
        ("a[1-2][3-4]", ["a13", "a14", "a23", "a24"]),
        ("a[0-1]b[0-1]c[0-1]", ["a0b0c0", "a0b0c1", "a1b0c0", "a1b0c1", "a0b1c0", "a0b1c1", "a1b1c0", "a1b1c1"]),
        ("n[0-1]n[0-1]n[0]", ["n0n0n0", "n1n0n0", "n0n1n0", "n1n1n0"]),
        ("a1,n[3,1-2],z", ["a1", "n3", "n1", "n2", "z"]),
        ("n[1-2],n[1-2]", ["n1", "n2", "n1", "n2"]),
        (" a , b c", ["a", "b", "c"]),
        ("n[1-2]-ib[0-1]", ["n1-ib0", "n1-ib1", "n2-ib0", "n2-ib1"]),
        ("[1-3]", ["1", "2", "3"]),
        ("n1-3", ["n1-3"]),
        # 22.05 refuses text behind the last bracket, later versions take it.
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_a_host_list_stands_for_its_names_in_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize("item", ["", "a-b", "-2", "1-", " 1", "1-3/2", "0x1", "٣"])
def test_what_is_no_number_in_a_bracket_is_named(item: str, golden: GoldenMessages) -> None:
    with pytest.raises(HostListError) as caught:
        expand(f"n[{item}]")
    assert_facts(golden.message(caught.value), f"'n[{item}]' holds {item!r}", "a range such as 01-03")


@pytest.mark.parametrize("item", ["3-1", f"1-{MOST_HOSTS + 1}", "1-999999999999999999"])
def test_a_range_that_runs_backwards_or_too_far_is_named(item: str, golden: GoldenMessages) -> None:
    with pytest.raises(HostListError) as caught:
        expand(f"n[{item}]")
    assert_facts(golden.message(caught.value), f"'n[{item}]' holds the range {item!r}", "backwards or is too long")


def test_the_longest_range_is_taken() -> None:
    assert len(expand(f"n[1-{MOST_HOSTS}]")) == MOST_HOSTS


def test_brackets_that_multiply_into_too_many_hosts_are_refused(golden: GoldenMessages) -> None:
    with pytest.raises(HostListError) as caught:
        expand("r[1-1000]n[1-1000]")
    assert_facts(golden.message(caught.value), "more than 65536 hosts in one name")


@pytest.mark.parametrize(("text", "place"), [("n[1", 2), ("n1]", 3), ("a,n[[1]]", 4)])
def test_an_unmatched_bracket_is_reported_with_its_position(text: str, place: int, golden: GoldenMessages) -> None:
    with pytest.raises(HostListError) as caught:
        expand(text)
    assert_facts(golden.message(caught.value), f"the host list {text!r}", f"at character {place}")
