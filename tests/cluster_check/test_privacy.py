"""Nothing in a report names a host, an address, a user or a secret."""

from __future__ import annotations

import pytest

from mindspeed_cp.cluster_check.privacy import library_variables, scrubbed, without_addresses
from mindspeed_cp.cluster_check.supervisor import Failure


def test_variables_of_libraries_are_kept_and_private_values_are_not() -> None:
    environment = {
        "HCCL_CONNECT_TIMEOUT": "1200", "HCCL_IF_IP": "10.1.2.3", "NCCL_SOCKET_IFNAME": "eth0", "HOME": "home-of-ada",
        "TORCH_TOKEN": "s3cret", "ASCEND_HOME_PATH": "/usr/local", "AWS_SECRET_ACCESS_KEY": "x",
        "NCCL_DEBUG": "INFO to 10.1.2.3", "TORCHELASTIC_RUN_ID": "job-of-ada",
    }  # fmt: skip
    assert library_variables(environment) == {
        "ASCEND_HOME_PATH": "(set)", "HCCL_CONNECT_TIMEOUT": "1200", "HCCL_IF_IP": "(set)",
        "NCCL_DEBUG": "INFO to <address>", "NCCL_SOCKET_IFNAME": "eth0", "TORCH_TOKEN": "(set)",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text, clean",
    [
        ("closed by peer [10.83.1.2]:42424", "closed by peer [<address>]:42424"),
        ("from fe80::1%eth0 port 1", "from <address> port 1"),
        ("[::ffff:10.0.0.1]:29500", "[<address>]:29500"),
        ("connect to 10.83.1.2:42424.", "connect to <address>:42424."),
        ("torch 2.13.0 at 12:30, c10d::Error in pair.cc:547", "torch 2.13.0 at 12:30, c10d::Error in pair.cc:547"),
        ("host node17.example is gone, node171 is not", "host <host> is gone, node171 is not"),
    ],
)
def test_addresses_and_hosts_are_replaced(text: str, clean: str) -> None:
    assert without_addresses(text, ("node17", "node17.example", "")) == clean


def test_plain_data_is_scrubbed_everywhere() -> None:
    data = {"a": ["at 10.0.0.1", 3, None, {"b": "node17"}], "c": 1.5}
    failure = Failure("links", {"pairs": [[0, 1]]}, {0: "10.0.0.1 is gone"})
    assert scrubbed([failure], ()) == [Failure("links", {"pairs": [[0, 1]]}, {0: "<address> is gone"})]
    assert scrubbed(data, ("node17",)) == {"a": ["at <address>", 3, None, {"b": "<host>"}], "c": 1.5}
