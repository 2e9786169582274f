"""Addresses that other hosts can reach."""

import pytest

from hpcddp.task import rendezvous


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "fe80::1%eth0", "0.0.0.0"])
def test_loopback_and_link_local_addresses_are_local_only(address: str) -> None:
    assert rendezvous.is_local_only(address)


def test_a_single_host_meets_on_loopback() -> None:
    assert rendezvous.reachable_addresses(["anything"], [], single_host=True) == ["127.0.0.1"]


def test_loopback_names_are_never_offered_to_peers() -> None:
    assert "127.0.0.1" not in rendezvous.reachable_addresses(["localhost"], ["localhost"], single_host=False)


def test_the_interface_of_the_loopback_address_is_lo() -> None:
    assert rendezvous.interface_of("127.0.0.1") == "lo"
    assert rendezvous.interface_of("203.0.113.77") is None


def test_an_unknown_name_resolves_to_no_address() -> None:
    assert rendezvous.resolve("no-such-host.invalid") == []


def test_the_source_address_of_loopback_is_loopback() -> None:
    assert rendezvous.source_address("127.0.0.1") == "127.0.0.1"
