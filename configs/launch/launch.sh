# shellcheck shell=bash
# What the scripts of all machines do: read the options, check them and the machine, start `mindspeed-cp train`; on many
# nodes by torchrun.
#
# Sourced by the script of a machine, which has set MACHINE, DEVICES_PER_NODE and RANK_TABLE_VERSIONS.  The variables of
# the ranks are in environment.sh; what needs the settings or JSON is in check.py.

LAUNCH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<HELP
usage: ${0##*/} [OPTIONS] [-- ARGUMENTS OF mindspeed-cp train]

Starts the ranks of one $MACHINE node ($DEVICES_PER_NODE devices) with \`mindspeed-cp train CONFIG\`.
On many nodes run it on each of them, with the same options but --node-rank; under Slurm see slurm.sbatch.

  --config FILE           settings of the training                      (CONFIG; configs/quickstart.yaml)
  --set SECTION.KEY=VALUE one setting replaced; may be repeated
  --device npu|cpu        where ranks compute; cpu: a trial anywhere    (npu)
  --ranks-per-node N      1 to the devices of a node                    ($DEVICES_PER_NODE)
  --nodes N               nodes                                         (NODES; 1)
  --node-rank N           this node, 0 to nodes - 1                     (NODE_RANK; needed for many nodes)
  --master-addr HOST      name or address of node 0                     (MASTER_ADDR; needed for many nodes)
  --master-port PORT      port of node 0 that is free, on all the same  (MASTER_PORT; 29500)
  --interface NAME        the host's network device, such as eth0, for HCCL and gloo
  --log-dir FOLDER        output of every rank, on many nodes           (LOG_DIR; OUTPUT.FOLDER/logs)
  --rank-table FILE       JSON of all devices, for HCCL                 (RANK_TABLE_FILE)
  --connect-timeout S     120 to 7200; until a communicator is made     (HCCL_CONNECT_TIMEOUT; 9/10 of timeout_seconds)
  --exec-timeout S        less than timeout_seconds: what a device
                          waits inside an operation                     (HCCL_EXEC_TIMEOUT; 9/10 of timeout_seconds)
  --buffer-mb MB          of each communicator, twice                   (HCCL_BUFFSIZE; 200)
  --p2p-buffer-mb MB      of each pair's communicator, twice; 1 or more (P2P_HCCL_BUFFSIZE; hccl_buffer_mb, or 20)
  --cpu-affinity CONF     0, 1, 2, or 1,npu0:0-23,...                   (CPU_AFFINITY_CONF; 1)
  --run-id NAME           names the folder of the logs                  (train)
  --cann FILE             CANN's set_env.sh, sourced first
  --python FILE           interpreter of the ranks                      (PYTHON; python3)
  --dry-run               print environment and command, start nothing
  -h, --help

In brackets: the environment variable that says the same, and the default.  Every other variable is in environment.sh
with its reason; what you set before the start is kept.  Bad input: one line, exit code 2.
HELP
}

# refuse SETTING VALUE VALID: one line, exit code 2.
refuse() {
    printf 'error: %s = %s: %s\n' "$1" "${2:-(nothing)}" "$3" >&2
    exit 2
}

# whole SETTING VALUE LOWEST HIGHEST [MORE]: refuse what is no whole number in that range.
whole() {
    if [[ ! $2 =~ ^(0|[1-9][0-9]{0,9})$ ]] || (($2 < $3 || $2 > $4)); then
        refuse "$1" "$2" "must be a whole number from $3 to $4${5:+; $5}"
    fi
}

if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then refuse bash "$BASH_VERSION" "must be 4.4 or newer"; fi

# --- options ----------------------------------------------------------------------------------------------------------

CONFIG=${CONFIG:-${LAUNCH%/*}/quickstart.yaml}
DEVICE=npu
RANKS=$DEVICES_PER_NODE
NODES=${NODES:-1}
NODE_RANK=${NODE_RANK-}
MASTER_ADDR=${MASTER_ADDR-}
MASTER_PORT=${MASTER_PORT:-29500}
INTERFACE=""
LOG_DIR=${LOG_DIR-}
RUN_ID=train
CANN=""
PYTHON=${PYTHON:-python3}
DRY_RUN=0
SETTINGS=() # --set KEY=VALUE ...
REST=()

while (($#)); do
    case $1 in
        -h | --help)
            usage
            exit 0
            ;;
        --dry-run)
            DRY_RUN=1
            shift
            continue
            ;;
        --)
            REST=("${@:2}")
            break
            ;;
        --?*=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}" # --nodes=2 is --nodes 2
            continue
            ;;
    esac
    case $1 in
        --config | --set | --device | --ranks-per-node | --nodes | --node-rank | --master-addr | --master-port) ;;
        --interface | --log-dir | --rank-table | --connect-timeout | --exec-timeout | --buffer-mb | --p2p-buffer-mb) ;;
        --cpu-affinity | --run-id | --cann | --python) ;;
        *) refuse "option" "$1" "there is no such option; ${0##*/} --help lists them" ;;
    esac
    if (($# < 2)) || [[ -z $2 ]]; then refuse "$1" "" "needs a value; see ${0##*/} --help"; fi
    case $1 in
        --config) CONFIG=$2 ;;
        --set) SETTINGS+=(--set "$2") ;;
        --device) DEVICE=$2 ;;
        --ranks-per-node) RANKS=$2 ;;
        --nodes) NODES=$2 ;;
        --node-rank) NODE_RANK=$2 ;;
        --master-addr) MASTER_ADDR=$2 ;;
        --master-port) MASTER_PORT=$2 ;;
        --interface) INTERFACE=$2 ;;
        --log-dir) LOG_DIR=$2 ;;
        --rank-table) export RANK_TABLE_FILE=$2 ;;
        --connect-timeout) export HCCL_CONNECT_TIMEOUT=$2 ;;
        --exec-timeout) export HCCL_EXEC_TIMEOUT=$2 ;;
        --buffer-mb) export HCCL_BUFFSIZE=$2 ;;
        --p2p-buffer-mb) export P2P_HCCL_BUFFSIZE=$2 ;;
        --cpu-affinity) export CPU_AFFINITY_CONF=$2 ;;
        --run-id) RUN_ID=$2 ;;
        --cann) CANN=$2 ;;
        --python) PYTHON=$2 ;;
    esac
    shift 2
done

set -- # CANN's set_env.sh is sourced below, and has no business with our arguments
if [[ $DEVICE != npu && $DEVICE != cpu ]]; then refuse --device "$DEVICE" "must be npu or cpu"; fi
whole --ranks-per-node "$RANKS" 1 "$DEVICES_PER_NODE" "the devices of a node of $MACHINE"
whole --nodes "$NODES" 1 65536
whole --master-port "$MASTER_PORT" 1024 65535
if [[ ! $RUN_ID =~ ^[A-Za-z0-9._-]+$ ]]; then refuse --run-id "$RUN_ID" "must be letters, digits, dots, - and _"; fi
if ((NODES > 1)); then
    if [[ -z $MASTER_ADDR ]]; then refuse --master-addr "" "needed for $NODES nodes: name or address of node 0"; fi
    if [[ -z $NODE_RANK ]]; then refuse --node-rank "" "needed for $NODES nodes: 0 to $((NODES - 1)), another on each"; fi
fi
whole --node-rank "${NODE_RANK:=0}" 0 $((NODES - 1)) "--nodes is $NODES"
for setting in "${SETTINGS[@]}"; do
    if [[ $setting == train.device=* ]]; then refuse --set "$setting" "use --device npu or --device cpu"; fi
done
SETTINGS+=(--set "train.device=$DEVICE")

# --- settings and environment -----------------------------------------------------------------------------------------

if ! command -v "$PYTHON" >/dev/null; then
    refuse --python "$PYTHON" "no such program; activate the environment of mindspeed-cp, or name its python"
fi
facts=$("$PYTHON" "$LAUNCH/check.py" settings "$CONFIG" --ranks-per-node "$RANKS" --nodes "$NODES" \
    --node-rank "$NODE_RANK" "${SETTINGS[@]}") || exit 2
{
    read -r TIMEOUT
    read -r OUTPUT
} <<<"$facts"
: "${LOG_DIR:=$OUTPUT/logs}"
LOGS=$LOG_DIR/$RUN_ID

if [[ $DEVICE == npu ]]; then
    if ((TIMEOUT < 2)); then
        refuse context_parallel_suite.timeout_seconds "$TIMEOUT" "must be at least 2 on npu, to leave HCCL_EXEC_TIMEOUT room"
    fi
    if [[ -n ${RANK_TABLE_FILE-} ]]; then
        RANK_TABLE_FILE=$("$PYTHON" "$LAUNCH/check.py" rank-table "$RANK_TABLE_FILE" --ranks-per-node "$RANKS" \
            --nodes "$NODES" --machine "$MACHINE" --versions "$RANK_TABLE_VERSIONS") || exit 2
        export RANK_TABLE_FILE
    fi
elif [[ -n ${RANK_TABLE_FILE-} ]]; then
    refuse --rank-table "$RANK_TABLE_FILE" "has no meaning with --device cpu; leave it and RANK_TABLE_FILE out"
fi
if [[ -n $CANN ]]; then
    if [[ ! -r $CANN ]]; then refuse --cann "$CANN" "no such file; it is .../ascend-toolkit/set_env.sh of CANN"; fi
    set +eu # it reads variables that need not be there
    # shellcheck source=/dev/null
    source "$CANN"
    set -eu
fi
# shellcheck source=environment.sh
source "$LAUNCH/environment.sh"
if [[ $DEVICE == npu ]]; then
    range() { if [[ -n ${!1-} ]]; then whole "$1" "${!1}" "${@:2}"; fi; }
    range HCCL_CONNECT_TIMEOUT 120 7200 "(--connect-timeout) seconds"
    range HCCL_EXEC_TIMEOUT 1 $((TIMEOUT - 1)) \
        "(--exec-timeout) less than context_parallel_suite.timeout_seconds = $TIMEOUT, so that CANN's log names the rank"
    if ((${HCCL_CONNECT_TIMEOUT:-120} >= TIMEOUT)); then
        printf 'note: HCCL_CONNECT_TIMEOUT = %s is not less than context_parallel_suite.timeout_seconds = %s; %s\n' \
            "${HCCL_CONNECT_TIMEOUT:-120}" "$TIMEOUT" "a rank that is given up may be gone before CANN's log tells why" >&2
    fi
    range HCCL_BUFFSIZE 1 65536 "(--buffer-mb) MB"
    range P2P_HCCL_BUFFSIZE 1 65536 "(--p2p-buffer-mb) MB; with 0 ranks that send over directional groups would wait for ever"
    range HCCL_IF_BASE_PORT 1024 65520
    range TASK_QUEUE_ENABLE 0 2
    range HCCL_WHITELIST_DISABLE 0 1
    range MULTI_STREAM_MEMORY_REUSE 0 3
    range TORCH_HCCL_ASYNC_ERROR_HANDLING 0 3
    if [[ ! ${CPU_AFFINITY_CONF:-0} =~ ^(mode:)?[012](,[a-z0-9_]+:[0-9]+(-[0-9]+)?)*$ ]]; then
        refuse CPU_AFFINITY_CONF "$CPU_AFFINITY_CONF" "(--cpu-affinity) must be 0, 1, 2, or such as 1,npu0:0-23,npu1:24-47"
    fi
fi

# --- the command ------------------------------------------------------------------------------------------------------

TRAIN=(-m mindspeed_cp train "$CONFIG" "${SETTINGS[@]}")
if ((NODES > 1)); then # torchrun starts the ranks, with a file of output for each
    COMMAND=("$PYTHON" -m torch.distributed.run --nnodes "$NODES" --node-rank "$NODE_RANK" --nproc-per-node "$RANKS"
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --log-dir "$LOGS" --tee 3 "${TRAIN[@]}" "${REST[@]}")
else
    COMMAND=("$PYTHON" "${TRAIN[@]}" --nproc "$RANKS" "${REST[@]}")
fi
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE # with them the command would be one rank of another launcher

# quoted WORDS...: on one line, as a shell reads them back.
quoted() {
    local line
    printf -v line ' %q' "$@"
    printf '%s\n' "${line# }"
}

# --- checks of this machine -------------------------------------------------------------------------------------------

# failed SETTING VALUE VALID: shown in a dry run, else the end of the start.
failed() {
    if ((DRY_RUN)); then
        printf '# this machine: %s = %s: %s\n' "$1" "${2:-(nothing)}" "$3"
    else
        refuse "$@"
    fi
}

check_machine() {
    local findings setting value valid
    findings=$("$PYTHON" "$LAUNCH/check.py" machine --device "$DEVICE" --ranks-per-node "$RANKS" \
        --node-rank "$NODE_RANK" --nodes "$NODES" --master-port "$MASTER_PORT") || exit 2
    while IFS=$'\t' read -r setting value valid; do
        if [[ -n $setting ]]; then failed "$setting" "$value" "$valid"; fi
    done <<<"$findings"
}

if ((DRY_RUN)); then
    printf '# %s, node %s of %s: ranks %s to %s of %s, on %s\n' "$MACHINE" "$NODE_RANK" "$NODES" \
        $((NODE_RANK * RANKS)) $((NODE_RANK * RANKS + RANKS - 1)) $((NODES * RANKS)) "$DEVICE"
    for name in "${SET_NAMES[@]}"; do
        if [[ -v $name ]]; then
            printf 'export %s=%q  # %s\n' "$name" "${!name}" "${SET_BY[$name]}"
        else
            printf 'unset %s  # %s\n' "$name" "${SET_BY[$name]}"
        fi
    done
    check_machine
    quoted "${COMMAND[@]}"
    exit 0
fi
check_machine
if ((NODES > 1)); then
    if ! mkdir -p "$LOGS" || [[ ! -w $LOGS ]]; then refuse --log-dir "$LOG_DIR" "must be a folder that can be written to"; fi
    printf 'output of every rank: %s\n' "$LOGS" >&2
fi
exec "${COMMAND[@]}"
