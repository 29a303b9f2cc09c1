#!/bin/bash
# gpu.sh COMMAND: a prefill and a decode engine on one or two GPUs of this machine, examined and measured.
#
# start      two engines and the router; returns when both engines have answered a request
# prove      pdrelay prove, where this version has it; otherwise a request over both engines beside one of an engine alone
# doctor     pdrelay doctor between the GPUs' memory, and of the running engines
# benchmark  vllm bench serve: through the router, and the decode engine alone
# check      the connector's core over GPU memory, without vLLM (tests/integration/test_gpu.py): 8 minutes at most
# collect    one archive: logs, metrics, versions, topology, results; it has no secret, or is not made
# stop       end what start began
# all        check, start, prove, doctor, benchmark, collect, stop; what fails is named at the end
#
# MODEL         what vllm serve is given (Qwen/Qwen3-0.6B); SERVED_NAME (small)
# GPUS          of the prefill and the decode engine: "0 1", or "0 0" for one (the first two that nvidia-smi lists)
# GPU_MEMORY    fraction of a GPU for each engine (0.85; 0.4 where both share one)
# MODE          pull (the default), push or auto
# STEPS         what `all` does, instead of everything; it stops the engines at its end
# OUT           folder of logs, results and secrets (gpu-run); it must be yours alone
# READY_S       seconds for the engines to start (900: the first start downloads the model)
# BENCH_ARGS    instead of the options of vllm bench serve that say what is asked
# CHECK_ARGS    more options of test_gpu.py
# optional:     ROUTER_PORT PREFILL_PORT DECODE_PORT SIDE_PORT DOCTOR_PORT ENGINE_ARGS VLLM PDRELAY PYTHON
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$(dirname "$here")")
out=${OUT:-gpu-run}
model=${MODEL:-Qwen/Qwen3-0.6B} served=${SERVED_NAME:-small}
vllm=${VLLM:-vllm} pdrelay=${PDRELAY:-pdrelay} python=${PYTHON:-python3}
address=127.0.0.1
router_port=${ROUTER_PORT:-8000} prefill_port=${PREFILL_PORT:-8100} decode_port=${DECODE_PORT:-8200}
side_port=${SIDE_PORT:-5600} doctor_port=${DOCTOR_PORT:-5690}
router=http://$address:$router_port
case ${MODE:-pull} in
pull | push | auto) ;;
*)
    echo "gpu.sh: MODE is $MODE, and must be pull, push or auto" >&2
    exit 2
    ;;
esac

say() { echo "gpu.sh: $*"; }
fail() {
    echo "gpu.sh: $*" >&2
    return 1
}
secret() { cat "$out/secrets/$1"; }
random() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

choose_gpus() { # sets prefill_gpu, decode_gpu and memory
    local listed chosen
    listed=$(nvidia-smi --query-gpu=index --format=csv,noheader) || fail "nvidia-smi lists no GPU" || return 1
    # shellcheck disable=SC2206 # several words
    chosen=(${GPUS:-$(head -2 <<<"$listed" | tr '\n' ' ')})
    [ "${#chosen[@]}" -le 2 ] && [ "${#chosen[@]}" -ge 1 ] || fail "GPUS is '${GPUS:-}', and must be one or two numbers" || return 1
    prefill_gpu=${chosen[0]} decode_gpu=${chosen[-1]}
    for gpu in "$prefill_gpu" "$decode_gpu"; do
        grep -qx "$gpu" <<<"$listed" || fail "GPU $gpu is not one of: $(tr '\n' ' ' <<<"$listed")" || return 1
    done
    memory=0.85
    [ "$prefill_gpu" != "$decode_gpu" ] || memory=0.4
    memory=${GPU_MEMORY:-$memory}
}

prepare() {
    mkdir -p "$out/secrets" "$out/logs" "$out/results" "$out/pids"
    chmod 700 "$out" "$out/secrets"
    local name
    for name in connector-secret engine-key admin-key client-key; do
        [ -s "$out/secrets/$name" ] || (umask 077 && random >"$out/secrets/$name")
    done
    (umask 077 && echo "gpu:$(secret client-key)" >"$out/secrets/client-keys")
}

since() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d ' ' -f 20; } # PID: when it started, in ticks

running() { # of a name: whether what begin began has not ended; its pid may be another's by now
    local pid when
    # It has no time if it had ended before it was looked at.
    read -r pid when 2>/dev/null <"$out/pids/$1" && [ -n "$when" ] && [ "$(since "$pid")" = "$when" ]
}

begin() { # NAME COMMAND...: in a session of its own, so that it outlives this shell; its pid is the session's
    local name=$1
    shift
    setsid "$@" >"$out/logs/$name.log" 2>&1 &
    echo "$! $(since $!)" >"$out/pids/$name"
}

