from __future__ import annotations

import socket

import pytest

from zrun.errors import UsageError
from zrun.ports import claim_free_port, claim_port


def test_free_ports_differ_and_can_be_bound():
    ports = [claim_free_port() for _ in range(50)]
    assert len({port.number for port in ports}) == 50
    with socket.create_server(("127.0.0.1", ports[0].number)):
        pass
    for port in ports:
        port.release()


def test_a_claimed_port_cannot_be_claimed_again():
    port = claim_free_port()
    with pytest.raises(UsageError, match="another zrun job"):
        claim_port(port.number)
    port.release()
    claim_port(port.number).release()


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_refused_by_name(address):
    with socket.create_server((address, 0)) as server:
        number = server.getsockname()[1]
        with pytest.raises(UsageError, match=f"{number} is taken by process"):
            claim_port(number)
    claim_port(number).release()


def test_what_lingers_of_an_earlier_job_is_no_obstacle():
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", number)) as client:
            accepted, _ = server.accept()
            accepted.close()  # this end closes first, so the port stays in TIME_WAIT
            client.recv(1)
    claim_port(number).release()
