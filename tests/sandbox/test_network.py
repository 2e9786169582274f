from __future__ import annotations

from ipaddress import IPv4Network

import pytest

from hpcddp.sandbox import network
from tests.messages import GoldenMessages
from tests.sandbox.clusters import cluster


def test_a_subnet_is_free_if_it_overlaps_nothing_in_use() -> None:
    assert network.free_subnet([], 0) == IPv4Network("198.18.0.0/24")
    assert network.free_subnet([IPv4Network("198.18.0.0/23")], 0) == IPv4Network("198.18.2.0/24")
    assert network.free_subnet([IPv4Network("198.19.255.7/32")], 511) == IPv4Network("198.18.0.0/24")


def test_no_free_subnet_is_an_error_with_a_way_out(golden: GoldenMessages) -> None:
    with pytest.raises(network.NetworkError) as caught:
        network.free_subnet([IPv4Network("198.0.0.0/8")], 3)
    message = golden.message(caught.value)
    assert "198.18.0.0/15 is in use" in message
    assert "use --hosts shared" in message


def test_the_default_route_and_words_are_no_networks_in_use() -> None:
    found = network.parse_networks(["default", "10.0.0.0/8", "192.0.2.7", "fd00::/8", "", "unreachable"])
    assert list(found) == [IPv4Network("10.0.0.0/8"), IPv4Network("192.0.2.7/32")]


def test_as_many_nodes_as_are_allowed_have_addresses_of_their_own() -> None:
    subnet = IPv4Network("198.18.7.0/24")
    addresses = network.node_addresses(subnet, network.MOST_NODES)
    others = {network.controller_address(subnet), network.machine_address("198.18.7.1")}
    assert len({*addresses, *others}) == network.MOST_NODES + 2


def test_an_interface_name_fits_the_kernels_limit() -> None:
    assert len(network.interface_name("0123456789abcdef" * 2)) <= 15


def test_each_node_gets_its_cable_its_name_and_its_address() -> None:
    commands = network.build_commands(cluster())
    assert ("unshare", "--net=/somewhere/sandbox/net/n2", "--uts=/somewhere/sandbox/uts/n2", "hostname", "n2") in [
        command.argv for command in commands
    ]
    typed = "".join(command.standard_input for command in commands)
    assert "link add cable2 type veth peer name eth0 netns /somewhere/sandbox/net/n2\n" in typed
    assert "address add 198.18.7.12/24 dev eth0\n" in typed
