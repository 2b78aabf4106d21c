# shellcheck shell=bash
# The environment of ranks on Ascend NPUs, with a reason and a source for each variable:
#
#     source /usr/local/Ascend/ascend-toolkit/set_env.sh
#     INTERFACE=eth0 source configs/launch/environment.sh     # INTERFACE: of the private network between nodes, if any
#
# A variable that is set before keeps its value.  Nothing here was tuned on a device.
#
# Sources:
#   CANN     "Environment Variable Reference", hiascend.com/document, CANN 8.0 to 8.5: a page for each variable
#   Adapter  "Environment Variables", hiascend.com/document, Ascend Extension for PyTorch 6.0 to 7.2, the same
#   wheel    read in torch-npu 2.13.0
#   torch    read in torch 2.13.0

# give NAME VALUE: export NAME with VALUE, unless it is set.
give() {
    if [[ ! -v $1 ]]; then export "$1=$2"; else export "${1?}"; fi
}

# Whoever needs torch_npu imports it by name: the ranks do.  Without this `import torch` loads
# it everywhere, and fails altogether where torch-npu is installed and CANN is not (wheel; torch/__init__.py).
give TORCH_DEVICE_BACKEND_AUTOLOAD 0

# Libraries that read it once take one thread, as under torchrun (torch, distributed/run.py).  A rank then takes
# train.threads_per_rank threads, or its share of the cores.
give OMP_NUM_THREADS 1

if [[ -n ${INTERFACE-} ]]; then
    # gloo joins the ranks on the host, on npu as well.  By itself it takes whatever address the host's name resolves to,
    # which need not be one that other nodes reach (torch, ProcessGroupGloo).  Whoever reaches gloo's ports or the store
    # of rank 0 could take part, so name the device of a private network.
    give GLOO_SOCKET_IFNAME "$INTERFACE"
    # The host's network device through which HCCL finds the other nodes; without it HCCL chooses one, which need not be
    # the one that leads there (CANN).  HCCL_IF_IP says the same by address.
    give HCCL_SOCKET_IFNAME "$INTERFACE"
fi

# 1: the watchdog ends a rank whose operation timed out or failed; 0: it hangs; 2, 3: as in NCCL (Adapter; wheel).
# `mindspeed-cp train` itself sets HCCL_CONNECT_TIMEOUT and HCCL_EXEC_TIMEOUT, by context_parallel_suite.timeout_seconds.
give TORCH_HCCL_ASYNC_ERROR_HANDLING 1

# MB of a communicator's buffer, of which it has two; 200 is CANN's default, set so that the log says it (CANN).  Where
# context_parallel_suite.hccl_buffer_mb is given, that goes before it.
give HCCL_BUFFSIZE 200

# First of the 16 ports of the host that HCCL takes; 1024 to 65520 (CANN).  Two jobs on one node need two ranges, and
# the system should keep them free: sysctl -w net.ipv4.ip_local_reserved_ports=60000-60015.
give HCCL_IF_BASE_PORT 60000

# 1: the addresses of the nodes are not checked against a list of allowed ones, which would have to be made first
# (CANN).
give HCCL_WHITELIST_DISABLE 1

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
