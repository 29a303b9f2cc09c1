"""The page as Markdown."""

from collections.abc import Sequence

from pdrelay_tools.proving.core.latencies import PERCENTILES, in_ms
from pdrelay_tools.proving.core.run_report import RunReport, plain, sign


def write_markdown(report: RunReport) -> str:
    """Return the page."""
    lines = [f"# pdrelay prove: {_cell(report.subject)}", "", f"**{report.verdict}**", ""]
    lines += [
        f"- Compared with: {_cell(report.reference)}",
        f"- {report.when}, {report.seconds:.0f} s, pdrelay {report.version}, seed {report.seed}",
    ]
    lines += [f"- {_cell(note)}" for note in report.notes]
    lines += ["", "## Findings", ""]
    findings = [
        (check.name, str(finding.name), finding.evidence, finding.means)
        for check in report.checks
        for finding in check.findings
    ]
    lines += _table(("check", "finding", "seen", "means"), findings) if findings else ["None."]
    lines += ["", "## Checks", ""]
    rows = [
        (
            check.group,
            check.name,
            sign(check.state),
            str(check.requests),
            f"{check.seconds:.1f} s",
            "" if check.idle_s is None else f"{check.idle_s:.1f} s",
            "; ".join(filter(None, (check.about, check.details))),
        )
        for check in report.checks
    ]
    lines += _table(("group", "check", "result", "requests", "time", "idle after", "what"), rows)
    if report.loads:
        lines += [
            "",
            "## Load",
            "",
            *_table(("", "requests", "failed", "tokens/s", "TTFT ms", "ITL ms"), _loads(report)),
        ]
        lines += ["", f"Times: {' / '.join(f'p{percent}' for percent in PERCENTILES)}."]
    return "\n".join(lines) + "\n"


def _loads(report: RunReport) -> list[tuple[str, ...]]:
    return [
        (
            load.label,
            str(load.requests),
            str(load.failed),
            f"{load.tokens_per_second:.0f}",
            in_ms(load.ttft),
            in_ms(load.itl),
        )
        for load in report.loads
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return lines + [f"| {' | '.join(map(_cell, row))} |" for row in rows]


def _cell(text: str) -> str:
    """Escape Markdown and HTML: an engine's text may be in it."""
    flat = plain(text)
    for character in "\\`*_[]|#!":
        flat = flat.replace(character, f"\\{character}")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
