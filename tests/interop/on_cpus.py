"""Runs ``dynamo.vllm`` where there is no torchvision: ``on_cpus.py ARGUMENT...``.

Dynamo imports one function for images out of a module of transformers that needs torchvision, and PyPI has no build of
torchvision for the PyTorch of CPUs.
"""

import runpy
import sys
import types

FOR_IMAGES = "transformers.models.qwen2_vl.image_processing_qwen2_vl"

if __name__ == "__main__":
    module = types.ModuleType(FOR_IMAGES)
    module.smart_resize = None
    sys.modules[FOR_IMAGES] = module
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)
