"""The page as JSON, for scripts: times in seconds, shares from 0 to 1."""

import json
from dataclasses import asdict

from pdrelay_tools.proving.core.latencies import Latencies, percentiles
from pdrelay_tools.proving.core.run_report import RunReport


def write_json(report: RunReport) -> str:
    """Return the page."""
    page = {
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "subject": report.subject,
        "reference": report.reference,
        "pdrelay_version": report.version,
        "when": report.when,
        "seed": report.seed,
        "seconds": report.seconds,
        "logprob_tolerance": report.tolerance,
        "notes": list(report.notes),
        "checks": [
            asdict(check)
            | {
                "findings": [
                    {"name": finding.name, "seen": finding.evidence, "means": finding.means}
                    for finding in check.findings
                ]
            }
            for check in report.checks
        ],
        "loads": [_load(load) for load in report.loads],
        "kv_cache_usage": {
            name: [list(sample) for sample in samples] for name, samples in report.usage.items()
        },
    }
    return json.dumps(page, indent=2) + "\n"


def _load(load: Latencies) -> dict[str, object]:
    times = {
        name: {f"p{percent}": value for percent, value in percentiles(values).items()}
        for name, values in (("ttft_s", load.ttft), ("itl_s", load.itl))
    }
    counts: dict[str, object] = {
        "label": load.label,
        "requests": load.requests,
        "failed": load.failed,
    }
    return counts | {"tokens_per_second": load.tokens_per_second} | times
