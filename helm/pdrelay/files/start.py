"""Starts vLLM with plugins of its API server: ``start.py PLUGIN,... serve MODEL ...``.

vLLM loads such a plugin only if VLLM_PLUGINS names it, and then of all kinds only those that are
named (``vllm/plugins/__init__.py``). So this names them beside what vLLM would load without them:
what the variable has already, or each plugin that is installed. An image may bring its platform or
its models as plugins.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.metadata import entry_points

UNASKED = tuple(
    f"vllm.{kind}_plugins" for kind in ("general", "platform", "io_processor", "stat_logger")
)
CONNECTOR = "pdrelay"  # installed beside vLLM, so a Python that does not see it is not vLLM's


def name_plugins(wanted: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Add plugins to VLLM_PLUGINS; a Python that does not see vLLM's plugins leaves the variable as
    it is.
    """
    if "VLLM_PLUGINS" in environment:
        loaded = environment["VLLM_PLUGINS"].split(",")
    else:
        loaded = sorted({plugin.name for group in UNASKED for plugin in entry_points(group=group)})
        if CONNECTOR not in loaded:
            sys.stderr.write(
                f"{sys.executable} sees no plugins of vLLM, so VLLM_PLUGINS does not name ours\n"
            )
            return
    environment["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*filter(None, loaded), *wanted]))


if __name__ == "__main__":
    name_plugins(sys.argv[1].split(","), os.environ)
    os.execvp("vllm", ["vllm", *sys.argv[2:]])
