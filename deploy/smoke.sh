#!/usr/bin/env bash
# Tests the containers: builds the image, starts everything, sends requests, and kills each container in the middle
# of an answer. Prints the results; the exit status is 0 if all of them are as expected.
#
#   deploy/smoke.sh
#
# It needs a Docker engine and Compose, and uses its own project (dalsegno-smoke): other containers are not touched.
# As root, it starts an engine if none runs. Without an image registry, it creates the base image with debootstrap;
# without PyTorch's index, it fetches the wheels with this machine's pip.
#
#   DOCKER=/usr/bin/docker    the docker program
#   BASE_IMAGE=...            skip the search for a base image
#   KEEP=1                    leave everything running at the end
#   SMOKE_DIR=...             the folder of its own engine (/var/tmp/dalsegno-smoke)
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
project=dalsegno-smoke
docker=${DOCKER:-docker}
work=${SMOKE_DIR:-/var/tmp/dalsegno-smoke}
export PORT=${PORT:-18000} COMPOSE_PROFILES=${COMPOSE_PROFILES:-cpu,studio} DOCKER_BUILDKIT=1
export TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
scratch=$(mktemp -d)
rows=()
failed=0
engine_pid=

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*" >&2; }
die() { say "$*"; exit 1; }
now() { date +%s%N; }
since() { awk -v from="$1" -v to="$(now)" 'BEGIN { printf "%.1f s", (to - from) / 1e9 }'; }
row() { rows+=("$1|$2|$3"); [ "$2" = ok ] || failed=1; say "$2: $1: $3"; }

# ---- an engine -------------------------------------------------------------------------------------------
start_engine() {
    if timeout 20 "$docker" info >/dev/null 2>&1; then
        return
    fi
    [ "$(id -u)" = 0 ] && command -v dockerd >/dev/null || die "no Docker engine answers; start one"
    mkdir -p "$work"
    export DOCKER_HOST=unix://$work/docker.sock
    say "starting a Docker engine in $work"
    # Without firewall rules: networks work, and ports are published by a proxy.
    setsid dockerd --bridge=none --iptables=false --ip6tables=false --host "$DOCKER_HOST" \
        --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/dockerd.pid" \
        >"$work/dockerd.log" 2>&1 </dev/null &
    engine_pid=$!
    for _ in $(seq 100); do
        timeout 5 "$docker" info >/dev/null 2>&1 && return
        sleep 0.3
    done
    die "the engine did not come up: $work/dockerd.log"
}

