"""The fuzzers: each makes one input of one kind from a generator, and gives it to what reads it.

    python -m tests.fuzz.fuzzers FUZZER FIRST COUNT ...    inputs FIRST .. FIRST + COUNT - 1 of some fuzzers

prints the faults as JSON. An input is made from its fuzzer's name and its number alone. A fuzzer refuses its input by an
error of this project, or takes it; everything else is a fault.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from mindspeed_cp.algorithms import ALGORITHMS, algorithm_options, build_plan
from mindspeed_cp.cli import main as cli
from mindspeed_cp.cli.lengths import draw_batches, read_lengths
from mindspeed_cp.config.settings import Settings, load_settings
from mindspeed_cp.convert.launch import Recording, find_launch
from mindspeed_cp.convert.translate import convert_launch
from mindspeed_cp.data.corpus import open_corpus
from mindspeed_cp.data.stream import PackedStream
from mindspeed_cp.errors import ConfigError, OperatorError, PeerError, PlanError
from mindspeed_cp.layout import Documents
from mindspeed_cp.plan import AttentionConfig, Topology, verify_plan
from mindspeed_cp.train import launch
from mindspeed_cp.train.checkpoint import checkpoints_to_resume
from mindspeed_cp.train.run_files import read_metrics
from tests.fuzz import mutations
from tests.train.bookkeeping import with_checkpoint

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
LAUNCHES = sorted((Path(__file__).parents[1] / "convert" / "launches").glob("*.sh"))
KEYS = [f"{name}.{key}" for name, info in Settings.model_fields.items() for key in info.annotation.key_names()]  # type: ignore[union-attr]


@cache
def texts() -> list[str]:
    return [path.read_text() for path in CONFIGS]


@cache
def launches() -> list[str]:
    return [path.read_text() for path in LAUNCHES]


def overrides(generator: random.Random) -> list[str]:
    """Values of --set, of which most are one that no key takes."""
    values = (*mutations.NUMBERS, *mutations.TEXTS)
    return [f"{generator.choice(KEYS)}={generator.choice(values)}" for _ in range(generator.choice((0, 0, 1, 2)))]


def settings(generator: random.Random, folder: Path) -> None:
    """A settings file with damage, and overrides."""
    path = folder / "settings.yaml"
    text = mutations.text(generator, generator.choice(texts()))
    content = text.encode("utf-8", "surrogatepass" if generator.random() < 0.1 else "replace")
    path.write_bytes(mutations.content(generator, content) if generator.random() < 0.2 else content)
    load_settings(path, overrides(generator))


def commands(generator: random.Random, folder: Path) -> None:
    """Recorded commands with damage, converted: damaged scripts are not run."""
    words = [word for line in generator.choice(launches()).split("\n") for word in line.split() if word != "\\"]
    for _ in range(generator.randint(0, 3)):
        place = generator.randrange(len(words))
        words[place : place + generator.randint(0, 2)] = mutations.text(generator, words[place]).split()
    recording = Recording((("torchrun", "pretrain_gpt.py", *words),), "", False)
    training = find_launch(recording, "launch.sh")
    conversion = convert_launch(training)
    assert (conversion.settings is None) == bool(conversion.refused)


def lengths(generator: random.Random, folder: Path) -> None:
    """Lengths as text and in files of all formats; a batch is drawn from what is taken."""
    listed = [generator.choice((0, 1, 5, 700, 4100)) for _ in range(generator.randint(0, 9))]
    kind = generator.choice(("text", ".txt", ".npy", ".npz", ".yaml"))
    path, stream = folder / f"lengths{kind}", io.BytesIO()
    text = mutations.text(generator, ",".join(map(str, listed)))
    if kind == "text":
        given = text.replace("\0", "")  # which no command line has
    else:
        given = str(path)
        if kind == ".npy":
            np.save(stream, np.array(listed, generator.choice((np.int64, np.int32, np.float32))))
        elif kind == ".npz":
            np.savez_compressed(stream, lengths=np.array(listed, np.int64))
        elif kind == ".yaml":
            bins = "name: x\nedges: [1, 5, 90]\npercent: [40, 60]\n"
            stream.write(mutations.text(generator, bins).encode("utf-8", "replace"))
        else:
            stream.write(text.encode("utf-8", "replace"))
        path.write_bytes(mutations.content(generator, stream.getvalue()))
    read_lengths(given)
    draw_batches(given, 1000, 1, 0)


def plans(generator: random.Random, folder: Path) -> None:
    """Arguments of build_plan, right and wrong; tests/plan/mutations.py damages plans."""

    def some(*valid: Any) -> Any:
        return generator.choice(mutations.VALUES) if generator.random() < 0.03 else generator.choice(valid)

    documents = Documents([some(0, 1, 30, 211, 700) for _ in range(generator.randint(0, 6))])
    topology = Topology(some(1, 1, 2), some(1, 2, 3, 4))
    attention = AttentionConfig(
        some(1, 4, 8), some(None, 1, 2, 4), some(16, 64), some(None, 16), some("causal", "full"),
        some(None, (9, 0), (-1, -1), (5, 7)), some(False, True), some(0.0, 0.1), some(None, 1.0),
    )  # fmt: skip
    algorithm = some(*ALGORITHMS)
    options = {}
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        names = list(algorithm_options(algorithm))
        for name in generator.sample(names, min(len(names), generator.choice((0, 0, 1, 2)))):
            options[name] = some(1, 2, 4, True, "balanced", 100)
    if topology.ranks > 64:
        raise ConfigError("more ranks than are tried here")
    verify_plan(build_plan(documents, topology, attention, algorithm, **options))


def checkpoints(generator: random.Random, folder: Path) -> None:
    """The manifest and the metrics that a resumed run reads."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"text": "abc"}\n' * 9)
    stream = PackedStream(open_corpus(corpus), 16, 0)
    next(stream)
    run = folder / "run"
    made = with_checkpoint(run) if not run.exists() else Settings(output={"folder": str(run)})  # type: ignore[arg-type]
    newest = run / "checkpoints" / "iter_0000003"
    files = {
        "manifest.json": newest / "manifest.json",
        "metrics.jsonl": run / "metrics.jsonl",
    }
    files["metrics.jsonl"].write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 4.5}\n')
    before = {name: path.read_bytes() for name, path in files.items()}
    name = generator.choice(list(files))
    whole = before[name]
    if name.endswith(".json") and generator.random() < 0.7:
        damage = mutations.json_text(generator, json.loads(whole)).encode("utf-8", "replace")
    else:
        damage = mutations.content(generator, mutations.text(generator, whole.decode()).encode("utf-8", "replace"))
    files[name].write_bytes(damage)
    try:
        records, _ = checkpoints_to_resume(made)
        read_metrics(files["metrics.jsonl"])
        for record in records.values():
            if record["data"] is not None:
                stream.load_state_dict(record["data"])
                next(stream)
    finally:
        for other, path in files.items():
            path.write_bytes(before[other])


