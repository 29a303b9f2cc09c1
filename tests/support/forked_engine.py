"""vLLM's API server, whose other processes are forks of it: run as a program, with the server's own arguments.

On CPUs vLLM spawns them, and each imports PyTorch and vLLM anew: 7 of the 16 CPU seconds that a start of an engine
takes, and 21 of one of two ranks. On GPUs vLLM forks them itself where it can. Nothing else is different here; what
``xpyd up`` and the examples start is tested as it is.
"""

import multiprocessing
import runpy

SERVER = "vllm.entrypoints.openai.api_server"


def instead(argv):
    """Return the command line that runs this in place of the server."""
    at = argv.index(SERVER) - 1
    assert argv[at] == "-m"
    return [*argv[:at], __file__, *argv[at + 2 :]]


def main():
    """Become the server."""
    from vllm.platforms import current_platform
    from vllm.utils import system_utils

    if current_platform.is_cpu():  # before anybody imports it by name
        system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
