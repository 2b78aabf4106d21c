"""What a launcher says, and arguments that are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_cp.cluster_check.launch import read_launch
from mindspeed_cp.cluster_check.request import ClusterRequest
from mindspeed_cp.errors import ConfigError

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip


def test_torchrun_s_variables_are_read() -> None:
    launch = read_launch(TORCHRUN)
    assert (launch.rank, launch.ranks, launch.nodes, launch.node) == (5, 8, 2, 1)
    assert launch.agent_store and launch.attempt == 2
    plain = {name: text for name, text in TORCHRUN.items() if not name.startswith("TORCHELASTIC")}
    assert not read_launch(plain).agent_store


@pytest.mark.parametrize(
    "change, text",
    [
        ({"RANK": ""}, r"RANK is not set; start the ranks with torchrun"),
        ({"MASTER_PORT": ""}, r"MASTER_PORT is not set"),
        ({"WORLD_SIZE": "many"}, r"WORLD_SIZE=many.*must be whole numbers"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, r"WORLD_SIZE is 1.*2 or more"),
        ({"WORLD_SIZE": "6"}, r"rank 5 of 6 is local rank 1 of 4; valid: the same number of ranks on every node"),
        ({"LOCAL_RANK": "3"}, r"numbered node by node"),
    ],
)
def test_other_starts_are_refused(change: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_launch(TORCHRUN | change)


@pytest.mark.parametrize(
    "values, text",
    [
        ({"device": "cuda"}, r"--device cuda: --cluster measures cpu and npu"),
        ({"dtype": "int8"}, r"--dtype int8: valid: bf16, fp16, fp32"),
        ({"tokens_per_rank": 8}, r"--tokens-per-rank 8: valid: 64 to"),
        ({"heads": 0}, r"--heads 0: must be 1 or more"),
        ({"kv_heads": 3}, r"--kv-heads 3: must divide --heads 8"),
        ({"kernel_seconds": 0.0}, r"--kernel-seconds 0"),
        ({"link_seconds": -1.0}, r"--link-seconds -1"),
    ],
)
def test_bad_arguments_are_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ClusterRequest(Path("x"), **values).check()  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--folder .*file/x: cannot be written: .*; give a folder of your own"):
        ClusterRequest(tmp_path / "file" / "x").check_folder()
    ClusterRequest(tmp_path / "new").check_folder()
    (tmp_path / "new" / "report.html").write_text("")
    with pytest.raises(ConfigError, match=r"holds a report already; give another one, or --overwrite"):
        ClusterRequest(tmp_path / "new").check_folder()
    ClusterRequest(tmp_path / "new", overwrite=True).check_folder()
