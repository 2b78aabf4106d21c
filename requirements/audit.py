"""Known vulnerabilities of the pinned packages, by pip-audit.  Standard library.

    python requirements/audit.py .venv-tools

PyPI tells of them, package by package. Where it does not, as many mirrors do not, one line says so and nothing is
checked: a test run must not depend on a network. A check that found nothing holds for a day, for the same pins.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

REQUIREMENTS = Path(__file__).resolve().parent
LOCKS = sorted((REQUIREMENTS / "lock").glob("*.txt"))
IGNORED = REQUIREMENTS / "audit_ignored.txt"
SOURCE = "https://pypi.org/pypi/{}/{}/json"  # what pip-audit asks for
DAY = 24 * 3600.0
ANSWER_SECONDS = 3.0
LIMIT_SECONDS = 120.0


def main(folder: str) -> int:
    environment = Path(folder).resolve()
    stamp = environment / "audited"
    pins = pinned()
    ignored = [line.split()[0] for line in IGNORED.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    state = hashlib.sha256("".join((*pins, *ignored)).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == state and time.time() - stamp.stat().st_mtime < DAY:
        return 0
    if reason := unreachable(SOURCE.format(*re.split("==| ", pins[0].strip())[:2])):
        print(f"pip-audit: left out, as its data cannot be reached ({reason})")
        return 0
    make = [sys.executable, str(REQUIREMENTS / "environment.py"), str(environment), "--requirements", "tools.txt"]
    subprocess.run([*make, "--bare", "--torch-index", ""], check=True)
    with TemporaryDirectory() as work:
        listed, report = Path(work) / "pins.txt", Path(work) / "report.json"
        listed.write_text("".join(pins), encoding="utf-8")
        command = [str(environment / "bin" / "pip-audit"), "-r", str(listed), "--disable-pip", "--no-deps"]
        command += [word for name in ignored for word in ("--ignore-vuln", name)]
        command += ["--progress-spinner", "off", "--format", "json", "--output", str(report)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"pip-audit: left out, as it had not ended after {LIMIT_SECONDS:g} s")
            return 0
        packages = json.loads(report.read_text("utf-8"))["dependencies"] if report.is_file() else None
    if packages is None:  # it ended on its own error; which the network may have caused
        print(f"pip-audit: left out, as it failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return 0
    faults = [(package, fault) for package in packages for fault in package.get("vulns", [])]
    for package, fault in faults:
        fixed = ", ".join(fault["fix_versions"]) or "no version yet"
        print(f"pip-audit: {package['name']} {package['version']}: {fault['id']}, mended in {fixed}")
    if faults:
        print(
            f"pip-audit: raise the pin and run `make lock`, or say in requirements/{IGNORED.name} why it is no concern"
        )
        return 1
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        print("pip-audit: left out, as it looked at no package")
        return 0
    print(f"pip-audit: nothing known against {len(packages) - len(unknown)} packages; not on PyPI: {unknown or 'none'}")
    stamp.write_text(state)
    return 0


def pinned() -> list[str]:
    """All pins of all locks, once each. PyPI knows torch without the name of the build."""
    lines = {line for lock in LOCKS for line in re.findall(r"^\w.*==.*(?= \\$)", lock.read_text("utf-8"), re.MULTILINE)}
    return sorted({line.replace("===", "==").replace("+cpu", "") + "\n" for line in lines})


def unreachable(url: str) -> str | None:
    """Why PyPI does not tell of vulnerabilities, or None."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            return None if "vulnerabilities" in json.load(answer) else f"{url} names none"
    except (OSError, ValueError) as error:
        return f"{url}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
