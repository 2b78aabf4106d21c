"""What the documentation computes is up to date, what it links exists, what it shows runs, and two languages say the same."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from mindspeed_cp.algorithms import ALGORITHMS
from mindspeed_cp.config import SuiteSettings
from mindspeed_cp.integrations.huggingface.families import FAMILIES
from tests.ports import free_port
from tests.processes import preload
from tests.programs import run_programs
from tools.capabilities import FEATURES
from tools.docs_tables import BATCHES, PAGES

preload("mindspeed_cp.engine")

ROOT = Path(__file__).parent.parent
DOCS, EXAMPLES, README = ROOT / "docs", ROOT / "docs" / "examples", ROOT / "README.md"
SHOWN = [README, *sorted(DOCS.glob("*.md"))]
LINKED = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "configs").rglob("*.md"),
          *(ROOT / "benchmarks" / "results").glob("*.md")]  # fmt: skip
CHINESE = [ROOT / "README.zh.md", *sorted(DOCS.glob("*.zh.md"))]

#: Folders from which pages name files.
FOLDERS = (
    ROOT,
    *(ROOT / folder for folder in ("mindspeed_cp", "mindspeed_cp/megatron", "tests", "tests/npu", "configs/launch")),
)

#: Paths that the documentation names and that only runs write.
WRITTEN_BY_RUNS = {"runs/", "RUN/trace/step-0000003-rank-0001.json"}


def text_of(page: Path) -> str:
    return page.read_text("utf-8")


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)


def run_block(block: str) -> None:
    exec(compile(block, "docs", "exec"), {})


# what is computed


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name: str) -> None:
    page = text_of(ROOT / name)
    assert PAGES[name](page) == page, f"{name} is stale: run `make docs-tables`"


def test_every_algorithm_is_explained_and_the_table_of_bytes_is_of_the_batches_that_the_text_names() -> None:
    text = text_of(DOCS / "algorithms.md")
    assert all(f"**{name}.**" in text for name in ALGORITHMS) and set(FEATURES["algorithm"]) == set(ALGORITHMS)
    assert sum(BATCHES[0]) == sum(BATCHES[1]) == 32768 and ",".join(map(str, BATCHES[1])) in text


# what is linked


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    """Files, folders, modules, headings, and programs; one that has gone since its table was made is marked by a dagger."""
    text = text_of(page)
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    paths = re.findall(r"`([\w-]+(?:/[\w.-]+)*/(?:[\w-]+\.(?:py|md|yaml|json|sh|tsv)|))`", text)
    names = re.findall(r"(?<![\w/.-])mindspeed_cp(?:\.\w+)+", text)
    calls = re.findall(r"python -m ((?:benchmarks|tests|tools)(?:\.\w+)+)[^`\n]*`?(†?)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [path for path in paths if not any((folder / path).exists() for folder in FOLDERS)]
    missing += [name for name in names if not resolves(name)]
    missing += [module for module, gone in calls if not gone and importlib.util.find_spec(module) is None]
    for file, heading in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", text):
        target = page.parent / file if file else page
        if target.suffix == ".md" and target.exists() and heading not in headings(target):
            missing.append(f"{target.name}#{heading}")
    assert not set(missing) - WRITTEN_BY_RUNS


def test_pages_name_all_hugging_face_families_and_their_number() -> None:
    (table,) = re.findall(
        r"^\| model_type \|.*\n\|[-|]*\n((?:\|.*\n)*)", text_of(DOCS / "huggingface.md"), re.MULTILINE
    )
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(FAMILIES)
    for page, sentence in (("README.md", r"attention of (\d+) families"), ("README.zh.md", r"(\d+) 个模型家族")):
        assert re.findall(sentence, text_of(ROOT / page)) == [str(len(FAMILIES))]


def headings(page: Path) -> set[str]:
    """Return the names of a page's headings in links, as GitHub makes them."""
    lines = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def resolves(name: str) -> bool:
    """True if a dotted name is a module, or an attribute of one."""
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
        return True
    except ModuleNotFoundError:
        pass
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return False


# what runs


def commands(page: Path, start: str) -> set[str]:
    """Return the commands of a page that begin with a text; a command may go over two lines."""
    text = " ".join(re.sub(r" +# .*", "`", text_of(page)).replace("\\\n", " ").replace("\n```", "`").split())
    return set(re.findall(rf"mindspeed-cp ({re.escape(start)} [^`]*?) *(?:`|(?= mindspeed-cp ))", text))


def run_command(command: str, folder: Path) -> int:
    """Run a command that reads and writes files in a folder."""
    from mindspeed_cp.cli.main import run

    return run([str(folder / word) if word.endswith((".png", ".txt")) else word for word in command.split()])


def test_the_page_on_attention_runs() -> None:
    scope: dict[str, object] = {}
    for block in code_blocks(DOCS / "attention.md", "python"):
        exec(compile(block, "docs/attention.md", "exec"), scope)
    assert scope


def test_the_page_on_simulation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = code_blocks(DOCS / "simulate.md", "python")
    run_block(block)
    assert "hierarchical: " in capsys.readouterr().out