engine() { # ROLE GPU PORT SIDE_PORT
    begin "$1" env ROLE="$1" CUDA_VISIBLE_DEVICES="$2" PORT="$3" SIDE_PORT="$4" ADDRESS=$address MODEL="$model" \
        SERVED_NAME="$served" SECRETS="$out/secrets" VLLM="$vllm" PDRELAY="$pdrelay" VLLM_PLUGINS=pdrelay,pdrelay_timelines \
        ENGINE_ARGS="--gpu-memory-utilization $memory ${ENGINE_ARGS:-}" "$here/../engine.sh" run
}

answers() { # URL
    curl --silent --fail --max-time 5 --noproxy '*' --output /dev/null "$1"
}

wait_for() { # NAME URL
    local end=$((SECONDS + ${READY_S:-900}))
    until answers "$2"; do
        running "$1" || { tail -n 30 "$out/logs/$1.log" >&2 && fail "$1 has ended: $out/logs/$1.log"; } || return 1
        [ "$SECONDS" -lt "$end" ] || fail "$1 does not answer within ${READY_S:-900} s: $out/logs/$1.log" || return 1
        sleep 1
    done
}

ask() { # URL KEYFILE SALT: one greedy completion, as the server's JSON
    local body
    body="{\"model\": \"$served\", \"prompt\": \"$(printf 'The quick brown fox jumps over the lazy dog. %.0s' {1..40})\", \"max_tokens\": 32, \"temperature\": 0, \"cache_salt\": \"$3\"}"
    # A key as an argument could be read by every user of the machine: curl reads it from a pipe.
    curl --silent --show-error --fail --max-time 120 --noproxy '*' --header @<(echo "Authorization: Bearer $(secret "$2")") \
        --header "Content-Type: application/json" --data "$body" "$1/v1/completions"
}

text() { "$python" -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])'; }

start() {
    choose_gpus
    prepare
    local name
    for name in prefill decode router; do
        ! running "$name" || fail "$name runs already: gpu.sh stop" || return 1
    done
    trap '[ $? -eq 0 ] || stop' EXIT
    say "prefill on GPU $prefill_gpu, decode on GPU $decode_gpu, $memory of its memory each, ${MODE:-pull}; logs: $out/logs"
    engine prefill "$prefill_gpu" "$prefill_port" "$side_port"
    engine decode "$decode_gpu" "$decode_port" $((side_port + 100))
    begin router "$pdrelay" serve --host $address --port "$router_port" --prefill "$address:$prefill_port" \
        --decode "$address:$decode_port" --api-keys-file "$out/secrets/client-keys" --admin-key-file "$out/secrets/admin-key" \
        --prefill-api-key-file "$out/secrets/engine-key" --decode-api-key-file "$out/secrets/engine-key"
    wait_for prefill "http://$address:$prefill_port/health"
    wait_for decode "http://$address:$decode_port/health"
    wait_for router "$router/health"
    ask "$router" client-key start >"$out/results/first.json" || fail "the first request failed: $out/logs" || return 1
    say "both engines serve at $router, key: $out/secrets/client-key"
}

prove() {
    prepare
    if "$pdrelay" prove --help >/dev/null 2>&1; then
        local code=0
        "$pdrelay" prove --prefill "http://$address:$prefill_port" --prefill-key-file "$out/secrets/engine-key" \
            --decode "http://$address:$decode_port" --decode-key-file "$out/secrets/engine-key" \
            --report "$out/results/prove.html" --report "$out/results/prove.json" >"$out/results/prove.txt" 2>&1 || code=$?
        tail -n 40 "$out/results/prove.txt"
        [ "$code" -eq 0 ] || fail "pdrelay prove ends with exit code $code: $out/results/prove.txt" || return 1
    else
        say "this version has no pdrelay prove: one request over both engines, and one of the decode engine alone"
        local both alone
        both=$(ask "$router" client-key "both-$$" | text)
        alone=$(ask "http://$address:$decode_port" engine-key "alone-$$" | text)
        printf '%s\n' "both:  $both" "alone: $alone" >"$out/results/prove.txt"
        # On GPUs kernels may round differently for other batches, so a difference is a hint, and no proof.
        [ "$both" = "$alone" ] || fail "the texts differ: $out/results/prove.txt" || return 1
        say "the texts are equal"
    fi
}

doctor() {
    choose_gpus
    prepare
    export PDRELAY_CONNECTOR_SECRET_FILE=$out/secrets/connector-secret
    CUDA_VISIBLE_DEVICES=$prefill_gpu begin doctor "$pdrelay" doctor listen --host $address --port "$doctor_port" --device cuda:0 --once
    local end=$((SECONDS + 60)) code=0
    until grep -q "^listening on" "$out/logs/doctor.log"; do
        running doctor && [ "$SECONDS" -lt "$end" ] || fail "the doctor does not listen: $(tail -n 3 "$out/logs/doctor.log")" || return 1
        sleep 0.2
    done
    CUDA_VISIBLE_DEVICES=$decode_gpu "$pdrelay" doctor "$address:$doctor_port" --device cuda:0 --json \
        >"$out/results/doctor.json" 2>"$out/logs/doctor-examines.log" || code=$?
    end_of doctor
    if running prefill; then
        "$pdrelay" doctor --engine "$address:$side_port" --json >"$out/results/doctor-engine.json" 2>>"$out/logs/doctor-examines.log" || code=$?
    fi
    # 1: there are findings, which is a result.
    [ "$code" -le 1 ] || fail "pdrelay doctor could not run: $(tail -n 3 "$out/logs/doctor-examines.log")" || return 1
    "$python" - "$out"/results/doctor*.json <<'END'
import json, sys
for path in sys.argv[1:]:
    for finding in json.load(open(path))["findings"]:
        print(f"gpu.sh: {finding['name']}: {finding['what']}")
END
}

