"""The page as one HTML file: with plots, without scripts; an engine's text is escaped."""

import html
from collections.abc import Sequence
from typing import Final

from pdrelay_tools.proving.core.finding import CheckReport
from pdrelay_tools.proving.core.latencies import Latencies, in_ms
from pdrelay_tools.proving.core.run_report import RunReport, plain, sign
from pdrelay_tools.proving.report import plots

_STYLE: Final = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem;color:#1f2328;background:#fff}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #d1d9e0;padding:.3rem .5rem;text-align:left;
vertical-align:top}svg{width:100%;max-width:40rem;font-size:11px}.passed{color:#1a7f37}.failed,.aborted{color:#d1242f}
.skipped{color:#59636e}li{overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}text{fill:#adbac7}}
"""


def write_html(report: RunReport) -> str:
    """Return the page."""
    title = f"pdrelay prove: {report.subject}"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src '
        "'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width">',
        f"<title>{_escaped(title)}</title><style>{_STYLE}</style><h1>{_escaped(title)}</h1>",
        f"<p><strong>{_escaped(report.verdict)}</strong></p><ul>",
        *(f"<li>{_escaped(note)}</li>" for note in _about(report)),
        "</ul>",
        *_findings(report.checks),
        *_checks(report.checks),
        *_loads(report.loads),
        *_usage(report),
    ]
    return "".join([*parts, "</html>\n"])


def _about(report: RunReport) -> list[str]:
    return [
        f"Compared with: {report.reference}",
        f"{report.when}, {report.seconds:.0f} s, pdrelay {report.version}, seed {report.seed}",
        *report.notes,
    ]


def _findings(checks: Sequence[CheckReport]) -> list[str]:
    rows = [
        f"<tr><td>{_escaped(check.name)}<td>{_escaped(finding.name)}<td>{_escaped(finding.evidence)}<td>{_escaped(finding.means)}"
        for check in checks
        for finding in check.findings
    ]
    head = "<h2>Findings</h2>"
    return (
        [head, *_table(("check", "finding", "seen", "means"), rows)]
        if rows
        else [head, "<p>None.</p>"]
    )


def _checks(checks: Sequence[CheckReport]) -> list[str]:
    rows: list[str] = []
    for check in checks:
        idle = "" if check.idle_s is None else f"{check.idle_s:.1f} s"
        rows.append(
            f"<tr><td>{_escaped(check.group)}<td>{_escaped(check.name)}<td "
            f'class="{check.state}">{sign(check.state)}'
            f"<td>{check.requests}<td>{check.seconds:.1f} s<td>{idle}<td>{_escaped(check.about)}"
            + (f"<br><small>{_escaped(check.details)}</small>" if check.details else "")
        )
    return [
        "<h2>Checks</h2>",
        *_table(("group", "check", "result", "requests", "time", "idle after", ""), rows),
    ]


def _loads(loads: Sequence[Latencies]) -> list[str]:
    if not loads:
        return []
    rows = [
        f"<tr><td>{_escaped(load.label)}<td>{load.requests}<td>{load.failed}"
        f"<td>{load.tokens_per_second:.0f}<td>{in_ms(load.ttft)}<td>{in_ms(load.itl)}"
        for load in loads
    ]
    head = (
        "",
        "requests",
        "failed",
        "tokens/s",
        "TTFT ms, p50 / p90 / p99",
        "ITL ms, p50 / p90 / p99",
    )
    ttft = {load.label: plots.shares(load.ttft) for load in loads}
    itl = {load.label: plots.shares(load.itl) for load in loads}
    return [
        "<h2>Load</h2>",
        *_table(head, rows),
        plots.lines(
            "time to the first token", "ms to the first token", "% of requests", ttft, y_max=100
        ),
        plots.lines("time between tokens", "ms between tokens", "% of tokens", itl, y_max=100),
    ]


def _usage(report: RunReport) -> list[str]:
    series = {
        name: [(at, 100 * share) for at, share in samples] for name, samples in report.usage.items()
    }
    drawn = plots.lines("KV cache in use", "seconds", "% of the KV cache in use", series)
    return ["<h2>KV cache</h2>", drawn] if drawn else []


def _table(head: Sequence[str], rows: Sequence[str]) -> list[str]:
    return ["<table><tr>", *(f"<th>{_escaped(name)}" for name in head), *rows, "</table>"]


def _escaped(text: str) -> str:
    return html.escape(plain(text))
