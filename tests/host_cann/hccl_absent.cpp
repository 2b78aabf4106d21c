// Stand-in for HCCL: entry points of torch_npu's optional features that the stand-in does not have, and says so.
#include "hccl/hccl.h"
#include "hccl_work.h"

using namespace host_hccl;

static void not_there(const char* what) { throw Failure(E_NOT_SUPPORT, std::string("the stand-in has no ") + what); }

extern "C" {

HcclResult HcclCommSuspend(HcclComm) {
    return guarded("HcclCommSuspend", [] { not_there("suspending"); });
}
HcclResult HcclCommResume(HcclComm) {
    return guarded("HcclCommResume", [] { not_there("resuming"); });
}
HcclResult HcclCommSetMemoryRange(HcclComm, void*, size_t, size_t, uint64_t) {
    return guarded("HcclCommSetMemoryRange", [] { not_there("zero-copy memory; unset TORCH_HCCL_ZERO_COPY"); });
}
HcclResult HcclCommUnsetMemoryRange(HcclComm, void*) {
    return guarded("HcclCommUnsetMemoryRange", [] { not_there("zero-copy memory"); });
}
HcclResult HcclCommActivateCommMemory(HcclComm, void*, size_t, size_t, aclrtDrvMemHandle, uint64_t) {
    return guarded("HcclCommActivateCommMemory", [] { not_there("zero-copy memory"); });
}
HcclResult HcclCommDeactivateCommMemory(HcclComm, void*) {
    return guarded("HcclCommDeactivateCommMemory", [] { not_there("zero-copy memory"); });
}
HcclResult HcclCommWorkingDevNicSet(HcclComm, uint32_t*, bool*, uint32_t) {
    return guarded("HcclCommWorkingDevNicSet", [] { not_there("spare network cards"); });
}
HcclResult HcclCommRegister(HcclComm, void*, uint64_t, void**, uint32_t) {
    return guarded("HcclCommRegister", [] { not_there("memory windows"); });
}
HcclResult HcclCommDeregister(HcclComm, void*) {
    return guarded("HcclCommDeregister", [] { not_there("memory windows"); });
}
HcclResult HcclCommExchangeMem(HcclComm, void*, uint32_t*, uint32_t) {
    return guarded("HcclCommExchangeMem", [] { not_there("memory windows"); });
}
HcclResult HcclCommSymWinRegister(HcclComm, void*, uint64_t, void**, uint32_t) {
    return guarded("HcclCommSymWinRegister", [] { not_there("memory windows"); });
}
HcclResult HcclCommSymWinDeregister(void*) {
    return guarded("HcclCommSymWinDeregister", [] { not_there("memory windows"); });
}

HcclResult HcommMemAlloc(void**, uint64_t) {
    return guarded("HcommMemAlloc", [] { not_there("memory windows"); });
}
HcclResult HcommMemFree(void*) {
    return guarded("HcommMemFree", [] { not_there("memory windows"); });
}

HcclResult HcclCommInitAll(uint32_t, int32_t*, HcclComm*) {
    return guarded("HcclCommInitAll",
                   [] { not_there("communicator of several devices in one process; start one process per device"); });
}

}  // extern "C"
