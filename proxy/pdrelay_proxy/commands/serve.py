"""``pdrelay serve``: from flags to settings to one or several serving processes."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from pdrelay_proxy.commands.engine_sources import check_engines, warn_without_engines
from pdrelay_proxy.commands.interrupts import ctrl_c_ends_at_once
from pdrelay_proxy.core.routing.kv_reuse import unused_kv
from pdrelay_proxy.errors import AlreadyKnown, ConfigError
from pdrelay_proxy.features import feature_policies
from pdrelay_proxy.io import logs
from pdrelay_proxy.io.build import find_build
from pdrelay_proxy.io.worker_place import WorkerPlace
from pdrelay_proxy.known_settings import unused_of_features, without_restart
from pdrelay_proxy.options import add_arguments as add_options
from pdrelay_proxy.options import serve_settings
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_options(parser)
    text = "say what is wrong with flags, file and environment, and start nothing"
    parser.add_argument("--check", action="store_true", help=text)
    text = (
        "print the settings in effect and where each comes from, without secrets, and start nothing"
    )
    parser.add_argument("--print-config", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it; return the exit code."""
    if args.check or args.print_config:
        # imported here: a serving router does not need it
        from pdrelay_proxy.commands import settings_report  # noqa: PLC0415

        return (
            settings_report.check_settings(args)
            if args.check
            else settings_report.print_settings(args)
        )
    _fill_standard_descriptors()
    return _in_a_sentence(lambda: _serve(args))


def _in_a_sentence(serve: Callable[[], int]) -> int:
    """Return the exit code of ``serve``; report an error of settings as one sentence."""
    try:
        return serve()
    except (ConfigError, AlreadyKnown) as exc:
        logging.shutdown()  # first the log's lines, which a thread writes
        sys.stderr.write(
            f"pdrelay serve: "
            f"{exc}{': name every engine once' if isinstance(exc, AlreadyKnown) else ''}\n"
        )
        return 2


def _serve(args: argparse.Namespace) -> int:
    settings = serve_settings(args)
    return _serve_here(args) if settings.workers == 1 else _supervise(settings, args)


def _fill_standard_descriptors() -> None:
    """Open closed descriptors of standard input, output and error: a socket there would get their
    data.

    libuv ends the process when it closes a socket with one of these numbers.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _supervise(settings: Settings, args: argparse.Namespace) -> int:
    """Start the workers; raises ConfigError."""
    with ctrl_c_ends_at_once():
        from pdrelay_proxy import supervisor  # noqa: PLC0415 (a single process does not need it)
        from pdrelay_proxy.consistency import check  # noqa: PLC0415

        # loads all that a router needs: workers are forks of this process
        import_module("pdrelay_proxy.server")

    check(settings)
    check_engines(settings, args.config)
    logs.configure(settings.log_level, settings.log_format, has_thread=False)
    return supervisor.run(settings, lambda place: _in_a_sentence(lambda: _serve_here(args, place)))


def _log_beginning(settings: Settings, args: argparse.Namespace) -> None:
    logger.info("pdrelay %s", find_build())
    if (
        unused := unused_kv(settings, unused_of_features(settings), feature_policies())
    ) is not None:
        logger.info("%s", unused)
    warn_without_engines(settings, args.config)


def _own_settings(
    args: argparse.Namespace, place: WorkerPlace | None
) -> tuple[Settings, Sequence[str]]:
    """Return the settings of this process, and the names of those that a worker keeps from its
    supervisor until a restart.

    A replaced worker gets the same settings as the others. A single process itself decides which
    changes need a restart.
    """
    settings = serve_settings(args)
    if place is None:
        return settings, ()
    common, fixed = without_restart(place.supervised, settings)
    return place.settings(common), fixed


def _serve_here(args: argparse.Namespace, place: WorkerPlace | None = None) -> int:
    """Serve in this process, alone or as a worker; raises ConfigError and AlreadyKnown."""
    with ctrl_c_ends_at_once():
        from pdrelay_proxy import server  # noqa: PLC0415 (errors of settings are reported without it)
        from pdrelay_proxy.app import build  # noqa: PLC0415

    def again() -> Settings:
        settings, fixed = _own_settings(args, place)
        for name in fixed:
            logger.info("%s needs a restart", name)
        return settings

    settings, _ = _own_settings(args, place)
    logs.configure(
        settings.log_level, settings.log_format, worker=None if place is None else place.number
    )
    router = build(settings, place=place)
    if place is None:  # otherwise the supervisor does
        check_engines(settings, args.config)
    if place is None or place.number == 0:  # worker 0 starts before the others
        _log_beginning(settings, args)
    return server.run(router, settings, again=again, place=place)