def corpora(generator: random.Random, folder: Path) -> None:
    """A file of documents with damage, read to its end."""
    path = folder / f"corpus.{generator.choice(('jsonl', 'jsonl', 'jsonl', 'txt'))}"
    lines = [json.dumps({"text": "word " * generator.randint(0, 9)}) for _ in range(generator.randint(0, 5))]
    if lines and generator.random() < 0.3:
        lines[-1] = mutations.json_text(generator, {"text": "x", "more": [1]})
    text = mutations.text(generator, "\n".join(lines)).encode("utf-8", "surrogatepass")
    path.write_bytes(mutations.content(generator, text) if generator.random() < 0.5 else text)
    corpus = open_corpus(path)
    for document in range(len(corpus.lengths)):
        corpus.tokens(document)
    next(PackedStream(corpus, 16, 0))


OPTIONS = {
    "plan": ("--lengths", "--mask", "--ranks", "--nodes", "--ranks-per-node", "--algorithm", "--heads", "--set", "--verify", "--json"),
    "simulate": ("--lengths", "--cluster", "--nodes", "--ranks-per-node", "--tokens-per-rank", "--batches", "--algorithms", "--json"),
    "train": ("--nproc", "--set", "--json"),
    "doctor": ("--report", "--json"),
    "calibrate": ("--base", "--dtype", "--longest", "--heads"),
}  # fmt: skip
WORDS = (
    "ring", "all", "a2", "causal", "full", "700,30,410", "64", "4", "2", "1", "wikipedia", "bf16", "model.num_layers=3",
)  # fmt: skip


