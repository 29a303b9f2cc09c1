#!/bin/sh
# engine.sh run|join|leave: one vLLM engine of a fleet outside of Kubernetes.
# `run` becomes the engine. `join` waits until it answers and has the router send it requests. `leave` has the router send
# it nothing new, waits until it has finished, and has the router forget it.
#
# ROLE             prefill or decode
# ADDRESS          of this machine in the engines' network, a name or an IP
# MODEL            what `vllm serve` is given
# SECRETS          directory with the files connector-secret, engine-key and join-key (systemd's CREDENTIALS_DIRECTORY)
# PDRELAY_ROUTER   URL of the router, for join and leave; PDRELAY_ROUTER_PIN is its certificate, if it is https. The
#                  router has to see them come from ADDRESS: no proxy or NAT stands between, and both are in one network
# MAINPID          process id of the engine, for join, which gives up when it has ended (systemd sets it)
# MODE             pull (the default), push or auto, the same on all engines
# KEY_FILE         the key of join and leave (SECRETS/join-key); only with the admin key they may run on another host
# optional:        PORT SIDE_PORT SERVED_NAME TENSOR_PARALLEL ENGINE_ARGS JOIN_S DRAIN_S VLLM PDRELAY
set -eu
if [ $# -ne 1 ]; then
    echo "engine.sh: say run, join or leave" >&2
    exit 2
fi
: "${ROLE:?engine.sh: ROLE is prefill or decode}" "${ADDRESS:?engine.sh: ADDRESS is empty}"
secrets=${SECRETS:-${CREDENTIALS_DIRECTORY:?engine.sh: SECRETS names the directory of the secrets}}
case $ROLE in
prefill) port=${PORT:-8100} side_port=${SIDE_PORT:-5600} kv_role=kv_producer ;;
decode) port=${PORT:-8200} side_port=${SIDE_PORT:-5700} kv_role=kv_consumer ;;
*)
    echo "engine.sh: ROLE is $ROLE, and must be prefill or decode" >&2
    exit 2
    ;;
esac

case ${MODE:-pull} in
pull) extra= ;;
push | auto) extra=", \"kv_connector_extra_config\": {\"mode\": \"$MODE\"}" ;;
*)
    echo "engine.sh: MODE is $MODE, and must be pull, push or auto" >&2
    exit 2
    ;;
esac

instances() { "${PDRELAY:-pdrelay}" instances --key-file "${KEY_FILE:-$secrets/join-key}" "$@"; }

run() {
    : "${MODEL:?engine.sh: MODEL is what vllm serve is given}"
    # Files for what reads files, and the environment for the rest: arguments are seen by every user of the machine.
    VLLM_API_KEY=$(cat "$secrets/engine-key")
    # vLLM takes an empty key for none, and serves everybody.
    [ -n "$VLLM_API_KEY" ] || { echo "engine.sh: $secrets/engine-key is empty" >&2 && return 1; }
    PDRELAY_CONNECTOR_SECRET_FILE=$secrets/connector-secret
    VLLM_NIXL_SIDE_CHANNEL_HOST=$ADDRESS VLLM_NIXL_SIDE_CHANNEL_PORT=$side_port
    export VLLM_API_KEY PDRELAY_CONNECTOR_SECRET_FILE VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
    # shellcheck disable=SC2086 # ENGINE_ARGS is several words
    exec "${VLLM:-vllm}" serve "$MODEL" --served-model-name "${SERVED_NAME:-$MODEL}" --host "$ADDRESS" --port "$port" \
        --tensor-parallel-size "${TENSOR_PARALLEL:-1}" --enable-prompt-tokens-details --shutdown-timeout 20 \
        --kv-transfer-config "{\"kv_connector\": \"PDRelayConnector\", \"kv_connector_module_path\": \"pdrelay_connector\", \"kv_role\": \"$kv_role\", \"kv_load_failure_policy\": \"recompute\"$extra}" \
        ${ENGINE_ARGS:-}
}

# Fails when the engine has ended, so that what runs this script can start it again.
runs() {
    [ -z "${MAINPID:-}" ] || kill -0 "$MAINPID" 2>/dev/null ||
        { echo "engine.sh: the engine has ended" >&2 && return 1; }
}

join() {
    end=$(($(date +%s) + ${JOIN_S:-1800}))
    until curl --silent --fail --max-time 5 --noproxy '*' --output /dev/null "http://$ADDRESS:$port/health"; do
        runs || return 1
        [ "$(date +%s)" -lt "$end" ] || { echo "engine.sh: $ADDRESS:$port does not answer" >&2 && return 1; }
        sleep 1
    done
    # One that is known already came back after a crash, or is drained.
    until said=$(instances add "$ROLE" "$ADDRESS:$port" 2>&1) || said="$said; $(instances undrain "$ADDRESS:$port" 2>&1)"; do
        runs || return 1
        [ "$(date +%s)" -lt "$end" ] || { echo "engine.sh: the router does not take $ADDRESS:$port: $said" >&2 && return 1; }
        sleep 1
    done
    echo "engine.sh: the router sends requests to $ADDRESS:$port"
}

leave() {
    drained=0
    instances drain --wait "${DRAIN_S:-600}" "$ADDRESS:$port" >/dev/null || drained=$?
    instances remove "$ADDRESS:$port" >/dev/null || drained=$?
    return $drained
}

case $1 in
run | join | leave) "$1" ;;
*)
    echo "engine.sh: $1 is not run, join or leave" >&2
    exit 2
    ;;
esac