# ---- the image ------------------------------------------------------------------------------------------
find_base() {
    [ -z "${BASE_IMAGE:-}" ] || return 0
    BASE_IMAGE=python:3.11-slim
    if timeout 30 "$docker" image inspect "$BASE_IMAGE" >/dev/null 2>&1 ||
        timeout 120 "$docker" pull -q "$BASE_IMAGE" >/dev/null 2>&1; then
        return
    fi
    BASE_IMAGE=dalsegno-base:bookworm
    timeout 30 "$docker" image inspect "$BASE_IMAGE" >/dev/null 2>&1 && return
    command -v debootstrap >/dev/null || die "no image registry is reachable, and there is no debootstrap"
    say "no image registry: making $BASE_IMAGE with debootstrap"
    local tree=$work/rootfs
    rm -rf "$tree" && mkdir -p "$tree"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$tree" \
        "${MIRROR:-http://deb.debian.org/debian}" >"$work/debootstrap.log" 2>&1 || die "see $work/debootstrap.log"
    tar -C "$tree" -c --exclude='./proc/*' --exclude='./sys/*' --exclude='./dev/*' --exclude='./var/cache/apt/*' \
        --exclude='./var/lib/apt/lists/*' --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' . |
        "$docker" import - "$BASE_IMAGE" >/dev/null
    rm -rf "$tree"
}

fetch_wheels() {
    python3 - "$TORCH_INDEX" 2>/dev/null <<'PY' && return 0
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=10)
PY
    say "$TORCH_INDEX is out of reach: fetching the wheels with this machine's pip"
    export TORCH_INDEX= PIP_NO_INDEX_IN_BUILD=1
    python3 - "$root/pyproject.toml" >"$scratch/requirements.txt" <<'PY'
import sys, tomllib
told = tomllib.load(open(sys.argv[1], "rb"))
extras = told["project"]["optional-dependencies"]
names = told["build-system"]["requires"] + told["project"]["dependencies"] + extras["gateway"] + extras["worker"]
print(*names, sep="\n")
PY
    local version
    version=$("$docker" run --rm --network none "$BASE_IMAGE" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "${PYTHON:-python3}" -m pip --disable-pip-version-check download -qq --dest "$here/wheels" --python-version "$version" \
        --only-binary :all: --constraint "$root/constraints.txt" --requirement "$scratch/requirements.txt" \
        2>"$scratch/pip.log" || { cat "$scratch/pip.log" >&2; die "the wheels are not to be had"; }
}

build() {
    local began network=default
    began=$(now)
    "$docker" network inspect bridge >/dev/null 2>&1 || network=host # an engine as `start_engine` makes it
    timeout 1800 "$docker" build --quiet --network "$network" --file "$here/Dockerfile" --tag dalsegno:latest \
        --build-arg BASE_IMAGE="$BASE_IMAGE" --build-arg TORCH_INDEX="$TORCH_INDEX" \
        --build-arg PIP_NO_INDEX="${PIP_NO_INDEX_IN_BUILD:-}" "$root" >/dev/null
    local bytes
    bytes=$("$docker" image inspect --format '{{.Size}}' dalsegno:latest)
    row "build on $BASE_IMAGE" ok "$(since "$began"), $((bytes / 1000000)) MB"
}

# ---- compose --------------------------------------------------------------------------------------------
find_compose() {
    if "$docker" compose version >/dev/null 2>&1; then
        compose_command=("$docker" compose --file "$here/docker-compose.yml")
    else
        command -v docker-compose >/dev/null || die "no Compose: install docker-compose-plugin"
        # Compose 1 does not know `required: false`: it gets the file without the services that the profile omits.
        "$docker" run --rm -i --network none --entrypoint python3 dalsegno:latest -c '
import sys, yaml
told = yaml.safe_load(sys.stdin)
services, profiles = told["services"], set(sys.argv[1].split(","))
for name, service in list(services.items()):
    if not profiles >= set(service.get("profiles", [])):
        del services[name]
for service in services.values():
    service.pop("pull_policy", None)
    needed = service.get("depends_on", {})
    for name in list(needed):
        if needed[name].pop("required", True) is False and name not in services:
            del needed[name]
yaml.safe_dump(told, sys.stdout)' "$COMPOSE_PROFILES" <"$here/docker-compose.yml" >"$scratch/docker-compose.yml"
        compose_command=(docker-compose --file "$scratch/docker-compose.yml" --project-directory "$here")
    fi
    say "$("$docker" version --format 'engine {{.Server.Version}}, client {{.Client.Version}}'), $("${compose_command[@]}" version | head -1)"
}

compose() { timeout 300 "${compose_command[@]}" --project-name "$project" "$@"; }
id_of() { compose ps -q "$1" | head -1; }
inside() { "$docker" exec "$(id_of conductor)" "$@"; }
ask() { "$docker" exec -i "$client" python3 - http://gateway:8000 "$@" <"$here/smoke_ask.py"; }

up() {
    compose up --detach --no-build >"$scratch/up.log" 2>&1 || { cat "$scratch/up.log" >&2; die "it did not come up"; }
    # The client is a container too: it reaches the gateway without this machine's network.
    client=$("$docker" run --rm --detach --label "$project" --network "${project}_default" --init --entrypoint sleep dalsegno:latest infinity)
    ask ready
}

down() {
    "$docker" ps --quiet --filter "label=$project" | xargs -r "$docker" rm --force >/dev/null 2>&1 || true
    compose down "$@" >"$scratch/down.log" 2>&1 || { cat "$scratch/down.log" >&2; return 1; }
}

# Every request in the log with all its events.
kept() {
    inside sh -euc 'for id in $(dalsegno log --json --limit 1000 |
        python3 -c "import json, sys; [print(json.loads(line)[\"request_id\"]) for line in sys.stdin]"); do
            dalsegno log "$id" --json | sed "s/^/$id /"
        done'
}

# ---- tests ----------------------------------------------------------------------------------------------
try() {
    local what=$1 began
    shift
    began=$(now)
    if "$@" >"$scratch/out" 2>&1; then row "$what" ok "$(since "$began")"; else row "$what" FAILED "$(tail -1 "$scratch/out")"; fi
}

replays() { inside dalsegno replay --all | tail -1 | grep -E '^([0-9]+) of \1 requests match'; }

refuses_strangers() {
    ! "$docker" exec -i -e DALSEGNO_NATS_TOKEN=guessed "$client" dalsegno log --nats nats://nats:4222 >"$scratch/refused" 2>&1 &&
        grep -q "refused the token" "$scratch/refused"
}

runs_as_nobody() {
    local service
    for service in nats conductor worker gateway studio; do
        [ "$("$docker" exec "$(id_of "$service")" id -u)" = 10001 ] || return 1
        ! "$docker" exec "$(id_of "$service")" touch /opt/x /etc/dalsegno/token/x 2>/dev/null || return 1
    done
}

# Its newest link, from this machine.
shows_requests() {
    local link
    link=$("$docker" logs "$(id_of studio)" 2>&1 | grep -Eo 'http://127\.0\.0\.1:[0-9]+/enter\?token=[^ ]+' | tail -1)
    python3 "$here/smoke_ask.py" "$link" studio
}

# kill SERVICE WHAT: in the middle of an answer; WHAT is `kill` (docker kill, docker start) or `crash` (its process is
# killed, and the restart policy starts it).
kill_one() {
    local service=$1 way=$2 id=kill-$1-$2 container began asker status=0 verdict=ok note
    kept >"$scratch/before"
    container=$(id_of "$service")
    ask stream "$id" >"$scratch/stream" 2>"$scratch/stream.err" &
    asker=$!
    for _ in $(seq 600); do
        grep -q began "$scratch/stream" && break
        sleep 0.05
    done
    began=$(now)
    kill -0 "$asker" 2>/dev/null || { row "$way $service" FAILED "the answer was over before the kill"; return; }
    if [ "$way" = kill ]; then
        "$docker" kill --signal KILL "$container" >/dev/null
        "$docker" start "$container" >/dev/null
    else
        kill -9 "$("$docker" inspect --format '{{.State.Pid}}' "$container")"
    fi
    wait "$asker" || status=$?
    local streamed
    streamed=$(tail -1 "$scratch/stream")
    if [ "$service" = gateway ]; then
        # Its connections died with it. The answer continues, and is available under its id.
        ask ready
        note="the stream broke (status $status) after ${#streamed} characters; asked again: "
        [ "$status" = 3 ] || { verdict=FAILED; note+="but it should have broken; "; }
        [[ $reference == "$streamed"* ]] || { verdict=FAILED; note+="what had come was another answer; "; }
        streamed=$(ask whole "$id") || verdict=FAILED
    else
        note="the stream went on: "
        [ "$status" = 0 ] || { verdict=FAILED; note="the stream ended with status $status: "; }
    fi
    [ "$streamed" = "$reference" ] && note+="the whole answer, " || { verdict=FAILED; note+="another answer, "; }
    note+="$(since "$began") after the kill"
    ask ready
    kept >"$scratch/after"
    if [ -s "$scratch/before" ] && [ "$(head -c "$(stat -c %s "$scratch/before")" "$scratch/after" | sha256sum)" = "$(sha256sum <"$scratch/before")" ]; then
        note+="; the $(wc -l <"$scratch/before") events before are there"
    else
        verdict=FAILED
        note+="; EVENTS ARE MISSING"
    fi
    replays >/dev/null || { verdict=FAILED; note+="; a replay differs"; }
    row "$way $service" "$verdict" "$note"
}

# A stop in the middle of an answer waits for its end.
drains() {
    ask stream drained >"$scratch/stream" 2>"$scratch/stream.err" &
    local asker=$!
    for _ in $(seq 600); do
        grep -q began "$scratch/stream" && break
        sleep 0.05
    done
    local whole=1
    kill -0 "$asker" && compose stop && wait "$asker" && [ "$(tail -1 "$scratch/stream")" = "$reference" ] && whole=0
    compose start && ask ready && return "$whole"
}

# The folder is served under its own name.
serves_a_checkpoint() {
    cp -r "$root/configs/demo/checkpoint" "$scratch/my-model" && chmod -R a+rX "$scratch/my-model"
    export MODEL=$scratch/my-model
    down && up && ask chat && ask model my-model
    local status=$?
    unset MODEL
    down && up
    return "$status"
}

# As described in README.md.
survives_a_restore() {
    local mount=${project}_log:/var/lib/dalsegno/log
    kept >"$scratch/before"
    down
    "$docker" run --rm -v "$mount" --entrypoint tar dalsegno -C /var/lib/dalsegno/log -cz . >"$scratch/log.tgz"
    "$docker" volume rm "${project}_log"
    "$docker" run --rm -i -v "$mount" --entrypoint tar dalsegno -C /var/lib/dalsegno/log -xz <"$scratch/log.tgz"
    up
    kept >"$scratch/after"
    [ -s "$scratch/before" ] && cmp "$scratch/before" "$scratch/after" && [ "$(ask whole reference)" = "$reference" ] && replays
}

survives_down_and_up() {
    kept >"$scratch/before"
    down
    up
    kept >"$scratch/after"
    [ -s "$scratch/before" ] && cmp "$scratch/before" "$scratch/after" && [ "$(ask whole reference)" = "$reference" ] && replays
}

finish() {
    local status=$?
    trap - EXIT
    if [ "$status" != 0 ] && [ -n "${compose_command:-}" ]; then
        compose ps >&2 || true
        compose logs --tail 15 >&2 || true
    fi
    if [ -z "${KEEP:-}" ]; then
        [ -z "${compose_command:-}" ] || down --volumes --remove-orphans || true
        [ -z "$engine_pid" ] || { kill "$engine_pid" && wait "$engine_pid"; } 2>/dev/null || true
    fi
    rm -rf "$scratch"
    exit "$status"
}
trap finish EXIT

start_engine
find_base
fetch_wheels
build
find_compose
down --volumes --remove-orphans || die "an earlier try is still there"

began=$(now)
up
row "docker compose up" ok "ready $(since "$began") after the command"
try "OpenAI's chat route, streaming and not" ask chat
try "/generate, a form and JSON" ask generate
try "the published port, from this machine" python3 "$here/smoke_ask.py" "http://127.0.0.1:$PORT" live
try "NATS refuses a wrong token" refuses_strangers
try "nobody is root, nothing is writable" runs_as_nobody
began=$(now)
reference=$(ask whole reference)
row "a long answer, undisturbed" ok "$(since "$began"), ${#reference} characters"
try "the studio, from this machine" shows_requests
for service in nats gateway conductor worker; do
    kill_one "$service" kill
done
kill_one worker crash
kill_one nats crash
try "stopped in the middle of an answer: it ends whole" drains
try "down and up: the log, its answers and its replays" survives_down_and_up
try "the log's volume saved, removed and restored" survives_a_restore
try "a checkpoint of one's own" serves_a_checkpoint

echo
printf '%s\n' "${rows[@]}" | awk -F '|' '{ printf "%-7s %-50s %s\n", $2, $1, $3 }'
exit "$failed"