benchmark() {
    prepare
    # shellcheck disable=SC2206 # several words
    local asked=(${BENCH_ARGS:---num-prompts 200 --request-rate 8 --random-input-len 1024 --random-output-len 128}) target url key
    for target in router decode; do
        url=$router key=client-key
        [ $target = router ] || url=http://$address:$decode_port key=engine-key
        say "vllm bench serve: $target"
        # The key is a variable: arguments are seen by every user of the machine.
        OPENAI_API_KEY=$(secret $key) "$vllm" bench serve --backend openai --base-url "$url" --endpoint /v1/completions \
            --model "$model" --served-model-name "$served" --dataset-name random --ignore-eos "${asked[@]}" \
            --save-result --result-dir "$out/results" --result-filename "bench-$target.json" \
            >"$out/logs/bench-$target.log" 2>&1 || fail "vllm bench serve failed: $out/logs/bench-$target.log" || return 1
        sed -n '/Serving Benchmark Result/,$p' "$out/logs/bench-$target.log"
    done
}

check() {
    prepare
    # shellcheck disable=SC2086 # several words
    "$python" "$root/tests/integration/test_gpu.py" --device cuda --out "$out/results/check" ${CHECK_ARGS:-} 2>&1 |
        tee "$out/results/check.txt"
}

try() { # FILE COMMAND...: what it says, or that it fails
    local file=$1
    shift
    "$@" >"$out/about/$file" 2>&1 || echo "(exit code $?)" >>"$out/about/$file"
}

metrics() { # NAME URL
    curl --silent --fail --max-time 10 --noproxy '*' --header @<(echo "Authorization: Bearer $(secret client-key)") "$2/metrics" --output "$out/about/metrics-$1.txt" ||
        echo "$1 does not answer" >"$out/about/metrics-$1.txt"
}

collect() {
    prepare
    rm -rf "$out/about"
    mkdir "$out/about"
    metrics router "$router"
    metrics prefill "http://$address:$prefill_port"
    metrics decode "http://$address:$decode_port"
    try nvidia-smi.txt nvidia-smi
    try topology.txt nvidia-smi topo -m
    try gpus.txt nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max --format=csv
    try kernel.txt uname -srm
    try cpu.txt lscpu
    try vllm.txt "$vllm" --version
    try packages.txt "$python" -m pip list --disable-pip-version-check
    try settings.txt printf '%s\n' "model $model" "mode ${MODE:-pull}" "gpus ${GPUS:-default}" "engine arguments ${ENGINE_ARGS:-}" "bench ${BENCH_ARGS:-default}"
    local name found
    for name in connector-secret engine-key admin-key client-key; do
        found=$(grep -rlFf "$out/secrets/$name" "$out/logs" "$out/results" "$out/about") || continue
        fail "$name stands in $found: no archive was made" || return 1
    done
    tar -czf "$out.tar.gz" -C "$out" logs results about
    say "$out.tar.gz: $(du -h "$out.tar.gz" | cut -f1)"
}

end_of() { # NAME: SIGTERM to its session, and SIGKILL after 30 seconds
    local pid end=$((SECONDS + 30))
    running "$1" || return 0
    read -r pid _ <"$out/pids/$1"
    kill -TERM -- "-$pid" 2>/dev/null || :
    while kill -0 -- "-$pid" 2>/dev/null && [ "$SECONDS" -lt "$end" ]; do sleep 0.2; done
    kill -KILL -- "-$pid" 2>/dev/null || :
    rm -f "$out/pids/$1"
}

stop() {
    local name
    for name in router decode prefill doctor; do
        end_of "$name"
    done
    say "stopped"
}

all() {
    local step failed=()
    trap stop EXIT
    for step in ${STEPS:-check start prove doctor benchmark collect}; do
        say "== $step"
        # A shell of its own: `set -e` does not hold in what stands before ||.
        "${BASH_SOURCE[0]}" "$step" || failed+=("$step")
        [ "${failed[*]: -1}" != start ] || break
    done
    [ "${failed[*]: -1}" != start ] || "${BASH_SOURCE[0]}" collect || :
    [ ${#failed[@]} -eq 0 ] || fail "failed: ${failed[*]}"
}

case ${1:-} in
start | prove | doctor | benchmark | check | collect | stop | all) [ $# -eq 1 ] && "$1" ;;
*)
    echo "gpu.sh: '${1:-}' is not start, prove, doctor, benchmark, check, collect, stop or all" >&2
    exit 2
    ;;
esac
