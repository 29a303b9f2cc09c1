"""Where a router's engines come from: one without any is refused, or warned of."""

import logging

from pdrelay_proxy.errors import ConfigError
from pdrelay_proxy.features import features
from pdrelay_proxy.settings import Settings

logger = logging.getLogger(__name__)


def check_engines(settings: Settings, config: str | None) -> None:
    """Accept a router that has engines or can get some.

    Raises:
        ConfigError: no engine can ever come: the arguments do not change, and there is no key to
            add one with.
    """
    if config is None and not _has_engines(settings):
        raise ConfigError(
            "there are no engines, and none can be added: write --prefill and --decode, or set "
            "ADMIN_API_KEY to add "
            "engines with pdrelay instances"
        )


def warn_without_engines(settings: Settings, config: str | None) -> None:
    """Warn if only the configuration file can bring engines, by SIGHUP."""
    if not _has_engines(settings):
        text = (
            "there are no engines, and requests get 503: write prefill and decode into %s and send "
            "SIGHUP"
        )
        logger.warning(text, config)


def _has_engines(settings: Settings) -> bool:
    """Return whether there are engines, or some may come from discovery or operators."""
    keys = settings.admin_key, settings.admin_key_file, settings.join_key_file
    is_added_by_hand = any(key is not None for key in keys)
    finds_engines = any(feature.finds_engines(settings) for feature in features())
    is_named = bool(settings.prefill or settings.decode)
    return is_named or is_added_by_hand or finds_engines
