"""The metrics that are counters or histograms of the router, in the order of ``/metrics``."""

from typing import Final

from pdrelay_proxy.io.metric_families import CountedMetric

COUNTED: Final = (
    # requests, connections, and what operators do
    CountedMetric(
        "pdrelay_requests",
        ("path", "outcome"),
        "requests",
        "Requests that are over, by path and by how they ended for the client.",
    ),
    CountedMetric(
        "pdrelay_requests_routed",
        ("mode", "reason"),
        "routed",
        "Requests, or each of their prompts, by the way of the KV cache; single: no transfer, "
        "for this reason.",
    ),
    CountedMetric(
        "pdrelay_request_duration_seconds",
        ("path", "outcome"),
        "durations",
        "Seconds from a request's head to the end of its answer.",
    ),
    CountedMetric(
        "pdrelay_request_queue_time_seconds",
        ("path",),
        "queue_times",
        "Seconds that a request waited in the queue before it was served; 0 if it did not.",
    ),
    CountedMetric(
        "pdrelay_time_to_first_token_seconds",
        ("path",),
        "ttft",
        "Seconds from a request's head to the first event of its stream.",
    ),
    CountedMetric(
        "pdrelay_inter_token_latency_seconds",
        ("path",),
        "inter_token",
        "Seconds between two reads of a stream, each of one token or more.",
    ),
    CountedMetric(
        "pdrelay_client_write_timeouts",
        (),
        "write_timeouts",
        "Connections that were closed because the client had read nothing of its answer for "
        "too long.",
    ),
    CountedMetric(
        "pdrelay_log_lines_dropped",
        (),
        "log_lines_dropped",
        "Lines of the log that were dropped: its reader is too slow, its disk is full, or it "
        "is closed.",
    ),
    CountedMetric(
        "pdrelay_admin_actions",
        ("action", "outcome"),
        "admin",
        "What was asked of the admin API, and what became of it.",
    ),
    CountedMetric(
        "pdrelay_file_reloads",
        ("result",),
        "file_reloads",
        "Files of certificates or keys that changed and were read again, by result; failed: "
        "the old ones stay.",
    ),
    CountedMetric(
        "pdrelay_connections_refused",
        ("reason",),
        "connections_refused",
        "Connections of clients that were closed before their request was served, by reason.",
    ),
    CountedMetric(
        "pdrelay_retries",
        ("role", "reason"),
        "retries",
        "Legs that failed and were sent again, by the role of the engine and the reason.",
    ),
    CountedMetric(
        "pdrelay_turns",
        ("to", "outcome"),
        "turns",
        "Turns of engines to a role that are over, or were refused, by what became of them.",
    ),
    # legs
    CountedMetric(
        "pdrelay_legs",
        ("instance", "role", "outcome"),
        "legs",
        "Legs that are over, by engine and by how they ended; ok: also those that were not "
        "needed any more.",
    ),
    CountedMetric(
        "pdrelay_engine_tls_failures",
        ("instance", "reason"),
        "engine_tls_failures",
        "Connections to https engines that TLS did not let be, by reason; probes' among them.",
    ),
    CountedMetric(
        "pdrelay_prefill_seconds",
        ("instance",),
        "prefill_times",
        "Seconds from sending a prefill leg to the whole answer.",
    ),
    CountedMetric(
        "pdrelay_decode_ttft_seconds",
        ("instance",),
        "decode_ttft",
        "Seconds from sending a decode leg to the first event of its stream, or to the whole "
        "answer if it is none.",
    ),
    # from the prefill to the decode engine
    CountedMetric(
        "pdrelay_handoff_gap_seconds",
        (),
        "handoff",
        "Seconds between a prefill engine's answer and the sending of the decode leg.",
    ),
    CountedMetric(
        "pdrelay_kv_releases",
        ("instance", "result"),
        "releases",
        "Attempts to have a prefill engine free blocks that no engine will read.",
    ),
    CountedMetric(
        "pdrelay_prefill_hosts_replaced",
        ("instance",),
        "unreachable_hosts",
        "Answers of prefill engines that named a host out of reach: the engine's own was put in.",
    ),
    CountedMetric(
        "pdrelay_kv_transfers",
        ("instance", "result"),
        "transfers",
        "Good decode legs with a transfer, by whether the KV cache arrived; none: silent "
        "degradation.",
    ),
    CountedMetric(
        "pdrelay_kv_transfers_missing",
        ("instance",),
        "transfers_missing",
        "Decode legs that certainly got no KV cache, by their answers or by the engine's own "
        "counters.",
    ),
    CountedMetric(
        "pdrelay_prompt_cache_misses",
        ("instance",),
        "cache_misses",
        "Prompts that a decode engine computed alone, because most of them had been in its "
        "cache before.",
    ),
    CountedMetric(
        "pdrelay_return_kv_legs",
        ("result",),
        "return_kv_legs",
        "Prefill legs with return_kv, by whether they name a decode engine that has KV of "
        "earlier answers.",
    ),
    CountedMetric(
        "pdrelay_lone_prompts_bound",
        ("outcome",),
        "lone_prompts_bound",
        "Prompts that a decode engine has nearly all of, and left to others for the sake of "
        "its streams.",
    ),
    CountedMetric(
        "pdrelay_prompt_mismatches",
        ("prefill", "decode"),
        "mismatches",
        "Requests of which the two engines made different prompts: their answers are not to "
        "be trusted.",
    ),
)