def arguments(generator: random.Random, folder: Path) -> None:
    """A command line; the code is that of bad input or of success, with one line for bad input."""
    command = generator.choice(("plan", "plan", "simulate", "train", "doctor", "calibrate"))
    given = [command]
    if command == "plan":
        given += ["--lengths", "700,30,410"] * (generator.random() < 0.7)
    if command == "simulate":
        given += ["--lengths", "700,30", "--nodes", "1", "--ranks-per-node", "2", "--algorithms", "ring"]
    if command == "train":
        given += ["--set", f"output.folder={folder / 'run'}", "--set", f"data.corpus={CONFIGS[0].parent / 'launch'}"]
    if command == "calibrate":
        given.append(str(folder / "none" / "x.yaml"))  # its folder is missing: nothing is measured
    if command == "doctor":
        given += ["--device", generator.choice(mutations.TEXTS).replace("\0", "") + "?"]
    for _ in range(generator.randint(0, 3)):
        given.append(generator.choice(OPTIONS[command]))
        word = generator.choice((*WORDS, *WORDS, *mutations.TEXTS, *mutations.NUMBERS)).replace("\0", "")
        given += [word] * (generator.random() < 0.9)
    if generator.random() < 0.05:
        given.insert(generator.randint(0, len(given)), generator.choice(mutations.TEXTS).replace("\0", ""))
    out, err = io.StringIO(), io.StringIO()
    start, launch._run_local_ranks = launch._run_local_ranks, lambda *a, **o: ([], None)  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(given)
    finally:
        launch._run_local_ranks = start
    lines = [line for line in err.getvalue().splitlines() if not line.startswith("note: ")]
    if code not in (0, 1, 2) or (code == 2 and len(lines) > 1) or any(len(line) > 2100 for line in lines):
        raise AssertionError(f"code {code}, {len(lines)} lines for {given}: {lines[:3]}")


#: How many of 100,000 inputs are of each kind.
FUZZERS: dict[Callable[[random.Random, Path], None], int] = {
    settings: 30_000, lengths: 20_000, commands: 5_000, plans: 5_000, checkpoints: 20_000, corpora: 15_000, arguments: 5_000,
}  # fmt: skip


# What must come of every input: a result or an error of one line, within 5 s of CPU time and 1 GB of memory.

SECONDS, BYTES = 5.0, 10**9
MESSAGE_CHARACTERS = 2000
ADDRESSES = 4 * 10**9  # a single allocation beyond this is refused by the system


class TooSlow(BaseException):
    """An input took more CPU time than any may take."""


def too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow(f"more than {SECONDS:g} s")


def peak_memory() -> int:
    """Return the most bytes that this process has held; the system's ru_maxrss includes those of its parent."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def fault(name: str, number: int, folder: Path) -> str | None:
    """What is wrong with what comes of an input, or None."""
    fuzzer = next(fuzzer for fuzzer in FUZZERS if fuzzer.__name__ == name)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        fuzzer(random.Random(f"{name} {number}"), folder)
    except (ConfigError, PlanError, PeerError, OperatorError) as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if len(str(error)) > MESSAGE_CHARACTERS:
            return f"a message of {len(str(error))} characters"
    except BaseException as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        return "".join(traceback.format_exception(error)[-6:])[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if peak_memory() > BYTES:
        return "more than 1 GB"
    return None


def main(words: list[str]) -> None:
    """Give the inputs that the arguments name to their fuzzers."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGVTALRM, too_slow)
    warnings.simplefilter("ignore")  # NumPy's, of damaged numbers
    faults: dict[str, str] = {}
    done = 0
    for name, first, count in zip(words[::3], map(int, words[1::3]), map(int, words[2::3]), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            for number in range(first, first + count):
                wrong = fault(name, number, Path(folder))
                done += 1
                if wrong is not None:
                    faults[f"{name} {number}"] = wrong
                if sum(key.startswith(f"{name} ") for key in faults) == 3 or wrong == "more than 1 GB":
                    break
    print(json.dumps({"inputs": done, "faults": faults}))


if __name__ == "__main__":
    main(sys.argv[1:])
