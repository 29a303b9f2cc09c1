"""What a version of vLLM has of what the connector and the router use, read from its sources alone.

Nothing is imported, so a wheel for another device will do: :func:`recorded` takes the folder of the package ``vllm``,
installed or unpacked. What it returns is kept in ``tests/versions``, and :mod:`contract.test_versions` judges it.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = ROOT / "connector/pdrelay_connector/shell"
HOOKS = "vllm.distributed.kv_transfer.kv_connector.v1.base"
BASES = ("KVConnectorBase_V1", "SupportsHMA")
MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
# What the connector reads of vLLM's objects, by their class. Hooks and imported names are found by themselves.
MEMBERS = {
    f"{HOOKS}:KVConnectorTransferResults": ("finished_recving", "failed_recving"),
    "vllm.config.kv_transfer:KVTransferConfig": (
        *("engine_id", "is_kv_consumer", "is_kv_producer", "kv_buffer_device", "kv_connector"),
        *("kv_connector_extra_config", "kv_load_failure_policy", "kv_role"),
    ),
    "vllm.config.load:LoadConfig": ("download_dir", "load_format"),
    "vllm.config.model:ModelConfig": (
        *("code_revision", "dtype", "enable_sleep_mode", "get_head_size", "get_total_num_hidden_layers"),
        *("get_total_num_kv_heads", "hf_config", "max_model_len", "model", "quantization", "revision", "use_mla"),
        *("_apply_dict_overrides", "config_format", "generation_config", "hf_config_path", "hf_overrides"),
        *("override_generation_config", "served_model_name", "tokenizer", "tokenizer_mode", "tokenizer_revision"),
        "trust_remote_code",
    ),
    "vllm.config.parallel:ParallelConfig": (
        *("data_parallel_index", "data_parallel_size", "decode_context_parallel_size", "pipeline_parallel_size"),
        "tensor_parallel_size",
    ),
    "vllm.config.speculative:SpeculativeConfig": (
        *("draft_model_config", "kv_cache_dtype", "method", "parallel_drafting", "uses_draft_kv_cache"),
    ),
    "vllm.config.vllm:VllmConfig": (
        *("cache_config", "kv_transfer_config", "load_config", "model_config", "parallel_config"),
        "speculative_config",
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory": ("register_connector",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler": (
        *("_current_batch_allocated_block_ids", "_req_status"),
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestOffloadState": ("max_offload_tokens",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector": ("scheduler",),
    "vllm.lora.request:LoRARequest": ("lora_name", "lora_path"),
    "vllm.v1.attention.backends.cpu_attn:": ("_get_attn_isa",),
    "vllm.v1.core.block_pool:BlockPool": (
        *("blocks", "cache_full_blocks", "evict_blocks", "free_blocks", "get_cached_block", "get_num_free_blocks"),
        *("hash_block_size", "touch"),
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "is_null", "ref_cnt"),
    "vllm.v1.core.sched.output:KVConnectorBlockState": ("resolve_block_ids",),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("has_sync_kv_loads", "kv_cache_block_copies", "kv_connector_block_state", "num_scheduled_tokens"),
        *("scheduled_cached_reqs", "scheduled_new_reqs", "total_num_scheduled_tokens"),
    ),
    "vllm.v1.core.sched.scheduler:Scheduler": ("_inflight_prefills", "vllm_config"),
    "vllm.v1.engine:EngineCoreRequestType": ("WAKEUP",),
    "vllm.v1.engine.core:EngineCoreProc": ("input_queue",),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("kv_cache_groups", "needs_kv_cache_zeroing", "num_blocks"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": (
        *("enable_kv_transfer", "host_resident", "kv_cache_spec", "layer_names"),
    ),
    "vllm.v1.outputs:KVConnectorOutput": ("finished_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    "vllm.v1.request:Request": (
        *("abort_immediately", "cache_salt", "kv_transfer_params", "lora_request", "mm_features"),
        *("num_computed_tokens", "num_preemptions", "num_prompt_tokens", "num_tokens", "priority"),
        *("prompt_token_ids", "request_id", "status", "prompt_embeds", "get_skip_reading_prefix_cache"),
    ),
}
# Functions in which one thing must come before another.
ORDERS = {
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output": (
        *("bind_connector_metadata(", "yield output", "start_load_kv("),
        *("get_transfer_results(", "build_connector_worker_meta("),
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": (
        "update_connector_output(",
        "_free_blocks(",
    ),
    "vllm.v1.engine.core:EngineCoreProc.__init__": ("self.input_queue = ", "super().__init__("),
}
BODIES = {
    "/v1/completions": "vllm.entrypoints.openai.completion.protocol:CompletionRequest",
    "/v1/chat/completions": "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
    "/v1/responses": "vllm.entrypoints.openai.responses.protocol:ResponsesRequest",
    "/inference/v1/generate": "vllm.entrypoints.scale_out.token_in_token_out.protocol:GenerateRequest",
    "/v1/messages": "vllm.entrypoints.anthropic.protocol:AnthropicMessagesRequest",
}


class Sources:
    """The sources of a package, by the names of its modules."""

    def __init__(self, package):
        self._package = Path(package)
        self._trees = {}

    def tree(self, module):
        """Return a module's syntax tree; None if there is no such module."""
        if module not in self._trees:
            path = self._package.joinpath(*module.split(".")[1:])
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            self._trees[module] = ast.parse(files[0].read_text()) if files else None
        return self._trees[module]

    def find(self, module, name):
        """Return the node that defines a name, wherever a module has it from; None if there is no such name."""
        tree = self.tree(module)
        if tree is None:
            return None
        for node in _outer(tree.body):
            if name in _defined(node):
                return node
            if isinstance(node, ast.ImportFrom) and name in {each.asname or each.name for each in node.names}:
                origin = next(each.name for each in node.names if name == (each.asname or each.name))
                return self.find(_absolute(node, module, self._is_package(module)), origin) or node
        return self.tree(f"{module}.{name}")

    def fields(self, where):
        """Return the fields of a pydantic model, its bases' too; those with an underscore are private attributes."""
        module, _, name = where.partition(":")
        node = self.find(module, name)
        found = set()
        if node is None:
            return found
        for base in node.bases:
            if isinstance(base, ast.Name) and isinstance(self.find(module, base.id), ast.ClassDef):
                found |= self.fields(f"{module}:{base.id}")
        return found | {
            name
            for each in node.body
            if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation)
            for name in _defined(each)
            if not name.startswith("_")
        }

    def text(self, where):
        """Return the source of a method, given as ``module:Class.method``; "" if there is none."""
        module, _, names = where.partition(":")
        name, _, method = names.partition(".")
        found = [each for each in getattr(self.find(module, name), "body", ()) if getattr(each, "name", "") == method]
        return ast.unparse(found[0]) if found else ""

    def _is_package(self, module):
        return self._package.joinpath(*module.split(".")[1:], "__init__.py").is_file()

    def names(self, module):
        """Return the names that a module has, its submodules too."""
        tree = self.tree(module)
        folder = self._package.joinpath(*module.split(".")[1:])
        found = {file.stem for file in folder.iterdir()} if folder.is_dir() else set()
        for node in _outer(tree.body if tree is not None else ()):
            found |= _defined(node)
            if isinstance(node, ast.ImportFrom):
                found |= {each.asname or each.name for each in node.names}
        return found

    def members(self, where):
        """Return the members of a class (or a module, with no class): parameters of functions, None of others."""
        module, _, name = where.partition(":")
        node = self.find(module, name) if name else self.tree(module)
        return {} if node is None else self._members(module, node)

    def _members(self, module, node):
        found = {}
        for base in getattr(node, "bases", ()):
            if isinstance(base, ast.Name) and isinstance(of := self.find(module, base.id), ast.ClassDef):
                found |= self._members(module, of)
        for each in _outer(node.body):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                found[each.name] = [arg.arg for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)]
                found |= dict.fromkeys(_set_on_self(each))
            else:
                found |= dict.fromkeys(_defined(each))
        return found


