"""The properties that two engines must share to exchange KV: for handshakes, and as a hash."""

import hashlib

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.logger import init_logger

from pdrelay_connector.core.layout.cache_groups import CacheGroup
from pdrelay_connector.core.messages import PROTOCOL, Fingerprint
from pdrelay_connector.settings import Mode, Settings, read_settings
from pdrelay_connector.shell.engine_config import EngineConfig
from pdrelay_connector.shell.model_files import NONE
from pdrelay_connector.shell.model_identity import identify, is_read
from pdrelay_connector.shell.vllm_versions import VLLM_VERSION, drafts_lookahead

logger = init_logger("vllm.pdrelay")


def fingerprint(config: VllmConfig, settings: Settings, engine_config: EngineConfig) -> Fingerprint:
    """Return a worker's fingerprint.

    Call it when the layers exist: they know the attention backend.
    """
    return msgspec.structs.replace(
        _from_config(config, settings.mode),
        groups=", ".join(_kind(group) for group in engine_config.groups),
        attention=",".join(
            sorted({backend.get_name() for backend in get_current_attn_backends(config)})
        ),
    )


def with_model(workers: Fingerprint, config: VllmConfig) -> Fingerprint:
    """Return the fingerprint that peers compare: that of the workers, and what the model is.

    Call it when the model is loaded: from then on it does not matter what becomes of its files.
    """
    identity = identify(config.model_config, config.load_config)
    if is_read(identity.weights):
        logger.info(
            "pdrelay: the model has the weights %s, whatever it is called", identity.weights
        )
    else:
        logger.warning(
            "pdrelay: the model is known by its name and place alone: its weights are %s",
            identity.weights,
        )
    return msgspec.structs.replace(workers, draft_model=_draft_model(config), **identity._asdict())


def info_labels(config: VllmConfig) -> dict[str, str]:
    """Return labels that a router compares before it pairs two engines: they must be equal.

    They cover the part of the fingerprint that an API server knows without a worker, and nothing
    that may differ between P and D (tensor parallelism, block size, cache size). The handshake
    compares more.
    """
    transfer = config.kv_transfer_config
    mode = read_settings(transfer.kv_connector_extra_config, {}, transfer.kv_connector).mode
    identity = identify(config.model_config, config.load_config)
    facts = (
        PROTOCOL,
        *msgspec.structs.astuple(_from_config(config, mode)),
        _draft_model(config),
        *identity,
    )
    digest = hashlib.sha256(msgspec.msgpack.encode(facts)).hexdigest()
    return {"protocol": str(PROTOCOL), "fingerprint": digest[:16], "mode": mode.value}


def _from_config(config: VllmConfig, mode: Mode) -> Fingerprint:
    model = config.model_config
    return Fingerprint(
        vllm=VLLM_VERSION,
        dtype=str(model.dtype),
        cache_dtype=str(config.cache_config.cache_dtype),
        layers=model.get_total_num_hidden_layers(),
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        groups="",
        attention="",
        mode=mode.value,
        code_revision=model.code_revision or NONE,
        quantization=str(model.quantization or NONE),
    )


def _draft_model(config: VllmConfig) -> str:
    """Return the properties of a draft model's KV, which is transferred with the target's KV.

    The same properties as in vLLM 0.32 (``kv_connector/v1/nixl/metadata.py``). The number of draft
    tokens does not change the KV; its effect on the groups' windows is part of the groups.
    """
    speculative = config.speculative_config
    if (
        speculative is None
        or not speculative.uses_draft_kv_cache()
        or speculative.draft_model_config is None
    ):
        return NONE
    draft = speculative.draft_model_config
    layers = getattr(draft.hf_config, "eagle_aux_hidden_state_layer_ids", None) or ()
    identity = identify(draft, config.load_config)
    details = {
        "config": identity.config,
        "weights": identity.weights,
        "code revision": draft.code_revision or NONE,
        "cache dtype": str(speculative.kv_cache_dtype or config.cache_config.cache_dtype),
        "layers": " ".join(map(str, layers)) or NONE,
        "parallel": str(speculative.parallel_drafting).lower(),
    }
    if (lookahead := drafts_lookahead(config)) > 1:  # P leaves out as many tokens less one
        details["lookahead"] = str(lookahead)
    return (
        f"{speculative.method} ({', '.join(f'{name} {value}' for name, value in details.items())})"
    )


def _kind(group: CacheGroup) -> str:
    if group.state:
        return group.state
    if group.window:
        return f"sliding window of {group.window}{', replayed' if group.is_replayed else ''}"
    return f"chunks of {group.chunk}" if group.chunk else "full"
