# shellcheck shell=bash disable=SC2034
# The environment of a rank: every variable that the launch scripts set, with its reason and its source.
#
# Sourced by launch.sh, which has set DEVICE, NODES, TIMEOUT (context_parallel_suite.timeout_seconds, whole seconds) and
# INTERFACE ("" if none was named).  A variable that is set before the start keeps its value, and one that is set to
# nothing ("NAME= atlas_a3.sh ...") is left to the defaults of torch-npu and CANN.  Nothing here was tuned on a device.
#
# Sources:
#   CANN     "Environment Variable Reference", hiascend.com/document, CANN 8.0 to 8.5: a page for each variable
#   Adapter  "Environment Variables", hiascend.com/document, Ascend Extension for PyTorch 6.0 to 7.2, the same
#   wheel    read in torch-npu 2.13.0
#   torch    read in torch 2.13.0

SET_NAMES=()         # in the order in which they are printed
declare -A SET_BY=() # name -> "default", "yours", or "yours: not set"

# give NAME VALUE: export NAME with VALUE, unless the caller has given it.
give() {
    local name=$1 value=$2
    SET_NAMES+=("$name")
    if [[ ! -v $name ]]; then
        SET_BY[$name]="default"
        export "$name=$value"
    elif [[ -z ${!name} ]]; then
        SET_BY[$name]="yours: not set"
        unset "$name"
    else
        SET_BY[$name]="yours"
        export "${name?}"
    fi
}

# take NAME...: pass on what the caller has given, if anything; these have no default that is right everywhere.
take() {
    local name
    for name in "$@"; do
        if [[ -n ${!name-} && ! -v SET_BY[$name] ]]; then give "$name" ""; fi
    done
}

# --- on every device --------------------------------------------------------------------------------------------------

# Whoever needs torch_npu imports it by name: the ranks do.  Without this `import torch` loads
# it everywhere, and fails altogether where torch-npu is installed and CANN is not (wheel; torch/__init__.py).
give TORCH_DEVICE_BACKEND_AUTOLOAD 0

# Libraries that read it once take one thread, as under torchrun (torch, distributed/run.py).  A rank then takes
# train.threads_per_rank threads, or its share of the cores.
give OMP_NUM_THREADS 1

# gloo joins the ranks on the host, on npu as well.  By itself it takes whatever address the host's name resolves to,
# which need not be one that other nodes reach (torch, ProcessGroupGloo).  On one node the loop-back does.  Whoever
# reaches gloo's ports or the store of rank 0 could take part, so name the device of a private network.
if [[ -n $INTERFACE ]]; then
    give GLOO_SOCKET_IFNAME "$INTERFACE"
elif ((NODES == 1)) && [[ $OSTYPE == linux* ]]; then
    give GLOO_SOCKET_IFNAME lo
else
    take GLOO_SOCKET_IFNAME
fi

if [[ $DEVICE == cpu ]]; then return 0; fi

# --- HCCL: time-outs --------------------------------------------------------------------------------------------------

# Both have to end before PyTorch's watchdog does, whose time-out is timeout_seconds: otherwise the process is gone
# before CANN has written into its log which rank it was waiting for (Adapter: HCCL_ASYNC_ERROR_HANDLING; and torch-npu
# itself warns that "The plog may not be recorded"; wheel).  So a cluster on which nodes come late wants a longer
# timeout_seconds.
sooner=$((TIMEOUT * 9 / 10))

# Seconds for the sockets of a communicator: 120 by default, 120 to 7200, and 20 more to tell why (CANN).  The first
# ones are made when the slowest node is there, with its imports, its data and its checkpoint; for rank tables torch-npu
# advises 300 or more (wheel).
give HCCL_CONNECT_TIMEOUT $((sooner < 120 ? 120 : sooner > 7200 ? 7200 : sooner))

# Seconds that a device waits for another inside an operation: 1836 by default, 0 is for ever (CANN; for its relation to
# timeout_seconds wheel).
give HCCL_EXEC_TIMEOUT "$sooner"