def _outer(body):
    """Yield the statements of a module or a class, those in ``if`` and ``try`` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            for inner in getattr(node, part, ()):
                yield from _outer(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _defined(node):
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _set_on_self(function):
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }


def _absolute(node, module, is_package):
    if not node.level:
        return node.module
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _come_in_order(text, steps):
    """Whether the last places of these texts are in this order."""
    places = [text.rfind(step) for step in steps]
    return -1 not in places and places == sorted(places)


def imported():
    """Return the names that the connector imports from vLLM, as ``module:name``."""
    return sorted(
        {
            f"{node.module}:{each.name}"
            for file in SHELL.glob("*.py")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm"
            for each in node.names
        }
    )


def recorded(package):
    """Return what a version has: names, members, hooks with their parameters, what must be implemented, ..."""
    sources = Sources(package)
    modules = sorted({where.partition(":")[0] for where in imported()})
    hooks = {name: args for base in BASES for name, args in sources.members(f"{HOOKS}:{base}").items() if args}
    members = {where: sources.members(where) for where in MEMBERS}
    children = {"c", "connector", "connector_cls"}
    return {
        "names": {
            module: " ".join(sorted(name for name in sources.names(module) if sources.find(module, name) is not None))
            for module in modules
        },
        "members": {where: " ".join(sorted(members[where])) for where in MEMBERS},
        "other_orders": [where for where, steps in ORDERS.items() if not _come_in_order(sources.text(where), steps)],
        "hooks": dict(sorted(hooks.items())),
        "abstract": sorted(
            function.name
            for base in BASES
            for function in sources.find(HOOKS, base).body
            if isinstance(function, ast.FunctionDef)
            and any(getattr(each, "id", "") == "abstractmethod" for each in function.decorator_list)
        ),
        "asked_by_multi_connector": sorted(
            {
                node.attr
                for node in ast.walk(sources.find(MULTI, "MultiConnector"))
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in children
            }
        ),
        "bodies": {path: sorted(sources.fields(where)) for path, where in BODIES.items()},
    }