def test_the_algorithm_that_a_page_writes_is_proved() -> None:
    (block,) = (block for page in SHOWN for block in code_blocks(page, "python") if "register_algorithm(" in block)
    try:
        run_block(block)  # ends with verify_plan
        assert "one_by_one" in ALGORITHMS
    finally:
        ALGORITHMS.pop("one_by_one", None)


def test_commands_that_plan_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = set().union(*(commands(page, "plan --lengths") for page in SHOWN))
    assert shown
    (tmp_path / "lengths.txt").write_text("700\n30\n4100\n")
    for command in sorted(shown):
        assert run_command(command, tmp_path) == 0, command
        assert capsys.readouterr().out


def test_the_first_pages_simulate_the_lengths_that_they_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start page and the README end in the same command and a picture."""
    shown = commands(DOCS / "start.md", "simulate --lengths")
    assert len(shown) == 1 and shown == commands(README, "simulate --lengths")
    monkeypatch.chdir(tmp_path)
    (block,) = code_blocks(DOCS / "start.md", "python")
    run_block(block)
    assert np.loadtxt("lengths.txt").tolist() == [5000, 37, 1200]
    assert run_command(*shown, tmp_path) == 0
    assert "times as fast as the even ring" in capsys.readouterr().out
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_the_table_of_the_start_page_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command("simulate --lengths wikipedia --cluster a2 --nodes 4", tmp_path) == 0
    printed = {
        line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1] == " " and line.strip()
    }
    text = text_of(DOCS / "start.md")
    rows = re.findall(r"^ (\w+) +([\d.]+) +([\d.]+) +([\d.]+) % +([\d.]+) +([\d.]+ MiB) +(.+)$", text, re.MULTILINE)
    assert len(rows) == 4 and all(cell in printed[name] for name, *cells in rows for cell in cells)


def run_example(name: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_the_sweep_of_contexts_and_nodes_prints_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--lengths wikipedia --contexts 32768 1048576 --png {tmp_path}/out.png"
    run_example("scaling.py", *words.split(), monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all("ms a layer" in line for line in lines)
    assert (tmp_path / "out.png").stat().st_size > 10_000
    slowest, fastest = (float(lines[i].split(":")[1].split()[0]) for i in (5, 9))  # 1M tokens on 1 and 16 nodes
    assert 8 < slowest / fastest <= 16.5


def test_the_picture_of_the_readme_is_drawn_on_one_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The README and the picture's name for it have the times that the simulator gives."""
    names = run_example("ring_beside_hierarchical.py", f"{tmp_path}/out.png", monkeypatch=monkeypatch)
    assert (tmp_path / "out.png").stat().st_size > 10_000
    ring, hierarchical = re.findall(r"'\w+': '([\d.]+) ms'", capsys.readouterr().out)
    text, documents = text_of(README), names["DOCUMENTS"]
    assert f"takes {float(ring):.0f} ms" in text and f"takes {float(hierarchical):.0f} ms" in text
    assert f"same {len(documents)} documents" in text  # type: ignore[arg-type]


def test_the_settings_section_of_the_readme_is_valid(tmp_path: Path) -> None:
    (section,) = code_blocks(README, "yaml")
    (tmp_path / "suite.yaml").write_text(section)
    suite = SuiteSettings.from_yaml(tmp_path / "suite.yaml")
    assert suite.algorithm == "hybrid" and suite.options == {"ulysses_degree": 4} and suite.topology.nodes == 2


def script(words: list[str]) -> None:
    runpy.run_path(words[0], run_name="__main__")


def test_the_example_of_the_readme_runs_on_two_ranks(tmp_path: Path) -> None:
    """With the variables that torchrun gives."""
    example = next(code for code in code_blocks(README, "python") if "init_process_group" in code)
    (tmp_path / "example.py").write_text(example)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ended = run_programs(script, [str(tmp_path / "example.py")], ranks)
    assert [done.returncode for done in ended] == [0, 0], [done.stderr for done in ended]
    output = "".join(done.stdout for done in ended)
    held = [int(count) for count in re.findall(r"rank \d: (\d+) of 6237 tokens", output)]
    assert len(held) == 2 and sum(held) == 6237


# two languages


def names(text: str) -> set[str]:
    """What stands between backticks outside of blocks."""
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", re.sub(r"(?ms)^```.*?^```$", "", text))}


@pytest.mark.parametrize("chinese", CHINESE, ids=lambda page: page.name)
def test_a_translation_has_the_code_and_the_names_of_its_page(chinese: Path) -> None:
    original, translation = text_of(chinese.with_name(chinese.name.replace(".zh.", "."))), text_of(chinese)
    codes = [
        [re.sub(r"\s*#(?!!).*", "", block) for block in re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)]
        for text in (original, translation)
    ]
    assert codes[0] == codes[1]
    if chinese.parent.name == "docs":
        assert names(translation) <= names(original)
    if chinese.name in ("README.zh.md", "start.zh.md"):
        for pattern in (r"^#+ ", r"^\|", r"^- ", r"^```"):
            counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (original, translation)]
            assert counts[0] == counts[1], pattern
