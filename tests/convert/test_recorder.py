"""A launch script starts nothing: what it would start is recorded."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from mindspeed_cp.convert import launch
from mindspeed_cp.convert.launch import Recording, record
from mindspeed_cp.errors import ConfigError


def recorded(text: str, folder: Path, *arguments: str, **environment: str) -> Recording:
    (folder / "launch.sh").write_text(text)
    return record(folder / "launch.sh", arguments, environment)


#: A script, and the words of what it starts.
COMMANDS = [
    ('torchrun --nproc 8 a.py --x "a b" \'c\n d\' ""', [("torchrun", "--nproc", "8", "a.py", "--x", "a b", "c\n d", "")]),
    ('A=(--x 1); A+=(--y); [ "$MISSING" ] || A+=(--z)\npython a.py "${A[@]}"', [("python", "a.py", "--x", "1", "--y", "--z")]),
    ("nohup torchrun a.py --x > log.txt 2>&1 &", [("torchrun", "a.py", "--x")]),
    ("torchrun a.py 2>&1 | tee logs/x.log", [("torchrun", "a.py")]),
    ("env A=3 timeout 9 numactl -N 0 bash -c 'python a.py $A'", [("python", "a.py", "3")]),
    ('srun -N 2 --export=ALL bash -c "torchrun a.py --n $(seq 2 | tail -1)"', [("torchrun", "a.py", "--n", "2")]),
    ("export PATH=/usr/local/bin:/usr/bin:/bin:$PATH\npython3 a.py", [("python3", "a.py")]),
    ("PY=/opt/conda/bin/python\n$PY a.py; \"${PY%/*}/torchrun\" b.py; /usr/bin/python3 c.py",
     [("python", "a.py"), ("torchrun", "b.py"), ("python3", "c.py")]),
    ("cat <<EOF > job.sh\ntorchrun a.py --x $((2 * 4))\nEOF\nbash job.sh", [("torchrun", "a.py", "--x", "8")]),
    ("exec torchrun a.py $1 $(nvidia-smi -L | wc -l) $(hostname)", [("torchrun", "a.py", "one", "0", "localhost")]),
    ("set -euo pipefail\ncommand -v torchrun > /dev/null && which python > /dev/null && python a.py", [("python", "a.py")]),
    ("my_launcher train --x 1", [("my_launcher", "train", "--x", "1")]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "commands"), COMMANDS)
def test_commands_are_recorded_as_bash_gives_them(text: str, commands: list[tuple[str, ...]], tmp_path: Path) -> None:
    recording = recorded(text, tmp_path, "one")
    assert list(recording.commands) == commands, recording.errors
    assert not recording.timed_out


def test_files_beside_the_caller_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "env.sh").write_text("CP=4\n")
    (tmp_path / "more.sh").write_text("TP=2\n")
    text = "source scripts/env.sh\n. ./more.sh\ncd $(dirname $0)/..\npython a.py $CP $TP $PWD"
    (tmp_path / "scripts" / "launch.sh").write_text(text)
    recording = record("scripts/launch.sh")
    assert recording.commands == (("python", "a.py", "4", "2", str(tmp_path)),)


def test_the_environment_has_no_secret_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "secret")
    text = 'python a.py "${SOME_TOKEN:-none}" "$(ls -A ~)" "${CP:-1}" "${http_proxy:-none}"'
    ((*_, token, home, size, proxy),) = recorded(text, tmp_path, CP="8").commands
    assert (token, size, proxy) == ("none", "8", "none") and "run" in home.split()


def test_folders_of_the_run_are_those_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recording = recorded("$(which python) $(pwd)/a.py $HOME/data", tmp_path)
    assert recording.commands == (("python", f"{tmp_path}/a.py", str(Path.home() / "data")),)


def test_a_script_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "TIME_LIMIT", 3.0)
    begin = time.monotonic()
    recording = recorded("python a.py\nread x\n(while :; do :; done) &\nwhile :; do sleep 1; done", tmp_path)
    assert recording.timed_out and recording.commands == (("python", "a.py"),)
    assert time.monotonic() - begin < 20
    while time.monotonic() - begin < 20:  # killed processes leave the list a moment later
        left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        if str(tmp_path / "launch.sh") not in left:
            return
    raise AssertionError(left)


def test_there_is_no_network_where_the_system_lets_us(tmp_path: Path) -> None:
    text = 'if exec 3<> /dev/tcp/127.0.0.1/$1; then python reached.py; fi\npython end.py "$(cat /proc/net/dev | wc -l)"'
    recording = recorded(text, tmp_path, "9")
    assert recording.commands == (("python", "end.py", "3"),)  # two lines of a head, and loopback


WRITES = """
rm -rf logs/old.txt; mkdir -p made; sed -i s/as/x/ logs/old.txt; touch touched
echo x >> logs/old.txt
echo x > logs/old.txt
echo x > top.txt
echo x >> "$1/absolute.txt"
cd "$(dirname "$0")" && echo x > logs/old.txt
torchrun pretrain_gpt.py --a > logs/new.txt 2>&1
cd / && torchrun pretrain_gpt.py --b >> "$1/launch/logs/old.txt"
echo x > "$1/elsewhere/y"
python end.py "$(cat "$1/launch/logs/old.txt")"
"""


def test_nothing_that_a_script_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = tmp_path / "launch", tmp_path / "elsewhere"
    (folders[0] / "logs").mkdir(parents=True)
    folders[1].mkdir()
    (folders[0] / "logs" / "old.txt").write_text("as it was")
    monkeypatch.chdir(folders[0])
    recording = recorded(WRITES, folders[0], str(tmp_path))
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == ["elsewhere", "launch", "launch/launch.sh", "launch/logs", "launch/logs/old.txt"]
    assert (folders[0] / "logs" / "old.txt").read_text() == "as it was"
    shown = [command[-1] for command in recording.commands]
    assert shown == ["logs/old.txt", "touched", "--a", "--b", "x"]  # as if they had been written


def test_no_other_process_and_no_program_with_a_path_is_reached(tmp_path: Path) -> None:
    """Builtins, and programs by their paths: of the machine, and of the script's folder."""
    program = tmp_path / "size.py"
    program.write_text("#!/usr/bin/env python3\nprint(4)\n")
    program.chmod(0o755)
    (tmp_path / "kept").write_text("as it was")
    other = subprocess.Popen(["sleep", "60"])
    try:
        text = (
            'cd "$(dirname "$0")"\nkill -9 $1; echo 500 > /proc/$1/oom_score_adj; /bin/rm -f $PWD/kept\n'
            '/usr/bin/touch $PWD/made; python a.py "$(./size.py)"; set -m; while :; do :; done &\n'
        )
        recording = recorded(text, tmp_path, str(other.pid))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert ("python", "a.py", "") in recording.commands
    assert {words[0].rpartition("/")[2] for words in recording.commands} == {"rm", "touch", "python", "size.py"}
    assert sorted(os.listdir(tmp_path)) == ["kept", "launch.sh", "size.py"]
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path / "launch.sh") not in left


@pytest.mark.parametrize("seal", ["exit 97", None], ids=["refused by the system", "no unshare"])
def test_a_script_that_cannot_be_sealed_is_not_run(
    seal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seal is None:
        monkeypatch.setattr(launch.shutil, "which", lambda name: None if name == "unshare" else f"/bin/{name}")
    else:
        monkeypatch.setattr(launch, "_SEAL", seal)
    with pytest.raises(ConfigError, match=r"unshare .* does not work here; give the flags"):
        recorded(f"echo x > {tmp_path}/made", tmp_path)
    assert os.listdir(tmp_path) == ["launch.sh"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"a\0b", "is no text"),
        (b"#" * (launch.MAX_SCRIPT_BYTES + 1), "larger than any launch script"),
        (b"python a.py\r\n", "line ends of Windows"),
        (None, "No such file"),
    ],
)
def test_what_is_no_script_is_one_line(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "launch.sh").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        record(tmp_path / "launch.sh")
    assert "\n" not in str(caught.value)