# 1: the watchdog ends a rank whose operation timed out or failed; 0: it hangs; 2, 3: as in NCCL (Adapter; wheel).
give TORCH_HCCL_ASYNC_ERROR_HANDLING 1

# --- HCCL: memory and network -----------------------------------------------------------------------------------------

# MB of a communicator's buffer, of which it has two; 200 is CANN's default, set so that the log says it (CANN).  Where
# context_parallel_suite.hccl_buffer_mb is given, that goes before it.
give HCCL_BUFFSIZE 200

# MB of the buffers of the communicators of one pair, which isend and irecv make, and with them directional groups;
# torch-npu tells HCCL nothing else about those (Adapter; wheel).  Without it hccl_buffer_mb holds for them too, else 20.  0 would make
# pairs use the group's communicator, for which all ranks have to come at once: with directional groups three ranks wait
# for ever.
take P2P_HCCL_BUFFSIZE

# First of the 16 ports of the host that HCCL takes; 1024 to 65520 (CANN).  Two jobs on one node need two ranges, and
# the system should keep them free: sysctl -w net.ipv4.ip_local_reserved_ports=60000-60015.
give HCCL_IF_BASE_PORT 60000

# 1: the addresses of the nodes are not checked against a list of allowed ones, which would have to be made first
# (CANN).
give HCCL_WHITELIST_DISABLE 1

# The host's network device through which HCCL finds the other nodes; without it HCCL chooses one, which need not be the
# one that leads there (CANN).  HCCL_IF_IP says the same by address.
if [[ -n $INTERFACE ]]; then give HCCL_SOCKET_IFNAME "$INTERFACE"; fi
take HCCL_SOCKET_IFNAME HCCL_IF_IP HCCL_SOCKET_FAMILY HCCL_HOST_SOCKET_PORT_RANGE HCCL_LOGIC_SUPERPOD_ID

# The devices of all ranks, in place of finding each other (Adapter); launch.sh has checked it.
take RANK_TABLE_FILE

# --- torch-npu on the host --------------------------------------------------------------------------------------------

# Operators are queued by another thread than Python's: 0 no, 1 yes, 2 more of the work there (Adapter).  1 is
# torch-npu's own default; 2 is what MindSpeed-RL sets in configs/envs/runtime_env.yaml.  Neither was ever run here, and
# with 2 an operator's refusal comes later and without its call.  ASCEND_LAUNCH_BLOCKING=1 switches it off.
give TASK_QUEUE_ENABLE 1

# Binds the threads of each rank to the cores of its device: 0 no, 1 all of them to one range, 2 each to a core; also
# "1,npu0:0-23,..." (Adapter).  Where something else has bound the process already, Slurm for instance, it stays as it
# is.
give CPU_AFFINITY_CONF 1

# Packed batches have tensors of ever other sizes; blocks that can grow keep them from splitting the memory up
# (Adapter).  Never run here: the stand-in for CANN has no virtual memory to grow them in.
give PYTORCH_NPU_ALLOC_CONF expandable_segments:True

# What a site may need and nothing here decides.  (CUDA_DEVICE_MAX_CONNECTIONS is absent: torch-npu does not know it,
# and Megatron only asks for it in a warning about speed on CUDA.)
take ASCEND_RT_VISIBLE_DEVICES HCCL_ALGO HCCL_DETERMINISTIC HCCL_OP_EXPANSION_MODE HCCL_EVENT_TIMEOUT
take HCCL_RDMA_TC HCCL_RDMA_SL HCCL_RDMA_TIMEOUT MULTI_STREAM_MEMORY_REUSE ASCEND_LAUNCH_BLOCKING ASCEND_GLOBAL_LOG_LEVEL
take ASCEND_PROCESS_LOG_PATH TORCH_HCCL_DESYNC_DEBUG INF_NAN_MODE_ENABLE
