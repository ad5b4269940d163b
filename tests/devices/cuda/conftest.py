"""Kernels under the sanitizer, where `--sanitize-kernels` asks for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

_counts: Counter[str] = Counter()
_benign: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _sanitized_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("--sanitize-kernels"):
        yield
        return
    from tests.devices.cuda.sanitizer import sanitized

    with sanitized() as report:
        yield
    _counts.update(report.counts)
    _benign.update(report.benign)
    assert not report.faults, "\n".join(f"{what} {where}" for what, where in report.faults.items())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _counts:
        terminalreporter.write_line(f"sanitizer: {dict(_counts)}")
    for what, where in _benign.items():
        terminalreporter.write_line(f"benign: {what} {where}")
